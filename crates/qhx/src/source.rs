//! What models are made of on a disk: bundles and checkpoints, told by what a path holds.

use crate::{Error, Places, builtin};
use qhx_bundle::{Bundle, BundleError, OpenOptions, is_target_manifest, manifest::MANIFEST_FILE, manifest_in};
use qhx_runtime::Cancel;
use std::{
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
};

/// What a reference turned out to be.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Source {
    /// The model of [`builtin`].
    Builtin,
    /// A bundle's folder or an arch folder of it, or a manifest in one.
    Bundle(PathBuf),
    /// A checkpoint, which is forged before it can run.
    Checkpoint(Checkpoint),
}

/// A checkpoint: what [`forge`](crate::forge) makes bundles of.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Checkpoint {
    /// A Hugging Face folder or a GGUF file.
    pub path: PathBuf,
    /// What people call it; absent: by the path.
    pub name: Option<String>,
}

impl Checkpoint {
    pub(crate) fn at(path: &Path) -> Source {
        Source::Checkpoint(Self { path: path.to_path_buf(), name: None })
    }
}

impl Source {
    /// The same checkpoint under a name.
    pub(crate) fn named(self, name: &str) -> Self {
        match self {
            Self::Checkpoint(checkpoint) => Self::Checkpoint(Checkpoint { name: Some(name.to_owned()), ..checkpoint }),
            other => other,
        }
    }
}

/// What a path holds, by a first look; `None` where it is no model.
pub(crate) fn at_path(path: &Path) -> Option<Source> {
    if builtin::is_meant(path) {
        return Some(Source::Builtin);
    }
    let about = fs::metadata(path).ok()?;
    if about.is_dir() {
        return match (manifest_in(path).is_some(), path.join("config.json").is_file()) {
            (true, _) => Some(Source::Bundle(path.to_path_buf())),
            (_, true) => Some(Checkpoint::at(path)),
            _ => None,
        };
    }
    if path.file_name().is_some_and(|name| name == MANIFEST_FILE) || is_target_manifest(path) {
        return Some(Source::Bundle(path.to_path_buf()));
    }
    let mut magic = [0; 4];
    // Only a plain file is looked into: reading a pipe would take what it holds.
    let is_gguf = about.is_file() && File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && &magic == b"GGUF";
    is_gguf.then(|| Checkpoint::at(path))
}

/// Opens the bundle at a path; anything else is an error.
pub(crate) fn bundle_at(path: &Path, places: &Places, cancel: &Cancel) -> Result<Bundle, Error> {
    if builtin::is_meant(path) {
        return builtin::open();
    }
    let options = OpenOptions { cache_dir: places.cache.clone(), cancel: Some(cancel.shared()), ..OpenOptions::default() };
    Bundle::open_with(path, &options).map_err(|error| match (&error, at_path(path)) {
        (BundleError::NotABundle { .. }, Some(Source::Checkpoint(_))) => Error::NotForged { path: path.to_path_buf() },
        _ => error.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_told_by_what_they_hold() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("a.gguf"), b"GGUF\x03\0\0\0").unwrap();
        fs::write(at("b.gguf"), b"GG").unwrap();
        assert_eq!(at_path(&at("a.gguf")), Some(Checkpoint::at(&at("a.gguf"))));
        assert_eq!([at_path(&at("b.gguf")), at_path(&at("none")), at_path(folder.path())], [None, None, None]);
        fs::write(at("config.json"), "{}").unwrap();
        assert_eq!(at_path(folder.path()), Some(Checkpoint::at(folder.path())));
        fs::write(at("qhx.json"), "{}").unwrap();
        assert_eq!(at_path(folder.path()), Some(Source::Bundle(folder.path().into())));
        assert_eq!(at_path(&at("qhx.json")), Some(Source::Bundle(at("qhx.json"))));
    }
}

//! What a model reference names: a bundle, a Hugging Face folder, a GGUF file, the built-in model, or a repository in the Hugging Face cache.

use crate::{Error, NotFound, Places, builtin, error::Found, hub, names::suggestions};
use qhx_bundle::{is_target_manifest, manifest::MANIFEST_FILE, manifest_in};
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
    fn at(path: &Path) -> Source {
        Source::Checkpoint(Self { path: path.to_path_buf(), name: None })
    }
}

impl Source {
    /// Finds out what `reference` names. What exists at that path comes before the same name elsewhere.
    pub fn find(reference: impl AsRef<Path>, places: &Places) -> Result<Self, Error> {
        let reference = reference.as_ref();
        if let Some(source) = at_path(reference) {
            return Ok(source);
        }
        let missing = |found, hub| {
            let near = suggestions(reference, places);
            Err(Error::NotFound(Box::new(NotFound { reference: reference.to_path_buf(), found, near, hub })))
        };
        match (hub::repository(reference).filter(|_| !reference.exists()), &places.hub) {
            (Some(repository), Some(hub)) => {
                let folder = hub::folder(hub, repository);
                let Some(snapshot) = hub::snapshot(&folder) else { return missing(Found::Nothing, Some(folder)) };
                match in_snapshot(&snapshot) {
                    Ok(source) => Ok(source.named(repository.1)),
                    Err(found) => missing(found, Some(snapshot)),
                }
            }
            _ => missing(Found::at(reference), None),
        }
    }

    fn named(self, name: &str) -> Self {
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

/// The model in a snapshot of a repository: the folder itself, or the one GGUF file in it.
fn in_snapshot(snapshot: &Path) -> Result<Source, Found> {
    if let Some(source) = at_path(snapshot) {
        return Ok(source);
    }
    let files = fs::read_dir(snapshot).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut gguf: Vec<PathBuf> = files.filter(|path| path.extension().is_some_and(|ending| ending == "gguf")).collect();
    gguf.sort();
    match &gguf[..] {
        [file] => at_path(file).ok_or(Found::File),
        [] => Err(Found::Folder),
        _ => Err(Found::SeveralGguf(gguf)),
    }
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

    #[test]
    fn repositories_are_found_in_the_hub_and_missed_with_the_place() {
        let hub = tempfile::tempdir().unwrap();
        let places = Places::none().with_hub(hub.path().to_path_buf());
        let find = |reference: &str| Source::find(reference, &places);
        let error = find("some-org/some-name").unwrap_err().to_string();
        assert!(error.contains("there is no model at some-org/some-name") && error.contains("models--some-org--some-name"), "{error}");
        assert!(error.contains("does not download"), "{error}");
        assert!(!Source::find("some-org/some-name", &Places::none()).unwrap_err().to_string().contains("Hugging Face cache"));

        let snapshot = hub.path().join("models--some-org--some-name/snapshots/0123abc");
        fs::create_dir_all(&snapshot).unwrap();
        assert!(find("some-org/some-name").unwrap_err().to_string().contains("a folder with neither"));
        fs::write(snapshot.join("a.gguf"), b"GGUF").unwrap();
        let found = find("some-org/some-name").unwrap();
        assert_eq!(found, Checkpoint::at(&snapshot.join("a.gguf")).named("some-name"));
        fs::write(snapshot.join("b.gguf"), b"GGUF").unwrap();
        let error = find("some-org/some-name").unwrap_err().to_string();
        assert!(error.contains("a.gguf") && error.contains("b.gguf"), "{error}");
        fs::write(snapshot.join("config.json"), "{}").unwrap();
        assert_eq!(find("some-org/some-name").unwrap(), Checkpoint::at(&snapshot).named("some-name"));
    }
}

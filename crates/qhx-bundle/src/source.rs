//! Where a bundle's files come from: a folder, or memory (a model built into a program).
//!
//! Links inside a bundle may point to other files of the same bundle; a link that leads out is refused, as is anything that is not a plain file.

use crate::{BundlePath, Digest, map::map, verified::Identity};
use qhx_ir::{ALIGNMENT, AlignedBytes, Bytes};
use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read, Seek},
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

/// The files of a bundle, by path.
pub(crate) enum Source {
    /// A folder, links resolved.
    Folder(PathBuf),
    /// Files in memory.
    Memory(BTreeMap<BundlePath, Bytes>),
}

/// A file of a bundle, ready to read: all that follows speaks of the very file that was looked at here.
pub(crate) enum Opened {
    File { file: File, identity: Identity },
    Memory(Bytes),
}

impl Source {
    /// The folder at `path`.
    pub(crate) fn folder(path: &Path) -> io::Result<Self> {
        Ok(Self::Folder(path.canonicalize()?))
    }

    /// Opens a file; the error says why it is not one of this bundle's.
    pub(crate) fn open(&self, path: &BundlePath) -> Result<Opened, String> {
        match self {
            Self::Memory(files) => files.get(path).cloned().map(Opened::Memory).ok_or_else(|| "is missing".into()),
            Self::Folder(root) => open_inside(root, path),
        }
    }
}

fn open_inside(root: &Path, path: &BundlePath) -> Result<Opened, String> {
    let told = |e: io::Error| match e.kind() {
        io::ErrorKind::NotFound => "is missing".into(),
        _ => format!("cannot be read: {e}"),
    };
    let place = root.join(path.to_relative()).canonicalize().map_err(told)?;
    if !place.starts_with(root) {
        return Err(format!("is a link to {}, outside the bundle; replace the link by the file itself", place.display()));
    }
    // Asked before opening: opening a pipe would wait for its writer.
    if !fs::metadata(&place).map_err(told)?.is_file() {
        return Err("is not a plain file".into());
    }
    let file = File::open(&place).map_err(told)?;
    let identity = Identity::of(&file.metadata().map_err(told)?, &place);
    Ok(Opened::File { file, identity })
}

impl Opened {
    /// Length in bytes.
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::File { identity, .. } => identity.size,
            Self::Memory(bytes) => bytes.len() as u64,
        }
    }

    /// Which file it is, where files have an identity.
    pub(crate) fn identity(&self) -> Option<&Identity> {
        match self {
            Self::File { identity, .. } => Some(identity),
            Self::Memory(_) => None,
        }
    }

    /// Whether the file is still the one that was opened.
    pub(crate) fn is_unchanged(&self) -> bool {
        match self {
            Self::File { file, identity } => file.metadata().is_ok_and(|now| identity.is_still(&now)),
            Self::Memory(_) => true,
        }
    }

    /// The file's sum.
    pub(crate) fn sum(&self, cancel: Option<&AtomicBool>) -> io::Result<Digest> {
        match self {
            Self::File { file, .. } => {
                let mut file = file;
                file.rewind()?;
                Digest::of_reader(file, cancel).map(|(sum, _)| sum)
            }
            Self::Memory(bytes) => Digest::of_reader(&**bytes, cancel).map(|(sum, _)| sum),
        }
    }

    /// A copy of the content. The caller has compared the length with what it expects.
    pub(crate) fn read(&self) -> io::Result<Vec<u8>> {
        match self {
            Self::File { file, identity } => {
                let mut file = file;
                let mut content = Vec::new();
                file.rewind()?;
                // One byte more than expected tells a file that grew meanwhile.
                file.take(identity.size.saturating_add(1)).read_to_end(&mut content)?;
                Ok(content)
            }
            Self::Memory(bytes) => Ok(bytes.to_vec()),
        }
    }

    /// The content without copying it, aligned to [`ALIGNMENT`].
    pub(crate) fn map(&self) -> io::Result<Bytes> {
        match self {
            Self::File { file, .. } => map(file),
            Self::Memory(bytes) if bytes.as_ptr() as usize % ALIGNMENT == 0 => Ok(bytes.clone()),
            Self::Memory(bytes) => Ok(AlignedBytes::copy_of(bytes).into()),
        }
    }
}

//! Where a bundle's files come from: a folder, or memory (a model built into a program).
//!
//! Links inside a bundle may point to other files of the same bundle; a link that leads out is refused, as is anything that is not a regular file.

use crate::{
    BundlePath, Digest,
    files::{Identity, ReadError, open_inside},
    map::map,
};
use qhx_ir::{ALIGNMENT, AlignedBytes, Bytes};
use std::{
    collections::BTreeMap,
    fs::File,
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
    File { file: File, place: PathBuf, identity: Identity },
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
            Self::Folder(root) => open_file(root, path),
        }
    }
}

fn open_file(root: &Path, path: &BundlePath) -> Result<Opened, String> {
    let told = |error: ReadError| if error.is_missing() { "is missing".into() } else { error.reason() };
    let (file, place) = open_inside(root, path).map_err(told)?;
    let about = file.metadata().map_err(|e| format!("cannot be read: {e}"))?;
    let identity = Identity::of(&about, &place);
    Ok(Opened::File { file, place, identity })
}

impl Opened {
    /// Length in bytes.
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::File { identity, .. } => identity.size(),
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
            Self::File { file, place, identity } => file.metadata().is_ok_and(|now| *identity == Identity::of(&now, place)),
            Self::Memory(_) => true,
        }
    }

    /// The file's checksum.
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
            Self::File { file, identity, .. } => {
                let mut file = file;
                let mut content = Vec::new();
                file.rewind()?;
                // One byte more than expected tells a file that grew meanwhile.
                file.take(identity.size().saturating_add(1)).read_to_end(&mut content)?;
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

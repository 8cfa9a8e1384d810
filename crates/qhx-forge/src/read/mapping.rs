//! A file mapped into memory: the one place of the readers that needs `unsafe`.
//!
//! A mapping reads like a byte slice, and the pages of a range can be given back to the system once they are no longer needed, which
//! bounds the memory of a whole forge run by what is in use at one time. Bytes in memory serve the same way, for tests.
#![allow(unsafe_code)] // memory mapping

use super::ReadError;
use qhx_bundle::files;
use std::{
    fmt,
    ops::Range,
    path::{Path, PathBuf},
};

/// The bytes of one file, read-only.
pub struct Mapping {
    path: PathBuf,
    backing: Backing,
}

enum Backing {
    Mapped(memmap2::Mmap),
    Owned(Vec<u8>),
}

impl Mapping {
    /// Maps a regular file. Nothing is read yet.
    ///
    /// The file must not be shortened or rewritten by someone else while it is mapped: the system answers an access behind the new end
    /// of the file with a signal. Checkpoints are written once and then only read, so this is not guarded against.
    pub fn open(path: &Path) -> Result<Self, ReadError> {
        let io = |source| ReadError::Io { path: path.to_path_buf(), source };
        let file = files::open(path).map_err(ReadError::of_file)?;
        let backing = match file.metadata().map_err(io)?.len() {
            0 => Backing::Owned(Vec::new()), // an empty file cannot be mapped everywhere
            // SAFETY: the mapping is read-only and its length is fixed now; all accesses are bounded by it. See above for what happens when
            // the file is cut by others.
            _ => Backing::Mapped(unsafe { memmap2::Mmap::map(&file) }.map_err(io)?),
        };
        Ok(Self { path: path.to_path_buf(), backing })
    }

    /// Bytes in memory that stand in for a file of this name.
    pub fn from_bytes(name: impl Into<PathBuf>, bytes: Vec<u8>) -> Self {
        Self { path: name.into(), backing: Backing::Owned(bytes) }
    }

    /// The file's path, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All bytes.
    pub fn bytes(&self) -> &[u8] {
        match &self.backing {
            Backing::Mapped(map) => map,
            Backing::Owned(bytes) => bytes,
        }
    }

    /// Tells the system that these bytes are not needed for now. They can still be read: they come from the file again.
    pub fn release(&self, range: Range<usize>) {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        match &self.backing {
            Backing::Mapped(map) if range.start < range.end && range.end <= map.len() => {
                // SAFETY: for a shared, read-only mapping of a file the pages are only dropped and are read from the file again at the next
                // access: no one can see other bytes than before. The range lies inside the mapping.
                // A refusal only means that the pages stay, which is harmless.
                let _ = unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, range.start, range.len()) };
            }
            _ => {}
        }
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        let _ = range;
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mapping({}, {} bytes)", self.path.display(), self.bytes().len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_bytes_can_be_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let content: Vec<u8> = (0..100_000u32).map(|i| i as u8).collect();
        std::fs::write(&path, &content).unwrap();
        let mapping = Mapping::open(&path).unwrap();
        assert_eq!(mapping.bytes(), content);
        mapping.release(10..90_000);
        mapping.release(90_000..200_000); // leaves the file: ignored
        assert_eq!(mapping.bytes(), content);
    }

    #[test]
    fn odd_files() {
        let folder = tempfile::tempdir().unwrap();
        let empty = folder.path().join("empty");
        std::fs::write(&empty, b"").unwrap();
        assert!(Mapping::open(&empty).unwrap().bytes().is_empty());
        assert!(Mapping::open(folder.path()).unwrap_err().to_string().contains("not a regular file"));
        let missing = Mapping::open(&folder.path().join("none")).unwrap_err().to_string();
        assert!(missing.starts_with("cannot read ") && missing.contains("none"), "{missing}");
    }
}

//! Files, read whole and within a limit.

use super::MediaProblem;
use qhx_bundle::files::{ReadError, read_given};
use std::{io, path::Path};

/// All bytes of a file that has at least one and at most `limit`.
pub(super) fn read(path: &Path, limit: u64) -> Result<Vec<u8>, MediaProblem> {
    let bytes = read_given(path, limit).map_err(|error| match error {
        ReadError::Io { source, .. } => MediaProblem::Read(source),
        ReadError::TooLarge { size, limit, .. } => MediaProblem::FileTooBig { size, limit },
        ReadError::NotRegular { .. } | ReadError::Outside { .. } => MediaProblem::Read(io::Error::other(format!("it {}", error.reason()))),
    })?;
    check_length(&bytes, limit)?;
    Ok(bytes)
}

/// The same limits for bytes that are in memory already.
pub(super) fn check_length(bytes: &[u8], limit: u64) -> Result<(), MediaProblem> {
    match bytes.len() as u64 {
        0 => Err(MediaProblem::NoBytes),
        length if length > limit => Err(MediaProblem::FileTooBig { size: Some(length), limit }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_hold_for_files_folders_and_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("five.bin");
        std::fs::write(&path, [1, 2, 3, 4, 5]).expect("written");
        assert_eq!(read(&path, 5).expect("within the limit"), [1, 2, 3, 4, 5]);
        assert!(matches!(read(&path, 4), Err(MediaProblem::FileTooBig { size: Some(5), limit: 4 })));
        std::fs::write(&path, []).expect("written");
        assert!(matches!(read(&path, 4), Err(MediaProblem::NoBytes)));
        assert!(matches!(read(folder.path(), 4 << 20), Err(MediaProblem::Read(_))));
        assert!(matches!(read(&folder.path().join("none"), 4), Err(MediaProblem::Read(_))));
        assert!(matches!(check_length(&[0; 5], 4), Err(MediaProblem::FileTooBig { .. })));
    }
}

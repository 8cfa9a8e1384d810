//! Files, read whole and within a limit.

use super::MediaProblem;
use std::{fs::File, io::Read, path::Path};

/// All bytes of a file that has at least one and at most `limit`.
pub(super) fn read(path: &Path, limit: u64) -> Result<Vec<u8>, MediaProblem> {
    let file = File::open(path).map_err(MediaProblem::Read)?;
    let length = file.metadata().map_err(MediaProblem::Read)?.len();
    if length > limit {
        return Err(MediaProblem::FileTooBig { limit });
    }
    // What is no ordinary file (a pipe) has no length of its own: the limit holds for what arrives, too.
    let mut bytes = Vec::with_capacity(length as usize);
    file.take(limit + 1).read_to_end(&mut bytes).map_err(MediaProblem::Read)?;
    check_length(&bytes, limit)?;
    Ok(bytes)
}

/// The same limits for bytes that are in memory already.
pub(super) fn check_length(bytes: &[u8], limit: u64) -> Result<(), MediaProblem> {
    match bytes.len() as u64 {
        0 => Err(MediaProblem::NoBytes),
        length if length > limit => Err(MediaProblem::FileTooBig { limit }),
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
        assert!(matches!(read(&path, 4), Err(MediaProblem::FileTooBig { limit: 4 })));
        std::fs::write(&path, []).expect("written");
        assert!(matches!(read(&path, 4), Err(MediaProblem::NoBytes)));
        assert!(matches!(read(folder.path(), 4 << 20), Err(MediaProblem::Read(_))));
        assert!(matches!(read(&folder.path().join("none"), 4), Err(MediaProblem::Read(_))));
        assert!(matches!(check_length(&[0; 5], 4), Err(MediaProblem::FileTooBig { .. })));
    }
}

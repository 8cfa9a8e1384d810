//! Which large files were found whole before, so that loading a model twice does not hash it twice.
//!
//! The memory is a small text file in the user's cache: a line for each file identity and checksum. It is a convenience: whatever is wrong with
//! it, the answer is to hash again.

use crate::{
    Digest,
    files::{self, Identity, no_links},
};
use std::{
    collections::HashSet,
    fs::{self, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
    time::SystemTime,
};

const FILE: &str = "verified.txt";
/// Beyond this many bytes the older lines are forgotten, up to half of it.
const MAX_BYTES: u64 = 1 << 20;

/// The files that were found whole.
pub(crate) struct Verified {
    folder: Option<PathBuf>,
    lines: HashSet<String>,
}

impl Verified {
    /// What `folder` remembers; nothing where it cannot be read.
    pub(crate) fn load(folder: Option<PathBuf>) -> Self {
        // Appending keeps the file below this but for a few lines.
        let read = |folder: &PathBuf| String::from_utf8(files::read(&folder.join(FILE), 2 * MAX_BYTES).ok()?).ok();
        let text = folder.as_ref().and_then(read).unwrap_or_default();
        Self { folder, lines: text.lines().map(str::to_string).collect() }
    }

    /// Whether this very file had this checksum before.
    pub(crate) fn contains(&self, identity: &Identity, sum: &Digest) -> bool {
        self.lines.contains(&line(identity, sum))
    }

    /// Remembers files found whole by a check that began at `began`. Failing to is no error.
    pub(crate) fn remember<'a>(&self, files: impl IntoIterator<Item = (&'a Identity, &'a Digest)>, began: SystemTime) {
        let new = files.into_iter().filter(|(identity, _)| identity.is_settled(began)).map(|(identity, sum)| line(identity, sum));
        let new: String = new.filter(|line| !self.lines.contains(line)).map(|line| line + "\n").collect();
        if let Some(folder) = self.folder.as_ref().filter(|_| !new.is_empty()) {
            let _ = append(folder, &new);
        }
    }
}

fn line(identity: &Identity, sum: &Digest) -> String {
    format!("{identity} {sum}")
}

/// Appends in one write, so that processes do not cut each other's lines.
fn append(folder: &Path, lines: &str) -> std::io::Result<()> {
    fs::create_dir_all(folder)?;
    let path = folder.join(FILE);
    let mut file = no_links(OpenOptions::new().create(true).append(true)).open(&path)?;
    if !file.metadata()?.is_file() {
        return Err(std::io::ErrorKind::InvalidInput.into());
    }
    file.write_all(lines.as_bytes())?;
    if file.metadata()?.len() > MAX_BYTES {
        // One that is far too large was not written here: it is forgotten as a whole.
        let text = files::read(&path, 16 * MAX_BYTES).unwrap_or_default();
        let recent = text.len().saturating_sub(MAX_BYTES as usize / 2);
        let kept = text[recent..].iter().position(|&byte| byte == b'\n').map_or(text.len(), |end| recent + end + 1);
        files::write(&path, |file| file.write_all(&text[kept..]))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// That of a file of its own for each number.
    fn identity(folder: &Path, number: usize) -> Identity {
        let path = folder.join(format!("file{number}"));
        fs::write(&path, number.to_string()).unwrap();
        Identity::of(&fs::metadata(&path).unwrap(), &path)
    }

    fn later() -> SystemTime {
        SystemTime::now() + Duration::from_secs(60)
    }

    #[test]
    fn settled_files_are_remembered() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Some(folder.path().join("deep").join("cache"));
        let (old, other) = (identity(folder.path(), 1), identity(folder.path(), 2));
        let (sum, other_sum) = (Digest::of(b"a"), Digest::of(b"b"));
        Verified::load(cache.clone()).remember([(&old, &sum)], SystemTime::now());
        assert!(!Verified::load(cache.clone()).contains(&old, &sum), "changed too shortly before");
        Verified::load(cache.clone()).remember([(&old, &sum)], later());
        let again = Verified::load(cache);
        assert!(again.contains(&old, &sum));
        assert!(!again.contains(&old, &other_sum), "another checksum");
        assert!(!again.contains(&other, &sum), "another file");
    }

    #[test]
    fn a_broken_or_absent_memory_is_no_error() {
        let folder = tempfile::tempdir().unwrap();
        let (old, sum) = (identity(folder.path(), 1), Digest::of(b"a"));
        fs::write(folder.path().join(FILE), b"\xff\xfe nonsense\n").unwrap();
        let broken = Verified::load(Some(folder.path().into()));
        assert!(!broken.contains(&old, &sum));
        Verified::load(None).remember([(&old, &sum)], later());
        let file = folder.path().join("file");
        fs::write(&file, b"").unwrap();
        Verified::load(Some(file)).remember([(&old, &sum)], later());
    }

    #[cfg(unix)]
    #[test]
    fn a_memory_that_is_no_file_is_neither_waited_for_nor_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (old, sum) = (identity(folder.path(), 1), Digest::of(b"a"));
        let (cache, victim) = (folder.path().join("cache"), folder.path().join("victim"));
        fs::create_dir(&cache).unwrap();
        fs::write(&victim, "precious").unwrap();
        assert!(std::process::Command::new("mkfifo").arg(cache.join(FILE)).status().unwrap().success());
        Verified::load(Some(cache.clone())).remember([(&old, &sum)], later());
        fs::remove_file(cache.join(FILE)).unwrap();
        std::os::unix::fs::symlink(&victim, cache.join(FILE)).unwrap();
        Verified::load(Some(cache)).remember([(&old, &sum)], later());
        assert_eq!(fs::read(&victim).unwrap(), b"precious");
    }

    #[test]
    fn it_does_not_grow_without_end() {
        let folder = tempfile::tempdir().unwrap();
        let file = identity(folder.path(), 1);
        let sums: Vec<_> = (0..20_000u32).map(|i| Digest::of(&i.to_le_bytes())).collect();
        Verified::load(Some(folder.path().into())).remember(sums.iter().map(|sum| (&file, sum)), later());
        assert!(fs::metadata(folder.path().join(FILE)).unwrap().len() <= MAX_BYTES);
        let kept = Verified::load(Some(folder.path().into()));
        assert!(kept.contains(&file, &sums[19_999]) && !kept.contains(&file, &sums[0]));
        assert!(kept.lines.iter().all(|line| line.len() == kept.lines.iter().next().map_or(0, String::len)), "whole lines only");
    }
}

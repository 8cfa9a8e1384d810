//! Which large files were found whole before, so that loading a model twice does not hash it twice.
//!
//! The memory is a small text file in the user's cache: a line for each file identity and sum. It is a convenience: whatever is wrong with
//! it, the answer is to hash again.

use crate::Digest;
use std::{
    collections::HashSet,
    env,
    fs::{self, Metadata, OpenOptions},
    io::{Read, Write},
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

const FILE: &str = "verified.txt";
/// Beyond this many bytes the older half is forgotten.
const MAX_BYTES: u64 = 1 << 20;
/// A file changed so shortly before it was hashed could change again within the clock's tick.
const SETTLED: Duration = Duration::from_secs(2);

/// Where qhx keeps what it can make again: `QHX_CACHE_DIR`, or `qhx` in the user's cache folder. `None` where the system tells neither.
pub fn cache_dir() -> Option<PathBuf> {
    let folder = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    folder("QHX_CACHE_DIR")
        .or_else(|| folder("XDG_CACHE_HOME").map(|path| path.join("qhx")))
        .or_else(|| folder("LOCALAPPDATA").map(|path| path.join("qhx").join("cache")))
        .or_else(|| folder("HOME").map(|path| path.join(".cache").join("qhx")))
}

/// What tells a file from every other and from its own earlier versions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    /// Length in bytes.
    pub(crate) size: u64,
    modified: SystemTime,
    place: String,
}

impl Identity {
    pub(crate) fn of(metadata: &Metadata, path: &Path) -> Self {
        Self { size: metadata.len(), modified: modified(metadata), place: place(metadata, path) }
    }

    /// Whether `now`, of the same open file, tells no change.
    pub(crate) fn is_still(&self, now: &Metadata) -> bool {
        self.size == now.len() && self.modified == modified(now)
    }

    fn line(&self, sum: &Digest) -> String {
        let modified = self.modified.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos());
        format!("{} {} {modified} {sum}", self.place, self.size)
    }

    /// Whether the last change is so long ago that another one would have another time.
    fn is_settled(&self, now: SystemTime) -> bool {
        now.duration_since(self.modified).is_ok_and(|age| age >= SETTLED)
    }
}

fn modified(metadata: &Metadata) -> SystemTime {
    metadata.modified().unwrap_or(UNIX_EPOCH)
}

/// Device and inode.
#[cfg(unix)]
fn place(metadata: &Metadata, _: &Path) -> String {
    use std::os::unix::fs::MetadataExt;
    format!("{} {}", metadata.dev(), metadata.ino())
}

/// Elsewhere the path must do.
#[cfg(not(unix))]
fn place(_: &Metadata, path: &Path) -> String {
    Digest::of(path.to_string_lossy().as_bytes()).to_string()
}

/// The files that were found whole.
pub(crate) struct Verified {
    folder: Option<PathBuf>,
    lines: HashSet<String>,
}

impl Verified {
    /// What `folder` remembers; nothing where it cannot be read.
    pub(crate) fn load(folder: Option<PathBuf>) -> Self {
        let mut text = String::new();
        if let Some(file) = folder.as_ref().and_then(|folder| fs::File::open(folder.join(FILE)).ok()) {
            // Appending keeps the file below this but for a few lines.
            let _ = file.take(2 * MAX_BYTES).read_to_string(&mut text);
        }
        Self { folder, lines: text.lines().map(str::to_string).collect() }
    }

    /// Whether this very file had this sum before.
    pub(crate) fn contains(&self, identity: &Identity, sum: &Digest) -> bool {
        self.lines.contains(&identity.line(sum))
    }

    /// Remembers files found whole by a check that began at `began`. Failing to is no error.
    pub(crate) fn remember<'a>(&self, files: impl IntoIterator<Item = (&'a Identity, &'a Digest)>, began: SystemTime) {
        let new = files.into_iter().filter(|(identity, _)| identity.is_settled(began)).map(|(identity, sum)| identity.line(sum));
        let new: String = new.filter(|line| !self.lines.contains(line)).map(|line| line + "\n").collect();
        if let Some(folder) = self.folder.as_ref().filter(|_| !new.is_empty()) {
            let _ = append(folder, &new);
        }
    }
}

/// Appends in one write, so that processes do not cut each other's lines.
fn append(folder: &Path, lines: &str) -> std::io::Result<()> {
    fs::create_dir_all(folder)?;
    let path = folder.join(FILE);
    let mut file = OpenOptions::new().create(true).append(true).open(&path)?;
    file.write_all(lines.as_bytes())?;
    if file.metadata()?.len() > MAX_BYTES {
        let text = fs::read_to_string(&path)?;
        let all: Vec<_> = text.split_inclusive('\n').collect();
        let scratch = folder.join(format!("{FILE}.{}", std::process::id()));
        fs::write(&scratch, all[all.len() / 2..].concat())?;
        fs::rename(&scratch, &path)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(inode: u64, age: Duration) -> Identity {
        Identity { size: 7, modified: SystemTime::now() - age, place: format!("1 {inode}") }
    }

    #[test]
    fn settled_files_are_remembered() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Some(folder.path().join("deep").join("cache"));
        let (old, fresh) = (identity(1, Duration::from_secs(60)), identity(2, Duration::ZERO));
        let (sum, other) = (Digest::of(b"a"), Digest::of(b"b"));
        Verified::load(cache.clone()).remember([(&old, &sum), (&fresh, &sum)], SystemTime::now());
        let again = Verified::load(cache);
        assert!(again.contains(&old, &sum));
        assert!(!again.contains(&old, &other), "another sum");
        assert!(!again.contains(&Identity { size: 8, ..old.clone() }, &sum), "another size");
        assert!(!again.contains(&Identity { modified: SystemTime::now(), ..old }, &sum), "another time");
        assert!(!again.contains(&fresh, &sum), "changed too shortly before");
    }

    #[test]
    fn a_broken_or_absent_memory_is_no_error() {
        let folder = tempfile::tempdir().unwrap();
        let (old, sum) = (identity(1, Duration::from_secs(60)), Digest::of(b"a"));
        fs::write(folder.path().join(FILE), b"\xff\xfe nonsense\n").unwrap();
        let broken = Verified::load(Some(folder.path().into()));
        assert!(!broken.contains(&old, &sum));
        Verified::load(None).remember([(&old, &sum)], SystemTime::now());
        let file = folder.path().join("file");
        fs::write(&file, b"").unwrap();
        Verified::load(Some(file)).remember([(&old, &sum)], SystemTime::now());
    }

    #[test]
    fn it_does_not_grow_without_end() {
        let folder = tempfile::tempdir().unwrap();
        let many: Vec<_> = (0..20_000).map(|i| (identity(i, Duration::from_secs(60)), Digest::of(&i.to_le_bytes()))).collect();
        Verified::load(Some(folder.path().into())).remember(many.iter().map(|(i, s)| (i, s)), SystemTime::now());
        assert!(fs::metadata(folder.path().join(FILE)).unwrap().len() <= MAX_BYTES);
        let kept = Verified::load(Some(folder.path().into()));
        let (last, first) = (many.last().unwrap(), &many[0]);
        assert!(kept.contains(&last.0, &last.1) && !kept.contains(&first.0, &first.1));
    }
}

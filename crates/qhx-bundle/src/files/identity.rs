//! What tells a file from every other and from its own earlier versions.

use std::{
    fmt,
    fs::Metadata,
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// A file changed so shortly before it was looked at could change again within the clock's tick.
const SETTLED: Duration = Duration::from_secs(2);

/// What tells a file from every other and from its own earlier versions: where it is, its size, and its times.
///
/// The time of the last change of the inode (ctime) is part of it: unlike the time of the last write no program can set it back, and inode
/// numbers are given to new files again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    place: String,
    size: u64,
    modified: SystemTime,
    changed: SystemTime,
}

impl Identity {
    /// That of the file at `path`, of which `metadata` was asked.
    pub fn of(metadata: &Metadata, path: &Path) -> Self {
        Self { place: place(metadata, path), size: metadata.len(), modified: modified(metadata), changed: changed(metadata) }
    }

    /// Length in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Size and times: what tells this version of a file from others at the same path, also after the disk was mounted anew.
    pub fn version(&self) -> String {
        let nanoseconds = |time: SystemTime| time.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos());
        format!("{} {} {}", self.size, nanoseconds(self.modified), nanoseconds(self.changed))
    }

    /// Whether the last change is so long before `now` that another one would have another time.
    pub fn is_settled(&self, now: SystemTime) -> bool {
        now.duration_since(self.modified.max(self.changed)).is_ok_and(|age| age >= SETTLED)
    }
}

/// In one line without line breaks.
impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.place, self.version())
    }
}

fn modified(metadata: &Metadata) -> SystemTime {
    metadata.modified().unwrap_or(UNIX_EPOCH)
}

#[cfg(unix)]
fn changed(metadata: &Metadata) -> SystemTime {
    use std::os::unix::fs::MetadataExt;
    let seconds = Duration::from_secs(u64::try_from(metadata.ctime()).unwrap_or(0));
    UNIX_EPOCH + seconds + Duration::from_nanos(u64::try_from(metadata.ctime_nsec()).unwrap_or(0))
}

/// Elsewhere the time of the last write must do.
#[cfg(not(unix))]
fn changed(metadata: &Metadata) -> SystemTime {
    modified(metadata)
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
    crate::Digest::of(path.to_string_lossy().as_bytes()).to_string()
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::{fs, time::Instant};

    #[test]
    fn a_time_that_was_set_back_hides_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let identity = || Identity::of(&fs::metadata(&path).unwrap(), &path);
        fs::write(&path, "right").unwrap();
        let before = identity();
        assert_eq!(identity(), before);
        assert!(!before.is_settled(SystemTime::now()) && before.is_settled(SystemTime::now() + SETTLED));
        // The file system's clock ticks: what is changed within one tick cannot be seen.
        let began = Instant::now();
        let mut after = before.clone();
        while after == before {
            assert!(began.elapsed() < Duration::from_secs(10), "a change is not seen");
            fs::write(&path, "wrong").unwrap();
            fs::File::options().write(true).open(&path).unwrap().set_modified(before.modified).unwrap();
            after = identity();
        }
        assert_eq!((after.size, after.modified, &after.place), (before.size, before.modified, &before.place));
        assert_ne!(after.version(), before.version());
        // An old time of writing does not make a file settled that was touched a moment ago.
        fs::File::options().write(true).open(&path).unwrap().set_modified(UNIX_EPOCH).unwrap();
        assert!(!identity().is_settled(SystemTime::now()));
    }
}

//! The folder behind [`BundleWriter`](super::BundleWriter): a hidden sibling of the final place, locked, removed unless it is published.
//!
//! For the final place `dir/NAME` there are, while a process writes: `dir/.NAME.lock` (held by that process), `dir/.NAME.tmp-PID-RANDOM`, and, for the moment in
//! which one bundle replaces another, `dir/.NAME.old-PID-RANDOM`. Only the holder of the lock touches any of them.

use super::ours::check_replaceable;
use crate::{
    BundleError, BundlePath,
    files::{self, no_links, random},
    parity::REJECTED,
};
use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io,
    path::{Path, PathBuf},
};

/// A new folder beside the place where it is to stand. It goes away unless it is published.
pub struct TemporaryFolder {
    path: PathBuf,
    place: PathBuf,
    replace: bool,
    published: bool,
    // Dropped in this order, after the folder is cleared away: the lock's file stands in the last ancestor.
    lock: Option<Lock>,
    _ancestors: CreatedAncestors,
}

impl TemporaryFolder {
    /// Locks `place`, clears what dead processes left there, and makes the folder. With `replace` a bundle may be there, and nothing but a bundle.
    pub fn create(place: &Path, replace: bool) -> Result<Self, BundleError> {
        let (place, ancestors) = resolve(place)?;
        let lock = Lock::take(&place)?;
        let path = sibling(&place, "tmp");
        fs::create_dir(&path).map_err(BundleError::io("create the folder", &path))?;
        let folder = Self { path, place, replace, published: false, lock, _ancestors: ancestors };
        if folder.lock.is_some() {
            clear_leftovers(&folder.place, &folder.path);
        }
        check_free(&folder.place, replace)?;
        Ok(folder)
    }

    /// A folder inside, which goes where this one goes.
    pub(crate) fn inside(&self, name: &BundlePath) -> Result<Self, BundleError> {
        let (path, place) = (self.path.join(name.to_relative()), self.place.join(name.to_relative()));
        fs::create_dir(&path).map_err(BundleError::io("create the folder", &path))?;
        Ok(Self { path, place, replace: false, published: true, lock: None, _ancestors: CreatedAncestors::default() })
    }

    /// Where it is now.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where the bundle will stand.
    pub(crate) fn place(&self) -> &Path {
        &self.place
    }

    /// The writer was given something that does not fit.
    pub(crate) fn wrong(&self, reason: String) -> BundleError {
        BundleError::Write { path: self.place.clone(), reason }
    }

    /// Makes the folders that `file` needs and says where it goes.
    pub(crate) fn make_room(&self, file: &BundlePath) -> Result<PathBuf, BundleError> {
        let path = self.path.join(file.to_relative());
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(BundleError::io("create the folder", folder))?;
        }
        Ok(path)
    }

    /// Writes a file and waits until it is on the disk.
    pub(crate) fn add(&self, file: &BundlePath, content: &[u8]) -> Result<(), BundleError> {
        write_synced(&self.make_room(file)?, content)
    }

    /// The rename that makes the folder appear in its place, which is returned.
    pub fn publish(mut self) -> Result<PathBuf, BundleError> {
        sync_folders(&self.path)?;
        check_free(&self.place, self.replace)?;
        self.move_to(&self.place.clone())
    }

    /// The same, to `NAME.rejected`.
    pub(crate) fn reject(mut self) -> Result<PathBuf, BundleError> {
        let mut name = self.place.clone().into_os_string();
        name.push(REJECTED);
        let place = PathBuf::from(name);
        sync_folders(&self.path)?;
        check_free(&place, true)?;
        self.move_to(&place)
    }

    /// Renames the folder to `place`, setting aside what is there. If that fails, what was there is put back.
    fn move_to(&mut self, place: &Path) -> Result<PathBuf, BundleError> {
        let old = place.exists().then(|| sibling(&self.place, "old"));
        if let Some(old) = &old {
            fs::rename(place, old).map_err(BundleError::io("set aside", place))?;
        }
        if let Err(e) = fs::rename(&self.path, place) {
            if let Some(old) = &old {
                fs::rename(old, place).map_err(BundleError::io("put back", old))?;
            }
            return Err(BundleError::io("rename", &self.path)(e));
        }
        self.published = true;
        if let Some(old) = &old {
            // If this fails the next writer clears it away.
            let _ = fs::remove_dir_all(old);
        }
        if let Some(parent) = place.parent() {
            sync_folder(parent)?;
        }
        Ok(place.to_path_buf())
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        if !self.published {
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

/// Writes a file and waits until it is on the disk.
pub(crate) fn write_synced(path: &Path, content: &[u8]) -> Result<(), BundleError> {
    files::write(path, |file| file.write_all(content)).map_err(BundleError::io("write", path))
}

/// The absolute form of `place`, which has a name and a folder above it; that folder is made where it is missing.
fn resolve(place: &Path) -> Result<(PathBuf, CreatedAncestors), BundleError> {
    let known = place.canonicalize();
    let missing = known.is_err();
    let place = known.or_else(|_| std::path::absolute(place)).map_err(BundleError::io("use", place))?;
    let (Some(parent), Some(name)) = (place.parent(), place.file_name()) else {
        return Err(BundleError::Write { path: place, reason: "is not a place for a bundle".into() });
    };
    if !missing {
        return Ok((place, CreatedAncestors::default()));
    }
    let created = parent.ancestors().take_while(|folder| !folder.exists()).map(Path::to_path_buf).collect();
    fs::create_dir_all(parent).map_err(BundleError::io("create the folder", parent))?;
    let parent = parent.canonicalize().map_err(BundleError::io("open", parent))?;
    Ok((parent.join(name), CreatedAncestors(created)))
}

/// Folders that were made for a bundle; those still empty at the end go away again.
#[derive(Default)]
struct CreatedAncestors(Vec<PathBuf>);

impl Drop for CreatedAncestors {
    fn drop(&mut self) {
        for folder in &self.0 {
            let _ = fs::remove_dir(folder);
        }
    }
}

/// Whether a bundle may be put at `place`: nothing is there, or an empty folder, or a bundle that may be replaced.
pub fn check_free(place: &Path, replace: bool) -> Result<(), BundleError> {
    let mut entries = match fs::read_dir(place) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) if e.kind() == io::ErrorKind::NotADirectory => return Err(BundleError::Exists(place.into())),
        Err(e) => return Err(BundleError::io("look into", place)(e)),
    };
    if entries.next().is_none() {
        return Ok(());
    }
    if !replace {
        return Err(BundleError::Exists(place.into()));
    }
    check_replaceable(place)
}

/// `.NAME.KIND-PID-RANDOM` beside `place`.
fn sibling(place: &Path, kind: &str) -> PathBuf {
    place.with_file_name(format!("{}{}-{:016x}", prefix(place, kind), std::process::id(), random()))
}

fn prefix(place: &Path, kind: &str) -> String {
    format!(".{}.{kind}-", place.file_name().unwrap_or_default().to_string_lossy())
}

/// Removes half-written folders of this user's processes that are gone (the lock is held, so none but `own` is in use), and puts back a bundle that was set
/// aside when its replacement did not come.
fn clear_leftovers(place: &Path, own: &Path) {
    let Ok(about_own) = fs::symlink_metadata(own) else { return };
    let Some(entries) = place.parent().and_then(|parent| fs::read_dir(parent).ok()) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let is = |kind: &str| name.strip_prefix(&prefix(place, kind)).is_some_and(is_own_suffix);
        // Of the entry itself: a link is nothing that a writer leaves.
        if entry.path() == own || !entry.metadata().is_ok_and(|about| about.is_dir() && same_owner(&about, &about_own)) {
            continue;
        }
        if is("old") && !place.exists() {
            let _ = fs::rename(entry.path(), place);
        } else if is("old") || is("tmp") {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// `PID-RANDOM`, exactly: the hidden folders of a place whose own name looks like one are not touched.
fn is_own_suffix(suffix: &str) -> bool {
    let hex = |c: u8| matches!(c, b'0'..=b'9' | b'a'..=b'f');
    suffix.split_once('-').is_some_and(|(pid, random)| pid.parse::<u32>().is_ok() && random.len() == 16 && random.bytes().all(hex))
}

#[cfg(unix)]
fn same_owner(a: &fs::Metadata, b: &fs::Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    a.uid() == b.uid()
}

#[cfg(not(unix))]
fn same_owner(_: &fs::Metadata, _: &fs::Metadata) -> bool {
    true
}

/// The right to write at a place. The system gives it back when the process ends, however it ends.
struct Lock {
    file: Option<File>,
    path: PathBuf,
}

impl Lock {
    /// `None` on file systems that know no locks.
    fn take(place: &Path) -> Result<Option<Self>, BundleError> {
        let path = place.with_file_name(format!(".{}.lock", place.file_name().unwrap_or_default().to_string_lossy()));
        loop {
            let file = no_links(OpenOptions::new().create(true).truncate(false).write(true)).open(&path);
            let file = file.map_err(BundleError::io("create", &path))?;
            match file.try_lock() {
                // A holder that finished meanwhile has removed the file that was opened: take the new one.
                Ok(()) if !is_at(&file, &path) => continue,
                Ok(()) => return Ok(Some(Self { file: Some(file), path })),
                Err(TryLockError::WouldBlock) => return Err(BundleError::Busy(place.into())),
                Err(TryLockError::Error(_)) => {
                    let _ = fs::remove_file(&path);
                    return Ok(None);
                }
            }
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Where open files cannot be removed the lock must go first.
        if cfg!(windows) {
            self.file = None;
        }
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let same = |a: fs::Metadata, b: fs::Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
    file.metadata().ok().zip(fs::metadata(path).ok()).is_some_and(|(a, b)| same(a, b))
}

#[cfg(not(unix))]
fn is_at(_: &File, path: &Path) -> bool {
    path.exists()
}

/// Waits until the names in a folder and all folders below it are on the disk.
fn sync_folders(folder: &Path) -> Result<(), BundleError> {
    for entry in fs::read_dir(folder).map_err(BundleError::io("look into", folder))?.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            sync_folders(&entry.path())?;
        }
    }
    sync_folder(folder)
}

fn sync_folder(folder: &Path) -> Result<(), BundleError> {
    if cfg!(unix) {
        File::open(folder).and_then(|f| f.sync_all()).map_err(BundleError::io("sync", folder))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{files::names, manifest::MANIFEST_FILE};

    #[test]
    fn nothing_remains_of_an_abandoned_folder() {
        let dir = tempfile::tempdir().unwrap();
        let folder = TemporaryFolder::create(&dir.path().join("a/b/model"), false).unwrap();
        folder.add(&BundlePath::new("x/y").unwrap(), b"1").unwrap();
        assert_eq!(names(&dir.path().join("a/b")).len(), 2, "lock and temporary folder");
        drop(folder);
        assert!(names(dir.path()).is_empty());
    }

    #[test]
    fn published_under_the_final_name_only() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("a/model");
        let folder = TemporaryFolder::create(&place, false).unwrap();
        folder.add(&BundlePath::new("x/y").unwrap(), b"1").unwrap();
        assert!(!place.exists());
        assert_eq!(folder.publish().unwrap(), place.canonicalize().unwrap());
        assert_eq!(names(&dir.path().join("a")), ["model"]);
        assert_eq!(fs::read(place.join("x/y")).unwrap(), b"1");
    }

    #[test]
    fn one_writer_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("model");
        let first = TemporaryFolder::create(&place, false).unwrap();
        assert!(matches!(TemporaryFolder::create(&place, false), Err(BundleError::Busy(_))));
        assert!(first.path().exists(), "the second must not clear away the first's work");
        TemporaryFolder::create(&dir.path().join("other"), false).unwrap();
        drop(first);
        TemporaryFolder::create(&place, false).unwrap();
        assert!(names(dir.path()).is_empty());
    }

    #[test]
    fn what_dead_writers_left_is_cleared() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("model");
        let left = [".model.tmp-7-0123456789abcdef", ".model.old-7-0123456789abcdef"];
        let foreign = [".model.tmp-7.tmp-8-0123456789abcdef", ".model.tmp-notes", ".other.tmp-7-0123456789abcdef"];
        for name in left.iter().chain(&foreign) {
            fs::create_dir(dir.path().join(name)).unwrap();
            fs::write(dir.path().join(name).join("file"), name).unwrap();
        }
        drop(TemporaryFolder::create(&place, true));
        // The bundle that was set aside is back; the half-written one is gone.
        let mut expected: Vec<_> = foreign.iter().map(|name| name.to_string()).chain(["model".into()]).collect();
        expected.sort();
        assert_eq!(names(dir.path()), expected);
    }

    #[test]
    fn a_place_is_taken_only_when_asked_and_only_from_a_bundle() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("model");
        fs::create_dir(&place).unwrap();
        drop(TemporaryFolder::create(&place, false).unwrap());
        fs::write(place.join("letter.txt"), "dear").unwrap();
        assert!(matches!(TemporaryFolder::create(&place, false), Err(BundleError::Exists(_))));
        let error = TemporaryFolder::create(&place, true).err().unwrap().to_string();
        assert!(error.contains("not a bundle"), "{error}");
        fs::write(place.join(MANIFEST_FILE), "{}").unwrap();
        let error = TemporaryFolder::create(&place, true).err().unwrap().to_string();
        assert!(error.contains("not a bundle") && error.contains(MANIFEST_FILE), "{error}");
        assert_eq!(names(&place), ["letter.txt", MANIFEST_FILE]);
        fs::write(dir.path().join("file"), "").unwrap();
        assert!(matches!(TemporaryFolder::create(&dir.path().join("file"), true), Err(BundleError::Exists(_))));
        assert!(TemporaryFolder::create(Path::new("/"), true).is_err());
        assert!(TemporaryFolder::create(&dir.path().join("file/model"), true).is_err());
    }

    #[cfg(unix)]
    #[test]
    fn planted_links_are_neither_followed_nor_removed() {
        use std::os::unix::fs::symlink;
        let dir = tempfile::tempdir().unwrap();
        let (place, victim) = (dir.path().join("model"), dir.path().join("victim"));
        fs::create_dir(&victim).unwrap();
        fs::write(victim.join("letter.txt"), "dear").unwrap();
        for kind in ["tmp", "old"] {
            symlink(&victim, dir.path().join(format!(".model.{kind}-7-0123456789abcdef"))).unwrap();
        }
        drop(TemporaryFolder::create(&place, true).unwrap());
        assert!(!place.exists() && victim.join("letter.txt").exists());
        assert_eq!(names(dir.path()), [".model.old-7-0123456789abcdef", ".model.tmp-7-0123456789abcdef", "victim"]);
        symlink(victim.join("letter.txt"), dir.path().join(".model.lock")).unwrap();
        assert!(TemporaryFolder::create(&place, true).is_err());
        assert_eq!(fs::read(victim.join("letter.txt")).unwrap(), b"dear");
    }
}

//! Writing a file: whole, or not at all.

use std::{
    collections::BTreeSet,
    fs::{self, File, Metadata, OpenOptions},
    hash::{BuildHasher, Hasher, RandomState},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

/// So many links in a row are followed.
const MAX_LINKS: usize = 40;

/// Writes the file `path`; what it holds is what `content` writes.
///
/// A regular file appears, or is replaced, by one rename once everything is on the disk; it keeps the permissions of the file that it replaces. A link is
/// followed to the file that it names, and stays. What is no regular file (`/dev/null`, a FIFO, `/dev/stdout`) is written into. A failure leaves what
/// was there, and nothing else.
pub fn write(path: &Path, content: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    match Destination::find(path)? {
        Destination::Stream => {
            let mut writer = BufWriter::new(OpenOptions::new().append(true).open(path)?);
            content(&mut writer)?;
            writer.flush()
        }
        Destination::Regular { place, replaced } => {
            let (temporary, file) = Temporary::create(folder_of(&place), replaced.as_ref())?;
            let mut writer = BufWriter::new(file);
            content(&mut writer)?;
            writer.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
            fs::rename(&temporary.0, &place)?;
            // The new name must survive a power cut too; not every system lets a folder be opened for that.
            let _ = File::open(folder_of(&place)).and_then(|folder| folder.sync_all());
            Ok(())
        }
    }
}

/// Whether [`write()`] could write `path`, as far as that can be told beforehand.
pub fn check(path: &Path) -> io::Result<()> {
    Destination::find(path).map(drop)
}

/// Removes what unfinished calls of [`write()`] have on the disk: for a process that ends without letting them finish.
pub fn remove_temporaries() {
    remove(|_| true);
}

fn remove(wanted: impl Fn(&Path) -> bool) {
    temporaries().iter().filter(|path| wanted(path)).for_each(|path| _ = fs::remove_file(path));
}

/// What stands at a path.
enum Destination {
    /// Nothing or a regular file, links resolved.
    Regular { place: PathBuf, replaced: Option<Metadata> },
    /// A device, a FIFO, or something that this process has open already: it cannot be replaced, only written into.
    Stream,
}

impl Destination {
    fn find(path: &Path) -> io::Result<Self> {
        match fs::metadata(path) {
            Ok(about) if about.is_dir() => Err(io::Error::new(io::ErrorKind::IsADirectory, "it is a folder")),
            Ok(about) if !about.is_file() || is_descriptor(path) => Ok(Self::Stream),
            Ok(_) => {
                let place = path.canonicalize()?;
                // A file that may not be written may not be replaced either.
                let file = no_links(OpenOptions::new().write(true)).open(&place)?;
                Ok(Self::Regular { place, replaced: Some(file.metadata()?) })
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let place = end_of_links(path)?;
                let folder = folder_of(&place);
                match (place.file_name(), folder.is_dir()) {
                    (None, _) => Err(io::Error::new(io::ErrorKind::InvalidInput, "it has no file name")),
                    (_, false) => Err(io::Error::new(io::ErrorKind::NotFound, format!("there is no folder {}", folder.display()))),
                    (Some(_), true) => Ok(Self::Regular { place, replaced: None }),
                }
            }
            Err(error) => Err(error),
        }
    }
}

/// Whether a path names, by links, what this process has open: `/dev/stdout`, `/dev/fd/3`. The text of such a link is no path.
fn is_descriptor(path: &Path) -> bool {
    let mut place = path.to_path_buf();
    for _ in 0..MAX_LINKS {
        let Ok(target) = fs::read_link(&place) else { return false };
        if folder_of(&place).canonicalize().is_ok_and(|folder| folder.starts_with("/proc")) {
            return true;
        }
        place = folder_of(&place).join(target);
    }
    false
}

/// Where the links at `path` lead, though nothing may be there.
fn end_of_links(path: &Path) -> io::Result<PathBuf> {
    let mut place = path.to_path_buf();
    for _ in 0..MAX_LINKS {
        match fs::read_link(&place) {
            Ok(target) => place = folder_of(&place).join(target),
            Err(_) => return Ok(place),
        }
    }
    Err(io::Error::other("too many links"))
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A new file with a name that nobody can foretell, removed when dropped; after its rename there is nothing left to remove.
struct Temporary(PathBuf);

impl Temporary {
    /// In `folder`, with the owner and the permissions of the file that it will replace.
    fn create(folder: &Path, replaced: Option<&Metadata>) -> io::Result<(Self, File)> {
        Self::at(folder.join(format!(".qhx-{:016x}.partial", random())), replaced)
    }

    fn at(path: PathBuf, replaced: Option<&Metadata>) -> io::Result<(Self, File)> {
        let mut options = OpenOptions::new();
        // `create_new` neither follows a link nor takes what is there.
        options.write(true).create_new(true);
        let file = if replaced.is_some() { private(&mut options).open(&path) } else { options.open(&path) }?;
        temporaries().insert(path.clone());
        let temporary = Self(path);
        if let Some(replaced) = replaced {
            take_after(&file, replaced)?;
        }
        Ok((temporary, file))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
        temporaries().remove(&self.0);
    }
}

/// The temporary files of this process.
fn temporaries() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    static ALL: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A number that nobody outside this process can foretell: the keys of the standard hash tables come from the system's own random numbers.
pub(crate) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// Opens neither through a link nor by waiting for the other end of a FIFO.
#[cfg(unix)]
pub(crate) fn no_links(options: &mut OpenOptions) -> &mut OpenOptions {
    use std::os::unix::fs::OpenOptionsExt;
    options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
}

#[cfg(not(unix))]
pub(crate) fn no_links(options: &mut OpenOptions) -> &mut OpenOptions {
    options
}

/// For nobody else's eyes until it has the permissions that it is to have.
#[cfg(unix)]
fn private(options: &mut OpenOptions) -> &mut OpenOptions {
    use std::os::unix::fs::OpenOptionsExt;
    options.mode(0o600)
}

#[cfg(not(unix))]
fn private(options: &mut OpenOptions) -> &mut OpenOptions {
    options
}

/// Gives `file` the owner, where this user may do that, and the permissions of `replaced`.
#[cfg(unix)]
fn take_after(file: &File, replaced: &Metadata) -> io::Result<()> {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
    let _ = fchown(file, Some(replaced.uid()), Some(replaced.gid()));
    file.set_permissions(fs::Permissions::from_mode(replaced.mode() & 0o777))
}

#[cfg(not(unix))]
fn take_after(_: &File, _: &Metadata) -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::names;

    #[test]
    fn a_failed_write_leaves_the_old_file_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        write(&path, |w| w.write_all(b"old")).unwrap();
        let error = write(&path, |w| {
            w.write_all(b"new")?;
            Err(io::Error::other("disk full"))
        });
        assert!(error.unwrap_err().to_string().contains("disk full"));
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(names(folder.path()), ["a"]);
        assert!(write(&folder.path().join("no/such"), |_| Ok(())).unwrap_err().to_string().contains("there is no folder"));
        assert!(check(folder.path()).unwrap_err().to_string().contains("is a folder"));
        assert!(check(&folder.path().join("..")).is_err());
    }

    #[test]
    fn a_process_that_ends_at_once_can_clear_up() {
        let folder = tempfile::tempdir().unwrap();
        let (temporary, _file) = Temporary::create(folder.path(), None).unwrap();
        let (other, _file) = Temporary::create(folder.path(), None).unwrap();
        assert_ne!(temporary.0, other.0);
        assert_eq!(names(folder.path()).len(), 2);
        // Those of other tests stay.
        remove(|path| path.starts_with(folder.path()));
        assert!(names(folder.path()).is_empty());
        let path = temporary.0.clone();
        drop(temporary);
        assert!(!temporaries().contains(&path));
    }

    #[cfg(unix)]
    mod unix {
        use super::*;
        use std::{
            io::Read,
            os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink},
            process::Command,
            thread,
        };

        #[test]
        fn a_link_stays_and_what_it_names_is_replaced() {
            let folder = tempfile::tempdir().unwrap();
            let at = |name: &str| folder.path().join(name);
            fs::create_dir(at("deep")).unwrap();
            fs::write(at("deep/real"), "old").unwrap();
            symlink("deep/real", at("near")).unwrap();
            symlink("near", at("far")).unwrap();
            symlink("deep/new", at("dangling")).unwrap();
            symlink("loop", at("loop")).unwrap();
            write(&at("far"), |w| w.write_all(b"new")).unwrap();
            write(&at("dangling"), |w| w.write_all(b"made")).unwrap();
            assert!(["near", "far", "dangling"].iter().all(|name| at(name).is_symlink()));
            assert_eq!((fs::read(at("deep/real")).unwrap(), fs::read(at("deep/new")).unwrap()), (b"new".to_vec(), b"made".to_vec()));
            assert!(write(&at("loop"), |_| Ok(())).is_err());
            assert_eq!(names(&at("deep")), ["new", "real"]);
        }

        #[test]
        fn a_fifo_and_a_device_are_written_into() {
            let folder = tempfile::tempdir().unwrap();
            let (pipe, full) = (folder.path().join("pipe"), folder.path().join("full"));
            assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
            let reader = thread::spawn({
                let pipe = pipe.clone();
                move || {
                    let mut text = String::new();
                    File::open(pipe).unwrap().read_to_string(&mut text).unwrap();
                    text
                }
            });
            write(&pipe, |w| w.write_all(b"hello")).unwrap();
            assert_eq!(reader.join().unwrap(), "hello");
            assert!(fs::symlink_metadata(&pipe).unwrap().file_type().is_fifo());
            symlink("/dev/full", &full).unwrap();
            let error = write(&full, |w| w.write_all(b"hello")).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::StorageFull);
            assert!(full.is_symlink() && fs::metadata("/dev/full").unwrap().file_type().is_char_device());
            assert_eq!(names(folder.path()), ["full", "pipe"]);
        }

        #[cfg(target_os = "linux")]
        #[test]
        fn what_is_open_already_is_written_into() {
            use std::os::fd::AsRawFd;
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("out");
            let open = File::create(&path).unwrap();
            let inode = open.metadata().unwrap().ino();
            write(Path::new(&format!("/dev/fd/{}", open.as_raw_fd())), |w| w.write_all(b"hello")).unwrap();
            assert_eq!((fs::read(&path).unwrap(), fs::metadata(&path).unwrap().ino()), (b"hello".to_vec(), inode));
        }

        #[test]
        fn permissions_stay() {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("a");
            fs::write(&path, "old").unwrap();
            let mode = || fs::metadata(&path).unwrap().mode() & 0o777;
            let usual = mode();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
            write(&path, |w| w.write_all(b"new")).unwrap();
            assert_eq!((mode(), fs::read(&path).unwrap()), (0o640, b"new".to_vec()));
            fs::remove_file(&path).unwrap();
            write(&path, |w| w.write_all(b"new")).unwrap();
            assert_eq!(mode(), usual, "a new file is as the user's umask says");
        }

        #[test]
        fn a_planted_name_is_not_taken() {
            let folder = tempfile::tempdir().unwrap();
            let victim = folder.path().join("victim");
            fs::write(&victim, "precious").unwrap();
            let planted = folder.path().join("planted");
            symlink(&victim, &planted).unwrap();
            let error = Temporary::at(planted.clone(), None).err().unwrap();
            assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
            write(&folder.path().join("out"), |w| w.write_all(b"new")).unwrap();
            assert_eq!(fs::read(&victim).unwrap(), b"precious");
            assert!(planted.is_symlink(), "what is there is not removed either");
        }
    }
}

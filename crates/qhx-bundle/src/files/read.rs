//! Reading within limits.

use crate::BundlePath;
use std::{
    fs::{self, File, FileType, OpenOptions},
    io::{self, Read},
    path::{Path, PathBuf},
};

/// The most bytes that are read from a pipe or a device, which do not tell their size.
pub const MAX_STREAM_BYTES: u64 = 256 << 20;

/// Why a file is not read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file system refused.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// It is a folder, a FIFO, a device …
    #[error("{} {}", path.display(), self.reason())]
    NotRegular {
        /// The file.
        path: PathBuf,
        /// What it is.
        kind: &'static str,
    },
    /// A link that leads out of the folder that it must lie in.
    #[error("{} {}", path.display(), self.reason())]
    Outside {
        /// The link.
        path: PathBuf,
        /// Where it leads.
        target: PathBuf,
    },
    /// It has more bytes than are read.
    #[error("{} {}", path.display(), self.reason())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size, where it has one.
        size: Option<u64>,
        /// The most bytes that are read.
        limit: u64,
    },
}

impl ReadError {
    /// What is wrong, to go on after the file's name.
    pub fn reason(&self) -> String {
        match self {
            Self::Io { source, .. } => format!("cannot be read: {source}"),
            Self::NotRegular { kind, .. } => format!("is {kind}, not a regular file"),
            Self::Outside { target, .. } => {
                format!("is a link to {}, outside the folder that it belongs to; replace the link by the file itself", target.display())
            }
            Self::TooLarge { size: Some(size), limit, .. } => format!("has {size} bytes; the limit is {limit} bytes"),
            Self::TooLarge { size: None, limit, .. } => format!("has more bytes than are read; the limit is {limit} bytes"),
        }
    }

    /// Whether there is no such file.
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

/// Opens a regular file for reading. Links are followed; anything but a regular file is an error, and opening never waits.
pub fn open(path: &Path) -> Result<File, ReadError> {
    open_with(path, path, true)
}

/// Opens the file `path` of the folder `root`, whose links are resolved already. A link may lead to another file of the folder, not out of it.
/// Gives the file's own place too.
pub fn open_inside(root: &Path, path: &BundlePath) -> Result<(File, PathBuf), ReadError> {
    let named = root.join(path.to_relative());
    let place = named.canonicalize().map_err(|source| ReadError::Io { path: named.clone(), source })?;
    if !place.starts_with(root) {
        return Err(ReadError::Outside { path: named, target: place });
    }
    Ok((open_with(&place, &named, false)?, place))
}

/// All bytes of a regular file that has at most `limit`.
pub fn read(path: &Path, limit: u64) -> Result<Vec<u8>, ReadError> {
    read_all(open(path)?, path, limit)
}

/// All bytes of the file `path` of the folder `root`, whose links are resolved already: see [`open_inside`].
pub fn read_inside(root: &Path, path: &BundlePath, limit: u64) -> Result<Vec<u8>, ReadError> {
    read_all(open_inside(root, path)?.0, &root.join(path.to_relative()), limit)
}

/// All bytes, at most `limit`, of what a person named: a file, a pipe, or `-` for stdin.
pub fn read_given(path: &Path, limit: u64) -> Result<Vec<u8>, ReadError> {
    let stream_limit = limit.min(MAX_STREAM_BYTES);
    if path.as_os_str() == "-" {
        return read_stream(io::stdin().lock(), Path::new("stdin"), stream_limit);
    }
    let io = |source| ReadError::Io { path: path.to_owned(), source };
    match fs::metadata(path).map_err(io)?.file_type() {
        kind if kind.is_file() => read(path, limit),
        kind if kind.is_dir() => Err(ReadError::NotRegular { path: path.to_owned(), kind: name_of(kind) }),
        _ => read_stream(File::open(path).map_err(io)?, path, stream_limit),
    }
}

/// Opens `place`, which errors call `named`.
fn open_with(place: &Path, named: &Path, follow: bool) -> Result<File, ReadError> {
    let io = |source| ReadError::Io { path: named.to_owned(), source };
    let regular = |about: fs::Metadata| match about.is_file() {
        true => Ok(()),
        false => Err(ReadError::NotRegular { path: named.to_owned(), kind: name_of(about.file_type()) }),
    };
    // Asked before, since opening a device may do something, and after, since the file may have been exchanged meanwhile.
    regular(fs::metadata(place).map_err(io)?)?;
    let file = without_waiting(OpenOptions::new().read(true), follow).open(place).map_err(io)?;
    regular(file.metadata().map_err(io)?)?;
    Ok(file)
}

/// Opening a FIFO must not wait for its other end.
#[cfg(unix)]
fn without_waiting(options: &mut OpenOptions, follow: bool) -> &mut OpenOptions {
    use std::os::unix::fs::OpenOptionsExt;
    let links = if follow { 0 } else { libc::O_NOFOLLOW };
    options.custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY | links)
}

#[cfg(not(unix))]
fn without_waiting(options: &mut OpenOptions, _: bool) -> &mut OpenOptions {
    options
}

fn read_all(file: File, path: &Path, limit: u64) -> Result<Vec<u8>, ReadError> {
    let io = |source| ReadError::Io { path: path.to_owned(), source };
    let size = file.metadata().map_err(io)?.len();
    let too_large = |size| ReadError::TooLarge { path: path.to_owned(), size: Some(size), limit };
    if size > limit {
        return Err(too_large(size));
    }
    let mut bytes = Vec::new();
    let room = usize::try_from(size).map_err(|_| too_large(size))?;
    bytes.try_reserve_exact(room).map_err(|_| io(io::ErrorKind::OutOfMemory.into()))?;
    // One byte more than the limit tells a file that grew meanwhile.
    file.take(limit.saturating_add(1)).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > limit { Err(too_large(bytes.len() as u64)) } else { Ok(bytes) }
}

fn read_stream(stream: impl Read, path: &Path, limit: u64) -> Result<Vec<u8>, ReadError> {
    let mut bytes = Vec::new();
    stream.take(limit + 1).read_to_end(&mut bytes).map_err(|source| ReadError::Io { path: path.to_owned(), source })?;
    match bytes.len() as u64 > limit {
        true => Err(ReadError::TooLarge { path: path.to_owned(), size: None, limit }),
        false => Ok(bytes),
    }
}

/// What something that is no regular file is called.
fn name_of(kind: FileType) -> &'static str {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if kind.is_fifo() {
            return "a FIFO";
        }
        if kind.is_socket() {
            return "a socket";
        }
        if kind.is_char_device() || kind.is_block_device() {
            return "a device";
        }
    }
    if kind.is_dir() { "a folder" } else { "something else" }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::{io::Write, os::unix::fs::symlink, process::Command, thread};

    fn fifo(path: &Path) {
        assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
    }

    fn path(text: &str) -> BundlePath {
        BundlePath::new(text).unwrap()
    }

    #[test]
    fn a_limit_holds_and_the_error_tells_it_and_the_size() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("five");
        fs::write(&file, "12345").unwrap();
        assert_eq!(read(&file, 5).unwrap(), b"12345");
        assert_eq!(read_given(&file, 5).unwrap(), b"12345");
        for error in [read(&file, 4).unwrap_err(), read_given(&file, 4).unwrap_err()] {
            assert!(error.to_string().ends_with("five has 5 bytes; the limit is 4 bytes"), "{error}");
        }
        // Larger than any disk: refused by its size, not by reading it.
        File::create(&file).unwrap().set_len(1 << 42).unwrap();
        assert!(matches!(read(&file, 1 << 30), Err(ReadError::TooLarge { size: Some(size), .. }) if size == 1 << 42));
        assert!(read(&folder.path().join("none"), 4).unwrap_err().is_missing());
    }

    #[test]
    fn what_is_no_regular_file_is_refused_without_waiting() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        fifo(&pipe);
        symlink("/dev/zero", folder.path().join("zero")).unwrap();
        let kind = |path: &Path| match open(path) {
            Err(ReadError::NotRegular { kind, .. }) => kind,
            other => panic!("{other:?}"),
        };
        assert_eq!(kind(&pipe), "a FIFO");
        assert_eq!(kind(folder.path()), "a folder");
        assert_eq!(kind(&folder.path().join("zero")), "a device");
        // A file that is exchanged for a FIFO between the two looks must not wait either.
        let file = without_waiting(OpenOptions::new().read(true), false).open(&pipe).unwrap();
        assert!(!file.metadata().unwrap().is_file());
    }

    #[test]
    fn a_person_may_name_a_pipe_within_the_limit() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        fifo(&pipe);
        let send = |bytes: &'static [u8]| {
            let pipe = pipe.clone();
            // A reader that has had enough closes the pipe.
            thread::spawn(move || _ = OpenOptions::new().write(true).open(pipe).unwrap().write_all(bytes))
        };
        let sender = send(b"hello");
        assert_eq!(read_given(&pipe, 5).unwrap(), b"hello");
        sender.join().unwrap();
        let sender = send(b"hello");
        let error = read_given(&pipe, 4).unwrap_err();
        assert!(error.to_string().contains("more bytes than are read; the limit is 4 bytes"), "{error}");
        sender.join().unwrap();
        let zero = read_given(Path::new("/dev/zero"), 1 << 20).unwrap_err();
        assert!(matches!(zero, ReadError::TooLarge { size: None, .. }), "{zero}");
        assert!(matches!(read_given(folder.path(), 4), Err(ReadError::NotRegular { kind: "a folder", .. })));
    }

    #[test]
    fn links_stay_inside() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("root").canonicalize().unwrap_or_else(|_| {
            fs::create_dir(folder.path().join("root")).unwrap();
            folder.path().join("root").canonicalize().unwrap()
        });
        fs::write(root.join("file"), "inside").unwrap();
        fs::write(folder.path().join("secret"), "outside").unwrap();
        symlink("file", root.join("link")).unwrap();
        symlink("../secret", root.join("out")).unwrap();
        symlink("..", root.join("up")).unwrap();
        assert_eq!(read_inside(&root, &path("link"), 10).unwrap(), b"inside");
        for name in ["out", "up/secret"] {
            let error = read_inside(&root, &path(name), 10).unwrap_err();
            assert!(matches!(error, ReadError::Outside { .. }), "{error}");
        }
        // A folder with a longer name that begins the same way is outside too.
        fs::create_dir(folder.path().join("root-other")).unwrap();
        fs::write(folder.path().join("root-other/file"), "other").unwrap();
        symlink("../root-other/file", root.join("near")).unwrap();
        assert!(matches!(read_inside(&root, &path("near"), 10), Err(ReadError::Outside { .. })));
    }
}

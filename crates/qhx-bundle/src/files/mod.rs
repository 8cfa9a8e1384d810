//! Files of strangers and files for people: the one place through which this workspace reads what it did not write and writes what it was asked for.
//!
//! * [`read()`], [`read_inside`] and [`open`] take regular files only, and no more of them than a limit: for paths that another file names, or that lie
//!   in a folder from elsewhere. A FIFO, a device or an endless file there is an error, never a hang.
//! * [`read_given`] takes what a person named on the command line, so also pipes and stdin, within the same limit.
//! * [`write()`] makes a file that is either whole or not there, and writes *into* what is no regular file instead of replacing it.
//! * [`Identity`] tells a file from its own earlier versions.

mod identity;
mod read;
mod write;

pub use identity::Identity;
pub use read::{MAX_STREAM_BYTES, ReadError, open, open_inside, read, read_given, read_inside};
pub use write::{check, remove_temporaries, write};
pub(crate) use write::{no_links, random};

/// What a folder holds, sorted.
#[cfg(test)]
pub(crate) fn names(folder: &std::path::Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

//! Files that are either whole or not there.

use crate::Error;
use std::{
    io::{self, Write},
    path::Path,
};

/// Writes `path` as [`qhx_bundle::files::write()`] does.
pub(crate) fn write_atomically(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), Error> {
    qhx_bundle::files::write(path, write).map_err(|source| Error::File { what: "write", path: path.to_owned(), source })
}

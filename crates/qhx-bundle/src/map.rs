//! Files mapped into memory: the one place of this crate that needs `unsafe`.
#![allow(unsafe_code)] // A mapping is memory that the system, not the compiler, vouches for.

use memmap2::Mmap;
use qhx_ir::Bytes;
use std::{fs::File, io, sync::Arc};

/// The whole file, read-only, paged in as it is used. The mapping starts at a page, so offsets keep their alignment.
pub(crate) fn map(file: &File) -> io::Result<Bytes> {
    // SAFETY: the mapping is private to reading and nothing here writes the file: bundles are written in a folder of their own and renamed when
    // complete. A foreign process that rewrites a bundle in place can change the numbers that are read, never the lengths that were checked
    // against this mapping; one that truncates it ends the process with a bus error, as with every mapped file.
    let mapping = unsafe { Mmap::map(file)? };
    Ok(Bytes::new(Arc::new(mapping)))
}

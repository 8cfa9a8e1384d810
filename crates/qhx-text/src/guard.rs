//! Calling other people's libraries on data from a file.
//!
//! They index and subtract unchecked in corners that only a broken file reaches. Such a panic becomes an error like any other. Rust still reports it,
//! as if qhx were broken and not the file, unless the program's panic hook asks [`is_quiet`]. This library sets no hook: there is one for a process.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    /// Whether a panic of this thread is to be kept quiet about.
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Whether a panic of this thread would be caught here and become an error: for panic hooks, which had better not report it then.
pub fn is_quiet() -> bool {
    QUIET.get()
}

/// Runs a library's code. Nothing if it panics.
pub fn caught<T>(work: impl FnOnce() -> T) -> Option<T> {
    let outside = QUIET.replace(true);
    let result = catch_unwind(AssertUnwindSafe(work));
    QUIET.set(outside);
    result.ok()
}

/// Runs code of the tokenizers library. A panic in it is an error.
pub(super) fn guarded<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match caught(work) {
        Some(result) => result.map_err(|error| error.to_string()),
        None => Err("its rules contradict themselves (the tokenizers library failed on them)".to_owned()),
    }
}

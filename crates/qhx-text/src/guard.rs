//! Calling the tokenizers library on data from a file.
//!
//! The library indexes and subtracts unchecked in corners that only a broken file reaches. Such a panic becomes an error like any other, and nobody sees
//! the report that Rust prints of panics: it would say that qhx is broken, where a file is.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    /// Whether a panic of this thread is to be kept quiet about.
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Runs library code. A panic in it is an error.
pub(super) fn guarded<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let report = take_hook();
        set_hook(Box::new(move |panic| {
            if !QUIET.get() {
                report(panic);
            }
        }));
    });
    let outside = QUIET.replace(true);
    let result = catch_unwind(AssertUnwindSafe(work));
    QUIET.set(outside);
    match result {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(_) => Err("its rules contradict themselves (the tokenizers library failed on them)".to_owned()),
    }
}

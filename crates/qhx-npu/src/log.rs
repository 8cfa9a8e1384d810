//! The library's log: forwarded to `tracing`, and kept for the error of a call that fails.
#![allow(unsafe_code)] // A callback that formats C's variable arguments.

use std::{
    collections::VecDeque,
    ffi::{CStr, c_char, c_int, c_void},
    sync::{Mutex, PoisonError},
    thread::{self, ThreadId},
};

/// Lines kept for errors.
const KEPT: usize = 64;
/// Lines shown in one error.
const SHOWN: usize = 8;
/// The library's log levels that we request: errors and warnings, or all of them where `tracing` is enabled for them.
const WARNING: u32 = 2;
const DEBUG: u32 = 5;

/// Messages that every successful run logs as errors or warnings.
const HARMLESS: [&str; 4] =
    ["unexpected GraphHtpSettings option", "No op packages found", "Performance Estimates unsupported", "will overwrite it to"];

struct Line {
    number: u64,
    thread: ThreadId,
    text: String,
}

struct Recent {
    next: u64,
    lines: VecDeque<Line>,
}

static RECENT: Mutex<Recent> = Mutex::new(Recent { next: 0, lines: VecDeque::new() });

// Windows has `vsnprintf` only as an inline function.
#[cfg_attr(windows, link(name = "legacy_stdio_definitions"))]
unsafe extern "C" {
    // `va_list` is passed as a pointer by the System V and the AArch64 calling conventions.
    fn vsnprintf(buffer: *mut c_char, size: usize, format: *const c_char, arguments: *mut c_void) -> c_int;
}

/// The log level to request from the library.
pub(crate) fn level() -> u32 {
    if tracing::enabled!(target: "qnn", tracing::Level::TRACE) { DEBUG } else { WARNING }
}

/// The log callback; the library calls it from any of its threads.
pub(crate) unsafe extern "C" fn callback(format: *const c_char, level: u32, _time: u64, arguments: *mut c_void) {
    if format.is_null() {
        return;
    }
    let mut buffer = [0u8; 1024];
    // SAFETY: the library hands over a format and its arguments; at most the buffer's size is written, zero byte included.
    let written = unsafe { vsnprintf(buffer.as_mut_ptr().cast(), buffer.len(), format, arguments) };
    let (true, Ok(text)) = (written >= 0, CStr::from_bytes_until_nul(&buffer)) else { return };
    // A panic must not unwind through the library.
    let _ = std::panic::catch_unwind(|| record(level, text.to_string_lossy().trim()));
}

fn record(level: u32, text: &str) {
    let harmless = HARMLESS.iter().any(|known| text.contains(known));
    match level {
        // The library logs many harmless things as errors; only the error of a failed call matters.
        1 if !harmless => tracing::warn!(target: "qnn", "{text}"),
        1..=2 => tracing::debug!(target: "qnn", "{text}"),
        _ => tracing::trace!(target: "qnn", "{text}"),
    }
    if level <= WARNING && !harmless && !text.is_empty() {
        let mut recent = RECENT.lock().unwrap_or_else(PoisonError::into_inner);
        let number = recent.next;
        recent.next += 1;
        if recent.lines.len() == KEPT {
            recent.lines.pop_front();
        }
        recent.lines.push_back(Line { number, thread: thread::current().id(), text: text.to_owned() });
    }
}

/// The current position in the log: later lines belong to what starts now.
pub(crate) fn mark() -> u64 {
    RECENT.lock().unwrap_or_else(PoisonError::into_inner).next
}

/// The lines since a mark: those of this thread if there are any, otherwise those of all threads, as the library has its own.
pub(crate) fn since(mark: u64) -> Vec<String> {
    let recent = RECENT.lock().unwrap_or_else(PoisonError::into_inner);
    let lines = |all: bool| {
        let me = thread::current().id();
        let wanted = recent.lines.iter().filter(|line| line.number >= mark && (all || line.thread == me));
        let mut lines: Vec<String> = wanted.map(|line| line.text.clone()).collect();
        lines.dedup();
        lines.drain(..lines.len().saturating_sub(SHOWN));
        lines
    };
    let own = lines(false);
    if own.is_empty() { lines(true) } else { own }
}

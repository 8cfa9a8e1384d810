//! Keeps what the library prints off our standard output.
//!
//! The library prints to C's `stdout`, while we write to the file descriptor: replacing the C stream during calls silences the library without affecting
//! us, in every thread. (Redirecting the descriptor would swallow what other threads print meanwhile.)
#![allow(unsafe_code)] // Replaces a global variable of the C library.

#[cfg(any(all(target_os = "linux", target_env = "gnu"), target_os = "android"))]
mod stream {
    use std::{
        ffi::{c_char, c_int, c_void},
        ptr,
        sync::{
            Mutex, PoisonError,
            atomic::{AtomicPtr, Ordering},
        },
    };

    unsafe extern "C" {
        static mut stdout: *mut c_void;
        fn fopen(path: *const c_char, mode: *const c_char) -> *mut c_void;
        fn setvbuf(stream: *mut c_void, buffer: *mut c_char, mode: c_int, size: usize) -> c_int;
    }

    /// The number of calls in progress, and the stream before the first of them.
    static RUNNING: Mutex<(usize, usize)> = Mutex::new((0, 0));
    /// A stream to /dev/null, opened once and kept open because parts of the library hold on to it.
    static NOWHERE: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

    fn current() -> &'static AtomicPtr<c_void> {
        // SAFETY: the C library's variable lives as long as the process, is aligned as a pointer, and is only ever read or written as a whole.
        unsafe { AtomicPtr::from_ptr(&raw mut stdout) }
    }

    fn nowhere() -> *mut c_void {
        let open = NOWHERE.load(Ordering::Relaxed);
        if !open.is_null() {
            return open;
        }
        const UNBUFFERED: c_int = 2;
        // SAFETY: constant, closed strings; the stream is used only if it could be opened.
        let stream = unsafe {
            let stream = fopen(c"/dev/null".as_ptr(), c"w".as_ptr());
            if !stream.is_null() {
                setvbuf(stream, ptr::null_mut(), UNBUFFERED, 0);
            }
            stream
        };
        NOWHERE.store(stream, Ordering::Relaxed);
        stream
    }

    pub(super) fn enter() {
        let mut running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        if running.0 == 0 {
            let nowhere = nowhere();
            running.1 = current().load(Ordering::Acquire) as usize;
            if !nowhere.is_null() {
                current().store(nowhere, Ordering::Release);
            }
        }
        running.0 += 1;
    }

    pub(super) fn leave() {
        let mut running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        running.0 -= 1;
        if running.0 == 0 {
            current().store(running.1 as *mut c_void, Ordering::Release);
        }
    }
}

#[cfg(not(any(all(target_os = "linux", target_env = "gnu"), target_os = "android")))]
mod stream {
    pub(super) fn enter() {}
    pub(super) fn leave() {}
}

/// While one of these lives, output of C code is discarded.
pub(crate) struct Quiet(());

impl Quiet {
    pub(crate) fn begin() -> Self {
        stream::enter();
        Self(())
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        stream::leave();
    }
}

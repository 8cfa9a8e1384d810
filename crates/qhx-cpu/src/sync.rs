//! What the thread pool is made of. Here it is the standard library; `tests/loom` compiles the same pool with a checker's versions of it.

pub(crate) use std::{
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, AtomicUsize},
    },
    thread::{Builder, JoinHandle, Thread, current, park},
};

use std::{
    thread,
    time::{Duration, Instant},
};

/// A cell that is read and written through pointers, so that a checker sees when.
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

impl<T> UnsafeCell<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    pub(crate) fn with<R>(&self, read: impl FnOnce(*const T) -> R) -> R {
        read(self.0.get())
    }

    pub(crate) fn with_mut<R>(&self, write: impl FnOnce(*mut T) -> R) -> R {
        write(self.0.get())
    }
}

/// How long a waiting thread spins before it starts to give way to others.
const SPIN: Duration = Duration::from_micros(25);

/// Waits a short while for `ready`: spinning, then giving way. Gives whether it came.
pub(crate) fn linger(awake: Duration, ready: impl Fn() -> bool) -> bool {
    for _ in 0..64 {
        if ready() {
            return true;
        }
        std::hint::spin_loop();
    }
    let start = Instant::now();
    loop {
        for _ in 0..16 {
            if ready() {
                return true;
            }
            std::hint::spin_loop();
        }
        match start.elapsed() {
            waited if waited > awake => return false,
            waited if waited > SPIN => thread::yield_now(),
            _ => {}
        }
    }
}

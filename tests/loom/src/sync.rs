//! What the pool is made of, in the checker's versions.
//!
//! loom knows no total order of sequentially consistent accesses: it takes them for acquire and release. The pool needs that order where one side says that it sleeps and the other that
//! there is work, and each then looks at what the other said. So such a load is a read-modify-write operation here that changes nothing, and such a store one that looks at nothing: they are
//! always of the newest value, and synchronise no more than a load and a store do.

pub(crate) use loom::{
    cell::UnsafeCell,
    sync::{Arc, Mutex, MutexGuard},
    thread::{Builder, JoinHandle, Thread, current, park},
};

use loom::sync::atomic;
use std::{
    sync::atomic::Ordering::{self, Acquire, Release, SeqCst},
    time::Duration,
};

pub(crate) struct AtomicBool(atomic::AtomicBool);

impl AtomicBool {
    pub(crate) fn new(value: bool) -> Self {
        Self(atomic::AtomicBool::new(value))
    }

    pub(crate) fn load(&self, order: Ordering) -> bool {
        if order == SeqCst { self.0.fetch_or(false, Acquire) } else { self.0.load(order) }
    }

    pub(crate) fn store(&self, value: bool, order: Ordering) {
        if order == SeqCst { _ = self.0.swap(value, Release) } else { self.0.store(value, order) }
    }
}

/// An atomic number with the methods that the pool uses.
macro_rules! number {
    ($name:ident, $number:ty) => {
        pub(crate) struct $name(atomic::$name);

        #[allow(dead_code)]
        impl $name {
            pub(crate) fn new(value: $number) -> Self {
                Self(atomic::$name::new(value))
            }

            pub(crate) fn load(&self, order: Ordering) -> $number {
                if order == SeqCst { self.0.fetch_add(0, Acquire) } else { self.0.load(order) }
            }

            pub(crate) fn store(&self, value: $number, order: Ordering) {
                if order == SeqCst { _ = self.0.swap(value, Release) } else { self.0.store(value, order) }
            }

            pub(crate) fn fetch_add(&self, value: $number, order: Ordering) -> $number {
                self.0.fetch_add(value, order)
            }

            pub(crate) fn compare_exchange_weak(
                &self,
                now: $number,
                new: $number,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$number, $number> {
                self.0.compare_exchange_weak(now, new, success, failure)
            }
        }
    };
}

number!(AtomicU64, u64);
number!(AtomicUsize, usize);

/// A thread that waits looks once and goes to sleep: whatever it would see later, it sees before it sleeps.
pub(crate) fn linger(_: Duration, ready: impl Fn() -> bool) -> bool {
    ready()
}

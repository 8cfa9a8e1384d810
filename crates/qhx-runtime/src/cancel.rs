//! Asking running work to stop.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

/// A request to stop that any thread (a signal handler, a window's close button) may make. Clones share it.
///
/// Work that is stopped ends with [`crate::Error::Cancelled`] and leaves its session as it was.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Nobody has asked yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Asks to stop.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Takes the request back, so that the next answer may run.
    pub fn clear(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    /// Whether somebody asked.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// The flag itself, shared: as opening and forging bundles take it.
    pub fn shared(&self) -> Arc<AtomicBool> {
        self.0.clone()
    }

    /// The flag itself, as devices take it.
    pub fn flag(&self) -> &AtomicBool {
        &self.0
    }
}

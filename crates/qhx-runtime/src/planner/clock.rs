//! What time is measured with.

use std::time::{Duration, Instant};

/// A clock. That of the system is [`WallClock`]; a simulated machine has its own.
pub trait Clock: Send + Sync {
    /// The time since some moment.
    fn now(&self) -> Duration;
}

/// The system's clock.
#[derive(Clone, Copy, Debug)]
pub struct WallClock(Instant);

impl Default for WallClock {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Clock for WallClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }
}

//! Bandwidth tokens: stages that read much memory take some while they run, so that two of them do not run against each other on one bus where that takes longer than one after
//! the other, and do where it does not.

use qhx_ir::Timeline;
use std::{
    sync::{Condvar, Mutex, PoisonError},
    time::Instant,
};

/// A semaphore whose permits have weights.
#[derive(Debug)]
pub struct BandwidthTokens {
    taken: Mutex<f64>,
    given_back: Condvar,
}

/// Tokens of a stage, until they are dropped.
#[derive(Debug)]
pub struct Permit<'a> {
    tokens: &'a BandwidthTokens,
    weight: f64,
}

/// Two stages one after the other take twice as long as one: so much may be taken together. A stage takes half of what two at once were measured to take, in times of one.
const ALL: f64 = 2.0;

/// The bus of this machine: all models of the process share it.
pub(super) static BUS: BandwidthTokens = BandwidthTokens::new();

/// The lane of a trace that shows which stages waited for tokens.
const LANE: &str = "waiting for bandwidth tokens";

/// The tokens that each stage of a model takes, and the record of how long they waited for them.
#[derive(Clone, Debug)]
pub(super) struct Share {
    weight: f64,
    timeline: Option<Timeline>,
}

impl Share {
    /// Of a model of which two stages at once take `together` times as long as one.
    pub(super) fn new(together: f64, timeline: Option<Timeline>) -> Self {
        Self { weight: together / 2.0, timeline }
    }

    /// Whether there are enough for two stages.
    pub(super) fn fits_twice(&self) -> bool {
        2.0 * self.weight <= ALL
    }

    /// Tokens for a stage, as soon as there are enough.
    pub(super) fn take<'a>(&self, tokens: &'a BandwidthTokens, stage: &str) -> Permit<'a> {
        self.try_take(tokens).unwrap_or_else(|| self.while_waiting(stage, || tokens.take(self.weight)))
    }

    /// Tokens for a stage, if there are enough.
    pub(super) fn try_take<'a>(&self, tokens: &'a BandwidthTokens) -> Option<Permit<'a>> {
        tokens.try_take(self.weight)
    }

    /// Tokens for a stage that waits until `before` is done and there are enough.
    pub(super) fn take_after<'a, E>(
        &self,
        tokens: &'a BandwidthTokens,
        stage: &str,
        before: impl FnOnce() -> Result<(), E>,
    ) -> Result<Permit<'a>, E> {
        self.while_waiting(stage, || before().map(|()| tokens.take(self.weight)))
    }

    /// Does what a stage waits for, and writes down how long that took.
    pub(super) fn while_waiting<T>(&self, stage: &str, wait: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let waited_for = wait();
        if let Some(timeline) = &self.timeline {
            timeline.add(LANE, stage, started, Vec::new());
        }
        waited_for
    }
}

impl BandwidthTokens {
    /// All of them are there.
    pub const fn new() -> Self {
        Self { taken: Mutex::new(0.0), given_back: Condvar::new() }
    }

    /// Tokens for a stage, if there are enough. Whoever is alone gets any number.
    pub fn try_take(&self, weight: f64) -> Option<Permit<'_>> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        (*taken == 0.0 || *taken + weight <= ALL).then(|| {
            *taken += weight;
            Permit { tokens: self, weight }
        })
    }

    /// Tokens for a stage, as soon as there are enough.
    pub fn take(&self, weight: f64) -> Permit<'_> {
        let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let too_many = |taken: &mut f64| *taken != 0.0 && *taken + weight > ALL;
        let mut taken = self.given_back.wait_while(taken, too_many).unwrap_or_else(PoisonError::into_inner);
        *taken += weight;
        Permit { tokens: self, weight }
    }
}

impl Default for BandwidthTokens {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        let mut taken = self.tokens.taken.lock().unwrap_or_else(PoisonError::into_inner);
        // Sums of fractions do not end at 0 by themselves.
        *taken = if *taken - self.weight < 1e-9 { 0.0 } else { *taken - self.weight };
        self.tokens.given_back.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        sync::{
            atomic::{AtomicUsize, Ordering},
            mpsc,
        },
        thread,
        time::Duration,
    };

    #[test]
    fn two_run_together_where_that_is_faster() {
        let tokens = BandwidthTokens::new();
        let first = tokens.take(0.8);
        let second = tokens.try_take(0.8);
        assert!(second.is_some() && tokens.try_take(0.8).is_none());
        drop((first, second));
        let alone = tokens.try_take(5.0);
        assert!(alone.is_some() && tokens.try_take(0.1).is_none(), "one that needs more than there is runs alone");
        drop(alone);
        assert_eq!(*tokens.taken.lock().unwrap(), 0.0);
    }

    #[test]
    fn two_take_turns_where_that_is_faster() {
        let (tokens, running, most) = (BandwidthTokens::new(), AtomicUsize::new(0), AtomicUsize::new(0));
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..10 {
                        let _permit = tokens.take(1.1);
                        most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                        thread::sleep(Duration::from_micros(100));
                        running.fetch_sub(1, Ordering::SeqCst);
                    }
                });
            }
        });
        assert_eq!(most.into_inner(), 1);
    }

    /// A trace shows who waited, and for how long; who gets tokens at once is not in it.
    #[test]
    fn waiting_is_written_down() {
        const HELD: Duration = Duration::from_millis(20);
        let (tokens, timeline) = (BandwidthTokens::new(), Timeline::default());
        let share = Share::new(2.4, Some(timeline.clone()));
        assert!(!share.fits_twice() && Share::new(2.0, None).fits_twice());
        let first = share.take(&tokens, "layers.0");
        assert!(timeline.spans().is_empty() && share.try_take(&tokens).is_none());
        drop(first);
        // A thread that comes late finds the tokens there, and is asked again.
        while timeline.spans().is_empty() {
            let first = share.take(&tokens, "layers.0");
            let (comes, is_coming) = mpsc::channel();
            thread::scope(|scope| {
                scope.spawn(|| {
                    comes.send(()).unwrap();
                    drop(share.take(&tokens, "layers.1"));
                });
                is_coming.recv().unwrap();
                thread::yield_now();
                drop(first);
            });
        }
        let first = share.take(&tokens, "layers.2");
        let done = share.take_after(&tokens, "layers.3", || {
            thread::sleep(HELD);
            drop(first);
            Ok::<_, ()>(())
        });
        assert!(done.is_ok());
        let spans = timeline.spans();
        let waited: Vec<_> = spans.iter().map(|span| (&*span.lane, &*span.name)).collect();
        assert_eq!(waited, [(LANE, "layers.1"), (LANE, "layers.3")]);
        assert!(spans[1].length >= HELD, "{spans:?}");
    }
}

//! Which way a step of one row takes: by dispatches as any other, or all in one. Both are tried, and the faster one is kept; a step in one dispatch that becomes
//! slow is given up for a while.

use std::time::Duration;

/// Steps that each way is tried for; the first of them, which may compile something, does not count.
const TRIES: u32 = 5;
/// A step that takes longer by dispatches is never done in one: that has to end soon, for a GPU may serve others.
const LONGEST: Duration = Duration::from_millis(50);
/// So many steps in a row that are slower than the other way end it.
const SLOW: u32 = 4;
/// After so many steps by dispatches the other way is tried again.
const AGAIN: u32 = 256;

/// What was found out so far.
#[derive(Clone, Debug)]
pub(crate) struct Trial {
    apart: Way,
    whole: Way,
    decided: Option<bool>,
    /// Slow steps in one dispatch, one after the other.
    slow: u32,
    /// Steps by dispatches since it was decided so; none where that is final.
    since: Option<u32>,
}

#[derive(Clone, Debug, Default)]
struct Way {
    tried: u32,
    total: Duration,
}

impl Way {
    /// The mean time of a step, once it is known.
    fn took(&mut self, time: Duration) -> Option<Duration> {
        if self.tried > 0 {
            self.total += time;
        }
        self.tried += 1;
        self.mean()
    }

    fn mean(&self) -> Option<Duration> {
        (self.tried >= TRIES).then(|| self.total / (self.tried - 1))
    }
}

impl Trial {
    /// `always`: steps are done in one dispatch without a trial.
    pub(crate) fn new(always: bool) -> Self {
        Self { apart: Way::default(), whole: Way::default(), decided: always.then_some(true), slow: 0, since: Some(0) }
    }

    /// Whether the next step is to be done in one dispatch.
    pub(crate) fn is_whole(&self) -> bool {
        self.decided.unwrap_or(self.apart.tried >= TRIES)
    }

    /// Whether steps are done in one dispatch, once that is known.
    pub(crate) fn decided(&self) -> Option<bool> {
        self.decided
    }

    /// Forgets what was found out.
    pub(crate) fn begin(&mut self) {
        *self = Self::new(false);
    }

    /// A step took so long.
    pub(crate) fn took(&mut self, whole: bool, time: Duration) {
        match self.decided {
            Some(true) => {
                self.slow = if self.apart.mean().is_some_and(|apart| time > apart) { self.slow + 1 } else { 0 };
                if self.slow == SLOW {
                    (self.decided, self.slow) = (Some(false), 0);
                }
                return;
            }
            Some(false) => {
                self.since = self.since.map(|steps| steps + 1);
                if self.since == Some(AGAIN) {
                    (self.decided, self.whole, self.since) = (None, Way::default(), Some(0));
                }
                return;
            }
            None => {}
        }
        let mean = if whole { self.whole.took(time) } else { self.apart.took(time) };
        self.decided = match (whole, mean, self.apart.mean()) {
            (true, Some(whole), Some(apart)) => Some(whole < apart),
            (false, Some(apart), _) if apart > LONGEST => {
                self.since = None;
                Some(false)
            }
            _ => None,
        };
    }

    /// Workgroups did not meet: never again.
    pub(crate) fn failed(&mut self) {
        (self.decided, self.since) = (Some(false), None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(apart: u64, whole: u64) -> (Trial, Vec<bool>) {
        let (mut trial, mut ways) = (Trial::new(false), Vec::new());
        for _ in 0..2 * TRIES {
            let way = trial.is_whole();
            ways.push(way);
            trial.took(way, Duration::from_millis(if way { whole } else { apart }));
        }
        (trial, ways)
    }

    #[test]
    fn the_faster_way_is_kept() {
        let tries = TRIES as usize;
        let (mut trial, ways) = run(3, 2);
        assert_eq!(ways, [vec![false; tries], vec![true; tries]].concat());
        assert!(trial.is_whole());
        trial.failed();
        assert!(!trial.is_whole());
        assert!(!run(2, 3).0.is_whole());
        let (mut trial, _) = run(2, 3);
        assert_eq!(trial.decided(), Some(false));
        trial.begin();
        assert_eq!((trial.decided(), trial.is_whole()), (None, false));
        // Long steps are not tried in one dispatch.
        assert_eq!(run(60, 1).1, vec![false; 2 * tries]);
    }

    #[test]
    fn what_becomes_slow_is_given_up_for_a_while() {
        let (mut trial, _) = run(3, 2);
        let took = |trial: &mut Trial, steps: u32, millis: u64| {
            (0..steps).for_each(|_| trial.took(trial.is_whole(), Duration::from_millis(millis)));
            trial.is_whole()
        };
        assert!(took(&mut trial, SLOW - 1, 9) && took(&mut trial, 1, 2) && took(&mut trial, SLOW - 1, 9), "now and then");
        assert!(!took(&mut trial, 1, 9));
        assert!(!took(&mut trial, AGAIN - 1, 3) && took(&mut trial, 1, 3), "tried again");
        assert!(took(&mut trial, TRIES, 2));
        trial.failed();
        assert!(!took(&mut trial, 2 * AGAIN, 3));
    }
}

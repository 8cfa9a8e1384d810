//! Whether drafts pay: what guesses take, how many to compute, and how much may be lost by trying.

use crate::row_costs::RowCosts;
use std::time::Duration;

/// What must be won at least: guesses at gains below are noise.
const LEAST_GAIN: f64 = 1.02;
/// The share of an answer's time that may be lost by drafts that were wrong, and the steps that may be lost at its start.
const MOST_LOST: f64 = 0.02;
const FIRST_LOST: f64 = 1.0;

/// What a guess is thought to take before one was made, as a share of a step, where a program makes it.
const GUESSED_COST: f64 = 0.15;
/// How much a new measurement counts.
const WEIGHT: f64 = 0.2;

/// What a guess takes, in seconds.
#[derive(Debug, Default)]
pub(super) struct GuessCost {
    measured: Option<f64>,
    /// Whether guesses are thought to take nothing before they were measured.
    is_cheap: bool,
}

impl GuessCost {
    /// Of guesses that are looked up, or else computed.
    pub(super) fn new(is_cheap: bool) -> Self {
        Self { measured: None, is_cheap }
    }

    /// So many guesses took so long.
    pub(super) fn learn(&mut self, guesses: usize, time: Duration) {
        let time = time.as_secs_f64() / guesses.max(1) as f64;
        self.measured = Some(match self.measured {
            Some(mean) => mean + WEIGHT * (time.min(2.0 * mean) - mean),
            None => time,
        });
    }

    /// Where a step of one row takes `step` seconds.
    pub(super) fn of(&self, step: f64) -> f64 {
        self.measured.unwrap_or(if self.is_cheap { 0.0 } else { GUESSED_COST * step })
    }
}

/// How many drafts are best where this share of them is right, in a step that has `rows` rows without them, and the tokens per second that they are expected to give.
pub(super) fn best_count(share: f64, rows: usize, most: usize, costs: &RowCosts, guess: &GuessCost) -> (usize, f64) {
    let (Some(plain), Some(one)) = (costs.of(rows), costs.of(1)) else { return (0, 0.0) };
    let guess = guess.of(one);
    let (mut best, mut best_rate) = (0, LEAST_GAIN * rows as f64 / plain);
    // Tokens of the step: of all answers one, and those drafts before which all were right.
    let (mut tokens, mut right) = (rows as f64, 1.0);
    for count in 1..=most {
        right *= share;
        tokens += right;
        let rate = costs.of(rows + count).map_or(0.0, |cost| tokens / (cost + count as f64 * guess));
        if rate > best_rate {
            (best, best_rate) = (count, rate);
        }
    }
    (best, best_rate)
}

/// What an answer has won and lost by drafts.
#[derive(Debug, Default)]
pub(super) struct Account {
    /// What plain decoding would have taken so far, in seconds.
    plain: f64,
    /// What was won; negative where more was lost.
    won: f64,
}

impl Account {
    /// Whether so many more drafts may all be wrong.
    pub(super) fn allows(&self, rows: usize, drafts: usize, costs: &RowCosts, guess: &GuessCost) -> bool {
        let (Some(plain), Some(with), Some(one)) = (costs.of(rows), costs.of(rows + drafts), costs.of(1)) else { return false };
        self.won - (with - plain) - drafts as f64 * guess.of(one) > -(MOST_LOST * self.plain + FIRST_LOST * plain)
    }

    /// A step of `rows` rows and so many drafts; what it has won.
    pub(super) fn book(&mut self, rows: usize, drafts: usize, accepted: usize, guessing: Duration, costs: &RowCosts) -> f64 {
        let (Some(plain), Some(with)) = (costs.of(rows), costs.of(rows + drafts)) else { return 0.0 };
        let token = plain / rows as f64;
        self.plain += (1 + accepted) as f64 * token;
        let won = accepted as f64 * token - (with - plain) - guessing.as_secs_f64();
        self.won += won;
        won
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::acceptance::Acceptance;

    const FREE: GuessCost = GuessCost { measured: None, is_cheap: true };

    fn best_count(share: f64, rows: usize, most: usize, costs: &RowCosts) -> usize {
        super::best_count(share, rows, most, costs, &FREE).0
    }

    /// A step of one row takes 1 s, each further one as much more.
    fn costs(slope: f64) -> RowCosts {
        let mut costs = RowCosts::default();
        (1..=16).for_each(|rows| costs.learn(rows, Duration::from_secs_f64(1.0 + slope * (rows - 1) as f64)));
        costs
    }

    #[test]
    fn as_many_as_pay() {
        assert_eq!(best_count(0.9, 1, 7, &costs(0.01)), 7);
        assert_eq!(best_count(0.9, 1, 7, &costs(1.0)), 0);
        assert_eq!(best_count(0.1, 1, 7, &costs(0.3)), 0);
        let some = best_count(0.6, 1, 7, &costs(0.2));
        assert!((1..4).contains(&some), "{some}");
        assert_eq!(best_count(0.9, 1, 7, &RowCosts::default()), 0, "nothing is known");
        // Beside seven others one more token is little.
        assert_eq!(best_count(0.6, 8, 7, &costs(0.2)), 0);
    }

    #[test]
    fn wrong_drafts_cost_a_bounded_share() {
        let costs = costs(0.3);
        let (mut account, mut acceptance, mut lost) = (Account::default(), Acceptance::default(), 0.0);
        for _ in 0..1000 {
            let count = best_count(acceptance.share(), 1, 7, &costs);
            let count = if account.allows(1, count, &costs, &FREE) { count } else { 0 };
            match count {
                0 => acceptance.forget_a_little(),
                count => acceptance.learn(count, 0),
            }
            lost -= account.book(1, count, 0, Duration::ZERO, &costs);
        }
        assert!(lost > 0.0 && lost <= 0.02 * 1000.0 + 1.0, "{lost}");
    }

    #[test]
    fn right_drafts_are_found_again() {
        let costs = costs(0.1);
        let mut acceptance = Acceptance::default();
        (0..20).for_each(|_| acceptance.learn(3, 0));
        assert_eq!(best_count(acceptance.share(), 1, 7, &costs), 0);
        (0..400).for_each(|_| acceptance.forget_a_little());
        assert!(best_count(acceptance.share(), 1, 7, &costs) > 0);
        (0..20).for_each(|_| acceptance.learn(7, 7));
        assert_eq!(best_count(acceptance.share(), 1, 7, &costs), 7);
    }

    /// Guesses that take time must win more.
    #[test]
    fn what_guesses_take_counts() {
        let costs = costs(0.1);
        let mut slow = GuessCost::new(false);
        assert_eq!(slow.of(2.0), 2.0 * GUESSED_COST);
        slow.learn(4, Duration::from_secs(4));
        assert_eq!((slow.of(1.0), super::best_count(0.9, 1, 7, &costs, &slow).0), (1.0, 0), "as slow as a step");
        (0..40).for_each(|_| slow.learn(2, Duration::from_millis(100)));
        let (count, rate) = super::best_count(0.9, 1, 7, &costs, &slow);
        let (free_count, free_rate) = super::best_count(0.9, 1, 7, &costs, &FREE);
        assert!(count > 0 && count <= free_count && rate < free_rate, "{count} at {rate}, {free_count} at {free_rate}");
        assert!(Account::default().allows(1, 7, &costs, &FREE));
        assert!(!Account::default().allows(1, 7, &costs, &slow), "a step is all that may be lost at the start");
    }
}

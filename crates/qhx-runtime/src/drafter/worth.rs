//! Whether drafts pay: how many are right, how many to compute, and how much may be lost by trying.

use crate::row_costs::RowCosts;
use std::time::Duration;

/// The share of drafts that are thought to be right before any was tried.
const FIRST_SHARE: f64 = 0.6;
/// How many drafts that thought counts as much as.
const FIRST_COUNT: f64 = 2.0;
/// What is left of earlier drafts when new ones are judged, and when none were tried.
const REMEMBERED: f64 = 0.9;
const REMEMBERED_IDLE: f64 = 0.99;
/// What must be won at least: guesses at gains below are noise.
const LEAST_GAIN: f64 = 1.02;
/// The share of an answer's time that may be lost by drafts that were wrong, and the steps that may be lost at its start.
const MOST_LOST: f64 = 0.02;
const FIRST_LOST: f64 = 1.0;

/// How many of an answer's drafts are right.
#[derive(Debug, Default)]
pub(super) struct Acceptance {
    right: f64,
    tried: f64,
}

impl Acceptance {
    /// The share of drafts that are right, of those before which all were.
    pub(super) fn share(&self) -> f64 {
        (self.right + FIRST_SHARE * FIRST_COUNT) / (self.tried + FIRST_COUNT)
    }

    pub(super) fn learn(&mut self, drafted: usize, accepted: usize) {
        let tried = accepted + usize::from(accepted < drafted);
        self.right = self.right * REMEMBERED + accepted as f64;
        self.tried = self.tried * REMEMBERED + tried as f64;
    }

    /// A step without drafts: what comes now may be another kind of text.
    pub(super) fn forget_a_little(&mut self) {
        self.right *= REMEMBERED_IDLE;
        self.tried *= REMEMBERED_IDLE;
    }
}

/// How many drafts are best where this share of them is right, in a step that has `rows` rows without them.
pub(super) fn best_count(share: f64, rows: usize, most: usize, costs: &RowCosts) -> usize {
    let Some(plain) = costs.of(rows) else { return 0 };
    let (mut best, mut best_rate) = (0, LEAST_GAIN * rows as f64 / plain);
    // Tokens of the step: of all answers one, and those drafts before which all were right.
    let (mut tokens, mut right) = (rows as f64, 1.0);
    for count in 1..=most {
        right *= share;
        tokens += right;
        let rate = costs.of(rows + count).map_or(0.0, |cost| tokens / cost);
        if rate > best_rate {
            (best, best_rate) = (count, rate);
        }
    }
    best
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
    pub(super) fn allows(&self, rows: usize, drafts: usize, costs: &RowCosts) -> bool {
        let (Some(plain), Some(with)) = (costs.of(rows), costs.of(rows + drafts)) else { return false };
        self.won - (with - plain) > -(MOST_LOST * self.plain + FIRST_LOST * plain)
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
            let count = if account.allows(1, count, &costs) { count } else { 0 };
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
}

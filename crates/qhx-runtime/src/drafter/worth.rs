//! Whether drafts pay: what guesses take, how many to compute, and how much may be lost by trying.

use crate::row_costs::RowCosts;
use std::time::Duration;

/// What must be won at least: guesses at gains below are noise.
const LEAST_GAIN: f64 = 1.02;
/// The share of an answer's time that may be lost by drafts that were wrong.
const MOST_LOST: f64 = 0.02;

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
    let (Some(plain), Some(one)) = (costs.of(rows), costs.of(1).filter(|_| costs.are_known())) else { return (0, 0.0) };
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

/// Guesses that cost next to nothing, made before any is computed and compared with what was chosen: they show for free whether drafts of their source would pay.
#[derive(Debug, Default)]
pub(super) struct Watched {
    /// What is thought to follow so many ids.
    guess: Option<(usize, u32)>,
    /// The seconds that guesses of the source have won, or would have won as drafts; what is lost while there is nothing to lose is forgotten.
    won: f64,
}

impl Watched {
    /// The first of these guesses is thought to follow so many ids.
    pub(super) fn watch(&mut self, len: usize, guesses: &[u32]) {
        self.guess = guesses.first().map(|&id| (len, id));
    }

    /// Whether the last guess was right, once what was chosen in its place is among `ids`. It counts as the draft that it would have been in a step of `rows` rows.
    pub(super) fn compare(&mut self, ids: &[u32], rows: usize, costs: &RowCosts) -> Option<bool> {
        let (at, guess) = self.guess?;
        let is_right = *ids.get(at)? == guess;
        self.guess = None;
        self.book(won(rows, 1, usize::from(is_right), costs).map_or(0.0, |(won, _)| won));
        Some(is_right)
    }

    /// Drafts of the source have won so many seconds.
    pub(super) fn book(&mut self, won: f64) {
        self.won = (self.won + won).max(0.0);
    }

    /// The seconds that guesses of the source have won, or would have.
    pub(super) fn won(&self) -> f64 {
        self.won
    }
}

/// The seconds that a step of `rows` rows and so many drafts wins, of which the first `accepted` are right, and what a token takes without drafts.
fn won(rows: usize, drafts: usize, accepted: usize, costs: &RowCosts) -> Option<(f64, f64)> {
    let (plain, with) = (costs.of(rows)?, costs.of(rows + drafts)?);
    let token = plain / rows as f64;
    Some((accepted as f64 * token - (with - plain), token))
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
    /// How many drafts may be tried, of at most `most`: see [`Account::spare`].
    pub(super) fn affordable(&self, rows: usize, most: usize, costs: &RowCosts, guess: &GuessCost, first: f64) -> usize {
        (1..=most).take_while(|&drafts| self.spare(rows, drafts, costs, guess, first).is_some()).count()
    }

    /// The seconds that may still be lost where so many more drafts are all wrong, in an answer that may lose `first` steps at its start; none where the drafts may not be tried.
    pub(super) fn spare(&self, rows: usize, drafts: usize, costs: &RowCosts, guess: &GuessCost, first: f64) -> Option<f64> {
        let (plain, with, one) = (costs.of(rows)?, costs.of(rows + drafts)?, costs.of(1)?);
        let spare = self.won + (MOST_LOST * self.plain).max(first * plain) - (with - plain) - drafts as f64 * guess.of(one);
        (spare > 0.0).then_some(spare)
    }

    /// Something took so long beside the steps.
    pub(super) fn spend(&mut self, time: Duration) {
        self.won -= time.as_secs_f64();
    }

    /// A step of `rows` rows and so many drafts; what it has won.
    pub(super) fn book(&mut self, rows: usize, drafts: usize, accepted: usize, guessing: Duration, costs: &RowCosts) -> f64 {
        let Some((won, token)) = won(rows, drafts, accepted, costs) else { return 0.0 };
        self.plain += (1 + accepted) as f64 * token;
        let won = won - guessing.as_secs_f64();
        self.won += won;
        won
    }
}

#[cfg(test)]
mod tests {
    use super::{super::FIRST_LOST_UNASKED, *};
    use crate::acceptance::Acceptance;

    const FREE: GuessCost = GuessCost { measured: None, is_cheap: true };

    fn best_count(share: f64, rows: usize, most: usize, costs: &RowCosts) -> usize {
        super::best_count(share, rows, most, costs, &FREE).0
    }

    /// A step of one row takes 1 s, each further one as much more.
    fn costs(slope: f64) -> RowCosts {
        let mut costs = RowCosts::default();
        let mut learn = |rows: usize| costs.learn(rows, Duration::from_secs_f64(1.0 + slope * (rows - 1) as f64));
        (1..=16).for_each(|rows| (0..2).for_each(|_| learn(rows)));
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

    /// An answer of so many tokens with a source of which a guess is right where `is_right` says so: what drafts lose of its time without them, at the worst after any of its tokens, and at its end.
    fn lost(tokens: usize, slope: f64, first: impl Fn(&Watched) -> f64, is_right: impl Fn(usize) -> bool) -> (f64, f64) {
        let costs = costs(slope);
        let (mut account, mut acceptance, mut watched) = (Account::default(), Acceptance::default(), Watched::default());
        let (mut at, mut worst) = (0, f64::MIN);
        while at < tokens {
            let most = account.affordable(1, 7, &costs, &FREE, first(&watched));
            let drafts = best_count(acceptance.share(), 1, most, &costs);
            let accepted = (at..at + drafts).take_while(|&at| is_right(at)).count();
            if drafts > 0 {
                acceptance.learn(drafts, accepted);
            } else {
                // Guesses are ids of their own: 1 is what is chosen.
                watched.watch(0, &[u32::from(is_right(at))]);
                acceptance.learn(1, usize::from(watched.compare(&[1], 1, &costs).unwrap()));
            }
            let won = account.book(1, drafts, accepted, Duration::ZERO, &costs);
            if drafts > 0 {
                watched.book(won);
            }
            at += 1 + accepted;
            worst = worst.max(-account.won / at as f64);
        }
        (worst, -account.won / at as f64)
    }

    const WATCHING: fn(&Watched) -> f64 = |watched| watched.won().clamp(0.0, FIRST_LOST_UNASKED);

    /// However short the answer is: nothing may be lost before it was won, but a share of the time that has passed.
    #[test]
    fn wrong_drafts_never_cost_more_than_their_share() {
        for slope in [0.05, 0.15, 0.3, 0.9] {
            for tokens in (1..40).chain([100, 1000]) {
                let (worst, _) = lost(tokens, slope, WATCHING, |_| false);
                assert!(worst <= MOST_LOST, "{tokens} tokens at {slope}: {worst}");
            }
        }
        let (worst, _) = lost(12, 0.3, |_| 1.0, |_| false);
        assert!(worst > 0.03, "a step that may be lost before anything was right: {worst}");
    }

    /// Text that is copied now and then, here and there, as prose does, or copied up to some place and then no more: no answer of twelve tokens or more loses more than 3 %.
    #[test]
    fn drafts_that_nobody_asked_for_lose_little() {
        for slope in [0.05, 0.15, 0.3, 0.6] {
            for tokens in 12..100 {
                for n in 2..12 {
                    let (_, here_and_there) = lost(tokens, slope, WATCHING, |at| at % n == 0);
                    let (_, at_first) = lost(tokens, slope, WATCHING, |at| at < n);
                    let (_, in_pieces) = lost(tokens, slope, WATCHING, |at| at % (3 * n) < n);
                    let most = here_and_there.max(at_first).max(in_pieces);
                    assert!(most <= 0.03, "{tokens} tokens at {slope}, {n}: {here_and_there}, {at_first}, {in_pieces}");
                }
            }
        }
    }

    /// A copy is found at once: two guesses that are right are enough.
    #[test]
    fn a_copy_is_drafted_from_its_third_token_on() {
        for slope in [0.05, 0.15, 0.3] {
            let (_, end) = lost(96, slope, WATCHING, |_| true);
            let (_, at_once) = lost(96, slope, |_| 1.0, |_| true);
            assert!(end < -0.4 && end < at_once + 0.03, "{slope}: {end}, {at_once}");
        }
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
        assert!(Account::default().spare(1, 7, &costs, &FREE, 1.0).is_some());
        assert_eq!(Account::default().spare(1, 7, &costs, &slow, 1.0), None, "a step is all that may be lost at the start");
        assert_eq!(Account::default().spare(1, 1, &costs, &FREE, 0.0), None, "nothing may");
    }

    /// Getting ready is a loss like any other.
    #[test]
    fn what_was_spent_must_be_won_first() {
        let (costs, mut account) = (costs(0.1), Account::default());
        let spare = account.spare(1, 2, &costs, &FREE, 1.0).unwrap();
        assert!((spare - 0.8).abs() < 1e-9, "{spare}");
        account.spend(Duration::from_secs_f64(spare));
        assert_eq!(account.spare(1, 2, &costs, &FREE, 1.0), None);
        // 2 % of the time of steps without drafts, once that is more.
        let later = |account: &mut Account, steps: usize| {
            (0..steps).for_each(|_| _ = account.book(1, 0, 0, Duration::ZERO, &costs));
            account.spare(1, 2, &costs, &FREE, 1.0)
        };
        assert_eq!(later(&mut account, 50), None);
        let spare = later(&mut account, 10).unwrap();
        assert!((spare - 0.2).abs() < 1e-9, "{spare}");
    }
}

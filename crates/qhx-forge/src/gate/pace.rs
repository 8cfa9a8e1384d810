//! How long a gate will take, from what its first prompts took.

use std::time::Duration;

/// Rows of an f32 pass take about so many times as long as rows that the bundle itself prefills: its weights are decoded first, and are four bytes wide.
const F32_ROW: f64 = 2.5;

/// The work of one prompt: rows that are read, and tokens that are made one by one.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Work {
    pub(super) rows: usize,
    pub(super) tokens: usize,
}

/// What has been measured so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pace {
    done: Work,
    prefill: Duration,
    decode: Duration,
}

impl Pace {
    /// A prompt is done: what it took up to its first token, and from there on.
    pub(super) fn add(&mut self, work: Work, prefill: Duration, decode: Duration) {
        self.done = Work { rows: self.done.rows + work.rows, tokens: self.done.tokens + work.tokens };
        self.prefill += prefill;
        self.decode += decode;
    }

    /// The time that is left: these prompts are still to be answered, and then all of them go through the f32 pass. None before the first prompt.
    pub(super) fn left(&self, to_answer: Work, all: Work) -> Option<Duration> {
        if self.done.rows == 0 || self.done.tokens == 0 {
            return None;
        }
        let row = self.prefill.as_secs_f64() / self.done.rows as f64;
        let token = self.decode.as_secs_f64() / self.done.tokens as f64;
        let answers = to_answer.rows as f64 * row + to_answer.tokens as f64 * token;
        let f32_pass = (all.rows + all.tokens) as f64 * F32_ROW * row;
        Duration::try_from_secs_f64(answers + f32_pass).ok()
    }
}

/// The time that is left of work of which `done` steps of `total` took so long.
pub(super) fn left_of(done: usize, total: usize, elapsed: Duration) -> Option<Duration> {
    (done > 0).then(|| elapsed.mul_f64(total.saturating_sub(done) as f64 / done as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_follows_from_what_was_done() {
        let seconds = Duration::from_secs;
        let mut pace = Pace::default();
        let all = Work { rows: 130, tokens: 30 };
        assert_eq!(pace.left(all, all), None);
        pace.add(Work { rows: 10, tokens: 10 }, seconds(1), seconds(5));
        assert_eq!(pace.left(Work { rows: 120, tokens: 20 }, all), Some(seconds(12 + 10 + 40)));
        assert_eq!(
            (left_of(0, 4, seconds(1)), left_of(1, 4, seconds(2)), left_of(4, 4, seconds(9))),
            (None, Some(seconds(6)), Some(seconds(0)))
        );
    }
}

//! How many rows of prompts are computed beside running answers.

use std::time::Duration;

/// A step takes up to so many times its time where there are many more prompts than running answers.
const MOST_STEPS: usize = 4;
/// Rows of a prompt that are computed beside running answers before it is known how long a row takes.
const FIRST_ROWS: usize = 16;

/// How long things take here.
#[derive(Default)]
pub(super) struct Pace {
    /// Of one more row of a prompt.
    row: Option<Duration>,
    /// Of a step in which all answers choose a token.
    decode: Duration,
}

impl Pace {
    /// A step with so many rows of prompts took so long.
    pub(super) fn learn(&mut self, time: Duration, prompt_rows: usize, decodes: bool) {
        match prompt_rows {
            0 => self.decode = time,
            rows => {
                let more = if decodes { time.saturating_sub(self.decode) } else { time };
                // Later rows of a prompt take longer: they attend to more.
                self.row = Some(more.div_f64(rows as f64));
            }
        }
    }

    /// Rows of prompts that fit into a step beside running answers.
    pub(super) fn rows_within(&self, time: Duration, most: usize) -> usize {
        let Some(row) = self.row else { return FIRST_ROWS.min(most) };
        let left = time.saturating_sub(self.decode).as_secs_f64();
        ((left / row.as_secs_f64().max(1e-9)) as usize).clamp(1, most)
    }
}

/// How long a step may take. Larger chunks of prompts are cheaper: where most wait for their first token, all are done sooner if the few that run are held up for longer.
pub(super) fn longer(step_time: Duration, answers: usize, prompts: usize) -> Duration {
    step_time * (prompts / answers).clamp(1, MOST_STEPS) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_longer_only_where_most_wait_for_their_first_token() {
        let step = Duration::from_millis(250);
        for (answers, prompts, times) in [(1, 0, 1), (1, 1, 1), (8, 8, 1), (8, 15, 1), (5, 11, 2), (1, 3, 3), (1, 15, 4), (2, 200, 4)] {
            assert_eq!(longer(step, answers, prompts), step * times, "{answers} answers, {prompts} prompts");
        }
    }

    #[test]
    fn prompts_fit_into_the_time_that_running_answers_leave() {
        let mut pace = Pace::default();
        assert_eq!(pace.rows_within(Duration::from_millis(250), 512), FIRST_ROWS);
        pace.learn(Duration::from_millis(50), 0, true);
        pace.learn(Duration::from_millis(250), 100, true);
        assert_eq!(pace.rows_within(Duration::from_millis(250), 512), 100);
        assert!((470..=475).contains(&pace.rows_within(Duration::from_millis(1000), 512)));
        assert_eq!(pace.rows_within(Duration::from_millis(10), 512), 1, "a prompt never stands still");
    }
}

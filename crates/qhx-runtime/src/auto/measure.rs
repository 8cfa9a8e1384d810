//! A few steps of a model, timed.

use super::Speed;
use crate::{
    Error,
    planner::{Clock, PROMPT_TOKENS},
    runner::{Purpose, Runner, Span, Watch},
    sequence::{Sequence, Wanted},
};
use qhx_ir::Phase;
use std::{ops::Range, time::Duration};

/// Steps of decoding that are timed together; the fastest of such runs counts.
const STEPS: usize = 8;
/// There are runs until so many in a row are no faster than the best before them, or until they have taken so long.
const NO_FASTER: usize = 8;
const ENOUGH: Duration = Duration::from_millis(1500);
/// A run that takes this part of the time of the best one is faster.
const FASTER: f64 = 0.97;

/// What is measured, and on what.
pub(crate) struct Trial {
    /// Without rows.
    pub(crate) sequence: Sequence,
    /// The most rows that it can have, and the most of a call.
    pub(crate) context: usize,
    pub(crate) chunk: usize,
    /// Ids are below this.
    pub(crate) vocabulary: usize,
}

/// Times a chunk of a prompt, and a few steps of decoding after it: as deep as those of a usual request.
pub(crate) fn measure(runner: &mut Runner, trial: Trial, clock: &dyn Clock) -> Result<Speed, Error> {
    let Trial { sequence, context, chunk, vocabulary } = trial;
    let mut steps = Steps { runner, sequence, vocabulary };
    let rows = chunk.min(PROMPT_TOKENS / 2).min(context / 4);
    if rows == 0 {
        return Ok(Speed { decode_tokens_per_second: steps.decode_speed(context, clock)?, prefill_tokens_per_second: None });
    }
    // The first call compiles and fills caches.
    steps.prefill(rows, clock)?;
    let half = steps.sequence.fork(context)?;
    let first = steps.prefill(rows, clock)?;
    let decode = steps.decode_speed(context, clock)?;
    // By now the device is awake.
    let prefill = steps.prefill_speed(&half, rows, first, context, clock)?;
    Ok(Speed { decode_tokens_per_second: decode, prefill_tokens_per_second: Some(prefill) })
}

struct Steps<'a> {
    runner: &'a mut Runner,
    sequence: Sequence,
    vocabulary: usize,
}

impl Steps<'_> {
    fn len(&self) -> usize {
        self.sequence.rows.len()
    }

    /// Computes a chunk of a prompt. Gives the time that it takes.
    fn prefill(&mut self, rows: usize, clock: &dyn Clock) -> Result<Duration, Error> {
        let (first, began) = (self.len(), clock.now());
        self.run(first..first + rows, Phase::Prefill)?;
        Ok(clock.now() - began)
    }

    /// Rows per second of a chunk behind the first `half` of a prompt, once it gets no faster, where it took so long the `first` time.
    fn prefill_speed(&mut self, half: &Sequence, rows: usize, first: Duration, context: usize, clock: &dyn Clock) -> Result<f64, Error> {
        let (mut best, mut no_faster, mut spent) = (first, 0, first);
        while no_faster < NO_FASTER && spent < ENOUGH / 2 {
            self.sequence = half.fork(context)?;
            let took = self.prefill(rows, clock)?;
            spent += took;
            no_faster = if took.as_secs_f64() < FASTER * best.as_secs_f64() { 0 } else { no_faster + 1 };
            best = best.min(took);
        }
        Ok(rows as f64 / best.as_secs_f64().max(1e-9))
    }

    /// Steps per second, once they get no faster: a device compiles at its first steps, tries several ways, and raises its clocks slowly.
    fn decode_speed(&mut self, context: usize, clock: &dyn Clock) -> Result<f64, Error> {
        if self.len() + 1 < context {
            self.decode()?;
        }
        let (mut fastest_step, mut best, mut no_faster, mut spent) = (Duration::MAX, f64::INFINITY, 0, Duration::ZERO);
        while self.len() < context && no_faster < NO_FASTER && spent < ENOUGH {
            let (mut total, mut done) = (Duration::ZERO, 0);
            while done < STEPS && self.len() < context && (done < 2 || spent < ENOUGH) {
                let began = clock.now();
                self.decode()?;
                let took = clock.now() - began;
                fastest_step = fastest_step.min(took);
                // What is compiled once does not use up the time for the others.
                spent += took.min(4 * fastest_step);
                total += took;
                done += 1;
            }
            let each = total.as_secs_f64() / done as f64;
            no_faster = if each < FASTER * best { 0 } else { no_faster + 1 };
            best = best.min(each);
        }
        Ok(if best.is_finite() { 1.0 / best.max(1e-9) } else { 0.0 })
    }

    /// Computes one new row.
    fn decode(&mut self) -> Result<(), Error> {
        let row = self.len();
        self.run(row..row + 1, Phase::Decode)
    }

    /// Computes new rows.
    fn run(&mut self, rows: Range<usize>, phase: Phase) -> Result<(), Error> {
        let ids: Vec<u32> = rows.clone().map(|row| ((7919 * row + 13) % self.vocabulary.max(1)) as u32).collect();
        self.sequence.wanted = Wanted::Largest;
        self.sequence.rows.extend(&ids, &[]);
        let span = Span { sequence: &mut self.sequence, rows, wanted: 1, mask: None };
        self.runner.call(&mut [span], &Purpose { phase, cancel: None }, &mut Watch::default())
    }
}

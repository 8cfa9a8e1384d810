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

/// Steps of decoding that are timed, after some that are not.
const STEPS: usize = 8;
const UNTIMED: usize = 2;
/// No more steps are made when they have taken so long.
const ENOUGH: Duration = Duration::from_secs(1);

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
    // Twice, for the first time compiles and fills caches; the second alone counts.
    let rows = chunk.min(PROMPT_TOKENS / 2).min(context / 4);
    let mut prefill = None;
    for _ in 0..if rows == 0 { 0 } else { 2 } {
        let (first, began) = (steps.len(), clock.now());
        steps.run(first..first + rows, Phase::Prefill)?;
        prefill = Some(rows as f64 / (clock.now() - began).as_secs_f64().max(1e-9));
    }
    let room = context.saturating_sub(steps.len());
    for _ in 0..UNTIMED.min(room / 2) {
        steps.decode()?;
    }
    let (began, mut done) = (clock.now(), 0);
    while done < STEPS && (done < 2 || clock.now() - began < ENOUGH) && steps.len() < context {
        steps.decode()?;
        done += 1;
    }
    let decode = done.max(1) as f64 / (clock.now() - began).as_secs_f64().max(1e-9);
    Ok(Speed { decode_tokens_per_second: decode, prefill_tokens_per_second: prefill })
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

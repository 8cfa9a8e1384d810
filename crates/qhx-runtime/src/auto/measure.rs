//! A few steps of a model, timed.

use super::{ANSWER_TOKENS, Speed};
use crate::{
    Error,
    runner::{Purpose, Runner, Span, Watch},
    sequence::Sequence,
};
use qhx_ir::Phase;
use std::{
    ops::Range,
    time::{Duration, Instant},
};

/// Steps of decoding that are timed, after some that are not.
const STEPS: usize = 8;
const UNTIMED: usize = 2;
/// No more steps are made when they have taken so long.
const ENOUGH: Duration = Duration::from_secs(1);
/// The most rows of a prompt.
const MOST_ROWS: usize = 128;

/// What is measured, and on what.
pub(crate) struct Trial {
    /// Without rows.
    pub(crate) sequence: Sequence,
    /// The most rows that it can have, and the most of a call.
    pub(crate) context: usize,
    pub(crate) chunk: usize,
    /// Ids are below this.
    pub(crate) vocabulary: usize,
    /// The speed to compare with: prefill is not measured where decoding alone is slower than all of it.
    pub(crate) rival: Option<Speed>,
}

/// Times a few steps of decoding and a chunk of a prompt.
pub(crate) fn measure(runner: &mut Runner, trial: Trial) -> Result<Speed, Error> {
    let Trial { sequence, context, chunk, vocabulary, rival } = trial;
    let mut steps = Steps { runner, sequence, vocabulary };
    let room = context.saturating_sub(1);
    let (untimed, timed) = (UNTIMED.min(room / 2), STEPS.min(room / 2).max(1));
    steps.run(0..1, Phase::Prefill)?;
    for row in 1..=untimed {
        steps.run(row..row + 1, Phase::Decode)?;
    }
    let (began, mut done) = (Instant::now(), 0);
    while done < timed && (done < 2 || began.elapsed() < ENOUGH) && steps.len() < context {
        let row = steps.len();
        steps.run(row..row + 1, Phase::Decode)?;
        done += 1;
    }
    let decode = done.max(1) as f64 / began.elapsed().as_secs_f64().max(1e-9);
    let mut speed = Speed { decode_tokens_per_second: decode, prefill_tokens_per_second: None };
    if rival.is_some_and(|rival| ANSWER_TOKENS / decode >= rival.seconds()) {
        return Ok(speed);
    }
    // Twice, for the first time compiles and fills caches; the second alone counts.
    let rows = chunk.min(MOST_ROWS).min(context.saturating_sub(steps.len()) / 2);
    for _ in 0..if rows == 0 { 0 } else { 2 } {
        let (first, began) = (steps.len(), Instant::now());
        steps.run(first..first + rows, Phase::Prefill)?;
        speed.prefill_tokens_per_second = Some(rows as f64 / began.elapsed().as_secs_f64().max(1e-9));
    }
    Ok(speed)
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

    /// Computes new rows.
    fn run(&mut self, rows: Range<usize>, phase: Phase) -> Result<(), Error> {
        let ids: Vec<u32> = rows.clone().map(|row| ((7919 * row + 13) % self.vocabulary.max(1)) as u32).collect();
        self.sequence.largest_only = true;
        self.sequence.rows.extend(&ids, &[]);
        let span = Span { sequence: &mut self.sequence, rows, wanted: 1, mask: None };
        self.runner.call(&mut [span], &Purpose { phase, cancel: None }, &mut Watch::default())
    }
}

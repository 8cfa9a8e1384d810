//! Which ways there are to place a model on an accelerator and the processor, and how long each would take.
//!
//! A prediction has two sides: what a program reads and computes (`work.rs`), and facts about the devices, which are measured once ([`Facts`]). It is
//! good enough to say which few ways are worth a try; those are loaded and timed by [`crate::auto`].

mod clock;
mod facts;
mod shared;
mod ways;
mod work;

pub use clock::{Clock, WallClock};
pub use facts::{DeviceFacts, Facts};
pub use ways::Way;

use crate::{
    placement::{Overlap, Phase},
    split::OpRange,
};
use facts::Form;
use qhx_ir::{Checked, Device, DeviceError, Slot};
use serde::{Deserialize, Serialize};
use shared::Shared;
use std::{num::NonZeroUsize, sync::Arc};
use ways::{ACCELERATOR, Names, Room, runs, ways};
use work::{Shape, Work, value_bytes};

/// Two devices that may share a model.
#[derive(Clone)]
pub struct Pair {
    /// A GPU, or what takes its place.
    pub accelerator: Arc<dyn Device>,
    /// The host's processor.
    pub processor: Arc<dyn Device>,
    /// What they are timed with.
    pub clock: Arc<dyn Clock>,
}

/// How long a usual request would take.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prediction {
    /// A token of the answer.
    pub decode_seconds: f64,
    /// The prompt.
    pub prefill_seconds: f64,
}

/// Numbers of rows for which two halves are weighed against the whole.
const HALVED: [usize; 8] = [2, 4, 8, 16, 32, 64, 128, PROMPT_TOKENS];
/// The part of the whole's time that halves may take.
const GAIN: f64 = 0.97;

/// What a usual request has.
pub(crate) const PROMPT_TOKENS: usize = 256;
pub(crate) const ANSWER_TOKENS: usize = 128;

impl Prediction {
    /// The speed of prefill.
    pub fn prefill_tokens_per_second(&self) -> f64 {
        PROMPT_TOKENS as f64 / self.prefill_seconds
    }

    /// The whole request.
    pub fn seconds(&self) -> f64 {
        self.prefill_seconds + ANSWER_TOKENS as f64 * self.decode_seconds
    }

    pub(crate) fn is_sound(&self) -> bool {
        self.seconds().is_finite() && self.seconds() > 0.0
    }
}

/// The numbers that a model is loaded with, as far as they matter here.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    pub(crate) context: usize,
    pub(crate) chunk: usize,
    pub(crate) wanted: usize,
}

impl Pair {
    /// Whether the accelerator has memory enough to be worth a thought.
    pub(crate) fn has_room(&self) -> Result<bool, DeviceError> {
        Ok(self.accelerator.own_memory()?.is_none_or(|bytes| bytes >= facts::LEAST_MEMORY))
    }

    /// Facts about the two, measured with products like those of `program`.
    pub(crate) fn measure(&self, program: &Checked) -> Result<Facts, DeviceError> {
        Facts::measure(&*self.accelerator, &*self.processor, Form::of(program), &*self.clock)
    }

    /// The ways that fit, with what is expected of them, the best first.
    pub(crate) fn ways(&self, program: &Checked, facts: &Facts, extent: Extent) -> Result<Vec<(Way, Prediction)>, DeviceError> {
        let Extent { context, chunk, wanted } = extent;
        let replaces_weights = self.accelerator.replaces_weights();
        let room = Room { bytes: self.accelerator.own_memory()?, context, chunk, wanted, replaces_weights };
        let all = ways(program, self.names(), room)?.into_iter().map(|mut way| {
            let prediction = self.predict(program, facts, &mut way, chunk)?;
            Ok((way, prediction))
        });
        let mut all = all.collect::<Result<Vec<_>, DeviceError>>()?;
        all.sort_by(|(_, a), (_, b)| a.seconds().total_cmp(&b.seconds()));
        Ok(all)
    }

    fn names(&self) -> Names<'_> {
        Names { accelerator: self.accelerator.name(), processor: self.processor.name() }
    }

    /// How long a usual request would take. A split is told from how many rows on two halves side by side are expected to be faster.
    fn predict(&self, program: &Checked, facts: &Facts, way: &mut Way, chunk: usize) -> Result<Prediction, DeviceError> {
        let runs = |way: &Way, phase| runs(program, self.names(), way, phase);
        let (prefill_runs, decode_runs) = (runs(way, Phase::Prefill), runs(way, Phase::Decode));
        // Only where two at once take longer than one after the other.
        way.rules.together =
            Some(facts.together).filter(|together| way.is_split() && *together > 2.0).and_then(|ratio| ratio.try_into().ok());
        let shared = Shared::of(program, facts, way, self.names(), chunk);
        let seconds = |runs: &[OpRange], shape: Shape| -> Result<Vec<f64>, DeviceError> {
            let one = |run: &OpRange| {
                let device = if run.device == ACCELERATOR { &facts.accelerator } else { &facts.processor };
                let part = run.part(program)?;
                if let (Some(shared), [op], true) = (&shared, &part.ops[..], run.device != ACCELERATOR) {
                    return Ok(shared.seconds(&part, op, shape));
                }
                let ops: f64 = part.ops.iter().map(|op| device.op(Work::of(&part, op, shape))).sum();
                // Logits stay where they are: only the largest is wanted.
                let made = part.outputs.iter().filter(|output| !program.is_output(&output.value)).map(|output| &output.value);
                let crossing: f64 =
                    part.inputs.iter().map(|input| &input.name).chain(made).map(|name| value_bytes(&part, name, shape)).sum();
                // Where experts are shared, all parts of the accelerator are one call with pauses.
                let begin = if shared.is_some() && run.device == ACCELERATOR { device.pause_seconds } else { device.call_seconds };
                Ok(begin + ops + crossing / device.copied_bytes_per_second)
            };
            runs.iter().map(one).collect()
        };
        let rows = chunk.clamp(1, PROMPT_TOKENS);
        let depth = PROMPT_TOKENS / 2;
        let whole = |runs: &[OpRange], shape: Shape| Ok::<f64, DeviceError>(seconds(runs, shape)?.iter().sum());
        let halves = |runs: &[OpRange], Shape { rows, depth, wanted }: Shape| {
            let half = Shape { rows: rows.div_ceil(2), depth, wanted: wanted.div_ceil(2) };
            Ok::<f64, DeviceError>(side_by_side(&seconds(runs, half)?, facts.together))
        };
        let is_cut = prefill_runs.len() > 1 || decode_runs.len() > 1;
        let can_overlap = way.rules.overlap.is_none() && is_cut && shared.is_none();
        if can_overlap && !program.slots.values().any(Slot::is_recurrent) {
            let gains = |runs: &[OpRange], shape: Shape| {
                Ok::<bool, DeviceError>(runs.len() == 1 || halves(runs, shape)? < GAIN * whole(runs, shape)?)
            };
            let mut from = None;
            for rows in HALVED.into_iter().rev() {
                // Of a prompt one row is wanted, of drafts and of several answers all.
                let [prompt, drafts] = [1, rows].map(|wanted| Shape { rows, depth, wanted });
                if !(gains(&prefill_runs, prompt)? && gains(&decode_runs, drafts)?) {
                    break;
                }
                from = NonZeroUsize::new(rows);
            }
            way.rules.overlap = Some(from.map_or(Overlap::Whether(false), Overlap::From));
        }
        let prompt = Shape { rows, depth, wanted: 1 };
        let prefill = match way.rules.overlap {
            Some(Overlap::From(from)) if rows >= from.get() && prefill_runs.len() > 1 => halves(&prefill_runs, prompt)?,
            _ => whole(&prefill_runs, prompt)?,
        };
        let step = Shape { rows: 1, depth: PROMPT_TOKENS + ANSWER_TOKENS / 2, wanted: 1 };
        let decode = whole(&decode_runs, step)?;
        // The cache moves once, where the phases are apart.
        let moved: u64 = match prefill_runs == decode_runs {
            true => 0,
            false => program.slots.values().map(|slot| slot.bytes(PROMPT_TOKENS)).sum(),
        };
        let copied = moved as f64 / facts.accelerator.copied_bytes_per_second.min(facts.processor.copied_bytes_per_second);
        Ok(Prediction { decode_seconds: decode, prefill_seconds: prefill * (PROMPT_TOKENS as f64 / rows as f64) + copied })
    }
}

/// How long two halves take of which the second is one part behind the first, where `together` says what it costs that both are under way.
fn side_by_side(parts: &[f64], together: f64) -> f64 {
    let at = |part: Option<usize>| part.and_then(|part| parts.get(part)).copied().unwrap_or(0.0);
    (0..=parts.len())
        .map(|step| (at(Some(step)), at(step.checked_sub(1))))
        .map(|(a, b)| a.max(b) + (together - 1.0).min(1.0) * a.min(b))
        .sum()
}

#[cfg(test)]
mod tests {
    use super::side_by_side;

    #[test]
    fn halves_overlap_as_far_as_their_devices_let_them() {
        let parts = [1.0, 1.0, 1.0, 1.0];
        assert_eq!(side_by_side(&parts, 1.0), 5.0);
        assert_eq!(side_by_side(&parts, 2.0), 8.0, "one waits for the other");
        assert_eq!(side_by_side(&[3.0, 1.0], 1.0), 7.0);
        assert_eq!(side_by_side(&[2.0], 1.0), 4.0);
    }
}

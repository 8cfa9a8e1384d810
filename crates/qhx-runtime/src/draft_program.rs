//! The program with which a model drafts for itself: what it must be, and its calls.
//!
//! From what a stage of the text program made of a row (a hidden row) and the id behind it, it predicts the id after that. Where the text program is not as far, its own output `hidden` takes the
//! place of hidden rows. It has a state of its own, of which nothing but the quality of guesses depends.

use crate::{DraftParts, Error, acceptance::Acceptance, rows::Rows};
use qhx_ir::{
    Bindings, Call, Checked, DType, DeviceError, Dim, Executable, Generator, InputData, LoadOptions, Outputs, Phase, RowResult, Segment,
    State, Want,
};
use std::{
    ops::Range,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// The most rows of a call.
const MOST_ROWS: usize = 128;

/// A model's drafting program.
pub(crate) struct DraftProgram {
    pub(crate) program: Checked,
    /// The stage of the text program that makes its hidden rows.
    pub(crate) stage: String,
    /// Numbers in such a row.
    pub(crate) width: usize,
    loaded: Mutex<LoadedDraft>,
}

/// It once it is loaded, with the buffers of its calls.
#[derive(Default)]
pub(crate) struct LoadedDraft {
    /// With the number of the text program's load that it goes with.
    executable: Option<(u64, Box<dyn Executable>)>,
    /// Of all answers.
    pub(crate) acceptance: Acceptance,
    /// Numbers in a hidden row.
    width: usize,
    ids: Vec<i32>,
    sequence: Vec<i32>,
    mrope: Vec<i32>,
    /// The last row of output `hidden` of the last call.
    chained: Vec<f32>,
    outputs: Outputs,
}

/// The hidden rows of a call.
#[derive(Clone, Copy)]
pub(crate) enum Hidden<'a> {
    /// Of the text program.
    Text(&'a [f32]),
    /// Of this program's last call: its last row, for a call of one row.
    Chained,
}

impl DraftProgram {
    /// Checks that a program can draft for a text program with so many logits.
    pub(crate) fn new(parts: DraftParts, text: &Checked, logits: usize) -> Result<Self, Error> {
        let DraftParts { program, stage } = parts;
        let wrong = |reason: String| Error::NotDraft { program: program.name.to_string(), reason };
        let shape = |value: &str| &program.value_type(value).shape[..];
        let tap = text.stages.iter().find(|own| *own.name == *stage).and_then(|own| own.tap.as_ref());
        let tap = tap.ok_or_else(|| wrong(format!("the text program has no stage `{stage}` that shows its rows")))?;
        let &[Dim::T, Dim::Fixed(width)] = &text.value_type(tap).shape[..] else {
            return Err(wrong(format!("the stage `{stage}` of the text program does not give a row for each row")));
        };
        for input in &program.inputs {
            let is_known = match &input.generator {
                Generator::NextIds => input.dtype == DType::I32 && input.shape == [Dim::T],
                Generator::HiddenRows => input.dtype == DType::F32 && input.shape == [Dim::T, Dim::Fixed(width)],
                Generator::ChainedRows => input.dtype == DType::F32 && input.shape == [Dim::R, Dim::Fixed(width)],
                Generator::ChainedRowsAt => input.dtype == DType::I32 && input.shape == [Dim::R],
                Generator::PositionsSequence => input.dtype == DType::I32 && input.shape == [Dim::Fixed(1), Dim::T],
                Generator::PositionsMrope => input.dtype == DType::I32 && input.shape == [Dim::Fixed(3), Dim::T],
                Generator::WantedRows => input.dtype == DType::I32 && input.shape == [Dim::L],
                _ => false,
            };
            if !is_known {
                return Err(wrong(format!("its input `{}` is none that a drafting program can be given", input.name)));
            }
        }
        if !program.outputs.iter().any(|output| *output.name == *"hidden" && shape(&output.value) == [Dim::T, Dim::Fixed(width)]) {
            return Err(wrong(format!("it needs an output `hidden` with {width} numbers for each row")));
        }
        if program.wanted_output().is_none_or(|(_, found)| found != logits) {
            return Err(wrong(format!("it needs one output with {logits} logits for each wanted row, as the text program has")));
        }
        if !program.epochs.is_empty() || program.slots.values().any(|slot| slot.is_recurrent()) {
            return Err(wrong("its state must be one that can be cut at any row: keys and values alone, and no epochs".into()));
        }
        Ok(Self { program, stage, width, loaded: Mutex::new(LoadedDraft { width, ..LoadedDraft::default() }) })
    }

    /// How it is loaded.
    pub(crate) fn load_options() -> LoadOptions {
        LoadOptions { max_rows: MOST_ROWS, max_soft_rows: 1, max_wanted: 1, max_segments: 1, ..LoadOptions::default() }
    }

    /// Calls of several answers take turns.
    pub(crate) fn lock(&self) -> MutexGuard<'_, LoadedDraft> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LoadedDraft {
    /// Whether it was loaded since the text program was loaded for the `loads`-th time.
    pub(crate) fn is_loaded(&self, loads: u64) -> bool {
        self.executable.as_ref().is_some_and(|(own, _)| *own == loads)
    }

    pub(crate) fn put(&mut self, executable: Box<dyn Executable>, loads: u64) {
        (self.executable, self.outputs) = (Some((loads, executable)), Outputs::new());
    }

    /// A fresh state for so many rows.
    pub(crate) fn new_state(&self, rows: usize) -> Result<Box<dyn State>, Error> {
        let (_, executable) = self.executable.as_ref().ok_or_else(not_loaded)?;
        Ok(executable.new_state(rows)?)
    }

    /// Computes and commits rows, given their numbers and the ids behind them. The id that is predicted after the last of these.
    pub(crate) fn read(
        &mut self,
        state: &mut dyn State,
        rows: &Rows,
        span: Range<usize>,
        next: &[u32],
        hidden: Hidden<'_>,
    ) -> Result<u32, Error> {
        let mut predicted = None;
        for first in span.clone().step_by(MOST_ROWS) {
            let part = first..span.end.min(first + MOST_ROWS);
            let own = first - span.start..part.end - span.start;
            let hidden = match hidden {
                Hidden::Text(values) => Hidden::Text(&values[own.start * self.width..own.end * self.width]),
                Hidden::Chained => Hidden::Chained,
            };
            predicted = self.call(state, rows, part.clone(), &next[own], hidden, part.end == span.end)?;
        }
        predicted.ok_or_else(|| DeviceError::Call("the drafting program predicted nothing".into()).into())
    }

    fn call(
        &mut self,
        state: &mut dyn State,
        rows: &Rows,
        span: Range<usize>,
        next: &[u32],
        hidden: Hidden<'_>,
        is_wanted: bool,
    ) -> Result<Option<u32>, Error> {
        let Self { executable, width, ids, sequence, mrope, chained, outputs, .. } = self;
        let (_, executable) = executable.as_mut().ok_or_else(not_loaded)?;
        [&mut *ids, &mut *sequence, &mut *mrope].into_iter().for_each(Vec::clear);
        ids.extend(next.iter().map(|&id| id as i32));
        sequence.extend(span.clone().map(|row| row as i32));
        for stream in 0..3 {
            mrope.extend(rows.positions(span.clone()).map(|position| position[stream] as i32));
        }
        // What chained rows take the place of does not matter.
        let (hidden, chained_rows, chained_at): (&[f32], &[f32], &[i32]) = match hidden {
            Hidden::Text(values) => (values, &[], &[]),
            Hidden::Chained => (chained, chained, &[0]),
        };
        let wanted: &[i32] = if is_wanted { &[span.len() as i32 - 1] } else { &[] };
        let program = executable.program().clone();
        let given = program.inputs.iter().map(|input| match input.generator {
            Generator::HiddenRows => InputData::F32(hidden),
            Generator::ChainedRows => InputData::F32(chained_rows),
            Generator::ChainedRowsAt => InputData::I32(chained_at),
            Generator::PositionsSequence => InputData::I32(sequence),
            Generator::PositionsMrope => InputData::I32(mrope),
            Generator::WantedRows => InputData::I32(wanted),
            _ => InputData::I32(ids),
        });
        let given: Vec<_> = given.collect();
        let bindings = Bindings { rows: span.len(), soft_rows: chained_at.len(), wanted: wanted.len() };
        let (mut segments, wants) = ([Segment::new(Some(&mut *state), 0, span.len())], [Want::Largest]);
        let phase = if span.len() > 1 { Phase::Prefill } else { Phase::Decode };
        let wants = &wants[..wanted.len()];
        executable.run(&mut Call { phase, wants, ..Call::new(bindings, &given, &mut segments, outputs) })?;
        state.commit(span.len())?;
        let made = outputs.value("hidden").unwrap_or_default();
        chained.clear();
        chained.extend_from_slice(&made[made.len().saturating_sub(*width)..]);
        Ok(match outputs.rows() {
            [RowResult::Largest { id, .. }] => Some(*id),
            _ => None,
        })
    }
}

fn not_loaded() -> Error {
    DeviceError::Call("the drafting program is not loaded".into()).into()
}

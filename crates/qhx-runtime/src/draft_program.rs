//! The program with which a model drafts for itself: what it must be, and its calls.
//!
//! From what a stage of the text program made of a row (a hidden row) and the id behind it, it predicts the id after that. Where the text program is not as far, its own output `hidden` takes the
//! place of hidden rows. It has a state of its own, of which nothing but the quality of guesses depends: it reads all rows itself, or it is given what the text program keeps of them, and then all its guesses are
//! made behind the last one.

use crate::{DraftParts, Error, acceptance::Acceptance, rows::Rows};
use qhx_ir::{
    Bindings, Call, Checked, DType, DeviceError, Dim, Executable, Generator, InputData, LoadOptions, Name, Outputs, Phase, RowResult,
    Segment, Slot, SlotData, State, Want,
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
    /// The seconds that guesses have won in all answers; negative where more was lost.
    pub(crate) won: f64,
    /// What reading one of many rows takes, in seconds, once it was measured.
    pub(crate) row_cost: Option<f64>,
    /// Numbers in a hidden row.
    width: usize,
    /// The slots of the text program whose content it is given.
    given: Vec<GivenSlot>,
    ids: Vec<i32>,
    sequence: Vec<i32>,
    next: Vec<i32>,
    mrope: Vec<i32>,
    /// The last row of output `hidden` of the last call.
    chained: Vec<f32>,
    outputs: Outputs,
}

/// A slot of the text program, and what it holds of the last row.
struct GivenSlot {
    name: Name,
    keys: Vec<f32>,
    values: Vec<f32>,
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
        let is_given = |name: &Name, found: &[Dim]| match text.slots.get(name) {
            Some(slot @ &Slot::Kv { kv_heads, head_dim, .. }) => {
                program.slots.get(name) == Some(slot) && *found == [Dim::T, Dim::Fixed(kv_heads), Dim::Fixed(head_dim)]
            }
            _ => false,
        };
        for input in &program.inputs {
            let is_known = match &input.generator {
                Generator::NextIds => input.dtype == DType::I32 && input.shape == [Dim::T],
                Generator::HiddenRows => input.dtype == DType::F32 && input.shape == [Dim::T, Dim::Fixed(width)],
                Generator::ChainedRows => input.dtype == DType::F32 && input.shape == [Dim::R, Dim::Fixed(width)],
                Generator::ChainedRowsAt => input.dtype == DType::I32 && input.shape == [Dim::R],
                Generator::PositionsSequence | Generator::PositionsNext => {
                    input.dtype == DType::I32 && input.shape == [Dim::Fixed(1), Dim::T]
                }
                Generator::TextKeys(slot) | Generator::TextValues(slot) => input.dtype == DType::F32 && is_given(slot, &input.shape),
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
        let given: Vec<GivenSlot> = program.slots.iter().filter_map(|(name, slot)| GivenSlot::new(&program, name, slot)).collect();
        if !given.is_empty() && given.len() < program.slots.len() {
            return Err(wrong("it must be given all of its slots by the text program, or none".into()));
        }
        Ok(Self { program, stage, width, loaded: Mutex::new(LoadedDraft { width, given, ..LoadedDraft::default() }) })
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

impl GivenSlot {
    /// None where the program reads all rows of the slot itself.
    fn new(program: &Checked, name: &Name, slot: &Slot) -> Option<Self> {
        let &Slot::Kv { kv_heads, head_dim, .. } = slot else { return None };
        let is_given =
            |input: &qhx_ir::Input| matches!(&input.generator, Generator::TextKeys(own) | Generator::TextValues(own) if own == name);
        let nothing = vec![0.0; kv_heads * head_dim];
        program.inputs.iter().any(is_given).then(|| Self { name: name.clone(), keys: nothing.clone(), values: nothing })
    }
}

impl LoadedDraft {
    /// Whether it is given what the text program keeps of its rows. Then a call has one row, the last one, each guess behind it included.
    pub(crate) fn is_given_rows(&self) -> bool {
        !self.given.is_empty()
    }

    /// Copies what the text program keeps of the rows before its last one to a state that has the first of them, and holds ready what it keeps of the last.
    pub(crate) fn follow(&mut self, state: &mut dyn State, text: &dyn State) -> Result<(), Error> {
        let last = text.len().saturating_sub(1);
        let known = state.len().min(last);
        state.truncate(known)?;
        for GivenSlot { name, keys: last_keys, values: last_values } in &mut self.given {
            let wrong = || DeviceError::Call(format!("the text program has no keys and values of row {last} in slot `{name}`"));
            let SlotData::Kv { dtype, rows, mut keys, mut values } = text.export_rows(name, known)? else { return Err(wrong().into()) };
            let before = keys.len().checked_sub(last_keys.len() * dtype.bytes()).filter(|_| known + rows == last + 1).ok_or_else(wrong)?;
            *last_keys = dtype.numbers(&keys[before..]);
            *last_values = dtype.numbers(&values[before..]);
            if rows > 1 {
                keys.truncate(before);
                values.truncate(before);
                state.import_rows(name, known, &SlotData::Kv { dtype, rows: rows - 1, keys, values })?;
            }
        }
        if known < last {
            state.set_len(last)?;
        }
        Ok(())
    }

    /// Whether it was loaded since the text program was loaded for the `loads`-th time.
    pub(crate) fn is_loaded(&self, loads: u64) -> bool {
        self.executable.as_ref().is_some_and(|(own, _)| *own == loads)
    }

    pub(crate) fn put(&mut self, executable: Box<dyn Executable>, loads: u64) {
        (self.executable, self.outputs) = (Some((loads, executable)), Outputs::new());
    }

    /// Computes something, whatever it be: the first call of a program finds nothing at hand, and takes several times as long as those to come.
    pub(crate) fn warm_up(&mut self) -> Result<(), Error> {
        let (mut state, mut rows) = (self.new_state(2)?, Rows::with_capacity(2));
        rows.extend(&[0, 0], &[]);
        let nothing = vec![0.0; self.width];
        self.read(&mut *state, &rows, 0..1, &[0], Hidden::Text(&nothing))?;
        self.read(&mut *state, &rows, 1..2, &[0], Hidden::Chained)?;
        Ok(())
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
        let Self { executable, width, given: slots, ids, sequence, next: next_positions, mrope, chained, outputs, .. } = self;
        let (_, executable) = executable.as_mut().ok_or_else(not_loaded)?;
        [&mut *ids, &mut *sequence, &mut *next_positions, &mut *mrope].into_iter().for_each(Vec::clear);
        ids.extend(next.iter().map(|&id| id as i32));
        sequence.extend(span.clone().map(|row| row as i32));
        next_positions.extend(span.clone().map(|row| row as i32 + 1));
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
        let of_last = |name: &Name, part: fn(&GivenSlot) -> &[f32]| slots.iter().find(|slot| slot.name == *name).map_or(&[][..], part);
        let given = program.inputs.iter().map(|input| match &input.generator {
            Generator::TextKeys(slot) => InputData::F32(of_last(slot, |slot| &slot.keys)),
            Generator::TextValues(slot) => InputData::F32(of_last(slot, |slot| &slot.values)),
            Generator::PositionsNext => InputData::I32(next_positions),
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

#[cfg(test)]
mod tests {
    use super::*;
    use qhx_ir::{
        Device, Input, KeyValue, KvType, Mask, Op, OpKind, Output, PROGRAM_VERSION, Program, Stage, WeightTensor, Weights,
        reference::ReferenceDevice,
    };
    use std::{
        collections::{BTreeMap, HashMap},
        sync::Arc,
    };

    /// Attends to rows whose keys and values are inputs, in a slot `kv` with f16 rows of two numbers.
    fn attending(generators: [Generator; 2]) -> Box<dyn Executable> {
        let shape = || vec![Dim::T, Dim::Fixed(1), Dim::Fixed(2)];
        let input = |(name, generator): (&str, Generator)| Input { name: name.into(), dtype: DType::F32, shape: shape(), generator };
        let attend = OpKind::Attend {
            q: "k".into(),
            kv: Some(KeyValue { k: "k".into(), v: "v".into() }),
            slot: Some("kv".into()),
            mask: Mask::Window(3),
            scale: 1.0,
            softcap: None,
            relative_keys: None,
        };
        let program = Program {
            program_version: PROGRAM_VERSION,
            name: "attending".into(),
            inputs: ["k", "v"].into_iter().zip(generators).map(input).collect(),
            outputs: vec![Output { name: "rows".into(), value: "rows.attend".into() }],
            slots: BTreeMap::from([("kv".into(), Slot::Kv { kv_heads: 1, head_dim: 2, window: Some(3), dtype: KvType::F16 })]),
            epochs: vec![],
            rotaries: BTreeMap::new(),
            stages: vec![Stage { name: "rows".into(), tap: None, rotated: false, centred: false }],
            weights: BTreeMap::new(),
            ops: vec![Op { path: "rows.attend".into(), op: attend }],
        };
        let weights = Arc::new(HashMap::<String, WeightTensor>::new()) as Arc<dyn Weights>;
        ReferenceDevice.load(&Checked::new(program).unwrap(), &weights, &LoadOptions { max_rows: 16, ..LoadOptions::default() }).unwrap()
    }

    /// After each step of the text, however many rows it had, and after guesses, which put the last row in.
    #[test]
    fn follows_what_the_text_keeps() {
        let mut text = attending([Generator::Carried, Generator::Carried]);
        let drafting = attending([Generator::TextKeys("kv".into()), Generator::TextValues("kv".into())]);
        let program = drafting.program().clone();
        let given = program.slots.iter().filter_map(|(name, slot)| GivenSlot::new(&program, name, slot)).collect();
        let mut loaded = LoadedDraft { given, ..LoadedDraft::default() };
        let (mut kept, mut state) = (text.new_state(32).unwrap(), drafting.new_state(32).unwrap());
        assert!(loaded.is_given_rows());
        for rows in [5, 1, 1, 3, 8, 1] {
            let first = kept.len();
            let numbers = |sign: f32| (first..first + rows).flat_map(|row| [sign * row as f32, 0.5]).collect::<Vec<f32>>();
            let (keys, values, mut outputs) = (numbers(1.0), numbers(-1.0), Outputs::new());
            let inputs = [InputData::F32(&keys), InputData::F32(&values)];
            let mut segments = [Segment::new(Some(&mut *kept), 0, rows)];
            let bindings = Bindings { rows, soft_rows: 0, wanted: 0 };
            text.run(&mut Call::new(bindings, &inputs, &mut segments, &mut outputs)).unwrap();
            kept.commit(rows).unwrap();
            loaded.follow(&mut *state, &*kept).unwrap();
            let last = first + rows - 1;
            assert_eq!(
                (state.len(), &loaded.given[0].keys[..], &loaded.given[0].values[..]),
                (last, &[last as f32, 0.5][..], &[-(last as f32), 0.5][..])
            );
            // A guess puts the last row in, too: then all are the text's.
            let all = kept.export_rows("kv", last).unwrap();
            state.import_rows("kv", last, &all).unwrap();
            state.set_len(last + 1).unwrap();
            assert_eq!(state.export("kv").unwrap(), kept.export("kv").unwrap());
        }
    }
}

//! Runs a case's calls on one device and keeps their results.

use super::{
    build::Case,
    plan::{self, CallPlan, Plan},
};
use crate::{
    Call, Checked, Device, DeviceError, Dim, Executable, IdMask, LoadOptions, Name, Outputs, Phase, RowResult, Segment, SlotData, State,
    Tap, Want, Weights,
};
use std::{
    collections::BTreeMap,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

/// A device running a case: one executable, one state per session.
pub(crate) struct Session<'c> {
    case: &'c Case,
    pub(crate) program: Checked,
    pub(crate) executable: Box<dyn Executable>,
    pub(crate) states: Vec<Box<dyn State>>,
    pub(crate) context: usize,
}

/// Results that must agree, as rows: outputs and taps, valid rows only.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Made {
    pub(crate) name: String,
    pub(crate) width: usize,
    pub(crate) numbers: Vec<f32>,
}

/// What a call asks for beside its rows.
#[derive(Default)]
struct Asked<'a> {
    wants: &'a [Want<'a>],
    cancel: Option<&'a AtomicBool>,
    taps: Option<&'a mut dyn FnMut(Tap<'_>)>,
    /// Done between submitting and waiting.
    meanwhile: Option<&'a mut dyn FnMut()>,
}

/// When a call is to be interrupted.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Cancel {
    Never,
    BeforeStart,
    AtFirstTap,
}

impl<'c> Session<'c> {
    pub(crate) fn new(device: &dyn Device, case: &'c Case, program: &Checked, plan: &Plan) -> Result<Self, DeviceError> {
        let weights: Arc<dyn Weights> = Arc::new(case.weights.clone());
        let bindings = plan.calls.iter().map(|call| plan::inputs(case, program, call, 0).0);
        let mut limits = LoadOptions {
            max_rows: 1,
            max_soft_rows: 0,
            max_wanted: 1,
            max_segments: plan.sessions,
            max_state_bytes: None,
            replaceable: Vec::new(),
            pauses: Vec::new(),
            scratch_group: None,
            history: None,
            artifacts: None,
            progress: None,
            timeline: None,
        };
        for b in bindings {
            limits.max_rows = limits.max_rows.max(b.rows);
            // Calls with other numbers of soft and wanted rows use the same plan: any row may be soft or wanted.
            limits.max_soft_rows = limits.max_rows;
            limits.max_wanted = limits.max_rows;
        }
        let executable = device.load(program, &weights, &limits)?;
        let context = plan.context();
        let states = (0..plan.sessions).map(|_| executable.new_state(context)).collect::<Result<_, _>>()?;
        Ok(Self { case, program: program.clone(), executable, states, context })
    }

    pub(crate) fn new_state(&self) -> Result<Box<dyn State>, DeviceError> {
        self.executable.new_state(self.context)
    }

    /// Runs one call without committing it.
    pub(crate) fn run(&mut self, plan: &CallPlan, salt: u64, cancel: Cancel) -> Result<Vec<Made>, DeviceError> {
        let flag = AtomicBool::new(cancel == Cancel::BeforeStart);
        let (program, mut made) = (self.program.clone(), Vec::new());
        let mut taps = |tap: Tap<'_>| {
            let stage = program.stages.iter().find(|s| &*s.name == tap.stage);
            let value = stage.and_then(|s| s.tap.as_ref());
            made.push(match value {
                Some(value) => keep(&program, plan, format!("tap of stage `{}`", tap.stage), value, tap.values),
                None => Made { name: format!("tap of the unknown stage `{}`", tap.stage), width: 1, numbers: vec![] },
            });
            if cancel == Cancel::AtFirstTap {
                flag.store(true, Ordering::Relaxed);
            }
        };
        let outputs = self.call(plan, salt, Asked { cancel: Some(&flag), taps: Some(&mut taps), ..Asked::default() })?;
        for output in &self.program.outputs {
            let numbers = outputs.value(&output.name).unwrap_or(&[]);
            made.push(keep(&self.program, plan, format!("output `{}`", output.name), &output.value, numbers));
        }
        Ok(made)
    }

    fn call(&mut self, plan: &CallPlan, salt: u64, asked: Asked<'_>) -> Result<Outputs, DeviceError> {
        let (bindings, inputs) = plan::inputs(self.case, &self.program, plan, salt);
        let inputs: Vec<_> = inputs.iter().map(|i| i.data()).collect();
        let (stateful, epochs) = (!self.program.slots.is_empty(), self.program.epochs.len() + 1);
        let mut states: Vec<Option<&mut Box<dyn State>>> = self.states.iter_mut().map(Some).collect();
        let segments = plan.pieces.iter().map(|piece| {
            let state: Option<&mut dyn State> = match states[piece.session].take() {
                Some(state) if stateful => Some(&mut **state),
                _ => None,
            };
            let epoch = (self.case.epoch + piece.session) % epochs;
            Segment { epoch, partial: plan.partial, ..Segment::new(state, piece.first_row, piece.rows) }
        });
        let mut segments: Vec<_> = segments.collect();
        let mut outputs = Outputs::new();
        let mut tap;
        let taps: Option<&mut dyn FnMut(Tap<'_>)> = match asked.taps {
            Some(show) => {
                tap = |it: Tap<'_>| show(it);
                Some(&mut tap)
            }
            None => None,
        };
        let mut call = Call::new(bindings, &inputs, &mut segments, &mut outputs);
        (call.wants, call.cancel, call.taps) = (asked.wants, asked.cancel, taps);
        if plan.pieces.iter().all(|piece| piece.rows == 1 && piece.from > 0) && plan.rows <= plan.pieces.len() {
            call.phase = Phase::Decode;
        }
        let ticket = self.executable.submit(&mut call)?;
        if let Some(meanwhile) = asked.meanwhile {
            meanwhile();
        }
        self.executable.wait(ticket, &mut call)?;
        Ok(outputs)
    }

    /// Runs a call once more, with something smaller than all logits wanted of its rows: the answers must follow from the logits. What is wanted of a row depends on
    /// `salt`.
    pub(crate) fn wants(&mut self, plan: &CallPlan, salt: u64) -> Result<(), String> {
        let Some((place, width)) = self.program.wanted_output() else { return Ok(()) };
        let name = self.program.outputs[place].name.clone();
        let text = |e: DeviceError| format!("a call for which wants are stated: {e}");
        let whole = self.call(plan, 0, Asked::default()).map_err(text)?;
        let logits: Vec<f32> = whole.value(&name).unwrap_or_default().to_vec();
        let odd = OnceLock::new();
        let draw = |row: usize| match (row as u64 + salt) % 6 {
            0 => Want::Logits,
            1 | 2 => Want::Largest,
            3 => Want::LargestAllowed(&odd),
            4 => Want::Top(width.min(5)),
            _ => Want::LogProbs { target: (row % width) as u32, top: width.min(3) },
        };
        // Devices have ways of their own for rows of which little is wanted.
        let little = |row: usize| match salt % 3 {
            1 => Some(Want::Largest),
            2 if row % 2 == 1 => Some(Want::Largest),
            2 => Some(Want::Top(width.min([1, 7, 40][row % 3]))),
            _ => None,
        };
        let wants: Vec<Want<'_>> = (0..logits.len() / width).map(|row| little(row).unwrap_or_else(|| draw(row))).collect();
        if wants.is_empty() {
            return Ok(());
        }
        let mut mask = IdMask::none(width);
        (0..width as u32).filter(|id| id % 2 == 1 || width == 1).for_each(|id| mask.allow(id));
        // A mask may come while the device works.
        let mut meanwhile = || drop(odd.set(mask.clone()));
        let found = self.call(plan, 0, Asked { wants: &wants, meanwhile: Some(&mut meanwhile), ..Asked::default() });
        let found = found.map_err(text)?;
        if found.rows().len() != wants.len() {
            return Err(format!("{} answers to {} wants", found.rows().len(), wants.len()));
        }
        for ((row, want), result) in wants.iter().enumerate().zip(found.rows()) {
            let logits = &logits[row * width..][..width];
            let same = match (want, result) {
                (Want::Logits, RowResult::Logits(at)) => {
                    let found = found.value(&name).and_then(|all| all.get(at * width..(at + 1) * width));
                    found.is_some_and(|found| found.iter().zip(logits).all(|(a, b)| a.to_bits() == b.to_bits()))
                }
                (want, result) => want.of(logits).is_some_and(|expected| expected.is_ok_and(|expected| answers_agree(&expected, result))),
            };
            if !same {
                return Err(format!("wanted row {row}: {want:?} was answered by {result:?}, which does not follow from its logits"));
            }
        }
        Ok(())
    }

    pub(crate) fn commit(&mut self, plan: &CallPlan) -> Result<(), DeviceError> {
        if self.program.slots.is_empty() {
            return Ok(());
        }
        plan.pieces.iter().try_for_each(|piece| piece.commit.map_or(Ok(()), |rows| self.states[piece.session].commit(rows)))
    }

    pub(crate) fn export(&self, session: usize) -> Result<BTreeMap<Name, SlotData>, DeviceError> {
        export(&self.program, &*self.states[session])
    }
}

/// Log probabilities may be summed in another order; what is chosen must be the same.
fn answers_agree(expected: &RowResult, found: &RowResult) -> bool {
    let close = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a - b).abs() <= 1e-4 * (1.0 + a.abs());
    match (expected, found) {
        (RowResult::LogProbs { target: a, top: ids }, RowResult::LogProbs { target: b, top }) => {
            close(*a, *b) && ids.len() == top.len() && ids.iter().zip(top).all(|(a, b)| a.0 == b.0 && close(a.1, b.1))
        }
        (expected, found) => expected == found,
    }
}

/// All slots of a state.
pub(crate) fn export(program: &Checked, state: &dyn State) -> Result<BTreeMap<Name, SlotData>, DeviceError> {
    program.slots.keys().map(|name| Ok((name.clone(), state.export(name)?))).collect()
}

/// Fills a fresh state with the content of `from`: the first half of its rows, then the rest.
pub(crate) fn copy(program: &Checked, from: &dyn State, state: &mut dyn State) -> Result<(), DeviceError> {
    let (len, half) = (from.len(), from.len() / 2);
    for name in program.slots.keys() {
        state.import(name, &first_rows(from.export(name)?, half))?;
    }
    state.set_len(half)?;
    for name in program.slots.keys() {
        state.import_rows(name, half, &from.export_rows(name, half)?)?;
    }
    state.set_len(len)
}

fn first_rows(mut data: SlotData, count: usize) -> SlotData {
    if let SlotData::Kv { rows, keys, values, .. } = &mut data {
        for bytes in [keys, values] {
            bytes.truncate(bytes.len() / (*rows).max(1) * count);
        }
        *rows = count;
    }
    data
}

/// The valid rows of a value in this call.
fn keep(program: &Checked, plan: &CallPlan, name: String, value: &Name, numbers: &[f32]) -> Made {
    let shape = &program.value_type(value).shape;
    let fixed = shape[1..].iter().map(|d| if let Dim::Fixed(n) = d { *n } else { 1 });
    let width = fixed.product::<usize>().max(1);
    let Some(per_row) = shape[0].rows_per_row() else { return Made { name, width, numbers: numbers.to_vec() } };
    let rows = plan.pieces.iter().flat_map(|p| (0..p.rows.div_ceil(per_row)).map(move |i| p.first_row / per_row + i));
    let numbers = rows.filter_map(|row| numbers.get(row * width..(row + 1) * width)).flatten().copied().collect();
    Made { name, width, numbers }
}

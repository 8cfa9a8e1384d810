//! Runs a case's calls on one device and keeps their results.

use super::{
    build::Case,
    plan::{self, CallPlan, Plan},
};
use crate::{Call, Checked, Device, DeviceError, Dim, Executable, LoadOptions, Name, Segment, SlotData, State, Tap, Weights};
use std::{
    collections::BTreeMap,
    sync::{
        Arc,
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
        let mut limits = LoadOptions { max_rows: 1, max_soft_rows: 0, max_wanted: 1, artifacts: None };
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
        let (bindings, inputs) = plan::inputs(self.case, &self.program, plan, salt);
        let inputs: Vec<_> = inputs.iter().map(|i| i.data()).collect();
        let stateful = !self.program.slots.is_empty();
        let mut states: Vec<Option<&mut Box<dyn State>>> = self.states.iter_mut().map(Some).collect();
        let segments = plan.pieces.iter().map(|piece| Segment {
            state: match states[piece.session].take() {
                Some(state) if stateful => Some(&mut **state),
                _ => None,
            },
            first_row: piece.first_row,
            valid_rows: piece.rows,
        });
        let mut segments: Vec<_> = segments.collect();
        let flag = AtomicBool::new(cancel == Cancel::BeforeStart);
        let mut made = Vec::new();
        let mut taps = |tap: Tap<'_>| {
            let stage = self.program.stages.iter().find(|s| &*s.name == tap.stage);
            let value = stage.and_then(|s| s.tap.as_ref());
            made.push(match value {
                Some(value) => keep(&self.program, plan, format!("tap of stage `{}`", tap.stage), value, tap.values),
                None => Made { name: format!("tap of the unknown stage `{}`", tap.stage), width: 1, numbers: vec![] },
            });
            if cancel == Cancel::AtFirstTap {
                flag.store(true, Ordering::Relaxed);
            }
        };
        let mut call = Call {
            bindings,
            inputs: &inputs,
            segments: &mut segments,
            epoch: self.case.epoch,
            cancel: Some(&flag),
            taps: Some(&mut taps),
            largest_only: false,
        };
        self.executable.run(&mut call)?;
        for output in &self.program.outputs {
            let numbers = self.executable.output(&output.name).unwrap_or(&[]);
            made.push(keep(&self.program, plan, format!("output `{}`", output.name), &output.value, numbers));
        }
        Ok(made)
    }

    pub(crate) fn commit(&mut self, plan: &CallPlan) -> Result<(), DeviceError> {
        if self.program.slots.is_empty() {
            return Ok(());
        }
        plan.pieces.iter().try_for_each(|piece| self.states[piece.session].commit(piece.commit))
    }

    pub(crate) fn export(&self, session: usize) -> Result<BTreeMap<Name, SlotData>, DeviceError> {
        export(&self.program, &*self.states[session])
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

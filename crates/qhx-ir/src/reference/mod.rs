//! The reference interpreter: every op in its plainest form, the standard for all devices.
//!
//! It computes exactly what an op specifies: one op after the other, no fusion, no threads, sums in f64 (so that its own rounding
//! does not affect a comparison), results in f32. It is slow on purpose and must stay readable: it defines the meaning of every op.

mod attend;
mod conv;
mod elementwise;
mod frame;
mod linear;
mod moe;
mod norm;
mod recurrent;
mod rope;
mod rows;
mod state;

#[cfg(test)]
pub(crate) mod tests;

pub use state::ReferenceState;

use crate::{
    Call, Checked, Device, DeviceError, DeviceInfo, Executable, Host, InputData, LoadOptions, Machine, Name, Op, OpKind, Pause, Paused,
    Phase, Replace, State, Tap, Ticket, WeightTensor, Weights, hadamard_row,
};
use frame::{Data, Frame, Value};
use state::Pending;
use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

/// The reference device. It supports every op.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReferenceDevice;

/// The same, except that the sums of an [`OpKind::Linear`] are rounded to f16 after every product, as on a processor that adds in f16. For measuring the
/// effect on a stage.
#[derive(Clone, Copy, Debug, Default)]
pub struct HalfSumsDevice;

impl Device for ReferenceDevice {
    fn name(&self) -> &str {
        "reference"
    }

    fn accepts(&self, _program: &Checked, _op: &Op) -> Result<(), DeviceError> {
        Ok(())
    }

    fn replaces_weights(&self) -> bool {
        true
    }

    fn open(&self) -> Result<Arc<dyn Machine>, DeviceError> {
        Ok(Arc::new(Interpreter { name: self.name().into(), description: "plain interpreter, for comparison only", sums: Sums::Exact }))
    }
}

impl Device for HalfSumsDevice {
    fn name(&self) -> &str {
        "reference-f16"
    }

    fn accepts(&self, _program: &Checked, _op: &Op) -> Result<(), DeviceError> {
        Ok(())
    }

    fn open(&self) -> Result<Arc<dyn Machine>, DeviceError> {
        let description = "plain interpreter with sums in f16, for comparison only";
        Ok(Arc::new(Interpreter { name: self.name().into(), description, sums: Sums::Half }))
    }
}

/// The interpreter as a machine.
struct Interpreter {
    name: String,
    description: &'static str,
    sums: Sums,
}

impl Machine for Interpreter {
    fn describe(&self) -> DeviceInfo {
        let (name, description) = (self.name.clone(), self.description.to_owned());
        DeviceInfo { name, description, memory_bytes: None, threads: 1, facts: BTreeMap::new() }
    }

    fn load(&self, program: &Checked, weights: &Arc<dyn Weights>, options: &LoadOptions) -> Result<Box<dyn Executable>, DeviceError> {
        Ok(Box::new(ReferenceExecutable::new(program, weights, options, self.sums)?))
    }
}

/// How the products of a row and a weight are added.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Sums {
    Exact,
    Half,
}

struct ReferenceExecutable {
    program: Checked,
    weights: HashMap<Name, WeightTensor>,
    options: LoadOptions,
    sums: Sums,
    scratch_bytes: u64,
}

impl Executable for ReferenceExecutable {
    fn program(&self) -> &Checked {
        &self.program
    }

    fn new_state(&self, context: usize) -> Result<Box<dyn State>, DeviceError> {
        Ok(Box::new(ReferenceState::new(&self.program, context)?))
    }

    fn submit(&mut self, call: &mut Call<'_>) -> Result<Ticket, DeviceError> {
        call.check(&self.program)?;
        self.options.check(&self.program, call)?;
        Ok(Ticket(0))
    }

    fn wait(&mut self, _: Ticket, call: &mut Call<'_>) -> Result<(), DeviceError> {
        for segment in call.segments.iter_mut() {
            if let Some(state) = &mut segment.state {
                ReferenceState::of_mut(&mut **state, &self.program)?.forget_pending();
            }
        }
        let pending = self.interpret(call)?;
        for (segment, pending) in call.segments.iter_mut().zip(pending) {
            if let Some(state) = &mut segment.state {
                ReferenceState::of_mut(&mut **state, &self.program)?.set_pending(pending);
            }
        }
        Ok(())
    }

    fn max_segments(&self) -> usize {
        self.options.max_segments
    }

    fn commits_partly(&self) -> bool {
        true
    }

    fn invariant_rows(&self) -> usize {
        usize::MAX
    }

    fn replace_part(&mut self, weight: &str, number: usize, part: &WeightTensor) -> Result<(), DeviceError> {
        match self.options.replaceable.iter().any(|name| **name == *weight) {
            true => frame::replace_part(&mut self.weights, weight, number, part),
            false => Err(DeviceError::Weight { name: weight.into(), reason: "cannot be replaced".into() }),
        }
    }

    fn scratch_bytes(&self) -> u64 {
        self.scratch_bytes
    }
}

impl ReferenceExecutable {
    fn new(program: &Checked, weights: &Arc<dyn Weights>, options: &LoadOptions, sums: Sums) -> Result<Self, DeviceError> {
        let declared = program.weights.keys().map(|name| Ok((name.clone(), weights.declared(program, name)?)));
        Ok(Self {
            program: program.clone(),
            weights: declared.collect::<Result<_, DeviceError>>()?,
            options: options.clone(),
            sums,
            scratch_bytes: 0,
        })
    }

    /// Runs all ops; returns the new state of each segment.
    fn interpret(&mut self, call: &mut Call<'_>) -> Result<Vec<Pending>, DeviceError> {
        let program = self.program.clone();
        let mut frame = Frame::new(&program, &mut self.weights, call.bindings, call.segments)?;
        for (input, &data) in program.inputs.iter().zip(call.inputs) {
            frame.insert(&input.name, data.into())?;
            deliver(&frame, &input.name, &mut call.taps);
        }
        let mut pauses = self.options.pauses.iter().enumerate().peekable();
        for (place, op) in program.ops.iter().enumerate() {
            while let Some((number, own)) = pauses.next_if(|(_, pause)| pause.before == place) {
                pause(&mut frame, number, own, call.phase, &mut call.host)?;
            }
            if call.cancel.is_some_and(|flag| flag.load(std::sync::atomic::Ordering::Relaxed)) {
                return Err(DeviceError::Cancelled);
            }
            let results = step(&mut frame, op, self.sums);
            for (name, data) in op.outputs().iter().zip(results) {
                frame.insert(name, data)?;
                deliver(&frame, name, &mut call.taps);
            }
        }
        self.scratch_bytes = frame.bytes();
        call.outputs.give(&program, call.wants, |output| frame.value(&output.value).to_f32())?;
        Ok(frame.into_pending())
    }
}

/// Has the host make the inputs that a pause takes. While answers are generated nothing is replaced, as on devices that have the whole call by then.
fn pause(frame: &mut Frame<'_>, number: usize, pause: &Pause, phase: Phase, host: &mut Option<&mut Host<'_>>) -> Result<(), DeviceError> {
    let missing = || DeviceError::Call(format!("program `{}` pauses, but nobody answers", frame.program.name));
    let host = host.as_mut().ok_or_else(missing)?;
    let given: Vec<Vec<f32>> = pause.gives.iter().map(|name| frame.value(name).to_f32()).collect();
    let given: Vec<&[f32]> = given.iter().map(Vec::as_slice).collect();
    let mut taken: Vec<(usize, Data)> = Vec::new();
    let mut replace = |weight: &str, number: usize, part: &WeightTensor| frame.replace_part(weight, number, part);
    let mut take = |place: usize, data: InputData<'_>| taken.push((place, data.into()));
    let replace: Option<&mut Replace<'_>> = if phase == Phase::Prefill { Some(&mut replace) } else { None };
    host(&mut Paused { number, given: &given, take: &mut take, replace })?;
    let names: Vec<&Name> = pause.takes.iter().chain(&pause.changes).collect();
    taken.into_iter().try_for_each(|(place, data)| frame.insert(names[place], data))
}

/// Passes a value to the tap of every stage that it belongs to.
fn deliver(frame: &Frame<'_>, name: &Name, taps: &mut Option<&mut dyn FnMut(Tap<'_>)>) {
    let Some(taps) = taps else { return };
    for &stage in frame.program.stages_shown_by(name) {
        let Value { shape, .. } = frame.value(name);
        Tap::show(&frame.program.stages[stage], shape, &frame.value(name).to_f32(), *taps);
    }
}

/// The results of one op, in the order of [`Op::outputs`].
fn step(frame: &mut Frame<'_>, op: &Op, sums: Sums) -> Vec<Data> {
    let one = |numbers| vec![Data::F32(numbers)];
    match &op.op {
        OpKind::Embed { ids, table, scale } => one(linear::embed(frame, ids, table, *scale)),
        OpKind::Interpolate { index, factor, table } => one(linear::interpolate(frame, index, factor, table)),
        OpKind::Linear { x, weight, bias, activation, clip } => {
            let dot = if sums == Sums::Half { linear::half_dot } else { linear::dot };
            one(linear::linear(frame, x, weight, bias.as_ref(), *activation, clip.as_ref(), dot))
        }
        OpKind::RmsNorm { x, weight, eps } => one(norm::rms_norm(frame, x, weight.as_ref(), *eps)),
        OpKind::LayerNorm { x, weight, bias, eps } => one(norm::layer_norm(frame, x, weight, bias.as_ref(), *eps)),
        OpKind::Rope { x, positions, rotary } => one(rope::rope(frame, x, positions, rotary)),
        OpKind::Attend { .. } => one(attend::attend(frame, &op.op)),
        OpKind::ShortConv { x, weight, bias, slot, activation } => {
            one(recurrent::short_conv(frame, x, weight, bias.as_ref(), slot.as_ref(), *activation))
        }
        OpKind::GatedDelta { .. } => one(recurrent::gated_delta(frame, &op.op)),
        OpKind::Route { scores, method } => {
            let (experts, weights) = moe::route(frame, scores, method);
            vec![Data::I32(experts), Data::F32(weights)]
        }
        OpKind::Experts { .. } => one(moe::experts(frame, &op.op)),
        OpKind::GateAct { gate, up, activation } => {
            one(elementwise::zip(frame, gate, up, |g, u| elementwise::activate(g, *activation) * u))
        }
        OpKind::Activate { x, activation } => one(elementwise::map(frame, x, |v| elementwise::activate(v, *activation))),
        OpKind::Add { a, b } => one(elementwise::zip(frame, a, b, |a, b| a + b)),
        OpKind::Mul { a, b } => one(elementwise::zip(frame, a, b, |a, b| a * b)),
        OpKind::Scale { x, factor, weight } => one(elementwise::scale(frame, x, *factor, weight.as_ref())),
        OpKind::Hadamard { x } => {
            let mut numbers = frame.f32s(x).to_vec();
            numbers.chunks_exact_mut(frame.width(x)).for_each(hadamard_row);
            one(numbers)
        }
        OpKind::Softcap { x, cap } => one(elementwise::map(frame, x, |v| elementwise::softcap(v, *cap as f64))),
        OpKind::Clamp { x, low, high } => one(elementwise::map(frame, x, |v| v.max(*low as f64).min(*high as f64))),
        OpKind::Concat { xs } => one(rows::concat(frame, xs)),
        OpKind::Slice { x, axis, start, length } => one(rows::slice(frame, x, *axis, *start, *length)),
        OpKind::Reshape { x, .. } => one(frame.f32s(x).to_vec()),
        OpKind::Gather { x, rows } => one(rows::gather(frame, x, rows)),
        OpKind::ScatterRows { x, rows, at } => one(rows::scatter(frame, x, rows, at, |_, new| new)),
        OpKind::ScatterAddRows { x, rows, at } => one(rows::scatter(frame, x, rows, at, |old, new| old + new)),
        OpKind::Conv2d { x, weight, bias, stride } => one(conv::conv2d(frame, x, weight, bias.as_ref(), *stride)),
        OpKind::Pool { x, size } => one(conv::pool(frame, x, *size)),
    }
}

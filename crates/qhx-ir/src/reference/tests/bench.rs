//! A program of a few ops, run on given numbers.

use crate::{
    AlignedBytes, Bindings, Call, Checked, DType, Device, DeviceError, Dim, Encoding, Executable, Generator, Input, InputData, LoadOptions,
    Name, Op, OpKind, Output, Outputs, PROGRAM_VERSION, Program, Rotary, Segment, Slot, Stage, State, Tap, Weight, WeightTensor, Weights,
    reference::ReferenceDevice,
};
use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, atomic::AtomicBool},
};

/// A program in the making; every op's results are outputs.
pub(crate) struct Bench {
    pub(crate) program: Program,
    weights: HashMap<String, WeightTensor>,
}

impl Bench {
    pub(crate) fn new() -> Self {
        let program = Program {
            program_version: PROGRAM_VERSION,
            name: "bench".into(),
            inputs: vec![],
            outputs: vec![],
            slots: BTreeMap::new(),
            epochs: vec![],
            rotaries: BTreeMap::new(),
            stages: vec![Stage { name: "op".into(), tap: None, rotated: false, centred: false }],
            weights: BTreeMap::new(),
            ops: vec![],
        };
        Self { program, weights: HashMap::new() }
    }

    pub(crate) fn input(mut self, name: &str, dtype: DType, shape: &[Dim]) -> Self {
        self.program.inputs.push(Input { name: name.into(), dtype, shape: shape.to_vec(), generator: Generator::Carried });
        self
    }

    /// An f32 input `[T, tail..]`.
    pub(crate) fn rows(self, name: &str, tail: &[usize]) -> Self {
        let shape: Vec<Dim> = std::iter::once(Dim::T).chain(tail.iter().map(|&n| Dim::Fixed(n))).collect();
        self.input(name, DType::F32, &shape)
    }

    pub(crate) fn tensor(mut self, name: &str, tensor: WeightTensor) -> Self {
        self.program.weights.insert(name.into(), Weight { shape: tensor.shape().to_vec(), encoding: tensor.encoding() });
        self.weights.insert(name.into(), tensor);
        self
    }

    pub(crate) fn weight(self, name: &str, shape: &[usize], numbers: &[f32]) -> Self {
        self.tensor(name, WeightTensor::from_f32(shape, numbers).unwrap())
    }

    pub(crate) fn slot(mut self, name: &str, slot: Slot) -> Self {
        self.program.slots.insert(name.into(), slot);
        self
    }

    pub(crate) fn rotary(mut self, name: &str, rotary: Rotary) -> Self {
        self.program.rotaries.insert(name.into(), rotary);
        self
    }

    /// Adds an op under the path `op.NAME`.
    pub(crate) fn op(mut self, name: &str, op: OpKind) -> Self {
        let op = Op { path: format!("op.{name}").into(), op };
        self.program.outputs.extend(op.outputs().into_iter().map(|value| Output { name: value.clone(), value }));
        self.program.ops.push(op);
        self
    }

    pub(crate) fn load(self) -> Loaded {
        let program = Checked::new(self.program).unwrap();
        let weights: Arc<dyn Weights> = Arc::new(self.weights);
        let limits = LoadOptions {
            max_rows: 64,
            max_soft_rows: 64,
            max_wanted: 64,
            max_segments: 8,
            max_state_bytes: None,
            replaceable: Vec::new(),
            pauses: Vec::new(),
            scratch_group: None,
            history: None,
            artifacts: None,
            progress: None,
            timeline: None,
        };
        Loaded {
            executable: ReferenceDevice.load(&program, &weights, &limits).unwrap(),
            epoch: 0,
            soft_rows: 0,
            wanted: 0,
            outputs: Outputs::new(),
        }
    }

    /// Loads and runs `rows` rows once, in one segment without state; gives the last op's result.
    pub(crate) fn once(self, rows: usize, inputs: &[InputData<'_>]) -> Vec<f32> {
        let mut loaded = self.load();
        loaded.run(rows, inputs, &mut [Segment::new(None, 0, rows)]).unwrap();
        loaded.last()
    }
}

pub(crate) struct Loaded {
    pub(crate) executable: Box<dyn Executable>,
    pub(crate) epoch: usize,
    pub(crate) soft_rows: usize,
    pub(crate) wanted: usize,
    pub(crate) outputs: Outputs,
}

impl Loaded {
    pub(crate) fn state(&self) -> Box<dyn State> {
        self.executable.new_state(64).unwrap()
    }

    pub(crate) fn run(&mut self, rows: usize, inputs: &[InputData<'_>], segments: &mut [Segment<'_>]) -> Result<(), DeviceError> {
        self.run_with(rows, inputs, segments, None, None)
    }

    pub(crate) fn run_with(
        &mut self,
        rows: usize,
        inputs: &[InputData<'_>],
        segments: &mut [Segment<'_>],
        cancel: Option<&AtomicBool>,
        taps: Option<&mut dyn FnMut(Tap<'_>)>,
    ) -> Result<(), DeviceError> {
        let bindings = Bindings { rows, soft_rows: self.soft_rows, wanted: self.wanted };
        // A call has one lifetime for all that it borrows: the segments are borrowed anew, so that tests need not care.
        let segments = segments.iter_mut().map(|s| {
            let state: Option<&mut dyn State> = match &mut s.state {
                Some(state) => Some(&mut **state),
                None => None,
            };
            Segment { epoch: self.epoch, partial: s.partial, ..Segment::new(state, s.first_row, s.valid_rows) }
        });
        let mut segments: Vec<Segment<'_>> = segments.collect();
        let mut none = |_: Tap<'_>| {};
        let taps = taps.unwrap_or(&mut none);
        let mut taps = |tap: Tap<'_>| taps(tap);
        let mut call = Call::new(bindings, inputs, &mut segments, &mut self.outputs);
        call.cancel = cancel;
        call.taps = Some(&mut taps);
        self.executable.run(&mut call)
    }

    /// Runs all rows on one state and commits them; gives the last op's result.
    pub(crate) fn step(&mut self, state: &mut dyn State, rows: usize, inputs: &[InputData<'_>]) -> Vec<f32> {
        self.run(rows, inputs, &mut [Segment::new(Some(state), 0, rows)]).unwrap();
        state.commit(rows).unwrap();
        self.last()
    }

    pub(crate) fn output(&self, name: &str) -> Vec<f32> {
        self.outputs.value(&format!("op.{name}")).unwrap().to_vec()
    }

    /// The last op's (last) result.
    pub(crate) fn last(&self) -> Vec<f32> {
        let name: Name = self.executable.program().outputs.last().unwrap().name.clone();
        self.outputs.value(&name).unwrap().to_vec()
    }
}

/// An `i8_row` weight of one row with the given quants and scale; the row's padding is garbage.
pub(crate) fn i8_row(quants: &[i8], scale: f32) -> WeightTensor {
    let mut data = AlignedBytes::zeroed(quants.len().next_multiple_of(64));
    data.as_mut().fill(0x55);
    data.as_mut().iter_mut().zip(quants).for_each(|(byte, &q)| *byte = q as u8);
    let scale = AlignedBytes::copy_of(&scale.to_le_bytes());
    WeightTensor::new(Encoding::I8Row, vec![1, quants.len()], data.into(), Some(scale.into()), None).unwrap()
}

pub(crate) fn assert_close(found: &[f32], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "found {found:?}, expected {expected:?}");
    for (i, (&f, &e)) in found.iter().zip(expected).enumerate() {
        assert!((f as f64 - e).abs() <= 2e-7 * e.abs().max(1.0), "number {i}: found {f}, expected {e} in {found:?} and {expected:?}");
    }
}

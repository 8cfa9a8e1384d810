//! Facts about devices, found by running small programs of known size on them.

use super::{clock::Clock, work::Work};
use qhx_ir::{
    Activation, ActivationForm, AlignedBytes, Bindings, Call, Checked, DType, Device, DeviceError, Dim, Encoding, Executable, Generator,
    Input, InputData, LoadOptions, Name, Op, OpKind, Output, Outputs, PROGRAM_VERSION, Pause, Paused, Phase, Program, RowBytes, Segment,
    Stage, Weight, WeightTensor, Weights,
};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, HashMap},
    mem,
    sync::Arc,
    time::Duration,
};

/// What is known of a device.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceFacts {
    /// A call that does next to nothing.
    pub call_seconds: f64,
    /// What a pause adds to a call, where the device can pause; elsewhere as much as a call.
    pub pause_seconds: f64,
    /// What each op adds to a call, apart from reading and computing.
    pub op_seconds: f64,
    /// Weights that products of one row read.
    pub read_bytes_per_second: f64,
    /// Multiplications in products of many rows.
    pub products_per_second: f64,
    /// Values that come from the host and go back to it.
    pub copied_bytes_per_second: f64,
}

/// What is known of two devices that may share the work.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Facts {
    /// The one with the faster products, usually: a GPU.
    pub accelerator: DeviceFacts,
    /// The host's processor.
    pub processor: DeviceFacts,
    /// How much longer both take when they read at the same time than the slower of them alone: 1 where they do not disturb one another, 2 where one has to
    /// wait for the other.
    pub together: f64,
}

/// How weights are stored, and how rows enter the products with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Form {
    pub(super) encoding: Encoding,
    pub(super) activation: ActivationForm,
}

impl Form {
    /// That of most of a program's bytes.
    pub(super) fn of(program: &Checked) -> Self {
        let mut bytes: Vec<(Self, u64)> = Vec::new();
        for op in &program.ops {
            let (weight, activation) = match &op.op {
                OpKind::Linear { weight, activation, .. } => (weight, *activation),
                OpKind::Experts { gate, form, .. } => (gate, *form),
                _ => continue,
            };
            let Some(weight) = program.weights.get(weight) else { continue };
            let form = Self { encoding: weight.encoding, activation };
            let own = crate::memory::tensor_bytes(weight.encoding, &weight.shape);
            match bytes.iter_mut().find(|(known, _)| *known == form) {
                Some((_, sum)) => *sum = sum.saturating_add(own),
                None => bytes.push((form, own)),
            }
        }
        let most = bytes.into_iter().max_by_key(|(_, bytes)| *bytes);
        most.map_or(Self { encoding: Encoding::F32, activation: ActivationForm::F32 }, |(form, _)| form)
    }
}

impl DeviceFacts {
    /// How long an op takes.
    pub(super) fn op(&self, work: Work) -> f64 {
        self.op_seconds + (work.bytes / self.read_bytes_per_second).max(work.products / self.products_per_second)
    }

    pub(super) fn is_sound(&self) -> bool {
        let Self { call_seconds, pause_seconds, op_seconds, read_bytes_per_second, products_per_second, copied_bytes_per_second } = *self;
        [read_bytes_per_second, products_per_second, copied_bytes_per_second].iter().all(|rate| rate.is_finite() && *rate > 0.0)
            && [call_seconds, pause_seconds, op_seconds].iter().all(|seconds| seconds.is_finite() && *seconds >= 0.0)
    }
}

/// Rows and columns of the probes' matrices, of which there are so many where memory allows: more bytes than caches hold. Then the least.
const WIDTH: usize = 2048;
const MATRICES: usize = 24;
const LEAST_WIDTH: usize = 64;
/// A device with less memory of its own is not worth measuring.
pub(super) const LEAST_MEMORY: u64 = 256 << 10;
/// Ops of the program that does little with each.
const SMALL_OPS: usize = 32;
/// Pauses of the program that waits for the host.
const PAUSES: usize = 8;
const MANY_ROWS: usize = 128;
/// Bytes of a page of memory, at least.
const PAGE: usize = 4096;
/// Matrices of the program that multiplies them with many rows.
const MULTIPLIED: usize = 2;
/// Each probe runs so often, or until it has taken so long; the fastest time counts, for whatever else the machine does makes it slower.
const REPEATS: usize = 5;
const ENOUGH: Duration = Duration::from_millis(100);

impl Facts {
    /// Measures both devices, alone and together.
    pub(super) fn measure(accelerator: &dyn Device, processor: &dyn Device, form: Form, clock: &dyn Clock) -> Result<Self, DeviceError> {
        // Half of the memory is left for whatever else a program needs.
        let probes = Probes::new(form, accelerator.own_memory()?.map_or(u64::MAX, |bytes| bytes / 2))?;
        let [mut first, mut second] = [Probe::load(accelerator, &probes)?, Probe::load(processor, &probes)?];
        let [accelerator, processor] = [first.facts(clock)?, second.facts(clock)?];
        let alone = probes.bytes / accelerator.read_bytes_per_second.min(processor.read_bytes_per_second);
        let mut both = f64::INFINITY;
        for _ in 0..REPEATS {
            let started = clock.now();
            run_both(&mut *first.matrices, &mut *second.matrices, probes.width)?;
            both = both.min((clock.now() - started).as_secs_f64());
        }
        Ok(Self { accelerator, processor, together: (both / alone.max(1e-9)).max(1.0) })
    }

    pub(crate) fn is_sound(&self) -> bool {
        self.accelerator.is_sound() && self.processor.is_sound() && self.together.is_finite() && self.together >= 1.0
    }
}

/// The programs that are run, and their weights.
struct Probes {
    /// Numbers in a row.
    width: usize,
    small: Checked,
    chain: Checked,
    pausing: (Checked, Vec<Pause>),
    matrices: Checked,
    products: Checked,
    weights: Arc<dyn Weights>,
    /// Of all matrices.
    bytes: f64,
}

impl Probes {
    fn new(form: Form, room: u64) -> Result<Self, DeviceError> {
        let wrong = |reason: String| DeviceError::Call(format!("a program that measures a device: {reason}"));
        let zeros = |bytes: usize| {
            let mut zeros = AlignedBytes::zeroed(bytes);
            // Memory that was never written is one page for all, which a cache holds.
            zeros.as_mut().iter_mut().step_by(PAGE).for_each(|byte| *byte = std::hint::black_box(0));
            zeros.into()
        };
        let row = |width| form.encoding.row_bytes(width).ok_or_else(|| wrong("its weights are too large".into()));
        let bytes = |width: usize, row: &RowBytes| (width * (row.data + row.scale + row.min)) as u64;
        let mut width = WIDTH;
        while width > LEAST_WIDTH && bytes(width, &row(width)?) > room / 4 {
            width /= 2;
        }
        let row = row(width)?;
        let each = bytes(width, &row);
        let matrices = (room / each).clamp(1, MATRICES as u64) as usize;
        let part = |bytes: usize| (bytes > 0).then(|| zeros(width * bytes));
        let mut weights: HashMap<String, WeightTensor> = HashMap::new();
        for number in 0..matrices {
            let tensor = WeightTensor::new(form.encoding, vec![width, width], zeros(width * row.data), part(row.scale), part(row.min));
            weights.insert(matrix_name(number), tensor.map_err(wrong)?);
        }
        let activate = |x: Name| OpKind::Activate { x, activation: Activation::Silu };
        let multiply = |x: Name, number: usize| OpKind::Linear {
            x,
            weight: matrix_name(number).into(),
            bias: None,
            activation: form.activation,
            clip: None,
        };
        let chain = |name, length, op: &dyn Fn(Name, usize) -> OpKind| chain(name, length, width, form, op);
        Ok(Self {
            width,
            small: chain("small", 1, &|x, _| activate(x))?,
            chain: chain("chain", SMALL_OPS, &|x, _| activate(x))?,
            pausing: pausing(width, form)?,
            matrices: chain("matrices", matrices, &multiply)?,
            products: chain("products", MULTIPLIED.min(matrices), &multiply)?,
            bytes: weights.values().map(|tensor| tensor.stored_bytes() as f64).sum(),
            weights: Arc::new(weights),
        })
    }
}

fn matrix_name(number: usize) -> String {
    format!("matrix.{number}")
}

/// Sums, each of what the one before it made and of what the host makes of that.
fn pausing(width: usize, form: Form) -> Result<(Checked, Vec<Pause>), DeviceError> {
    let late = |number: usize| Name::from(format!("late.{number}"));
    let plain = chain("pausing", PAUSES, width, form, &|x, _| OpKind::Activate { x, activation: Activation::Silu })?;
    let mut program = (*plain).clone();
    let mut pauses = Vec::new();
    let mut last = program.inputs[0].name.clone();
    for (number, op) in program.ops.iter_mut().enumerate() {
        let input = Input { name: late(number), ..program.inputs[0].clone() };
        // What is given has to be made by an op.
        let gives = if number > 0 { vec![last.clone()] } else { Vec::new() };
        pauses.push(Pause { before: number, gives, takes: vec![input.name.clone()], changes: Vec::new() });
        op.op = OpKind::Add { a: mem::replace(&mut last, op.path.clone()), b: input.name.clone() };
        program.inputs.push(input);
    }
    Ok((Checked::new(program)?, pauses))
}

/// A program of ops that take what the one before them made.
fn chain(name: &str, length: usize, width: usize, form: Form, op: &dyn Fn(Name, usize) -> OpKind) -> Result<Checked, DeviceError> {
    let value: Name = "x".into();
    let shape = vec![Dim::T, width.into()];
    let mut ops: Vec<Op> = Vec::new();
    for number in 0..length {
        let x = ops.last().map_or_else(|| value.clone(), |last| last.path.clone());
        ops.push(Op { path: format!("probe.{number}").into(), op: op(x, number) });
    }
    let used = ops.iter().flat_map(|op| op.op.weights()).cloned();
    let weights: BTreeMap<Name, Weight> = used.map(|name| (name, Weight { encoding: form.encoding, shape: vec![width, width] })).collect();
    let last = ops.last().map_or_else(|| value.clone(), |last| last.path.clone());
    Ok(Checked::new(Program {
        program_version: PROGRAM_VERSION,
        name: name.into(),
        inputs: vec![Input { name: value, dtype: DType::F32, shape, generator: Generator::Carried }],
        outputs: vec![Output { name: last.clone(), value: last }],
        slots: BTreeMap::new(),
        epochs: Vec::new(),
        rotaries: BTreeMap::new(),
        stages: vec![Stage { name: "probe".into(), tap: None, rotated: false, centred: false }],
        weights,
        ops,
    })?)
}

/// The programs on a device.
struct Probe<'a> {
    small: Box<dyn Executable>,
    chain: Box<dyn Executable>,
    pausing: Option<Box<dyn Executable>>,
    matrices: Box<dyn Executable>,
    products: Box<dyn Executable>,
    probes: &'a Probes,
}

impl<'a> Probe<'a> {
    fn load(device: &dyn Device, probes: &'a Probes) -> Result<Self, DeviceError> {
        let options = LoadOptions { max_rows: MANY_ROWS, max_soft_rows: 0, ..LoadOptions::default() };
        let load = |program: &Checked| device.load(program, &probes.weights, &options);
        let Probes { small, chain, pausing: (pausing, pauses), matrices, products, .. } = probes;
        let pausing = device.replaces_weights().then(|| {
            let options = LoadOptions { pauses: pauses.clone(), max_rows: 1, ..options.clone() };
            device.load(pausing, &probes.weights, &options)
        });
        let pausing = pausing.transpose()?;
        Ok(Self { small: load(small)?, chain: load(chain)?, pausing, matrices: load(matrices)?, products: load(products)?, probes })
    }

    fn facts(&mut self, clock: &dyn Clock) -> Result<DeviceFacts, DeviceError> {
        let width = self.probes.width;
        let fastest = |executable: &mut dyn Executable, rows| fastest(executable, rows, width, clock);
        let call_seconds = fastest(&mut *self.small, 1)?;
        let many_copied = (fastest(&mut *self.small, MANY_ROWS)? - call_seconds).max(1e-9);
        let chain = fastest(&mut *self.chain, 1)?;
        let op_seconds = ((chain - call_seconds) / (SMALL_OPS - 1) as f64).max(0.0);
        let pause_seconds = match &mut self.pausing {
            Some(pausing) => ((fastest(&mut **pausing, 1)? - call_seconds) / PAUSES as f64 - op_seconds).max(0.0),
            None => call_seconds,
        };
        let around = |ops: usize| call_seconds + op_seconds * ops as f64;
        let (read, multiplied) = (self.probes.matrices.ops.len(), self.probes.products.ops.len());
        let reading = (fastest(&mut *self.matrices, 1)? - around(read)).max(1e-9);
        let computing = (fastest(&mut *self.products, MANY_ROWS)? - around(multiplied) - many_copied).max(1e-9);
        let products = (MANY_ROWS * multiplied * width * width) as f64;
        Ok(DeviceFacts {
            call_seconds,
            pause_seconds,
            op_seconds,
            read_bytes_per_second: self.probes.bytes / reading,
            products_per_second: products / computing,
            copied_bytes_per_second: (2 * 4 * (MANY_ROWS - 1) * width) as f64 / many_copied,
        })
    }
}

fn fastest(executable: &mut dyn Executable, rows: usize, width: usize, clock: &dyn Clock) -> Result<f64, DeviceError> {
    let input = vec![0.5f32; rows * width];
    let inputs = vec![InputData::F32(&input); executable.program().inputs.len()];
    let mut outputs = Outputs::new();
    let (mut best, began) = (f64::INFINITY, clock.now());
    for number in 0..=REPEATS {
        let started = clock.now();
        let mut host = |paused: &mut Paused<'_>| {
            (paused.take)(0, InputData::F32(&input));
            Ok(())
        };
        let mut segments = [Segment::new(None, 0, rows)];
        let mut call = call(rows, &inputs, &mut segments, &mut outputs);
        call.phase = if rows == 1 { Phase::Decode } else { Phase::Prefill };
        call.host = Some(&mut host);
        executable.run(&mut call)?;
        best = best.min((clock.now() - started).as_secs_f64());
        // The first compiles and fills caches.
        if number > 0 && clock.now() - began > ENOUGH {
            break;
        }
    }
    Ok(best)
}

/// One row through all matrices, on two devices at the same time.
fn run_both(accelerator: &mut dyn Executable, processor: &mut dyn Executable, width: usize) -> Result<(), DeviceError> {
    let input = vec![0.5f32; width];
    let inputs = [InputData::F32(&input)];
    let (mut first, mut second) = (Outputs::new(), Outputs::new());
    let (mut own, mut other) = ([Segment::new(None, 0, 1)], [Segment::new(None, 0, 1)]);
    let (mut first, mut second) = (call(1, &inputs, &mut own, &mut first), call(1, &inputs, &mut other, &mut second));
    let begun = accelerator.submit(&mut first)?;
    let done = processor.run(&mut second);
    accelerator.wait(begun, &mut first)?;
    done
}

fn call<'a>(rows: usize, inputs: &'a [InputData<'a>], segments: &'a mut [Segment<'a>], outputs: &'a mut Outputs) -> Call<'a> {
    Call::new(Bindings { rows, soft_rows: 0, wanted: 0 }, inputs, segments, outputs)
}

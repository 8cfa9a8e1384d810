//! From a checked program to steps: names become buffers, views cost nothing, every op becomes a few dispatches.

mod fusion;
mod heads;
mod matrices;
mod mixing;
mod order;
mod products;
mod simple;
mod single;

use crate::{
    kernels,
    plan::{self, Lifetime},
    recorder::{Addresses, Aliases, Recorder, Resource, Step, bind},
    state::SlotLayout,
    stream::{Instruction, Operation, StreamPlan},
    vulkan::SmallMatrices,
    weights::{DeviceWeights, Matrix},
};
use qhx_ir::{ActivationForm, Bindings, Checked, DType, DeviceError, Dim, LoadOptions, Name, OpKind, Pause, Shape, Symbol};
use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

pub(crate) use simple::tables;

/// A program as steps.
pub(crate) struct Lowered {
    pub(crate) steps: Vec<Step>,
    /// From this step on, all work on wanted rows only, or can be repeated: it can be done for some of the wanted rows after the others.
    pub(crate) wanted_from: usize,
    /// In the order in which they are delivered.
    pub(crate) taps: Vec<Tapped>,
    /// In the program's order.
    pub(crate) outputs: Vec<View>,
    /// In their order.
    pub(crate) pauses: Vec<LoweredPause>,
    /// For the step of one row, where all products and attention have instructions.
    pub(crate) stream: Option<StreamPlan>,
    pub(crate) aliases: Aliases,
    buffers: Vec<Buffer>,
    offsets: Vec<u64>,
    /// Bytes of the arena, of inputs that are given in pauses, and of what pauses give.
    pub(crate) arena: u64,
    pub(crate) late: u64,
    pub(crate) given: u64,
}

/// A pause.
pub(crate) struct LoweredPause {
    /// The place of its step.
    pub(crate) step: usize,
    /// What it gives, and from which byte on.
    pub(crate) gives: Vec<(View, u64)>,
    /// The places of the inputs that it takes, and behind them of those that the host may change.
    pub(crate) takes: Vec<usize>,
    pub(crate) changes: Vec<usize>,
}

/// A stage's tap.
pub(crate) struct Tapped {
    /// Delivered when so many steps are done.
    pub(crate) after: usize,
    /// The stage's place.
    pub(crate) stage: usize,
    pub(crate) view: View,
}

/// A value: a buffer and a shape.
#[derive(Clone, Debug)]
pub(crate) struct View {
    pub(crate) buffer: usize,
    pub(crate) shape: Shape,
    pub(crate) dtype: DType,
}

impl View {
    /// The last dimension.
    pub(crate) fn width(&self) -> usize {
        match self.shape.last() {
            Some(&Dim::Fixed(n)) => n,
            _ => unreachable!("checked: the last dimension is a number"),
        }
    }

    /// All dimensions but the last.
    fn outer(&self) -> &[Dim] {
        &self.shape[..self.shape.len() - 1]
    }

    /// Rows of the call for each row of the value.
    fn rows_per_row(&self) -> u32 {
        self.shape[0].rows_per_row().unwrap_or(1) as u32
    }
}

/// Memory that steps use.
struct Buffer {
    held: Held,
    bytes: u64,
}

/// Where a buffer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Held {
    Arena,
    /// The input with this number.
    Input(usize),
    /// The same, but given in a pause.
    Late(usize),
    /// What a pause gives, from this byte on.
    Given(u64),
}

/// Lowers `program` for calls within `limits`, with their pauses. Attention takes at most `most_queries` queries at once; `matrices` are what the device multiplies. `stream`: how a step of one row is to be made of instructions, if at all.
pub(crate) fn lower(
    program: &Checked,
    weights: &DeviceWeights,
    slots: &Arc<SlotLayout>,
    limits: &LoadOptions,
    most_queries: usize,
    matrices: Option<SmallMatrices>,
    stream: Option<StreamPlan>,
) -> Result<Lowered, DeviceError> {
    let max = Bindings { rows: limits.max_rows, soft_rows: limits.max_soft_rows, wanted: limits.max_wanted };
    let pauses = &limits.pauses;
    let mut lowering = Lowering {
        program,
        weights,
        slots: slots.clone(),
        max,
        most_queries,
        matrices,
        values: HashMap::new(),
        buffers: Vec::new(),
        steps: Vec::new(),
        wanted: HashSet::new(),
        taps: Vec::new(),
        pauses: Vec::new(),
        kept: pauses.iter().flat_map(|pause| pause.gives.iter().cloned()).collect(),
        given: 0,
        prepared: HashMap::new(),
        splits: HashMap::new(),
        turns: HashMap::new(),
        turnings: HashMap::new(),
        done: HashSet::new(),
        single: single::Single::new(stream),
    };
    for (place, input) in program.inputs.iter().enumerate() {
        let is_late = pauses.iter().any(|pause| pause.takes.contains(&input.name));
        let held = if is_late { Held::Late(place) } else { Held::Input(place) };
        lowering.buffers.push(Buffer { held, bytes: lowering.bytes(&input.shape) });
        if !is_late {
            lowering.define_input(place);
        }
    }
    let mut pauses = pauses.iter().peekable();
    for (place, op) in program.ops.iter().enumerate() {
        while let Some(pause) = pauses.next_if(|pause| pause.before == place) {
            lowering.pause(pause)?;
        }
        if !lowering.done.contains(&place) {
            lowering.op(&op.path, &op.op)?;
        }
    }
    Ok(lowering.finish())
}

struct Lowering<'a> {
    program: &'a Checked,
    weights: &'a DeviceWeights,
    slots: Arc<SlotLayout>,
    max: Bindings,
    /// Queries that attention takes at once.
    most_queries: usize,
    /// What small matrices the device multiplies.
    matrices: Option<SmallMatrices>,
    values: HashMap<Name, View>,
    buffers: Vec<Buffer>,
    steps: Vec<Step>,
    /// Buffers with a row for each wanted one.
    wanted: HashSet<usize>,
    taps: Vec<Tapped>,
    pauses: Vec<LoweredPause>,
    /// Values that pauses give.
    kept: HashSet<Name>,
    /// Bytes of what a pause gives at most.
    given: u64,
    /// Rows as they enter products, by buffer, width, form and bounds.
    prepared: HashMap<(usize, usize, ActivationForm, [u32; 2]), Prepared>,
    /// Rows of floats that are split into f16, by their buffer.
    splits: HashMap<usize, Prepared>,
    /// Cosines and sines by positions and rotary.
    turns: HashMap<(Name, Name), usize>,
    /// How heads are turned.
    turnings: HashMap<Name, simple::Turning>,
    /// Ops that were lowered together with an earlier one.
    done: HashSet<usize>,
    /// What steps of one row do differently.
    single: single::Single,
}

/// Rows as they enter products.
#[derive(Clone, Copy)]
struct Prepared {
    numbers: usize,
    scales: Option<usize>,
    /// Numbers from row to row.
    stride: usize,
}

impl Lowering<'_> {
    fn op(&mut self, path: &Name, op: &OpKind) -> Result<(), DeviceError> {
        match op {
            OpKind::Embed { .. } | OpKind::Interpolate { .. } => self.embed(path, op),
            OpKind::Linear { .. } => self.linear(path, op),
            OpKind::Experts { .. } => self.experts(path, op),
            OpKind::Route { scores, method } => self.route(path, scores, method),
            OpKind::RmsNorm { .. } | OpKind::LayerNorm { .. } => self.norm(path, op),
            OpKind::Rope { x, positions, rotary } => self.rope(path, x, positions, rotary),
            OpKind::Attend { .. } => self.attend(path, op),
            OpKind::ShortConv { .. } => self.short_conv(path, op),
            OpKind::GatedDelta { .. } => self.gated_delta(path, op),
            OpKind::Conv2d { .. } => self.conv2d(path, op),
            OpKind::Pool { x, size } => self.pool(path, x, *size),
            OpKind::Hadamard { x } => self.hadamard(path, x),
            OpKind::Reshape { x, shape } => {
                let view = View { shape: shape.clone(), ..self.view(x) };
                self.define(path, view);
                Ok(())
            }
            OpKind::Concat { .. } | OpKind::Slice { .. } | OpKind::Gather { .. } => self.moved(path, op),
            OpKind::ScatterRows { x, rows, at } => self.scatter(path, x, rows, at, false),
            OpKind::ScatterAddRows { x, rows, at } => self.scatter(path, x, rows, at, true),
            OpKind::GateAct { .. } if self.gated(path, op) => Ok(()),
            OpKind::GateAct { .. }
            | OpKind::Activate { .. }
            | OpKind::Add { .. }
            | OpKind::Mul { .. }
            | OpKind::Scale { .. }
            | OpKind::Softcap { .. }
            | OpKind::Clamp { .. } => self.map(path, op),
        }
    }

    fn view(&self, name: &Name) -> View {
        self.values[name].clone()
    }

    fn matrix(&self, name: &Name) -> Matrix {
        self.weights.matrices[name]
    }

    /// The address of a weight as plain numbers; 0 for none.
    fn plain(&self, name: Option<&Name>) -> u64 {
        name.map_or(0, |name| self.weights.plain[name])
    }

    fn table(&self, name: &str) -> u64 {
        self.weights.tables.get(name).copied().unwrap_or(0)
    }

    /// Bytes of a value of four-byte numbers in the largest call.
    fn bytes(&self, shape: &[Dim]) -> u64 {
        4 * shape.iter().map(|&dim| bind(dim, &self.max) as u64).product::<u64>()
    }

    /// A buffer in the arena.
    fn buffer(&mut self, bytes: u64) -> usize {
        self.add_buffer(Held::Arena, bytes)
    }

    fn add_buffer(&mut self, held: Held, bytes: u64) -> usize {
        self.buffers.push(Buffer { held, bytes });
        self.buffers.len() - 1
    }

    /// Gives an input its name. Inputs have the first buffers.
    fn define_input(&mut self, place: usize) {
        let input = &self.program.inputs[place];
        self.define(&input.name, View { buffer: place, shape: input.shape.clone(), dtype: input.dtype });
    }

    /// Whether a value has to be there as it is: it is an output, or a pause gives it.
    fn is_kept(&self, name: &Name) -> bool {
        self.program.is_output(name) || self.kept.contains(name)
    }

    /// A pause: what it gives is copied to where the host reads it, behind all that was done so far. What reads inputs that may change comes behind it.
    fn pause(&mut self, pause: &Pause) -> Result<(), DeviceError> {
        let unknown = |name: &Name| DeviceError::Call(format!("program `{}` pauses for `{name}`, which is not there", self.program.name));
        let mut gives = Vec::new();
        let mut end = 0;
        for name in &pause.gives {
            let view = self.values.get(name).cloned().ok_or_else(|| unknown(name))?;
            let bytes = self.bytes(&view.shape);
            gives.push((view, end));
            end += bytes.next_multiple_of(GIVEN_ALIGNMENT);
        }
        self.given = self.given.max(end);
        let input = |name: &Name| self.program.inputs.iter().position(|input| input.name == *name).ok_or_else(|| unknown(name));
        let takes = pause.takes.iter().map(input).collect::<Result<Vec<_>, _>>()?;
        let changes = pause.changes.iter().map(input).collect::<Result<Vec<_>, _>>()?;
        let group = self.single.group();
        for (view, offset) in &gives {
            let (from, shape) = (view.buffer, view.shape.clone());
            let to = self.add_buffer(Held::Given(*offset), self.bytes(&shape));
            // What the pause before gave has been read.
            let reads = vec![Resource::Buffer(from), Resource::Pauses];
            self.step(reads, buffers([to]), move |r| {
                let count = r.volume(&shape);
                let numbers = [1, count, count, 0, count, 0].map(|n| n as u32);
                if r.is_single() {
                    let addresses = [r.address(from), r.address(to)];
                    r.instruct(Instruction::new(Operation::Part, count.div_ceil(group), &addresses, &numbers));
                    return Ok(());
                }
                r.flat(kernels::ROWS, &[0], count, 256, &[r.address(from), 0, r.address(to)], &numbers)
            });
        }
        let copies = self.steps.iter().rev().take(gives.len());
        let reads = copies.flat_map(|step| step.writes.clone()).collect();
        let writes = takes.iter().chain(&changes).map(|&place| Resource::Buffer(place)).chain([Resource::Pauses]).collect();
        let (number, waits) = (self.pauses.len(), !takes.is_empty());
        self.step(reads, writes, move |r| {
            r.pause(number, waits);
            Ok(())
        });
        if let Some(step) = self.steps.last_mut() {
            step.pause = Some(number);
        }
        takes.iter().for_each(|&place| self.define_input(place));
        self.pauses.push(LoweredPause { step: 0, gives, takes, changes });
        Ok(())
    }

    /// A buffer for a value that an op makes.
    fn result(&mut self, name: &Name) -> View {
        let kind = self.program.value_type(name).clone();
        let bytes = self.bytes(&kind.shape);
        View { buffer: self.buffer(bytes), shape: kind.shape, dtype: kind.dtype }
    }

    /// Adds a step.
    fn step(
        &mut self,
        reads: Vec<Resource>,
        writes: Vec<Resource>,
        work: impl Fn(&mut Recorder<'_>) -> Result<(), DeviceError> + Send + 'static,
    ) {
        self.steps.push(Step { reads, writes, work: Box::new(work), left_out: false, pause: None });
    }

    /// Gives a value its name: it was made by the steps so far.
    fn define(&mut self, name: &Name, view: View) {
        if matches!(view.shape.first(), Some(Dim::Symbol(Symbol::L))) {
            self.wanted.insert(view.buffer);
        }
        for &stage in self.program.stages_shown_by(name) {
            let writes = |step: &Step| step.writes.contains(&Resource::Buffer(view.buffer));
            let after = self.steps.iter().rposition(writes).map_or(0, |step| step + 1);
            self.taps.push(Tapped { after, stage, view: view.clone() });
        }
        self.values.insert(name.clone(), view);
    }

    fn finish(mut self) -> Lowered {
        let steps = self.steps.len();
        order::by_level(&mut self.steps, &mut self.taps);
        let wanted = |step: &Step| step.writes.iter().any(|r| matches!(r, Resource::Buffer(buffer) if self.wanted.contains(buffer)));
        let wanted_from = self.steps.iter().position(wanted).unwrap_or(steps);
        // Of each buffer: the first step that needs it, and the one behind the last.
        let mut lives = vec![(usize::MAX, 0); self.buffers.len()];
        for (number, step) in self.steps.iter().enumerate() {
            for resource in step.reads.iter().chain(&step.writes) {
                let Resource::Buffer(buffer) = *resource else { continue };
                let held_in = self.single.aliases.get(&buffer).map(|alias| alias.0);
                for buffer in [Some(buffer), held_in].into_iter().flatten() {
                    let (first, end) = &mut lives[buffer];
                    (*first, *end) = ((*first).min(number), (*end).max(number + 1));
                    // What the repeated steps read from before them stays as it is.
                    if number >= wanted_from && *first < wanted_from {
                        *end = steps + 1;
                    }
                }
            }
        }
        for tapped in &self.taps {
            let (_, end) = &mut lives[tapped.view.buffer];
            *end = (*end).max(tapped.after);
        }
        let outputs: Vec<View> = self.program.outputs.iter().map(|output| self.values[&output.value].clone()).collect();
        for output in &outputs {
            lives[output.buffer].1 = steps + 1;
        }
        let at = |number: usize| self.steps.iter().position(|step| step.pause == Some(number)).unwrap_or(steps);
        let mut waited = 0;
        for (number, pause) in self.pauses.iter_mut().enumerate() {
            pause.step = at(number);
            // What the device does not tell the host before, the host may write as soon as it was told of the pause before.
            if pause.gives.is_empty() {
                pause.takes.iter().for_each(|&place| lives[place].0 = waited);
            } else {
                waited = pause.step;
            }
        }
        let place = |is_there: fn(&Held) -> bool| {
            let lifetimes = self.buffers.iter().zip(&lives).map(|(buffer, &(first, end))| Lifetime {
                bytes: if is_there(&buffer.held) { buffer.bytes } else { 0 },
                steps: first.min(end)..end,
            });
            plan::place(&lifetimes.collect::<Vec<_>>())
        };
        let (in_arena, arena) = place(|held| *held == Held::Arena);
        let (in_late, late) = place(|held| matches!(held, Held::Late(_)));
        let offset = |(number, buffer): (usize, &Buffer)| match buffer.held {
            Held::Arena => in_arena[number],
            Held::Late(_) => in_late[number],
            Held::Given(offset) => offset,
            Held::Input(_) => 0,
        };
        let offsets = self.buffers.iter().enumerate().map(offset).collect();
        // What is copied at the end has to be a buffer of its own.
        let (stream, aliases) = self.single.finish(outputs.iter().map(|view| view.buffer));
        let Self { steps, taps, pauses, buffers, given, .. } = self;
        Lowered { steps, wanted_from, taps, outputs, pauses, stream, aliases, buffers, offsets, arena, late, given }
    }
}

impl Lowered {
    /// Where everything is, given where the call's parameters, its inputs and the areas are.
    pub(crate) fn addresses(&self, call: u64, inputs: &[u64], areas: Areas) -> Addresses {
        let buffers = self.buffers.iter().zip(&self.offsets).map(|(buffer, offset)| {
            let first = match buffer.held {
                Held::Arena => areas.arena + offset,
                Held::Input(place) => inputs[place],
                Held::Late(_) => areas.late + offset,
                Held::Given(_) => areas.given + offset,
            };
            first..first + buffer.bytes.max(1)
        });
        Addresses { call, buffers: buffers.collect() }
    }

    /// The offset of a value in the arena; none for inputs.
    pub(crate) fn offset(&self, view: &View) -> Option<u64> {
        (self.buffers[view.buffer].held == Held::Arena).then(|| self.offsets[view.buffer])
    }

    /// The input that a value is, where it is known when a call begins.
    pub(crate) fn input(&self, view: &View) -> Option<usize> {
        match self.buffers[view.buffer].held {
            Held::Input(place) => Some(place),
            _ => None,
        }
    }

    /// Where the input at a place, which a pause takes, is among those.
    pub(crate) fn late_offset(&self, place: usize) -> Option<u64> {
        matches!(self.buffers[place].held, Held::Late(_)).then(|| self.offsets[place])
    }

    /// Bytes of the largest call's inputs, in order; of those that pauses take, none.
    pub(crate) fn input_bytes(&self) -> Vec<u64> {
        let bytes = |buffer: &Buffer| match buffer.held {
            Held::Input(_) => Some(buffer.bytes),
            Held::Late(_) => Some(0),
            _ => None,
        };
        self.buffers.iter().filter_map(bytes).collect()
    }
}

/// The addresses of the arena, of inputs that pauses take, and of what they give.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Areas {
    pub(crate) arena: u64,
    pub(crate) late: u64,
    pub(crate) given: u64,
}

/// What a pause gives begins at multiples of this.
const GIVEN_ALIGNMENT: u64 = 256;

/// Shorthand for buffers that a step reads or writes.
fn buffers<const N: usize>(all: [usize; N]) -> Vec<Resource> {
    all.map(Resource::Buffer).to_vec()
}

//! A loaded program: runs its parts one after the other, each over all rows of the call.

use super::{
    contexts::Contexts,
    device::{Kv, NpuOptions},
    experts,
    fill::{self, Chunk},
    graphs::{Graphs, Ports, Source, failed},
    host::{self, Tables},
    meter::Meter,
    plan::GraphPlan,
    state::NpuState,
    values::Values,
};
use crate::{
    ExecGraph,
    budget::{constant_bytes, part_rows},
    lower::{CONTEXT_STEP, Feed, Part, Sizes, Work, lower, parts, parts::work_of},
};
use half::f16;
use qhx_ir::{Call, Checked, DeviceError, Executable, LoadOptions, OpKind, State, Symbol, Tap, Ticket, Traffic, Weights, WeightsRead};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

pub(super) struct NpuExecutable {
    program: Checked,
    weights: Arc<dyn Weights>,
    limits: LoadOptions,
    options: NpuOptions,
    parts: Vec<Part>,
    /// Bytes of weights in each part's graph.
    constants: Vec<u64>,
    /// Weights that the host reads.
    tables: Tables,
    graphs: Graphs,
    meter: Meter,
    /// Why prefill graphs are not used: one could not be loaded.
    row_by_row: Option<String>,
    last_stage: Option<Duration>,
}

impl NpuExecutable {
    pub(super) fn new(
        contexts: Arc<Contexts>,
        program: &Checked,
        weights: &Arc<dyn Weights>,
        limits: &LoadOptions,
        options: &NpuOptions,
    ) -> Result<Self, DeviceError> {
        let mut options = options.clone();
        let source = match &limits.artifacts {
            None => Source::Compile(options.compile()),
            Some(folder) => {
                let plan = Box::new(GraphPlan::read(folder, &program.name, contexts.device.arch())?);
                options.part_bytes = plan.part_bytes;
                if let Some(most) = plan.ring.filter(|&most| limits.max_rows > most) {
                    return Err(DeviceError::Resources(format!(
                        "program `{}` was prepared with ring buffers for calls of at most {most} rows, but calls may have {}: use a prefill chunk of {most}",
                        program.name, limits.max_rows
                    )));
                }
                Source::Stored { folder: folder.clone(), plan }
            }
        };
        let mut tables = Tables::new();
        for op in &program.ops {
            let host = work_of(program, op) == Work::Host;
            // Prepared contexts contain the weights of their graphs; the host still needs its own.
            for name in op.op.weights().into_iter().filter(|_| host || matches!(source, Source::Compile(_))) {
                let weight = weights.declared(program, name)?;
                if host {
                    tables.insert(name.clone(), weight);
                }
            }
        }
        let parts = parts(program, options.part_bytes);
        Ok(Self {
            constants: parts.iter().map(|part| constant_bytes(program, part)).collect(),
            program: program.clone(),
            weights: weights.clone(),
            limits: limits.clone(),
            parts,
            tables,
            graphs: Graphs::new(program.name.clone(), contexts, source),
            options,
            meter: Meter::default(),
            row_by_row: None,
            last_stage: None,
        })
    }

    /// The row count of the graph for the next of a part's `left` remaining rows.
    fn graph_rows(&self, part: &Part, left: usize) -> Result<usize, DeviceError> {
        let rows = match &self.graphs.source {
            Source::Stored { plan, .. } => part_rows(part, &plan.rows),
            // Buckets, so that images of similar sizes share a graph.
            Source::Compile(_) if part.whole => {
                vec![left.next_power_of_two().min(self.limits.max_rows.max(left)).next_multiple_of(part.multiple)]
            }
            Source::Compile(_) => vec![1, self.options.prefill_rows],
        };
        let is_few = left < self.options.prefill_min_rows || self.row_by_row.is_some();
        let few = rows[0] == 1 && is_few && !part.whole;
        let fitting = rows.iter().copied().find(|&rows| rows >= left).filter(|_| !few);
        match (fitting, rows.last()) {
            (Some(rows), _) => Ok(rows),
            (None, Some(&largest)) if !part.whole => Ok(if few { 1 } else { largest }),
            _ => Err(DeviceError::Call(format!(
                "program `{}` must process {left} rows at once, but was prepared for {rows:?}: use smaller media, or prepare it for that many rows",
                self.program.name
            ))),
        }
    }

    /// Runs a graph part over one segment, or, for rows that belong to no segment, over all of them.
    fn run_graph(
        &mut self,
        number: usize,
        values: &mut Values<'_>,
        mut state: Option<&mut NpuState>,
        rows: std::ops::Range<usize>,
        call: (usize, bool),
        cancelled: &dyn Fn() -> bool,
    ) -> Result<(), DeviceError> {
        let (epoch, taps) = call;
        let none = Sizes { rows: 0, context: 0, ring: None, taps };
        let (len, kept) = state.as_ref().map_or((0, none), |state| (state.len(), state.sizes()));
        let mut first = rows.start;
        while first < rows.end {
            if cancelled() {
                return Err(DeviceError::Cancelled);
            }
            let part = &self.parts[number];
            let static_rows = self.graph_rows(part, rows.end - first)?;
            let sizes = Sizes { rows: static_rows, taps, ..part.sizes(kept) };
            let valid = static_rows.min(rows.end - first);
            let chunk = Chunk { first, valid, before: len + first - rows.start, window: kept.window(), epoch };
            let has_another_way = static_rows > 1 && self.can_go_row_by_row(number);
            let lowered = |name, weights: bool| lower(&self.program, part, weights.then_some(&self.weights), sizes, name);
            let (graph, ports) = match self.graphs.part(number, sizes, lowered) {
                Ok(ready) => ready,
                Err(DeviceError::Resources(reason)) if has_another_way => {
                    self.row_by_row = Some(reason);
                    continue;
                }
                Err(error) => return Err(error),
            };
            execute(&self.program, (&graph, ports), values, state.as_deref_mut(), chunk, &mut self.meter)?;
            self.meter.read_bytes(self.constants[number]);
            first += chunk.valid;
        }
        Ok(())
    }

    /// Whether a decode graph was prepared in addition to a prefill graph that cannot be loaded, for which a processor may lack memory.
    fn can_go_row_by_row(&self, part: usize) -> bool {
        match &self.graphs.source {
            Source::Stored { plan, .. } => plan.rows[0] == 1 && !self.parts[part].whole && self.row_by_row.is_none(),
            Source::Compile(_) => false,
        }
    }

    /// The largest row count of a graph.
    fn batch(&self) -> usize {
        match &self.graphs.source {
            _ if self.row_by_row.is_some() => 1,
            Source::Compile(_) => self.options.prefill_rows,
            Source::Stored { plan, .. } => plan.rows.last().copied().unwrap_or(1),
        }
    }

    fn interpret(&mut self, call: &mut Call<'_>) -> Result<(), DeviceError> {
        let program = self.program.clone();
        let mut values = Values::new(&program, call.bindings, call.inputs)?;
        // Prepared graphs have no taps except values that cross a cut anyway.
        let taps = call.taps.is_some() && matches!(self.graphs.source, Source::Compile(_));
        let cancel = call.cancel;
        let cancelled = || cancel.is_some_and(|flag| flag.load(std::sync::atomic::Ordering::Relaxed));
        let valid: Vec<usize> = call.segments.iter().flat_map(|s| s.first_row..s.first_row + s.valid_rows).collect();
        for number in 0..self.parts.len() {
            let started = Instant::now();
            if cancelled() {
                return Err(DeviceError::Cancelled);
            }
            match self.parts[number].work {
                Work::Host => {
                    for &op in &self.parts[number].ops {
                        let op = &program.ops[op];
                        match op.op {
                            OpKind::Experts { .. } => {
                                let (batch, has_another_way) = (self.batch(), self.can_go_row_by_row(number));
                                let mut run = |batch| {
                                    let graphs = (&mut self.graphs, &mut self.meter);
                                    experts::run(&program, &mut values, &self.tables, graphs, op, &valid, batch)
                                };
                                match run(batch) {
                                    Err(DeviceError::Resources(reason)) if batch > 1 && has_another_way => {
                                        self.row_by_row = Some(reason);
                                        run(1)?;
                                    }
                                    done => done?,
                                }
                            }
                            _ => host::run(&mut values, &self.tables, op, &mut self.meter)?,
                        }
                    }
                }
                Work::Graph(symbol) => {
                    for name in self.parts[number].makes.iter().chain(self.parts[number].taps.iter().filter(|_| taps)) {
                        values.entry(name)?;
                    }
                    if symbol == Symbol::T {
                        for segment in call.segments.iter_mut() {
                            let state = segment.state.as_deref_mut().map(|state| NpuState::of(state, &program.slots)).transpose()?;
                            let (rows, epoch) = (segment.first_row..segment.first_row + segment.valid_rows, segment.epoch);
                            self.run_graph(number, &mut values, state, rows, (epoch, taps), &cancelled)?;
                        }
                    } else {
                        let rows = 0..call.bindings.get(symbol);
                        self.run_graph(number, &mut values, None, rows, (0, taps), &cancelled)?;
                    }
                }
            }
            self.last_stage = Some(started.elapsed());
        }
        deliver(&program, &values, &mut call.taps);
        call.outputs.give(&program, call.wants, |output| values.to_f32(&output.value))
    }
}

/// Passes every stage's tap to the caller, in program order.
fn deliver(program: &Checked, values: &Values<'_>, taps: &mut Option<&mut dyn FnMut(Tap<'_>)>) {
    let Some(taps) = taps else { return };
    let made = program.inputs.iter().map(|i| i.name.clone()).chain(program.ops.iter().flat_map(|op| op.outputs()));
    for name in made.filter(|name| values.has(name)) {
        for &stage in program.stages_shown_by(&name) {
            Tap::show(&program.stages[stage], &values.get(&name).shape, &values.to_f32(&name), *taps);
        }
    }
}

/// One execution: fills the inputs, runs the graph, distributes the outputs.
fn execute(
    program: &Checked,
    (graph, ports): (&ExecGraph, &mut Ports),
    values: &mut Values<'_>,
    mut state: Option<&mut NpuState>,
    chunk: Chunk,
    meter: &mut Meter,
) -> Result<(), DeviceError> {
    for port in ports.inputs.iter_mut().filter(|port| !port.buffer.is_empty()) {
        fill::fill(program, values, state.as_deref_mut(), chunk, &port.what, &port.dims, &mut port.buffer);
    }
    let kept = state.as_deref();
    let inputs = ports.inputs.iter().map(|port| -> &[f16] {
        match (&port.what, kept) {
            (Feed::PastKeys(slot), Some(state)) => &state.kv(slot).keys,
            (Feed::PastValues(slot), Some(state)) => &state.kv(slot).values,
            _ => &port.buffer,
        }
    });
    let inputs: Vec<&[u8]> = inputs.map(bytemuck::cast_slice).collect();
    let mut outputs: Vec<&mut [u8]> = ports.outputs.iter_mut().map(|port| bytemuck::cast_slice_mut(&mut port.buffer)).collect();
    graph.execute_in_order(&inputs, &mut outputs).map_err(failed)?;
    let is_lent = ports.inputs.iter().map(|port| port.buffer.is_empty());
    meter.executed(inputs.iter().map(|input| input.len()).zip(is_lent), outputs.iter().map(|output| output.len()));
    let mut decays = Vec::new();
    for port in &ports.outputs {
        fill::drain(values, state.as_deref_mut(), chunk, &port.what, &port.dims, &port.buffer, &mut decays)?;
    }
    Ok(())
}

impl Executable for NpuExecutable {
    fn program(&self) -> &Checked {
        &self.program
    }

    fn new_state(&self, context: usize) -> Result<Box<dyn State>, DeviceError> {
        let too_long = |most: usize| {
            let advice = "use a shorter context, or prepare the program for a longer one or with ring buffers (kv: ring)";
            DeviceError::Resources(format!(
                "a context of {context} rows was requested, but program `{}` has graphs for {most}: {advice}",
                self.program.name
            ))
        };
        let (graphs, ring) = match &self.graphs.source {
            Source::Stored { plan, .. } => (Some(plan.context), plan.ring),
            Source::Compile(_) => (self.options.context, (self.options.kv == Kv::Ring).then_some(self.limits.max_rows)),
        };
        let rows = match graphs {
            Some(most) if context > most && ring.is_none() => return Err(too_long(most)),
            Some(rows) => rows,
            None => context.max(1),
        };
        let step = |rows: usize| rows.checked_next_multiple_of(CONTEXT_STEP).ok_or_else(|| too_long(usize::MAX));
        let rows = if ring.is_some() { rows } else { step(rows)? };
        let sizes = Sizes { rows: 0, context: rows, ring, taps: false };
        Ok(Box::new(NpuState::new(&self.program.slots, context, sizes)?))
    }

    fn submit(&mut self, call: &mut Call<'_>) -> Result<Ticket, DeviceError> {
        call.check(&self.program)?;
        self.limits.check(&self.program, call)?;
        match call.segments.iter().any(|segment| segment.partial) && self.program.slots.values().any(|slot| slot.is_recurrent()) {
            true => Err(DeviceError::Call("the NPU cannot commit a part of a call's rows with recurrent slots".into())),
            false => Ok(Ticket(0)),
        }
    }

    /// QNN's executions block, so all work is done here.
    fn wait(&mut self, _: Ticket, call: &mut Call<'_>) -> Result<(), DeviceError> {
        self.meter = Meter::default();
        for segment in call.segments.iter_mut() {
            if let Some(state) = &mut segment.state {
                NpuState::of(&mut **state, &self.program.slots)?.begin(segment.valid_rows);
            }
        }
        self.interpret(call)?;
        for segment in call.segments.iter_mut() {
            if let Some(state) = &mut segment.state {
                NpuState::of(&mut **state, &self.program.slots)?.end(segment.valid_rows);
            }
        }
        Ok(())
    }

    /// Graphs take the rows of one segment: the engine serves sessions in turns.
    fn max_segments(&self) -> usize {
        1
    }

    fn last_stage_time(&self) -> Option<Duration> {
        self.last_stage
    }

    fn weights_read(&self) -> Option<WeightsRead<'_>> {
        Some(self.meter.weights_read())
    }

    fn row_by_row(&self) -> Option<&str> {
        self.row_by_row.as_deref()
    }

    fn traffic(&self) -> Option<Traffic> {
        Some(self.meter.traffic())
    }

    fn scratch_bytes(&self) -> u64 {
        self.graphs.bytes()
    }
}

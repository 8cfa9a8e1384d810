//! Runs a program, call after call: a command buffer for each shape, recorded once.

mod answers;
mod pauses;
mod ways;

use crate::{
    arenas::Arenas,
    lower::{Areas, Lowered, Tapped, View, lower, tables},
    memory::Pool,
    parameters::{self, SegmentEntry},
    recorder::{Addresses, MOST_ALIKE, Recorder},
    state::{GpuState, SlotLayout},
    stream::{Item, Needs, Stream, StreamPlan, most_together},
    transfers::{Parts, Transfers},
    trial::Trial,
    vulkan::{Buffer, Command, Gpu, Kind, PauseEvents, Recording, Submission, Use},
    weights::{self, DeviceWeights},
};
use answers::{PARTS, input_numbers, read_numbers, top_bytes};
use pauses::parts_read;
use qhx_ir::{
    Bindings, Call, Checked, DeviceError, Executable, Generator, InputData, LoadOptions, Phase, Segment, State, StateBytes, Tap, Ticket,
    Transfer, WeightTensor, Weights,
};
use std::{
    collections::HashMap,
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

/// A program loaded on a GPU.
pub(crate) struct GpuExecutable {
    program: Checked,
    limits: LoadOptions,
    gpu: Arc<Gpu>,
    lowered: Lowered,
    layout: Arc<SlotLayout>,
    pool: Arc<Pool>,
    arena: Arc<Buffer>,
    inputs: Arc<Buffer>,
    /// Where each input begins.
    input_offsets: Vec<u64>,
    /// Segments, pages and whatever else differs from call to call; and where it is copied to, where it does not lie in the device's own memory.
    parameters: Arc<Buffer>,
    copied_parameters: Option<Arc<Buffer>>,
    download: Arc<Buffer>,
    /// Where each output begins in it, and the largest numbers of wanted rows behind them.
    output_offsets: Vec<u64>,
    top_offset: u64,
    /// The largest numbers of parts of wanted rows.
    partial: Arc<Buffer>,
    /// The inputs that pauses take, what they give, and what they wait with.
    late: Arc<Buffer>,
    given: Arc<Buffer>,
    pauses: Vec<PauseEvents>,
    /// What the last pause gave.
    given_numbers: Vec<Vec<f32>>,
    recordings: HashMap<Shape, Recorded>,
    /// Workgroups that can meet in the step of one row, once that is known.
    together: Option<(Needs, usize)>,
    /// Submissions that have not been waited for, with what was recorded for them alone.
    under_way: Option<UnderWay>,
    /// The shape that was submitted last.
    last: Option<Shape>,
    errands: Vec<Recording>,
    /// The call that was submitted and not yet waited for.
    begun: Option<Begun>,
    tickets: u64,
    /// What brings weights that replace others, where they can be.
    transfers: Option<Transfers>,
    /// The parts of such weights that the call reads.
    reads: Parts,
    weights: DeviceWeights,
}

/// What a recording depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    rows: usize,
    soft_rows: usize,
    wanted: usize,
    segments: usize,
    /// The most keys that a row sees, rounded up to a power of two.
    keys: usize,
    /// Whether some of its rows are drafts.
    drafts: bool,
    /// First and last of the steps.
    steps: (usize, usize),
    ending: Ending,
    /// Whether it is the whole step of one row.
    single: bool,
    /// Whether it waits in its pauses; else the host submits what is between them.
    waits: bool,
}

/// The commands for a shape.
struct Recorded {
    recording: Recording,
    /// For the step of one row: the same in one dispatch.
    whole: Option<Whole>,
}

/// A step in one dispatch.
struct Whole {
    stream: Stream,
    recording: Recording,
    trial: Trial,
}

/// What was submitted.
struct UnderWay {
    submission: Submission,
    since: Instant,
    /// Whether it is a step in one dispatch.
    whole: bool,
    /// How long it waited for the host.
    waited: Duration,
}

/// What follows the steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Ending {
    Nothing,
    /// The outputs are copied to where the host reads them.
    Values,
    /// The same, but of the wanted rows only so many of the largest numbers and their places.
    Top(usize),
}

/// A call that was begun.
struct Begun {
    ticket: u64,
    ending: Ending,
    /// Whether it was submitted; else everything is done when it is waited for.
    submitted: bool,
}

/// Queries that attention takes at once: as many as registers hold. Software Vulkan compiles such shaders for minutes.
const MOST_QUERIES: usize = 16;
const SOFTWARE_QUERIES: usize = 2;
/// Rows that come out as they do alone, where drafts come on top.
const INVARIANT_ROWS: usize = MOST_ALIKE - 16;
/// Invocations of a workgroup in the step of one row.
const STREAM_GROUP: usize = 512;
const SOFTWARE_GROUP: usize = 128;

impl GpuExecutable {
    pub(crate) fn new(
        gpu: &Arc<Gpu>,
        arenas: &Arenas,
        program: &Checked,
        weights: &Arc<dyn Weights>,
        options: &LoadOptions,
    ) -> Result<Self, DeviceError> {
        let mut limits = options.clone();
        (limits.max_rows, limits.max_wanted) = (limits.max_rows.max(1), limits.max_wanted.max(1));
        let max = Bindings { rows: limits.max_rows, soft_rows: limits.max_soft_rows, wanted: limits.max_wanted };
        let loaded = weights::load(gpu, program, weights, tables(program), &limits)?;
        let layout = Arc::new(SlotLayout::new(program));
        let (most_queries, group) = match gpu.adapter.kind {
            Kind::Software => (SOFTWARE_QUERIES, SOFTWARE_GROUP),
            _ => (MOST_QUERIES, STREAM_GROUP.min(gpu.adapter.max_group as usize)),
        };
        let stream =
            gpu.adapter.streams.then(|| StreamPlan::new(group, gpu.adapter.subgroup_size as usize, gpu.adapter.shared_memory as usize));
        let lowered = lower(program, &loaded, &layout, &limits, most_queries, gpu.adapter.cooperative_matrix, stream)?;
        let too_large = |what: &str, bytes: u64| {
            DeviceError::Resources(format!(
                "program `{}` needs {bytes} bytes for {what}, but the GPU takes at most {} in one piece: load it for fewer rows per call",
                program.name,
                gpu.largest_buffer()
            ))
        };
        if lowered.arena > gpu.largest_buffer() {
            return Err(too_large("intermediate values", lowered.arena));
        }
        let arena = arenas.get(gpu, options.scratch_group, Use::Device, lowered.arena)?;
        let (input_offsets, input_bytes) = offsets(&lowered.input_bytes());
        let sizes: Vec<u64> = lowered.outputs.iter().map(|view| 4 * volume(view, &max) as u64).collect();
        let (output_offsets, output_bytes) = offsets(&sizes);
        if output_bytes > gpu.largest_buffer() {
            return Err(too_large("outputs", output_bytes));
        }
        let inputs = arenas.get(gpu, options.scratch_group, Use::Upload, input_bytes)?;
        let (parameters, copied_parameters) = parameter_buffers(gpu, 1 << 14)?;
        let download = arenas.get(gpu, options.scratch_group, Use::Download, output_bytes + top_bytes(&limits))?;
        let partial = Arc::new(Buffer::new(gpu, PARTS as u64 * top_bytes(&limits), Use::Device)?);
        let pool = Pool::new(gpu, limits.max_state_bytes);
        let transfers = (!limits.replaceable.is_empty()).then(|| Transfers::new(gpu, limits.timeline.is_some()));
        let late = Arc::new(Buffer::new(gpu, lowered.late, Use::Upload)?);
        let given = Arc::new(Buffer::new(gpu, lowered.given, Use::Download)?);
        let pauses = lowered.pauses.iter().map(|_| PauseEvents::new(gpu)).collect::<Result<_, _>>()?;
        let mut own = Self {
            program: program.clone(),
            limits,
            gpu: gpu.clone(),
            lowered,
            layout,
            pool,
            arena,
            inputs,
            input_offsets,
            parameters,
            copied_parameters,
            download,
            partial,
            late,
            given,
            pauses,
            given_numbers: Vec::new(),
            output_offsets,
            top_offset: output_bytes,
            recordings: HashMap::new(),
            together: None,
            under_way: None,
            last: None,
            errands: Vec::new(),
            begun: None,
            tickets: 0,
            transfers,
            reads: Parts::All,
            weights: loaded,
        };
        own.choose_way()?;
        Ok(own)
    }

    fn check(&self, call: &Call<'_>) -> Result<(), DeviceError> {
        call.check(&self.program)?;
        self.limits.check(&self.program, call)?;
        if call.bindings.wanted > self.limits.max_wanted && call.taps.is_some() {
            let (wanted, most) = (call.bindings.wanted, self.limits.max_wanted);
            return Err(DeviceError::Call(format!("a call with taps has at most {most} wanted rows here, not {wanted}")));
        }
        match call.is_cancelled() {
            true => Err(DeviceError::Cancelled),
            false => Ok(()),
        }
    }

    /// Gets the states of a call ready, and writes what shaders read of it.
    fn begin(&mut self, call: &mut Call<'_>) -> Result<(), DeviceError> {
        if self.transfers.is_some() {
            self.reads = parts_read(&self.program, &self.limits, call);
        }
        let mut entries = Vec::new();
        for segment in call.segments.iter_mut() {
            let Segment { first_row, valid_rows, epoch, partial, .. } = *segment;
            let mut entry = SegmentEntry { first_row, valid_rows, before: 0, epoch, partial, pages: vec![], recurrent: vec![] };
            if let Some(state) = &mut segment.state {
                let state = state.downcast_mut::<GpuState>().filter(|state| state.fits(&self.layout));
                let state = state.ok_or_else(|| {
                    DeviceError::Call(format!("program `{}`: the state belongs to another device or another program", self.program.name))
                })?;
                state.begin(valid_rows, partial)?;
                entry.before = state.len();
                (entry.pages, entry.recurrent) = (state.page_addresses(), state.recurrent_addresses());
            }
            entries.push(entry);
        }
        let words = parameters::words(call.bindings.rows, &entries);
        let bytes: &[u8] = bytemuck::cast_slice(&words);
        if bytes.len() as u64 > self.parameters.bytes() {
            // Recordings know the address of the old buffer.
            self.recordings.clear();
            let bytes = (bytes.len() as u64).next_power_of_two();
            (self.parameters, self.copied_parameters) = parameter_buffers(&self.gpu, bytes)?;
        }
        self.parameters.write(0, bytes);
        for (place, (data, &offset)) in call.inputs.iter().zip(&self.input_offsets).enumerate() {
            if self.lowered.late_offset(place).is_some() {
                continue;
            }
            match data {
                InputData::F32(numbers) => self.inputs.write(offset, bytemuck::cast_slice(numbers)),
                InputData::I32(numbers) => self.inputs.write(offset, bytemuck::cast_slice(numbers)),
            }
        }
        Ok(())
    }

    fn addresses(&self) -> Addresses {
        let inputs: Vec<u64> = self.input_offsets.iter().map(|offset| self.inputs.address() + offset).collect();
        let parameters = self.copied_parameters.as_ref().unwrap_or(&self.parameters);
        let areas = Areas { arena: self.arena.address(), late: self.late.address(), given: self.given.address() };
        self.lowered.addresses(parameters.address(), &inputs, areas)
    }

    /// The recording for a shape.
    fn recorded(&mut self, shape: Shape) -> Result<(), DeviceError> {
        if !self.recordings.contains_key(&shape) {
            // Shapes of prompts are many; those of decoding are few and soon there again.
            const MOST_RECORDINGS: usize = 128;
            if self.recordings.len() >= MOST_RECORDINGS {
                self.recordings.clear();
            }
            let recorded = self.record(shape)?;
            self.recordings.insert(shape, recorded);
        }
        Ok(())
    }

    fn record(&mut self, shape: Shape) -> Result<Recorded, DeviceError> {
        let items = self.record_items(shape, false)?;
        let commands = items.into_iter().filter_map(|item| if let Item::Command(command) = item { Some(command) } else { None });
        let recording = Recording::new(&self.gpu, commands.collect())?;
        let Some(plan) = self.lowered.stream.clone().filter(|_| shape.single) else { return Ok(Recorded { recording, whole: None }) };
        let items = self.record_items(shape, true)?;
        let needs = Needs::of(&items);
        let groups = match self.together {
            Some((own, groups)) if own == needs => groups,
            _ => self.together.insert((needs, most_together(&self.gpu, &plan, needs)?)).1,
        };
        // Software is never faster in one dispatch, but its test wants it; there, one workgroup will do.
        let software = self.gpu.adapter.kind == Kind::Software;
        if groups == 1 && !software {
            return Ok(Recorded { recording, whole: None });
        }
        let (stream, whole) = Stream::new(&self.gpu, &plan, self.addresses().call, items, groups)?;
        Ok(Recorded { recording, whole: Some(Whole { stream, recording: whole, trial: Trial::new(software) }) })
    }

    /// What is done for a shape; `whole`: with instructions.
    fn record_items(&self, shape: Shape, whole: bool) -> Result<Vec<Item>, DeviceError> {
        let addresses = self.addresses();
        let bindings = Bindings { rows: shape.rows, soft_rows: shape.soft_rows, wanted: shape.wanted };
        let mut recorder = Recorder::new(&self.gpu, &addresses, bindings, shape.segments, shape.keys);
        recorder.drafts = shape.drafts;
        if whole {
            recorder = recorder.single(&self.lowered.aliases);
        }
        if shape.waits {
            recorder = recorder.with_pauses(&self.pauses);
        }
        if let Some(to) = &self.copied_parameters {
            let (from, to, bytes) = (self.parameters.clone(), to.clone(), to.bytes());
            recorder.add(Command::Copy { from, from_offset: 0, to, to_offset: 0, bytes });
            recorder.barrier();
        }
        for step in &self.lowered.steps[shape.steps.0..shape.steps.1] {
            recorder.step(step)?;
        }
        if shape.ending != Ending::Nothing {
            recorder.barrier();
            for (place, view) in self.lowered.outputs.iter().enumerate() {
                match (shape.ending, self.program.wanted_output()) {
                    (Ending::Top(count), Some((own, width))) if own == place => self.record_top(&mut recorder, view, width, count)?,
                    _ => self.record_copy(&mut recorder, view, place),
                }
            }
        }
        Ok(recorder.finish())
    }

    fn submit_shape(&mut self, shape: Shape) -> Result<(), DeviceError> {
        let errands = self.pool.take_errands();
        if !errands.is_empty() {
            self.errands.push(Recording::new(&self.gpu, errands)?);
        }
        self.recorded(shape)?;
        let recorded = &self.recordings[&shape];
        let whole = recorded.whole.as_ref().filter(|whole| whole.trial.is_whole());
        let recording = whole.map_or(&recorded.recording, |whole| &whole.recording);
        let recordings: Vec<&Recording> = self.errands.iter().chain([recording]).collect();
        let (whole, since) = (whole.is_some(), Instant::now());
        let copies = match &self.transfers {
            // What it reads is known only in its pauses, and is there already.
            Some(transfers) if shape.waits => transfers.arrived()?,
            Some(transfers) => transfers.submitted(&self.reads)?,
            None => None,
        };
        if shape.waits {
            self.pauses.iter().try_for_each(PauseEvents::reset)?;
        }
        let submission = self.gpu.submit(&recordings, copies)?;
        if let Some(transfers) = &mut self.transfers {
            transfers.are_read(if shape.waits { &Parts::All } else { &self.reads }, submission);
        }
        self.under_way = Some(UnderWay { submission, since, whole, waited: Duration::ZERO });
        self.last = Some(shape);
        Ok(())
    }

    /// Waits for what was submitted. False where it gave up, and has to be submitted again: nothing that a step reads is changed by it.
    fn settle(&mut self) -> Result<bool, DeviceError> {
        let Some(UnderWay { submission, since, whole, waited }) = self.under_way.take() else { return Ok(true) };
        self.gpu.wait(submission)?;
        self.errands.clear();
        let Some(recorded) = self.last.and_then(|shape| self.recordings.get_mut(&shape)) else { return Ok(true) };
        match recorded.whole.as_ref().filter(|_| whole) {
            Some(whole) => {
                let times = whole.recording.times();
                self.gpu.count_times(whole.stream.times(&times));
                self.gpu.count_times(times);
            }
            None => self.gpu.count_times(recorded.recording.times()),
        }
        let Some(own) = &mut recorded.whole else { return Ok(true) };
        own.trial.took(whole, since.elapsed().saturating_sub(waited));
        let gave_up = whole && own.stream.gave_up();
        if gave_up {
            own.trial.failed();
        }
        Ok(!gave_up)
    }

    fn run_shape(&mut self, shape: Shape) -> Result<(), DeviceError> {
        self.submit_shape(shape)?;
        self.end_shape(shape)
    }

    /// Waits for what was submitted, and for what has to be submitted again.
    fn end_shape(&mut self, shape: Shape) -> Result<(), DeviceError> {
        while !self.settle()? {
            self.submit_shape(shape)?;
        }
        Ok(())
    }

    /// All steps of a call, with its taps, if anybody wants them.
    fn run_with_taps(&mut self, call: &mut Call<'_>, ending: Ending) -> Result<(), DeviceError> {
        let steps = self.lowered.steps.len();
        let mut done = 0;
        // Each tap interrupts the call.
        let is_wanted = |stage: &str| call.taps.is_some() && call.tapped.is_none_or(|only| *only == *stage);
        let wanted = |tapped: &Tapped| is_wanted(&self.program.stages[tapped.stage].name);
        let taps: Vec<usize> = (0..self.lowered.taps.len()).filter(|&number| wanted(&self.lowered.taps[number])).collect();
        for number in taps {
            let after = self.lowered.taps[number].after;
            if after > done {
                let bindings = call.bindings;
                self.run_steps(call, &bindings, done..after, Ending::Nothing)?;
                done = after;
            }
            let tapped = &self.lowered.taps[number];
            let numbers = self.numbers(call, &tapped.view)?;
            let dims: Vec<usize> = tapped.view.shape.iter().map(|&dim| crate::recorder::bind(dim, &call.bindings)).collect();
            if let Some(taps) = &mut call.taps {
                Tap::show(&self.program.stages[tapped.stage], &dims, &numbers, *taps);
            }
            if call.is_cancelled() {
                return Err(DeviceError::Cancelled);
            }
        }
        let bindings = call.bindings;
        self.run_steps(call, &bindings, done..steps, ending)
    }

    /// A value of the call as it is now.
    fn numbers(&self, call: &Call<'_>, view: &View) -> Result<Vec<f32>, DeviceError> {
        if let Some(place) = self.lowered.input(view) {
            return Ok(input_numbers(&call.inputs[place]));
        }
        let bytes = 4 * volume(view, &call.bindings) as u64;
        let to = Arc::new(Buffer::new(&self.gpu, bytes, Use::Download)?);
        if let (Some(from_offset), true) = (self.lowered.offset(view), bytes > 0) {
            let copy = Command::Copy { from: self.arena.clone(), from_offset, to: to.clone(), to_offset: 0, bytes };
            self.gpu.run(&Recording::new(&self.gpu, vec![copy])?)?;
        }
        let mut numbers = vec![0.0; bytes as usize / 4];
        read_numbers(&to, 0, view.dtype, &mut numbers);
        Ok(numbers)
    }

    /// Runs the steps of the wanted rows for so many of them at a time as there is memory for.
    fn run_by_parts(&mut self, call: &mut Call<'_>, ending: Ending) -> Result<(), DeviceError> {
        let (steps, from, all, wants) = (self.lowered.steps.len(), self.lowered.wanted_from, call.bindings, call.wants);
        let most = self.limits.max_wanted;
        let first = Bindings { wanted: most, ..all };
        self.run_steps(call, &first, 0..from, Ending::Nothing)?;
        for start in (0..all.wanted).step_by(most) {
            let rows = start..all.wanted.min(start + most);
            for (place, input) in self.program.inputs.iter().enumerate() {
                if let (Generator::WantedRows, InputData::I32(wanted)) = (&input.generator, call.inputs[place]) {
                    self.inputs.write(self.input_offsets[place], bytemuck::cast_slice(&wanted[rows.clone()]));
                }
            }
            if call.is_cancelled() {
                return Err(DeviceError::Cancelled);
            }
            let part = Bindings { wanted: rows.len(), ..all };
            self.run_steps(call, &part, from..steps, ending)?;
            self.give(call, &part, &wants[rows], ending)?;
        }
        Ok(())
    }
}

impl Executable for GpuExecutable {
    fn program(&self) -> &Checked {
        &self.program
    }

    fn new_state(&self, context: usize) -> Result<Box<dyn State>, DeviceError> {
        Ok(Box::new(GpuState::new(&self.program.slots, context, &self.layout, &self.pool)?))
    }

    fn submit(&mut self, call: &mut Call<'_>) -> Result<Ticket, DeviceError> {
        self.check(call)?;
        // A call that nobody waited for.
        self.begun = None;
        self.release()?;
        self.begin(call)?;
        let ending = self.ending(call);
        let waits = !self.pauses.is_empty();
        // Experts are brought for prompts, which what follows has to wait for.
        let submitted = call.taps.is_none() && call.bindings.wanted <= self.limits.max_wanted && (!waits || call.phase == Phase::Decode);
        if submitted {
            let steps = self.lowered.steps.len();
            let single = self.lowered.stream.is_some() && is_single(call);
            self.submit_shape(Shape { single, waits, ..shape(call, &call.bindings, 0..steps, ending) })?;
        }
        self.tickets += 1;
        self.begun = Some(Begun { ticket: self.tickets, ending, submitted });
        Ok(Ticket(self.tickets))
    }

    fn wait(&mut self, ticket: Ticket, call: &mut Call<'_>) -> Result<(), DeviceError> {
        let Some(Begun { ending, submitted, .. }) = self.begun.take().filter(|begun| begun.ticket == ticket.0) else {
            return Err(DeviceError::Call(format!("program `{}`: this call was not submitted", self.program.name)));
        };
        call.outputs.start(&self.program);
        let (bindings, wants) = (call.bindings, call.wants);
        if submitted {
            loop {
                if let Err(error) = self.answer(call) {
                    self.release()?;
                    return Err(error);
                }
                if self.settle()? {
                    break;
                }
                if let Some(shape) = self.last {
                    self.submit_shape(shape)?;
                }
            }
            self.give(call, &bindings, wants, ending)?;
        } else if call.bindings.wanted <= self.limits.max_wanted {
            self.run_with_taps(call, ending)?;
            self.give(call, &bindings, wants, ending)?;
        } else {
            self.run_by_parts(call, ending)?;
        }
        for segment in call.segments.iter_mut() {
            let (rows, partial) = (segment.valid_rows, segment.partial);
            if let Some(state) = segment.state.as_mut().and_then(|state| state.downcast_mut::<GpuState>()) {
                state.end(rows, partial || rows == 1);
            }
        }
        Ok(())
    }

    fn works_in_background(&self) -> bool {
        true
    }

    fn max_segments(&self) -> usize {
        self.limits.max_segments
    }

    fn commits_partly(&self) -> bool {
        true
    }

    /// A step in one dispatch adds up in an order of its own.
    fn invariant_rows(&self) -> usize {
        match (&self.lowered.stream, self.gpu.adapter.cooperative_matrix) {
            (Some(_), _) => 0,
            (None, Some(matrices)) => INVARIANT_ROWS.min(matrices.fewest_rows().saturating_sub(1)),
            (None, None) => INVARIANT_ROWS,
        }
    }

    fn state_bytes(&self) -> Option<StateBytes> {
        Some(self.pool.bytes())
    }

    fn replace_part(&mut self, weight: &str, number: usize, part: &WeightTensor) -> Result<(), DeviceError> {
        replace_part(&self.weights, self.transfers.as_mut(), weight, number, part)
    }

    fn parts_on_the_way(&self) -> Vec<usize> {
        self.transfers.as_ref().map(Transfers::on_the_way).unwrap_or_default()
    }

    fn take_transfers(&mut self) -> Option<Vec<Transfer>> {
        self.transfers.as_ref().map(Transfers::take_ended)
    }

    fn scratch_bytes(&self) -> u64 {
        self.arena.bytes()
            + self.inputs.bytes()
            + self.download.bytes()
            + self.partial.bytes()
            + self.late.bytes()
            + self.given.bytes()
            + self.parameters.bytes()
            + self.copied_parameters.as_ref().map_or(0, |copied| copied.bytes())
    }
}

impl Drop for GpuExecutable {
    fn drop(&mut self) {
        let _ = self.release();
        self.gpu.keep_pipelines();
    }
}

fn shape(call: &Call<'_>, bindings: &Bindings, steps: Range<usize>, ending: Ending) -> Shape {
    let Bindings { rows, soft_rows, wanted } = *bindings;
    let keys = call.segments.iter().map(|segment| segment.valid_rows + segment.state.as_ref().map_or(0, |state| state.len()));
    let keys = keys.max().unwrap_or(1).next_power_of_two();
    Shape {
        rows,
        soft_rows,
        wanted,
        segments: call.segments.len(),
        keys,
        drafts: call.segments.iter().any(|segment| segment.partial),
        steps: (steps.start, steps.end),
        ending,
        single: false,
        waits: false,
    }
}

/// Begins to bring a part of a weight to the device.
fn replace_part(
    weights: &DeviceWeights,
    transfers: Option<&mut Transfers>,
    weight: &str,
    number: usize,
    part: &WeightTensor,
) -> Result<(), DeviceError> {
    let pieces = weights.replacement(weight, number, part)?;
    let none = || DeviceError::Weight { name: weight.into(), reason: "cannot be replaced".into() };
    transfers.ok_or_else(none)?.add(weight, number, part.stored_bytes() as u64, pieces)
}

/// Whether a call has one row, which is wanted, and nothing else.
fn is_single(call: &Call<'_>) -> bool {
    let one = Bindings { rows: 1, soft_rows: 0, wanted: 1 };
    let [segment] = &call.segments[..] else { return false };
    call.bindings == one && (segment.first_row, segment.valid_rows) == (0, 1) && segment.state.is_some()
}

/// Memory for a call's parameters: where the host writes them, and where shaders read them, if not there.
fn parameter_buffers(gpu: &Arc<Gpu>, bytes: u64) -> Result<(Arc<Buffer>, Option<Arc<Buffer>>), DeviceError> {
    let parameters = Buffer::new(gpu, bytes, Use::Upload)?;
    // Shaders wait for long where they read memory that the host sees.
    let copied = if gpu.adapter.unified { None } else { Some(Arc::new(Buffer::new(gpu, bytes, Use::Device)?)) };
    Ok((Arc::new(parameters), copied))
}

/// Where each of some parts begins, and where the last one ends.
fn offsets(sizes: &[u64]) -> (Vec<u64>, u64) {
    let mut end = 0;
    let starts = sizes.iter().map(|size| {
        let start = end;
        end += size.next_multiple_of(256);
        start
    });
    (starts.collect(), end)
}

/// Numbers of a value in a call.
fn volume(view: &View, bindings: &Bindings) -> usize {
    view.shape.iter().map(|&dim| crate::recorder::bind(dim, bindings)).product()
}

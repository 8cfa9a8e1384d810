//! Runs a compiled program, call after call, on memory that was planned at load.

use crate::{
    compile::{Compiled, Tapped, compile},
    kernels::Instructions,
    memory::{Memory, Place, View, count},
    ops::{Frame, Run, Step},
    pages::PagePool,
    pool::Pool,
    profile::Profiler,
    state::{CpuState, Workshop},
    work::{Chunks, for_each},
};
use qhx_ir::{
    AlignedBytes, Bindings, Call, Checked, DeviceError, Executable, Generator, InputData, LoadOptions, Profile, Segment, State, StateBytes,
    Tap, Ticket, Want, Weights, WeightsRead,
};
use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// A program loaded on the CPU.
pub struct CpuExecutable {
    program: Checked,
    compiled: Compiled,
    workshop: Arc<Workshop>,
    limits: LoadOptions,
    arena: AlignedBytes,
    scratch: AlignedBytes,
    /// How long the last stage of the last successful call took.
    last_stage: Option<Duration>,
    weight_bytes: AtomicU64,
    /// For each step with experts: how many rows each expert got.
    expert_rows: Vec<Vec<usize>>,
    /// While steps are measured.
    profiler: Option<Profiler>,
}

impl CpuExecutable {
    pub(crate) fn new(
        pool: &Arc<Pool>,
        instructions: Instructions,
        program: &Checked,
        weights: &Arc<dyn Weights>,
        options: &LoadOptions,
        shortlist_from: usize,
    ) -> Result<Self, DeviceError> {
        let mut limits = options.clone();
        limits.max_rows = limits.max_rows.max(1);
        let max = Bindings { rows: limits.max_rows, soft_rows: limits.max_soft_rows, wanted: limits.max_wanted };
        let compiled = compile(program, weights, max, shortlist_from)?;
        let arena = room(compiled.arena)?;
        let scratch = room(compiled.scratch.saturating_mul(pool.threads()))?;
        let expert_rows = compiled.expert_counts.iter().map(|&experts| vec![0; experts]).collect();
        let pages = Arc::new(PagePool::new(limits.max_state_bytes));
        let workshop = Arc::new(Workshop { pages, pool: pool.clone(), instructions });
        let (program, weight_bytes) = (program.clone(), AtomicU64::new(0));
        Ok(Self { program, compiled, workshop, limits, arena, scratch, last_stage: None, weight_bytes, expert_rows, profiler: None })
    }

    fn check(&self, call: &Call<'_>) -> Result<(), DeviceError> {
        call.check(&self.program)?;
        self.limits.check(&self.program, call)?;
        if call.bindings.wanted > self.limits.max_wanted && call.taps.is_some() {
            let (wanted, most) = (call.bindings.wanted, self.limits.max_wanted);
            return Err(DeviceError::Call(format!("a call with taps has at most {most} wanted rows here, not {wanted}")));
        }
        self.compiled.quotients.iter().try_for_each(|dim| dim.bind(&call.bindings).map(drop).map_err(DeviceError::Call))
    }

    /// Gets the states of a call ready.
    fn begin(&self, call: &mut Call<'_>) -> Result<(), DeviceError> {
        for segment in call.segments.iter_mut() {
            let rows = segment.valid_rows;
            let Some(state) = own_state(segment) else { continue };
            match state {
                Some(state) if state.fits(&self.program.slots) => state.begin(rows)?,
                _ => {
                    return Err(DeviceError::Call(format!(
                        "program `{}`: the state belongs to another device or another program",
                        self.program.name
                    )));
                }
            }
        }
        Ok(())
    }

    /// The steps before the wanted rows are looked at, then the rest, for so many of them at a time as there is memory for.
    fn compute(&mut self, call: &mut Call<'_>) -> Result<(), DeviceError> {
        let (steps, wanted_from) = (self.compiled.steps.len(), self.compiled.wanted_from);
        call.outputs.start(&self.program);
        if call.bindings.wanted <= self.limits.max_wanted {
            let (inputs, bindings, wants) = (call.inputs, call.bindings, call.wants);
            self.steps(call, 0..steps, inputs, bindings, wants)?;
            return self.give(call, &bindings, wants);
        }
        let (inputs, all, wants) = (call.inputs, call.bindings, call.wants);
        self.steps(call, 0..wanted_from, inputs, all, &[])?;
        let mut some: Vec<InputData<'_>> = inputs.to_vec();
        for first in (0..all.wanted).step_by(self.limits.max_wanted.max(1)) {
            let rows = first..all.wanted.min(first + self.limits.max_wanted.max(1));
            for (place, input) in self.program.inputs.iter().enumerate() {
                if let (Generator::WantedRows, InputData::I32(wanted)) = (&input.generator, inputs[place]) {
                    some[place] = InputData::I32(&wanted[rows.clone()]);
                }
            }
            let (bindings, wants) = (Bindings { wanted: rows.len(), ..all }, &wants[rows]);
            self.steps(call, wanted_from..steps, &some, bindings, wants)?;
            self.give(call, &bindings, wants)?;
        }
        Ok(())
    }

    /// Runs some of the steps.
    fn steps(
        &mut self,
        call: &mut Call<'_>,
        steps: Range<usize>,
        inputs: &[InputData<'_>],
        bindings: Bindings,
        wants: &[Want<'_>],
    ) -> Result<(), DeviceError> {
        let workshop = self.workshop.clone();
        let cancel = call.cancel;
        let mut frame = Frame {
            run: Run {
                pool: &workshop.pool,
                instructions: workshop.instructions,
                bindings,
                largest_only: !wants.is_empty() && wants.iter().all(|want| matches!(want, Want::Largest)) && !self.shows_logits(call),
                weight_bytes: &self.weight_bytes,
            },
            memory: Memory {
                inputs,
                arena: bytemuck::cast_slice_mut(self.arena.as_mut()),
                offsets: &self.compiled.offsets,
                scratch: bytemuck::cast_slice_mut(self.scratch.as_mut()),
                bindings,
            },
            segments: &mut *call.segments,
            expert_rows: &mut self.expert_rows,
        };
        // The last stage begins where the one before it is done.
        let last_stage = self.compiled.taps.iter().nth_back(1).map_or(0, |tapped| tapped.after);
        let mut last_stage_began = None;
        let mut taps = self.compiled.taps.iter().skip_while(|tapped| tapped.after < steps.start).peekable();
        for number in steps.clone() {
            while let Some(tapped) = taps.next_if(|tapped| tapped.after <= number) {
                deliver(&self.program, tapped, &mut frame, call.tapped, &mut call.taps);
            }
            if cancel.is_some_and(|flag| flag.load(Ordering::Relaxed)) {
                return Err(DeviceError::Cancelled);
            }
            if number >= last_stage && last_stage_began.is_none() {
                last_stage_began = Some(Instant::now());
            }
            let Some(profiler) = &mut self.profiler else {
                self.compiled.steps[number].run(&mut frame)?;
                continue;
            };
            let (began, bytes) = (Instant::now(), self.weight_bytes.load(Ordering::Relaxed));
            self.compiled.steps[number].run(&mut frame)?;
            let bytes = self.weight_bytes.load(Ordering::Relaxed) - bytes;
            profiler.step(number, began.elapsed(), bytes, &workshop.pool);
        }
        if let Some(began) = last_stage_began {
            *self.last_stage.get_or_insert_default() += began.elapsed();
        }
        if steps.end == self.compiled.steps.len() {
            for tapped in taps {
                deliver(&self.program, tapped, &mut frame, call.tapped, &mut call.taps);
            }
        }
        Ok(())
    }

    /// Whether the tap of the last stage is shown: it has every number.
    fn shows_logits(&self, call: &Call<'_>) -> bool {
        let is_last = |stage: &str| self.program.stages.last().is_some_and(|last| *last.name == *stage);
        call.taps.is_some() && call.tapped.is_none_or(is_last)
    }

    /// Gives the caller what it wants of rows that were computed.
    fn give(&self, call: &mut Call<'_>, bindings: &Bindings, wants: &[Want<'_>]) -> Result<(), DeviceError> {
        let wanted = self.program.wanted_output().filter(|_| !wants.is_empty());
        for (place, view) in self.compiled.outputs.iter().enumerate() {
            let values = self.numbers(view, bindings);
            match wanted {
                Some((own, width)) if own == place => {
                    const AT_ONCE: usize = 16;
                    for (wants, values) in wants.chunks(AT_ONCE).zip(values.chunks(AT_ONCE * width)) {
                        let mut answers = [const { None }; AT_ONCE];
                        let some = &mut answers[..wants.len()];
                        for_each(&self.workshop.pool, Chunks::new(some, 1), &mut [], |row, answer, _| {
                            answer[0] = wants[row].of(&values[row * width..][..width]);
                        });
                        call.outputs.answer_all(place, wants, answers, values)?;
                    }
                }
                // Outputs that have nothing to do with wanted rows are there once.
                _ if call.outputs.put(place).is_empty() => call.outputs.put(place).extend_from_slice(values),
                _ => {}
            }
        }
        Ok(())
    }

    fn numbers(&self, view: &View, bindings: &Bindings) -> &[f32] {
        let Place::Buffer(buffer) = view.place else { unreachable!("outputs are buffers") };
        let start = self.compiled.offsets[buffer];
        &bytemuck::cast_slice(self.arena.as_ref())[start..start + view.numbers(bindings)]
    }
}

impl Executable for CpuExecutable {
    fn program(&self) -> &Checked {
        &self.program
    }

    fn new_state(&self, context: usize) -> Result<Box<dyn State>, DeviceError> {
        Ok(Box::new(CpuState::new(&self.program.slots, context, &self.workshop)?))
    }

    fn submit(&mut self, call: &mut Call<'_>) -> Result<Ticket, DeviceError> {
        self.check(call)?;
        Ok(Ticket(0))
    }

    fn wait(&mut self, _: Ticket, call: &mut Call<'_>) -> Result<(), DeviceError> {
        let began = Instant::now();
        self.last_stage = None;
        self.begin(call)?;
        self.weight_bytes.store(0, Ordering::Relaxed);
        let pool = self.workshop.pool.clone();
        let _held = pool.hold_caller();
        self.compute(call)?;
        for segment in call.segments.iter_mut() {
            let (rows, partial) = (segment.valid_rows, segment.partial);
            if let Some(Some(state)) = own_state(segment) {
                state.end(rows, partial);
            }
        }
        if let Some(profiler) = &mut self.profiler {
            profiler.call(began.elapsed());
        }
        Ok(())
    }

    fn max_segments(&self) -> usize {
        self.limits.max_segments
    }

    fn commits_partly(&self) -> bool {
        true
    }

    fn invariant_rows(&self) -> usize {
        usize::MAX
    }

    fn state_bytes(&self) -> Option<StateBytes> {
        Some(self.workshop.pages.bytes())
    }

    fn last_stage_time(&self) -> Option<Duration> {
        self.last_stage
    }

    fn weights_read(&self) -> Option<WeightsRead<'_>> {
        self.last_stage.map(|_| WeightsRead { bytes: self.weight_bytes.load(Ordering::Relaxed), expert_rows: &self.expert_rows })
    }

    fn begin_profile(&mut self) {
        self.profiler = Some(Profiler::new(&self.compiled.steps, &self.workshop.pool));
    }

    fn take_profile(&mut self) -> Option<Profile> {
        self.profiler.take().map(|profiler| profiler.finish(&self.workshop.pool))
    }

    fn scratch_bytes(&self) -> u64 {
        let sketches = self.compiled.steps.iter().map(|step| match step {
            Step::Linear(linear) => linear.shortlist.as_ref().map_or(0, |list| list.bytes()),
            _ => 0,
        });
        (self.arena.as_ref().len() + self.scratch.as_ref().len() + sketches.sum::<usize>()) as u64
    }
}

/// The segment's state, and whether it is one of this device.
fn own_state<'a>(segment: &'a mut Segment<'_>) -> Option<Option<&'a mut CpuState>> {
    segment.state.as_deref_mut().map(|state| state.downcast_mut())
}

fn deliver(program: &Checked, tapped: &Tapped, frame: &mut Frame<'_, '_>, only: Option<&str>, taps: &mut Option<&mut dyn FnMut(Tap<'_>)>) {
    let stage = &program.stages[tapped.stage];
    let Some(taps) = taps.as_mut().filter(|_| only.is_none_or(|only| *stage.name == *only)) else { return };
    let ([], inputs, _) = frame.memory.split([]);
    let bindings = frame.run.bindings;
    let shape: Vec<usize> = tapped.shape.iter().map(|&dim| count(dim, &bindings)).collect();
    let copy: Vec<f32>;
    let values = if tapped.integers {
        copy = inputs.integers(&tapped.view).iter().map(|&n| n as f32).collect();
        &copy
    } else if tapped.view.stride.is_some() {
        let rows = inputs.own_rows(&tapped.view);
        copy = (0..rows.count).flat_map(|row| rows.row(row)).copied().collect();
        &copy
    } else {
        inputs.dense(&tapped.view)
    };
    Tap::show(stage, &shape, values, *taps);
}

/// So many zeroed f32 numbers, where there is memory for them.
fn room(numbers: usize) -> Result<AlignedBytes, DeviceError> {
    let fits = numbers.checked_mul(4).filter(|&bytes| Vec::<u8>::new().try_reserve_exact(bytes).is_ok());
    let bytes = fits.ok_or_else(|| {
        DeviceError::Resources(format!("not enough memory for {numbers} intermediate values: load the program for fewer rows per call"))
    })?;
    Ok(AlignedBytes::zeroed(bytes))
}

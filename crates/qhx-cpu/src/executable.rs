//! Runs a compiled program, call after call, on memory that was planned at load.

use crate::{
    compile::{Compiled, Tapped, compile},
    kernels::Instructions,
    memory::{Memory, Place, View, count},
    ops::{Frame, Run, Step},
    pool::Pool,
    state::CpuState,
};
use qhx_ir::{AlignedBytes, Bindings, Call, Checked, DeviceError, Executable, LoadOptions, Segment, State, Tap, Weights, WeightsRead};
use std::{
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
    pool: Arc<Pool>,
    instructions: Instructions,
    max: Bindings,
    arena: AlignedBytes,
    scratch: AlignedBytes,
    /// The sizes of the last successful call.
    last: Option<Bindings>,
    last_stage: Duration,
    weight_bytes: AtomicU64,
    /// For each step with experts: how many rows each expert got.
    expert_rows: Vec<Vec<usize>>,
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
        let max = Bindings { rows: options.max_rows.max(1), soft_rows: options.max_soft_rows, wanted: options.max_wanted };
        let compiled = compile(program, weights, max, shortlist_from)?;
        let arena = room(compiled.arena)?;
        let scratch = room(compiled.scratch.saturating_mul(pool.threads()))?;
        let expert_rows = compiled.expert_counts.iter().map(|&experts| vec![0; experts]).collect();
        let (program, pool) = (program.clone(), pool.clone());
        Ok(Self {
            program,
            compiled,
            pool,
            instructions,
            max,
            arena,
            scratch,
            last: None,
            last_stage: Duration::ZERO,
            weight_bytes: AtomicU64::new(0),
            expert_rows,
        })
    }

    fn check(&self, call: &mut Call<'_>) -> Result<(), DeviceError> {
        call.check(&self.program)?;
        let (found, max) = (call.bindings, self.max);
        if found.rows > max.rows || found.soft_rows > max.soft_rows || found.wanted > max.wanted {
            return Err(DeviceError::Call(format!(
                "a call of T = {}, R = {}, L = {} rows exceeds the {}, {}, {} that program `{}` was loaded for",
                found.rows, found.soft_rows, found.wanted, max.rows, max.soft_rows, max.wanted, self.program.name
            )));
        }
        for dim in &self.compiled.quotients {
            dim.bind(&found).map_err(DeviceError::Call)?;
        }
        for segment in call.segments.iter_mut() {
            let Some(state) = own_state(segment) else { continue };
            match state {
                Some(state) if state.fits(&self.program.slots) => state.begin(),
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
        Ok(Box::new(CpuState::new(&self.program.slots, context)?))
    }

    fn run(&mut self, call: &mut Call<'_>) -> Result<(), DeviceError> {
        self.last = None;
        self.check(call)?;
        self.weight_bytes.store(0, Ordering::Relaxed);
        let pool = self.pool.clone();
        let _held = pool.hold_caller();
        let (cancel, bindings) = (call.cancel, call.bindings);
        let mut frame = Frame {
            run: Run {
                pool: &self.pool,
                instructions: self.instructions,
                bindings,
                epoch: call.epoch,
                // Taps show every number.
                largest_only: call.largest_only && call.taps.is_none(),
                weight_bytes: &self.weight_bytes,
            },
            memory: Memory {
                inputs: call.inputs,
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
        let mut last_stage_began = Instant::now();
        let mut taps = self.compiled.taps.iter().peekable();
        for (number, step) in self.compiled.steps.iter().enumerate() {
            while let Some(tapped) = taps.next_if(|tapped| tapped.after <= number) {
                deliver(&self.program, tapped, &mut frame, &mut call.taps);
            }
            if cancel.is_some_and(|flag| flag.load(Ordering::Relaxed)) {
                return Err(DeviceError::Cancelled);
            }
            if number == last_stage {
                last_stage_began = Instant::now();
            }
            step.run(&mut frame)?;
        }
        self.last_stage = last_stage_began.elapsed();
        for tapped in taps {
            deliver(&self.program, tapped, &mut frame, &mut call.taps);
        }
        for segment in call.segments.iter_mut() {
            let rows = segment.valid_rows;
            if let Some(Some(state)) = own_state(segment) {
                state.end(rows);
            }
        }
        self.last = Some(bindings);
        Ok(())
    }

    fn output(&self, name: &str) -> Option<&[f32]> {
        let place = self.program.outputs.iter().position(|output| &*output.name == name)?;
        Some(self.numbers(&self.compiled.outputs[place], &self.last?))
    }

    fn last_stage_time(&self) -> Option<Duration> {
        self.last.is_some().then_some(self.last_stage)
    }

    fn weights_read(&self) -> Option<WeightsRead<'_>> {
        self.last.map(|_| WeightsRead { bytes: self.weight_bytes.load(Ordering::Relaxed), expert_rows: &self.expert_rows })
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
    segment.state.as_mut().map(|state| state.as_any_mut().downcast_mut())
}

fn deliver(program: &Checked, tapped: &Tapped, frame: &mut Frame<'_, '_>, taps: &mut Option<&mut dyn FnMut(Tap<'_>)>) {
    let Some(taps) = taps else { return };
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
    taps(Tap { stage: &program.stages[tapped.stage].name, shape: &shape, values });
}

/// So many zeroed f32 numbers, where there is memory for them.
fn room(numbers: usize) -> Result<AlignedBytes, DeviceError> {
    let fits = numbers.checked_mul(4).filter(|&bytes| Vec::<u8>::new().try_reserve_exact(bytes).is_ok());
    let bytes = fits.ok_or_else(|| {
        DeviceError::Resources(format!("not enough memory for {numbers} intermediate values: load the program for fewer rows per call"))
    })?;
    Ok(AlignedBytes::zeroed(bytes))
}

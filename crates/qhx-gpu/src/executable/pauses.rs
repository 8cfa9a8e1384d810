//! Calls that pause for what the host makes of what they have computed so far.

use super::{Ending, GpuExecutable, UnderWay, answers::read_numbers, replace_part, shape, volume};
use crate::transfers::Parts;
use qhx_ir::{Bindings, Call, Checked, DeviceError, InputData, LoadOptions, Op, OpKind, Paused, Replace, WeightTensor};
use std::{ops::Range, time::Instant};

impl GpuExecutable {
    /// Lets what waits for the host go on, and end.
    pub(super) fn release(&mut self) -> Result<(), DeviceError> {
        if self.under_way.is_some() && self.last.is_some_and(|shape| shape.waits) {
            self.pauses.iter().try_for_each(|pause| pause.answered.set())?;
        }
        self.settle()?;
        Ok(())
    }

    /// Steps of a call; where it pauses, the host submits what follows.
    pub(super) fn run_steps(
        &mut self,
        call: &mut Call<'_>,
        bindings: &Bindings,
        steps: Range<usize>,
        ending: Ending,
    ) -> Result<(), DeviceError> {
        let mut done = steps.start;
        for number in 0..self.pauses.len() {
            let (at, gives) = (self.lowered.pauses[number].step, !self.lowered.pauses[number].gives.is_empty());
            if !steps.contains(&at) {
                continue;
            }
            let shape = shape(call, bindings, done..at, Ending::Nothing);
            self.submit_shape(shape)?;
            self.reads = Parts::none();
            if gives {
                self.end_shape(shape)?;
                self.pause(number, call, true)?;
            } else {
                let answered = self.pause(number, call, true);
                self.end_shape(shape)?;
                answered?;
            }
            done = at;
        }
        self.run_shape(shape(call, bindings, done..steps.end, ending))
    }

    /// Answers all pauses of what was submitted.
    pub(super) fn answer(&mut self, call: &mut Call<'_>) -> Result<(), DeviceError> {
        for number in 0..self.pauses.len() {
            let Some(UnderWay { submission, .. }) = self.under_way else { return Ok(()) };
            let pause = &self.lowered.pauses[number];
            let (gives, takes) = (!pause.gives.is_empty(), !pause.takes.is_empty());
            if gives {
                self.gpu.wait_for(&self.pauses[number].reached, submission)?;
            }
            let began = Instant::now();
            self.pause(number, call, false)?;
            if !takes {
                continue;
            }
            let waits = gives || self.pauses[number].reached.has_happened()?;
            self.pauses[number].answered.set()?;
            if let (Some(under_way), true) = (&mut self.under_way, waits) {
                under_way.waited += began.elapsed();
            }
        }
        Ok(())
    }

    /// Has the host make what a pause takes. `replaces`: what is replaced then counts for what follows.
    fn pause(&mut self, number: usize, call: &mut Call<'_>, replaces: bool) -> Result<(), DeviceError> {
        let Self { lowered, given, given_numbers, late, inputs, input_offsets, program, limits, transfers, weights, reads, .. } = self;
        if call.is_cancelled() {
            return Err(DeviceError::Cancelled);
        }
        let host = call.host.as_mut().ok_or_else(|| DeviceError::Call(format!("program `{}` pauses, but nobody answers", program.name)))?;
        let pause = &lowered.pauses[number];
        given_numbers.resize_with(pause.gives.len().max(given_numbers.len()), Vec::new);
        for ((view, offset), numbers) in pause.gives.iter().zip(given_numbers.iter_mut()) {
            numbers.resize(volume(view, &call.bindings), 0.0);
            read_numbers(given, *offset, view.dtype, numbers);
        }
        let numbers: Vec<&[f32]> = given_numbers.iter().take(pause.gives.len()).map(Vec::as_slice).collect();
        let places: Vec<usize> = pause.takes.iter().chain(&pause.changes).copied().collect();
        let mut taken = vec![false; places.len()];
        let mut read = |input: usize, data: InputData<'_>| {
            if let (InputData::I32(numbers), true) = (data, chooses(program, limits, input)) {
                reads.extend(numbers);
            }
        };
        let mut take = |place: usize, data: InputData<'_>| {
            let input = places[place];
            taken[place] = true;
            let (to, offset) = lowered.late_offset(input).map_or((&*inputs, input_offsets[input]), |offset| (&*late, offset));
            match data {
                InputData::F32(numbers) => to.write(offset, bytemuck::cast_slice(numbers)),
                InputData::I32(numbers) => to.write(offset, bytemuck::cast_slice(numbers)),
            }
            read(input, data);
        };
        let mut replace =
            |weight: &str, number: usize, part: &WeightTensor| replace_part(weights, transfers.as_mut(), weight, number, part);
        let replace: Option<&mut Replace<'_>> = if replaces { Some(&mut replace) } else { None };
        host(&mut Paused { number, given: &numbers, take: &mut take, replace })?;
        // What was not changed is as it was given when the call began.
        let (taken, changed) = taken.split_at(pause.takes.len());
        let unchanged = pause.changes.iter().zip(changed).filter(|(_, changed)| !**changed);
        unchanged.for_each(|(&input, _)| read(input, call.inputs[input]));
        match taken.iter().all(|taken| *taken) {
            true => Ok(()),
            false => Err(DeviceError::Call(format!("program `{}`: pause {number} was not given all its inputs", program.name))),
        }
    }
}

/// The parts of replaceable weights that a call reads: experts, as far as the caller has chosen them. What it chooses in pauses is added there.
pub(super) fn parts_read(program: &Checked, limits: &LoadOptions, call: &Call<'_>) -> Parts {
    let mut all = Parts::none();
    let replaceable = |op: &&Op| op.op.weights().iter().any(|name| limits.replaceable.contains(name));
    for op in program.ops.iter().filter(replaceable) {
        let OpKind::Experts { experts, held, .. } = &op.op else { return Parts::All };
        let choice = held.as_ref().unwrap_or(experts);
        if limits.pauses.iter().any(|pause| pause.takes.contains(choice) || pause.changes.contains(choice)) {
            continue;
        }
        let chosen = program.inputs.iter().position(|input| input.name == *choice).map(|place| call.inputs[place]);
        let Some(InputData::I32(chosen)) = chosen else { return Parts::All };
        all.extend(chosen);
    }
    all
}

/// Whether the input at a place says which parts of replaceable weights are read.
fn chooses(program: &Checked, limits: &LoadOptions, place: usize) -> bool {
    let chooses = |op: &Op| match &op.op {
        OpKind::Experts { experts, gate, held, .. } => {
            *held.as_ref().unwrap_or(experts) == program.inputs[place].name && limits.replaceable.contains(gate)
        }
        _ => false,
    };
    program.readers(&program.inputs[place].name).iter().any(|&reader| chooses(&program.ops[reader]))
}

//! An executable whose calls are written into a timeline: what runs where and when, and what crosses to its device and back.

use crate::DeviceChoice;
use qhx_ir::{
    Call, Checked, DType, Device, DeviceError, Executable, ExpertCache, Generator, Paused, Profile, State, StateBytes, Ticket, Timeline,
    Traffic, Transfer, WeightTensor, WeightsRead, dim,
};
use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

/// The stages of a program, for people.
pub(crate) fn stages_shown(program: &Checked) -> String {
    match (program.stages.first(), program.stages.last()) {
        (Some(first), Some(last)) if first.name != last.name => format!("{} … {}", first.name, last.name),
        (first, _) => first.map_or_else(String::new, |stage| stage.name.to_string()),
    }
}

/// The executable, and what is written of it.
pub(crate) struct Recorded {
    executable: Box<dyn Executable>,
    timeline: Timeline,
    lane: String,
    /// The lane of what is brought to the device.
    transfers: String,
    /// Its stages.
    name: String,
    /// When each call was submitted.
    begun: HashMap<u64, Instant>,
}

impl Recorded {
    /// Has the calls of an executable on the device `lane` written down, if there is something to write them into.
    pub(crate) fn of(executable: Box<dyn Executable>, lane: &str, timeline: Option<&Timeline>) -> Box<dyn Executable> {
        let Some(timeline) = timeline.cloned() else { return executable };
        let name = stages_shown(executable.program());
        let (lane, transfers) = (lane.to_owned(), format!("to {lane}"));
        Box::new(Self { executable, timeline, lane, transfers, name, begun: HashMap::new() })
    }

    /// The same for what was loaded on a device; a split writes down its parts itself.
    pub(crate) fn of_device(executable: Box<dyn Executable>, device: &dyn Device, timeline: Option<&Timeline>) -> Box<dyn Executable> {
        let timeline = timeline.filter(|_| device.name() != DeviceChoice::Split.name());
        Self::of(executable, device.name(), timeline)
    }

    /// Writes down what was transferred meanwhile; whether the device does so behind the caller's back.
    fn record_transfers(&mut self) -> bool {
        let Some(ended) = self.executable.take_transfers() else { return false };
        for Transfer { weight, bytes, began, ended } in ended {
            self.timeline.add_ended(&self.transfers, &weight, (began, ended), vec![("bytes", bytes)]);
        }
        true
    }

    /// Bytes of the values that cross between devices in a call.
    fn crossing(&self, call: &Call<'_>) -> [u64; 2] {
        let program = self.executable.program();
        let bytes = |value: &str| {
            let shape = dim::bind_shape(&program.value_type(value).shape, &call.bindings).unwrap_or_default();
            let (DType::F32 | DType::I32) = program.value_type(value).dtype;
            4 * shape.iter().product::<usize>() as u64
        };
        let carried = program.inputs.iter().filter(|input| input.generator == Generator::Carried).map(|input| bytes(&input.name));
        let made = program.outputs.iter().filter(|output| output.name == output.value).map(|output| bytes(&output.value));
        [carried.sum(), made.sum()]
    }
}

impl Executable for Recorded {
    fn program(&self) -> &Checked {
        self.executable.program()
    }

    fn new_state(&self, context: usize) -> Result<Box<dyn State>, DeviceError> {
        self.executable.new_state(context)
    }

    fn submit(&mut self, call: &mut Call<'_>) -> Result<Ticket, DeviceError> {
        let started = Instant::now();
        let ticket = self.executable.submit(call)?;
        self.begun.insert(ticket.0, started);
        Ok(ticket)
    }

    fn wait(&mut self, ticket: Ticket, call: &mut Call<'_>) -> Result<(), DeviceError> {
        let mut started = self.begun.remove(&ticket.0).unwrap_or_else(Instant::now);
        let (rows, [bytes_in, bytes_out]) = (call.bindings.rows as u64, self.crossing(call));
        match call.host.take() {
            None => self.executable.wait(ticket, call)?,
            Some(host) => {
                let Self { executable, timeline, lane, name, .. } = self;
                let mut recorded = |paused: &mut Paused<'_>| {
                    let given = 4 * paused.given.iter().map(|numbers| numbers.len() as u64).sum::<u64>();
                    if given == 0 {
                        return host(paused);
                    }
                    timeline.add(lane, name, started, vec![("rows", rows), ("bytes_out", given)]);
                    host(paused)?;
                    started = Instant::now();
                    Ok(())
                };
                call.with_host(&mut recorded, |call| executable.wait(ticket, call))?;
            }
        }
        // Inputs that are given in pauses are counted at the end.
        let facts = vec![("rows", rows), ("bytes_in", bytes_in), ("bytes_out", bytes_out)];
        self.timeline.add(&self.lane, &self.name, started, facts);
        self.record_transfers();
        Ok(())
    }

    fn works_in_background(&self) -> bool {
        self.executable.works_in_background()
    }

    fn max_segments(&self) -> usize {
        self.executable.max_segments()
    }

    fn commits_partly(&self) -> bool {
        self.executable.commits_partly()
    }

    fn invariant_rows(&self) -> usize {
        self.executable.invariant_rows()
    }

    fn state_bytes(&self) -> Option<StateBytes> {
        self.executable.state_bytes()
    }

    fn last_stage_time(&self) -> Option<Duration> {
        self.executable.last_stage_time()
    }

    fn weights_read(&self) -> Option<WeightsRead<'_>> {
        self.executable.weights_read()
    }

    fn begin_profile(&mut self) {
        self.executable.begin_profile();
    }

    fn take_profile(&mut self) -> Option<Profile> {
        self.executable.take_profile()
    }

    fn traffic(&self) -> Option<Traffic> {
        self.executable.traffic()
    }

    fn row_by_row(&self) -> Option<&str> {
        self.executable.row_by_row()
    }

    fn replace_part(&mut self, weight: &str, number: usize, part: &WeightTensor) -> Result<(), DeviceError> {
        let started = Instant::now();
        self.executable.replace_part(weight, number, part)?;
        if !self.record_transfers() {
            self.timeline.add(&self.transfers, weight, started, vec![("bytes", part.stored_bytes() as u64)]);
        }
        Ok(())
    }

    fn take_transfers(&mut self) -> Option<Vec<Transfer>> {
        self.executable.take_transfers()
    }

    fn parts_on_the_way(&self) -> Vec<usize> {
        self.executable.parts_on_the_way()
    }

    fn expert_cache(&self) -> Option<ExpertCache> {
        self.executable.expert_cache()
    }

    fn scratch_bytes(&self) -> u64 {
        self.executable.scratch_bytes()
    }
}

//! A machine that is not there: devices that compute with the processor, and whose time is reckoned instead of measured.

use qhx_ir::{
    Call, Checked, Device, DeviceError, DeviceInfo, Executable, InputData, LoadOptions, Machine, Name, Op, OpKind, Pause, Paused, State,
    StateBytes, Ticket, WeightTensor, Weights, dim, reference::ReferenceDevice,
};
use qhx_runtime::{memory::tensor_bytes, planner::Clock};
use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    sync::{Arc, Mutex},
    time::Duration,
};

/// A clock that goes on when simulated devices work.
#[derive(Default)]
pub(crate) struct VirtualClock(Mutex<f64>);

impl VirtualClock {
    fn seconds(&self) -> f64 {
        *self.0.lock().unwrap()
    }

    fn go_on_to(&self, seconds: f64) {
        let mut now = self.0.lock().unwrap();
        *now = now.max(seconds);
    }
}

impl Clock for VirtualClock {
    fn now(&self) -> Duration {
        Duration::from_secs_f64(self.seconds())
    }
}

/// How fast a simulated device is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Traits {
    pub(crate) call_seconds: f64,
    pub(crate) op_seconds: f64,
    pub(crate) read: f64,
    pub(crate) products: f64,
    pub(crate) copy: f64,
    /// Bytes of its own memory.
    pub(crate) memory: Option<u64>,
    /// So many calls of a loaded program take [`WAKING`] times as long: it compiles, and its clocks rise.
    pub(crate) waking: usize,
}

/// How much longer a call takes until a device is awake.
const WAKING: f64 = 30.0;

/// A device with a time of its own.
pub(crate) struct Simulated(Arc<Inner>);

struct Inner {
    name: String,
    device: Arc<dyn Device>,
    traits: Traits,
    clock: Arc<VirtualClock>,
    /// When it has done all that it was given.
    free: Mutex<f64>,
}

impl Simulated {
    pub(crate) fn device(name: &str, device: Arc<dyn Device>, traits: Traits, clock: Arc<VirtualClock>) -> Arc<dyn Device> {
        Arc::new(Self(Arc::new(Inner { name: name.to_owned(), device, traits, clock, free: Mutex::new(0.0) })))
    }
}

impl Device for Simulated {
    fn name(&self) -> &str {
        &self.0.name
    }

    fn accepts(&self, program: &Checked, op: &Op) -> Result<(), DeviceError> {
        self.0.device.accepts(program, op)
    }

    fn own_memory(&self) -> Result<Option<u64>, DeviceError> {
        Ok(self.0.traits.memory)
    }

    fn replaces_weights(&self) -> bool {
        self.0.name == "gpu"
    }

    fn open(&self) -> Result<Arc<dyn Machine>, DeviceError> {
        Ok(Arc::new(Self(self.0.clone())))
    }
}

impl Machine for Simulated {
    fn describe(&self) -> DeviceInfo {
        DeviceInfo {
            name: self.0.name.clone(),
            description: "simulated".into(),
            memory_bytes: self.0.traits.memory,
            threads: 1,
            facts: BTreeMap::new(),
        }
    }

    fn load(&self, program: &Checked, weights: &Arc<dyn Weights>, options: &LoadOptions) -> Result<Box<dyn Executable>, DeviceError> {
        // The processor does not replace weights and does not pause; the reference does.
        let executable = match !options.replaceable.is_empty() || !options.pauses.is_empty() {
            true => ReferenceDevice.load(program, weights, options)?,
            false => self.0.device.load(program, weights, options)?,
        };
        let pauses = options.pauses.clone();
        Ok(Box::new(Timed { executable, device: self.0.clone(), pauses, ends: Vec::new(), calls: 0, pace: 1.0 }))
    }
}

/// An executable whose calls end when the device would have ended them.
struct Timed {
    executable: Box<dyn Executable>,
    device: Arc<Inner>,
    pauses: Vec<Pause>,
    /// When each call that was submitted ends.
    ends: Vec<f64>,
    calls: usize,
    /// How many times as long as usual the call under way takes.
    pace: f64,
}

impl Timed {
    /// Programs that only measure are not computed.
    fn is_probe(&self) -> bool {
        self.program().stages.first().is_some_and(|stage| &*stage.name == "probe")
    }

    /// The seconds of a call, or of its last or only part.
    fn cost(&self, call: &Call<'_>) -> f64 {
        let last = self.pauses.last().map_or(0, |pause| pause.before);
        self.device.traits.call_seconds + self.copied(call) + self.ops(call, last..self.program().ops.len())
    }

    /// The seconds that what crosses at the beginning and at the end takes.
    fn copied(&self, call: &Call<'_>) -> f64 {
        let numbers = |value: &str| self.numbers(call, value);
        let program = self.program();
        let late = |name: &str| self.pauses.iter().any(|pause| pause.takes.iter().any(|taken| **taken == *name));
        let inputs = program.inputs.iter().map(|input| &input.name).filter(|name| !late(name));
        let values = inputs.chain(program.outputs.iter().map(|output| &output.value));
        let logits = match call.wants.is_empty() {
            true => 0.0,
            false => program.wanted_output().map_or(0.0, |(place, _)| numbers(&program.outputs[place].value)),
        };
        4.0 * (values.map(|value| numbers(value)).sum::<f64>() - logits) / self.device.traits.copy
    }

    fn numbers(&self, call: &Call<'_>, value: &str) -> f64 {
        dim::bind_shape(&self.program().value_type(value).shape, &call.bindings).unwrap().iter().product::<usize>() as f64
    }

    /// The seconds of the ops at some places.
    fn ops(&self, call: &Call<'_>, places: Range<usize>) -> f64 {
        let (program, traits) = (self.program(), &self.device.traits);
        let numbers = |value: &str| self.numbers(call, value);
        let rows = call.bindings.rows as f64;
        let depth: f64 = call.segments.iter().filter_map(|segment| Some(segment.state.as_ref()?.len() as f64)).sum();
        let op = |op: &Op| {
            let size = |name| {
                program
                    .weights
                    .get(name)
                    .map_or((0.0, 0.0), |w| (tensor_bytes(w.encoding, &w.shape) as f64, w.shape.iter().product::<usize>() as f64))
            };
            let (bytes, products) = op.op.weights().into_iter().map(size).fold((0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1));
            let table_rows = |name| program.weights.get(name).map_or(1.0, |w| w.shape[0] as f64);
            let (bytes, products) = match &op.op {
                OpKind::Embed { table, .. } => (bytes * rows / table_rows(table), 0.0),
                OpKind::Experts { gate, experts, held, .. } => {
                    let given = |name: &Name| match program.inputs.iter().zip(call.inputs).find(|(input, _)| input.name == *name) {
                        Some((_, InputData::I32(numbers))) => Some(*numbers),
                        _ => None,
                    };
                    let held = held.as_ref().and_then(given);
                    let is_there = |expert: usize| held.is_none_or(|held| held[expert] >= 0);
                    let (used, choices) = match given(experts) {
                        Some(chosen) => {
                            let there: Vec<&i32> = chosen.iter().filter(|expert| is_there(**expert as usize)).collect();
                            (there.iter().collect::<BTreeSet<_>>().len() as f64, there.len() as f64)
                        }
                        // Two experts a row, all different as long as there are any; chosen equally often.
                        None => {
                            let share =
                                |held: &[i32]| (0..held.len()).filter(|&expert| is_there(expert)).count() as f64 / held.len() as f64;
                            let choices = 2.0 * rows * held.map_or(1.0, share);
                            (choices, choices)
                        }
                    };
                    (bytes * (used / table_rows(gate)).min(1.0), products * choices / table_rows(gate))
                }
                OpKind::Attend { q, slot: Some(slot), .. } => {
                    let keys = depth + rows;
                    (program.slots[slot].bytes(1) as f64 * keys, 2.0 * numbers(q) * keys)
                }
                OpKind::Linear { weight, .. } => (bytes, numbers(op.outputs()[0].as_ref()) * program.weights[weight].shape[1] as f64),
                _ => (bytes, products * rows),
            };
            traits.op_seconds + (bytes / traits.read).max(products / traits.products)
        };
        program.ops[places].iter().map(op).sum::<f64>()
    }
}

impl Timed {
    /// The device computes up to each pause, where it waits for the host, which has not waited for the device where it needs nothing of it.
    fn wait_with_pauses(&mut self, ticket: Ticket, call: &mut Call<'_>) -> Result<(), DeviceError> {
        let (clock, device) = (self.device.clock.clone(), self.device.clone());
        let bytes = |names: &[Name]| 4.0 * names.iter().map(|name| self.numbers(call, name)).sum::<f64>() / device.traits.copy;
        let ends = self.pauses.iter().map(|pause| pause.before);
        let starts = [0].into_iter().chain(self.pauses.iter().map(|pause| pause.before));
        let parts: Vec<[f64; 3]> = starts
            .zip(ends)
            .zip(&self.pauses)
            .map(|((start, end), pause)| [self.ops(call, start..end), bytes(&pause.gives), bytes(&pause.takes)])
            .collect();
        let told: Vec<[bool; 2]> = self.pauses.iter().map(|pause| [!pause.gives.is_empty(), !pause.takes.is_empty()]).collect();
        let rest = self.cost(call);
        let pace = self.pace;
        let work = |seconds: f64| {
            let mut free = device.free.lock().unwrap();
            *free = free.max(clock.seconds()) + pace * seconds;
            *free
        };
        let Some(host) = call.host.take() else { return Err(DeviceError::Call("nobody answers".into())) };
        let mut timed = |paused: &mut Paused<'_>| {
            let ([ops, given, taken], [gives, takes]) = (parts[paused.number], told[paused.number]);
            let reached = work(ops + given);
            if gives {
                clock.go_on_to(reached);
            }
            host(paused)?;
            if takes {
                let mut free = device.free.lock().unwrap();
                *free = free.max(clock.seconds()) + pace * (taken + device.traits.call_seconds);
            }
            Ok(())
        };
        call.with_host(&mut timed, |call| self.executable.wait(ticket, call))?;
        clock.go_on_to(work(rest));
        Ok(())
    }
}

impl Executable for Timed {
    fn program(&self) -> &Checked {
        self.executable.program()
    }

    fn new_state(&self, context: usize) -> Result<Box<dyn State>, DeviceError> {
        self.executable.new_state(context)
    }

    fn submit(&mut self, call: &mut Call<'_>) -> Result<Ticket, DeviceError> {
        let asleep = self.calls < self.device.traits.waking && !self.is_probe();
        self.pace = if asleep { WAKING } else { 1.0 };
        let cost = if self.pauses.is_empty() { self.pace * self.cost(call) } else { 0.0 };
        self.calls += 1;
        let mut free = self.device.free.lock().unwrap();
        *free = free.max(self.device.clock.seconds()) + cost;
        self.ends.push(*free);
        if self.is_probe() { Ok(Ticket(0)) } else { self.executable.submit(call) }
    }

    fn wait(&mut self, ticket: Ticket, call: &mut Call<'_>) -> Result<(), DeviceError> {
        let rest = self.ends.remove(0);
        if !self.pauses.is_empty() {
            return self.wait_with_pauses(ticket, call);
        }
        self.device.clock.go_on_to(rest);
        match self.is_probe() {
            true => call.outputs.give(&self.program().clone(), &[], |_| Vec::new()),
            false => self.executable.wait(ticket, call),
        }
    }

    fn works_in_background(&self) -> bool {
        self.device.name == "gpu"
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

    fn replace_part(&mut self, weight: &str, number: usize, part: &WeightTensor) -> Result<(), DeviceError> {
        let mut free = self.device.free.lock().unwrap();
        *free = free.max(self.device.clock.seconds()) + part.stored_bytes() as f64 / self.device.traits.copy;
        self.executable.replace_part(weight, number, part)
    }

    fn scratch_bytes(&self) -> u64 {
        self.executable.scratch_bytes()
    }
}

//! The process's side: does what it is asked with the device that it has.

use super::wire::{self, Content, Reply, Request, Row, Run, RunWant, StateFacts};
use qhx_ir::{
    AlignedBytes, Call, Checked, Device, DeviceError, Encoding, Executable, IdMask, InputData, LoadOptions, LoadProgress, Machine, Outputs,
    Paused, Program, Segment, State, Tap, Want, WeightTensor, Weights,
};
use std::{
    collections::HashMap,
    io::{self, Read, Write},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

/// Serves requests until the input ends. `open` makes the device of the settings that the first one brings.
pub fn serve(
    input: impl Read + Send + 'static,
    output: impl Write + Send + 'static,
    open: impl FnOnce(serde_json::Value) -> Result<Arc<dyn Device>, DeviceError>,
) -> io::Result<()> {
    let pipes = Arc::new(Pipes { input: Mutex::new(Box::new(input)), output: Mutex::new(Box::new(output)) });
    let (Request::Open(settings), _) = pipes.receive()? else { return Err(io::ErrorKind::InvalidData.into()) };
    let machine = open(settings).and_then(|device| Ok((device.open()?, device.own_memory()?)));
    let (machine, own_memory) = match machine {
        Ok(opened) => opened,
        Err(error) => return pipes.send(&Reply::Failed(error.into()), &[]),
    };
    pipes.send(&Reply::Opened { info: machine.describe(), own_memory }, &[])?;
    let mut desk = Desk { pipes: pipes.clone(), machine, executables: HashMap::new(), states: HashMap::new(), numbers: 0 };
    loop {
        let (request, body) = match pipes.receive() {
            Ok(received) => received,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error),
        };
        let replied = match desk.answer(request, body) {
            Ok(Some((reply, body))) => pipes.send(&reply, &[&body]),
            Ok(None) => Ok(()),
            Err(error) => pipes.send(&Reply::Failed(error.into()), &[]),
        };
        replied?;
    }
}

/// Where requests come from and replies go to.
struct Pipes {
    input: Mutex<Box<dyn Read + Send>>,
    output: Mutex<Box<dyn Write + Send>>,
}

impl Pipes {
    fn receive(&self) -> io::Result<(Request, Vec<u8>)> {
        wire::receive(&mut *lock(&self.input))
    }

    fn send(&self, reply: &Reply, body: &[&[u8]]) -> io::Result<()> {
        wire::send(&mut *lock(&self.output), reply, body)
    }
}

impl Pipes {
    /// Has the other side make what a pause takes.
    fn pause(&self, paused: &mut Paused<'_>) -> Result<(), DeviceError> {
        let given: Vec<Vec<u8>> = paused.given.iter().map(|numbers| wire::bytes(numbers)).collect();
        let reply = Reply::Paused { number: paused.number, given: paused.given.iter().map(|numbers| numbers.len()).collect() };
        self.send(&reply, &given.iter().map(Vec::as_slice).collect::<Vec<_>>()).map_err(|_| DeviceError::Cancelled)?;
        let Ok((Request::Resume(taken), body)) = self.receive() else { return Err(DeviceError::Cancelled) };
        let mut rest = &body[..];
        for (place, count, is_integer) in taken {
            let own = count.checked_mul(4).and_then(|bytes| rest.split_off(..bytes)).ok_or_else(unknown)?;
            match is_integer {
                true => (paused.take)(place, InputData::I32(&wire::integers(own))),
                false => (paused.take)(place, InputData::F32(&wire::floats(own))),
            }
        }
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Weights that are asked for over the pipe.
struct PipedWeights(Arc<Pipes>);

impl Weights for PipedWeights {
    fn tensor(&self, name: &str) -> Option<WeightTensor> {
        self.0.send(&Reply::Needs { name: name.to_owned() }, &[]).ok()?;
        match self.0.receive().ok()? {
            (Request::Tensor { encoding, shape, parts }, body) => tensor(encoding, shape, parts, &body),
            _ => None,
        }
    }
}

fn tensor(encoding: Encoding, shape: Vec<usize>, parts: [usize; 3], body: &[u8]) -> Option<WeightTensor> {
    let (data, rest) = body.split_at_checked(parts[0])?;
    let (scale, min) = rest.split_at_checked(parts[1])?;
    let copy = |bytes: &[u8]| (!bytes.is_empty()).then(|| AlignedBytes::copy_of(bytes).into());
    WeightTensor::new(encoding, shape, AlignedBytes::copy_of(data).into(), copy(scale), copy(min)).ok()
}

/// Everything that has a number.
struct Desk {
    pipes: Arc<Pipes>,
    machine: Arc<dyn Machine>,
    executables: HashMap<u64, Box<dyn Executable>>,
    /// With the numbers of their executables.
    states: HashMap<u64, (u64, Box<dyn State>)>,
    numbers: u64,
}

type Answer = Option<(Reply, Vec<u8>)>;

impl Desk {
    fn answer(&mut self, request: Request, body: Vec<u8>) -> Result<Answer, DeviceError> {
        let changed = match request {
            Request::Load(limits) => return self.load(limits.options(), &body).map(Some),
            Request::Run(run) => return self.run(&run, &body).map(Some),
            Request::Replace { executable, weight, number, encoding, shape, parts } => {
                let part = tensor(encoding, shape, parts, &body).ok_or_else(unknown)?;
                self.executable(executable)?.replace_part(&weight, number, &part)?;
                return Ok(Some((Reply::Replaced, Vec::new())));
            }
            Request::PartsOnTheWay { executable } => {
                return Ok(Some((Reply::OnTheWay(self.executable(executable)?.parts_on_the_way()), Vec::new())));
            }
            Request::Export { state, slot, first } => {
                let (content, body) = Content::of(&self.state(state)?.export_rows(&slot, first)?);
                return Ok(Some((Reply::Exported(content), body)));
            }
            Request::DropState { state } => {
                self.states.remove(&state);
                return Ok(None);
            }
            Request::DropExecutable { executable } => {
                self.executables.remove(&executable);
                return Ok(None);
            }
            Request::NewState { executable, context } => {
                let state = self.executable(executable)?.new_state(context)?;
                self.keep(executable, state)
            }
            Request::Fork { state } => {
                let (executable, own) = self.states.get(&state).ok_or_else(unknown)?;
                let (executable, fork) = (*executable, own.fork()?);
                self.keep(executable, fork)
            }
            Request::Commit { state, rows } => self.state(state)?.commit(rows).map(|()| state)?,
            Request::Truncate { state, len } => self.state(state)?.truncate(len).map(|()| state)?,
            Request::SetLen { state, len } => self.state(state)?.set_len(len).map(|()| state)?,
            Request::Import { state, slot, first, data } => {
                let data = data.with(body).ok_or_else(unknown)?;
                self.state(state)?.import_rows(&slot, first, &data).map(|()| state)?
            }
            Request::Open(_) | Request::Tensor { .. } | Request::NoTensor | Request::Resume(_) | Request::GiveUp => return Err(unknown()),
        };
        Ok(Some((Reply::State(self.facts(changed)?), Vec::new())))
    }

    fn executable(&mut self, number: u64) -> Result<&mut Box<dyn Executable>, DeviceError> {
        self.executables.get_mut(&number).ok_or_else(unknown)
    }

    fn state(&mut self, number: u64) -> Result<&mut Box<dyn State>, DeviceError> {
        self.states.get_mut(&number).map(|(_, state)| state).ok_or_else(unknown)
    }

    fn keep(&mut self, executable: u64, state: Box<dyn State>) -> u64 {
        self.numbers += 1;
        self.states.insert(self.numbers, (executable, state));
        self.numbers
    }

    fn facts(&self, number: u64) -> Result<StateFacts, DeviceError> {
        let (executable, state) = self.states.get(&number).ok_or_else(unknown)?;
        let held = self.executables.get(executable).and_then(|executable| executable.state_bytes());
        Ok(StateFacts { state: number, len: state.len(), capacity: state.capacity(), bytes: state.bytes(), held })
    }

    fn load(&mut self, mut options: LoadOptions, program: &[u8]) -> Result<(Reply, Vec<u8>), DeviceError> {
        let text = str::from_utf8(program).map_err(|e| DeviceError::Call(e.to_string()))?;
        let program = Checked::new(Program::from_json(text).map_err(DeviceError::Call)?)?;
        let (weights, pipes): (Arc<dyn Weights>, _) = (Arc::new(PipedWeights(self.pipes.clone())), self.pipes.clone());
        options.progress = Some(LoadProgress::new(move |done, total| _ = pipes.send(&Reply::Progress { done, total }, &[])));
        let executable = self.machine.load(&program, &weights, &options)?;
        self.numbers += 1;
        let reply = Reply::Loaded {
            executable: self.numbers,
            max_segments: executable.max_segments(),
            commits_partly: executable.commits_partly(),
            invariant_rows: executable.invariant_rows(),
            scratch_bytes: executable.scratch_bytes(),
        };
        self.executables.insert(self.numbers, executable);
        Ok((reply, Vec::new()))
    }

    fn run(&mut self, run: &Run, body: &[u8]) -> Result<(Reply, Vec<u8>), DeviceError> {
        let mut rest = body;
        let mut numbers: Vec<(Vec<f32>, Vec<i32>)> = Vec::new();
        for &(count, is_integer) in &run.inputs {
            let bytes = count.checked_mul(4).and_then(|bytes| rest.split_at_checked(bytes));
            let (own, more) = bytes.ok_or_else(unknown)?;
            rest = more;
            numbers.push(if is_integer { (Vec::new(), wire::integers(own)) } else { (wire::floats(own), Vec::new()) });
        }
        let inputs: Vec<InputData<'_>> = run
            .inputs
            .iter()
            .zip(&numbers)
            .map(|(&(_, is_integer), (floats, integers))| if is_integer { InputData::I32(integers) } else { InputData::F32(floats) })
            .collect();
        let masks: Vec<OnceLock<IdMask>> = run
            .wants
            .iter()
            .map(|want| match want {
                RunWant::LargestAllowed(Some(mask)) => OnceLock::from(IdMask(mask.clone())),
                _ => OnceLock::new(),
            })
            .collect();
        let wants: Vec<Want<'_>> = run
            .wants
            .iter()
            .zip(&masks)
            .map(|(want, mask)| match *want {
                RunWant::Logits => Want::Logits,
                RunWant::Largest => Want::Largest,
                RunWant::LargestAllowed(_) => Want::LargestAllowed(mask),
                RunWant::Top(count) => Want::Top(count),
                RunWant::LogProbs { target, top } => Want::LogProbs { target, top },
            })
            .collect();
        // A state can be in one segment only; it is taken out meanwhile.
        let numbers: Vec<Option<u64>> = run.segments.iter().map(|segment| segment.state).collect();
        let mut taken: Vec<Option<(u64, Box<dyn State>)>> =
            numbers.iter().map(|number| number.and_then(|number| self.states.remove(&number))).collect();
        let mut outputs = Outputs::new();
        let executable = self.executables.get_mut(&run.executable).ok_or_else(unknown);
        let ran = executable.and_then(|executable| {
            let mut segments: Vec<Segment<'_>> = run
                .segments
                .iter()
                .zip(&mut taken)
                .map(|(segment, state)| Segment {
                    state: state.as_mut().map(|(_, state)| &mut **state as &mut dyn State),
                    first_row: segment.first_row,
                    valid_rows: segment.valid_rows,
                    epoch: segment.epoch,
                    partial: segment.partial,
                })
                .collect();
            let mut tap = |tap: Tap<'_>| {
                let reply = Reply::Tap { stage: tap.stage.to_owned(), shape: tap.shape.to_vec() };
                _ = self.pipes.send(&reply, &[&wire::bytes(tap.values)]);
            };
            let mut host = |paused: &mut Paused<'_>| self.pipes.pause(paused);
            let mut call = Call::new(run.bindings, &inputs, &mut segments, &mut outputs);
            (call.phase, call.wants) = (run.phase, &wants);
            call.host = Some(&mut host);
            if run.taps {
                call.taps = Some(&mut tap);
            }
            executable.run(&mut call)?;
            Ok((executable.state_bytes(), executable.last_stage_time(), executable.program().outputs.clone()))
        });
        for (number, state) in numbers.into_iter().zip(taken) {
            if let (Some(number), Some(state)) = (number, state) {
                self.states.insert(number, state);
            }
        }
        let (held, last_stage, made) = ran?;
        let values: Vec<&[f32]> = made.iter().map(|output| outputs.value(&output.name).unwrap_or_default()).collect();
        let body = values.iter().flat_map(|values| wire::bytes(values)).collect();
        let (rows, outputs) = (outputs.rows().iter().map(Row::from).collect(), values.iter().map(|values| values.len()).collect());
        Ok((Reply::Ran { rows, outputs, held, last_stage }, body))
    }
}

/// The error for what the other side should know.
fn unknown() -> DeviceError {
    DeviceError::Call("the request does not fit to what this process holds".into())
}

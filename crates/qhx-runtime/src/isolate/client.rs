//! What stands here for the device in the other process.

use super::{
    Worker,
    link::Link,
    wire::{self, Content, Limits, Reply, Request, Run, RunSegment, RunWant, StateFacts},
};
use qhx_ir::{
    Call, Checked, Device, DeviceError, DeviceInfo, Executable, Fact, InputData, LoadOptions, Machine, Op, Paused, SlotData, State,
    StateBytes, Tap, Ticket, Want, WeightTensor, Weights,
};
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// A device whose driver runs in another process.
pub(crate) struct IsolatedDevice {
    /// Asked for knowledge only, which needs no driver.
    known: Arc<dyn Device>,
    worker: Worker,
    settings: serde_json::Value,
    opened: Mutex<Opened>,
}

#[derive(Default)]
struct Opened {
    machine: Option<Arc<IsolatedMachine>>,
    /// When a process that was gone was started again.
    restarted: Option<Instant>,
}

/// A process that is gone is started again at most once in this time: one that crashes again and again is left alone.
const RESTARTED_AFTER: Duration = Duration::from_secs(600);

struct IsolatedMachine {
    link: Arc<Link>,
    info: DeviceInfo,
    own_memory: Option<u64>,
}

impl IsolatedDevice {
    /// `settings` say to the process which device to open: see [`super::serve`].
    pub(crate) fn new(known: Arc<dyn Device>, worker: Worker, settings: serde_json::Value) -> Self {
        Self { known, worker, settings, opened: Mutex::default() }
    }

    fn machine(&self) -> Result<Arc<IsolatedMachine>, DeviceError> {
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(machine) = &opened.machine {
            if !machine.link.is_lost() || opened.restarted.is_some_and(|then| then.elapsed() < RESTARTED_AFTER) {
                return Ok(machine.clone());
            }
            opened.restarted = Some(Instant::now());
        }
        let link = Link::start(self.known.name(), &self.worker)?;
        let mut talk = link.talk();
        talk.send(&Request::Open(self.settings.clone()), &[])?;
        let (reply, _) = talk.receive()?;
        let Reply::Opened { mut info, own_memory } = reply else { return Err(talk.unexpected()) };
        drop(talk);
        // JSON does not tell amounts of memory from other numbers.
        for (_, fact) in info.facts.iter_mut().filter(|(name, _)| name.ends_with("_bytes")) {
            if let Fact::Number(bytes) = *fact {
                *fact = Fact::Bytes(bytes);
            }
        }
        info.facts.insert("process".into(), Fact::from("its own"));
        let machine = Arc::new(IsolatedMachine { link: Arc::new(link), info, own_memory });
        opened.machine = Some(machine.clone());
        Ok(machine)
    }
}

impl Device for IsolatedDevice {
    fn name(&self) -> &str {
        self.known.name()
    }

    fn accepts(&self, program: &Checked, op: &Op) -> Result<(), DeviceError> {
        self.known.accepts(program, op)
    }

    fn on_host(&self, program: &Checked, op: &Op) -> bool {
        self.known.on_host(program, op)
    }

    fn own_memory(&self) -> Result<Option<u64>, DeviceError> {
        Ok(self.machine()?.own_memory)
    }

    fn replaces_weights(&self) -> bool {
        self.known.replaces_weights()
    }

    fn open(&self) -> Result<Arc<dyn Machine>, DeviceError> {
        Ok(self.machine()?)
    }
}

impl Machine for IsolatedMachine {
    fn describe(&self) -> DeviceInfo {
        self.info.clone()
    }

    fn load(&self, program: &Checked, weights: &Arc<dyn Weights>, options: &LoadOptions) -> Result<Box<dyn Executable>, DeviceError> {
        let mut talk = self.link.talk();
        talk.send(&Request::Load(Limits::of(options)), &[program.to_json().as_bytes()])?;
        loop {
            match talk.receive()?.0 {
                Reply::Needs { name } => match weights.tensor(&name) {
                    Some(tensor) => {
                        let body = [tensor.data(), tensor.scale(), tensor.min()];
                        let parts = body.map(<[u8]>::len);
                        let (encoding, shape) = (tensor.encoding(), tensor.shape().to_vec());
                        talk.send(&Request::Tensor { encoding, shape, parts }, &body)?;
                    }
                    None => talk.send(&Request::NoTensor, &[])?,
                },
                Reply::Progress { done, total } => {
                    if let Some(progress) = &options.progress {
                        progress.tell(done, total);
                    }
                }
                Reply::Loaded { executable: number, max_segments, commits_partly, invariant_rows, scratch_bytes } => {
                    return Ok(Box::new(IsolatedExecutable {
                        link: self.link.clone(),
                        program: program.clone(),
                        number,
                        max_segments,
                        commits_partly,
                        invariant_rows,
                        scratch_bytes,
                        held: Arc::default(),
                        last_stage: None,
                    }));
                }
                _ => return Err(talk.unexpected()),
            }
        }
    }
}

struct IsolatedExecutable {
    link: Arc<Link>,
    program: Checked,
    number: u64,
    max_segments: usize,
    commits_partly: bool,
    invariant_rows: usize,
    scratch_bytes: u64,
    /// What the process said last of all states.
    held: Held,
    last_stage: Option<Duration>,
}

type Held = Arc<Mutex<Option<StateBytes>>>;

impl Executable for IsolatedExecutable {
    fn program(&self) -> &Checked {
        &self.program
    }

    fn new_state(&self, context: usize) -> Result<Box<dyn State>, DeviceError> {
        let request = Request::NewState { executable: self.number, context };
        Ok(Box::new(IsolatedState::ask(&self.link, &self.held, self.number, &request, &[])?))
    }

    fn submit(&mut self, call: &mut Call<'_>) -> Result<Ticket, DeviceError> {
        call.check(&self.program)?;
        Ok(Ticket(0))
    }

    fn wait(&mut self, _: Ticket, call: &mut Call<'_>) -> Result<(), DeviceError> {
        if call.is_cancelled() {
            return Err(DeviceError::Cancelled);
        }
        let run = self.request(call)?;
        let inputs = call.inputs.iter().map(|data| match data {
            InputData::F32(numbers) => wire::bytes(numbers),
            InputData::I32(numbers) => wire::integer_bytes(numbers),
        });
        let inputs: Vec<Vec<u8>> = inputs.collect();
        let mut talk = self.link.talk();
        talk.send(&Request::Run(Box::new(run)), &inputs.iter().map(Vec::as_slice).collect::<Vec<_>>())?;
        loop {
            match talk.receive()? {
                (Reply::Tap { stage, shape }, body) => {
                    if let Some(taps) = &mut call.taps {
                        taps(Tap { stage: &stage, shape: &shape, values: &wire::floats(&body) });
                    }
                }
                (Reply::Paused { number, given }, body) => {
                    let numbers = wire::floats(&body);
                    if given.iter().sum::<usize>() != numbers.len() {
                        return Err(talk.unexpected());
                    }
                    let mut rest = &numbers[..];
                    let given: Vec<&[f32]> = given.into_iter().filter_map(|count| rest.split_off(..count)).collect();
                    let (mut taken, mut bodies) = (Vec::new(), Vec::new());
                    let mut take = |place: usize, data: InputData<'_>| match data {
                        InputData::F32(numbers) => {
                            taken.push((place, numbers.len(), false));
                            bodies.push(wire::bytes(numbers));
                        }
                        InputData::I32(numbers) => {
                            taken.push((place, numbers.len(), true));
                            bodies.push(wire::integer_bytes(numbers));
                        }
                    };
                    let mut paused = Paused { number, given: &given, take: &mut take, replace: None };
                    let answered = call.host.as_mut().map_or(Err(DeviceError::Cancelled), |host| host(&mut paused));
                    match &answered {
                        Ok(()) => talk.send(&Request::Resume(taken), &bodies.iter().map(Vec::as_slice).collect::<Vec<_>>())?,
                        Err(_) => talk.send(&Request::GiveUp, &[])?,
                    }
                    if answered.is_err() {
                        // The process says that the call has ended.
                        talk.receive().ok();
                        return answered;
                    }
                }
                (Reply::Ran { rows, outputs, held, last_stage }, body) => {
                    let numbers = wire::floats(&body);
                    if outputs.len() != self.program.outputs.len() || outputs.iter().sum::<usize>() != numbers.len() {
                        return Err(talk.unexpected());
                    }
                    call.outputs.start(&self.program);
                    let mut rest = &numbers[..];
                    for (place, count) in outputs.into_iter().enumerate() {
                        let (own, more) = rest.split_at(count);
                        call.outputs.put(place).extend_from_slice(own);
                        rest = more;
                    }
                    call.outputs.replace_answers(rows.into_iter().map(Into::into).collect());
                    self.last_stage = last_stage;
                    *self.held.lock().unwrap_or_else(PoisonError::into_inner) = held;
                    return Ok(());
                }
                _ => return Err(talk.unexpected()),
            }
        }
    }

    fn max_segments(&self) -> usize {
        self.max_segments
    }

    fn commits_partly(&self) -> bool {
        self.commits_partly
    }

    fn invariant_rows(&self) -> usize {
        self.invariant_rows
    }

    fn state_bytes(&self) -> Option<StateBytes> {
        *self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn last_stage_time(&self) -> Option<Duration> {
        self.last_stage
    }

    fn replace_part(&mut self, weight: &str, number: usize, part: &WeightTensor) -> Result<(), DeviceError> {
        let body = [part.data(), part.scale(), part.min()];
        let (encoding, shape, parts) = (part.encoding(), part.shape().to_vec(), body.map(<[u8]>::len));
        let request = Request::Replace { executable: self.number, weight: weight.to_owned(), number, encoding, shape, parts };
        match self.link.ask(&request, &body)?.0 {
            Reply::Replaced => Ok(()),
            _ => Err(self.link.talk().unexpected()),
        }
    }

    fn parts_on_the_way(&self) -> Vec<usize> {
        match self.link.ask(&Request::PartsOnTheWay { executable: self.number }, &[]) {
            Ok((Reply::OnTheWay(parts), _)) => parts,
            // The next call says what is wrong.
            _ => Vec::new(),
        }
    }

    fn scratch_bytes(&self) -> u64 {
        self.scratch_bytes
    }
}

impl IsolatedExecutable {
    fn request(&self, call: &mut Call<'_>) -> Result<Run, DeviceError> {
        let mut segments = Vec::with_capacity(call.segments.len());
        for segment in call.segments.iter_mut() {
            let state = match &mut segment.state {
                None => None,
                Some(state) => {
                    let own = state.downcast_mut::<IsolatedState>().filter(|own| own.executable == self.number && own.is_of(&self.link));
                    let own = own.ok_or_else(|| DeviceError::Call("the state belongs to another device or another program".into()))?;
                    Some(own.facts.state)
                }
            };
            let (first_row, valid_rows, epoch, partial) = (segment.first_row, segment.valid_rows, segment.epoch, segment.partial);
            segments.push(RunSegment { state, first_row, valid_rows, epoch, partial });
        }
        let wants = call.wants.iter().map(|want| match want {
            Want::Logits => RunWant::Logits,
            Want::Largest => RunWant::Largest,
            Want::LargestAllowed(mask) => RunWant::LargestAllowed(mask.get().map(|mask| mask.0.clone())),
            Want::Top(count) => RunWant::Top(*count),
            Want::LogProbs { target, top } => RunWant::LogProbs { target: *target, top: *top },
        });
        let inputs = call.inputs.iter().map(|data| match data {
            InputData::F32(numbers) => (numbers.len(), false),
            InputData::I32(numbers) => (numbers.len(), true),
        });
        Ok(Run {
            executable: self.number,
            bindings: call.bindings,
            phase: call.phase,
            inputs: inputs.collect(),
            segments,
            wants: wants.collect(),
            taps: call.taps.is_some(),
        })
    }
}

impl Drop for IsolatedExecutable {
    fn drop(&mut self) {
        self.link.tell(&Request::DropExecutable { executable: self.number });
    }
}

/// A state in the other process.
struct IsolatedState {
    link: Arc<Link>,
    held: Held,
    executable: u64,
    facts: StateFacts,
}

impl IsolatedState {
    /// The state that a request makes.
    fn ask(link: &Arc<Link>, held: &Held, executable: u64, request: &Request, body: &[&[u8]]) -> Result<Self, DeviceError> {
        let facts = facts(link, held, request, body)?;
        Ok(Self { link: link.clone(), held: held.clone(), executable, facts })
    }

    fn is_of(&self, link: &Arc<Link>) -> bool {
        Arc::ptr_eq(&self.link, link)
    }

    fn change(&mut self, request: &Request, body: &[&[u8]]) -> Result<(), DeviceError> {
        self.facts = facts(&self.link, &self.held, request, body)?;
        Ok(())
    }
}

/// Asks for something of which the reply is about a state.
fn facts(link: &Arc<Link>, held: &Held, request: &Request, body: &[&[u8]]) -> Result<StateFacts, DeviceError> {
    match link.ask(request, body)?.0 {
        Reply::State(facts) => {
            *held.lock().unwrap_or_else(PoisonError::into_inner) = facts.held;
            Ok(facts)
        }
        _ => Err(link.talk().unexpected()),
    }
}

impl State for IsolatedState {
    fn len(&self) -> usize {
        self.facts.len
    }

    fn capacity(&self) -> usize {
        self.facts.capacity
    }

    fn commit(&mut self, rows: usize) -> Result<(), DeviceError> {
        self.change(&Request::Commit { state: self.facts.state, rows }, &[])
    }

    fn truncate(&mut self, len: usize) -> Result<(), DeviceError> {
        self.change(&Request::Truncate { state: self.facts.state, len }, &[])
    }

    fn fork(&self) -> Result<Box<dyn State>, DeviceError> {
        let request = Request::Fork { state: self.facts.state };
        Ok(Box::new(Self::ask(&self.link, &self.held, self.executable, &request, &[])?))
    }

    fn export_rows(&self, slot: &str, first: usize) -> Result<SlotData, DeviceError> {
        let request = Request::Export { state: self.facts.state, slot: slot.to_owned(), first };
        let exported = match self.link.ask(&request, &[])? {
            (Reply::Exported(content), body) => content.with(body),
            _ => None,
        };
        exported.ok_or_else(|| self.link.talk().unexpected())
    }

    fn import_rows(&mut self, slot: &str, first: usize, data: &SlotData) -> Result<(), DeviceError> {
        let (content, body) = Content::of(data);
        self.change(&Request::Import { state: self.facts.state, slot: slot.to_owned(), first, data: content }, &[&body])
    }

    fn set_len(&mut self, len: usize) -> Result<(), DeviceError> {
        self.change(&Request::SetLen { state: self.facts.state, len }, &[])
    }

    fn bytes(&self) -> u64 {
        self.facts.bytes
    }
}

impl Drop for IsolatedState {
    fn drop(&mut self) {
        self.link.tell(&Request::DropState { state: self.facts.state });
    }
}

//! A program in parts that run one after the other, each on its own device: what crosses a cut is handed on, every part keeps its own slots.

use qhx_ir::{
    Call, Checked, DType, DeviceError, Executable, InputData, Ledger, Name, Outputs, Segment, SlotData, State, StateBytes, Tap, Ticket,
};
use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

/// The loaded parts.
pub(super) struct Parts {
    program: Checked,
    parts: Vec<Part>,
    /// The part that makes each output of the program, in its order.
    outputs: Vec<usize>,
    /// The part that makes the output of wanted rows.
    answers: Option<usize>,
    homes: Arc<Homes>,
}

struct Part {
    executable: Box<dyn Executable>,
    /// Where each of its inputs comes from.
    sources: Vec<Source>,
    /// What its last call gave.
    outputs: Outputs,
}

enum Source {
    /// The call, by place.
    Call(usize),
    /// What an earlier part made, as it names it.
    Made(usize, Name),
}

/// The parts that hold each slot, its writer first: the others have copies of the rows.
type Homes = BTreeMap<Name, Vec<usize>>;

impl Parts {
    pub(super) fn new(program: &Checked, parts: Vec<Box<dyn Executable>>) -> Result<Self, DeviceError> {
        let broken = |what: &str, name: &str| DeviceError::Call(format!("program `{}` cannot be cut: {what} `{name}`", program.name));
        let places: HashMap<&Name, usize> = program.inputs.iter().enumerate().map(|(place, input)| (&input.name, place)).collect();
        // The last of the parts so far that gives each value.
        let mut makers: HashMap<Name, usize> = HashMap::new();
        let mut homes = Homes::new();
        let mut all_sources = Vec::new();
        for (number, part) in parts.iter().enumerate() {
            let source = |input: &qhx_ir::Input| match (places.get(&input.name), makers.get(&input.name)) {
                (Some(&place), _) => Ok(Source::Call(place)),
                (None, Some(&by)) => Ok(Source::Made(by, input.name.clone())),
                (None, None) => Err(broken("nothing makes", &input.name)),
            };
            all_sources.push(part.program().inputs.iter().map(source).collect::<Result<Vec<_>, _>>()?);
            makers.extend(part.program().outputs.iter().map(|output| (output.name.clone(), number)));
            for (name, slot) in &part.program().slots {
                let homes = homes.entry(name.clone()).or_default();
                if slot.is_recurrent() && !homes.is_empty() {
                    return Err(broken("two parts keep the recurrent slot", name));
                }
                homes.push(number);
            }
        }
        let outputs = program.outputs.iter().map(|o| makers.get(&o.name).copied().ok_or_else(|| broken("no part gives", &o.name)));
        let outputs: Vec<usize> = outputs.collect::<Result<_, _>>()?;
        let answers = program.wanted_output().map(|(place, _)| outputs[place]);
        let parts = parts.into_iter().zip(all_sources).map(|(executable, sources)| Part { executable, sources, outputs: Outputs::new() });
        Ok(Self { program: program.clone(), outputs, answers, homes: Arc::new(homes), parts: parts.collect() })
    }

    /// Runs one part on what the call and the parts before it bring.
    fn run_part(&mut self, number: usize, call: &mut Call<'_>) -> Result<(), DeviceError> {
        let (before, rest) = self.parts.split_at_mut(number);
        let Some(Part { executable, sources, outputs }) = rest.first_mut() else { unreachable!("called for a part") };
        let program = executable.program().clone();
        let made = |by: usize, name: &Name| {
            let numbers = before[by].outputs.value(name);
            numbers.ok_or_else(|| DeviceError::Call(format!("`{name}` was not given by the device that makes it")))
        };
        // Whole numbers cross a cut as floats.
        let mut integers: Vec<Vec<i32>> = Vec::new();
        for (input, source) in program.inputs.iter().zip(&*sources) {
            if let (DType::I32, Source::Made(by, name)) = (input.dtype, source) {
                integers.push(made(*by, name)?.iter().map(|&x| x as i32).collect());
            }
        }
        let mut integers = integers.iter();
        let mut inputs = Vec::with_capacity(sources.len());
        for (input, source) in program.inputs.iter().zip(&*sources) {
            inputs.push(match (source, input.dtype) {
                (Source::Call(place), _) => call.inputs[*place],
                (Source::Made(..), DType::I32) => InputData::I32(integers.next().map_or(&[], Vec::as_slice)),
                (Source::Made(by, name), DType::F32) => InputData::F32(made(*by, name)?),
            });
        }
        let mut segments = Vec::with_capacity(call.segments.len());
        for segment in call.segments.iter_mut() {
            let Segment { first_row, valid_rows, epoch, partial, .. } = *segment;
            let state = PartsState::of(segment, &self.homes)?.and_then(|own| own.parts[number].as_deref_mut());
            segments.push(Segment { state: state.map(|state| state as &mut dyn State), first_row, valid_rows, epoch, partial });
        }
        let mut tap;
        let taps: Option<&mut dyn FnMut(Tap<'_>)> = match &mut call.taps {
            Some(show) => {
                tap = |it: Tap<'_>| show(it);
                Some(&mut tap)
            }
            None => None,
        };
        // What crosses a cut is needed whole.
        let wants = if self.answers == Some(number) { call.wants } else { &[] };
        let Call { bindings, phase, cancel, .. } = *call;
        executable.run(&mut Call { bindings, phase, inputs: &inputs, segments: &mut segments, wants, outputs, cancel, taps })
    }
}

impl Executable for Parts {
    fn program(&self) -> &Checked {
        &self.program
    }

    fn new_state(&self, context: usize) -> Result<Box<dyn State>, DeviceError> {
        let new = |part: &Part| match part.executable.program().slots.is_empty() {
            true => Ok(None),
            false => part.executable.new_state(context).map(Some),
        };
        let parts = self.parts.iter().map(new).collect::<Result<_, _>>()?;
        Ok(Box::new(PartsState { ledger: Ledger::new(&self.program.slots, context), parts, homes: self.homes.clone() }))
    }

    fn submit(&mut self, call: &mut Call<'_>) -> Result<Ticket, DeviceError> {
        call.check(&self.program)?;
        Ok(Ticket(0))
    }

    fn wait(&mut self, _: Ticket, call: &mut Call<'_>) -> Result<(), DeviceError> {
        for segment in call.segments.iter_mut() {
            if let Some(state) = PartsState::of(segment, &self.homes)? {
                state.begin()?;
            }
        }
        for number in 0..self.parts.len() {
            if call.is_cancelled() {
                return Err(DeviceError::Cancelled);
            }
            self.run_part(number, call)?;
        }
        for segment in call.segments.iter_mut() {
            let (rows, partial) = (segment.valid_rows, segment.partial);
            if let Some(state) = PartsState::of(segment, &self.homes)? {
                state.ledger.end(rows, partial);
            }
        }
        call.outputs.start(&self.program);
        for (place, (output, &part)) in self.program.outputs.iter().zip(&self.outputs).enumerate() {
            call.outputs.put(place).extend_from_slice(self.parts[part].outputs.value(&output.name).unwrap_or_default());
        }
        if let Some(part) = self.answers {
            call.outputs.replace_answers(self.parts[part].outputs.rows().to_vec());
        }
        Ok(())
    }

    fn max_segments(&self) -> usize {
        self.parts.iter().map(|part| part.executable.max_segments()).min().unwrap_or(1)
    }

    fn commits_partly(&self) -> bool {
        self.parts.iter().all(|part| part.executable.commits_partly())
    }

    fn is_batch_invariant(&self) -> bool {
        self.parts.iter().all(|part| part.executable.is_batch_invariant())
    }

    fn state_bytes(&self) -> Option<StateBytes> {
        self.parts.iter().map(|part| part.executable.state_bytes()).sum()
    }

    fn last_stage_time(&self) -> Option<Duration> {
        self.parts.last()?.executable.last_stage_time()
    }

    fn row_by_row(&self) -> Option<&str> {
        self.parts.iter().find_map(|part| part.executable.row_by_row())
    }

    fn scratch_bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.executable.scratch_bytes()).sum()
    }
}

/// The states of all parts that have slots. They take every step together.
struct PartsState {
    ledger: Ledger,
    parts: Vec<Option<Box<dyn State>>>,
    homes: Arc<Homes>,
}

impl PartsState {
    /// The state of a segment, which must be one of the executable with these homes.
    fn of<'a>(segment: &'a mut Segment<'_>, homes: &Arc<Homes>) -> Result<Option<&'a mut Self>, DeviceError> {
        let Some(state) = &mut segment.state else { return Ok(None) };
        let own = state.downcast_mut::<Self>().filter(|own| Arc::ptr_eq(&own.homes, homes));
        own.map(Some).ok_or_else(|| DeviceError::Call("the state belongs to another device or another program".into()))
    }

    fn begin(&mut self) -> Result<(), DeviceError> {
        self.ledger.begin();
        // A step back that one of them could not take leaves them apart.
        match self.parts.iter().flatten().all(|part| part.len() == self.ledger.len()) {
            true => Ok(()),
            false => Err(DeviceError::Call("the parts of the state have come apart: start again from its first row".into())),
        }
    }

    fn each(&mut self, mut f: impl FnMut(&mut dyn State) -> Result<(), DeviceError>) -> Result<(), DeviceError> {
        self.parts.iter_mut().flatten().try_for_each(|part| f(&mut **part))
    }

    /// A part that holds a slot.
    fn part(&self, number: usize) -> Result<&dyn State, DeviceError> {
        let part = self.parts.get(number).and_then(Option::as_deref);
        part.ok_or_else(|| DeviceError::Call("a part with slots has no state".into()))
    }
}

impl State for PartsState {
    fn len(&self) -> usize {
        self.ledger.len()
    }

    fn capacity(&self) -> usize {
        self.ledger.capacity()
    }

    fn commit(&mut self, rows: usize) -> Result<(), DeviceError> {
        self.ledger.commit(rows)?;
        self.each(|part| part.commit(rows))
    }

    fn truncate(&mut self, len: usize) -> Result<(), DeviceError> {
        self.each(|part| part.truncate(len.min(part.len())))?;
        self.ledger.truncate(len)
    }

    fn fork(&self) -> Result<Box<dyn State>, DeviceError> {
        let parts = self.parts.iter().map(|part| part.as_ref().map(|part| part.fork()).transpose());
        Ok(Box::new(Self { ledger: self.ledger.fork(), parts: parts.collect::<Result<_, _>>()?, homes: self.homes.clone() }))
    }

    fn export_rows(&self, slot: &str, first: usize) -> Result<SlotData, DeviceError> {
        self.ledger.export(slot, first)?;
        let home = self.homes.get(slot).and_then(|homes| homes.first()).copied().unwrap_or(usize::MAX);
        self.part(home)?.export_rows(slot, first)
    }

    fn import_rows(&mut self, slot: &str, first: usize, data: &SlotData) -> Result<(), DeviceError> {
        self.ledger.import(slot, first, data)?;
        let homes = self.homes.clone();
        for &home in homes.get(slot).into_iter().flatten() {
            if let Some(Some(part)) = self.parts.get_mut(home) {
                part.import_rows(slot, first, data)?;
            }
        }
        Ok(())
    }

    fn set_len(&mut self, len: usize) -> Result<(), DeviceError> {
        self.ledger.set_len(len)?;
        self.each(|part| part.set_len(len))
    }

    fn bytes(&self) -> u64 {
        self.parts.iter().flatten().map(|part| part.bytes()).sum()
    }
}

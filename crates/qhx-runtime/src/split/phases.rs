//! One program loaded twice: for reading prompts and for writing tokens. A session's state moves between the two when the phase changes, in canonical
//! form, and of the rows only those that the other side has not seen.

use qhx_ir::{
    Call, Checked, DeviceError, Executable, ExpertCache, Name, Phase, Segment, SlotData, State, StateBytes, Tap, Ticket, Traffic,
    WeightsRead,
};
use std::{ops::Add, sync::Arc, time::Duration};

/// The two loaded programs.
pub(super) struct Phases {
    program: Checked,
    /// In the order of [`Phase::ALL`].
    executables: [Box<dyn Executable>; 2],
    slots: Arc<[Name]>,
    last: Phase,
}

impl Phases {
    pub(super) fn new(program: &Checked, prefill: Box<dyn Executable>, decode: Box<dyn Executable>) -> Self {
        let slots = program.slots.keys().cloned().collect();
        Self { program: program.clone(), executables: [prefill, decode], slots, last: Phase::Prefill }
    }

    fn last(&self) -> &dyn Executable {
        &*self.executables[self.last as usize]
    }
}

impl Executable for Phases {
    fn program(&self) -> &Checked {
        &self.program
    }

    fn new_state(&self, context: usize) -> Result<Box<dyn State>, DeviceError> {
        let [prefill, decode] = self.executables.each_ref().map(|executable| executable.new_state(context));
        Ok(Box::new(PhasesState { slots: self.slots.clone(), states: [prefill?, decode?], active: Phase::Prefill }))
    }

    fn submit(&mut self, call: &mut Call<'_>) -> Result<Ticket, DeviceError> {
        call.check(&self.program)?;
        Ok(Ticket(0))
    }

    fn wait(&mut self, _: Ticket, call: &mut Call<'_>) -> Result<(), DeviceError> {
        let phase = call.phase;
        let mut segments = Vec::with_capacity(call.segments.len());
        for Segment { state, first_row, valid_rows, epoch, partial } in call.segments.iter_mut() {
            let state = match state {
                Some(state) => Some(PhasesState::of(&mut **state, &self.slots)?.enter(phase)?),
                None => None,
            };
            segments.push(Segment { state, first_row: *first_row, valid_rows: *valid_rows, epoch: *epoch, partial: *partial });
        }
        let mut tap;
        let taps: Option<&mut dyn FnMut(Tap<'_>)> = match &mut call.taps {
            Some(show) => {
                tap = |it: Tap<'_>| show(it);
                Some(&mut tap)
            }
            None => None,
        };
        let Call { bindings, inputs, wants, cancel, tapped, .. } = *call;
        let (segments, outputs) = (&mut segments, &mut *call.outputs);
        self.executables[phase as usize].run(&mut Call {
            bindings,
            phase,
            inputs,
            segments,
            wants,
            outputs,
            cancel,
            taps,
            tapped,
            host: None,
        })?;
        self.last = phase;
        Ok(())
    }

    fn max_segments(&self) -> usize {
        self.executables.iter().map(|executable| executable.max_segments()).min().unwrap_or(1)
    }

    fn commits_partly(&self) -> bool {
        self.executables.iter().all(|executable| executable.commits_partly())
    }

    /// Not for drafts, at least: the program that decodes has room for one row of each session.
    fn invariant_rows(&self) -> usize {
        0
    }

    fn state_bytes(&self) -> Option<StateBytes> {
        self.executables.iter().map(|executable| executable.state_bytes()).sum()
    }

    fn last_stage_time(&self) -> Option<Duration> {
        self.last().last_stage_time()
    }

    fn weights_read(&self) -> Option<WeightsRead<'_>> {
        self.last().weights_read()
    }

    fn traffic(&self) -> Option<Traffic> {
        self.last().traffic()
    }

    fn row_by_row(&self) -> Option<&str> {
        self.executables.iter().find_map(|executable| executable.row_by_row())
    }

    fn expert_cache(&self) -> Option<ExpertCache> {
        self.executables.iter().filter_map(|executable| executable.expert_cache()).reduce(Add::add)
    }

    fn scratch_bytes(&self) -> u64 {
        self.executables.iter().map(|executable| executable.scratch_bytes()).sum()
    }
}

/// A session's state on both sides. The active one is the truth; the other holds the first rows of it, as many as it has, and recurrent slots of
/// no meaning.
struct PhasesState {
    slots: Arc<[Name]>,
    states: [Box<dyn State>; 2],
    active: Phase,
}

impl PhasesState {
    fn of<'a>(state: &'a mut dyn State, slots: &Arc<[Name]>) -> Result<&'a mut Self, DeviceError> {
        let own = state.downcast_mut::<Self>().filter(|own| Arc::ptr_eq(&own.slots, slots));
        own.ok_or_else(|| DeviceError::Call("the state belongs to another device or another program".into()))
    }

    /// The active state and the other one.
    fn both(&mut self) -> (&mut dyn State, &mut dyn State) {
        let [prefill, decode] = &mut self.states;
        match self.active {
            Phase::Prefill => (&mut **prefill, &mut **decode),
            Phase::Decode => (&mut **decode, &mut **prefill),
        }
    }

    fn active(&self) -> &dyn State {
        &*self.states[self.active as usize]
    }

    /// Makes `phase` the active one: hands over the rows that it lacks, and what recurrent slots are now.
    fn enter(&mut self, phase: Phase) -> Result<&mut dyn State, DeviceError> {
        if phase != self.active {
            let slots = self.slots.clone();
            let (from, to) = self.both();
            let first = to.len();
            slots.iter().try_for_each(|slot| to.import_rows(slot, first, &from.export_rows(slot, first)?))?;
            to.set_len(from.len())?;
            self.active = phase;
        }
        Ok(self.both().0)
    }

    /// The other side keeps at most the first `len` rows.
    fn forget_from(&mut self, len: usize) -> Result<(), DeviceError> {
        let (_, other) = self.both();
        // A device that cannot go back that far starts again.
        if other.len() > len && other.truncate(len).is_err() { other.truncate(0) } else { Ok(()) }
    }
}

impl State for PhasesState {
    fn len(&self) -> usize {
        self.active().len()
    }

    fn capacity(&self) -> usize {
        self.active().capacity()
    }

    fn commit(&mut self, rows: usize) -> Result<(), DeviceError> {
        self.both().0.commit(rows)
    }

    fn truncate(&mut self, len: usize) -> Result<(), DeviceError> {
        self.both().0.truncate(len)?;
        self.forget_from(len)
    }

    fn fork(&self) -> Result<Box<dyn State>, DeviceError> {
        let [prefill, decode] = self.states.each_ref().map(|state| state.fork());
        Ok(Box::new(Self { slots: self.slots.clone(), states: [prefill?, decode?], active: self.active }))
    }

    fn export_rows(&self, slot: &str, first: usize) -> Result<SlotData, DeviceError> {
        self.active().export_rows(slot, first)
    }

    fn import_rows(&mut self, slot: &str, first: usize, data: &SlotData) -> Result<(), DeviceError> {
        self.both().0.import_rows(slot, first, data)?;
        match data {
            SlotData::Kv { .. } => self.forget_from(first),
            SlotData::Recurrent(_) => Ok(()),
        }
    }

    fn set_len(&mut self, len: usize) -> Result<(), DeviceError> {
        self.both().0.set_len(len)?;
        self.forget_from(len)
    }

    fn bytes(&self) -> u64 {
        self.states.iter().map(|state| state.bytes()).sum()
    }
}

//! The reference with one fault.

use qhx_ir::{
    Call, Checked, Device, DeviceError, DeviceInfo, Executable, ExpertBias, InputData, LoadOptions, Machine, Op, OpKind, Outputs, Program,
    RowResult, Segment, SlotData, State, Ticket, Want, Weights, reference::ReferenceDevice,
};
use std::sync::{Arc, Mutex, MutexGuard};

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fault {
    None,
    SlightlyOff,
    NotANumber,
    BiasesExchanged,
    PaddingCounts,
    FirstEpochOnly,
    EpochOfTheFirst,
    LargestIsSecond,
    MasksIgnored,
    LogProbsOff,
    LogitsMoved,
    CompanyShows,
    CommitsAllOfAPart,
    NoPartialCommits,
    IgnoresCancel,
    CommitsAtOnce,
    CommitsWhenCancelled,
    CommitsTooFew,
    KeepsTruncated,
    ForksNothing,
    ForksShare,
    ExportsZeros,
    ImportsNothing,
    TapsNothing,
    Panics,
    NoChecks,
    Refuses,
}

pub(crate) struct Faulty(pub(crate) Fault);

impl Device for Faulty {
    fn name(&self) -> &str {
        "faulty"
    }

    fn accepts(&self, _: &Checked, op: &Op) -> Result<(), DeviceError> {
        match self.0 {
            Fault::Refuses => Err(DeviceError::Refused { device: "faulty".into(), path: op.path.clone(), reason: "out of spite".into() }),
            _ => Ok(()),
        }
    }

    fn open(&self) -> Result<Arc<dyn Machine>, DeviceError> {
        Ok(Arc::new(FaultyMachine(self.0)))
    }
}

struct FaultyMachine(Fault);

impl Machine for FaultyMachine {
    fn describe(&self) -> DeviceInfo {
        DeviceInfo { name: "faulty".into(), description: String::new(), memory_bytes: None, threads: 1, facts: Default::default() }
    }

    fn load(&self, program: &Checked, weights: &Arc<dyn Weights>, options: &LoadOptions) -> Result<Box<dyn Executable>, DeviceError> {
        let mut own = Program::clone(program);
        for op in own.ops.iter_mut().filter(|_| self.0 == Fault::BiasesExchanged) {
            if let OpKind::Experts { bias: Some(ExpertBias { gate, up }), .. } = &mut op.op {
                std::mem::swap(gate, up);
            }
        }
        let inner = ReferenceDevice.load(&Checked::new(own)?, weights, options)?;
        Ok(Box::new(FaultyExecutable { fault: self.0, inner }))
    }
}

struct FaultyExecutable {
    fault: Fault,
    inner: Box<dyn Executable>,
}

impl FaultyExecutable {
    /// What a careless device would make of a call: nothing is checked.
    fn is_sane(&self, call: &Call<'_>) -> bool {
        call.check(self.inner.program()).is_ok()
    }
}

impl Executable for FaultyExecutable {
    fn program(&self) -> &Checked {
        self.inner.program()
    }

    fn new_state(&self, context: usize) -> Result<Box<dyn State>, DeviceError> {
        let inner = self.inner.new_state(context)?;
        let fresh = self.inner.new_state(context)?;
        Ok(Box::new(FaultyState { fault: self.fault, inner: Arc::new(Mutex::new(inner)), fresh }))
    }

    fn submit(&mut self, _: &mut Call<'_>) -> Result<Ticket, DeviceError> {
        Ok(Ticket(0))
    }

    fn wait(&mut self, _: Ticket, call: &mut Call<'_>) -> Result<(), DeviceError> {
        let fault = self.fault;
        if fault == Fault::Panics {
            panic!("a fault");
        }
        if fault == Fault::NoChecks && !self.is_sane(call) {
            return Ok(());
        }
        call.check(self.inner.program())?;
        let total = call.bindings.rows;
        let starts: Vec<usize> = call.segments.iter().map(|s| s.first_row).chain([total]).collect();
        let states = call.segments.iter().map(|s| match &s.state {
            None => Ok(None),
            Some(state) => match state.downcast_ref::<FaultyState>() {
                Some(own) => Ok(Some(own.inner.clone())),
                None => Err(DeviceError::Call("not a state of this device".into())),
            },
        });
        let states = states.collect::<Result<Vec<_>, _>>()?;
        let mut locked: Vec<Option<MutexGuard<'_, Box<dyn State>>>> =
            states.iter().map(|s| s.as_ref().map(|s| s.lock().unwrap())).collect();
        let rows: Vec<usize> = call
            .segments
            .iter()
            .enumerate()
            .map(|(i, s)| if fault == Fault::PaddingCounts { starts[i + 1] - s.first_row } else { s.valid_rows })
            .collect();
        let result = {
            let first_epoch = call.segments.first().map_or(0, |segment| segment.epoch);
            let segments = locked.iter_mut().zip(call.segments.iter()).enumerate().map(|(i, (state, own))| {
                let state: Option<&mut dyn State> = match state {
                    Some(state) => Some(&mut ***state),
                    None => None,
                };
                let epoch = match fault {
                    Fault::FirstEpochOnly => 0,
                    Fault::EpochOfTheFirst => first_epoch,
                    _ => own.epoch,
                };
                Segment { epoch, partial: own.partial, ..Segment::new(state, starts[i], rows[i]) }
            });
            let mut segments: Vec<Segment<'_>> = segments.collect();
            let cancelled = call.is_cancelled();
            let ignores = matches!(fault, Fault::IgnoresCancel | Fault::CommitsWhenCancelled);
            let inputs: Vec<InputData<'_>> = call.inputs.to_vec();
            let mut quiet = |_: qhx_ir::Tap<'_>| {};
            let mut pass = |tap: qhx_ir::Tap<'_>| {
                if let Some(taps) = &mut call.taps {
                    taps(tap);
                }
            };
            let wants = call.wants.iter().map(|want| match want {
                Want::LargestAllowed(_) if fault == Fault::MasksIgnored => Want::Largest,
                want => *want,
            });
            let wants: Vec<Want<'_>> = wants.collect();
            let mut inner = Call::new(call.bindings, &inputs, &mut segments, &mut *call.outputs);
            inner.wants = &wants;
            inner.cancel = if ignores { None } else { call.cancel };
            inner.taps = Some(if fault == Fault::TapsNothing { &mut quiet } else { &mut pass });
            self.inner.run(&mut inner)?;
            if cancelled && fault == Fault::CommitsWhenCancelled { Err(DeviceError::Cancelled) } else { Ok(()) }
        };
        if fault == Fault::CommitsAtOnce || result.is_err() {
            for (state, rows) in locked.iter_mut().zip(&rows) {
                state.as_mut().map_or(Ok(()), |state| state.commit(*rows))?;
            }
        }
        spoil(fault, call.outputs);
        if let (Fault::CompanyShows, true, Some(number)) = (fault, call.bindings.rows > 1, call.outputs.put(0).last_mut()) {
            *number = f32::from_bits(number.to_bits() ^ 1);
        }
        result
    }

    fn max_segments(&self) -> usize {
        self.inner.max_segments()
    }

    fn commits_partly(&self) -> bool {
        self.fault != Fault::NoPartialCommits
    }

    fn invariant_rows(&self) -> usize {
        self.inner.invariant_rows()
    }

    fn scratch_bytes(&self) -> u64 {
        0
    }
}

/// Results that are not what the inner device made.
fn spoil(fault: Fault, outputs: &mut Outputs) {
    if outputs.rows().is_empty() {
        match (fault, outputs.put(0).last_mut()) {
            (Fault::SlightlyOff, Some(number)) => *number += 1e-3,
            (Fault::NotANumber, Some(number)) => *number = f32::NAN,
            _ => {}
        }
    }
    let mut rows = outputs.rows().to_vec();
    for row in &mut rows {
        match (fault, row) {
            (Fault::LargestIsSecond, RowResult::Largest { id, .. }) => *id += 1,
            (Fault::LogProbsOff, RowResult::LogProbs { target, .. }) => *target += 0.1,
            (Fault::LogitsMoved, RowResult::Logits(row)) => *row += 1,
            _ => {}
        }
    }
    outputs.replace_answers(rows);
}

struct FaultyState {
    fault: Fault,
    inner: Arc<Mutex<Box<dyn State>>>,
    fresh: Box<dyn State>,
}

impl FaultyState {
    fn inner(&self) -> MutexGuard<'_, Box<dyn State>> {
        self.inner.lock().unwrap()
    }
}

impl State for FaultyState {
    fn len(&self) -> usize {
        self.inner().len()
    }

    fn capacity(&self) -> usize {
        self.inner().capacity()
    }

    fn commit(&mut self, rows: usize) -> Result<(), DeviceError> {
        match self.fault {
            Fault::CommitsAtOnce => Ok(()),
            Fault::CommitsTooFew if rows > 1 => self.inner().commit(rows - 1),
            Fault::CommitsAllOfAPart => {
                let mut inner = self.inner();
                inner.commit(rows + 1).or_else(|_| inner.commit(rows))
            }
            _ => self.inner().commit(rows),
        }
    }

    fn truncate(&mut self, len: usize) -> Result<(), DeviceError> {
        match self.fault {
            Fault::KeepsTruncated => Ok(()),
            _ => self.inner().truncate(len),
        }
    }

    fn fork(&self) -> Result<Box<dyn State>, DeviceError> {
        let inner = match self.fault {
            Fault::ForksShare => self.inner.clone(),
            Fault::ForksNothing => Arc::new(Mutex::new(self.fresh.fork()?)),
            _ => Arc::new(Mutex::new(self.inner().fork()?)),
        };
        Ok(Box::new(Self { fault: self.fault, inner, fresh: self.fresh.fork()? }))
    }

    fn export_rows(&self, slot: &str, first: usize) -> Result<SlotData, DeviceError> {
        let mut data = self.inner().export_rows(slot, first)?;
        if self.fault == Fault::ExportsZeros {
            match &mut data {
                SlotData::Kv { keys, .. } => keys.fill(0),
                SlotData::Recurrent(numbers) => numbers.fill(0.0),
            }
        }
        Ok(data)
    }

    fn import_rows(&mut self, slot: &str, first: usize, data: &SlotData) -> Result<(), DeviceError> {
        match self.fault {
            Fault::ImportsNothing => Ok(()),
            _ => self.inner().import_rows(slot, first, data),
        }
    }

    fn set_len(&mut self, len: usize) -> Result<(), DeviceError> {
        self.inner().set_len(len)
    }

    fn bytes(&self) -> u64 {
        self.inner().bytes()
    }
}

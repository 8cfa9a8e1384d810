//! The reference with one fault.

use qhx_ir::{
    Call, Checked, Device, DeviceError, DeviceInfo, Executable, InputData, LoadOptions, Op, Segment, SlotData, State, Weights,
    reference::ReferenceDevice,
};
use std::{
    any::Any,
    sync::{Arc, Mutex, MutexGuard},
};

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fault {
    None,
    SlightlyOff,
    NotANumber,
    PaddingCounts,
    FirstEpochOnly,
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
    fn describe(&self) -> DeviceInfo {
        ReferenceDevice.describe()
    }

    fn accepts(&self, _: &Checked, op: &Op) -> Result<(), DeviceError> {
        match self.0 {
            Fault::Refuses => Err(DeviceError::Refused { device: "faulty".into(), path: op.path.clone(), reason: "out of spite".into() }),
            _ => Ok(()),
        }
    }

    fn load(&self, program: &Checked, weights: &Arc<dyn Weights>, options: &LoadOptions) -> Result<Box<dyn Executable>, DeviceError> {
        let inner = ReferenceDevice.load(program, weights, options)?;
        Ok(Box::new(FaultyExecutable { fault: self.0, inner, outputs: vec![] }))
    }
}

struct FaultyExecutable {
    fault: Fault,
    inner: Box<dyn Executable>,
    outputs: Vec<(String, Vec<f32>)>,
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

    fn run(&mut self, call: &mut Call<'_>) -> Result<(), DeviceError> {
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
            Some(state) => match state.as_any().downcast_ref::<FaultyState>() {
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
            let segments = locked.iter_mut().enumerate().map(|(i, state)| Segment {
                state: match state {
                    Some(state) => Some(&mut ***state),
                    None => None,
                },
                first_row: starts[i],
                valid_rows: rows[i],
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
            let mut inner = Call {
                bindings: call.bindings,
                inputs: &inputs,
                segments: &mut segments,
                epoch: if fault == Fault::FirstEpochOnly { 0 } else { call.epoch },
                cancel: if ignores { None } else { call.cancel },
                taps: Some(if fault == Fault::TapsNothing { &mut quiet } else { &mut pass }),
                largest_only: call.largest_only,
            };
            self.inner.run(&mut inner)?;
            if cancelled && fault == Fault::CommitsWhenCancelled { Err(DeviceError::Cancelled) } else { Ok(()) }
        };
        if fault == Fault::CommitsAtOnce || result.is_err() {
            for (state, rows) in locked.iter_mut().zip(&rows) {
                state.as_mut().map_or(Ok(()), |state| state.commit(*rows))?;
            }
        }
        let program = self.inner.program();
        let names = program.outputs.iter().map(|o| o.name.to_string());
        self.outputs = names.map(|name| (name.clone(), self.inner.output(&name).unwrap().to_vec())).collect();
        if let Some(number) = self.outputs.first_mut().and_then(|(_, numbers)| numbers.last_mut()) {
            match fault {
                Fault::SlightlyOff => *number += 1e-3,
                Fault::NotANumber => *number = f32::NAN,
                _ => {}
            }
        }
        result
    }

    fn output(&self, name: &str) -> Option<&[f32]> {
        self.outputs.iter().find(|(n, _)| n == name).map(|(_, numbers)| numbers.as_slice())
    }

    fn scratch_bytes(&self) -> u64 {
        0
    }
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
            _ => self.inner().commit(rows),
        }
    }

    fn truncate(&mut self, len: usize) -> Result<(), DeviceError> {
        match self.fault {
            Fault::KeepsTruncated => Ok(()),
            _ => self.inner().truncate(len),
        }
    }

    fn fork(&self) -> Box<dyn State> {
        let inner = match self.fault {
            Fault::ForksShare => self.inner.clone(),
            Fault::ForksNothing => Arc::new(Mutex::new(self.fresh.fork())),
            _ => Arc::new(Mutex::new(self.inner().fork())),
        };
        Box::new(Self { fault: self.fault, inner, fresh: self.fresh.fork() })
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

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

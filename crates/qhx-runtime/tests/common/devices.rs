//! Devices that do what the interpreter does, and misbehave when a test asks for it.

use qhx_ir::{
    Call, Checked, Device, DeviceError, DeviceInfo, Executable, LoadOptions, Op, SlotData, State, Weights, reference::ReferenceDevice,
};
use qhx_runtime::Cancel;
use std::{
    any::Any,
    sync::{Arc, Mutex},
    time::Duration,
};

/// What goes wrong, and when. Calls are counted from 1; 0 is never.
#[derive(Default)]
pub(crate) struct Trouble {
    pub(crate) calls: usize,
    /// Asks to stop during this call.
    pub(crate) cancel_in_call: usize,
    pub(crate) cancel: Cancel,
    /// How long a call takes at least.
    pub(crate) delay: Duration,
    /// Fails in this call.
    pub(crate) fail_in_call: usize,
    /// States keep only this many rows to go back over, as a device with a ring would.
    pub(crate) truncate_limit: Option<usize>,
    /// No state can be restored.
    pub(crate) refuse_import: bool,
}

/// The interpreter with trouble.
#[derive(Clone, Default)]
pub(crate) struct Troubled(pub(crate) Arc<Mutex<Trouble>>);

impl Troubled {
    pub(crate) fn set(&self, change: impl FnOnce(&mut Trouble)) {
        let mut trouble = self.0.lock().unwrap();
        trouble.calls = 0;
        change(&mut trouble);
    }

    pub(crate) fn calls(&self) -> usize {
        self.0.lock().unwrap().calls
    }
}

impl Device for Troubled {
    fn describe(&self) -> DeviceInfo {
        DeviceInfo { name: "troubled".into(), ..ReferenceDevice.describe() }
    }

    fn accepts(&self, program: &Checked, op: &Op) -> Result<(), DeviceError> {
        ReferenceDevice.accepts(program, op)
    }

    fn load(&self, program: &Checked, weights: &Arc<dyn Weights>, options: &LoadOptions) -> Result<Box<dyn Executable>, DeviceError> {
        Ok(Box::new(TroubledExecutable { inner: ReferenceDevice.load(program, weights, options)?, trouble: self.0.clone() }))
    }
}

struct TroubledExecutable {
    inner: Box<dyn Executable>,
    trouble: Arc<Mutex<Trouble>>,
}

impl Executable for TroubledExecutable {
    fn program(&self) -> &Checked {
        self.inner.program()
    }

    fn new_state(&self, context: usize) -> Result<Box<dyn State>, DeviceError> {
        Ok(Box::new(TroubledState { inner: self.inner.new_state(context)?, trouble: self.trouble.clone() }))
    }

    fn run(&mut self, call: &mut Call<'_>) -> Result<(), DeviceError> {
        let mut trouble = self.trouble.lock().unwrap();
        trouble.calls += 1;
        if trouble.calls == trouble.cancel_in_call {
            trouble.cancel.cancel();
        }
        if trouble.calls == trouble.fail_in_call {
            return Err(DeviceError::Resources("the device went away".into()));
        }
        let delay = trouble.delay;
        drop(trouble);
        std::thread::sleep(delay);
        self.inner.run(call)
    }

    fn output(&self, name: &str) -> Option<&[f32]> {
        self.inner.output(name)
    }

    fn scratch_bytes(&self) -> u64 {
        self.inner.scratch_bytes()
    }
}

struct TroubledState {
    inner: Box<dyn State>,
    trouble: Arc<Mutex<Trouble>>,
}

impl State for TroubledState {
    fn len(&self) -> usize {
        self.inner.len()
    }

    fn capacity(&self) -> usize {
        self.inner.capacity()
    }

    fn commit(&mut self, rows: usize) -> Result<(), DeviceError> {
        self.inner.commit(rows)
    }

    fn truncate(&mut self, len: usize) -> Result<(), DeviceError> {
        let limit = self.trouble.lock().unwrap().truncate_limit;
        if limit.is_some_and(|limit| len > 0 && len + limit < self.inner.len()) {
            return Err(DeviceError::Call(format!("row {len} is no longer there")));
        }
        self.inner.truncate(len)
    }

    fn fork(&self) -> Box<dyn State> {
        Box::new(Self { inner: self.inner.fork(), trouble: self.trouble.clone() })
    }

    fn export_rows(&self, slot: &str, first: usize) -> Result<SlotData, DeviceError> {
        self.inner.export_rows(slot, first)
    }

    fn import_rows(&mut self, slot: &str, first: usize, data: &SlotData) -> Result<(), DeviceError> {
        if self.trouble.lock().unwrap().refuse_import {
            return Err(DeviceError::Resources("cannot import now".into()));
        }
        self.inner.import_rows(slot, first, data)
    }

    fn set_len(&mut self, len: usize) -> Result<(), DeviceError> {
        self.inner.set_len(len)
    }

    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }

    fn as_any(&self) -> &dyn Any {
        self.inner.as_any()
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self.inner.as_any_mut()
    }
}

//! Devices that do what the interpreter does, and misbehave when a test asks for it.

use qhx_ir::{
    Call, Checked, Device, DeviceError, DeviceInfo, Executable, LoadOptions, Machine, Op, Segment, SlotData, State, Ticket, Weights,
    reference::ReferenceDevice,
};
use qhx_runtime::Cancel;
use std::{
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
    /// Calls wait until it is no longer so, or until they are cancelled.
    pub(crate) held: bool,
    /// Fails in this call.
    pub(crate) fail_in_call: usize,
    /// Is gone from this call on, until it is loaded again.
    pub(crate) lost_in_call: usize,
    /// States keep only this many rows to go back over, as a device with a ring would.
    pub(crate) truncate_limit: Option<usize>,
    /// No state can be restored.
    pub(crate) refuse_import: bool,
    /// Beside so many rows drafts can be computed: any number of rows can be committed. Drafts beside more are an error.
    pub(crate) invariant_rows: usize,
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
    fn name(&self) -> &str {
        "troubled"
    }

    fn accepts(&self, program: &Checked, op: &Op) -> Result<(), DeviceError> {
        ReferenceDevice.accepts(program, op)
    }

    fn open(&self) -> Result<Arc<dyn Machine>, DeviceError> {
        Ok(Arc::new(self.clone()))
    }
}

impl Machine for Troubled {
    fn describe(&self) -> DeviceInfo {
        DeviceInfo { name: "troubled".into(), description: String::new(), memory_bytes: None, threads: 1, facts: Default::default() }
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

    fn submit(&mut self, _: &mut Call<'_>) -> Result<Ticket, DeviceError> {
        Ok(Ticket(0))
    }

    fn wait(&mut self, _: Ticket, call: &mut Call<'_>) -> Result<(), DeviceError> {
        let mut trouble = self.trouble.lock().unwrap();
        trouble.calls += 1;
        if trouble.calls == trouble.cancel_in_call {
            trouble.cancel.cancel();
        }
        if trouble.calls == trouble.fail_in_call {
            return Err(DeviceError::Resources("the device went away".into()));
        }
        if trouble.calls == trouble.lost_in_call {
            return Err(DeviceError::Lost { device: "troubled".into(), reason: "unplugged".into() });
        }
        while trouble.held {
            if call.is_cancelled() {
                return Err(DeviceError::Cancelled);
            }
            drop(trouble);
            std::thread::sleep(Duration::from_millis(1));
            trouble = self.trouble.lock().unwrap();
        }
        // Of each session with drafts one row is none.
        let rows: usize = call.segments.iter().map(|segment| if segment.partial { 1 } else { segment.valid_rows }).sum();
        if rows > trouble.invariant_rows && call.segments.iter().any(|segment| segment.partial) {
            return Err(DeviceError::Call(format!("drafts beside {rows} rows")));
        }
        let delay = trouble.delay;
        drop(trouble);
        std::thread::sleep(delay);
        let segments = call.segments.iter_mut().map(|segment| {
            let Segment { first_row, valid_rows, epoch, partial, .. } = *segment;
            let own = segment.state.as_deref_mut().and_then(|state| state.downcast_mut::<TroubledState>());
            Segment { state: own.map(|own| &mut *own.inner), first_row, valid_rows, epoch, partial }
        });
        let mut segments: Vec<Segment<'_>> = segments.collect();
        let mut tap;
        let mut inner = Call::new(call.bindings, call.inputs, &mut segments, &mut *call.outputs);
        (inner.phase, inner.wants, inner.cancel) = (call.phase, call.wants, call.cancel);
        if let Some(show) = &mut call.taps {
            tap = |it: qhx_ir::Tap<'_>| show(it);
            inner.taps = Some(&mut tap);
        }
        self.inner.run(&mut inner)
    }

    fn max_segments(&self) -> usize {
        self.inner.max_segments()
    }

    fn commits_partly(&self) -> bool {
        self.invariant_rows() > 0
    }

    fn invariant_rows(&self) -> usize {
        self.trouble.lock().unwrap().invariant_rows
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

    fn fork(&self) -> Result<Box<dyn State>, DeviceError> {
        Ok(Box::new(Self { inner: self.inner.fork()?, trouble: self.trouble.clone() }))
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
}

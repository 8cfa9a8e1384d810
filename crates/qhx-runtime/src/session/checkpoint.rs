//! What recurrent slots were at an earlier row.
//!
//! KV rows stay where they are and can be cut off; a recurrent slot only knows its latest content, so a session keeps copies to come back to.

use qhx_ir::{DeviceError, Program, Slot, SlotData, State};
use std::sync::Arc;

/// The recurrent slots after the first `len` rows.
#[derive(Clone, Debug)]
pub(super) struct Checkpoint {
    pub(super) len: usize,
    pub(super) slots: Arc<Vec<(Arc<str>, SlotData)>>,
    /// Whether somebody asked for it; others make room when there are too many.
    pub(super) kept: bool,
}

impl Checkpoint {
    /// What the recurrent slots of `state` are now.
    pub(super) fn take(program: &Program, state: &dyn State) -> Result<Self, DeviceError> {
        let slots = recurrent(program).map(|(name, _)| Ok((name.clone(), state.export(name)?)));
        Ok(Self { len: state.len(), slots: Arc::new(slots.collect::<Result<_, DeviceError>>()?), kept: false })
    }

    /// Before the first row: all zeros.
    pub(super) fn start(program: &Program) -> Self {
        let zeros = |slot: &Slot| match *slot {
            Slot::Fifo { rows, channels } => rows * channels,
            Slot::Delta { heads, key_dim, value_dim } => heads * key_dim * value_dim,
            Slot::Kv { .. } => 0,
        };
        let slots = recurrent(program).map(|(name, slot)| (name.clone(), SlotData::Recurrent(vec![0.0; zeros(slot)])));
        Self { len: 0, slots: Arc::new(slots.collect()), kept: true }
    }

    /// Bytes that it holds.
    pub(super) fn bytes(&self) -> u64 {
        let numbers = |data: &SlotData| match data {
            SlotData::Kv { keys, values, .. } => keys.len() + values.len(),
            SlotData::Recurrent(values) => 4 * values.len(),
        };
        self.slots.iter().map(|(_, data)| numbers(data) as u64).sum()
    }

    /// Takes `state` back to this checkpoint.
    pub(super) fn restore(&self, state: &mut dyn State) -> Result<(), DeviceError> {
        state.truncate(self.len)?;
        self.slots.iter().try_for_each(|(name, data)| state.import(name, data))
    }
}

/// The recurrent slots of a program.
pub(super) fn recurrent(program: &Program) -> impl Iterator<Item = (&Arc<str>, &Slot)> {
    program.slots.iter().filter(|(_, slot)| slot.is_recurrent())
}

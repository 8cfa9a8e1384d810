//! What a device keeps of a session: the interface, and the form in which contents move between devices.

use crate::{DeviceError, KvType};
use std::any::Any;

/// The slots of one session on one device.
pub trait State: Any + Send {
    /// Committed rows.
    fn len(&self) -> usize;

    /// Whether no rows are committed.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The most rows it can have.
    fn capacity(&self) -> usize;

    /// Commits the first `rows` valid rows of the last call. With recurrent slots that is all of them, unless the call said that fewer may be committed
    /// ([`crate::Segment::partial`]).
    fn commit(&mut self, rows: usize) -> Result<(), DeviceError>;

    /// Discards the KV rows from `len` on. Recurrent slots are left as they are: the caller imports their state at `len`.
    fn truncate(&mut self, len: usize) -> Result<(), DeviceError>;

    /// An independent state with the same committed content. A device may share memory between the two until one of them changes.
    fn fork(&self) -> Result<Box<dyn State>, DeviceError>;

    /// A slot's committed content in canonical form; for a KV slot, the rows from `first` on. It is an error if the state no longer has them all.
    fn export_rows(&self, slot: &str, first: usize) -> Result<SlotData, DeviceError>;

    /// Replaces a slot's content; for a KV slot, the rows from `first` on. They must end where the committed ones end, or follow them: import such
    /// rows for all KV slots, then call [`State::set_len`].
    fn import_rows(&mut self, slot: &str, first: usize, data: &SlotData) -> Result<(), DeviceError>;

    /// A slot's committed content in canonical form.
    fn export(&self, slot: &str) -> Result<SlotData, DeviceError> {
        self.export_rows(slot, 0)
    }

    /// Replaces a slot's content; there must be as many KV rows as are committed (for a fresh state: import all slots, then call [`State::set_len`]).
    fn import(&mut self, slot: &str, data: &SlotData) -> Result<(), DeviceError> {
        self.import_rows(slot, 0, data)
    }

    /// Declares `len` rows as committed after KV slots of that length were imported.
    fn set_len(&mut self, len: usize) -> Result<(), DeviceError>;

    /// Bytes of memory that it refers to; what it shares with other states counts in each of them (see [`crate::Executable::state_bytes`]).
    fn bytes(&self) -> u64;
}

impl dyn State {
    /// The device's own state behind the interface.
    pub fn downcast_ref<T: State>(&self) -> Option<&T> {
        (self as &dyn Any).downcast_ref()
    }

    /// The device's own state behind the interface.
    pub fn downcast_mut<T: State>(&mut self) -> Option<&mut T> {
        (self as &mut dyn Any).downcast_mut()
    }
}

/// A slot's content, the same on every device.
#[derive(Clone, Debug, PartialEq)]
pub enum SlotData {
    /// Rows `[position, kv_heads, head_dim]`, little-endian.
    Kv {
        /// Element type.
        dtype: KvType,
        /// Number of positions.
        rows: usize,
        /// Key bytes.
        keys: Vec<u8>,
        /// Value bytes.
        values: Vec<u8>,
    },
    /// FIFO rows or delta state.
    Recurrent(Vec<f32>),
}

//! The slots of one session, kept by the host: KV rows as f16 in the layout that graphs read, so that they are never copied for a call;
//! recurrent slots as f32, so that adding what graphs compute in f16 does not make the state drift.

use crate::lower::Sizes;
use half::f16;
use qhx_ir::{DeviceError, KvType, Ledger, Name, Slot, SlotData, State};
use std::{collections::BTreeMap, ops::Range};

/// A session's slots. KV rows beyond `len` are provisional until they are committed; a recurrent slot has a second buffer that a call works
/// on and a commit makes current. A KV buffer is a ring: row `n` is at index `n` modulo the buffer's rows, which only matters where a session may
/// have more rows than the buffer.
#[derive(Clone)]
pub(crate) struct NpuState {
    ledger: Ledger,
    contents: BTreeMap<Name, Content>,
    /// The sizes of its KV buffers, as in the graphs.
    sizes: Sizes,
    /// All rows before this have been written at some time; they have overwritten the rows one buffer length earlier.
    reached: usize,
}

/// A slot's data.
#[derive(Clone)]
enum Content {
    Kv(KvRows),
    Recurrent { current: Vec<f32>, next: Vec<f32> },
}

/// Keys and values, head by head: `[kv_heads, rows, head_dim]`.
#[derive(Clone)]
pub(crate) struct KvRows {
    pub(crate) keys: Vec<f16>,
    pub(crate) values: Vec<f16>,
    kv_heads: usize,
    head_dim: usize,
    rows: usize,
    /// The most rows that a reader sees.
    window: usize,
}

impl KvRows {
    /// The range of one head of a row in the buffer.
    fn place(&self, row: usize, head: usize) -> Range<usize> {
        let start = (head * self.rows + row % self.rows) * self.head_dim;
        start..start + self.head_dim
    }

    /// Writes rows `[rows, kv_heads, head_dim]` starting at row `first`.
    pub(crate) fn write(&mut self, which: Which, first: usize, rows: &[f16]) {
        let (heads, dim) = (self.kv_heads, self.head_dim);
        for (number, numbers) in rows.chunks_exact(dim).enumerate() {
            let place = self.place(first + number / heads, number % heads);
            let buffer = match which {
                Which::Keys => &mut self.keys,
                Which::Values => &mut self.values,
            };
            buffer[place].copy_from_slice(numbers);
        }
    }

    /// A range of rows as bytes of the slot's type, in canonical order.
    fn export(&self, buffer: &[f16], rows: Range<usize>, dtype: KvType) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(rows.len() * self.kv_heads * self.head_dim * dtype.bytes());
        for (row, head) in rows.flat_map(|row| (0..self.kv_heads).map(move |head| (row, head))) {
            for x in &buffer[self.place(row, head)] {
                match dtype {
                    KvType::F16 => bytes.extend(x.to_le_bytes()),
                    KvType::F32 => bytes.extend(x.to_f32().to_le_bytes()),
                }
            }
        }
        bytes
    }
}

/// Keys or values.
#[derive(Clone, Copy)]
pub(crate) enum Which {
    Keys,
    Values,
}

impl NpuState {
    pub(crate) fn new(slots: &BTreeMap<Name, Slot>, capacity: usize, sizes: Sizes) -> Result<Self, DeviceError> {
        let too_large = |name: &Name, slot: &Slot| {
            let context = sizes.context;
            DeviceError::Resources(format!(
                "not enough memory for slot `{name}` ({slot:?}) with a context of {context} rows: use a smaller context"
            ))
        };
        let content = |(name, slot): (&Name, &Slot)| {
            let count = |sizes: &[usize]| {
                let count = sizes.iter().try_fold(1usize, |n, &s| n.checked_mul(s)).ok_or_else(|| too_large(name, slot))?;
                Vec::<f32>::new().try_reserve_exact(count.saturating_mul(2)).map_err(|_| too_large(name, slot))?;
                Ok::<usize, DeviceError>(count)
            };
            let content = match *slot {
                Slot::Kv { kv_heads, head_dim, window, .. } => {
                    let (rows, window) = (sizes.slot_rows(slot), sizes.window().min(window.unwrap_or(usize::MAX)));
                    let zeros = vec![f16::ZERO; count(&[kv_heads, head_dim, rows])?];
                    Content::Kv(KvRows { keys: zeros.clone(), values: zeros, kv_heads, head_dim, rows, window })
                }
                Slot::Fifo { rows, channels } => recurrent(count(&[rows, channels])?),
                Slot::Delta { heads, key_dim, value_dim } => recurrent(count(&[heads, key_dim, value_dim])?),
            };
            Ok((name.clone(), content))
        };
        let contents = slots.iter().map(content).collect::<Result<_, DeviceError>>()?;
        Ok(Self { ledger: Ledger::new(slots, capacity), contents, sizes, reached: 0 })
    }

    /// The NPU state behind `state`, which must belong to a program with these slots.
    pub(crate) fn of<'a>(state: &'a mut dyn State, slots: &BTreeMap<Name, Slot>) -> Result<&'a mut Self, DeviceError> {
        let own = state.downcast_mut::<Self>().filter(|own| own.ledger.slots() == slots);
        own.ok_or_else(|| DeviceError::Call("the state belongs to another device or another program".into()))
    }

    /// The sizes of its KV buffers; `rows` and `taps` have no meaning.
    pub(crate) fn sizes(&self) -> Sizes {
        self.sizes
    }

    /// Begins a call of `rows` valid rows: uncommitted rows of an earlier call are discarded, and recurrent slots start from their committed state.
    pub(crate) fn begin(&mut self, rows: usize) {
        self.ledger.begin();
        self.reached = self.reached.max(self.ledger.len() + rows);
        for content in self.contents.values_mut() {
            if let Content::Recurrent { current, next } = content {
                next.copy_from_slice(current);
            }
        }
    }

    /// Ends a successful call of `rows` valid rows.
    pub(crate) fn end(&mut self, rows: usize) {
        self.ledger.end(rows, false);
    }

    pub(crate) fn kv(&self, slot: &Name) -> &KvRows {
        match &self.contents[slot] {
            Content::Kv(rows) => rows,
            Content::Recurrent { .. } => unreachable!("checked: a KV slot"),
        }
    }

    pub(crate) fn kv_mut(&mut self, slot: &Name) -> &mut KvRows {
        match self.contents.get_mut(slot) {
            Some(Content::Kv(rows)) => rows,
            _ => unreachable!("checked: a KV slot"),
        }
    }

    /// A recurrent slot as the current call has updated it so far.
    pub(crate) fn recurrent(&mut self, slot: &Name) -> &mut Vec<f32> {
        match self.contents.get_mut(slot) {
            Some(Content::Recurrent { next, .. }) => next,
            _ => unreachable!("checked: a recurrent slot"),
        }
    }
}

fn recurrent(count: usize) -> Content {
    Content::Recurrent { current: vec![0.0; count], next: vec![0.0; count] }
}

impl State for NpuState {
    fn len(&self) -> usize {
        self.ledger.len()
    }

    fn capacity(&self) -> usize {
        self.ledger.capacity()
    }

    fn commit(&mut self, rows: usize) -> Result<(), DeviceError> {
        self.ledger.commit(rows)?;
        for content in self.contents.values_mut() {
            if let Content::Recurrent { current, next } = content {
                std::mem::swap(current, next);
            }
        }
        Ok(())
    }

    fn truncate(&mut self, len: usize) -> Result<(), DeviceError> {
        for (name, content) in &self.contents {
            if let Content::Kv(kv) = content
                && len > 0
                && (len + 1).saturating_sub(kv.window) < self.reached.saturating_sub(kv.rows)
            {
                let kept = self.reached - kv.rows;
                return Err(DeviceError::Call(format!(
                    "cannot go back to row {len}: slot `{name}` is a ring buffer that no longer has the rows before {kept}"
                )));
            }
        }
        if len == 0 {
            self.reached = 0;
        }
        self.ledger.truncate(len)
    }

    fn fork(&self) -> Result<Box<dyn State>, DeviceError> {
        Ok(Box::new(Self { ledger: self.ledger.fork(), ..self.clone() }))
    }

    fn export_rows(&self, slot: &str, first: usize) -> Result<SlotData, DeviceError> {
        self.ledger.export(slot, first)?;
        Ok(match (&self.contents[slot], &self.ledger.slots()[slot]) {
            (Content::Kv(kv), &Slot::Kv { dtype, .. }) => {
                let (rows, kept) = (first..self.ledger.len(), self.reached.saturating_sub(kv.rows));
                if rows.start < kept && !rows.is_empty() {
                    return Err(DeviceError::Call(format!("slot `{slot}` is a ring buffer that no longer has the rows before {kept}")));
                }
                let [keys, values] = [&kv.keys, &kv.values].map(|buffer| kv.export(buffer, rows.clone(), dtype));
                SlotData::Kv { dtype, rows: rows.len(), keys, values }
            }
            (Content::Kv(_), _) => unreachable!("only KV slots hold KV rows"),
            (Content::Recurrent { current, .. }, _) => SlotData::Recurrent(current.clone()),
        })
    }

    fn import_rows(&mut self, slot: &str, first: usize, data: &SlotData) -> Result<(), DeviceError> {
        self.ledger.import(slot, first, data)?;
        match (data, self.contents.get_mut(slot)) {
            (SlotData::Kv { dtype, rows, keys, values }, Some(Content::Kv(kv))) => {
                kv.write(Which::Keys, first, &from_bytes(keys, *dtype));
                kv.write(Which::Values, first, &from_bytes(values, *dtype));
                self.reached = self.reached.max(first + rows);
            }
            (SlotData::Recurrent(numbers), Some(Content::Recurrent { current, .. })) => current.copy_from_slice(numbers),
            _ => unreachable!("the ledger checked the kind"),
        }
        Ok(())
    }

    fn set_len(&mut self, len: usize) -> Result<(), DeviceError> {
        self.ledger.set_len(len)
    }

    fn bytes(&self) -> u64 {
        let bytes = |content: &Content| match content {
            Content::Kv(kv) => 2 * (kv.keys.len() + kv.values.len()) as u64,
            Content::Recurrent { current, next } => 4 * (current.len() + next.len()) as u64,
        };
        self.contents.values().map(bytes).sum()
    }
}

fn from_bytes(bytes: &[u8], dtype: KvType) -> Vec<f16> {
    match dtype {
        KvType::F16 => bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]])).collect(),
        KvType::F32 => bytes.chunks_exact(4).map(|b| f16::from_f32(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))).collect(),
    }
}

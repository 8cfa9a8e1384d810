//! The slots of one session, carried by the host: KV rows as f16 in the layout that graphs read, so that they are never copied for a call;
//! recurrent slots as f32, so that what a graph computes in f16 is added to a state that does not drift.

use half::f16;
use qhx_ir::{DeviceError, KvType, Name, Slot, SlotData, State};
use std::{any::Any, collections::BTreeMap};

/// A session's slots. KV rows beyond `len` are provisional until a commit counts them; a recurrent slot has a second buffer that a call works
/// on and a commit makes the current one.
#[derive(Clone)]
pub(crate) struct NpuState {
    declared: BTreeMap<Name, Slot>,
    contents: BTreeMap<Name, Content>,
    capacity: usize,
    /// Rows that KV buffers have: those of the graphs, at least `capacity`.
    context: usize,
    len: usize,
    /// The valid rows of the last call, where it may be committed.
    pending: Option<usize>,
}

/// A slot's numbers.
#[derive(Clone)]
enum Content {
    Kv(KvRows),
    Recurrent { current: Vec<f32>, next: Vec<f32> },
}

/// Keys and values, head by head: `[kv_heads, context, head_dim]`.
#[derive(Clone)]
pub(crate) struct KvRows {
    pub(crate) keys: Vec<f16>,
    pub(crate) values: Vec<f16>,
    kv_heads: usize,
    head_dim: usize,
    context: usize,
    /// Rows that were imported, where more than are committed.
    imported: usize,
}

impl KvRows {
    /// Where the numbers of a row's head stand.
    fn place(&self, row: usize, head: usize) -> std::ops::Range<usize> {
        let start = (head * self.context + row) * self.head_dim;
        start..start + self.head_dim
    }

    /// Writes rows `[rows, kv_heads, head_dim]` from position `first` on.
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

    /// The first `rows` rows as bytes of the slot's type, in the canonical order.
    fn export(&self, buffer: &[f16], rows: usize, dtype: KvType) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(rows * self.kv_heads * self.head_dim * dtype.bytes());
        for (row, head) in (0..rows).flat_map(|row| (0..self.kv_heads).map(move |head| (row, head))) {
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
    pub(crate) fn new(slots: &BTreeMap<Name, Slot>, capacity: usize, context: usize) -> Result<Self, DeviceError> {
        let too_large = |name: &Name, slot: &Slot| {
            DeviceError::Resources(format!("a context of {context} rows is too large for slot `{name}` ({slot:?}): ask for a smaller one"))
        };
        let content = |(name, slot): (&Name, &Slot)| {
            let count = |sizes: &[usize]| {
                let count = sizes.iter().try_fold(1usize, |n, &s| n.checked_mul(s)).ok_or_else(|| too_large(name, slot))?;
                Vec::<f32>::new().try_reserve_exact(count.saturating_mul(2)).map_err(|_| too_large(name, slot))?;
                Ok::<usize, DeviceError>(count)
            };
            let content = match *slot {
                Slot::Kv { kv_heads, head_dim, .. } => {
                    let zeros = vec![f16::ZERO; count(&[kv_heads, head_dim, context])?];
                    Content::Kv(KvRows { keys: zeros.clone(), values: zeros, kv_heads, head_dim, context, imported: 0 })
                }
                Slot::Fifo { rows, channels } => recurrent(count(&[rows, channels])?),
                Slot::Delta { heads, key_dim, value_dim } => recurrent(count(&[heads, key_dim, value_dim])?),
            };
            Ok((name.clone(), content))
        };
        let contents = slots.iter().map(content).collect::<Result<_, DeviceError>>()?;
        Ok(Self { declared: slots.clone(), contents, capacity, context, len: 0, pending: None })
    }

    /// The state behind `state`, which must be one of a program with these slots.
    pub(crate) fn of<'a>(state: &'a mut dyn State, slots: &BTreeMap<Name, Slot>) -> Result<&'a mut Self, DeviceError> {
        let own = state.as_any_mut().downcast_mut::<Self>().filter(|own| own.declared == *slots);
        own.ok_or_else(|| DeviceError::Call("the state was made by another device or for another program".into()))
    }

    /// Rows of its KV buffers.
    pub(crate) fn context(&self) -> usize {
        self.context
    }

    /// A call begins: what an earlier one left uncommitted is forgotten, and recurrent slots start from what is committed.
    pub(crate) fn begin(&mut self) {
        self.pending = None;
        for content in self.contents.values_mut() {
            if let Content::Recurrent { current, next } = content {
                next.copy_from_slice(current);
            }
        }
    }

    /// A call of so many valid rows succeeded.
    pub(crate) fn end(&mut self, rows: usize) {
        self.pending = Some(rows);
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

    /// What a call has made of a recurrent slot so far.
    pub(crate) fn recurrent(&mut self, slot: &Name) -> &mut Vec<f32> {
        match self.contents.get_mut(slot) {
            Some(Content::Recurrent { next, .. }) => next,
            _ => unreachable!("checked: a recurrent slot"),
        }
    }

    /// From now on `len` rows count, and nothing else is known of.
    fn settle(&mut self, len: usize) {
        self.pending = None;
        self.len = len;
        for content in self.contents.values_mut() {
            if let Content::Kv(kv) = content {
                kv.imported = 0;
            }
        }
    }
}

fn recurrent(count: usize) -> Content {
    Content::Recurrent { current: vec![0.0; count], next: vec![0.0; count] }
}

impl State for NpuState {
    fn len(&self) -> usize {
        self.len
    }

    fn capacity(&self) -> usize {
        self.capacity
    }

    fn commit(&mut self, rows: usize) -> Result<(), DeviceError> {
        let Some(pending) = self.pending else {
            return Err(DeviceError::Call("there is no call to commit".into()));
        };
        let recurrent = self.declared.values().any(Slot::is_recurrent);
        if rows > pending || (recurrent && rows != pending) {
            let why = if recurrent { "a state with recurrent slots commits all or nothing" } else { "more cannot count" };
            return Err(DeviceError::Call(format!("commit of {rows} rows after a call of {pending} valid rows: {why}")));
        }
        for content in self.contents.values_mut() {
            if let Content::Recurrent { current, next } = content {
                std::mem::swap(current, next);
            }
        }
        self.settle(self.len + rows);
        Ok(())
    }

    fn truncate(&mut self, len: usize) -> Result<(), DeviceError> {
        if len > self.len {
            return Err(DeviceError::Call(format!("cannot truncate {} rows to {len}", self.len)));
        }
        self.settle(len);
        Ok(())
    }

    fn fork(&self) -> Box<dyn State> {
        Box::new(Self { pending: None, ..self.clone() })
    }

    fn export(&self, slot: &str) -> Result<SlotData, DeviceError> {
        let unknown = || DeviceError::Call(format!("the state has no slot `{slot}`"));
        Ok(match (self.contents.get(slot).ok_or_else(unknown)?, self.declared.get(slot).ok_or_else(unknown)?) {
            (Content::Kv(kv), &Slot::Kv { dtype, .. }) => {
                let [keys, values] = [&kv.keys, &kv.values].map(|buffer| kv.export(buffer, self.len, dtype));
                SlotData::Kv { dtype, rows: self.len, keys, values }
            }
            (Content::Kv(_), _) => unreachable!("only KV slots hold KV rows"),
            (Content::Recurrent { current, .. }, _) => SlotData::Recurrent(current.clone()),
        })
    }

    fn import(&mut self, slot: &str, data: &SlotData) -> Result<(), DeviceError> {
        let unknown = || DeviceError::Call(format!("the state has no slot `{slot}`"));
        let declared = self.declared.get(slot).ok_or_else(unknown)?;
        let wrong = |reason: String| Err(DeviceError::Call(format!("import of slot `{slot}`: {reason}")));
        match (data, declared, self.contents.get_mut(slot).ok_or_else(unknown)?) {
            (SlotData::Kv { dtype, rows, keys, values }, Slot::Kv { dtype: own, .. }, Content::Kv(kv)) => {
                if dtype != own {
                    return wrong(format!("needs {own:?} rows, found {dtype:?}"));
                }
                if *rows > self.capacity || (self.len > 0 && *rows != self.len) {
                    return wrong(format!("{rows} rows do not fit {} committed rows of at most {}", self.len, self.capacity));
                }
                let bytes = rows * kv.kv_heads * kv.head_dim * dtype.bytes();
                if keys.len() != bytes || values.len() != bytes {
                    return wrong(format!("{rows} rows need {bytes} bytes, found {} and {}", keys.len(), values.len()));
                }
                kv.write(Which::Keys, 0, &from_bytes(keys, *dtype));
                kv.write(Which::Values, 0, &from_bytes(values, *dtype));
                kv.imported = *rows;
            }
            (SlotData::Recurrent(numbers), _, Content::Recurrent { current, .. }) => {
                if numbers.len() != current.len() {
                    return wrong(format!("needs {} numbers, found {}", current.len(), numbers.len()));
                }
                current.copy_from_slice(numbers);
            }
            _ => return wrong(format!("the data is not of the kind of {declared:?}")),
        }
        self.pending = None;
        Ok(())
    }

    fn set_len(&mut self, len: usize) -> Result<(), DeviceError> {
        if len > self.capacity {
            return Err(DeviceError::Call(format!("{len} rows are beyond the context of {} rows", self.capacity)));
        }
        for (name, content) in &self.contents {
            if let Content::Kv(kv) = content
                && kv.imported.max(self.len) < len
            {
                return Err(DeviceError::Call(format!("slot `{name}` does not hold {len} rows: import them first")));
            }
        }
        self.settle(len);
        Ok(())
    }

    fn bytes(&self) -> u64 {
        let bytes = |content: &Content| match content {
            Content::Kv(kv) => 2 * (kv.keys.len() + kv.values.len()) as u64,
            Content::Recurrent { current, next } => 4 * (current.len() + next.len()) as u64,
        };
        self.contents.values().map(bytes).sum()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

fn from_bytes(bytes: &[u8], dtype: KvType) -> Vec<f16> {
    match dtype {
        KvType::F16 => bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]])).collect(),
        KvType::F32 => bytes.chunks_exact(4).map(|b| f16::from_f32(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))).collect(),
    }
}

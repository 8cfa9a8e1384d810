//! The slots of one session.

use half::f16;
use qhx_ir::{DeviceError, KvType, Name, Slot, SlotData, State};
use std::{any::Any, collections::BTreeMap};

/// A session's slots. KV rows beyond `len` are provisional until a commit counts them; recurrent slots have a second buffer that a call fills and a
/// commit makes the current one.
pub(crate) struct CpuState {
    declared: BTreeMap<Name, Slot>,
    /// In the order of `declared`.
    contents: Vec<Content>,
    capacity: usize,
    len: usize,
    /// The valid rows of the last call, where it may be committed.
    pending: Option<usize>,
}

/// A slot's numbers.
pub(crate) enum Content {
    /// Keys and values.
    Kv(Box<KvRows>),
    /// FIFO rows or delta state: what is committed, and what the last call would make of it.
    Recurrent {
        /// Committed.
        current: Vec<f32>,
        /// What a call makes of it.
        next: Vec<f32>,
    },
}

/// Keys and values, head by head: `[kv_heads, capacity, head_dim]`, so that what one head reads is one run of memory. Pages that no row has reached
/// take no memory: the allocations are zeroed ones, which the system hands out page by page.
pub(crate) struct KvRows {
    pub(crate) keys: Numbers,
    pub(crate) values: Numbers,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) capacity: usize,
    /// The most rows ever written.
    touched: usize,
    /// Rows that were imported, where more than are committed.
    imported: usize,
}

/// Numbers in the type in which a slot keeps them.
pub(crate) enum Numbers {
    F32(Vec<f32>),
    F16(Vec<u16>),
}

impl Numbers {
    fn zeroed(dtype: KvType, count: usize) -> Self {
        match dtype {
            KvType::F32 => Self::F32(vec![0.0; count]),
            KvType::F16 => Self::F16(vec![0; count]),
        }
    }

    fn bytes_of(&self, numbers: std::ops::Range<usize>) -> &[u8] {
        match self {
            Self::F32(x) => bytemuck::cast_slice(&x[numbers]),
            Self::F16(x) => bytemuck::cast_slice(&x[numbers]),
        }
    }

    fn bytes_of_mut(&mut self, numbers: std::ops::Range<usize>) -> &mut [u8] {
        match self {
            Self::F32(x) => bytemuck::cast_slice_mut(&mut x[numbers]),
            Self::F16(x) => bytemuck::cast_slice_mut(&mut x[numbers]),
        }
    }
}

/// Keys or values as steps read them.
#[derive(Clone, Copy)]
pub(crate) enum KvSlice<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
}

impl Numbers {
    pub(crate) fn as_slice(&self) -> KvSlice<'_> {
        match self {
            Self::F32(x) => KvSlice::F32(x),
            Self::F16(x) => KvSlice::F16(bytemuck::cast_slice(x)),
        }
    }
}

impl KvRows {
    fn new(kv_heads: usize, head_dim: usize, dtype: KvType, capacity: usize) -> Self {
        let count = kv_heads * head_dim * capacity;
        let (keys, values) = (Numbers::zeroed(dtype, count), Numbers::zeroed(dtype, count));
        Self { keys, values, kv_heads, head_dim, capacity, touched: 0, imported: 0 }
    }

    /// The rows up to `rows` are about to be written.
    pub(crate) fn touch(&mut self, rows: usize) {
        self.touched = self.touched.max(rows);
    }

    /// Copies the first `rows` rows of all heads from `other`, which may have another capacity.
    fn copy_rows(&mut self, other: &Self, rows: usize) {
        self.touch(rows);
        for head in 0..self.kv_heads {
            let (to, from) = (head * self.capacity * self.head_dim, head * other.capacity * self.head_dim);
            let n = rows * self.head_dim;
            self.keys.bytes_of_mut(to..to + n).copy_from_slice(other.keys.bytes_of(from..from + n));
            self.values.bytes_of_mut(to..to + n).copy_from_slice(other.values.bytes_of(from..from + n));
        }
    }

    /// Calls `f` with the canonical byte offset and the numbers of each (row, head).
    fn each_row(&self, rows: usize, dtype: KvType, mut f: impl FnMut(usize, std::ops::Range<usize>)) {
        for row in 0..rows {
            for head in 0..self.kv_heads {
                let start = (head * self.capacity + row) * self.head_dim;
                f((row * self.kv_heads + head) * self.head_dim * dtype.bytes(), start..start + self.head_dim);
            }
        }
    }
}

impl CpuState {
    pub(crate) fn new(slots: &BTreeMap<Name, Slot>, capacity: usize) -> Result<Self, DeviceError> {
        let too_large = |name: &Name, slot: &Slot| {
            DeviceError::Resources(format!("a context of {capacity} rows is too large for slot `{name}` ({slot:?}): ask for a smaller one"))
        };
        let content = |(name, slot): (&Name, &Slot)| {
            let fits = |sizes: &[usize]| {
                let count = sizes.iter().try_fold(16usize, |n, &s| n.checked_mul(s));
                match count {
                    Some(count) if count < isize::MAX as usize / 2 => Ok(count / 16),
                    _ => Err(too_large(name, slot)),
                }
            };
            // Asks for the memory once in a way that can fail; what follows then succeeds.
            let available = |numbers: usize| Vec::<f32>::new().try_reserve_exact(numbers).map_err(|_| too_large(name, slot));
            Ok(match *slot {
                Slot::Kv { kv_heads, head_dim, dtype, .. } => {
                    available(fits(&[kv_heads, head_dim, capacity])?)?;
                    Content::Kv(Box::new(KvRows::new(kv_heads, head_dim, dtype, capacity)))
                }
                Slot::Fifo { rows, channels } => {
                    let count = fits(&[rows, channels])?;
                    available(2 * count)?;
                    Content::Recurrent { current: vec![0.0; count], next: vec![0.0; count] }
                }
                Slot::Delta { heads, key_dim, value_dim } => {
                    let count = fits(&[heads, key_dim, value_dim])?;
                    available(2 * count)?;
                    Content::Recurrent { current: vec![0.0; count], next: vec![0.0; count] }
                }
            })
        };
        let contents = slots.iter().map(content).collect::<Result<_, DeviceError>>()?;
        Ok(Self { declared: slots.clone(), contents, capacity, len: 0, pending: None })
    }

    /// Whether it was made for a program with these slots.
    pub(crate) fn fits(&self, slots: &BTreeMap<Name, Slot>) -> bool {
        self.declared == *slots
    }

    /// A call begins: what an earlier one left uncommitted is forgotten.
    pub(crate) fn begin(&mut self) {
        self.pending = None;
    }

    /// A call of so many valid rows succeeded.
    pub(crate) fn end(&mut self, rows: usize) {
        self.pending = Some(rows);
    }

    /// A KV slot by its place.
    pub(crate) fn kv(&mut self, place: usize) -> (&mut KvRows, usize) {
        match &mut self.contents[place] {
            Content::Kv(rows) => (rows, self.len),
            Content::Recurrent { .. } => unreachable!("checked: a KV slot"),
        }
    }

    /// A recurrent slot by its place: what is committed, and what a call makes of it.
    pub(crate) fn recurrent(&mut self, place: usize) -> (&[f32], &mut [f32]) {
        match &mut self.contents[place] {
            Content::Recurrent { current, next } => (current, next),
            Content::Kv(_) => unreachable!("checked: a recurrent slot"),
        }
    }

    /// From now on `len` rows count, and nothing else is known of.
    fn settle(&mut self, len: usize) {
        self.pending = None;
        self.len = len;
        for content in &mut self.contents {
            if let Content::Kv(kv) = content {
                kv.imported = 0;
            }
        }
    }

    fn place(&self, slot: &str) -> Result<usize, DeviceError> {
        let place = self.declared.keys().position(|name| &**name == slot);
        place.ok_or_else(|| DeviceError::Call(format!("the state has no slot `{slot}`")))
    }

    fn declared_at(&self, place: usize) -> &Slot {
        // Contents were made from the declarations, one for each.
        self.declared.values().nth(place).unwrap_or_else(|| unreachable!("a content without declaration"))
    }
}

impl State for CpuState {
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
        let recurrent = self.contents.iter().any(|c| matches!(c, Content::Recurrent { .. }));
        if rows > pending || (recurrent && rows != pending) {
            let why = if recurrent { "a state with recurrent slots commits all or nothing" } else { "more cannot count" };
            return Err(DeviceError::Call(format!("commit of {rows} rows after a call of {pending} valid rows: {why}")));
        }
        for content in &mut self.contents {
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
        let contents = self.contents.iter().enumerate().map(|(place, content)| match content {
            Content::Kv(rows) => {
                let Slot::Kv { dtype, .. } = self.declared_at(place) else { unreachable!("only KV slots hold KV rows") };
                let mut copy = KvRows::new(rows.kv_heads, rows.head_dim, *dtype, rows.capacity);
                copy.copy_rows(rows, self.len);
                Content::Kv(Box::new(copy))
            }
            Content::Recurrent { current, .. } => Content::Recurrent { current: current.clone(), next: vec![0.0; current.len()] },
        });
        let contents = contents.collect();
        Box::new(Self { declared: self.declared.clone(), contents, capacity: self.capacity, len: self.len, pending: None })
    }

    fn export(&self, slot: &str) -> Result<SlotData, DeviceError> {
        let place = self.place(slot)?;
        Ok(match (&self.contents[place], self.declared_at(place)) {
            (Content::Kv(kv), &Slot::Kv { dtype, .. }) => {
                let bytes = self.len * kv.kv_heads * kv.head_dim * dtype.bytes();
                let (mut keys, mut values) = (vec![0; bytes], vec![0; bytes]);
                kv.each_row(self.len, dtype, |at, numbers| {
                    let length = numbers.len() * dtype.bytes();
                    keys[at..at + length].copy_from_slice(kv.keys.bytes_of(numbers.clone()));
                    values[at..at + length].copy_from_slice(kv.values.bytes_of(numbers));
                });
                SlotData::Kv { dtype, rows: self.len, keys, values }
            }
            (Content::Kv(_), _) => unreachable!("only KV slots hold KV rows"),
            (Content::Recurrent { current, .. }, _) => SlotData::Recurrent(current.clone()),
        })
    }

    fn import(&mut self, slot: &str, data: &SlotData) -> Result<(), DeviceError> {
        let place = self.place(slot)?;
        let declared = self.declared_at(place).clone();
        let wrong = |reason: String| Err(DeviceError::Call(format!("import of slot `{slot}`: {reason}")));
        match (data, &declared, &mut self.contents[place]) {
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
                let mut moves = Vec::with_capacity(rows * kv.kv_heads);
                kv.each_row(*rows, *dtype, |at, numbers| moves.push((at, numbers)));
                for (at, numbers) in moves {
                    let length = numbers.len() * dtype.bytes();
                    kv.keys.bytes_of_mut(numbers.clone()).copy_from_slice(&keys[at..at + length]);
                    kv.values.bytes_of_mut(numbers).copy_from_slice(&values[at..at + length]);
                }
                kv.touch(*rows);
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
        for (name, content) in self.declared.keys().zip(&self.contents) {
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
            Content::Kv(kv) => {
                let number = if matches!(kv.keys, Numbers::F32(_)) { 4 } else { 2 };
                2 * (kv.touched * kv.kv_heads * kv.head_dim * number) as u64
            }
            Content::Recurrent { current, next } => 4 * (current.len() + next.len()) as u64,
        };
        self.contents.iter().map(bytes).sum()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

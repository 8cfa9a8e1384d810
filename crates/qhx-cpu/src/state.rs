//! The slots of one session.

use half::f16;
use qhx_ir::{DeviceError, KvType, Ledger, Name, Slot, SlotData, State};
use std::{any::Any, collections::BTreeMap, ops::Range};

/// A session's slots. KV rows beyond `len` are provisional until a commit counts them; recurrent slots have a second buffer that a call fills and a
/// commit makes the current one.
pub(crate) struct CpuState {
    ledger: Ledger,
    /// In the order of the ledger's slots.
    contents: Vec<Content>,
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

    fn dtype(&self) -> KvType {
        match self {
            Self::F32(_) => KvType::F32,
            Self::F16(_) => KvType::F16,
        }
    }

    fn bytes_of(&self, numbers: Range<usize>) -> &[u8] {
        match self {
            Self::F32(x) => bytemuck::cast_slice(&x[numbers]),
            Self::F16(x) => bytemuck::cast_slice(&x[numbers]),
        }
    }

    fn bytes_of_mut(&mut self, numbers: Range<usize>) -> &mut [u8] {
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
        Self { keys, values, kv_heads, head_dim, capacity, touched: 0 }
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

    /// The canonical bytes and the numbers of each (row, head) of some rows.
    fn each_row(&self, rows: Range<usize>, dtype: KvType) -> impl Iterator<Item = (Range<usize>, Range<usize>)> + use<> {
        let (heads, capacity, dim) = (self.kv_heads, self.capacity, self.head_dim);
        let places = rows.clone().flat_map(move |row| (0..heads).map(move |head| (row, head)));
        places.map(move |(row, head)| {
            let (from, to) = (((row - rows.start) * heads + head) * dim * dtype.bytes(), (head * capacity + row) * dim);
            (from..from + dim * dtype.bytes(), to..to + dim)
        })
    }
}

impl CpuState {
    pub(crate) fn new(slots: &BTreeMap<Name, Slot>, capacity: usize) -> Result<Self, DeviceError> {
        let too_large = |name: &Name, slot: &Slot| {
            DeviceError::Resources(format!(
                "not enough memory for slot `{name}` ({slot:?}) with a context of {capacity} rows: use a smaller context"
            ))
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
        Ok(Self { ledger: Ledger::new(slots, capacity), contents })
    }

    /// Whether it was made for a program with these slots.
    pub(crate) fn fits(&self, slots: &BTreeMap<Name, Slot>) -> bool {
        self.ledger.slots() == slots
    }

    /// A call begins: what an earlier one left uncommitted is forgotten.
    pub(crate) fn begin(&mut self) {
        self.ledger.begin();
    }

    /// A call of so many valid rows succeeded.
    pub(crate) fn end(&mut self, rows: usize) {
        self.ledger.end(rows);
    }

    /// A KV slot by its place.
    pub(crate) fn kv(&mut self, place: usize) -> (&mut KvRows, usize) {
        match &mut self.contents[place] {
            Content::Kv(rows) => (rows, self.ledger.len()),
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
}

impl State for CpuState {
    fn len(&self) -> usize {
        self.ledger.len()
    }

    fn capacity(&self) -> usize {
        self.ledger.capacity()
    }

    fn commit(&mut self, rows: usize) -> Result<(), DeviceError> {
        self.ledger.commit(rows)?;
        for content in &mut self.contents {
            if let Content::Recurrent { current, next } = content {
                std::mem::swap(current, next);
            }
        }
        Ok(())
    }

    fn truncate(&mut self, len: usize) -> Result<(), DeviceError> {
        self.ledger.truncate(len)
    }

    fn fork(&self) -> Box<dyn State> {
        let contents = self.contents.iter().map(|content| match content {
            Content::Kv(rows) => {
                let mut copy = KvRows::new(rows.kv_heads, rows.head_dim, rows.keys.dtype(), rows.capacity);
                copy.copy_rows(rows, self.ledger.len());
                Content::Kv(Box::new(copy))
            }
            Content::Recurrent { current, .. } => Content::Recurrent { current: current.clone(), next: vec![0.0; current.len()] },
        });
        Box::new(Self { ledger: self.ledger.fork(), contents: contents.collect() })
    }

    fn export_rows(&self, slot: &str, first: usize) -> Result<SlotData, DeviceError> {
        Ok(match &self.contents[self.ledger.export(slot, first)?] {
            Content::Kv(kv) => {
                let (dtype, rows) = (kv.keys.dtype(), first..self.ledger.len());
                let bytes = rows.len() * kv.kv_heads * kv.head_dim * dtype.bytes();
                let (mut keys, mut values) = (vec![0; bytes], vec![0; bytes]);
                for (at, numbers) in kv.each_row(rows.clone(), dtype) {
                    keys[at.clone()].copy_from_slice(kv.keys.bytes_of(numbers.clone()));
                    values[at].copy_from_slice(kv.values.bytes_of(numbers));
                }
                SlotData::Kv { dtype, rows: rows.len(), keys, values }
            }
            Content::Recurrent { current, .. } => SlotData::Recurrent(current.clone()),
        })
    }

    fn import_rows(&mut self, slot: &str, first: usize, data: &SlotData) -> Result<(), DeviceError> {
        let place = self.ledger.import(slot, first, data)?;
        match (data, &mut self.contents[place]) {
            (SlotData::Kv { dtype, rows, keys, values }, Content::Kv(kv)) => {
                for (at, numbers) in kv.each_row(first..first + rows, *dtype) {
                    kv.keys.bytes_of_mut(numbers.clone()).copy_from_slice(&keys[at.clone()]);
                    kv.values.bytes_of_mut(numbers).copy_from_slice(&values[at]);
                }
                kv.touch(first + rows);
            }
            (SlotData::Recurrent(numbers), Content::Recurrent { current, .. }) => current.copy_from_slice(numbers),
            _ => unreachable!("the ledger checked the kind"),
        }
        Ok(())
    }

    fn set_len(&mut self, len: usize) -> Result<(), DeviceError> {
        self.ledger.set_len(len)
    }

    fn bytes(&self) -> u64 {
        let bytes = |content: &Content| match content {
            Content::Kv(kv) => 2 * (kv.touched * kv.kv_heads * kv.head_dim * kv.keys.dtype().bytes()) as u64,
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

//! The slots of one session.

use crate::{
    kernels::{Instructions, delta::DeltaRows},
    pages::{KvRows, Numbers, PagePool},
    pool::Pool,
    work::{Chunks, Tiles, for_each, for_each_here},
};
use qhx_ir::{DeviceError, Ledger, Name, Slot, SlotData, State};
use std::{collections::BTreeMap, sync::Arc};

/// What all states of an executable work with.
pub(crate) struct Workshop {
    pub(crate) pages: Arc<PagePool>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) instructions: Instructions,
}

/// A session's slots. KV rows beyond `len` are provisional until a commit counts them; recurrent slots have a second buffer that a call fills and a
/// commit makes the current one.
pub(crate) struct CpuState {
    ledger: Ledger,
    /// In the order of the ledger's slots.
    contents: Vec<Content>,
    workshop: Arc<Workshop>,
}

/// A slot's numbers.
pub(crate) enum Content {
    /// Keys and values.
    Kv(KvRows),
    /// FIFO rows or delta state.
    Recurrent(Recurrent),
}

/// A recurrent slot.
pub(crate) struct Recurrent {
    slot: Slot,
    /// Committed; shared with forks.
    current: Arc<Numbers>,
    /// What a call makes of it; made before a call writes it, so that a state at rest holds its content once.
    next: Option<Arc<Numbers>>,
    /// Of a call of which some rows may be committed: what each row brings, from which the content after any of them is computed again. FIFO: the rows. Delta
    /// rule: see [`DeltaRecord`].
    pub(crate) record: Vec<f32>,
}

/// What the rows of a call bring to a delta state, head by head: of each row its unit key, its value, its decay and step.
#[derive(Clone, Copy)]
pub(crate) struct DeltaRecord {
    pub(crate) key_dim: usize,
    pub(crate) value_dim: usize,
}

impl DeltaRecord {
    /// Numbers of a row of a head.
    pub(crate) fn width(self) -> usize {
        self.key_dim + self.value_dim + 2
    }
}

impl Recurrent {
    fn new(pages: &Arc<PagePool>, slot: Slot, count: usize) -> Result<Self, DeviceError> {
        Ok(Self { slot, current: Arc::new(Numbers::zeroed(pages, count)?), next: None, record: Vec::new() })
    }

    /// Makes sure that there is something for a call to write to.
    fn begin(&mut self, pages: &Arc<PagePool>) -> Result<(), DeviceError> {
        self.record.clear();
        if self.next.as_mut().is_none_or(|next| Arc::get_mut(next).is_none()) {
            self.next = Some(Arc::new(Numbers::zeroed(pages, self.current.as_slice().len())?));
        }
        Ok(())
    }

    /// What is committed, and what a call makes of it.
    fn both(&mut self) -> (&[f32], &mut [f32], &mut Vec<f32>) {
        let next = self.next.as_mut().and_then(Arc::get_mut);
        let next = next.unwrap_or_else(|| unreachable!("made before a call"));
        (self.current.as_slice(), next.as_mut_slice(), &mut self.record)
    }

    /// Makes the next content that after the first `rows` of the `all` rows that were recorded.
    fn replay(&mut self, rows: usize, all: usize, workshop: &Workshop) {
        let slot = self.slot.clone();
        let (current, next, record) = self.both();
        match slot {
            Slot::Fifo { rows: kept, channels } => {
                let before = current.chunks(channels).chain(record.chunks(channels));
                next.chunks_mut(channels).zip(before.skip(rows)).take(kept).for_each(|(next, row)| next.copy_from_slice(row));
            }
            Slot::Delta { heads, key_dim, value_dim } => {
                let (shape, size) = (DeltaRecord { key_dim, value_dim }, key_dim * value_dim);
                // Keys side by side, the results, which nobody reads, and the rule's own room.
                let each = rows * (key_dim + value_dim) + DeltaRows::room(key_dim);
                let mut scratch = vec![0.0; each * workshop.pool.threads()];
                for_each(&workshop.pool, Chunks::new(next, size), &mut scratch, |head, next, scratch| {
                    let own = &record[head * all * shape.width()..][..rows * shape.width()];
                    let (keys, rest) = scratch.split_at_mut(rows * key_dim);
                    let (results, room) = rest.split_at_mut(rows * value_dim);
                    let mut gates = vec![(0.0, 0.0); rows];
                    for ((row, key), gate) in own.chunks(shape.width()).zip(keys.chunks_mut(key_dim)).zip(&mut gates) {
                        key.copy_from_slice(&row[..key_dim]);
                        *gate = (row[key_dim + value_dim], row[key_dim + value_dim + 1]);
                    }
                    let (queries, keys) = (&*keys, &*keys);
                    let (values, value_stride) = (&own[key_dim..], shape.width());
                    let before = &current[head * size..][..size];
                    for_each_here(Tiles::new(results, value_dim, rows, value_dim), room, |_, mut tile, room| {
                        let rule = DeltaRows { queries, keys, gates: &gates, key_dim, values, value_stride, value_dim };
                        rule.into_tile(workshop.instructions, Some(before), next, room, &mut tile);
                    });
                });
                debug_assert_eq!(record.len(), heads * all * shape.width());
            }
            Slot::Kv { .. } => unreachable!("a recurrent slot"),
        }
    }
}

impl CpuState {
    pub(crate) fn new(slots: &BTreeMap<Name, Slot>, capacity: usize, workshop: &Arc<Workshop>) -> Result<Self, DeviceError> {
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
            let recurrent = |sizes: &[usize]| {
                let count = fits(sizes)?;
                available(2 * count)?;
                Ok(Content::Recurrent(Recurrent::new(&workshop.pages, slot.clone(), count)?))
            };
            match *slot {
                Slot::Kv { kv_heads, head_dim, dtype, .. } => {
                    available(fits(&[kv_heads, head_dim, capacity])?)?;
                    Ok(Content::Kv(KvRows::new(&workshop.pages, kv_heads, head_dim, dtype, capacity)))
                }
                Slot::Fifo { rows, channels } => recurrent(&[rows, channels]),
                Slot::Delta { heads, key_dim, value_dim } => recurrent(&[heads, key_dim, value_dim]),
            }
        };
        let contents = slots.iter().map(content).collect::<Result<_, DeviceError>>()?;
        Ok(Self { ledger: Ledger::new(slots, capacity), contents, workshop: workshop.clone() })
    }

    /// Whether it was made for a program with these slots.
    pub(crate) fn fits(&self, slots: &BTreeMap<Name, Slot>) -> bool {
        self.ledger.slots() == slots
    }

    /// A call of so many valid rows begins: what an earlier one left uncommitted is forgotten, and there is memory for what this one writes.
    pub(crate) fn begin(&mut self, rows: usize) -> Result<(), DeviceError> {
        self.ledger.begin();
        let len = self.ledger.len();
        self.contents.iter_mut().try_for_each(|content| match content {
            Content::Kv(kv) => kv.touch(len..len + rows),
            Content::Recurrent(recurrent) => recurrent.begin(&self.workshop.pages),
        })
    }

    /// A call of so many valid rows succeeded.
    pub(crate) fn end(&mut self, rows: usize, partial: bool) {
        self.ledger.end(rows, partial);
    }

    /// A KV slot by its place, and how many rows are committed.
    pub(crate) fn kv(&mut self, place: usize) -> (&mut KvRows, usize) {
        match &mut self.contents[place] {
            Content::Kv(rows) => (rows, self.ledger.len()),
            Content::Recurrent(_) => unreachable!("checked: a KV slot"),
        }
    }

    /// A recurrent slot by its place: what is committed, what a call makes of it, and what the call records.
    pub(crate) fn recurrent(&mut self, place: usize) -> (&[f32], &mut [f32], &mut Vec<f32>) {
        match &mut self.contents[place] {
            Content::Recurrent(recurrent) => recurrent.both(),
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
        let all = self.ledger.pending_rows();
        self.ledger.commit(rows)?;
        for content in &mut self.contents {
            if let Content::Recurrent(recurrent) = content
                && rows > 0
            {
                if rows < all {
                    recurrent.replay(rows, all, &self.workshop);
                }
                if let Some(next) = &mut recurrent.next {
                    std::mem::swap(&mut recurrent.current, next);
                }
            }
        }
        Ok(())
    }

    fn truncate(&mut self, len: usize) -> Result<(), DeviceError> {
        self.ledger.truncate(len)?;
        for content in &mut self.contents {
            if let Content::Kv(kv) = content {
                kv.truncate(len);
            }
        }
        Ok(())
    }

    fn fork(&self) -> Result<Box<dyn State>, DeviceError> {
        let (len, capacity) = (self.ledger.len(), self.ledger.capacity());
        let contents = self.contents.iter().map(|content| match content {
            Content::Kv(kv) => Content::Kv(kv.fork(len, capacity)),
            Content::Recurrent(Recurrent { slot, current, .. }) => {
                Content::Recurrent(Recurrent { slot: slot.clone(), current: current.clone(), next: None, record: Vec::new() })
            }
        });
        Ok(Box::new(Self { ledger: self.ledger.fork(), contents: contents.collect(), workshop: self.workshop.clone() }))
    }

    fn export_rows(&self, slot: &str, first: usize) -> Result<SlotData, DeviceError> {
        Ok(match &self.contents[self.ledger.export(slot, first)?] {
            Content::Kv(kv) => {
                let (dtype, rows) = (kv.dtype, first..self.ledger.len());
                let bytes = rows.len() * kv.kv_heads * kv.head_dim * dtype.bytes();
                let (mut keys, mut values) = (Vec::with_capacity(bytes), Vec::with_capacity(bytes));
                for (row, head) in rows.clone().flat_map(|row| (0..kv.kv_heads).map(move |head| (row, head))) {
                    let (key, value) = kv.row(head, row);
                    keys.extend_from_slice(key);
                    values.extend_from_slice(value);
                }
                SlotData::Kv { dtype, rows: rows.len(), keys, values }
            }
            Content::Recurrent(recurrent) => SlotData::Recurrent(recurrent.current.as_slice().to_vec()),
        })
    }

    fn import_rows(&mut self, slot: &str, first: usize, data: &SlotData) -> Result<(), DeviceError> {
        let place = self.ledger.import(slot, first, data)?;
        match (data, &mut self.contents[place]) {
            (SlotData::Kv { rows, keys, values, .. }, Content::Kv(kv)) => {
                kv.touch(first..first + rows)?;
                let size = kv.head_dim * kv.dtype.bytes();
                let places = (first..first + rows).flat_map(|row| (0..kv.kv_heads).map(move |head| (row, head)));
                let places: Vec<_> = places.collect();
                for ((row, head), (key, value)) in places.into_iter().zip(keys.chunks(size).zip(values.chunks(size))) {
                    kv.set_row(head, row, key, value);
                }
            }
            (SlotData::Recurrent(numbers), Content::Recurrent(recurrent)) => {
                recurrent.begin(&self.workshop.pages)?;
                recurrent.both().1.copy_from_slice(numbers);
                if let Some(next) = &mut recurrent.next {
                    std::mem::swap(&mut recurrent.current, next);
                }
            }
            _ => unreachable!("the ledger checked the kind"),
        }
        Ok(())
    }

    fn set_len(&mut self, len: usize) -> Result<(), DeviceError> {
        self.ledger.set_len(len)
    }

    fn bytes(&self) -> u64 {
        let bytes = |content: &Content| match content {
            Content::Kv(kv) => kv.bytes(),
            Content::Recurrent(r) => 4 * (r.current.as_slice().len() + r.next.as_ref().map_or(0, |next| next.as_slice().len())) as u64,
        };
        self.contents.iter().map(bytes).sum()
    }
}

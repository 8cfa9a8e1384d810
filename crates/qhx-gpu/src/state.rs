//! The slots of one session.
//!
//! Keys and values lie in pages of 64 rows, each with the rows of all KV slots; states that were forked from one another share pages until one of them writes. A recurrent
//! slot has a second region, which a call fills and a commit makes the current one.

use crate::{
    kernels,
    memory::{Content, Pool, Region},
    vulkan::{Buffer, Command, Recording, Use},
};
use qhx_ir::{Checked, DeviceError, KvType, Ledger, Name, Slot, SlotData, State};
use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
    sync::Arc,
};

/// Rows of a page.
pub(crate) const PAGE_ROWS: usize = 64;

/// How the slots of a program are held.
pub(crate) struct SlotLayout {
    places: HashMap<Name, usize>,
    /// In the order of the slots.
    pub(crate) held: Vec<Held>,
    /// Bytes of a page; 0 without KV slots.
    page_bytes: u64,
}

/// How a slot is held.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Held {
    /// In pages: keys `[kv_heads, PAGE_ROWS, row_bytes]` from `offset` on, then values.
    Kv { offset: u64, kv_heads: usize, head_dim: usize, row_bytes: usize, dtype: KvType },
    /// In regions of its own.
    Recurrent { kind: Recurrent, number: usize },
}

/// A recurrent slot.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Recurrent {
    Fifo { rows: usize, channels: usize },
    Delta { heads: usize, key_dim: usize, value_dim: usize },
}

impl Recurrent {
    /// Bytes of its content.
    fn bytes(self) -> u64 {
        4 * match self {
            Self::Fifo { rows, channels } => rows as u64 * channels as u64,
            Self::Delta { heads, key_dim, value_dim } => heads as u64 * key_dim as u64 * value_dim as u64,
        }
    }

    /// Bytes of what a call of so many rows records, so that some of them can be committed.
    fn record_bytes(self, rows: usize) -> u64 {
        4 * rows as u64
            * match self {
                Self::Fifo { channels, .. } => channels as u64,
                Self::Delta { heads, key_dim, value_dim } => (heads * (2 * key_dim + value_dim + 2)) as u64,
            }
    }
}

impl SlotLayout {
    pub(crate) fn new(program: &Checked) -> Self {
        let (mut held, mut page_bytes, mut number) = (Vec::new(), 0u64, 0);
        for slot in program.slots.values() {
            let recurrent = |kind| Held::Recurrent { kind, number };
            held.push(match *slot {
                Slot::Kv { kv_heads, head_dim, dtype, .. } => {
                    let (row_bytes, offset) = ((head_dim * dtype.bytes()).next_multiple_of(4), page_bytes);
                    page_bytes += (2 * kv_heads as u64 * PAGE_ROWS as u64 * row_bytes as u64).next_multiple_of(256);
                    Held::Kv { offset, kv_heads, head_dim, row_bytes, dtype }
                }
                Slot::Fifo { rows, channels } => recurrent(Recurrent::Fifo { rows, channels }),
                Slot::Delta { heads, key_dim, value_dim } => recurrent(Recurrent::Delta { heads, key_dim, value_dim }),
            });
            number += slot.is_recurrent() as usize;
        }
        Self { places: program.slots.keys().enumerate().map(|(place, name)| (name.clone(), place)).collect(), held, page_bytes }
    }

    /// A slot's place among all.
    pub(crate) fn place(&self, name: &Name) -> usize {
        self.places[name]
    }

    /// A slot's place among the recurrent ones.
    pub(crate) fn recurrent_number(&self, place: usize) -> usize {
        match self.held[place] {
            Held::Recurrent { number, .. } => number,
            Held::Kv { .. } => unreachable!("checked: a recurrent slot"),
        }
    }
}

/// A session's slots.
pub(crate) struct GpuState {
    ledger: Ledger,
    layout: Arc<SlotLayout>,
    pool: Arc<Pool>,
    pages: Vec<Arc<Region>>,
    /// In the order of the recurrent slots.
    recurrent: Vec<Kept>,
}

/// The content of a recurrent slot.
struct Kept {
    kind: Recurrent,
    /// What is committed; none: zeros.
    current: Option<Arc<Region>>,
    /// What a call makes of it.
    next: Option<Arc<Region>>,
    /// What the rows of a call bring, where some of them may be committed.
    record: Option<Region>,
}

impl GpuState {
    pub(crate) fn new(
        slots: &BTreeMap<Name, Slot>,
        capacity: usize,
        layout: &Arc<SlotLayout>,
        pool: &Arc<Pool>,
    ) -> Result<Self, DeviceError> {
        let pages = capacity.div_ceil(PAGE_ROWS) as u64;
        let rest = layout.held.iter().map(|held| if let Held::Recurrent { kind, .. } = held { kind.bytes() } else { 0 }).sum::<u64>();
        let needed = layout.page_bytes.checked_mul(pages).and_then(|bytes| bytes.checked_add(rest));
        if needed.is_none_or(|bytes| bytes > pool.gpu.adapter.memory) {
            return Err(DeviceError::Resources(format!(
                "a session of {capacity} rows needs more memory than the GPU's {} bytes: use a smaller context",
                pool.gpu.adapter.memory
            )));
        }
        let recurrent = layout.held.iter().filter_map(|held| match *held {
            Held::Recurrent { kind, .. } => Some(Kept { kind, current: None, next: None, record: None }),
            Held::Kv { .. } => None,
        });
        let recurrent = recurrent.collect();
        Ok(Self { ledger: Ledger::new(slots, capacity), layout: layout.clone(), pool: pool.clone(), pages: Vec::new(), recurrent })
    }

    /// Whether it was made for an executable with this layout.
    pub(crate) fn fits(&self, layout: &Arc<SlotLayout>) -> bool {
        Arc::ptr_eq(&self.layout, layout)
    }

    /// A call of so many valid rows begins: what an earlier one left uncommitted is forgotten, and there is memory for what this one writes.
    pub(crate) fn begin(&mut self, rows: usize, partial: bool) -> Result<(), DeviceError> {
        self.ledger.begin();
        let len = self.ledger.len();
        self.touch(len..len + rows)?;
        for kept in &mut self.recurrent {
            if kept.next.as_mut().is_none_or(|next| Arc::get_mut(next).is_none()) {
                kept.next = Some(Arc::new(self.pool.region(kept.kind.bytes(), usize::MAX, Content::Recurrent)?));
            }
            kept.record = match partial && rows > 1 {
                true => Some(self.pool.region(kept.kind.record_bytes(rows), usize::MAX, Content::Recurrent)?),
                false => None,
            };
        }
        Ok(())
    }

    /// A call of so many valid rows succeeded.
    pub(crate) fn end(&mut self, rows: usize, partial: bool) {
        self.ledger.end(rows, partial);
    }

    /// Gets `rows` ready to be written: their pages are there and are this state's alone.
    fn touch(&mut self, rows: Range<usize>) -> Result<(), DeviceError> {
        if self.layout.page_bytes == 0 || rows.is_empty() {
            return Ok(());
        }
        let most = self.ledger.capacity().div_ceil(PAGE_ROWS);
        for number in rows.start / PAGE_ROWS..rows.end.div_ceil(PAGE_ROWS) {
            let shared = self.pages.get_mut(number).map(|page| Arc::get_mut(page).is_none());
            if shared == Some(false) {
                continue;
            }
            let own = Arc::new(self.pool.region(self.layout.page_bytes, most, Content::Kv)?);
            match shared {
                None => self.pages.push(own),
                Some(_) => {
                    self.pool.copy(&self.pages[number], &own);
                    self.pages[number] = own;
                }
            }
        }
        Ok(())
    }

    pub(crate) fn page_addresses(&self) -> Vec<u64> {
        self.pages.iter().map(|page| page.address()).collect()
    }

    pub(crate) fn recurrent_addresses(&self) -> Vec<[u64; 3]> {
        let of = |region: &Option<Arc<Region>>| region.as_ref().map_or(0, |region| region.address());
        self.recurrent.iter().map(|kept| [of(&kept.current), of(&kept.next), kept.record.as_ref().map_or(0, Region::address)]).collect()
    }

    /// Has the next content computed as it is after the first `rows` of the recorded rows.
    fn replay(&self, kept: &Kept, rows: usize) -> Result<(), DeviceError> {
        let (Some(next), Some(record)) = (&kept.next, &kept.record) else { return Ok(()) };
        let (old, new, record) = (kept.current.as_ref().map_or(0, |region| region.address()), next.address(), record.address());
        let gpu = &self.pool.gpu;
        let command = match kept.kind {
            Recurrent::Fifo { rows: held, channels } => {
                let groups = [(held * channels).div_ceil(256) as u32, 1, 1];
                let numbers = [rows as u32, channels as u32, held as u32 + 1, u32::MAX, 1];
                kernels::command(gpu, kernels::SHORT_CONV, &[2, 99], groups, &[0, record, 0, 0, new, old], &numbers)?
            }
            Recurrent::Delta { heads, key_dim, value_dim } => {
                let (share, columns) = kernels::delta_share(&gpu.adapter, key_dim);
                let groups = [heads as u32, value_dim.div_ceil(columns) as u32, 1];
                let numbers = [rows as u32, heads as u32, value_dim as u32, 0];
                kernels::command(gpu, kernels::DELTA, &[key_dim as u32, 1, share], groups, &[0, record, 0, old, new], &numbers)?
            }
        };
        self.pool.add_errand(command);
        Ok(())
    }

    /// Runs commands behind all errands, and waits.
    fn run(&self, commands: Vec<Command>) -> Result<(), DeviceError> {
        let mut all = self.pool.take_errands();
        all.extend(commands);
        let recording = Recording::new(&self.pool.gpu, all)?;
        Ok(self.pool.gpu.run(&recording)?)
    }

    /// Reads parts of regions.
    fn download(&self, parts: &[(&Region, u64, u64)]) -> Result<Vec<u8>, DeviceError> {
        let total: u64 = parts.iter().map(|part| part.2).sum();
        let to = Arc::new(Buffer::new(&self.pool.gpu, total, Use::Download)?);
        let (mut commands, mut to_offset) = (Vec::new(), 0);
        for &(region, offset, bytes) in parts {
            let (from, from_offset) = (region.buffer.clone(), region.offset + offset);
            commands.push(Command::Copy { from, from_offset, to: to.clone(), to_offset, bytes });
            to_offset += bytes;
        }
        self.run(commands)?;
        let mut bytes = vec![0; total as usize];
        to.read(0, &mut bytes);
        Ok(bytes)
    }

    /// Writes parts of regions.
    fn upload(&self, parts: &[(&Region, u64, Vec<u8>)]) -> Result<(), DeviceError> {
        let total: usize = parts.iter().map(|part| part.2.len()).sum();
        let from = Arc::new(Buffer::new(&self.pool.gpu, total as u64, Use::Upload)?);
        let (mut commands, mut from_offset) = (Vec::new(), 0);
        for (region, offset, bytes) in parts {
            from.write(from_offset, bytes);
            let (to, to_offset, bytes) = (region.buffer.clone(), region.offset + offset, bytes.len() as u64);
            commands.push(Command::Copy { from: from.clone(), from_offset, to, to_offset, bytes });
            from_offset += bytes;
        }
        self.run(commands)
    }
}

impl State for GpuState {
    fn len(&self) -> usize {
        self.ledger.len()
    }

    fn capacity(&self) -> usize {
        self.ledger.capacity()
    }

    fn commit(&mut self, rows: usize) -> Result<(), DeviceError> {
        let all = self.ledger.pending_rows();
        self.ledger.commit(rows)?;
        if rows == 0 {
            return Ok(());
        }
        if rows < all {
            self.recurrent.iter().try_for_each(|kept| self.replay(kept, rows))?;
        }
        for kept in &mut self.recurrent {
            std::mem::swap(&mut kept.current, &mut kept.next);
        }
        Ok(())
    }

    fn truncate(&mut self, len: usize) -> Result<(), DeviceError> {
        self.ledger.truncate(len)?;
        self.pages.truncate(len.div_ceil(PAGE_ROWS));
        Ok(())
    }

    fn fork(&self) -> Result<Box<dyn State>, DeviceError> {
        let len = self.ledger.len();
        let pages = self.pages.iter().take(len.div_ceil(PAGE_ROWS)).cloned().collect();
        let recurrent = self.recurrent.iter().map(|kept| Kept { kind: kept.kind, current: kept.current.clone(), next: None, record: None });
        Ok(Box::new(Self {
            ledger: self.ledger.fork(),
            layout: self.layout.clone(),
            pool: self.pool.clone(),
            pages,
            recurrent: recurrent.collect(),
        }))
    }

    fn export_rows(&self, slot: &str, first: usize) -> Result<SlotData, DeviceError> {
        let place = self.ledger.export(slot, first)?;
        match self.layout.held[place] {
            Held::Recurrent { kind, number } => {
                let mut numbers = vec![0f32; kind.bytes() as usize / 4];
                if let Some(region) = &self.recurrent[number].current {
                    let bytes = self.download(&[(region, 0, kind.bytes())])?;
                    numbers.iter_mut().zip(bytes.chunks_exact(4)).for_each(|(n, b)| *n = f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
                }
                Ok(SlotData::Recurrent(numbers))
            }
            Held::Kv { offset, kv_heads, head_dim, row_bytes, dtype } => {
                let len = self.ledger.len();
                let (half, size) = (kv_heads * PAGE_ROWS * row_bytes, head_dim * dtype.bytes());
                let pages = first / PAGE_ROWS..len.div_ceil(PAGE_ROWS);
                let parts: Vec<_> = pages.clone().map(|number| (&*self.pages[number], offset, 2 * half as u64)).collect();
                let bytes = if first < len { self.download(&parts)? } else { Vec::new() };
                let (mut keys, mut values) = (Vec::new(), Vec::new());
                for row in first..len {
                    let page = &bytes[(row / PAGE_ROWS - pages.start) * 2 * half..][..2 * half];
                    for head in 0..kv_heads {
                        let at = (head * PAGE_ROWS + row % PAGE_ROWS) * row_bytes;
                        keys.extend_from_slice(&page[at..at + size]);
                        values.extend_from_slice(&page[half + at..half + at + size]);
                    }
                }
                Ok(SlotData::Kv { dtype, rows: len - first, keys, values })
            }
        }
    }

    fn import_rows(&mut self, slot: &str, first: usize, data: &SlotData) -> Result<(), DeviceError> {
        let place = self.ledger.import(slot, first, data)?;
        match (data, self.layout.held[place]) {
            (SlotData::Recurrent(numbers), Held::Recurrent { kind, number }) => {
                let region = Arc::new(self.pool.region(kind.bytes(), usize::MAX, Content::Recurrent)?);
                self.upload(&[(&region, 0, bytemuck::cast_slice(numbers).to_vec())])?;
                self.recurrent[number].current = Some(region);
            }
            (SlotData::Kv { rows, keys, values, .. }, Held::Kv { offset, kv_heads, head_dim, row_bytes, dtype }) => {
                let rows = first..first + rows;
                self.touch(rows.clone())?;
                let (half, size) = ((kv_heads * PAGE_ROWS * row_bytes) as u64, head_dim * dtype.bytes());
                let mut parts = Vec::new();
                let mut start = rows.start;
                while start < rows.end {
                    // The rows of one head in one page lie side by side.
                    let end = rows.end.min((start / PAGE_ROWS + 1) * PAGE_ROWS);
                    for (numbers, part) in [(keys, 0), (values, half)] {
                        for head in 0..kv_heads {
                            let mut bytes = vec![0; (end - start) * row_bytes];
                            for (row, to) in (start..end).zip(bytes.chunks_mut(row_bytes)) {
                                let at = ((row - first) * kv_heads + head) * size;
                                to[..size].copy_from_slice(&numbers[at..at + size]);
                            }
                            let at = (head * PAGE_ROWS + start % PAGE_ROWS) * row_bytes;
                            parts.push((&*self.pages[start / PAGE_ROWS], offset + part + at as u64, bytes));
                        }
                    }
                    start = end;
                }
                if !parts.is_empty() {
                    self.upload(&parts)?;
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
        let recurrent = self.recurrent.iter().flat_map(|kept| [&kept.current, &kept.next]).flatten();
        self.pages.iter().chain(recurrent).map(|region| region.bytes()).sum()
    }
}

//! What a session has on several devices: the states of all parts of a program, which take every step together.

use qhx_ir::{DeviceError, Ledger, Name, Segment, SlotData, State};
use std::{collections::BTreeMap, sync::Arc};

/// The parts that hold each slot, its writer first: the others have copies of the rows.
pub(super) type Homes = BTreeMap<Name, Vec<usize>>;

/// The states of all parts that have slots. They take every step together.
pub(super) struct PartsState {
    ledger: Ledger,
    parts: Vec<Option<Box<dyn State>>>,
    homes: Arc<Homes>,
    /// Rows of the last call that count for the parts already, so that its second half could see them.
    early: usize,
}

impl PartsState {
    /// A fresh one, of the parts' fresh ones.
    pub(super) fn new(ledger: Ledger, parts: Vec<Option<Box<dyn State>>>, homes: Arc<Homes>) -> Self {
        Self { ledger, parts, homes, early: 0 }
    }

    /// The state of a segment, which must be one of the executable with these homes.
    pub(super) fn of<'a>(segment: &'a mut Segment<'_>, homes: &Arc<Homes>) -> Result<Option<&'a mut Self>, DeviceError> {
        let Some(state) = &mut segment.state else { return Ok(None) };
        let own = state.downcast_mut::<Self>().filter(|own| Arc::ptr_eq(&own.homes, homes));
        own.map(Some).ok_or_else(|| DeviceError::Call("the state belongs to another device or another program".into()))
    }

    /// The state of a part, for a call. It has to come back.
    pub(super) fn lend(&mut self, part: usize) -> Option<Box<dyn State>> {
        self.parts[part].take()
    }

    pub(super) fn take_back(&mut self, part: usize, state: Box<dyn State>) {
        self.parts[part] = Some(state);
    }

    /// The first rows of a call count for a part before the others have them.
    pub(super) fn commit_early(&mut self, part: usize, rows: usize) -> Result<(), DeviceError> {
        self.early = rows;
        self.parts[part].as_mut().map_or(Ok(()), |state| state.commit(rows))
    }

    /// A call of so many rows has ended well.
    pub(super) fn end(&mut self, rows: usize, partial: bool) {
        self.ledger.end(rows, partial);
    }

    pub(super) fn begin(&mut self) -> Result<(), DeviceError> {
        self.ledger.begin();
        self.forget_early()?;
        // A step back that one of them could not take leaves them apart.
        match self.parts.iter().flatten().all(|part| part.len() == self.ledger.len()) {
            true => Ok(()),
            false => Err(DeviceError::Call("the parts of the state have come apart: start again from its first row".into())),
        }
    }

    /// The rows of a call that is not committed do not count for any part.
    pub(super) fn forget_early(&mut self) -> Result<(), DeviceError> {
        let len = self.ledger.len();
        match std::mem::take(&mut self.early) {
            0 => Ok(()),
            _ => self.each(|part| if part.len() > len { part.truncate(len) } else { Ok(()) }),
        }
    }

    fn each(&mut self, mut f: impl FnMut(&mut dyn State) -> Result<(), DeviceError>) -> Result<(), DeviceError> {
        self.parts.iter_mut().flatten().try_for_each(|part| f(&mut **part))
    }

    /// A part that holds a slot.
    fn part(&self, number: usize) -> Result<&dyn State, DeviceError> {
        let part = self.parts.get(number).and_then(Option::as_deref);
        part.ok_or_else(|| DeviceError::Call("a part with slots has no state".into()))
    }
}

impl State for PartsState {
    fn len(&self) -> usize {
        self.ledger.len()
    }

    fn capacity(&self) -> usize {
        self.ledger.capacity()
    }

    fn commit(&mut self, rows: usize) -> Result<(), DeviceError> {
        self.ledger.commit(rows)?;
        let (early, len) = (std::mem::take(&mut self.early), self.ledger.len());
        self.each(|part| match rows.checked_sub(early) {
            Some(rest) => part.commit(rest),
            None => part.truncate(len),
        })
    }

    fn truncate(&mut self, len: usize) -> Result<(), DeviceError> {
        self.early = 0;
        self.each(|part| part.truncate(len.min(part.len())))?;
        self.ledger.truncate(len)
    }

    fn fork(&self) -> Result<Box<dyn State>, DeviceError> {
        let parts = self.parts.iter().map(|part| part.as_ref().map(|part| part.fork()).transpose());
        let parts = parts.collect::<Result<_, _>>()?;
        let mut fork = Self { ledger: self.ledger.fork(), parts, homes: self.homes.clone(), early: self.early };
        fork.forget_early()?;
        Ok(Box::new(fork))
    }

    fn export_rows(&self, slot: &str, first: usize) -> Result<SlotData, DeviceError> {
        self.ledger.export(slot, first)?;
        let home = self.homes.get(slot).and_then(|homes| homes.first()).copied().unwrap_or(usize::MAX);
        let mut data = self.part(home)?.export_rows(slot, first)?;
        if let (SlotData::Kv { rows, keys, values, .. }, 1..) = (&mut data, self.early) {
            let (there, kept) = (*rows, self.ledger.len() - first);
            *rows = kept;
            [keys, values].into_iter().for_each(|bytes| bytes.truncate(bytes.len() / there.max(1) * kept));
        }
        Ok(data)
    }

    fn import_rows(&mut self, slot: &str, first: usize, data: &SlotData) -> Result<(), DeviceError> {
        self.forget_early()?;
        self.ledger.import(slot, first, data)?;
        let homes = self.homes.clone();
        for &home in homes.get(slot).into_iter().flatten() {
            if let Some(Some(part)) = self.parts.get_mut(home) {
                part.import_rows(slot, first, data)?;
            }
        }
        Ok(())
    }

    fn set_len(&mut self, len: usize) -> Result<(), DeviceError> {
        self.forget_early()?;
        self.ledger.set_len(len)?;
        self.each(|part| part.set_len(len))
    }

    fn bytes(&self) -> u64 {
        self.parts.iter().flatten().map(|part| part.bytes()).sum()
    }
}

//! The rules by which every state counts its rows: what a call may add, what a commit does, what may be truncated and imported.
//!
//! Devices differ in how they store data, not in these rules: a state has a [`Ledger`] next to its data and consults it first.

use crate::{DeviceError, Name, Slot, SlotData};
use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

/// The number of committed rows of a session, and what has been imported on top of them.
#[derive(Clone, Debug)]
pub struct Ledger {
    slots: Arc<BTreeMap<Name, Slot>>,
    /// Of each slot among all of them.
    places: Arc<HashMap<Name, usize>>,
    capacity: usize,
    len: usize,
    /// The last call, where it may be committed.
    pending: Option<Pending>,
    /// Rows that each slot has after an import, where more than are committed; in the order of `slots`.
    imported: Vec<usize>,
}

/// A call that may be committed.
#[derive(Clone, Copy, Debug)]
struct Pending {
    /// Its valid rows.
    rows: usize,
    /// Whether recurrent slots can commit some of them.
    partial: bool,
}

impl Ledger {
    /// Nothing counts yet.
    pub fn new(slots: &BTreeMap<Name, Slot>, capacity: usize) -> Self {
        let places = slots.keys().enumerate().map(|(place, name)| (name.clone(), place)).collect();
        Self { slots: Arc::new(slots.clone()), places: Arc::new(places), capacity, len: 0, pending: None, imported: vec![0; slots.len()] }
    }

    /// The declared slots.
    pub fn slots(&self) -> &BTreeMap<Name, Slot> {
        &self.slots
    }

    /// Committed rows.
    #[allow(clippy::len_without_is_empty)] // a state has it
    pub fn len(&self) -> usize {
        self.len
    }

    /// The most rows that may count.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// A slot's declaration and its place among all slots.
    pub fn slot(&self, name: &str) -> Result<(usize, &Slot), DeviceError> {
        let found = self.places.get(name).zip(self.slots.get(name));
        found.map(|(&place, slot)| (place, slot)).ok_or_else(|| DeviceError::Call(format!("the state has no slot `{name}`")))
    }

    /// Begins a call: uncommitted rows of an earlier call are discarded.
    pub fn begin(&mut self) {
        self.pending = None;
    }

    /// Ends a successful call of `rows` valid rows, of which recurrent slots can commit some if `partial`, else all or none.
    pub fn end(&mut self, rows: usize, partial: bool) {
        self.pending = Some(Pending { rows, partial });
    }

    /// The valid rows of a call that may be committed.
    pub fn pending_rows(&self) -> usize {
        self.pending.map_or(0, |pending| pending.rows)
    }

    /// Commits the first `rows` rows of the last call.
    pub fn commit(&mut self, rows: usize) -> Result<(), DeviceError> {
        let Some(Pending { rows: pending, partial }) = self.pending else {
            return Err(DeviceError::Call("there is no call to commit".into()));
        };
        let whole = !partial && self.slots.values().any(Slot::is_recurrent);
        if rows > pending || (whole && rows != pending) {
            let why = if whole { "with recurrent slots it is all or none, unless the call says otherwise" } else { "there are no more" };
            return Err(DeviceError::Call(format!("commit of {rows} rows after a call of {pending} valid rows: {why}")));
        }
        self.settle(self.len + rows);
        Ok(())
    }

    /// Keeps only the first `len` rows.
    pub fn truncate(&mut self, len: usize) -> Result<(), DeviceError> {
        if len > self.len {
            return Err(DeviceError::Call(format!("cannot truncate {} rows to {len}", self.len)));
        }
        self.settle(len);
        Ok(())
    }

    /// Checks that a slot has rows from `first` on, and returns its index.
    pub fn export(&self, slot: &str, first: usize) -> Result<usize, DeviceError> {
        let (place, _) = self.slot(slot)?;
        match first <= self.len {
            true => Ok(place),
            false => Err(DeviceError::Call(format!("cannot export slot `{slot}` from row {first} on: it has {} rows", self.len))),
        }
    }

    /// Checks that slot `slot` may store `data` from row `first` on, and returns its index. KV rows either end where the committed ones end or
    /// follow them, to be committed by [`Ledger::set_len`]. Uncommitted rows of a call are discarded.
    pub fn import(&mut self, slot: &str, first: usize, data: &SlotData) -> Result<usize, DeviceError> {
        let (place, declared) = self.slot(slot)?;
        let wrong = |reason: String| Err(DeviceError::Call(format!("import of slot `{slot}`: {reason}")));
        let recurrent = match *declared {
            Slot::Kv { .. } => None,
            Slot::Fifo { rows, channels } => Some(rows * channels),
            Slot::Delta { heads, key_dim, value_dim } => Some(heads * key_dim * value_dim),
        };
        match (data, declared, recurrent) {
            (SlotData::Kv { dtype, rows, keys, values }, Slot::Kv { kv_heads, head_dim, dtype: own, .. }, _) => {
                if dtype != own {
                    return wrong(format!("needs {own:?} rows, found {dtype:?}"));
                }
                let end = first.saturating_add(*rows);
                if end > self.capacity || first > self.len || (end != self.len && first != self.len) {
                    return wrong(format!(
                        "{rows} rows from row {first} on do not match {} committed rows of at most {}",
                        self.len, self.capacity
                    ));
                }
                let bytes = rows * kv_heads * head_dim * dtype.bytes();
                if keys.len() != bytes || values.len() != bytes {
                    return wrong(format!("{rows} rows need {bytes} bytes, found {} and {}", keys.len(), values.len()));
                }
                self.imported[place] = end;
            }
            (SlotData::Recurrent(numbers), _, Some(own)) => {
                if numbers.len() != own {
                    return wrong(format!("needs {own} numbers, found {}", numbers.len()));
                }
            }
            _ => return wrong(format!("the data is of the wrong kind for {declared:?}")),
        }
        self.pending = None;
        Ok(place)
    }

    /// Declares `len` rows as committed; they must have been imported.
    pub fn set_len(&mut self, len: usize) -> Result<(), DeviceError> {
        if len > self.capacity {
            return Err(DeviceError::Call(format!("{len} rows exceed the context of {} rows", self.capacity)));
        }
        for ((name, slot), &imported) in self.slots.iter().zip(&self.imported) {
            if !slot.is_recurrent() && imported.max(self.len) < len {
                return Err(DeviceError::Call(format!("slot `{name}` does not hold {len} rows: import them first")));
            }
        }
        self.settle(len);
        Ok(())
    }

    /// For an independent copy of what is committed.
    pub fn fork(&self) -> Self {
        let mut copy = self.clone();
        copy.settle(self.len);
        copy
    }

    /// From now on `len` rows count, and nothing else is known of.
    fn settle(&mut self, len: usize) {
        self.pending = None;
        self.len = len;
        self.imported.fill(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::KvType;

    fn kv() -> Slot {
        Slot::Kv { kv_heads: 1, head_dim: 2, window: None, dtype: KvType::F16 }
    }

    fn rows(rows: usize) -> SlotData {
        SlotData::Kv { dtype: KvType::F16, rows, keys: vec![0; rows * 4], values: vec![0; rows * 4] }
    }

    #[test]
    fn rows_are_put_behind_or_in_place_of_committed_ones() {
        let mut ledger = Ledger::new(&BTreeMap::from([("a".into(), kv()), ("b".into(), kv())]), 8);
        ledger.import("a", 0, &rows(3)).unwrap();
        assert!(ledger.set_len(3).unwrap_err().to_string().contains("`b` does not hold 3 rows"));
        assert_eq!(ledger.import("b", 0, &rows(4)).unwrap(), 1);
        ledger.set_len(3).unwrap();
        for (first, count) in [(3, 2), (0, 3), (1, 2)] {
            ledger.import("a", first, &rows(count)).unwrap_or_else(|e| panic!("{first}, {count}: {e}"));
        }
        for (first, count) in [(4, 1), (0, 2), (0, 4), (2, 2), (3, 6), (usize::MAX, 2)] {
            let error = ledger.import("a", first, &rows(count)).unwrap_err().to_string();
            assert!(error.contains("do not match 3 committed rows of at most 8"), "{first}, {count}: {error}");
        }
        // The last import of a slot is what it holds.
        ledger.import("a", 3, &rows(1)).unwrap();
        ledger.import("b", 3, &rows(2)).unwrap();
        assert!(ledger.set_len(5).is_err());
        ledger.set_len(4).unwrap();
        assert!(ledger.export("a", 4).is_ok() && ledger.export("a", 5).is_err());
    }

    #[test]
    fn a_copy_knows_only_what_counts() {
        let mut ledger = Ledger::new(&BTreeMap::from([("a".into(), kv())]), 8);
        ledger.begin();
        ledger.end(2, false);
        assert!(ledger.fork().commit(1).is_err());
        ledger.commit(1).unwrap();
        assert_eq!((ledger.len(), ledger.fork().len()), (1, 1));
        assert!(ledger.commit(1).is_err(), "once only");
    }
}

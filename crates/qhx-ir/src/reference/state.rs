//! A session's slots: what is committed, and what the last call would add.

use crate::{Checked, DeviceError, KvType, Ledger, Name, Slot, SlotData, State};
use half::f16;
use std::collections::BTreeMap;

/// The reference interpreter's state. KV slots keep all rows (windows only limit what is read), as f32 values rounded to the slot's type.
#[derive(Clone)]
pub struct ReferenceState {
    ledger: Ledger,
    committed: BTreeMap<Name, Content>,
    /// What the last call would change.
    pending: Pending,
}

/// A slot's data.
#[derive(Clone)]
pub(super) enum Content {
    Kv { keys: Vec<f32>, values: Vec<f32> },
    Recurrent(Vec<f32>),
}

/// What a call would change: for KV slots only the new rows, for recurrent slots the new state.
#[derive(Clone, Default)]
pub(super) struct Pending {
    rows: usize,
    pub(super) slots: BTreeMap<Name, Content>,
    /// What recurrent slots are after each row before the last, where fewer rows than all may be committed. A plain interpreter can afford the copies.
    pub(super) steps: BTreeMap<Name, Vec<Vec<f32>>>,
}

impl Pending {
    pub(super) fn new(rows: usize) -> Self {
        Self { rows, ..Self::default() }
    }
}

impl ReferenceState {
    pub(super) fn new(program: &Checked, capacity: usize) -> Result<Self, DeviceError> {
        let fresh = |(name, slot): (&Name, &Slot)| {
            let content = match *slot {
                Slot::Kv { .. } => Some(Content::Kv { keys: vec![], values: vec![] }),
                Slot::Fifo { rows, channels } => zeros(&[rows, channels]).map(Content::Recurrent),
                Slot::Delta { heads, key_dim, value_dim } => zeros(&[heads, key_dim, value_dim]).map(Content::Recurrent),
            };
            let content = content
                .ok_or_else(|| DeviceError::Resources(format!("not enough memory for slot `{name}` ({slot:?}): use a smaller context")))?;
            Ok((name.clone(), content))
        };
        let committed = program.slots.iter().map(fresh).collect::<Result<_, DeviceError>>()?;
        Ok(Self { ledger: Ledger::new(&program.slots, capacity), committed, pending: Pending::default() })
    }

    /// The reference state behind `state`, which must belong to this program.
    pub(super) fn of<'a>(state: &'a dyn State, program: &Checked) -> Result<&'a Self, DeviceError> {
        let own = state.downcast_ref::<Self>().filter(|own| *own.ledger.slots() == program.slots);
        own.ok_or_else(|| foreign(program))
    }

    pub(super) fn of_mut<'a>(state: &'a mut dyn State, program: &Checked) -> Result<&'a mut Self, DeviceError> {
        let own = state.downcast_mut::<Self>().filter(|own| *own.ledger.slots() == program.slots);
        own.ok_or_else(|| foreign(program))
    }

    pub(super) fn content(&self, slot: &Name) -> &Content {
        &self.committed[slot]
    }

    pub(super) fn forget_pending(&mut self) {
        self.ledger.begin();
    }

    pub(super) fn set_pending(&mut self, pending: Pending) {
        self.ledger.end(pending.rows, pending.rows == 1 || !pending.steps.is_empty());
        self.pending = pending;
    }

    /// Elements in one row of a KV slot.
    fn row_numbers(slot: &Slot) -> usize {
        match *slot {
            Slot::Kv { kv_heads, head_dim, .. } => kv_heads * head_dim,
            _ => 0,
        }
    }

    /// Drops the uncommitted rows.
    fn cut_rows(&mut self) {
        self.pending = Pending::default();
        for (name, content) in &mut self.committed {
            if let Content::Kv { keys, values } = content {
                let numbers = self.ledger.len() * Self::row_numbers(&self.ledger.slots()[name]);
                keys.truncate(numbers);
                values.truncate(numbers);
            }
        }
    }
}

impl State for ReferenceState {
    fn len(&self) -> usize {
        self.ledger.len()
    }

    fn capacity(&self) -> usize {
        self.ledger.capacity()
    }

    fn commit(&mut self, rows: usize) -> Result<(), DeviceError> {
        self.ledger.commit(rows)?;
        let Pending { rows: all, slots, mut steps } = std::mem::take(&mut self.pending);
        for (name, new) in slots {
            let row_numbers = Self::row_numbers(&self.ledger.slots()[&name]);
            match (self.committed.get_mut(&name), new) {
                (Some(Content::Kv { keys, values }), Content::Kv { keys: new_keys, values: new_values }) => {
                    keys.extend_from_slice(&new_keys[..rows * row_numbers]);
                    values.extend_from_slice(&new_values[..rows * row_numbers]);
                }
                (Some(_), Content::Recurrent(_)) if rows == 0 => {}
                (Some(old), Content::Recurrent(_)) if rows < all => {
                    *old = Content::Recurrent(steps.remove(&name).map_or(vec![], |mut steps| steps.swap_remove(rows - 1)));
                }
                (Some(old), new) => *old = new,
                (None, _) => unreachable!("a call changes declared slots only"),
            }
        }
        Ok(())
    }

    fn truncate(&mut self, len: usize) -> Result<(), DeviceError> {
        self.ledger.truncate(len)?;
        self.cut_rows();
        Ok(())
    }

    fn fork(&self) -> Result<Box<dyn State>, DeviceError> {
        let mut copy = Self { ledger: self.ledger.fork(), ..self.clone() };
        copy.cut_rows();
        Ok(Box::new(copy))
    }

    fn export_rows(&self, slot: &str, first: usize) -> Result<SlotData, DeviceError> {
        self.ledger.export(slot, first)?;
        let declared = &self.ledger.slots()[slot];
        Ok(match (&self.committed[slot], declared) {
            (Content::Kv { keys, values }, Slot::Kv { dtype, .. }) => {
                let row = Self::row_numbers(declared);
                let numbers = first * row..self.ledger.len() * row;
                let [keys, values] = [keys, values].map(|all| to_bytes(&all[numbers.clone()], *dtype));
                SlotData::Kv { dtype: *dtype, rows: self.ledger.len() - first, keys, values }
            }
            (Content::Kv { .. }, _) => unreachable!("only KV slots hold KV rows"),
            (Content::Recurrent(numbers), _) => SlotData::Recurrent(numbers.clone()),
        })
    }

    fn import_rows(&mut self, slot: &str, first: usize, data: &SlotData) -> Result<(), DeviceError> {
        self.ledger.import(slot, first, data)?;
        self.pending = Pending::default();
        let row = Self::row_numbers(&self.ledger.slots()[slot]);
        match (data, self.committed.get_mut(slot)) {
            (SlotData::Kv { dtype, keys: new_keys, values: new_values, .. }, Some(Content::Kv { keys, values })) => {
                for (all, new) in [(keys, new_keys), (values, new_values)] {
                    all.truncate(first * row);
                    all.extend(dtype.numbers(new));
                }
            }
            (SlotData::Recurrent(numbers), Some(Content::Recurrent(own))) => own.clone_from(numbers),
            _ => unreachable!("the ledger checked the kind"),
        }
        Ok(())
    }

    fn set_len(&mut self, len: usize) -> Result<(), DeviceError> {
        self.ledger.set_len(len)?;
        self.cut_rows();
        Ok(())
    }

    fn bytes(&self) -> u64 {
        let numbers = |content: &Content| match content {
            Content::Kv { keys, values } => keys.len() + values.len(),
            Content::Recurrent(numbers) => numbers.len(),
        };
        self.committed.values().chain(self.pending.slots.values()).map(|content| 4 * numbers(content) as u64).sum()
    }
}

/// `count` zeros, if there is enough memory.
fn zeros(sizes: &[usize]) -> Option<Vec<f32>> {
    let count = sizes.iter().try_fold(1usize, |n, &size| n.checked_mul(size))?;
    let mut numbers = Vec::new();
    numbers.try_reserve_exact(count).ok()?;
    numbers.resize(count, 0.0);
    Some(numbers)
}

/// A value as a KV slot stores it.
pub(super) fn round_to(x: f32, dtype: KvType) -> f32 {
    match dtype {
        KvType::F32 => x,
        KvType::F16 => f16::from_f32(x).to_f32(),
    }
}

fn to_bytes(numbers: &[f32], dtype: KvType) -> Vec<u8> {
    match dtype {
        KvType::F32 => numbers.iter().flat_map(|x| x.to_le_bytes()).collect(),
        KvType::F16 => numbers.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
    }
}

fn foreign(program: &Checked) -> DeviceError {
    DeviceError::Call(format!("program `{}`: the state belongs to another device or another program", program.name))
}

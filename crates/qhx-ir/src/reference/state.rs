//! A session's slots: what is committed, and what the last call would add.

use crate::{Checked, DeviceError, KvType, Name, Slot, SlotData, State};
use half::f16;
use std::{any::Any, collections::BTreeMap};

/// The reference interpreter's state. KV slots keep all rows (windows only limit what is read), as f32 numbers already rounded to the slot's type.
#[derive(Clone)]
pub struct ReferenceState {
    slots: BTreeMap<Name, Slot>,
    capacity: usize,
    len: usize,
    committed: BTreeMap<Name, Content>,
    pending: Option<Pending>,
}

/// A slot's numbers.
#[derive(Clone)]
pub(super) enum Content {
    Kv { keys: Vec<f32>, values: Vec<f32> },
    Recurrent(Vec<f32>),
}

/// What a call would change: KV slots hold the new rows only, recurrent slots what they would become.
#[derive(Clone)]
pub(super) struct Pending {
    rows: usize,
    pub(super) slots: BTreeMap<Name, Content>,
}

impl Pending {
    pub(super) fn new(rows: usize) -> Self {
        Self { rows, slots: BTreeMap::new() }
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
            let content = content.ok_or_else(|| DeviceError::Resources(format!("there is no memory for slot `{name}`: {slot:?}")))?;
            Ok((name.clone(), content))
        };
        let committed = program.slots.iter().map(fresh).collect::<Result<_, DeviceError>>()?;
        Ok(Self { slots: program.slots.clone(), capacity, len: 0, committed, pending: None })
    }

    /// The reference state behind `state`, which must be one of this program.
    pub(super) fn of<'a>(state: &'a dyn State, program: &Checked) -> Result<&'a Self, DeviceError> {
        let own = state.as_any().downcast_ref::<Self>().filter(|own| own.slots == program.slots);
        own.ok_or_else(|| foreign(program))
    }

    pub(super) fn of_mut<'a>(state: &'a mut dyn State, program: &Checked) -> Result<&'a mut Self, DeviceError> {
        let own = state.as_any_mut().downcast_mut::<Self>().filter(|own| own.slots == program.slots);
        own.ok_or_else(|| foreign(program))
    }

    pub(super) fn content(&self, slot: &Name) -> &Content {
        &self.committed[slot]
    }

    pub(super) fn forget_pending(&mut self) {
        self.pending = None;
    }

    pub(super) fn set_pending(&mut self, pending: Pending) {
        self.pending = Some(pending);
    }

    fn slot(&self, name: &str) -> Result<(&Name, &Slot), DeviceError> {
        self.slots.get_key_value(name).ok_or_else(|| DeviceError::Call(format!("the state has no slot `{name}`")))
    }

    /// Numbers in one row of a KV slot.
    fn row_numbers(slot: &Slot) -> usize {
        match *slot {
            Slot::Kv { kv_heads, head_dim, .. } => kv_heads * head_dim,
            _ => 0,
        }
    }

    fn cut_rows(&mut self, len: usize) {
        for (name, content) in &mut self.committed {
            if let Content::Kv { keys, values } = content {
                let numbers = len * Self::row_numbers(&self.slots[name]);
                keys.truncate(numbers);
                values.truncate(numbers);
            }
        }
        self.len = len;
    }
}

impl State for ReferenceState {
    fn len(&self) -> usize {
        self.len
    }

    fn capacity(&self) -> usize {
        self.capacity
    }

    fn commit(&mut self, rows: usize) -> Result<(), DeviceError> {
        let Some(pending) = &self.pending else {
            return Err(DeviceError::Call("there is no call to commit".into()));
        };
        let recurrent = self.slots.values().any(Slot::is_recurrent);
        if rows > pending.rows || (recurrent && rows != pending.rows) {
            let why = if recurrent { "a state with recurrent slots commits all or nothing" } else { "more cannot count" };
            return Err(DeviceError::Call(format!("commit of {rows} rows after a call of {} valid rows: {why}", pending.rows)));
        }
        let new = self.pending.take().map(|pending| pending.slots).unwrap_or_default();
        for (name, new) in new {
            let row_numbers = Self::row_numbers(&self.slots[&name]);
            match (self.committed.get_mut(&name), new) {
                (Some(Content::Kv { keys, values }), Content::Kv { keys: new_keys, values: new_values }) => {
                    keys.extend_from_slice(&new_keys[..rows * row_numbers]);
                    values.extend_from_slice(&new_values[..rows * row_numbers]);
                }
                (Some(old), new) => *old = new,
                (None, _) => unreachable!("a call makes content for declared slots only"),
            }
        }
        self.len += rows;
        Ok(())
    }

    fn truncate(&mut self, len: usize) -> Result<(), DeviceError> {
        if len > self.len {
            return Err(DeviceError::Call(format!("cannot truncate {} rows to {len}", self.len)));
        }
        self.pending = None;
        self.cut_rows(len);
        Ok(())
    }

    fn fork(&self) -> Box<dyn State> {
        Box::new(Self { pending: None, ..self.clone() })
    }

    fn export(&self, slot: &str) -> Result<SlotData, DeviceError> {
        let (name, slot) = self.slot(slot)?;
        Ok(match (&self.committed[name], slot) {
            (Content::Kv { keys, values }, Slot::Kv { dtype, .. }) => {
                SlotData::Kv { dtype: *dtype, rows: self.len, keys: to_bytes(keys, *dtype), values: to_bytes(values, *dtype) }
            }
            (Content::Kv { .. }, _) => unreachable!("only KV slots hold KV rows"),
            (Content::Recurrent(numbers), _) => SlotData::Recurrent(numbers.clone()),
        })
    }

    fn import(&mut self, slot: &str, data: &SlotData) -> Result<(), DeviceError> {
        let (name, slot) = self.slot(slot)?;
        let name = name.clone();
        let wrong = |reason: String| Err(DeviceError::Call(format!("import of slot `{name}`: {reason}")));
        let content = match (data, slot, &self.committed[&name]) {
            (SlotData::Kv { dtype, rows, keys, values }, Slot::Kv { dtype: own, .. }, _) => {
                if dtype != own {
                    return wrong(format!("needs {own:?} rows, found {dtype:?}"));
                }
                if *rows > self.capacity || (self.len > 0 && *rows != self.len) {
                    return wrong(format!("{rows} rows do not fit {} committed rows of at most {}", self.len, self.capacity));
                }
                let bytes = rows * Self::row_numbers(slot) * dtype.bytes();
                if keys.len() != bytes || values.len() != bytes {
                    return wrong(format!("{rows} rows need {bytes} bytes, found {} and {}", keys.len(), values.len()));
                }
                Content::Kv { keys: from_bytes(keys, *dtype), values: from_bytes(values, *dtype) }
            }
            (SlotData::Recurrent(numbers), _, Content::Recurrent(own)) => {
                if numbers.len() != own.len() {
                    return wrong(format!("needs {} numbers, found {}", own.len(), numbers.len()));
                }
                Content::Recurrent(numbers.clone())
            }
            _ => return wrong(format!("the data is not of the kind of {slot:?}")),
        };
        self.pending = None;
        self.committed.insert(name, content);
        Ok(())
    }

    fn set_len(&mut self, len: usize) -> Result<(), DeviceError> {
        if len > self.capacity {
            return Err(DeviceError::Call(format!("{len} rows are beyond the context of {} rows", self.capacity)));
        }
        for (name, content) in &self.committed {
            if let Content::Kv { keys, .. } = content
                && keys.len() < len * Self::row_numbers(&self.slots[name])
            {
                return Err(DeviceError::Call(format!("slot `{name}` does not hold {len} rows: import them first")));
            }
        }
        self.pending = None;
        self.cut_rows(len);
        Ok(())
    }

    fn bytes(&self) -> u64 {
        let numbers = |content: &Content| match content {
            Content::Kv { keys, values } => keys.len() + values.len(),
            Content::Recurrent(numbers) => numbers.len(),
        };
        let pending = self.pending.iter().flat_map(|p| p.slots.values());
        self.committed.values().chain(pending).map(|content| 4 * numbers(content) as u64).sum()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

/// So many zeros, where there is memory for them.
fn zeros(sizes: &[usize]) -> Option<Vec<f32>> {
    let count = sizes.iter().try_fold(1usize, |n, &size| n.checked_mul(size))?;
    let mut numbers = Vec::new();
    numbers.try_reserve_exact(count).ok()?;
    numbers.resize(count, 0.0);
    Some(numbers)
}

/// A number as a KV slot keeps it.
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

fn from_bytes(bytes: &[u8], dtype: KvType) -> Vec<f32> {
    match dtype {
        KvType::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        KvType::F16 => bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
    }
}

fn foreign(program: &Checked) -> DeviceError {
    DeviceError::Call(format!("program `{}`: the state was made by another device or for another program", program.name))
}

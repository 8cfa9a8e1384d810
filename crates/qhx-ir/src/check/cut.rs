//! A part of a program as a program of its own.

use super::{CheckError, Checked, ValueType};
use crate::{Input, Name, Op, OpKind, Output, Program, Stage, program::Generator};
use std::collections::{BTreeMap, BTreeSet, HashSet};

impl Checked {
    /// The program of some of the ops, given by their places. Values that cross the cut become inputs ([`Generator::Carried`]) and outputs
    /// (named like the value); slots, rotaries and weights are those that the ops name. A KV slot that is written outside and only read here is kept here as
    /// well: its first reader gets the writer's keys and values, so that the new rows cross the cut with every call.
    ///
    /// Takes time by the size of the part, not of the program: cutting a program into all its stages is linear in its length.
    pub fn cut(&self, ops: impl IntoIterator<Item = usize>) -> Result<Self, CheckError> {
        let places: BTreeSet<usize> = ops.into_iter().collect();
        let part = Part { whole: self, ops: self.with_own_writers(&places), inside: places.iter().copied().collect() };
        let made_here = |value: &Name| self.index.makers.get(value).is_some_and(|op| part.inside.contains(op));
        let keep_tap = |stage: &Stage| Stage {
            name: stage.name.clone(),
            tap: stage.tap.clone().filter(made_here),
            rotated: stage.rotated,
            centred: stage.centred,
        };
        let named = |names: fn(&OpKind) -> Vec<&Name>| part.ops.iter().flat_map(move |op| names(&op.op));
        Self::new(Program {
            program_version: self.program_version,
            name: self.name.clone(),
            inputs: part.inputs(),
            outputs: part.outputs(),
            slots: declared(&self.slots, named(|op| op.slot().into_iter().collect())),
            epochs: self.epochs.clone(),
            rotaries: declared(&self.rotaries, named(|op| rotary_of(op).into_iter().collect())),
            stages: part.stages().into_iter().map(|stage| keep_tap(&self.stages[stage])).collect(),
            weights: declared(&self.weights, named(OpKind::weights)),
            ops: part.ops.clone(),
        })
    }

    /// The ops at some places, of those that only read a slot which another op wrote the first made its writer.
    fn with_own_writers(&self, places: &BTreeSet<usize>) -> Vec<Op> {
        let mut own: HashSet<Name> = HashSet::new();
        let with_writer = |&place: &usize| {
            let mut op = self.ops[place].clone();
            if let OpKind::Attend { kv, slot: Some(slot), .. } = &mut op.op
                && own.insert(slot.clone())
                && kv.is_none()
            {
                let writer = self.index.slot_users[slot].first();
                *kv = writer.and_then(|&writer| match &self.ops[writer].op {
                    OpKind::Attend { kv, .. } => kv.clone(),
                    _ => None,
                });
            }
            op
        };
        places.iter().map(with_writer).collect()
    }
}

/// What is cut out.
struct Part<'a> {
    whole: &'a Checked,
    ops: Vec<Op>,
    /// Their places.
    inside: HashSet<usize>,
}

impl Part<'_> {
    /// The program's own inputs that the ops read, then the values that come across the cut, both in the program's order.
    fn inputs(&self) -> Vec<Input> {
        let index = &self.whole.index;
        let (mut own, mut carried) = (BTreeSet::<usize>::new(), BTreeSet::new());
        for name in self.ops.iter().flat_map(|op| op.op.inputs()) {
            match index.makers.get(name) {
                Some(op) if !self.inside.contains(op) => _ = carried.insert((*op, name)),
                Some(_) => {}
                None => own.extend(index.inputs.get(name)),
            }
        }
        let carry = |(_, name): (usize, &Name)| {
            let ValueType { dtype, shape } = self.whole.value_type(name).clone();
            Input { name: name.clone(), dtype, shape, generator: Generator::Carried }
        };
        own.into_iter().map(|place| self.whole.inputs[place].clone()).chain(carried.into_iter().map(carry)).collect()
    }

    /// The program's own outputs that are made here, then the values that cross the cut, in the order in which they are read.
    fn outputs(&self) -> Vec<Output> {
        let index = &self.whole.index;
        let mut own = BTreeSet::new();
        let mut crossing: BTreeMap<(usize, usize), Name> = BTreeMap::new();
        for name in self.ops.iter().flat_map(|op| op.outputs()) {
            own.extend(index.outputs.get(&name).into_iter().flatten());
            if let Some(first) = self.first_read_outside(&name) {
                crossing.insert(first, name);
            }
        }
        let mut outputs: Vec<Output> = own.into_iter().map(|&place| self.whole.outputs[place].clone()).collect();
        let named: HashSet<Name> = outputs.iter().map(|output| output.name.clone()).collect();
        let crossing = crossing.into_values().filter(|name| !named.contains(name));
        outputs.extend(crossing.map(|name| Output { name: name.clone(), value: name }));
        outputs
    }

    /// Where a value is first read outside: the op's place, and which of its inputs it is. An op that only reads a slot may have to write a copy of it
    /// in a part of its own, so it counts as a reader of what is written there.
    fn first_read_outside(&self, value: &Name) -> Option<(usize, usize)> {
        let index = &self.whole.index;
        let outside = |op: &&usize| !self.inside.contains(op);
        let mut first: Option<(usize, usize)> = None;
        let mut found = |at: (usize, usize)| first = Some(first.map_or(at, |first| first.min(at)));
        for &reader in index.readers.get(value).into_iter().flatten() {
            let op = &self.whole.ops[reader].op;
            if let (true, Some(input)) = (outside(&&reader), op.inputs().iter().position(|name| *name == value)) {
                found((reader, input));
            }
            if let OpKind::Attend { kv: Some(kv), slot: Some(slot), .. } = op
                && let Some(input) = [&kv.k, &kv.v].iter().position(|name| *name == value)
            {
                let readers = index.slot_users[slot].iter().filter(outside).filter(|&&user| user != reader);
                readers.for_each(|&user| found((user, 1 + input)));
            }
        }
        first
    }

    /// The stages of the ops, and those whose effect a value shows that is made here.
    fn stages(&self) -> BTreeSet<usize> {
        let index = &self.whole.index;
        let shown = self.ops.iter().flat_map(|op| op.outputs()).filter_map(|value| index.taps.get(&value)).flatten();
        self.inside.iter().map(|&op| index.stage_of_op[op]).chain(shown.copied()).collect()
    }
}

/// Those declarations that are named.
fn declared<'n, V: Clone>(all: &BTreeMap<Name, V>, names: impl Iterator<Item = &'n Name>) -> BTreeMap<Name, V> {
    names.filter_map(|name| all.get_key_value(name)).map(|(name, value)| (name.clone(), value.clone())).collect()
}

fn rotary_of(op: &OpKind) -> Option<&Name> {
    match op {
        OpKind::Rope { rotary, .. } => Some(rotary),
        _ => None,
    }
}

//! Shape inference and validation: what makes a [`Program`] a [`Checked`] one.
//!
//! Runs at forge time and again at load, before anything is allocated. Errors name the op, its path and its stage.

mod infer;

use crate::{
    DType, Dim, Encoding, KeyValue, Name, Op, OpKind, Program, Rotary, Shape, Slot, Stage, dim, dim::show_shape, is_under,
    program::Generator,
};
use std::{
    collections::{BTreeSet, HashMap},
    ops::Deref,
    sync::Arc,
};
use thiserror::Error;

/// Why a program is refused.
#[derive(Debug, Error, PartialEq)]
pub enum CheckError {
    /// An op does not type-check.
    #[error("program `{program}`, stage `{stage}`, op `{path}` ({op}): {reason}")]
    Op {
        /// The program's name.
        program: Name,
        /// The stage under which the op lies (`?` where it lies under none).
        stage: Name,
        /// The op's path.
        path: Name,
        /// The op's name.
        op: &'static str,
        /// What was expected and found.
        reason: String,
    },
    /// Something else in the program is wrong.
    #[error("program `{program}`: {reason}")]
    Program {
        /// The program's name.
        program: Name,
        /// What was expected and found.
        reason: String,
    },
}

/// Type and shape of a value.
#[derive(Clone, Debug, PartialEq)]
pub struct ValueType {
    /// Element type.
    pub dtype: DType,
    /// Shape.
    pub shape: Shape,
}

/// A program that has passed all checks, with the type of every value. Devices take nothing else.
#[derive(Clone, Debug)]
pub struct Checked {
    program: Arc<Program>,
    types: Arc<HashMap<Name, ValueType>>,
    limits: Arc<CallLimits>,
}

/// What every call of a program must respect, worked out once.
#[derive(Debug)]
pub(crate) struct CallLimits {
    /// Segments start at multiples of this: the least common multiple of all quotients of `T` in the program.
    pub(crate) segment_step: usize,
    /// Quotients without remainder, of any value.
    pub(crate) exact: Vec<Dim>,
    /// Inputs that are used as row numbers: the input's place, and of how many rows.
    pub(crate) indexes: Vec<(usize, Dim)>,
}

impl CallLimits {
    fn of(program: &Program, types: &HashMap<Name, ValueType>) -> Reason<Self> {
        let place = |name: &Name| program.inputs.iter().position(|i| i.name == *name);
        let table = |name: &Name| Dim::Fixed(program.weights[name].shape[0]);
        let indexes = program.ops.iter().filter_map(|op| match &op.op {
            OpKind::Embed { ids: index, table: weight, .. }
            | OpKind::Interpolate { index, table: weight, .. }
            | OpKind::Experts { experts: index, gate: weight, .. } => Some((place(index)?, table(weight))),
            OpKind::Gather { x, rows: index } | OpKind::ScatterRows { x, at: index, .. } | OpKind::ScatterAddRows { x, at: index, .. } => {
                Some((place(index)?, types[x].shape[0]))
            }
            _ => None,
        });
        let quotients = types.values().filter_map(|v| v.shape.first()?.rows_per_row());
        let segment_step = quotients.into_iter().try_fold(1, dim::least_common_multiple);
        let segment_step = segment_step.ok_or("the quotients of T have no common multiple within reach")?;
        let dims = types.values().flat_map(|v| &v.shape).copied();
        let exact: BTreeSet<Dim> = dims.filter(|d| matches!(d, Dim::Exact(..))).collect();
        Ok(Self { segment_step, exact: exact.into_iter().collect(), indexes: indexes.collect() })
    }
}

impl Checked {
    /// Checks `program`.
    pub fn new(program: Program) -> Result<Self, CheckError> {
        let types = Checker { program: &program, types: HashMap::new(), written: Vec::new() }.run()?;
        let limits = CallLimits::of(&program, &types).map_err(|reason| CheckError::Program { program: program.name.clone(), reason })?;
        let limits = Arc::new(limits);
        Ok(Self { program: Arc::new(program), types: Arc::new(types), limits })
    }

    pub(crate) fn limits(&self) -> &CallLimits {
        &self.limits
    }

    /// The type of a value of this program.
    pub fn value_type(&self, value: &str) -> &ValueType {
        &self.types[value]
    }

    /// The program of the ops for which `keep` holds. Values that cross the cut become inputs ([`Generator::Carried`]) and outputs
    /// (named like the value); slots, rotaries and weights are those that the kept ops name. A KV slot that is written outside and only read here is kept here as
    /// well: its first reader gets the writer's keys and values, so that the new rows cross the cut with every call.
    pub fn cut(&self, keep: impl Fn(&Op) -> bool) -> Result<Self, CheckError> {
        let (ops, writers) = self.with_own_writers(&keep);
        let whole = &Program { ops, ..(*self.program).clone() };
        let (kept, other): (Vec<&Op>, Vec<&Op>) = whole.ops.iter().partition(|op| keep(op));
        let made: Vec<Name> = kept.iter().flat_map(|op| op.outputs()).collect();
        let read: Vec<&Name> = kept.iter().flat_map(|op| op.op.inputs()).collect();
        let mut inputs: Vec<_> = whole.inputs.iter().filter(|i| read.contains(&&i.name)).cloned().collect();
        let mut outputs: Vec<_> = whole.outputs.iter().filter(|o| made.contains(&o.value)).cloned().collect();
        for op in &other {
            for name in op.outputs().iter().filter(|name| read.contains(name)) {
                let ValueType { dtype, shape } = self.value_type(name).clone();
                inputs.push(crate::Input { name: name.clone(), dtype, shape, generator: Generator::Carried });
            }
            // Who only reads a slot may have to write a copy of it in a part of its own.
            let copied = match &op.op {
                OpKind::Attend { kv: None, slot: Some(slot), .. } => writers.get(slot),
                _ => None,
            };
            let copied = copied.into_iter().flat_map(|kv| [&kv.k, &kv.v]);
            for name in op.op.inputs().into_iter().chain(copied).filter(|name| made.contains(name)) {
                if !outputs.iter().any(|o| o.name == *name) {
                    outputs.push(crate::Output { name: name.clone(), value: name.clone() });
                }
            }
        }
        let named = |names: &dyn Fn(&OpKind) -> Vec<&Name>, name: &Name| kept.iter().any(|op| names(&op.op).contains(&name));
        let named_stage =
            |s: &Stage| kept.iter().any(|op| is_under(&op.path, &s.name)) || s.tap.as_ref().is_some_and(|tap| made.contains(tap));
        let keep_tap = |s: &Stage| Stage { name: s.name.clone(), tap: s.tap.clone().filter(|tap| made.contains(tap)) };
        Self::new(Program {
            inputs,
            outputs,
            slots: whole.slots.iter().filter(|(n, _)| named(&|op| op.slot().into_iter().collect(), n)).map(own).collect(),
            rotaries: whole.rotaries.iter().filter(|(n, _)| named(&|op| rotary_of(op).into_iter().collect(), n)).map(own).collect(),
            weights: whole.weights.iter().filter(|(n, _)| named(&OpKind::weights, n)).map(own).collect(),
            stages: whole.stages.iter().filter(|s| named_stage(s)).map(keep_tap).collect(),
            ops: kept.iter().map(|&op| op.clone()).collect(),
            ..whole.clone()
        })
    }

    /// The ops, of those for which `keep` holds the first reader of a slot that another op wrote made its writer; and who writes each slot.
    fn with_own_writers(&self, keep: &impl Fn(&Op) -> bool) -> (Vec<Op>, HashMap<Name, KeyValue>) {
        let mut ops = self.program.ops.clone();
        let mut writers: HashMap<Name, KeyValue> = HashMap::new();
        let mut own: BTreeSet<Name> = BTreeSet::new();
        for op in &mut ops {
            let kept = keep(op);
            let OpKind::Attend { kv, slot: Some(slot), .. } = &mut op.op else { continue };
            match kv {
                Some(kv) => _ = writers.insert(slot.clone(), kv.clone()),
                None if kept && !own.contains(slot) => *kv = writers.get(slot).cloned(),
                None => {}
            }
            if kept {
                own.insert(slot.clone());
            }
        }
        (ops, writers)
    }
}

impl Deref for Checked {
    type Target = Program;
    fn deref(&self) -> &Program {
        &self.program
    }
}

fn own<V: Clone>((name, value): (&Name, &V)) -> (Name, V) {
    (name.clone(), value.clone())
}

fn rotary_of(op: &OpKind) -> Option<&Name> {
    match op {
        OpKind::Rope { rotary, .. } => Some(rotary),
        _ => None,
    }
}

struct Checker<'a> {
    program: &'a Program,
    types: HashMap<Name, ValueType>,
    /// KV slots written so far in the op order.
    written: Vec<&'a Name>,
}

type Reason<T> = Result<T, String>;

impl<'a> Checker<'a> {
    fn run(mut self) -> Result<HashMap<Name, ValueType>, CheckError> {
        let program = self.program;
        let wrong = |reason| CheckError::Program { program: program.name.clone(), reason };
        self.check_declarations().map_err(wrong)?;
        for op in &program.ops {
            let stage = program.stage_of(&op.path);
            let fail = |reason| CheckError::Op {
                program: program.name.clone(),
                stage: stage.map_or("?".into(), |s| s.name.clone()),
                path: op.path.clone(),
                op: op.op.name(),
                reason,
            };
            if stage.is_none() {
                return Err(fail("lies under no stage of the program".into()));
            }
            let types = self.infer(op).map_err(fail)?;
            for (name, value_type) in op.outputs().into_iter().zip(types) {
                if dim::volume(&value_type.shape).is_none() {
                    return Err(fail(format!("its result {} has two symbolic dimensions or is too large", show_shape(&value_type.shape))));
                }
                if self.types.insert(name.clone(), value_type).is_some() {
                    return Err(fail(format!("the value `{name}` is made twice")));
                }
            }
        }
        let known = |what: &str, value: &Name| match self.types.contains_key(value) {
            true => Ok(()),
            false => Err(wrong(format!("{what} names the value `{value}`, which nothing makes"))),
        };
        program.outputs.iter().try_for_each(|o| known(&format!("output `{}`", o.name), &o.value))?;
        program.stages.iter().try_for_each(|s| s.tap.iter().try_for_each(|tap| known(&format!("stage `{}`", s.name), tap)))?;
        let named = |list: &dyn Fn(&OpKind) -> Vec<&Name>, name: &Name| program.ops.iter().any(|op| list(&op.op).contains(&name));
        if let Some(name) = program.weights.keys().find(|n| !named(&OpKind::weights, n)) {
            return Err(wrong(format!("weight `{name}` is used by no op")));
        }
        if let Some(name) = program.slots.keys().find(|n| !named(&|op| op.slot().into_iter().collect(), n)) {
            return Err(wrong(format!("slot `{name}` is used by no op")));
        }
        Ok(self.types)
    }

    fn check_declarations(&mut self) -> Reason<()> {
        let program = self.program;
        if program.ops.is_empty() || program.outputs.is_empty() {
            return Err("a program needs ops and outputs".into());
        }
        for input in &program.inputs {
            dim::volume(&input.shape).ok_or_else(|| format!("input `{}` has two symbolic dimensions or is too large", input.name))?;
            let value_type = ValueType { dtype: input.dtype, shape: input.shape.clone() };
            if self.types.insert(input.name.clone(), value_type).is_some() {
                return Err(format!("input `{}` is declared twice", input.name));
            }
        }
        for (i, output) in program.outputs.iter().enumerate() {
            if program.outputs[..i].iter().any(|o| o.name == output.name) {
                return Err(format!("output `{}` is declared twice", output.name));
            }
        }
        for (name, weight) in &program.weights {
            let columns = weight.shape.last().copied().unwrap_or(0);
            let numbers = weight.shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
            if weight.shape.is_empty() || numbers.is_none_or(|n| n == 0 || n > 1 << 48) || weight.encoding.row_bytes(columns).is_none() {
                return Err(format!("weight `{name}` has the impossible shape {:?}", weight.shape));
            }
        }
        for (name, slot) in &program.slots {
            let sizes = match *slot {
                Slot::Kv { kv_heads, head_dim, window, .. } => [kv_heads, head_dim, window.unwrap_or(1)],
                Slot::Fifo { rows, channels } => [rows, channels, 1],
                Slot::Delta { heads, key_dim, value_dim } => [heads, key_dim, value_dim],
            };
            if sizes.iter().any(|&n| n == 0 || n > 1 << 24) {
                return Err(format!("slot `{name}` has an impossible size: {slot:?}"));
            }
        }
        if program.epochs.windows(2).any(|w| w[0] >= w[1]) {
            return Err(format!("epochs {:?} must rise", program.epochs));
        }
        program.rotaries.iter().try_for_each(|(name, rotary)| self.check_rotary(rotary).map_err(|e| format!("rotary `{name}`: {e}")))
    }

    fn check_rotary(&self, rotary: &Rotary) -> Reason<()> {
        let epochs = self.program.epochs.len() + 1;
        if rotary.variants.len() != 1 && rotary.variants.len() != epochs {
            return Err(format!("needs 1 or {epochs} variants, has {}", rotary.variants.len()));
        }
        let mut end = 0;
        for &(start, length) in &rotary.blocks {
            if start < end || length == 0 || length % 2 != 0 || start.checked_add(length).is_none() {
                return Err(format!("blocks {:?} must be of even length, rising and apart", rotary.blocks));
            }
            end = start + length;
        }
        let frequencies = rotary.blocks.iter().map(|b| b.1 / 2).sum::<usize>();
        if rotary.variants.iter().any(|v| v.inv_freq.len() != frequencies) {
            return Err(format!("its blocks need {frequencies} frequencies in each variant"));
        }
        if !rotary.streams.is_empty() && rotary.streams.len() != frequencies {
            return Err(format!("its streams must name all {frequencies} frequencies or none"));
        }
        if rotary.variants.iter().any(|v| !v.amplitude.is_finite() || v.inv_freq.iter().any(|f| !f.is_finite())) {
            return Err("frequencies and amplitude must be finite".into());
        }
        Ok(())
    }
}

/// Whether `tensor` is what `program` declares under `name`; the error names both.
pub fn check_weight(program: &Program, name: &str, encoding: Encoding, shape: &[usize]) -> Result<(), CheckError> {
    let wrong = |reason| Err(CheckError::Program { program: program.name.clone(), reason });
    match program.weights.get(name) {
        None => wrong(format!("has no weight `{name}`")),
        Some(w) if w.encoding != encoding => wrong(format!("weight `{name}` must be {}, the stored one is {encoding}", w.encoding)),
        Some(w) if w.shape != shape => wrong(format!("weight `{name}` must have shape {:?}, the stored one has {shape:?}", w.shape)),
        Some(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests;

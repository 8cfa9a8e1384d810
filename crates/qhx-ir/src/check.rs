//! Shape inference and validation: what makes a [`Program`] a [`Checked`] one.
//!
//! Runs at forge time and again at load, before anything is allocated. Errors name the op, its path and its stage.

mod cut;
mod index;
mod infer;

use crate::{DType, Dim, Encoding, Name, OpKind, Program, Rotary, Shape, Slot, Stage, dim, dim::show_shape, hadamard};
use index::{Index, StageNames, no_stage};
use std::{
    collections::{BTreeSet, HashMap, HashSet},
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
    index: Arc<Index>,
    limits: Arc<CallLimits>,
}

/// What every call of a program must respect, worked out once.
#[derive(Debug)]
pub(crate) struct CallLimits {
    /// Segments start at multiples of this: the least common multiple of all quotients of `T` in the program.
    pub(crate) segment_step: usize,
    /// Quotients without remainder, of any value.
    pub(crate) exact: Vec<Dim>,
    /// Inputs that are used as row numbers.
    pub(crate) indexes: Vec<IndexLimit>,
}

/// What the numbers of an input may be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IndexLimit {
    /// The input's place.
    pub(crate) place: usize,
    /// Of how many rows they are numbers.
    pub(crate) rows: Dim,
    /// Whether -1 stands for none of them.
    pub(crate) or_none: bool,
}

impl CallLimits {
    fn of(program: &Program, types: &HashMap<Name, ValueType>, index: &Index) -> Reason<Self> {
        let place = |name: &Name| index.inputs.get(name).copied();
        let table = |name: &Name| Dim::Fixed(program.weights[name].shape[0]);
        let limit = |index: &Name, rows: Dim| Some(IndexLimit { place: place(index)?, rows, or_none: false });
        let indexes = program.ops.iter().flat_map(|op| match &op.op {
            OpKind::Embed { ids: index, table: weight, .. } | OpKind::Interpolate { index, table: weight, .. } => {
                [limit(index, table(weight)), None]
            }
            OpKind::Experts { experts: index, gate, held: None, .. } => [limit(index, table(gate)), None],
            OpKind::Experts { experts: index, gate, held: Some(held), .. } => {
                [limit(index, types[held].shape[0]), limit(held, table(gate)).map(|limit| IndexLimit { or_none: true, ..limit })]
            }
            OpKind::Gather { x, rows: index } | OpKind::ScatterRows { x, at: index, .. } | OpKind::ScatterAddRows { x, at: index, .. } => {
                [limit(index, types[x].shape[0]), None]
            }
            _ => [None, None],
        });
        let quotients = types.values().filter_map(|v| v.shape.first()?.rows_per_row());
        let segment_step = quotients.into_iter().try_fold(1, dim::least_common_multiple);
        let segment_step = segment_step.ok_or("the quotients of T have no common multiple within reach")?;
        let dims = types.values().flat_map(|v| &v.shape).copied();
        let exact: BTreeSet<Dim> = dims.filter(|d| matches!(d, Dim::Exact(..))).collect();
        Ok(Self { segment_step, exact: exact.into_iter().collect(), indexes: indexes.flatten().collect() })
    }
}

impl Checked {
    /// Checks `program`.
    pub fn new(program: Program) -> Result<Self, CheckError> {
        let wrong = |reason| CheckError::Program { program: program.name.clone(), reason };
        let (types, index) = Checker::new(&program).map_err(wrong)?.run()?;
        let limits = CallLimits::of(&program, &types, &index).map_err(wrong)?;
        Ok(Self { program: Arc::new(program), types: Arc::new(types), index: Arc::new(index), limits: Arc::new(limits) })
    }

    /// The same program under another name.
    pub fn renamed(&self, name: impl Into<Name>) -> Self {
        let program = Arc::new(Program { name: name.into(), ..(*self.program).clone() });
        Self { program, ..self.clone() }
    }

    /// The place and the width of the output that has a row for each wanted one; none where there are several, or none.
    pub fn wanted_output(&self) -> Option<(usize, usize)> {
        let width = |output: &crate::Output| match self.value_type(&output.value).shape[..] {
            [Dim::L, Dim::Fixed(width)] => Some(width),
            _ => None,
        };
        let mut found = self.outputs.iter().enumerate().filter_map(|(place, output)| Some((place, width(output)?)));
        found.next().filter(|_| found.next().is_none())
    }

    pub(crate) fn limits(&self) -> &CallLimits {
        &self.limits
    }

    /// The type of a value of this program.
    pub fn value_type(&self, value: &str) -> &ValueType {
        &self.types[value]
    }

    /// The default stage under which a path lies: the longest one that is a dotted prefix of it.
    pub fn stage_of(&self, path: &str) -> Option<&Stage> {
        self.index.stages.of(path).map(|place| &self.stages[place])
    }

    /// The place of the stage under which the op at place `op` lies.
    pub fn stage_of_op(&self, op: usize) -> usize {
        self.index.stage_of_op[op]
    }

    /// The places of the ops of the stage at place `stage`, rising.
    pub fn ops_of_stage(&self, stage: usize) -> &[usize] {
        &self.index.ops_of_stage[stage]
    }

    /// The place of a stage by its name.
    pub fn stage_place(&self, name: &str) -> Option<usize> {
        self.index.stages.of(name).filter(|&place| *self.stages[place].name == *name)
    }

    /// The places of the stages whose tap is this value.
    pub fn stages_shown_by(&self, value: &str) -> &[usize] {
        self.index.taps.get(value).map_or(&[], Vec::as_slice)
    }

    /// The place of the op that makes a value; none for inputs.
    pub fn maker(&self, value: &str) -> Option<usize> {
        self.index.makers.get(value).copied()
    }

    /// The places of the ops that read a value, rising.
    pub fn readers(&self, value: &str) -> &[usize] {
        self.index.readers.get(value).map_or(&[], Vec::as_slice)
    }

    /// Whether a value is an output of the program.
    pub fn is_output(&self, value: &str) -> bool {
        self.index.outputs.contains_key(value)
    }
}

impl Deref for Checked {
    type Target = Program;
    fn deref(&self) -> &Program {
        &self.program
    }
}

struct Checker<'a> {
    program: &'a Program,
    stages: StageNames,
    types: HashMap<Name, ValueType>,
    /// KV slots written so far in the op order.
    written: HashSet<&'a Name>,
    /// How many experts each value chooses among that a `route` made so far.
    routed: HashMap<Name, usize>,
}

type Reason<T> = Result<T, String>;

impl<'a> Checker<'a> {
    fn new(program: &'a Program) -> Reason<Self> {
        let stages = StageNames::new(program)?;
        Ok(Self { program, stages, types: HashMap::new(), written: HashSet::new(), routed: HashMap::new() })
    }

    fn run(mut self) -> Result<(HashMap<Name, ValueType>, Index), CheckError> {
        let program = self.program;
        let wrong = |reason| CheckError::Program { program: program.name.clone(), reason };
        self.check_declarations().map_err(wrong)?;
        let mut stage_of_op = Vec::with_capacity(program.ops.len());
        for op in &program.ops {
            let stage = self.stages.of(&op.path);
            let fail = |reason| CheckError::Op {
                program: program.name.clone(),
                stage: stage.map_or("?".into(), |place| program.stages[place].name.clone()),
                path: op.path.clone(),
                op: op.op.name(),
                reason,
            };
            stage_of_op.push(stage.ok_or_else(|| fail(no_stage(&op.path)))?);
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
        program.stages.iter().filter(|stage| stage.rotated).try_for_each(|stage| self.can_be_rotated(stage).map_err(wrong))?;
        let index = Index::new(program, self.stages, stage_of_op);
        let used: HashSet<&Name> = program.ops.iter().flat_map(|op| op.op.weights()).collect();
        if let Some(name) = program.weights.keys().find(|name| !used.contains(name)) {
            return Err(wrong(format!("weight `{name}` is used by no op")));
        }
        if let Some(name) = program.slots.keys().find(|name| !index.slot_users.contains_key(*name)) {
            return Err(wrong(format!("slot `{name}` is used by no op")));
        }
        Ok((self.types, index))
    }

    /// Rows of a tap that is kept rotated must be numbers of a width that has the transform.
    fn can_be_rotated(&self, stage: &Stage) -> Reason<()> {
        let width = |value: &ValueType| match (value.dtype, value.shape.last()) {
            (DType::F32, Some(&Dim::Fixed(width))) => Some(width),
            _ => None,
        };
        match stage.tap.as_ref().map(|tap| width(&self.types[tap])) {
            None => Ok(()),
            Some(Some(width)) if hadamard::exists(width) => Ok(()),
            Some(_) => Err(format!("stage `{}` is rotated, but its tap has no rows that could be turned back", stage.name)),
        }
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
        let mut outputs = HashSet::new();
        if let Some(output) = program.outputs.iter().find(|output| !outputs.insert(&output.name)) {
            return Err(format!("output `{}` is declared twice", output.name));
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

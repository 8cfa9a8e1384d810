//! Shape inference and validation: what makes a [`Program`] a [`Checked`] one.
//!
//! Runs at forge time and again at load, before anything is allocated. Errors name the op, its path and its stage.

use crate::{
    ActivationForm, DType, Dim, Encoding, Mask, Name, Op, OpKind, Program, Rotary, Routing, Shape, Slot, Stage, dim, dim::show_shape,
    is_under, program::Generator,
};
use std::{collections::HashMap, ops::Deref, sync::Arc};
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
        Ok(Self { segment_step, indexes: indexes.collect() })
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
    /// (named like the value); slots, rotaries and weights are those that the kept ops name.
    pub fn cut(&self, keep: impl Fn(&Op) -> bool) -> Result<Self, CheckError> {
        let whole = &*self.program;
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
            for name in op.op.inputs().into_iter().filter(|name| made.contains(name)) {
                if !outputs.iter().any(|o| o.name == *name) {
                    outputs.push(crate::Output { name: name.clone(), value: name.clone() });
                }
            }
        }
        let named = |names: &dyn Fn(&OpKind) -> Vec<&Name>, name: &Name| kept.iter().any(|op| names(&op.op).contains(&name));
        let keep_tap = |s: &Stage| Stage { name: s.name.clone(), tap: s.tap.clone().filter(|tap| made.contains(tap)) };
        Self::new(Program {
            inputs,
            outputs,
            slots: whole.slots.iter().filter(|(n, _)| named(&|op| op.slot().into_iter().collect(), n)).map(own).collect(),
            rotaries: whole.rotaries.iter().filter(|(n, _)| named(&|op| rotary_of(op).into_iter().collect(), n)).map(own).collect(),
            weights: whole.weights.iter().filter(|(n, _)| named(&OpKind::weights, n)).map(own).collect(),
            stages: whole.stages.iter().filter(|s| kept.iter().any(|op| is_under(&op.path, &s.name))).map(keep_tap).collect(),
            ops: kept.iter().map(|&op| op.clone()).collect(),
            ..whole.clone()
        })
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
            if numbers.is_none_or(|n| n == 0 || n > 1 << 48) || weight.encoding.row_bytes(columns).is_none() {
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

    fn value(&self, name: &Name) -> Reason<&ValueType> {
        self.types.get(name).ok_or_else(|| format!("reads `{name}`, which no input and no earlier op makes"))
    }

    /// The shape of an f32 value of at least `rank` dimensions.
    fn floats(&self, name: &Name, rank: usize) -> Reason<&Shape> {
        self.typed(name, DType::F32, rank)
    }

    fn integers(&self, name: &Name, rank: usize) -> Reason<&Shape> {
        self.typed(name, DType::I32, rank)
    }

    fn typed(&self, name: &Name, dtype: DType, rank: usize) -> Reason<&Shape> {
        let value = self.value(name)?;
        if value.dtype != dtype || value.shape.len() < rank {
            let found = show_shape(&value.shape);
            return Err(format!("`{name}` must be {dtype:?} of rank {rank} or more, found {:?} {found}", value.dtype));
        }
        Ok(&value.shape)
    }

    /// `[rows, heads, dim]` with fixed heads and dim.
    fn heads(&self, name: &Name) -> Reason<(Dim, usize, usize)> {
        match self.floats(name, 3)?[..] {
            [rows, Dim::Fixed(heads), Dim::Fixed(dim)] if heads > 0 && dim > 0 => Ok((rows, heads, dim)),
            ref other => Err(format!("`{name}` must be [rows, heads, dim], found {}", show_shape(other))),
        }
    }

    fn last(&self, name: &Name) -> Reason<usize> {
        match self.floats(name, 1)?.last() {
            Some(&Dim::Fixed(n)) if n > 0 => Ok(n),
            _ => Err(format!("the last dimension of `{name}` must be a number")),
        }
    }

    fn weight(&self, name: &Name, expected: &[usize]) -> Reason<()> {
        let weight = self.program.weights.get(name).ok_or_else(|| format!("names the weight `{name}`, which is not declared"))?;
        match weight.shape == expected {
            true => Ok(()),
            false => Err(format!("weight `{name}` must have shape {expected:?}, found {:?}", weight.shape)),
        }
    }

    /// A weight that is only ever read as plain numbers (norms, biases, convolutions).
    fn plain_weight(&self, name: &Name, expected: &[usize]) -> Reason<()> {
        self.weight(name, expected)?;
        match self.program.weights[name].encoding {
            encoding if encoding.is_float() => Ok(()),
            encoding => Err(format!("weight `{name}` must be f32, f16 or bf16 here, found {encoding}")),
        }
    }

    /// A weight of which only the last dimension is known; gives its other dimensions.
    fn matrix(&self, name: &Name, rank: usize, columns: Option<usize>) -> Reason<Vec<usize>> {
        let weight = self.program.weights.get(name).ok_or_else(|| format!("names the weight `{name}`, which is not declared"))?;
        if weight.shape.len() != rank || columns.is_some_and(|c| weight.shape[rank - 1] != c) {
            let wanted = columns.map_or("_".into(), |c| c.to_string());
            return Err(format!("weight `{name}` must have rank {rank} and last dimension {wanted}, found {:?}", weight.shape));
        }
        Ok(weight.shape.clone())
    }

    fn product(&self, weight: &Name, form: ActivationForm) -> Reason<()> {
        let encoding = self.program.weights[weight].encoding;
        match form.is_integer() && encoding.is_float() {
            true => Err(format!("activation form {form:?} needs an integer weight, `{weight}` is {encoding}")),
            false => Ok(()),
        }
    }

    /// Row numbers that a `route` makes are below its number of experts, which must not be beyond `rows`. (Those of inputs are checked at the call.)
    fn chosen_from(&self, index: &Name, rows: usize) -> Reason<()> {
        for op in &self.program.ops {
            if let OpKind::Route { scores, .. } = &op.op
                && op.outputs().contains(index)
                && self.last(scores)? > rows
            {
                return Err(format!("`{index}` chooses among {} rows, there are {rows}", self.last(scores)?));
            }
        }
        Ok(())
    }

    fn slot(&self, name: &Name, expected: impl Fn(&Slot) -> bool, what: &str) -> Reason<&'a Slot> {
        let slot = self.program.slots.get(name).ok_or_else(|| format!("names the slot `{name}`, which is not declared"))?;
        match expected(slot) {
            true => Ok(slot),
            false => Err(format!("slot `{name}` must be {what}, found {slot:?}")),
        }
    }

    fn same(&self, a: &Name, b: &Name) -> Reason<Shape> {
        let (left, right) = (self.floats(a, 1)?, self.floats(b, 1)?);
        match left == right {
            true => Ok(left.clone()),
            false => Err(format!("`{a}` {} and `{b}` {} must have one shape", show_shape(left), show_shape(right))),
        }
    }

    fn infer(&mut self, op: &'a Op) -> Reason<Vec<ValueType>> {
        let f32s = |shape: Shape| Ok(vec![ValueType { dtype: DType::F32, shape }]);
        match &op.op {
            OpKind::Embed { ids, table, scale } => {
                finite("scale", *scale)?;
                let mut shape = self.integers(ids, 1)?.clone();
                if shape.len() != 1 {
                    return Err(format!("`{ids}` must have rank 1"));
                }
                shape.push(Dim::Fixed(self.matrix(table, 2, None)?[1]));
                f32s(shape)
            }
            OpKind::Interpolate { index, factor, table } => {
                let (index_shape, factor_shape) = (self.integers(index, 2)?, self.floats(factor, 2)?);
                if index_shape != factor_shape || index_shape.len() != 2 {
                    return Err("index and factor must both be [rows, taps]".into());
                }
                let [rows, width] = self.matrix(table, 2, None)?[..] else { return Err("the table must have rank 2".into()) };
                self.chosen_from(index, rows)?;
                f32s(vec![index_shape[0], Dim::Fixed(width)])
            }
            OpKind::Linear { x, weight, bias, activation, clip } => {
                let out = self.matrix(weight, 2, Some(self.last(x)?))?[0];
                self.product(weight, *activation)?;
                bias.iter().try_for_each(|bias| self.plain_weight(bias, &[out]))?;
                if clip.is_some_and(|c| [c.input, c.output].iter().any(|[low, high]| low.is_nan() || high.is_nan() || low > high)) {
                    return Err(format!("clip bounds {clip:?} must be low ≤ high"));
                }
                let mut shape = self.floats(x, 2)?.clone();
                shape.pop();
                shape.push(Dim::Fixed(out));
                f32s(shape)
            }
            OpKind::RmsNorm { x, weight, eps } => {
                positive("eps", *eps)?;
                let n = self.last(x)?;
                weight.iter().try_for_each(|w| self.plain_weight(w, &[n]))?;
                f32s(self.floats(x, 2)?.clone())
            }
            OpKind::LayerNorm { x, weight, bias, eps } => {
                positive("eps", *eps)?;
                let n = self.last(x)?;
                self.plain_weight(weight, &[n])?;
                bias.iter().try_for_each(|b| self.plain_weight(b, &[n]))?;
                f32s(self.floats(x, 2)?.clone())
            }
            OpKind::Rope { x, positions, rotary } => {
                let (rows, heads, dim) = self.heads(x)?;
                let streams = match self.integers(positions, 2)?[..] {
                    [Dim::Fixed(streams), r] if r == rows => streams,
                    ref other => return Err(format!("`{positions}` must be [streams, {rows}], found {}", show_shape(other))),
                };
                let rotary_data =
                    self.program.rotaries.get(rotary).ok_or_else(|| format!("names the rotary `{rotary}`, which is not declared"))?;
                if rotary_data.streams.iter().any(|&s| s >= streams) {
                    return Err(format!("rotary `{rotary}` uses streams {:?}, `{positions}` has {streams}", rotary_data.streams));
                }
                match rotary_data.blocks.last() {
                    Some(&(start, length)) if start + length > dim => Err(format!("rotary `{rotary}` reaches beyond head size {dim}")),
                    _ => f32s(vec![rows, Dim::Fixed(heads), Dim::Fixed(dim)]),
                }
            }
            OpKind::Attend { .. } => f32s(self.infer_attend(op)?),
            OpKind::ShortConv { x, weight, bias, slot, .. } => {
                let shape = self.floats(x, 2)?.clone();
                let channels = self.last(x)?;
                let kernel = self.matrix(weight, 2, None)?[1];
                self.plain_weight(weight, &[channels, kernel])?;
                bias.iter().try_for_each(|b| self.plain_weight(b, &[channels]))?;
                if shape.len() != 2 || rows_of(&shape).is_none() {
                    return Err(format!("`{x}` must be [rows, channels], found {}", show_shape(&shape)));
                }
                if let Some(name) = slot {
                    let expected = Slot::Fifo { rows: kernel - 1, channels };
                    self.slot(name, |s| *s == expected, &format!("{expected:?}"))?;
                    self.written_once(name)?;
                }
                f32s(shape)
            }
            OpKind::GatedDelta { q, k, v, a, b, a_log, dt_bias, slot, scale, eps } => {
                finite("scale", *scale)?;
                positive("eps", *eps)?;
                let (rows, key_heads, key_dim) = self.heads(q)?;
                let (value_rows, heads, value_dim) = self.heads(v)?;
                if self.heads(k)? != (rows, key_heads, key_dim)
                    || value_rows != rows
                    || heads % key_heads != 0
                    || rows_of(&[rows]).is_none()
                {
                    return Err(format!("`{q}`, `{k}`, `{v}` do not fit: value heads must be a multiple of key heads, rows equal"));
                }
                for x in [a, b] {
                    if *self.floats(x, 2)? != [rows, Dim::Fixed(heads)] {
                        return Err(format!("`{x}` must be [{rows}, {heads}], found {}", show_shape(self.floats(x, 2)?)));
                    }
                }
                self.plain_weight(a_log, &[heads])?;
                self.plain_weight(dt_bias, &[heads])?;
                let expected = Slot::Delta { heads, key_dim, value_dim };
                self.slot(slot, |s| *s == expected, &format!("{expected:?}"))?;
                self.written_once(slot)?;
                f32s(vec![rows, Dim::Fixed(heads), Dim::Fixed(value_dim)])
            }
            OpKind::Route { scores, method } => {
                let experts = self.last(scores)?;
                let k = method.experts_per_row();
                if k == 0 || k > experts {
                    return Err(format!("cannot choose {k} of {experts} experts"));
                }
                if let Routing::SparseMixer { jitter } = method {
                    finite("jitter", *jitter)?;
                }
                let [rows, _] = self.floats(scores, 2)?[..] else { return Err(format!("`{scores}` must be [rows, experts]")) };
                let shape = vec![rows, Dim::Fixed(k)];
                Ok([DType::I32, DType::F32].into_iter().map(|dtype| ValueType { dtype, shape: shape.clone() }).collect())
            }
            OpKind::Experts { x, experts, weights, gate, up, down, form, .. } => {
                let hidden = self.last(x)?;
                let shape = self.floats(x, 2)?.clone();
                let up_shape = self.matrix(up, 3, Some(hidden))?;
                self.weight(gate, &up_shape)?;
                self.weight(down, &[up_shape[0], hidden, up_shape[1]])?;
                [gate, up, down].into_iter().try_for_each(|w| self.product(w, *form))?;
                self.chosen_from(experts, up_shape[0])?;
                let chosen = self.integers(experts, 2)?;
                if shape.len() != 2 || chosen.len() != 2 || chosen[0] != shape[0] || chosen != self.floats(weights, 2)? {
                    return Err(format!("`{experts}` and `{weights}` must be [{}, k]", shape[0]));
                }
                f32s(shape)
            }
            OpKind::GateAct { gate, up, .. } => f32s(self.same(gate, up)?),
            OpKind::Add { a, b } | OpKind::Mul { a, b } => f32s(self.same(a, b)?),
            OpKind::Activate { x, .. } => f32s(self.floats(x, 1)?.clone()),
            OpKind::Scale { x, factor, weight } => {
                finite("factor", *factor)?;
                let n = self.last(x)?;
                if let Some(weight) = weight {
                    self.plain_weight(weight, &[1]).or_else(|_| self.plain_weight(weight, &[n]))?;
                }
                f32s(self.floats(x, 1)?.clone())
            }
            OpKind::Softcap { x, cap } => {
                positive("cap", *cap)?;
                f32s(self.floats(x, 1)?.clone())
            }
            OpKind::Clamp { x, low, high } => match low <= high {
                true => f32s(self.floats(x, 1)?.clone()),
                false => Err(format!("bounds {low}, {high} must be low ≤ high")),
            },
            OpKind::Concat { xs } => {
                let first = self.floats(xs.first().ok_or("needs at least one value")?, 2)?;
                let mut width = 0usize;
                for x in xs {
                    let shape = self.floats(x, 2)?;
                    if shape[..shape.len() - 1] != first[..first.len() - 1] {
                        return Err(format!("`{x}` {} does not fit {}", show_shape(shape), show_shape(first)));
                    }
                    width = width.checked_add(self.last(x)?).ok_or("result too large")?;
                }
                let mut shape = first.clone();
                shape.pop();
                shape.push(Dim::Fixed(width));
                f32s(shape)
            }
            OpKind::Slice { x, axis, start, length } => {
                let mut shape = self.floats(x, 2)?.clone();
                match shape.get(*axis) {
                    Some(&Dim::Fixed(n)) if *axis > 0 && *length > 0 && start.checked_add(*length).is_some_and(|end| end <= n) => {
                        shape[*axis] = Dim::Fixed(*length);
                        f32s(shape)
                    }
                    _ => Err(format!("cannot take {length} from {start} of dimension {axis} of {}", show_shape(&shape))),
                }
            }
            OpKind::Reshape { x, shape } => {
                let from = self.floats(x, 1)?;
                match dim::volume(from) == dim::volume(shape) && dim::volume(shape).is_some() {
                    true => f32s(shape.clone()),
                    false => Err(format!("{} cannot become {}", show_shape(from), show_shape(shape))),
                }
            }
            OpKind::Gather { x, rows } => {
                let mut shape = self.floats(x, 2)?.clone();
                match self.integers(rows, 1)?[..] {
                    [n] => shape[0] = n,
                    _ => return Err(format!("`{rows}` must have rank 1")),
                }
                f32s(shape)
            }
            OpKind::ScatterRows { x, rows, at } | OpKind::ScatterAddRows { x, rows, at } => {
                let (shape, new) = (self.floats(x, 2)?, self.floats(rows, 2)?);
                if shape[1..] != new[1..] || *self.integers(at, 1)? != [new[0]] {
                    return Err(format!("`{rows}` {} at `{at}` does not fit `{x}` {}", show_shape(new), show_shape(shape)));
                }
                f32s(shape.clone())
            }
            OpKind::Conv2d { x, weight, bias, stride } => {
                let kernel = self.matrix(weight, 4, None)?;
                self.plain_weight(weight, &kernel)?;
                bias.iter().try_for_each(|b| self.plain_weight(b, &kernel[..1]))?;
                if kernel[1] % 2 == 0 || kernel[1] != kernel[2] {
                    return Err(format!("kernel {}x{} must be square and odd", kernel[1], kernel[2]));
                }
                let shape = self.floats(x, 3)?;
                let (rows, width) = (rows_of(shape).and_then(|r| r.divide(*stride, true)), shape[1].divide(*stride, true));
                match (rows, width) {
                    (Some(rows), Some(width)) if shape[2..] == [Dim::Fixed(kernel[3])] => f32s(vec![rows, width, Dim::Fixed(kernel[0])]),
                    _ => Err(format!("`{x}` must be [rows, width, {}] for stride {stride}, found {}", kernel[3], show_shape(shape))),
                }
            }
            OpKind::Pool { x, size } => {
                let mut shape = self.floats(x, 2)?.clone();
                match rows_of(&shape).and_then(|rows| rows.divide(*size, false)) {
                    Some(rows) => shape[0] = rows,
                    None => return Err(format!("{} cannot be pooled by {size}", show_shape(&shape))),
                }
                f32s(shape)
            }
        }
    }

    fn infer_attend(&mut self, op: &'a Op) -> Reason<Shape> {
        let OpKind::Attend { q, kv, slot, mask, scale, softcap, relative_keys } = &op.op else { unreachable!("called for attend") };
        finite("scale", *scale)?;
        softcap.iter().try_for_each(|cap| positive("softcap", *cap))?;
        let (rows, heads, dim) = self.heads(q)?;
        if rows_of(&[rows]).is_none() {
            return Err(format!("the first dimension of `{q}` must be rows of the call (T or a quotient of it), found {rows}"));
        }
        let kv_heads = match kv {
            Some(kv) => {
                let (key_rows, kv_heads, key_dim) = self.heads(&kv.k)?;
                if self.heads(&kv.v)? != (key_rows, kv_heads, key_dim) || key_rows != rows || key_dim != dim {
                    return Err(format!("keys and values must be [{rows}, kv_heads, {dim}]"));
                }
                kv_heads
            }
            None => match slot.as_ref().and_then(|name| self.program.slots.get(name)) {
                Some(Slot::Kv { kv_heads, .. }) => *kv_heads,
                _ => return Err("without keys and values it needs a KV slot to read".into()),
            },
        };
        if heads % kv_heads != 0 {
            return Err(format!("{heads} query heads are no multiple of {kv_heads} key heads"));
        }
        if let Some(name) = slot {
            if rows != Dim::T {
                return Err(format!("an op with a slot must have T rows, found {rows}"));
            }
            let fits = |s: &Slot| matches!(s, Slot::Kv { kv_heads: k, head_dim: d, .. } if *k == kv_heads && *d == dim);
            let Slot::Kv { window, .. } = self.slot(name, fits, &format!("a KV slot of {kv_heads} x {dim}"))? else {
                return Err(format!("slot `{name}` must be a KV slot"));
            };
            match (mask, window) {
                (Mask::Full, _) => return Err("a full mask cannot have a slot".into()),
                (Mask::Causal, Some(_)) => return Err(format!("reads all rows of slot `{name}`, which keeps a window only")),
                (Mask::Window(wanted), Some(kept)) if wanted > kept => {
                    return Err(format!("window {wanted} is larger than slot `{name}` keeps ({kept})"));
                }
                _ => {}
            }
            match kv {
                Some(_) => self.written_once(name)?,
                None if !self.written.contains(&name) => return Err(format!("reads slot `{name}` before any op writes it")),
                None => {}
            }
        }
        if *mask == Mask::Window(0) {
            return Err("a window of 0 sees nothing".into());
        }
        if let Some(table) = relative_keys {
            let shape = self.matrix(table, 3, Some(dim))?;
            self.plain_weight(table, &[shape[0], heads, dim])?;
        }
        Ok(vec![rows, Dim::Fixed(heads), Dim::Fixed(dim)])
    }

    fn written_once(&mut self, slot: &'a Name) -> Reason<()> {
        if self.written.contains(&slot) {
            return Err(format!("slot `{slot}` has another writer already"));
        }
        self.written.push(slot);
        Ok(())
    }
}

/// The first dimension where it stands for rows of the call.
fn rows_of(shape: &[Dim]) -> Option<Dim> {
    shape.first().copied().filter(|d| d.rows_per_row().is_some())
}

fn finite(what: &str, x: f32) -> Reason<()> {
    if x.is_finite() { Ok(()) } else { Err(format!("{what} must be finite, found {x}")) }
}

fn positive(what: &str, x: f32) -> Reason<()> {
    if x.is_finite() && x > 0.0 { Ok(()) } else { Err(format!("{what} must be positive, found {x}")) }
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

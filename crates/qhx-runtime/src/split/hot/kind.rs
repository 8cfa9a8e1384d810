//! Ops with experts that are alike, and the program with which the processor computes the choices that are left to it.

use crate::memory::experts_per_row;
use qhx_ir::{
    Activation, ActivationForm, Checked, DType, DeviceError, Dim, Encoding, ExpertBias, Generator, Input, Name, Op, OpKind, Output,
    PROGRAM_VERSION, Program, Stage, Weight,
};
use std::collections::BTreeMap;

/// The places of the ops with experts whose rows are those of the call, and that do not say themselves where experts are.
pub(in crate::split) fn expert_ops(program: &Checked) -> impl Iterator<Item = usize> + '_ {
    let is_shared = |op: &Op| matches!(&op.op, OpKind::Experts { x, held: None, .. } if program.value_type(x).shape[0] == Dim::T);
    program.ops.iter().enumerate().filter(move |(_, op)| is_shared(op)).map(|(place, _)| place)
}

/// What ops have in common whose experts may take one another's place.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Kind {
    pub(super) hidden: usize,
    ffn: usize,
    /// Of its weights, in the order of [`WEIGHTS`].
    encodings: Vec<Encoding>,
    activation: Activation,
    form: ActivationForm,
    /// Experts of a row.
    pub(super) per_row: usize,
}

/// Gate, up and down, and the biases of gate and up: as [`OpKind::weights`] has them.
const WEIGHTS: [&str; 5] = ["gate", "up", "down", "gate_bias", "up_bias"];
/// The inputs of the processor's program, in order, and its output.
const X: &str = "x";
const EXPERTS: &str = "experts";
const FACTORS: &str = "factors";
const HELD: &str = "held";
pub(super) const SUM: &str = "experts.sum";

impl Kind {
    /// That of an op, and how many experts it has.
    pub(super) fn of(program: &Checked, op: &Op) -> Result<(Self, usize), DeviceError> {
        let OpKind::Experts { experts, gate, activation, form, .. } = &op.op else {
            return Err(DeviceError::Call(format!("`{}` has no experts", op.path)));
        };
        let weight = |name: &Name| {
            program.weights.get(name).ok_or_else(|| DeviceError::Weight { name: name.clone(), reason: "is not declared".into() })
        };
        let [count, ffn, hidden] = weight(gate)?.shape[..] else { return Err(DeviceError::Call(format!("`{}` has no experts", op.path))) };
        let per_row = experts_per_row(program, experts) as usize;
        let encodings = op.op.weights().into_iter().map(|name| Ok(weight(name)?.encoding)).collect::<Result<_, DeviceError>>()?;
        Ok((Self { hidden, ffn, encodings, activation: *activation, form: *form, per_row }, count))
    }

    /// All kinds of some ops, with the slots that each gets of `count`: in proportion to its experts, and at least one.
    pub(super) fn all(program: &Checked, ops: &[usize], count: usize) -> Result<Vec<(Self, usize)>, DeviceError> {
        let mut all: Vec<(Self, usize)> = Vec::new();
        for &place in ops {
            let (kind, experts) = Self::of(program, &program.ops[place])?;
            match all.iter_mut().find(|(known, _)| *known == kind) {
                Some((_, sum)) => *sum += experts,
                None => all.push((kind, experts)),
            }
        }
        let total: usize = all.iter().map(|(_, experts)| experts).sum();
        let share = |experts: usize| (count as u128 * experts as u128 / total.max(1) as u128) as usize;
        all.iter_mut().for_each(|(_, experts)| *experts = share(*experts).clamp(1, *experts));
        Ok(all)
    }

    /// Its weights with room for so many experts, by the names that they have in the accelerator's program.
    pub(super) fn slots(&self, number: usize, experts: usize) -> Vec<(Name, Weight)> {
        let declared = self.encodings.iter().zip(self.shapes());
        let declared = declared.map(|(&encoding, shape)| Weight { encoding, shape: [vec![experts], shape].concat() });
        WEIGHTS.iter().map(|name| format!("hot.{number}.{name}").into()).zip(declared).collect()
    }

    /// Of an expert's weights.
    fn shapes(&self) -> [Vec<usize>; 5] {
        let Self { hidden, ffn, .. } = *self;
        [vec![ffn, hidden], vec![ffn, hidden], vec![hidden, ffn], vec![ffn], vec![ffn]]
    }

    /// The op over rows of which each has [`Kind::per_row`] experts, as far as they are held.
    pub(super) fn op(&self, [x, experts, factors, held]: [Name; 4], weights: &[Name], path: &Name) -> Result<OpKind, DeviceError> {
        let [gate, up, down, biases @ ..] = weights else { return Err(DeviceError::Call(format!("`{path}` has no experts"))) };
        let [gate, up, down] = [gate, up, down].map(Name::clone);
        let bias = match biases {
            [gate, up] => Some(ExpertBias { gate: gate.clone(), up: up.clone() }),
            _ => None,
        };
        let (activation, form) = (self.activation, self.form);
        Ok(OpKind::Experts { x, experts, weights: factors, gate, up, down, activation, form, bias, held: Some(held) })
    }

    /// The program that computes choices among so many experts, whose weights have these names: those that are said to be held.
    pub(super) fn program(&self, experts: usize, weights: &[Name], stage: &str) -> Result<Checked, DeviceError> {
        let names = self.slots(0, experts).into_iter().zip(weights);
        let declared: BTreeMap<Name, Weight> = names.map(|((_, weight), name)| (name.clone(), weight)).collect();
        let input = |name: &str, dtype, width: usize| Input {
            name: name.into(),
            dtype,
            shape: vec![Dim::T, width.into()],
            generator: Generator::Carried,
        };
        let path: Name = format!("{stage}.{SUM}").into();
        let op = self.op([X, EXPERTS, FACTORS, HELD].map(Name::from), weights, &path)?;
        let rows = [input(X, DType::F32, self.hidden), input(EXPERTS, DType::I32, self.per_row), input(FACTORS, DType::F32, self.per_row)];
        let held = Input { name: HELD.into(), dtype: DType::I32, shape: vec![experts.into()], generator: Generator::Carried };
        Ok(Checked::new(Program {
            program_version: PROGRAM_VERSION,
            name: stage.into(),
            inputs: rows.into_iter().chain([held]).collect(),
            outputs: vec![Output { name: SUM.into(), value: path.clone() }],
            slots: BTreeMap::new(),
            epochs: Vec::new(),
            rotaries: BTreeMap::new(),
            stages: vec![Stage { name: stage.into(), tap: None, rotated: false, centred: false }],
            weights: declared,
            ops: vec![Op { path, op }],
        })?)
    }
}

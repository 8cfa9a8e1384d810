//! The programs with which the processor computes choices: each row has one expert.

use crate::memory::experts_per_row;
use qhx_ir::{
    Activation, ActivationForm, Bindings, Call, Checked, DType, DeviceError, Dim, Encoding, Executable, ExpertBias, Generator, Input,
    InputData, Name, Op, OpKind, Output, Outputs, PROGRAM_VERSION, Program, Segment, Stage, Weight,
};
use std::{collections::BTreeMap, sync::atomic::AtomicBool};

/// The most choices of one call: more are dealt out over several.
const AT_ONCE: usize = 1024;

/// The most choices of a call, where calls of the program have `chunk` rows.
pub(super) fn most_at_once(chunk: usize, per_row: usize) -> usize {
    chunk.saturating_mul(per_row).clamp(1, AT_ONCE)
}

/// The places of the ops with experts whose rows are those of the call.
pub(in crate::split) fn expert_ops(program: &Checked) -> impl Iterator<Item = usize> + '_ {
    let is_shared = |op: &Op| matches!(&op.op, OpKind::Experts { x, .. } if program.value_type(x).shape[0] == Dim::T);
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
const X: &str = "x";
const EXPERTS: &str = "experts";
const FACTORS: &str = "factors";
const SUM: &str = "experts.sum";

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

    /// The op over rows of which each has [`Kind::per_row`] experts, or over choices.
    pub(super) fn op(&self, [x, experts, factors]: [Name; 3], weights: &[Name], path: &Name) -> Result<OpKind, DeviceError> {
        let [gate, up, down, biases @ ..] = weights else { return Err(DeviceError::Call(format!("`{path}` has no experts"))) };
        let [gate, up, down] = [gate, up, down].map(Name::clone);
        let bias = match biases {
            [gate, up] => Some(ExpertBias { gate: gate.clone(), up: up.clone() }),
            _ => None,
        };
        let (activation, form) = (self.activation, self.form);
        Ok(OpKind::Experts { x, experts, weights: factors, gate, up, down, activation, form, bias })
    }

    /// The program that computes choices among so many experts, whose weights have these names.
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
        let op = self.op([X, EXPERTS, FACTORS].map(Name::from), weights, &path)?;
        Ok(Checked::new(Program {
            program_version: PROGRAM_VERSION,
            name: stage.into(),
            inputs: vec![input(X, DType::F32, self.hidden), input(EXPERTS, DType::I32, 1), input(FACTORS, DType::F32, 1)],
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

/// Choices that are computed in one call, in memory that is used again.
#[derive(Default)]
pub(in crate::split) struct Batch {
    x: Vec<f32>,
    experts: Vec<i32>,
    factors: Vec<f32>,
    outputs: Outputs,
}

/// The rows of an op.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) x: &'a [f32],
    /// Numbers in a row.
    pub(super) hidden: usize,
}

/// A row, one of its experts and what its result counts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Choice {
    pub(super) row: usize,
    pub(super) expert: usize,
    pub(super) factor: f32,
}

impl Batch {
    /// Computes choices, and adds what they give to the sums of their rows.
    pub(super) fn add(
        &mut self,
        processor: &mut dyn Executable,
        rows: Rows<'_>,
        choices: &[Choice],
        cancel: Option<&AtomicBool>,
        sums: &mut [f32],
    ) -> Result<(), DeviceError> {
        let (Rows { x, hidden }, Self { x: own, experts, factors, outputs }) = (rows, self);
        own.clear();
        choices.iter().for_each(|choice| own.extend_from_slice(&x[choice.row * hidden..][..hidden]));
        experts.clear();
        experts.extend(choices.iter().map(|choice| choice.expert as i32));
        factors.clear();
        factors.extend(choices.iter().map(|choice| choice.factor));
        let inputs = [InputData::F32(own), InputData::I32(experts), InputData::F32(factors)];
        let (rows, mut segments) = (choices.len(), [Segment::new(None, 0, choices.len())]);
        let mut call = Call::new(Bindings { rows, soft_rows: 0, wanted: 0 }, &inputs, &mut segments, outputs);
        call.cancel = cancel;
        processor.run(&mut call)?;
        let found = outputs.value(SUM).unwrap_or_default();
        if found.len() != rows * hidden {
            return Err(DeviceError::Call(format!("{} numbers came back for {rows} chosen experts", found.len())));
        }
        for (choice, numbers) in choices.iter().zip(found.chunks_exact(hidden)) {
            let sum = &mut sums[choice.row * hidden..][..hidden];
            sum.iter_mut().zip(numbers).for_each(|(sum, number)| *sum += number);
        }
        Ok(())
    }
}

//! Programs that compute choices: each row has one expert.

use crate::memory::experts_per_row;
use qhx_ir::{
    Activation, ActivationForm, Bindings, Call, Checked, DType, DeviceError, Dim, Encoding, ExpertBias, Generator, Input, InputData, Name,
    Op, OpKind, Output, Outputs, PROGRAM_VERSION, Program, Segment, Stage, Weight,
};
use std::{collections::BTreeMap, sync::atomic::AtomicBool};

/// The most choices of one call: more are dealt out over several.
const AT_ONCE: usize = 256;

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

/// The names of gate, up and down, and of the biases of gate and up, in the programs of all kinds: as [`OpKind::weights`] has them.
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

    /// The program that computes choices among so many experts.
    pub(super) fn program(&self, experts: usize) -> Result<Checked, DeviceError> {
        let names: Vec<Name> = self.weights().iter().map(|&name| name.into()).collect();
        self.named(experts, &names, "hot_experts")
    }

    /// The names of its weights.
    pub(super) fn weights(&self) -> &'static [&'static str] {
        &WEIGHTS[..self.encodings.len().min(WEIGHTS.len())]
    }

    /// The same with weights of these names.
    pub(super) fn named(&self, experts: usize, weights: &[Name], stage: &str) -> Result<Checked, DeviceError> {
        let Self { hidden, ffn, ref encodings, activation, form, .. } = *self;
        let [gate, up, down, biases @ ..] = weights else { return Err(DeviceError::Call(format!("`{stage}` has no experts"))) };
        let shapes = [vec![ffn, hidden], vec![ffn, hidden], vec![hidden, ffn], vec![ffn], vec![ffn]];
        let declared = encodings.iter().zip(shapes).map(|(&encoding, shape)| Weight { encoding, shape: [vec![experts], shape].concat() });
        let declared: BTreeMap<Name, Weight> = weights.iter().cloned().zip(declared).collect();
        let bias = match biases {
            [gate, up] => Some(ExpertBias { gate: gate.clone(), up: up.clone() }),
            _ => None,
        };
        let input = |name: &str, dtype, width: usize| Input {
            name: name.into(),
            dtype,
            shape: vec![Dim::T, width.into()],
            generator: Generator::Carried,
        };
        let [gate, up, down] = [gate, up, down].map(Name::clone);
        let path: Name = format!("{stage}.{SUM}").into();
        let op = OpKind::Experts { x: X.into(), experts: EXPERTS.into(), weights: FACTORS.into(), gate, up, down, activation, form, bias };
        Ok(Checked::new(Program {
            program_version: PROGRAM_VERSION,
            name: stage.into(),
            inputs: vec![input(X, DType::F32, hidden), input(EXPERTS, DType::I32, 1), input(FACTORS, DType::F32, 1)],
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

/// The rows of an op with their choices.
#[derive(Clone, Copy)]
pub(super) struct Chosen<'a> {
    pub(super) x: &'a [f32],
    /// Numbers in a row of `x`.
    pub(super) hidden: usize,
    pub(super) experts: &'a [i32],
    pub(super) factors: &'a [f32],
    /// Choices of a row.
    pub(super) per_row: usize,
}

/// Choices that one device computes in one call.
pub(super) struct Batch {
    choices: Vec<usize>,
    x: Vec<f32>,
    experts: Vec<i32>,
    factors: Vec<f32>,
    outputs: Outputs,
}

impl Batch {
    /// Of choices, by their places, and what their experts are called in the program that computes them.
    pub(super) fn new(chosen: Chosen<'_>, choices: &[(usize, usize)]) -> Self {
        let Chosen { x, hidden, factors, per_row, .. } = chosen;
        let mut batch = Self {
            choices: choices.iter().map(|&(choice, _)| choice).collect(),
            x: Vec::with_capacity(choices.len() * hidden),
            experts: choices.iter().map(|&(_, expert)| expert as i32).collect(),
            factors: choices.iter().map(|&(choice, _)| factors[choice]).collect(),
            outputs: Outputs::new(),
        };
        for &(choice, _) in choices {
            batch.x.extend_from_slice(&x[choice / per_row * hidden..][..hidden]);
        }
        batch
    }

    /// Makes the call.
    pub(super) fn call<R>(&mut self, cancel: Option<&AtomicBool>, run: impl FnOnce(&mut Call<'_>) -> R) -> R {
        let rows = self.choices.len();
        let inputs = [InputData::F32(&self.x), InputData::I32(&self.experts), InputData::F32(&self.factors)];
        let mut segments = [Segment::new(None, 0, rows)];
        let mut call = Call::new(Bindings { rows, soft_rows: 0, wanted: 0 }, &inputs, &mut segments, &mut self.outputs);
        call.cancel = cancel;
        run(&mut call)
    }

    /// Puts what the call gave where it belongs.
    pub(super) fn put(&self, hidden: usize, results: &mut [f32]) -> Result<(), DeviceError> {
        let found = self.outputs.value(SUM).unwrap_or_default();
        if found.len() != self.choices.len() * hidden {
            return Err(DeviceError::Call(format!("{} numbers came back for {} chosen experts", found.len(), self.choices.len())));
        }
        for (&choice, row) in self.choices.iter().zip(found.chunks_exact(hidden)) {
            results[choice * hidden..][..hidden].copy_from_slice(row);
        }
        Ok(())
    }
}

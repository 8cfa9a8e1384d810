//! Builds a case: a small program, its weights, and the source of each input.

use super::{rng::Rng, weights};
use crate::{
    DType, Dim, Encoding, Generator, Input, KvType, Name, Op, OpKind, Output, PROGRAM_VERSION, Program, Rotary, Slot, Stage, Weight,
    WeightTensor,
};
use std::collections::{BTreeMap, HashMap};

/// What to run, and how to judge the result.
pub(crate) struct Case {
    /// What was drawn, for people: shapes, forms, masks.
    pub(crate) what: String,
    pub(crate) program: Program,
    pub(crate) weights: HashMap<String, WeightTensor>,
    pub(crate) fills: Vec<Fill>,
    /// Seed of the inputs.
    pub(crate) seed: u64,
    /// One in this many rows is a soft row; 0: none.
    pub(crate) soft_one_in: usize,
    /// Largest accepted difference, relative to the larger of a row's largest value and `floor`.
    pub(crate) tolerance: f64,
    /// The usual magnitude of results.
    pub(crate) floor: f64,
    /// Set where an integer form follows other arithmetic in the same program, so that a value may round the other way: the bound for
    /// the few rows (at most one in ten, and one) in which that happens.
    pub(crate) flips: Option<f64>,
    pub(crate) epoch: usize,
    pub(crate) rows: RowRules,
}

/// Which calls a case is run with.
#[derive(Clone, Copy)]
pub(crate) struct RowRules {
    /// The fewest rows of a session's first segment.
    pub(crate) least: usize,
    /// The most rows of one segment in one call.
    pub(crate) most: usize,
    /// A segment's rows are a multiple of this.
    pub(crate) multiple: usize,
    /// The most calls in sequence.
    pub(crate) calls: usize,
}

/// The source of an input's data.
#[derive(Clone, Copy)]
pub(crate) enum Fill {
    /// Each row of `[T, ..]` by this function.
    Rows(fn(&mut Rng, &mut [f32])),
    /// Integers below this, `[T, ..]`.
    Index(usize),
    /// Distinct integers below this in each row of `[T, k]`.
    Choice(usize),
    /// `[streams, T]`: the row's index in its session, or anything below the limit.
    Positions(Option<usize>),
    /// `[R, ..]`.
    SoftRows,
    /// `[R]`.
    SoftAt,
    /// `[L]`.
    Wanted,
    /// `[n]`: so many different places below the first number, in some order, and -1 where the second number, counted in bits, has a 0.
    Held(usize, u64),
}

/// Ordinary rows.
pub(crate) fn normal(rng: &mut Rng, row: &mut [f32]) {
    row.iter_mut().for_each(|x| *x = rng.normal());
}

/// Realistic rows: some with outliers, some tiny, some large, some all zero.
pub(crate) fn wild(rng: &mut Rng, row: &mut [f32]) {
    normal(rng, row);
    match rng.below(8) {
        0 => {
            let at = rng.below(row.len());
            row[at] *= 40.0;
        }
        1 => row.iter_mut().for_each(|x| *x *= 1e-3),
        2 => row.iter_mut().for_each(|x| *x *= 30.0),
        3 => row.fill(0.0),
        _ => {}
    }
}

/// Rows far from zero on average.
pub(crate) fn offset(rng: &mut Rng, row: &mut [f32]) {
    let mean = rng.normal() * 5.0;
    row.iter_mut().for_each(|x| *x = rng.normal() + mean);
}

pub(crate) struct Builder {
    pub(crate) rng: Rng,
    pub(crate) case: Case,
}

impl Builder {
    /// A program with one stage, `op`.
    pub(crate) fn new(rng: Rng, name: &str, tolerance: f64) -> Self {
        let mut rng = rng;
        let program = Program {
            program_version: PROGRAM_VERSION,
            name: name.into(),
            inputs: vec![],
            outputs: vec![],
            slots: BTreeMap::new(),
            epochs: vec![],
            rotaries: BTreeMap::new(),
            stages: vec![],
            weights: BTreeMap::new(),
            ops: vec![],
        };
        let case = Case {
            what: String::new(),
            program,
            weights: HashMap::new(),
            fills: vec![],
            seed: rng.next(),
            soft_one_in: 0,
            tolerance,
            floor: 1.0,
            flips: None,
            epoch: 0,
            rows: RowRules { least: 1, most: 40, multiple: 1, calls: 2 },
        };
        Self { rng, case }
    }

    pub(crate) fn note(&mut self, text: impl AsRef<str>) {
        let what = &mut self.case.what;
        *what = format!("{what}{}{}", if what.is_empty() { "" } else { ", " }, text.as_ref());
    }

    fn input(&mut self, name: &str, dtype: DType, shape: Vec<Dim>, generator: Generator, fill: Fill) -> Name {
        self.case.program.inputs.push(Input { name: name.into(), dtype, shape, generator });
        self.case.fills.push(fill);
        name.into()
    }

    /// An f32 input `[T, tail..]`.
    pub(crate) fn rows(&mut self, name: &str, tail: &[usize], fill: fn(&mut Rng, &mut [f32])) -> Name {
        self.input(name, DType::F32, with_rows(Dim::T, tail), Generator::Carried, Fill::Rows(fill))
    }

    /// An i32 input `[T, tail..]` of numbers below `below`.
    pub(crate) fn index(&mut self, name: &str, tail: &[usize], below: usize) -> Name {
        self.input(name, DType::I32, with_rows(Dim::T, tail), Generator::Ids, Fill::Index(below))
    }

    /// An i32 input `[T, k]` of different numbers below `below`.
    pub(crate) fn choice(&mut self, name: &str, k: usize, below: usize) -> Name {
        self.input(name, DType::I32, with_rows(Dim::T, &[k]), Generator::Carried, Fill::Choice(below))
    }

    pub(crate) fn positions(&mut self, streams: usize, random_below: Option<usize>) -> Name {
        let shape = vec![Dim::Fixed(streams), Dim::T];
        self.input("positions", DType::I32, shape, Generator::PositionsSequence, Fill::Positions(random_below))
    }

    /// An i32 input `[experts]`: where each is of so many that are there, or -1.
    pub(crate) fn held(&mut self, name: &str, experts: usize, there: usize) -> Name {
        let mask = self.rng.below(1 << experts) as u64;
        self.input(name, DType::I32, vec![Dim::Fixed(experts)], Generator::Carried, Fill::Held(there, mask))
    }

    pub(crate) fn wanted(&mut self) -> Name {
        self.input("wanted", DType::I32, vec![Dim::L], Generator::WantedRows, Fill::Wanted)
    }

    /// Soft rows and where they go; one in `one_in` rows is soft.
    pub(crate) fn soft(&mut self, tail: &[usize], one_in: usize) -> (Name, Name) {
        self.case.soft_one_in = one_in;
        let rows = self.input("soft_rows", DType::F32, with_rows(Dim::R, tail), Generator::SoftRows, Fill::SoftRows);
        (rows, self.input("soft_rows_at", DType::I32, vec![Dim::R], Generator::SoftRowsAt, Fill::SoftAt))
    }

    pub(crate) fn weight(&mut self, name: &str, shape: &[usize], encoding: Encoding, magnitude: f32) -> Name {
        let tensor = weights::random(&mut self.rng, encoding, shape, magnitude);
        self.tensor(name, tensor)
    }

    /// A weight in any float form.
    pub(crate) fn plain(&mut self, name: &str, shape: &[usize], magnitude: f32) -> Name {
        let encoding = self.rng.pick(&[Encoding::F32, Encoding::F32, Encoding::F16, Encoding::Bf16]);
        self.weight(name, shape, encoding, magnitude)
    }

    /// A vector of numbers around `mean`, as norms have them.
    pub(crate) fn around(&mut self, name: &str, n: usize, mean: f32, magnitude: f32) -> Name {
        let numbers: Vec<f32> = (0..n).map(|_| mean + self.rng.normal() * magnitude).collect();
        self.numbers(name, &[n], &numbers)
    }

    /// An f32 weight with the given numbers.
    pub(crate) fn numbers(&mut self, name: &str, shape: &[usize], numbers: &[f32]) -> Name {
        let tensor = WeightTensor::from_f32(shape, numbers).expect("as many numbers as the shape says");
        self.tensor(name, tensor)
    }

    fn tensor(&mut self, name: &str, tensor: WeightTensor) -> Name {
        let weight = Weight { shape: tensor.shape().to_vec(), encoding: tensor.encoding() };
        self.case.program.weights.insert(name.into(), weight);
        self.case.weights.insert(name.into(), tensor);
        name.into()
    }

    pub(crate) fn kv_slot(&mut self, name: &str, kv_heads: usize, head_dim: usize, window: Option<usize>, dtype: KvType) -> Name {
        self.slot(name, Slot::Kv { kv_heads, head_dim, window, dtype })
    }

    pub(crate) fn slot(&mut self, name: &str, slot: Slot) -> Name {
        self.case.program.slots.insert(name.into(), slot);
        name.into()
    }

    pub(crate) fn rotary(&mut self, name: &str, rotary: Rotary) -> Name {
        self.case.program.rotaries.insert(name.into(), rotary);
        name.into()
    }

    pub(crate) fn op(&mut self, path: &str, op: OpKind) -> Name {
        self.case.program.ops.push(Op { path: path.into(), op });
        path.into()
    }

    /// Ends a stage: `tap` shows its effect.
    pub(crate) fn stage(&mut self, name: &str, tap: &Name) {
        self.case.program.stages.push(Stage { name: name.into(), tap: Some(tap.clone()), rotated: false, centred: false });
    }

    pub(crate) fn output(&mut self, name: &str, value: &Name) {
        self.case.program.outputs.push(Output { name: name.into(), value: value.clone() });
    }

    /// The case of a program all of whose paths lie under `op`, with `value` as output and tap.
    pub(crate) fn finish(mut self, value: &Name) -> Case {
        self.stage("op", value);
        self.output("y", value);
        self.case
    }
}

fn with_rows(rows: Dim, tail: &[usize]) -> Vec<Dim> {
    std::iter::once(rows).chain(tail.iter().map(|&n| Dim::Fixed(n))).collect()
}

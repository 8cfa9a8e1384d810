//! A model whose next token follows from the token before the last one, and which predicts the one after that from its rows: every guess is right if, and only if, the drafting program gets the
//! rows of the tokens that it should.

use super::{Kind, Program, VOCABULARY};
use qhx_ir::{
    Activation, Checked, DType, Dim, Encoding, Generator, Input, KeyValue, KvType, Mask, Op, OpKind, Output, PROGRAM_VERSION, Slot, Stage,
    Weight, WeightTensor, Weights,
};
use qhx_runtime::{DraftParts, ModelParts};
use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

/// A row holds a token and the one before it, each as a one among zeros.
const WIDTH: usize = 2 * VOCABULARY;

/// What follows.
pub(crate) fn after(before: u32) -> u32 {
    (before * 5 + 3) % VOCABULARY as u32
}

/// The model. Ids end no answer.
pub(crate) fn predicting() -> ModelParts {
    let mut tensors = HashMap::new();
    let mut matrix = |name: &str, [rows, columns]: [usize; 2], value: &dyn Fn(usize, usize) -> f32| {
        let values: Vec<f32> = (0..rows * columns).map(|n| value(n / columns, n % columns)).collect();
        tensors.insert(name.to_owned(), WeightTensor::from_f32(&[rows, columns], &values).unwrap());
    };
    let one = |condition: bool| if condition { 1.0 } else { 0.0 };
    let follows = |row: usize, token: usize| after(token as u32) as usize == row;
    matrix("table", [VOCABULARY, WIDTH], &|row, column| one(row == column));
    matrix("twice", [WIDTH, WIDTH], &|row, column| one(row % VOCABULARY == column));
    matrix("before", [WIDTH, 2], &|row, tap| one((row < VOCABULARY) == (tap == 1)));
    // The first token of all has none before it.
    let head = |row: usize, column: usize| match column.checked_sub(VOCABULARY) {
        Some(before) => one(follows(row, before)),
        None => 0.1 * one(follows(row, column)),
    };
    matrix("head", [VOCABULARY, WIDTH], &head);
    matrix("draft.head", [VOCABULARY, WIDTH], &|row, column| one(column < VOCABULARY && follows(row, column)));
    matrix("draft.nothing", [4, WIDTH], &|_, _| 0.0);
    matrix("draft.back", [WIDTH, 4], &|_, _| 1.0);
    let weights = |names: &[&str]| {
        let declared = |name: &&str| ((*name).into(), Weight { shape: tensors[*name].shape().to_vec(), encoding: Encoding::F32 });
        names.iter().map(declared).collect::<BTreeMap<_, _>>()
    };
    let (text, draft) =
        (text(weights(&["table", "twice", "before", "head"])), draft(weights(&["table", "draft.head", "draft.nothing", "draft.back"])));
    ModelParts {
        program: Checked::new(text).unwrap(),
        draft: Some(DraftParts { program: Checked::new(draft).unwrap(), stage: "pairs".into() }),
        weights: Arc::new(tensors) as Arc<dyn Weights>,
        eos: vec![],
        ..super::parts(Kind::Dense)
    }
}

fn op(path: &str, op: OpKind) -> Op {
    Op { path: path.into(), op }
}

fn linear(x: &str, weight: &str) -> OpKind {
    OpKind::Linear { x: x.into(), weight: weight.into(), bias: None, activation: Default::default(), clip: None }
}

fn input(name: &str, dtype: DType, shape: Vec<Dim>, generator: Generator) -> Input {
    Input { name: name.into(), dtype, shape, generator }
}

fn stage(name: &str, tap: &str) -> Stage {
    Stage { name: name.into(), tap: Some(tap.into()), rotated: false, centred: false }
}

fn program(name: &str, weights: BTreeMap<qhx_ir::Name, Weight>, inputs: Vec<Input>, ops: Vec<Op>) -> Program {
    Program {
        program_version: PROGRAM_VERSION,
        name: name.into(),
        inputs,
        outputs: vec![Output { name: "logits".into(), value: "head.logits".into() }],
        slots: BTreeMap::new(),
        epochs: vec![],
        rotaries: BTreeMap::new(),
        stages: vec![stage("pairs", "pairs.rows"), stage("head", "head.logits")],
        weights,
        ops,
    }
}

fn text(weights: BTreeMap<qhx_ir::Name, Weight>) -> Program {
    let inputs =
        vec![input("ids", DType::I32, vec![Dim::T], Generator::Ids), input("wanted", DType::I32, vec![Dim::L], Generator::WantedRows)];
    let pair = OpKind::ShortConv {
        x: "pairs.twice".into(),
        weight: "before".into(),
        bias: None,
        slot: Some("before".into()),
        activation: None::<Activation>,
    };
    let ops = vec![
        op("pairs.embed", OpKind::Embed { ids: "ids".into(), table: "table".into(), scale: 1.0 }),
        op("pairs.twice", linear("pairs.embed", "twice")),
        op("pairs.rows", pair),
        op("head.rows", OpKind::Gather { x: "pairs.rows".into(), rows: "wanted".into() }),
        op("head.logits", linear("head.rows", "head")),
    ];
    let slots = [("before".into(), Slot::Fifo { rows: 1, channels: WIDTH })].into();
    Program { slots, ..program("text", weights, inputs, ops) }
}

/// An attention that sees nothing has keys and values all the same.
fn draft(weights: BTreeMap<qhx_ir::Name, Weight>) -> Program {
    let rows = |rows| vec![rows, Dim::Fixed(WIDTH)];
    let inputs = vec![
        input("next", DType::I32, vec![Dim::T], Generator::NextIds),
        input("hidden", DType::F32, rows(Dim::T), Generator::HiddenRows),
        input("chained", DType::F32, rows(Dim::R), Generator::ChainedRows),
        input("chained_at", DType::I32, vec![Dim::R], Generator::ChainedRowsAt),
        input("wanted", DType::I32, vec![Dim::L], Generator::WantedRows),
    ];
    let heads = || OpKind::Reshape { x: "pairs.nothing".into(), shape: vec![Dim::T, Dim::Fixed(1), Dim::Fixed(4)] };
    let attend = OpKind::Attend {
        q: "pairs.heads".into(),
        kv: Some(KeyValue { k: "pairs.heads".into(), v: "pairs.heads".into() }),
        slot: Some("kv".into()),
        mask: Mask::Causal,
        scale: 1.0,
        softcap: None,
        relative_keys: None,
    };
    let ops = vec![
        op("pairs.embed", OpKind::Embed { ids: "next".into(), table: "table".into(), scale: 1.0 }),
        op("pairs.own", OpKind::ScatterRows { x: "hidden".into(), rows: "chained".into(), at: "chained_at".into() }),
        op("pairs.nothing", linear("pairs.own", "draft.nothing")),
        op("pairs.heads", heads()),
        op("pairs.attend", attend),
        op("pairs.flat", OpKind::Reshape { x: "pairs.attend".into(), shape: vec![Dim::T, Dim::Fixed(4)] }),
        op("pairs.back", linear("pairs.flat", "draft.back")),
        op("pairs.rows", OpKind::Add { a: "pairs.own".into(), b: "pairs.back".into() }),
        op("head.rows", OpKind::Gather { x: "pairs.rows".into(), rows: "wanted".into() }),
        op("head.logits", linear("head.rows", "draft.head")),
    ];
    let slots = [("kv".into(), Slot::Kv { kv_heads: 1, head_dim: 4, window: None, dtype: KvType::F32 })].into();
    let mut program = program("mtp", weights, inputs, ops);
    program.outputs.insert(0, Output { name: "hidden".into(), value: "pairs.embed".into() });
    Program { slots, ..program }
}

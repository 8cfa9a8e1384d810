//! A mixture of experts reads the weights of the chosen experts and of no other: counted.

use qhx_cpu::{CpuDevice, CpuOptions};
use qhx_ir::{
    Activation, ActivationForm, Bindings, Call, Checked, DType, Dim, Encoding, Executable, Generator, Input, InputData, LoadOptions, Op,
    OpKind, Output, PROGRAM_VERSION, Program, Segment, Stage, Weight, WeightTensor, Weights,
};
use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

const EXPERTS: usize = 16;
const HIDDEN: usize = 64;
const FFN: usize = 48;

fn program() -> Checked {
    let input = |name: &str, dtype, width| Input {
        name: name.into(),
        dtype,
        shape: vec![Dim::T, Dim::Fixed(width)],
        generator: Generator::Carried,
    };
    let weight = |shape: [usize; 3]| Weight { shape: shape.to_vec(), encoding: Encoding::F32 };
    let op = OpKind::Experts {
        x: "x".into(),
        experts: "experts".into(),
        weights: "weights".into(),
        gate: "gate".into(),
        up: "up".into(),
        down: "down".into(),
        activation: Activation::Silu,
        form: ActivationForm::F32,
    };
    Checked::new(Program {
        program_version: PROGRAM_VERSION,
        name: "mixture".into(),
        inputs: vec![input("x", DType::F32, HIDDEN), input("experts", DType::I32, 2), input("weights", DType::F32, 2)],
        outputs: vec![Output { name: "y".into(), value: "moe.experts".into() }],
        slots: BTreeMap::new(),
        epochs: vec![],
        rotaries: BTreeMap::new(),
        stages: vec![Stage { name: "moe".into(), tap: Some("moe.experts".into()) }],
        weights: BTreeMap::from([
            ("gate".into(), weight([EXPERTS, FFN, HIDDEN])),
            ("up".into(), weight([EXPERTS, FFN, HIDDEN])),
            ("down".into(), weight([EXPERTS, HIDDEN, FFN])),
        ]),
        ops: vec![Op { path: "moe.experts".into(), op }],
    })
    .unwrap()
}

/// Bytes read by a call whose rows chose these experts.
fn bytes_read(chosen: &[[i32; 2]]) -> u64 {
    let program = program();
    let tensor = |weight: &Weight| {
        let numbers: Vec<f32> = (0..weight.shape.iter().product()).map(|i: usize| (i % 13) as f32 / 13.0 - 0.5).collect();
        WeightTensor::from_f32(&weight.shape, &numbers).unwrap()
    };
    let tensors: HashMap<String, WeightTensor> = program.weights.iter().map(|(name, weight)| (name.to_string(), tensor(weight))).collect();
    let weights: Arc<dyn Weights> = Arc::new(tensors);
    let device = CpuDevice::new(CpuOptions { threads: Some(2), ..Default::default() }).unwrap();
    let mut executable = device.load_here(&program, &weights, &LoadOptions::default()).unwrap();
    let rows = chosen.len();
    let (x, shares) = (vec![0.25; rows * HIDDEN], vec![0.5; rows * 2]);
    let experts: Vec<i32> = chosen.as_flattened().to_vec();
    let inputs = [InputData::F32(&x), InputData::I32(&experts), InputData::F32(&shares)];
    let mut segments = [Segment { state: None, first_row: 0, valid_rows: rows }];
    let bindings = Bindings { rows, soft_rows: 0, wanted: 0 };
    executable.run(&mut Call { bindings, inputs: &inputs, segments: &mut segments, epoch: 0, cancel: None, taps: None }).unwrap();
    executable.weight_bytes_read()
}

#[test]
fn only_the_chosen_experts_are_read() {
    let row = |columns: usize| Encoding::F32.row_bytes(columns).unwrap().data;
    let expert = (2 * FFN * row(HIDDEN) + HIDDEN * row(FFN)) as u64;
    assert_eq!(bytes_read(&[[3, 11]]), 2 * expert, "a decode step reads its two experts");
    assert_eq!(bytes_read(&[[3, 11]; 40]), 2 * expert, "rows that chose the same experts share the reading");
    let all: Vec<[i32; 2]> = (0..40).map(|i| [i % 16, (i + 5) % 16]).collect();
    assert_eq!(bytes_read(&all), 16 * expert, "a prompt reads each used expert once");
}

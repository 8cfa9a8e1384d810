//! The ways through a device: many rows at once or one by one, in one graph or in many, up to the end of the context.

use super::support::{CONTEXT, call, device, load};
use qhx_ir::{
    Bindings, Call, Checked, Device, InputData, LoadOptions, Outputs, Program, Segment, WeightTensor, Weights,
    conformance::models::{TinyModel, tiny},
    reference::ReferenceDevice,
};
use qhx_npu::{Arch, NpuOptions};
use std::{collections::HashMap, sync::Arc};

/// What the last of some calls gives.
fn last_outputs(model: &TinyModel, options: NpuOptions, calls: &[usize]) -> Vec<f32> {
    let device = device(options);
    let mut executable = load(&device, model, &model.weights, None).unwrap();
    let mut state = executable.new_state(CONTEXT).unwrap();
    let outputs = calls.iter().map(|&rows| call(&mut *executable, &mut *state, rows).unwrap());
    outputs.last().unwrap()
}

fn sessions() -> impl Iterator<Item = TinyModel> {
    // f32 and int8 weights.
    [0, 3].into_iter().flat_map(tiny).filter(|m| !m.program.slots.is_empty())
}

fn near(a: &[f32], b: &[f32]) -> bool {
    let scale = b.iter().fold(1f32, |m, x| m.max(x.abs()));
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 0.03 * scale)
}

/// Rows in graphs of eight with padding, and rows one by one.
#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn prefill_and_decode_agree() {
    for model in sessions() {
        let way = |prefill_min_rows| last_outputs(&model, NpuOptions { prefill_min_rows, ..Default::default() }, &[13, 1]);
        let (many, single) = (way(2), way(usize::MAX));
        assert!(near(&many, &single), "{}: {many:?} {single:?}", model.name);
    }
}

/// The same program in one graph and in several.
#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn parts_change_nothing_but_roundings() {
    for model in sessions() {
        let way = |part_bytes| last_outputs(&model, NpuOptions { arch: Arch::V79, part_bytes, ..Default::default() }, &[9, 1]);
        let (whole, parts) = (way(u64::MAX), way(4000));
        assert!(near(&parts, &whole), "{}: {parts:?} {whole:?}", model.name);
    }
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn the_context_ends_with_an_error_that_says_so() {
    let device = device(NpuOptions::default());
    assert_eq!(device.name(), "npu");
    let model = tiny(0).remove(0);
    let mut executable = load(&device, &model, &model.weights, None).unwrap();
    let mut state = executable.new_state(CONTEXT).unwrap();
    call(&mut *executable, &mut *state, 23).unwrap();
    call(&mut *executable, &mut *state, 9).unwrap();
    assert_eq!(state.len(), CONTEXT);
    let error = call(&mut *executable, &mut *state, 1).unwrap_err().to_string();
    assert!(error.contains("exceed the context of 32 rows"), "{error}");
    // What came before it still counts.
    state.truncate(CONTEXT - 1).unwrap();
    call(&mut *executable, &mut *state, 1).unwrap();
}

/// Gates of any number within f16: the smallest are 0, and what they multiply does not bring them back.
#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn gates_of_large_numbers_stay_closed_or_open() {
    let numbers = [-6.0e4f32, -1000.0, -60.0, -16.0, -11.0, -5.5, -1.0, -0.01, 0.0, 0.01, 1.0, 5.5, 11.0, 16.0, 1000.0, 6.0e4];
    let device = device(NpuOptions::default());
    for activation in ["silu", "gelu_tanh", "gelu_erf", "sigmoid"] {
        let text = format!(
            r#"{{"program_version": 1, "name": "gate",
            "inputs": [{{"name": "x", "dtype": "f32", "shape": ["T", {}], "generator": "carried"}}],
            "outputs": [{{"name": "y", "value": "op.act"}}], "stages": [{{"name": "op"}}], "weights": {{}},
            "ops": [{{"path": "op.act", "op": {{"activate": {{"x": "x", "activation": "{activation}"}}}}}}]}}"#,
            numbers.len()
        );
        let program = Checked::new(Program::from_json(&text).unwrap()).unwrap();
        let weights: Arc<dyn Weights> = Arc::new(HashMap::<String, WeightTensor>::new());
        let run = |device: &dyn Device| {
            let mut executable = device.load(&program, &weights, &LoadOptions { max_rows: 1, ..Default::default() }).unwrap();
            let bindings = Bindings { rows: 1, soft_rows: 0, wanted: 0 };
            let mut segments = [Segment::new(None, 0, 1)];
            let inputs = [InputData::F32(&numbers)];
            let segments = &mut segments;
            let mut outputs = Outputs::new();
            let mut call = Call::new(bindings, &inputs, segments, &mut outputs);
            executable.run(&mut call).unwrap();
            outputs.value("y").unwrap().to_vec()
        };
        let (found, expected) = (run(&device), run(&ReferenceDevice));
        let near = found.iter().zip(&expected).all(|(a, b)| (a - b).abs() <= 2e-4 + 2e-3 * b.abs());
        assert!(near, "{activation}: {found:?} {expected:?}");
    }
}

//! A program that is cut in parts, run one after the other, gives what the whole gives, to the last bit.

use qhx_ir::{
    Bindings, Call, Checked, DType, Device, Executable, Generator, InputData, LoadOptions, Op, Outputs, Segment, State, Weights,
    conformance::models::{self, TinyModel},
    reference::ReferenceDevice,
};
use std::{collections::HashMap, sync::Arc};

/// Rows of the calls; image towers take them in groups of four.
fn calls(model: &TinyModel) -> [usize; 2] {
    if model.name == "model.image" { [8, 4] } else { [6, 1] }
}

#[test]
fn two_halves_at_every_op() {
    for model in models::tiny(0) {
        let expected = run(&[whole(&model)], &model);
        for first in 1..model.program.ops.len() {
            let paths: Vec<_> = model.program.ops[..first].iter().map(|op| op.path.clone()).collect();
            check(&model, &expected, &[&|op| paths.contains(&op.path), &|op| !paths.contains(&op.path)]);
        }
    }
}

#[test]
fn every_stage_alone() {
    for model in models::tiny(0) {
        let expected = run(&[whole(&model)], &model);
        for stage in &model.program.stages {
            let inside = |op: &Op| qhx_ir::is_under(&op.path, &stage.name);
            let first = model.program.ops.iter().position(inside).expect("a stage has ops");
            let before: Vec<_> = model.program.ops[..first].iter().map(|op| op.path.clone()).collect();
            let after = |op: &Op| !inside(op) && !before.contains(&op.path);
            check(&model, &expected, &[&|op| before.contains(&op.path), &inside, &after]);
        }
    }
}

type Keep<'a> = &'a dyn Fn(&Op) -> bool;

/// Cuts and compares.
fn check(model: &TinyModel, expected: &[HashMap<String, Vec<f32>>], parts: &[Keep<'_>]) {
    let full = parts.iter().filter(|keep| model.program.ops.iter().any(keep));
    let places = |keep: &Keep<'_>| (0..model.program.ops.len()).filter(|&op| keep(&model.program.ops[op])).collect::<Vec<_>>();
    let cut = |keep| model.program.cut(places(keep)).unwrap_or_else(|e| panic!("{}: {e}", model.name));
    let parts: Vec<_> = full.map(cut).collect();
    let found = run(&parts, model);
    for (call, (expected, found)) in expected.iter().zip(found).enumerate() {
        for (name, expected) in expected {
            assert_eq!(found.get(name), Some(expected), "{}, call {call}, output `{name}`", model.name);
        }
    }
}

fn whole(model: &TinyModel) -> Checked {
    model.program.clone()
}

/// All outputs of all calls; parts pass on what crosses their cuts by name.
fn run(parts: &[Checked], model: &TinyModel) -> Vec<HashMap<String, Vec<f32>>> {
    let weights: &Arc<dyn Weights> = &model.weights;
    let load = |program| ReferenceDevice.load(program, weights, &LoadOptions { max_wanted: 8, ..Default::default() }).unwrap();
    let mut parts: Vec<(Box<dyn Executable>, Box<dyn State>)> = parts
        .iter()
        .map(load)
        .map(|executable| {
            let state = executable.new_state(64).unwrap();
            (executable, state)
        })
        .collect();
    let mut first = 0;
    calls(model)
        .map(|rows| {
            let mut made = inputs(&model.program, rows, first);
            first += rows;
            for (executable, state) in &mut parts {
                step(&mut **executable, &mut **state, rows, &mut made);
            }
            made
        })
        .into()
}

fn step(executable: &mut dyn Executable, state: &mut dyn State, rows: usize, made: &mut HashMap<String, Vec<f32>>) {
    let program = executable.program().clone();
    let integers: HashMap<&str, Vec<i32>> =
        program.inputs.iter().map(|i| (&*i.name, made[&*i.name].iter().map(|&x| x as i32).collect())).collect();
    let data: Vec<InputData<'_>> = program
        .inputs
        .iter()
        .map(|i| match i.dtype {
            DType::F32 => InputData::F32(&made[&*i.name]),
            DType::I32 => InputData::I32(&integers[&*i.name]),
        })
        .collect();
    let mut segments = [Segment::new(Some(&mut *state), 0, rows)];
    let bindings = Bindings { rows, soft_rows: soft(rows).len(), wanted: 1 };
    let mut outputs = Outputs::new();
    executable.run(&mut Call::new(bindings, &data, &mut segments, &mut outputs)).unwrap();
    state.commit(rows).unwrap();
    made.extend(program.outputs.iter().map(|o| (o.name.to_string(), outputs.value(&o.name).unwrap().to_vec())));
}

/// The rows of a call that are soft.
fn soft(rows: usize) -> Vec<usize> {
    (0..rows).skip(1).step_by(3).collect()
}

/// Numbers for a program's own inputs (integers as floats), the same for the same row of the session.
fn inputs(program: &Checked, rows: usize, first: usize) -> HashMap<String, Vec<f32>> {
    let mut all = HashMap::new();
    for input in &program.inputs {
        let bindings = Bindings { rows, soft_rows: soft(rows).len(), wanted: 1 };
        let length: usize = input.shape.iter().map(|d| d.bind(&bindings).unwrap()).product();
        let width = length.checked_div(rows).unwrap_or(0).max(1);
        let number = |i: usize| ((first * width + i) * 37 % 101) as f32;
        let numbers: Vec<f32> = match input.generator {
            Generator::WantedRows => vec![(rows - 1) as f32],
            Generator::SoftRowsAt => soft(rows).iter().map(|&r| r as f32).collect(),
            Generator::PositionsSequence => (0..length).map(|i| (first + i % rows) as f32).collect(),
            _ if input.dtype == DType::I32 => (0..length).map(|i| (number(i) as usize % 25) as f32).collect(),
            _ => (0..length).map(|i| number(i) / 50.0 - 1.0).collect(),
        };
        all.insert(input.name.to_string(), numbers);
    }
    all
}

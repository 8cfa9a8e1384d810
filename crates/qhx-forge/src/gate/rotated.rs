//! Tests: rotated programs before the gate.

use super::*;
use crate::Rotations;
use qhx_ir::{Bindings, Call, Generator, InputData, LoadOptions, Outputs, Segment, reference::ReferenceDevice};
use std::path::Path;

/// What a test does with a gate and a plan.
type Test<'t> = dyn FnMut(&mut Gate<'_, '_>, &PrecisionPlan, &mut ForgeOptions<'_>) + 't;

fn with(name: &str, precision: Precision, test: &mut Test<'_>) {
    let folder = tempfile::tempdir().unwrap();
    let material = Material::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)).unwrap();
    let out = folder.path().join("model");
    let mut options = ForgeOptions::new(&out, precision);
    let prompts = [3usize, 40].map(|n| GivenPrompt::Ids((0..n as u32).map(|i| i * 37 % 300).collect()));
    let mut silent = |_: GateProgress<'_>| {};
    let gate = GateOptions { prompts: Some(prompts.to_vec()), ..GateOptions::new(&mut silent) };
    let mut gate = Gate::new(&material, &options, gate).unwrap();
    test(&mut gate, &PrecisionPlan { rotations: Rotations::ALL, ..PrecisionPlan::from(precision) }, &mut options);
}

/// The rotated program in f32 is the checkpoint's: every token, every stage in the checkpoint's basis, and logits within 1e-4 of the largest one.
#[test]
fn rotated_programs_pass_the_strict_gate() {
    for name in ["llama", "qwen3", "qwen3_vl", "phimoe", "phimoe_longrope", "qwen3_5", "gemma4"] {
        with(name, Precision::F32, &mut |gate, plan, options| {
            let programs = gate.material.programs(plan).unwrap();
            let staged = gate.material.stage(plan, &programs, options).unwrap();
            let measured = gate.measure(&staged).unwrap();
            assert!(measured.gate.passed && measured.gate.kind == GateKind::Strict, "{name}: {:?}", measured.gate);
            let largest = measured.cases.iter().flat_map(|case| case.top_logits.iter().flatten()).fold(0f32, |m, x| m.max(x.abs()));
            println!("{name}: error {} of {largest}", measured.gate.max_logit_error);
            assert!(measured.gate.max_logit_error < 1e-4 * largest, "{name}: {:?}", measured.gate);
            assert!(measured.cosines.iter().all(|(_, _, lowest)| *lowest > 0.999999), "{name}: {:?}", measured.cosines);
            assert_eq!(gate.damage(&staged, &programs).unwrap(), None, "{name}");
        });
    }
}

/// What a drafting program gives for some rows.
fn predicted(bundle: &Bundle, name: &str) -> Vec<f32> {
    let program = bundle.program(name).unwrap();
    let executable = ReferenceDevice.load(program, &bundle.weights(), &LoadOptions { max_wanted: 4, ..LoadOptions::default() });
    let mut executable = executable.unwrap();
    let mut state = executable.new_state(8).unwrap();
    let width = bundle.manifest().model.hidden_size;
    let hidden: Vec<f32> = (0..4 * width).map(|n| (n as f32 * 0.7).sin()).collect();
    let (ids, positions) = ([3, 300, 41, 7], [0, 1, 2, 3].repeat(3));
    let inputs = program.inputs.iter().map(|input| match input.generator {
        Generator::NextIds => InputData::I32(&ids),
        Generator::HiddenRows => InputData::F32(&hidden),
        Generator::ChainedRows => InputData::F32(&hidden[..width]),
        Generator::ChainedRowsAt => InputData::I32(&[2]),
        Generator::WantedRows => InputData::I32(&positions[..4]),
        _ => InputData::I32(&positions),
    });
    let (inputs, mut outputs): (Vec<_>, _) = (inputs.collect(), Outputs::new());
    let mut segments = [Segment::new(Some(&mut *state), 0, 4)];
    executable.run(&mut Call::new(Bindings { rows: 4, soft_rows: 1, wanted: 4 }, &inputs, &mut segments, &mut outputs)).unwrap();
    [outputs.value("hidden").unwrap(), outputs.value("logits").unwrap()].concat()
}

/// A drafting program predicts the same with the table and the output head that a rotated text stores, one tensor or two.
#[test]
fn a_drafting_program_uses_rotated_weights() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/qwen3_5/config.json");
    let mut config: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(folder).unwrap()).unwrap();
    for tied in [true, false] {
        config["tie_word_embeddings"] = tied.into();
        let material = Material::Synthetic { config: config.clone(), seed: 3 };
        let made = [Rotations::default(), Rotations { normed: false, ..Rotations::ALL }, Rotations::ALL].map(|rotations| {
            let folder = tempfile::tempdir().unwrap();
            let out = folder.path().join("model");
            let plan = PrecisionPlan { rotations, ..PrecisionPlan::from(Precision::F32) };
            let programs = material.programs(&plan).unwrap();
            let staged = material.stage(&plan, &programs, &mut ForgeOptions::new(&out, Precision::F32)).unwrap();
            let is_rotated = programs.programs[0].program.stages.iter().any(|stage| stage.rotated);
            assert_eq!(is_rotated, rotations.residual, "tied: {tied}");
            predicted(&staged.open().unwrap(), "mtp")
        });
        let largest = made[0].iter().fold(0f32, |m, x| m.max(x.abs()));
        for rotated in &made[1..] {
            let difference = made[0].iter().zip(rotated).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
            assert!(largest > 0.1 && difference < 1e-4 * largest, "tied: {tied}: {difference} of {largest}");
        }
    }
}

/// Stages that are run alone take rows of their own basis.
#[test]
fn stages_of_a_rotated_program_are_measured_on_rotated_rows() {
    for name in ["llama", "qwen3_vl", "phimoe"] {
        with(name, Precision::F16, &mut |gate, plan, _| {
            for (stage, error) in search::stage_errors(gate, plan).unwrap() {
                assert!(error > 0.0 && error < 1e-3, "{name}, {stage}: {error}");
            }
        });
    }
}

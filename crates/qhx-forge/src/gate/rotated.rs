//! Tests: rotated programs before the gate.

use super::*;
use crate::Rotations;
use qhx_ir::{Bindings, Call, Dim, Generator, InputData, LoadOptions, Outputs, Segment, reference::ReferenceDevice};
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
    let kept: Vec<f32> = (0..4 * 1024).map(|n| (n as f32 * 0.3).cos()).collect();
    let of_rows = |shape: &[Dim]| &kept[..4 * shape.iter().map(|dim| if let Dim::Fixed(n) = dim { *n } else { 1 }).product::<usize>()];
    let inputs = program.inputs.iter().map(|input| match input.generator {
        Generator::TextKeys(_) | Generator::TextValues(_) => InputData::F32(of_rows(&input.shape)),
        Generator::PositionsNext => InputData::I32(&positions[..4]),
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

/// The configuration of a fixture.
fn config(name: &str) -> serde_json::Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name).join("config.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Gemma 4 with its drafter.
fn with_drafter() -> serde_json::Value {
    let mut gemma = config("gemma4");
    gemma["drafter"] = config("gemma4/drafter");
    gemma
}

/// A drafting program predicts the same with the table and the output head that a rotated text stores, one tensor or two.
#[test]
fn a_drafting_program_uses_rotated_weights() {
    let [mut tied, mut untied] = [config("qwen3_5"), config("qwen3_5")];
    (tied["tie_word_embeddings"], untied["tie_word_embeddings"]) = (true.into(), false.into());
    for (name, config) in [("mtp", tied), ("mtp", untied), ("drafter", with_drafter())] {
        let tied = config["tie_word_embeddings"].clone();
        let material = Material::Synthetic { config, seed: 3 };
        let made = [Rotations::default(), Rotations { normed: false, ..Rotations::ALL }, Rotations::ALL].map(|rotations| {
            let folder = tempfile::tempdir().unwrap();
            let out = folder.path().join("model");
            let plan = PrecisionPlan { rotations, ..PrecisionPlan::from(Precision::F32) };
            let programs = material.programs(&plan).unwrap();
            let staged = material.stage(&plan, &programs, &mut ForgeOptions::new(&out, Precision::F32)).unwrap();
            let is_rotated = programs.programs[0].program.stages.iter().any(|stage| stage.rotated);
            // Norms with weights behind its layers forbid it in Gemma 4; its table is rotated for the products behind norms alone.
            assert_eq!(is_rotated, rotations.residual && name == "mtp", "{name}, tied: {tied}");
            predicted(&staged.open().unwrap(), name)
        });
        let largest = made[0].iter().fold(0f32, |m, x| m.max(x.abs()));
        for rotated in &made[1..] {
            let difference = made[0].iter().zip(rotated).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
            assert!(largest > 0.1 && difference < 1e-4 * largest, "{name}, tied: {tied}: {difference} of {largest}");
        }
    }
}

/// Values that a drafting program reads stay as they are; others are rotated.
#[test]
fn values_that_are_read_are_not_rotated() {
    let material = Material::Synthetic { config: with_drafter(), seed: 3 };
    let [plain, rotated] = [false, true].map(|values| {
        let rotations = Rotations { values, ..Rotations::default() };
        material.programs(&PrecisionPlan { rotations, ..PrecisionPlan::from(Precision::F32) }).unwrap()
    });
    let recipe = |programs: &Programs, layer: usize| {
        let name = format!("layers.{layer}.self_attn.v_proj.weight");
        format!("{:?}", programs.programs[0].recipes[&*name])
    };
    let is_rotated = |layer: &usize| recipe(&plain, *layer) != recipe(&rotated, *layer);
    let drafter = rotated.programs.iter().find(|written| *written.program.name == *"drafter").unwrap();
    assert_eq!(drafter.program.slots.keys().map(|slot| &**slot).collect::<Vec<_>>(), ["layers.3.kv", "layers.4.kv"]);
    assert_eq!((0..5).filter(is_rotated).collect::<Vec<_>>(), [0, 1, 2]);
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

//! Tests: rotated programs before the gate.

use super::*;
use crate::Rotations;
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

//! A synthetic bundle computes what a bundle of a checkpoint of the same configuration does, op for op: what is measured on one holds for the other.

use qhx_bundle::Bundle;
use qhx_forge::{Calibration, ForgeOptions, Precision, forge_checkpoint, forge_synthetic, write_synthetic_checkpoint};
use qhx_ir::{ActivationForm, Encoding, OpKind, Program};
use qhx_runtime::memory::stored_bits;
use std::{fs, path::Path};

const FAMILIES: [&str; 6] = ["llama", "qwen3", "qwen3_vl", "qwen3_5", "phimoe", "gemma4"];

/// Bundles of a fixture's configuration at a precision: with random weights, and forged from a calibrated checkpoint with the same.
fn bundles(name: &str, precision: Precision) -> [Bundle; 2] {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name);
    let config = serde_json::from_slice(&fs::read(fixture.join("config.json")).unwrap()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let [checkpoint, synthetic, forged] = ["checkpoint", "synthetic", "forged"].map(|part| folder.path().join(part));
    write_synthetic_checkpoint(&config, 3, &mut ForgeOptions::new(&checkpoint, Precision::F32)).unwrap();
    for file in ["tokenizer.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"] {
        if fixture.join(file).exists() {
            fs::copy(fixture.join(file), checkpoint.join(file)).unwrap();
        }
    }
    forge_synthetic(&config, 3, &mut ForgeOptions::new(&synthetic, precision)).unwrap();
    let calibration = Some(Calibration::default());
    forge_checkpoint(&checkpoint, &mut ForgeOptions { calibration, ..ForgeOptions::new(&forged, precision) }).unwrap();
    [synthetic, forged].map(|place| Bundle::open(&place).unwrap())
}

/// All families, or by default some that are unlike one another.
fn families(some: [&'static str; 2]) -> Vec<&'static str> {
    if crate::extended() { FAMILIES.into() } else { some.into() }
}

fn programs(bundle: &Bundle) -> Vec<Program> {
    bundle.programs().values().map(|program| Program::clone(program)).collect()
}

#[test]
fn at_w8_the_programs_are_those_of_the_forge() {
    for name in families(["phimoe", "qwen3_5"]) {
        let [synthetic, forged] = bundles(name, Precision::W8).map(|bundle| programs(&bundle));
        assert_eq!(synthetic, forged, "{name}");
        let text = synthetic.iter().find(|program| *program.name == *"text").unwrap();
        let has_hadamard = text.ops.iter().any(|op| matches!(op.op, OpKind::Hadamard { .. }));
        assert!(has_hadamard || text.stages.iter().any(|stage| stage.rotated), "{name} is rotated");
        let has_row_scales = text.ops.iter().any(|op| matches!(op.op, OpKind::Linear { activation: ActivationForm::I8Row, .. }));
        assert_eq!(has_row_scales, name != "phimoe", "{name}: rotated rows have one scale, but where there is a router");
    }
}

/// A program with all integers of one kind.
fn without_encodings(mut program: Program) -> Program {
    for weight in program.weights.values_mut().filter(|weight| !weight.encoding.is_float() || weight.shape.len() > 1) {
        weight.encoding = Encoding::F16;
    }
    for op in &mut program.ops {
        if let OpKind::Linear { activation: form, .. } | OpKind::Experts { form, .. } = &mut op.op {
            *form = ActivationForm::F32;
        }
    }
    program
}

/// Which matrices get more than four bits is measured of a checkpoint, and shared out evenly where weights are random.
#[test]
fn at_w4_they_differ_in_which_matrices_have_more_bits() {
    for name in families(["gemma4", "llama"]) {
        let [synthetic, forged] = bundles(name, Precision::W4).map(|bundle| programs(&bundle));
        let bits = |programs: &[Program]| -> f64 {
            programs.iter().flat_map(|program| program.weights.values()).map(|weight| stored_bits(weight.encoding, &weight.shape)).sum()
        };
        let (ours, theirs) = (bits(&synthetic), bits(&forged));
        assert!((ours / theirs - 1.0).abs() < 0.01, "{name}: {ours} bits, {theirs} forged");
        for (synthetic, forged) in synthetic.into_iter().zip(forged) {
            assert_eq!(without_encodings(synthetic), without_encodings(forged), "{name}");
        }
    }
}

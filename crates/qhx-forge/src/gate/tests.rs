use super::{
    limits::exceeded,
    verdict::{Outcome, sentence},
    *,
};
use crate::read::{SourceType, testing::tiny_gguf};
use qhx_bundle::{BundleError, manifest::FileEntry, parity::Closeness, safetensors::read_header};
use std::{fs, path::Path};

#[test]
fn a_wrong_program_or_weight_is_not_through_and_its_stage_stands_out() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/llama");
    let folder = tempfile::tempdir().unwrap();
    let material = Material::open(&fixture).unwrap();
    let out = folder.path().join("model");
    let mut options = ForgeOptions::new(&out, Precision::F16);
    let prompts = [3usize, 40].map(|n| GivenPrompt::Ids((0..n as u32).map(|i| i * 37 % 300).collect()));
    let mut silent = |_: GateProgress<'_>| {};
    let gate = GateOptions { prompts: Some(prompts.to_vec()), ..GateOptions::new(&mut silent) };
    let mut gate = Gate::new(&material, &options, gate).unwrap();
    let plan = PrecisionPlan::from(Precision::F16);
    let programs = material.programs(&plan).unwrap();
    let mut staged = material.stage(&plan, &programs, &mut options).unwrap();
    let cosine_of = |measured: &Measurement, stage: &str| measured.cosines.iter().find(|(name, ..)| **name == *stage).unwrap().1;
    let right = gate.measure(&staged).unwrap();
    assert!(right.gate.passed && cosine_of(&right, "layers.1.ffn") > 0.99999, "{:?}", right.gate);

    let mut wrong = (*programs.programs[0].program).clone();
    let scale = wrong.ops.iter_mut().find_map(|op| match &mut op.op {
        OpKind::Attend { scale, .. } if op.path.starts_with("layers.1.") => Some(scale),
        _ => None,
    });
    *scale.unwrap() *= 1.5;
    staged.set_program(&wrong).unwrap();
    let measured = gate.measure(&staged).unwrap();
    assert!(!measured.gate.passed, "{:?}", measured.gate);
    assert!(cosine_of(&measured, "layers.0.ffn") > 0.99999 && cosine_of(&measured, "layers.1.attn") < 0.999, "{:?}", measured.cosines);

    staged.set_program(&programs.programs[0].program).unwrap();
    damage(&staged, "layers.2.mlp.down_proj.weight").unwrap();
    let measured = gate.measure(&staged).unwrap();
    assert!(!measured.gate.passed, "{:?}", measured.gate);
    assert!(cosine_of(&measured, "layers.2.attn") > 0.99999 && cosine_of(&measured, "layers.2.ffn") < 0.9999, "{:?}", measured.cosines);
    drop(staged);
    assert_eq!(fs::read_dir(folder.path()).unwrap().filter(|e| e.as_ref().unwrap().path().is_dir()).count(), 0, "nothing is left");
}

/// A model whose weights nobody trained loses more by any rounding than the limits of the class allow, and passes by the measure of plain rounding; a wrong program does not.
#[test]
fn a_sensitive_model_is_held_to_plain_rounding() {
    let all = [("llama", Precision::W4), ("phimoe", Precision::F16), ("qwen3_vl", Precision::W8)];
    for &(name, precision) in if std::env::var_os("QHX_EXTENDED").is_some() { &all[..] } else { &all[..1] } {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name);
        let folder = tempfile::tempdir().unwrap();
        let material = Material::open(&fixture).unwrap();
        let out = folder.path().join("model");
        let mut options = ForgeOptions::new(&out, precision);
        let mut silent = |_: GateProgress<'_>| {};
        let mut gate = Gate::new(&material, &options, GateOptions::new(&mut silent)).unwrap();
        let plan = mixture::plan(&material, &mut options).unwrap();
        let search::Outcome { mut staged, programs, measurement, .. } = search::fixed(&mut gate, plan, &mut options).unwrap();
        let right = measurement.gate;
        let plain = right.closeness.as_ref().unwrap().plain;
        assert!(right.passed && plain.is_some(), "{name}: {}", right.result);

        let mut wrong = (*programs.programs[0].program).clone();
        for op in &mut wrong.ops {
            if let OpKind::Attend { scale, .. } = &mut op.op {
                *scale *= 1.5;
            }
        }
        staged.set_program(&wrong).unwrap();
        let measured = gate.measure(&staged).unwrap().gate;
        assert!(!measured.passed, "{name}: {}", measured.result);
        println!("{name}\n  {}\n  {}", right.result, measured.result);
        // What plain rounding loses does not depend on the bundle's program: a wrong one cannot excuse itself.
        gate.plain = None;
        let anew = gate.measure(&staged).unwrap().gate;
        assert!(!anew.passed && anew.closeness.unwrap().plain.is_some(), "{name}: {}", anew.result);
    }
}

#[test]
fn a_wrong_tower_stands_out_too() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/qwen3_vl");
    let folder = tempfile::tempdir().unwrap();
    let material = Material::open(&fixture).unwrap();
    let out = folder.path().join("model");
    let mut options = ForgeOptions::new(&out, Precision::F32);
    let mut silent = |_: GateProgress<'_>| {};
    let gate = GateOptions { prompts: Some(vec![GivenPrompt::Ids(vec![1, 2, 3])]), ..GateOptions::new(&mut silent) };
    let mut gate = Gate::new(&material, &options, gate).unwrap();
    let plan = PrecisionPlan::from(Precision::F32);
    let programs = material.programs(&plan).unwrap();
    let mut staged = material.stage(&plan, &programs, &mut options).unwrap();
    let right = gate.measure(&staged).unwrap();
    assert!(right.gate.passed && right.gate.prompts == 3, "{:?}", right.gate);
    assert!(right.cosines.iter().all(|(_, mean, _)| *mean > 0.999999), "{:?}", right.cosines);
    let tower = programs.programs.iter().find(|written| *written.program.name == *"vision").unwrap();
    let mut wrong = (*tower.program).clone();
    let scale = wrong.ops.iter_mut().find_map(|op| match &mut op.op {
        OpKind::Attend { scale, .. } if op.path.starts_with("vision.1.") => Some(scale),
        _ => None,
    });
    *scale.unwrap() *= 3.0;
    staged.set_program(&wrong).unwrap();
    let measured = gate.measure(&staged).unwrap();
    let cosine_of = |stage: &str| measured.cosines.iter().find(|(name, ..)| **name == *stage).unwrap().1;
    assert!(cosine_of("vision.0") > 0.999999 && cosine_of("vision.1") < 0.9999, "{:?}", measured.cosines);
    assert!(!measured.gate.passed, "{:?}", measured.gate);
}

/// A gate of a checkpoint at `native`, and what it holds the bundle to.
fn native_standard(source: &Path) -> Standard {
    let folder = tempfile::tempdir().unwrap();
    let material = Material::open(source).unwrap();
    let out = folder.path().join("model");
    let mut options = ForgeOptions::new(&out, Precision::Native);
    let mut silent = |_: GateProgress<'_>| {};
    let gate = Gate::new(&material, &options, GateOptions::new(&mut silent)).unwrap();
    let plan = PrecisionPlan::from(Precision::Native);
    let staged = material.stage(&plan, &material.programs(&plan).unwrap(), &mut options).unwrap();
    gate.standard(&staged.open().unwrap(), GateKind::Tolerant)
}

/// So many times the limits of a standard's class, in a measurement so long that chance explains nothing: whether that passes, and the sentence.
fn at(standard: &Standard, times: f64) -> (bool, String) {
    const TOKENS: usize = 1_000_000;
    let limits = standard.limits;
    let found = Closeness {
        class: standard.class.clone(),
        tokens: TOKENS,
        flips: (times * limits.flips * TOKENS as f64) as usize,
        ties: 0,
        wide_flips: 0,
        mean_kl: times * limits.mean_kl,
        mean_kl_error: 0.0,
        p99_kl: times * limits.p99_kl.unwrap(),
        above_p99: TOKENS / 10,
        limits: standard.failing(),
        own_types: standard.own_types,
        plain: None,
    };
    let outcome = Outcome { exceeded: exceeded(&found), answer_flips: 1, answer_tokens: 100, finite: true };
    (outcome.passed(standard.kind), sentence(standard, &found, &outcome))
}

/// Integer types of a file are measured, and fail only where something is broken; floats have nothing to lose and keep the limits of their class.
#[test]
fn only_integer_types_of_a_file_are_merely_measured() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    let mut integers = tiny_gguf();
    let block = [&0x2400u16.to_le_bytes()[..], &[1u8; 32]].concat(); // a scale of 1/64, and 32 numbers
    integers.tensors.last_mut().unwrap().3 = block.repeat(8);
    fs::write(&file, integers.bytes()).unwrap();
    let standard = native_standard(&file);
    assert!(standard.own_types && standard.class == Class::Int8Activations.name(), "{standard:?}");
    assert_eq!(standard.limits, Class::Int8Activations.limits(false));
    let (passed, told) = at(&standard, 2.0);
    assert!(passed && told.ends_with(": this is the cost of the file's own types (int8 activations)"), "{told}");
    assert!(!told.contains("limit") && !told.contains("not as good"), "{told}");
    let (passed, told) = at(&standard, 10.0);
    assert!(
        !passed && told.contains("more than the file's own types (int8 activations) can cost: 40 % of tokens differ (limit 32 %)"),
        "{told}"
    );

    let mut halves = tiny_gguf();
    for (name, source_type, _, data) in &mut halves.tensors {
        let is_matrix = !name.contains("norm");
        let numbers = if *source_type == SourceType::Q8_0 { 256 } else { data.len() / 4 };
        if is_matrix {
            (*source_type, *data) = (SourceType::F16, 0x2400u16.to_le_bytes().repeat(numbers));
        }
    }
    fs::write(&file, halves.bytes()).unwrap();
    let llama = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/llama");
    for (source, class) in [(&*file, Class::F16), (&*llama, Class::F32)] {
        let standard = native_standard(source);
        assert!(!standard.own_types && standard.class == class.name(), "{standard:?}");
        assert_eq!((standard.limits, standard.failing()), (class.limits(false), class.limits(false)));
        let (passed, told) = at(&standard, 2.0);
        assert!(!passed && told.contains(&format!("not as good as {} can be", class.name())), "{told}");
    }
}

/// Negates a quarter of a weight's numbers and makes the sums fit.
fn damage(staged: &Staged, weight: &str) -> Result<(), BundleError> {
    let mut manifest = staged.manifest().clone();
    let file = manifest.weights[0].clone();
    let place = staged.path().join(file.as_str());
    let mut bytes = fs::read(&place).unwrap();
    let range = read_header(&bytes).unwrap().tensors[weight].range.clone();
    bytes[range].iter_mut().skip(1).step_by(8).for_each(|byte| *byte ^= 0x80);
    manifest.files.insert(file, FileEntry { bytes: bytes.len() as u64, sha256: Digest::of(&bytes) });
    fs::write(&place, &bytes).unwrap();
    fs::write(staged.path().join("qhx.json"), manifest.to_json().unwrap()).unwrap();
    staged.open().map(drop)
}

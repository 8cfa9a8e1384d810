//! Calibrated rounding over whole models: what is written does not depend on threads, says how it was made, and is nearer to the f32 model than plain rounding.

use qhx_bundle::{Bundle, manifest::Rounding};
use qhx_forge::{Calibration, CalibrationTexts, ForgeError, ForgeOptions, Material, Precision};
use qhx_ir::{ActivationForm, Bindings, Call, Checked, Generator, InputData, LoadOptions, OpKind, Outputs, Program, Segment};
use qhx_runtime::{
    WholeInputs, registry,
    text::{SpecialTokens, Tokenizer},
};
use std::{fs, path::Path};

fn material(fixture: &str) -> Material {
    Material::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(fixture)).unwrap()
}

fn forge(material: &Material, out: &Path, precision: Precision, calibration: Option<Calibration>) -> Result<Bundle, ForgeError> {
    let mut options = ForgeOptions { replace: true, calibration, ..ForgeOptions::new(out, precision) };
    Ok(Bundle::open(material.forge(&mut options)?.path)?)
}

fn calibration(threads: usize) -> Option<Calibration> {
    Some(Calibration { threads: Some(threads), ..Calibration::default() })
}

/// What nothing is calibrated by.
const TEXT: &str = "When the mill closed, the river kept turning the wheel for another year, because nobody had thought of stopping it. Children counted its rounds: 12, 24, 36. \
    \"It grinds the time,\" said the youngest, and (for once) nobody laughed; they only looked at the water and at the white stones below.";

/// The sum of squares of how far a bundle's logits are from another's.
fn distance(a: &Bundle, b: &Bundle) -> f64 {
    let [a, b] = [a, b].map(logits);
    a.iter().zip(&b).map(|(a, b)| f64::from(a - b).powi(2)).sum()
}

/// All logits of the first ids of a text, with f32 activations: the noise of integer ones would hide what weights do.
fn logits(bundle: &Bundle) -> Vec<f32> {
    let mut program = Program::clone(bundle.program("text").unwrap());
    for op in &mut program.ops {
        if let OpKind::Linear { activation: form, .. } | OpKind::Experts { form, .. } = &mut op.op {
            *form = ActivationForm::F32;
        }
    }
    let program = &Checked::new(program).unwrap();
    let tokenizer = Tokenizer::from_bytes(&bundle.read(bundle.manifest().tokenizer.as_ref().unwrap()).unwrap()).unwrap();
    let ids = tokenizer.encode(TEXT, true, SpecialTokens::AsText).unwrap()[..96].to_vec();
    let wanted: Vec<i32> = (0..96).collect();
    let inputs = WholeInputs::new(program, &bundle.manifest().media, bundle.manifest().tokens.pad, &ids, &[]);
    let lend = |generator: &Generator| match generator {
        Generator::WantedRows => InputData::I32(&wanted),
        generator => inputs.get(generator).unwrap(),
    };
    let lent: Vec<InputData<'_>> = program.inputs.iter().map(|input| lend(&input.generator)).collect();
    let options = LoadOptions { max_rows: 96, max_wanted: 96, ..LoadOptions::default() };
    let mut executable = registry::plain(Some(2)).unwrap().load(program, &bundle.weights(), &options).unwrap();
    let mut state = executable.new_state(96).unwrap();
    let mut segments = [Segment::new(Some(&mut *state), 0, 96)];
    let mut outputs = Outputs::new();
    let bindings = Bindings { rows: 96, soft_rows: 0, wanted: 96 };
    executable.run(&mut Call::new(bindings, &lent, &mut segments, &mut outputs)).unwrap();
    outputs.value("logits").unwrap().to_vec()
}

#[test]
fn bundles_are_the_same_for_any_threads_and_nearer_to_f32() {
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| folder.path().join(name);
    for fixture in ["llama", "phimoe"] {
        let material = material(fixture);
        let exact = forge(&material, &place("exact"), Precision::F32, calibration(1)).unwrap();
        assert_eq!(exact.manifest().rounding, None, "nothing was rounded");
        for precision in [Precision::W8, Precision::W4] {
            let plain = forge(&material, &place("plain"), precision, None).unwrap();
            let one = forge(&material, &place("one"), precision, calibration(1)).unwrap();
            let two = forge(&material, &place("two"), precision, calibration(2)).unwrap();
            for weights in &one.manifest().weights {
                let read = |name: &str| fs::read(place(name).join(weights.as_str())).unwrap();
                assert!(read("one") == read("two"), "{fixture} {precision}: {weights} depends on the number of threads");
                assert!(read("one") != read("plain"), "{fixture} {precision}: nothing was calibrated");
            }
            assert_eq!(plain.manifest().rounding, Some(Rounding::Plain));
            assert_eq!(one.manifest().rounding, two.manifest().rounding);
            let Some(Rounding::Calibrated(made)) = &one.manifest().rounding else { panic!("{:?}", one.manifest().rounding) };
            assert!(made.texts == "built-in" && made.tokens >= 512, "{made:?}");
            // An untrained router takes other experts after the slightest rounding: at int8 chance decides which rounding is nearer.
            if (fixture, precision) == ("phimoe", Precision::W8) {
                continue;
            }
            let (calibrated, plain) = (distance(&one, &exact), distance(&plain, &exact));
            assert!(calibrated < plain, "{fixture} {precision}: {calibrated} is no less than {plain}");
        }
    }
}

#[test]
fn towers_are_calibrated_by_media_and_tables_are_left() {
    let folder = tempfile::tempdir().unwrap();
    for fixture in ["qwen3_vl", "gemma4"] {
        let bundle = forge(&material(fixture), &folder.path().join("made"), Precision::W8, calibration(2)).unwrap();
        assert!(matches!(bundle.manifest().rounding, Some(Rounding::Calibrated(_))), "{fixture}");
    }
}

#[test]
fn too_few_tokens_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("short.txt");
    fs::write(&file, "A short text.").unwrap();
    let texts = CalibrationTexts::read(&file).unwrap();
    let out = folder.path().join("made");
    let error = forge(&material("llama"), &out, Precision::W8, Some(Calibration { texts, threads: None })).unwrap_err().to_string();
    assert!(error.contains("short.txt has ") && error.contains("at least "), "{error}");
    assert!(!out.exists());
}

#[test]
fn cancelling_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("made");
    let cancel = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let mut told = |progress: qhx_forge::Progress<'_>| {
        assert!(progress.left.is_some(), "calibration comes first and tells its time");
        cancel.store(true, std::sync::atomic::Ordering::Relaxed);
    };
    let mut options = ForgeOptions {
        calibration: calibration(2),
        cancel: cancel.clone(),
        progress: Some(&mut told),
        ..ForgeOptions::new(&out, Precision::W8)
    };
    let error = material("llama").forge(&mut options).unwrap_err().to_string();
    assert!(error.contains("cancelled"), "{error}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

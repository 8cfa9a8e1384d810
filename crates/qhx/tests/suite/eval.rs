//! Evaluation, for every family: against plain sums over logits, against the checkpoint, and of a model against itself.
#![cfg(feature = "cpu")]

use qhx::{
    Error,
    bundle::Bundle,
    eval::{Against, EvalError, EvalOptions, Evaluation, evaluate, read_text},
    forge::{ForgeOptions, Material, Precision},
    runtime::{self, Cancel, LoadOptions},
};
use std::{
    fs,
    path::{Path, PathBuf},
};

const FAMILIES: [&str; 7] = ["llama", "qwen3", "qwen3_vl", "qwen3_5", "phimoe", "phimoe_longrope", "gemma4"];
const TEXT: &str = "The tide comes in twice a day, and each time the boats turn round. Nobody has to tell them: they are tied at one end only. \
    A child asked why the water goes away. \"It is needed elsewhere,\" said the woman who mends nets, and she was right.";

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)
}

fn forge(material: &Material, folder: &Path, precision: Precision) -> Bundle {
    let out = folder.join(precision.to_string());
    let mut options = ForgeOptions::new(&out, precision);
    material.forge(&mut options).unwrap();
    Bundle::open(&out).unwrap()
}

fn measured(bundle: &Bundle, window: usize, against: Option<Against<'_>>) -> Evaluation {
    evaluate(bundle, TEXT, EvalOptions { window: Some(window), against, ..EvalOptions::default() }).unwrap()
}

/// Log-probabilities of a row, and the token that follows.
type Row = (Vec<f64>, usize);

/// Log-probabilities of every row of the text's windows, and the token that follows on each.
fn log_probabilities(bundle: &Bundle, window: usize) -> Vec<Row> {
    let options = LoadOptions { wanted: 512, chunk: 512, context: Some(window), ..LoadOptions::default() };
    let model = runtime::Model::load(bundle, &options).unwrap();
    let mut session = model.session().unwrap();
    let mut found = Vec::new();
    for ids in runtime::eval::windows(&model, TEXT, window).unwrap() {
        session.reset();
        let rows = &ids[..ids.len() - 1];
        session
            .append_showing(rows, rows.len(), &Cancel::new(), &mut |row, logits| {
                let sum: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
                found.push((logits.iter().map(|&x| f64::from(x) - sum.ln()).collect(), ids[row + 1] as usize));
            })
            .unwrap();
    }
    found
}

fn perplexity(rows: &[Row]) -> f64 {
    (-rows.iter().map(|(row, next)| row[*next]).sum::<f64>() / rows.len() as f64).exp()
}

fn best(row: &[f64]) -> usize {
    (0..row.len()).rev().max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap()
}

#[track_caller]
fn assert_close(found: f64, expected: f64, tolerance: f64, what: &str) {
    assert!((found - expected).abs() <= tolerance * expected.abs().max(1e-12), "{what}: {found}, expected {expected}");
}

#[test]
fn every_family_is_scored_as_by_plain_sums() {
    for name in FAMILIES {
        let folder = tempfile::tempdir().unwrap();
        let material = Material::open(&fixture(name)).unwrap();
        let [f32, w4] = [Precision::F32, Precision::W4].map(|precision| forge(&material, folder.path(), precision));
        // Several windows, the last one shorter. One where constants change with the length is longer than that length.
        let window = if name == "phimoe_longrope" { 100 } else { 24 };
        let (expected, found) = (log_probabilities(&f32, window), log_probabilities(&w4, window));
        assert!(expected.len() > 30, "{name}: {} tokens", expected.len());

        let same = measured(&w4, window, Some(Against::Bundle(&w4)));
        let against = same.scores.against.as_ref().unwrap();
        assert_eq!((against.kl_mean, against.kl_max, against.flips, against.delta_p_rms), (0.0, 0.0, 0.0, 0.0), "{name}");
        assert_eq!(against.reference_perplexity, same.scores.perplexity, "{name}");

        let alone = measured(&w4, window, None);
        assert!(alone.scores.tokens == found.len() && alone.windows > 1, "{name}: {alone:?}");
        assert_close(alone.scores.perplexity, perplexity(&found), 1e-9, name);
        assert_close(same.scores.perplexity, alone.scores.perplexity, 1e-12, name);
        assert!(alone.bits_per_weight < measured(&f32, window, None).bits_per_weight, "{name}");

        let kl = |(p, q): (&Row, &Row)| p.0.iter().zip(&q.0).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
        let mut kls: Vec<f64> = expected.iter().zip(&found).map(kl).collect();
        let mean = kls.iter().sum::<f64>() / kls.len() as f64;
        kls.sort_by(f64::total_cmp);
        let flips = expected.iter().zip(&found).filter(|(p, q)| best(&p.0) != best(&q.0)).count() as f64 / kls.len() as f64;
        // The two f32 programs are one bundle of a checkpoint and the checkpoint itself: sums in another order, nothing else.
        for (against, tolerance) in [(Against::Bundle(&f32), 1e-6), (Against::Checkpoint(&material), 1e-3)] {
            let measured = measured(&w4, window, Some(against));
            let found = measured.scores.against.unwrap();
            assert_close(found.kl_mean, mean, tolerance, name);
            assert_close(found.kl_median, kls[kls.len().div_ceil(2) - 1], tolerance, name);
            assert_close(found.kl_max, kls[kls.len() - 1], tolerance, name);
            assert_close(found.reference_perplexity, perplexity(&expected), tolerance, name);
            assert!((found.flips - flips).abs() < 1e-9 && mean > 1e-6, "{name}: {} flips, expected {flips}", found.flips);
        }
        let exact = measured(&f32, window, Some(Against::Checkpoint(&material))).scores.against.unwrap();
        assert!(exact.kl_max < 1e-8 && exact.flips == 0.0, "{name}: {exact:?}");
    }
}

#[test]
fn what_cannot_be_scored_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let material = Material::open(&fixture("llama")).unwrap();
    let bundle = forge(&material, folder.path(), Precision::F32);
    let of = |text: &str, window| match evaluate(&bundle, text, EvalOptions { window, ..EvalOptions::default() }) {
        Err(Error::Runtime(runtime::Error::Eval(error))) => error,
        other => panic!("{other:?}"),
    };
    assert!(matches!(of("", None), EvalError::TooShort { tokens: 0 | 1 }));
    assert!(of("", None).to_string().contains("at least 2 are needed"));
    assert!(matches!(of(TEXT, Some(1)), EvalError::Window { window: 1, .. }));
    assert!(of(TEXT, Some(1 << 30)).to_string().contains("expected 2 to"));

    let other = Material::open(&fixture("gemma4")).unwrap();
    let others = tempfile::tempdir().unwrap();
    let other_bundle = forge(&other, others.path(), Precision::F32);
    for against in [Against::Checkpoint(&other), Against::Bundle(&other_bundle)] {
        let error = evaluate(&bundle, TEXT, EvalOptions { against: Some(against), ..EvalOptions::default() }).unwrap_err().to_string();
        assert!(error.contains("different tokens"), "{error}");
    }

    let file = folder.path().join("text");
    for (bytes, expected) in [(&b"\xff\xfe"[..], "is not a text file"), (b"a\0b", "without NUL")] {
        fs::write(&file, bytes).unwrap();
        let error = read_text(&file).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    assert!(read_text(folder.path()).unwrap_err().to_string().contains("folder"));
    let cancel = Cancel::new();
    cancel.cancel();
    let stopped = evaluate(&bundle, TEXT, EvalOptions { cancel, ..EvalOptions::default() }).unwrap_err();
    assert!(stopped.is_cancelled(), "{stopped}");
}

//! Every tower, and every text program that takes its rows, against Hugging Face transformers in f32: on the reference interpreter and on the CPU.
//!
//! `QHX_FIXTURES` names another folder of fixtures (other seeds and dimensions).

use crate::common::{self, Overlay, media::MediaCases, relative_difference};
use qhx_forge::Precision;
use qhx_ir::{Device, reference::ReferenceDevice};

/// Of the largest magnitude of a tensor.
const TOLERANCE: f32 = 1e-4;

fn each_fixture(check: impl Fn(&MediaCases, &dyn Device)) {
    let mut tested = 0;
    for entry in std::fs::read_dir(common::fixtures()).unwrap() {
        let Some(cases) = MediaCases::forge(&entry.unwrap().path()) else { continue };
        check(&cases, &ReferenceDevice);
        check(&cases, &*common::cpu());
        tested += 1;
    }
    assert!(tested >= 1, "no fixtures with media in {}", common::fixtures().display());
}

/// Cosine and largest difference relative to the largest magnitude.
fn compare(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}: numbers");
    let largest = expected.iter().fold(0f32, |m, x| m.max(x.abs()));
    let worst = found.iter().zip(expected).fold(0f32, |m, (a, b)| m.max((a - b).abs())) / largest;
    let cosine = cosine(found, expected);
    println!("{what}: cosine {cosine:.9}, largest difference {worst:.2e}");
    assert!(cosine >= 0.999999 && worst <= TOLERANCE, "{what}: cosine {cosine}, largest difference {worst}");
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

#[test]
fn towers_equal_the_oracle() {
    each_fixture(|cases, device| {
        let place = format!("{} on {}", cases.fixture.name, device.name());
        for (medium, (program, soft_rows)) in &cases.media {
            let program = cases.fixture.bundle().program(program).unwrap_or_else(|| panic!("{place}: no program for {medium}"));
            let outcome = cases.encode(device, (**program).clone(), &Overlay::default(), &[medium]);
            let mut compared = 0;
            for (output, values) in &outcome.outputs {
                let expected = cases.oracle(&format!("{medium}.{output}")).unwrap_or_else(|| panic!("no {medium}.{output}"));
                assert_eq!(expected.len() % soft_rows, 0);
                compare(&format!("{place}: {medium}.{output}"), values, &expected);
            }
            for (stage, values) in &outcome.taps {
                if let Some(expected) = cases.oracle(&format!("{medium}.tap.{stage}")) {
                    compare(&format!("{place}: {medium}.tap.{stage}"), values, &expected);
                    compared += 1;
                }
            }
            assert!(!medium.ends_with(".0") || compared >= 3, "{place}: {medium} has {compared} taps");
        }
    });
}

/// Tiny towers with random weights suffer more from few bits than real ones: the bounds only say that nothing is broken. How each precision is to be computed is
/// stated by the program, and the CPU is held to that.
#[test]
fn towers_run_at_every_precision() {
    for (precision, least) in [(Precision::F16, 0.9999), (Precision::W8, 0.95), (Precision::W4, 0.6)] {
        for name in ["qwen3_vl", "gemma4"] {
            let cases = MediaCases::forge_at(&common::fixtures().join(name), precision).expect("media cases");
            for (medium, (program, _)) in cases.media.iter().filter(|(medium, _)| medium.ends_with(".0")) {
                let program = cases.fixture.bundle().program(program).unwrap();
                let run = |device: &dyn Device| {
                    let outcome = cases.encode(device, (**program).clone(), &Overlay::default(), &[medium]);
                    outcome.outputs["soft_rows"].clone()
                };
                let (reference, cpu) = (run(&ReferenceDevice), run(&*common::cpu()));
                let expected = cases.oracle(&format!("{medium}.soft_rows")).unwrap();
                let (same, near) = (cosine(&cpu, &reference), cosine(&cpu, &expected));
                println!("{name} at {precision}: {medium}: cosine {same:.7} with the reference, {near:.5} with the oracle");
                assert!(
                    same >= 0.9995 && near >= least,
                    "{name} at {precision}: {medium}: {same} with the reference, {near} with the oracle"
                );
            }
        }
    }
}

#[test]
fn several_media_in_one_call_do_not_see_each_other() {
    each_fixture(|cases, device| {
        for program in ["vision", "audio"] {
            let media: Vec<&str> = cases.media.iter().filter(|(_, (p, _))| *p == program).map(|(name, _)| &**name).collect();
            let Some(program) = cases.fixture.bundle().program(program) else { continue };
            // Rows that are merged by fours start where four begin: sounds of any length cannot follow each other without padding.
            if *program.name == *"audio" {
                continue;
            }
            let outcome = cases.encode(device, (**program).clone(), &Overlay::default(), &media);
            for (output, values) in &outcome.outputs {
                let expected = media.iter().flat_map(|medium| cases.oracle(&format!("{medium}.{output}")).unwrap());
                compare(&format!("{}: {output} of all media", cases.fixture.name), values, &expected.collect::<Vec<_>>());
            }
        }
    });
}

#[test]
fn prompts_with_media_equal_the_oracle() {
    each_fixture(|cases, device| {
        let text = cases.fixture.program();
        for prompt in &cases.prompts {
            let name = format!("{} on {}: {}", cases.fixture.name, device.name(), prompt.name);
            // Soft rows, then deepstack rows, of all media one after the other.
            let mut rows: Vec<Vec<f32>> = Vec::new();
            for medium in &prompt.media {
                let program = cases.fixture.bundle().program(cases.media[medium].0).unwrap();
                let outcome = cases.encode(device, (**program).clone(), &Overlay::default(), &[medium]);
                let deepstack = (0..).map_while(|n| outcome.outputs.get(&format!("deepstack.{n}")));
                for (n, values) in std::iter::once(&outcome.outputs["soft_rows"]).chain(deepstack).enumerate() {
                    rows.resize_with(rows.len().max(n + 1), Vec::new);
                    rows[n].extend_from_slice(values);
                }
            }
            let outcome = cases.read(device, text.clone(), &Overlay::default(), prompt, &rows);
            for (stage, values) in &outcome.taps {
                if let Some(expected) = cases.oracle(&format!("{}.tap.{stage}", prompt.name)) {
                    let rows = prompt.ids.len() * expected.len() / prompt.ids.len();
                    compare(&format!("{name}: tap {stage}"), &values[..rows], &expected);
                }
            }
            let logits = &outcome.outputs["logits"];
            if let Some(expected) = cases.oracle(&format!("{}.step_logits", prompt.name)) {
                let difference = relative_difference(&logits[..expected.len()], &expected);
                println!("{name}: logits differ by {difference:.2e}");
                assert!(difference <= 1e-3, "{name}: logits differ by {difference}");
            }
            let vocabulary = logits.len() / prompt.greedy.len();
            for (step, &token) in logits.chunks(vocabulary).zip(&prompt.greedy) {
                let best = step.iter().enumerate().rev().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0;
                assert_eq!(best as i32, token, "{name}");
            }
        }
    });
}

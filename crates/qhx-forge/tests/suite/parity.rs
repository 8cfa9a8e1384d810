//! Every family against Hugging Face transformers in f32: the fixtures are forged, then run by the reference interpreter and on the CPU.
//!
//! `QHX_FIXTURES` names another folder of fixtures (other seeds and dimensions).

use crate::common::{self, Fixture, Overlay, Prompt, relative_difference};
use qhx_ir::{Device, reference::ReferenceDevice};
use std::collections::HashMap;

#[test]
fn every_fixture_equals_the_oracle() {
    let mut tested = 0;
    for entry in std::fs::read_dir(common::fixtures()).unwrap() {
        let folder = entry.unwrap().path();
        if folder.join("oracle.json").exists() {
            let fixture = Fixture::forge(&folder);
            // The interpreter is made to be read, not to be fast: long prompts and answers are for the devices.
            let short = fixture.prompts.iter().filter(|p| p.ids.len() <= 70 && p.greedy.len() <= 24);
            short.for_each(|prompt| check_prompt(&fixture, prompt, &ReferenceDevice));
            let cpu = common::cpu();
            fixture.prompts.iter().for_each(|prompt| check_prompt(&fixture, prompt, &*cpu));
            println!("{}: equal", fixture.name);
            tested += 1;
        }
    }
    assert!(tested >= 1, "no fixtures in {}", common::fixtures().display());
}

fn check_prompt(fixture: &Fixture, prompt: &Prompt, device: &dyn Device) {
    let (program, ids, greedy) = (fixture.program(), &prompt.ids, &prompt.greedy);
    let name = format!("{} on {}: {}", fixture.name, device.name(), prompt.name);
    let close = |what: &str, found: &[f32], expected: &[f32], tolerance: f32| {
        let difference = relative_difference(found, expected);
        assert!(difference <= tolerance, "{name}: {what} differs by {difference}");
    };
    let mut running = fixture.load(device, program.clone(), &Overlay::default(), prompt);
    let mut epoch = program.epoch(ids.len());
    let mut taps = HashMap::new();
    let mut logits = running.step(ids, epoch, true, &mut |tap| {
        taps.insert(tap.stage.to_string(), tap.values.to_vec());
    });
    if let Some(expected) = fixture.oracle(&format!("{}.prompt_logits", prompt.name)) {
        close("prompt logits", &logits, &expected, 1e-3);
    }
    for (stage, values) in &taps {
        if let Some(expected) = fixture.oracle(&format!("{}.tap.{stage}", prompt.name)) {
            close(&format!("tap {stage}"), values, &expected, 1e-4);
        }
    }
    let vocabulary = logits.len() / ids.len();
    logits.drain(..(ids.len() - 1) * vocabulary);
    let steps = fixture.oracle(&format!("{}.step_logits", prompt.name));
    for (n, &expected) in greedy.iter().enumerate() {
        if let Some(steps) = &steps {
            close(&format!("step {n}"), &logits, &steps[n * vocabulary..][..vocabulary], 1e-3);
        }
        let best = logits.iter().enumerate().rev().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0;
        assert_eq!(best as i32, expected, "{name}: generated token {n}");
        // Crossing into another epoch reads the whole text again.
        let now = program.epoch(ids.len() + n + 1);
        logits = if now == epoch {
            running.step(&[expected], epoch, false, &mut |_| {})
        } else {
            epoch = now;
            running.restart();
            running.step(&[ids, &greedy[..=n]].concat(), epoch, false, &mut |_| {})
        };
    }
}

//! Every family against Hugging Face transformers in f32: the fixtures are forged, then run by the reference interpreter.
//!
//! `QHX_FIXTURES` names another folder of fixtures (other seeds and dimensions).

use qhx_bundle::Bundle;
use qhx_forge::{ForgeOptions, Precision, forge_checkpoint, read::safetensors};
use qhx_ir::{
    Bindings, Call, Checked, Device, Executable, Generator, InputData, LoadOptions, Segment, State, Tap, reference::ReferenceDevice,
};
use serde_json::Value;
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

#[test]
fn every_fixture_equals_the_oracle() {
    let folder =
        std::env::var_os("QHX_FIXTURES").map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures"), PathBuf::from);
    let mut tested = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        let fixture = entry.unwrap().path();
        if fixture.join("oracle.json").exists() {
            check_fixture(&fixture);
            tested += 1;
        }
    }
    assert!(tested >= 1, "no fixtures in {}", folder.display());
}

fn check_fixture(fixture: &Path) {
    let name = fixture.file_name().unwrap().to_string_lossy().into_owned();
    let temporary = tempfile::tempdir().unwrap();
    let out = temporary.path().join(&name);
    let mut options =
        ForgeOptions { out: &out, precision: Precision::F32, replace: false, cancel: Default::default(), progress: &mut |_| {} };
    forge_checkpoint(fixture, &mut options).unwrap_or_else(|e| panic!("{name}: {e}"));
    let bundle = Bundle::open(&out).unwrap_or_else(|e| panic!("{name}: {e}"));
    let program = bundle.program("text").unwrap();
    let oracle: Value = serde_json::from_str(&std::fs::read_to_string(fixture.join("oracle.json")).unwrap()).unwrap();
    let tensors = safetensors::open_file(&fixture.join("oracle.safetensors")).unwrap();
    let numbers = |tensor: &str| {
        let info = tensors.find(tensor)?;
        let mut out = vec![0.0; info.shape.iter().product()];
        tensors.read_f32(tensor, 0..info.rows(), &mut out).unwrap();
        Some(out)
    };
    for prompt in oracle["prompts"].as_array().unwrap() {
        let label = prompt["name"].as_str().unwrap();
        let ids = |field: &str| prompt[field].as_array().unwrap().iter().map(|id| id.as_i64().unwrap() as i32).collect::<Vec<_>>();
        let (ids, greedy) = (ids("ids"), ids("greedy"));
        // The interpreter is made to be read, not to be fast: long prompts and answers are for the devices.
        if ids.len() > 70 || greedy.len() > 24 {
            continue;
        }
        let options = LoadOptions { max_rows: ids.len() + greedy.len(), max_wanted: ids.len(), ..Default::default() };
        let mut executable = ReferenceDevice.load(program, &bundle.weights(), &options).unwrap();
        let mut state = executable.new_state(ids.len() + greedy.len()).unwrap();
        let mut taps = HashMap::new();
        let mut logits = step(&mut *executable, &mut *state, &ids, program.epoch(ids.len()), true, &mut |tap| {
            taps.insert(tap.stage.to_string(), tap.values.to_vec());
        });
        if let Some(expected) = numbers(&format!("{label}.prompt_logits")) {
            assert_close(&format!("{name}: {label} prompt logits"), &logits, &expected, 1e-3);
        }
        for (stage, values) in &taps {
            if let Some(expected) = numbers(&format!("{label}.tap.{stage}")) {
                assert_close(&format!("{name}: {label} tap {stage}"), values, &expected, 1e-4);
            }
        }
        let vocabulary = logits.len() / ids.len();
        logits.drain(..(ids.len() - 1) * vocabulary);
        let expected_steps = numbers(&format!("{label}.step_logits"));
        let mut epoch = program.epoch(ids.len());
        for (n, &expected) in greedy.iter().enumerate() {
            if let Some(steps) = &expected_steps {
                assert_close(&format!("{name}: {label} step {n}"), &logits, &steps[n * vocabulary..][..vocabulary], 1e-3);
            }
            let best = logits.iter().enumerate().rev().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0;
            assert_eq!(best as i32, expected, "{name}: {label}, generated token {n}");
            let now = program.epoch(ids.len() + n + 1);
            let rows = if now == epoch { vec![expected] } else { [&ids, &greedy[..=n]].concat() };
            if now != epoch {
                (state, epoch) = (executable.new_state(ids.len() + greedy.len()).unwrap(), now);
            }
            logits = step(&mut *executable, &mut *state, &rows, epoch, false, &mut |_| {});
        }
    }
    println!("{name}: equal");
}

/// Appends rows to the session; gives the logits of all of them or of the last.
fn step(
    executable: &mut dyn Executable,
    state: &mut dyn State,
    ids: &[i32],
    epoch: usize,
    all: bool,
    taps: &mut dyn FnMut(Tap<'_>),
) -> Vec<f32> {
    let program: Checked = executable.program().clone();
    let (rows, first) = (ids.len(), state.len() as i32);
    let positions: Vec<i32> = (0..rows as i32).map(|i| first + i).collect();
    let three = positions.repeat(3);
    let wanted: Vec<i32> = if all { (0..rows as i32).collect() } else { vec![rows as i32 - 1] };
    let inputs: Vec<InputData<'_>> = program
        .inputs
        .iter()
        .map(|input| match input.generator {
            Generator::Ids | Generator::IdsMediaAsPad => InputData::I32(ids),
            Generator::PositionsSequence => InputData::I32(&positions),
            Generator::PositionsMrope => InputData::I32(&three),
            Generator::WantedRows => InputData::I32(&wanted),
            ref other => panic!("no {other:?} in a text prompt"),
        })
        .collect();
    let mut segments = [Segment { state: Some(&mut *state), first_row: 0, valid_rows: rows }];
    let bindings = Bindings { rows, soft_rows: 0, wanted: wanted.len() };
    let mut call = Call { bindings, inputs: &inputs, segments: &mut segments, epoch, cancel: None, taps: Some(taps) };
    executable.run(&mut call).unwrap();
    state.commit(rows).unwrap();
    executable.output("logits").unwrap().to_vec()
}

/// Within `tolerance` of the larger of 1 and the largest magnitude.
fn assert_close(what: &str, found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let scale = expected.iter().fold(1f32, |m, x| m.max(x.abs()));
    let worst = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst <= tolerance * scale, "{what}: differs by {worst}");
}

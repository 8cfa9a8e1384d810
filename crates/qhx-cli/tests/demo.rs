//! The demo models on their held-out cases: what transformers in f32 answered, token for token in f32 and f16, and at w8 but for a few close calls.

mod common;

use common::{DEVICE, ids, json, read_json, scratch, succeed};
use serde_json::Value;
use std::path::{Path, PathBuf};

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo")
}

/// The ids of an answer to a case.
fn answer(bundle: &str, case: &Value) -> Value {
    let (prompt, expected) = (ids(&case["prompt_ids"]), case["ids"].as_array().unwrap().len().to_string());
    let mut arguments = vec!["generate", bundle, "--ids", &prompt, "--max-new", &expected, "--ignore-eos", "--json", "--device", DEVICE];
    let media: Vec<(String, PathBuf)> =
        ["image", "audio"].into_iter().filter_map(|kind| Some((format!("--{kind}"), demo().join(case[kind].as_str()?)))).collect();
    for (flag, file) in &media {
        arguments.extend([flag.as_str(), file.to_str().unwrap()]);
    }
    json(arguments)["ids"].clone()
}

/// Tokens in all, and those that differ from what was recorded (a case counts from its first different token on).
fn differing(model: &str, precision: &str) -> (usize, usize) {
    let folder = scratch();
    let bundle = folder.path().join(model);
    let (source, out) = (demo().join(model), bundle.to_str().unwrap());
    succeed(["forge", source.to_str().unwrap(), "--out", out, "--precision", precision, "--gate", "none"]);
    let cases = read_json(&source.join("heldout.json"))["cases"].as_array().unwrap().clone();
    assert!(cases.len() > 150, "{model} has lost its cases");
    let (mut tokens, mut different) = (0, 0);
    for case in &cases {
        let (found, expected) = (answer(out, case), case["ids"].as_array().unwrap());
        let same = found.as_array().unwrap().iter().zip(expected).take_while(|(a, b)| a == b).count();
        tokens += expected.len();
        different += expected.len() - same;
        if same < expected.len() {
            println!("{model} at {precision}, {}: differs from token {same} on, smallest margin {}", case["set"], case["margin"]);
        }
    }
    (tokens, different)
}

#[test]
#[cfg(feature = "cpu")]
fn held_out_cases_are_answered_as_by_transformers() {
    for model in ["phimoe", "qwen3_5", "qwen3-vl", "gemma4"] {
        for precision in ["f32", "f16", "w8"] {
            let (tokens, different) = differing(model, precision);
            println!("{model} at {precision}: {different} of {tokens} tokens differ");
            let allowed = if precision == "w8" { tokens / 100 } else { 0 };
            assert!(different <= allowed, "{model} at {precision}: {different} of {tokens} tokens differ, {allowed} may");
        }
    }
}

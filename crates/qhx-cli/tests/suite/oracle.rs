//! Every recorded prompt of every family, through `qhx forge` and `qhx generate`: the same ids as transformers in f32, and the same logits.

use crate::common::{self, DEVICE, FAMILIES, bundle, copy_folder, fixture, forge, ids, json, read_json, scratch, tensors};
use serde_json::Value;
use std::{fs, path::Path};

/// Ways to cut the prompt and to share the work; none may change a token.
const WAYS: [&[&str]; 7] = [
    &[],
    &["--threads", "1"],
    &["--threads", "2"],
    &["--chunk", "1", "--threads", "2"],
    &["--chunk", "7", "--threads", "1"],
    &["--chunk", "7", "--threads", "2"],
    &["--chunk", "16", "--threads", "2"],
];
const LOGITS_TOLERANCE: f32 = 1e-3;

/// Prompts with many tokens are asked for once more only, in the smallest chunks: they cost the most.
fn ways(prompt: &Value) -> &'static [&'static [&'static str]] {
    match (DEVICE, prompt["ids"].as_array().unwrap().len() + prompt["greedy"].as_array().unwrap().len()) {
        ("reference", 200..) => &[],
        ("reference", _) => &WAYS[4..5],
        (_, 200..) => &WAYS[2..5],
        _ => &WAYS,
    }
}

fn generate(bundle: &Path, prompt: &Value, extra: &[&str]) -> Value {
    let max_new = prompt["greedy"].as_array().unwrap().len().to_string();
    let prompt_ids = ids(&prompt["ids"]);
    let mut arguments = vec!["generate", bundle.to_str().unwrap(), "--ids", &prompt_ids, "--max-new", &max_new];
    arguments.extend(["--ignore-eos", "--json", "--device", DEVICE]);
    arguments.extend(extra);
    json(arguments)
}

/// Holds a bundle to the oracle recorded for `family`.
fn hold(bundle: &Path, family: &str) {
    let oracle = read_json(&fixture(family).join("oracle.json"));
    let recorded = tensors(&fixture(family).join("oracle.safetensors"));
    let folder = scratch();
    let (mut runs, mut with_logits) = (0, 0);
    for prompt in oracle["prompts"].as_array().unwrap() {
        let name = prompt["name"].as_str().unwrap();
        for way in ways(prompt) {
            let found = generate(bundle, prompt, way);
            assert_eq!(found["ids"], prompt["greedy"], "{family}, prompt {name}, {way:?}");
            assert_eq!(found["prompt_ids"], prompt["ids"]);
            runs += 1;
        }
        let Some((shape, expected)) = recorded.get(&format!("{name}.step_logits")) else { continue };
        let file = folder.path().join("logits.safetensors");
        for way in ways(prompt) {
            generate(bundle, prompt, &[*way, &["--logits", file.to_str().unwrap()]].concat());
            let (found_shape, found) = &tensors(&file)["step_logits"];
            assert_eq!(found_shape, shape, "{family}, prompt {name}");
            let worst = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst <= LOGITS_TOLERANCE, "{family}, prompt {name}, {way:?}: logits are off by {worst}");
            with_logits += 1;
        }
    }
    assert!(runs >= 8 && with_logits > 3, "{family}: the oracle has lost its prompts ({runs} runs, {with_logits} with logits)");
}

macro_rules! families {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            hold(&bundle(stringify!($name)), stringify!($name));
        })*

        #[test]
        fn every_family_has_its_test() {
            assert_eq!([$(stringify!($name)),*], FAMILIES);
        }
    };
}

families!(llama qwen3 qwen3_vl phimoe phimoe_longrope qwen3_5 gemma4);

#[test]
fn llama_through_gguf() {
    hold(&bundle("llama-gguf"), "llama");
}

#[test]
fn qwen3_through_gguf() {
    hold(&bundle("qwen3-gguf"), "qwen3");
}

/// Gemma 4 without inputs per layer, as a configuration says that has 0 for their size.
#[test]
fn gemma4_without_inputs_per_layer() {
    let folder = scratch();
    let (checkpoint, bundle) = (copy_folder(&fixture("gemma4"), &folder.path().join("checkpoint")), folder.path().join("bundle"));
    let mut config = read_json(&checkpoint.join("config.json"));
    config["text_config"]["hidden_size_per_layer_input"] = 0.into();
    fs::write(checkpoint.join("config.json"), config.to_string()).unwrap();
    // The checkpoint still has their tensors: they are left out.
    forge(&checkpoint, &bundle, "f32");
    let prompts = &read_json(&checkpoint.join("absent.json"))["prompts"];
    let answers = |bundle: &Path| {
        let answer = |prompt| generate(bundle, prompt, &[])["ids"].clone();
        prompts.as_array().unwrap().iter().map(answer).collect::<Vec<_>>()
    };
    let greedy: Vec<_> = prompts.as_array().unwrap().iter().map(|prompt| prompt["greedy"].clone()).collect();
    assert_eq!(answers(&bundle), greedy);
    assert!(greedy.len() == 2 && answers(&common::bundle("gemma4")).iter().zip(&greedy).all(|(with, without)| with != without));
}

//! `--device npu` in QNN's emulator, held to transformers; and what is said where there is no QNN.

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod bundles;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod edges;

use crate::common::{fail, failed, fixture, forge, ids, json, qhx, ran, read_json, scratch};
use serde_json::Value;
use std::path::Path;

/// Prompts whose margins are wide enough for the NPU's halves, shorter and longer than what its prefill graph takes.
const PROMPTS: [&str; 2] = ["len5", "len64"];
const NEW: usize = 6;

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn generates_what_the_oracle_does_and_says_that_it_ran_there() {
    let folder = scratch();
    let bundle = folder.path().join("bundle");
    forge(&fixture("qwen3"), &bundle, "f16");
    let oracle = read_json(&fixture("qwen3").join("oracle.json"));
    for name in PROMPTS {
        let prompt = oracle["prompts"].as_array().unwrap().iter().find(|prompt| prompt["name"] == name).unwrap();
        let (prompt_ids, new) = (ids(&prompt["ids"]), NEW.to_string());
        let input = ["--ids", &prompt_ids, "--max-new", &new, "--ignore-eos", "--context", "96"];
        let found = json(["generate", bundle.to_str().unwrap(), "--device", "npu", "--json"].into_iter().chain(input));
        assert_eq!(found["ids"].as_array().unwrap()[..], prompt["greedy"].as_array().unwrap()[..NEW], "{name}");
        let stages = found["stages"].as_array().unwrap();
        let on = |stage: &Value| if stage["stage"] == "embed" { "host" } else { "npu" };
        assert!(stages.iter().all(|stage| stage["device"] == on(stage)) && stages.len() > 3, "{stages:?}");
        assert_eq!(found["fallbacks"], Value::Array(vec![]));
    }
}

/// The ears on the NPU, the rest on the processor.
#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn speech_with_the_audio_tower_on_the_npu() {
    let (folder, demo) = (scratch(), Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo"));
    let (bundle, placement) = (folder.path().join("bundle"), folder.path().join("placement.toml"));
    forge(&demo.join("gemma4"), &bundle, "f16");
    std::fs::write(&placement, "default = \"cpu\"\n[stages]\naudio = \"npu\"\n").unwrap();
    let cases = read_json(&demo.join("gemma4/heldout.json"));
    let case = cases["cases"].as_array().unwrap().iter().find(|case| case["audio"] == "media/utterance-00.wav").unwrap();
    let sound = demo.join("media/utterance-00.wav");
    let [bundle, sound, placement] = [&bundle, &sound, &placement].map(|path| path.to_str().unwrap());
    let user = case["messages"][0]["content"][1]["text"].as_str().unwrap();
    let found = json(["generate", bundle, "--placement", placement, "--audio", sound, "--user", user, "--context", "512", "--json"]);
    assert_eq!(found["text"], case["text"], "{found}");
    let stages = found["stages"].as_array().unwrap();
    let on_npu = |stage: &&Value| stage["stage"].as_str().unwrap().starts_with("audio");
    let (tower, text): (Vec<&Value>, Vec<&Value>) = stages.iter().partition(on_npu);
    assert!(tower.len() > 2 && tower.iter().any(|s| s["device"] == "npu"), "{tower:?}");
    assert!(tower.iter().all(|s| s["device"] == "npu" || s["device"] == "host") && tower.iter().all(|s| s["runs"] == 1), "{tower:?}");
    assert!(text.iter().all(|s| s["device"] == "cpu"), "{text:?}");
    assert_eq!(found["fallbacks"], Value::Array(vec![]));
}

#[test]
fn without_qnn_it_says_what_is_missing() {
    let folder = scratch();
    let mut command = qhx(["generate", "builtin", "--ids", "1", "--device", "npu"]);
    command.env("QHX_QNN_DIR", folder.path());
    failed(ran(command.output().unwrap()), 1, &["device `npu` cannot be used", "libQnnHtp.so", "QHX_QNN_DIR"]);
    let nowhere = folder.path().join("nowhere");
    let (source, nowhere, out) = (fixture("llama"), nowhere.to_str().unwrap(), folder.path().join("out"));
    let forge = ["forge", source.to_str().unwrap(), "--out", out.to_str().unwrap(), "--target", "v81", "--qnn-dir", nowhere];
    fail(forge, 1, &["device `npu` cannot be used: there is no folder", nowhere, "libQnnSystem.so"]);
    let mut command = qhx(["generate", "builtin", "--ids", "1", "--device", "npu"]);
    command.env("QHX_NPU_ARCH", "banana");
    failed(ran(command.output().unwrap()), 2, &["QHX_NPU_ARCH is `banana`, expected v79 or v81"]);
}

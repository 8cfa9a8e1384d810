//! The edges of what graphs hold, from arch folders: prompts longer than a prefill graph, as long as the context and longer, sessions that go on as rings, and folders
//! that failed their gate. Answers are transformers'.

use crate::{
    common::{self, copy_folder, fail, fixture, ids, json, listing, qhx, ran, read_json, scratch, succeed, tensors},
    npu::bundles::{on_npu, published, text},
};
use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Rows of the prefill graph: prompts have one token less than twice as many, as many, and one more.
const ROWS: &str = "32";
/// Tokens that are compared behind each prompt.
const NEW: usize = 3;

/// A fixture's arch folder, copied out of its bundle.
fn folder(name: &str, scratch: &Path, flags: &[&str]) -> PathBuf {
    let (bundle, source) = (scratch.join(name), fixture(name));
    let made = ["forge", text(&source), "--out", text(&bundle), "--gate", "none", "--for", "emulator", "--precision", "f16", "--json"];
    let report = json(made.iter().chain(flags));
    let arch = report["targets"][0]["folder"].as_str().unwrap().to_owned();
    let alone = copy_folder(&bundle.join(&arch), &scratch.join("alone").join(arch));
    fs::remove_dir_all(bundle).unwrap();
    alone
}

fn prompt(fixture_name: &str, record: &str, name: &str) -> (Vec<u64>, Vec<u64>) {
    let record = read_json(&fixture(fixture_name).join(record));
    let prompt = record["prompts"].as_array().unwrap().iter().find(|prompt| prompt["name"] == name).unwrap();
    let numbers = |field: &str| prompt[field].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
    (numbers("ids"), numbers("greedy"))
}

fn json_of(ids: &[u64]) -> Value {
    ids.into()
}

/// `1,2,3`
fn listed(list: &[u64]) -> String {
    ids(&json_of(list))
}

fn answer(folder: &Path, ids: &[u64], new: usize) -> Value {
    let (ids, new) = (listed(ids), new.to_string());
    let found = json(["generate", text(folder), "--device", "npu", "--ids", &ids, "--max-new", &new, "--ignore-eos", "--json"]);
    on_npu(&found);
    found
}

/// What of each layer the processor itself has run, and that nothing else of it ran elsewhere than on the host.
fn layers_on_npu(found: &Value, kinds: &[&str]) {
    let stages = found["stages"].as_array().unwrap();
    for kind in kinds.iter().chain(&["head"]) {
        let of_kind: Vec<&Value> = stages.iter().filter(|stage| stage["stage"].as_str().unwrap().ends_with(kind)).collect();
        let on_npu = |stage: &Value| of_kind.iter().any(|other| other["stage"] == stage["stage"] && other["device"] == "npu");
        assert!(!of_kind.is_empty() && of_kind.iter().all(|stage| on_npu(stage)), "{kind}: {stages:?}");
    }
}

/// Prompts longer than the prefill graph, one that fills the context, and one that does not fit.
///
/// Extended, the longest has 529 tokens instead of 65, and both generations run: attention over so many rows takes the emulator
/// minutes.
fn check(name: &str, arch: &str, kinds: &[&str], flags: &[&str]) {
    match crate::extended() {
        false => check_up_to("len65", name, arch, kinds, flags),
        true => ["v79", "v81"].iter().for_each(|arch| check_up_to("len529", name, arch, kinds, flags)),
    }
}

fn check_up_to(longest: &str, name: &str, arch: &str, kinds: &[&str], flags: &[&str]) {
    let scratch = scratch();
    let (ids, greedy) = prompt(name, "oracle.json", longest);
    // What transformers goes on with, as a prompt, fills the context.
    let full = [&ids[..], &greedy[..NEW - 1]].concat();
    let context = full.len().to_string();
    let sizes = ["--target", arch, "--context", &context, "--prefill", ROWS];
    let folder = folder(name, scratch.path(), &[&sizes[..], flags].concat());
    for length in ["len63", "len64", longest].into_iter().skip(if crate::extended() { 0 } else { 1 }) {
        let (ids, greedy) = prompt(name, "oracle.json", length);
        let found = answer(&folder, &ids, NEW);
        assert_eq!(found["ids"], json_of(&greedy[..NEW]), "{name}: {length}");
        assert_ne!(found["prefill_path"], "decode_over_prompt", "{name}: {length}");
        layers_on_npu(&found, kinds);
    }
    // The last row of the context gives one more token and no other.
    let found = answer(&folder, &full, 3);
    assert_eq!((&found["ids"], &found["finish_reason"]), (&json_of(&greedy[NEW - 1..NEW]), &"length".into()), "{name}");
    let beyond = listed(&[&full[..], &greedy[NEW - 1..NEW]].concat());
    let told = [format!("the prompt has {} tokens", full.len() + 1), format!("the context holds {context}")];
    fail(["generate", text(&folder), "--device", "npu", "--ids", &beyond, "--max-new", "1"], 1, &[&told[0], &told[1]]);
    // The run line of published cards.
    let (ids, _) = prompt(name, "oracle.json", "len5");
    for (flag, prompt) in [("--ids", &*listed(&ids)), ("--user", "Who are you?")].into_iter().take(if crate::extended() { 2 } else { 1 }) {
        let line = published(&folder.join(format!("{name}.json")), &folder, 2, &[prompt]);
        let found = json(["generate", text(&folder), flag, prompt, "--max-new", "2", "--json"]);
        assert_eq!((line.code, line.stdout.trim_end()), (Some(0), found["text"].as_str().unwrap().trim_end()), "{name}: {line:?}");
        // Of the experts' random weights one answer is no text.
        assert!(name == "phimoe" || !line.stdout.trim().is_empty(), "{name}: {line:?}");
    }
}

/// More rows of keys than the 512 beyond which attention is said to go wrong on v79, and all that the context has.
#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn a_prompt_of_529_tokens() {
    let scratch = scratch();
    let sizes = ["--target", "v79", "--context", "529", "--prefill", ROWS, "--image-size", "64x64"];
    let folder = folder("qwen3_vl", scratch.path(), &sizes);
    let (ids, greedy) = prompt("qwen3_vl", "oracle.json", "len529");
    assert_eq!(answer(&folder, &ids, 1)["ids"], json_of(&greedy[..1]));
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn phimoe_at_the_edges_of_its_graphs() {
    check("phimoe", "v79", &["attn", "moe"], &[]);
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn qwen3_5_at_the_edges_of_its_graphs() {
    check("qwen3_5", "v81", &["attn", "ffn"], &["--image-size", "64x64"]);
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn gemma4_at_the_edges_of_its_graphs() {
    check("gemma4", "v79", &["attn", "ffn"], &["--audio-seconds", "0.2"]);
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn qwen3_vl_at_the_edges_of_its_graphs() {
    check("qwen3_vl", "v81", &["attn", "ffn"], &["--image-size", "64x64"]);
}

/// Prompts several times as long as the context, whose rows see as many as it has: `oracle/ring.py` has recorded what transformers makes of that.
fn check_ring(name: &str, arch: &str, flags: &[&str]) -> (tempfile::TempDir, PathBuf) {
    let scratch = scratch();
    let record = read_json(&fixture(name).join("ring.json"));
    let window = record["window"].to_string();
    let sizes = ["--target", arch, "--kv", "ring", "--context", &window, "--prefill", "16"];
    let folder = folder(name, scratch.path(), &[&sizes[..], flags].concat());
    let manifest = read_json(&folder.join(format!("{name}.json")));
    assert_eq!((&manifest["plan"]["kv"], &manifest["plan"]["context"]), (&"ring".into(), &record["window"]));
    let prompt = &record["prompts"][0];
    let (prompt_ids, new) = (ids(&prompt["ids"]), prompt["greedy"].as_array().unwrap().len().to_string());
    let found = json(["generate", text(&folder), "--ids", &prompt_ids, "--max-new", &new, "--ignore-eos", "--json"]);
    on_npu(&found);
    assert_eq!(found["ids"], prompt["greedy"], "{name}: with rings of {window} rows; with all rows it were {}", prompt["without_window"]);
    (scratch, folder)
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn phimoe_goes_on_past_the_context_as_a_ring() {
    let (_scratch, folder) = check_ring("phimoe", "v81", &[]);
    // Its own window is narrower than the ring: nothing changes, however long the prompt is.
    let (ids, greedy) = prompt("phimoe", "oracle.json", "len529");
    assert_eq!(answer(&folder, &ids, NEW)["ids"], json_of(&greedy[..NEW]));
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn qwen3_5_goes_on_past_the_context_as_a_ring() {
    _ = check_ring("qwen3_5", "v79", &["--image-size", "64x64"]);
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn gemma4_goes_on_past_the_context_as_a_ring() {
    _ = check_ring("gemma4", "v81", &["--audio-seconds", "0.2"]);
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn qwen3_vl_goes_on_past_the_context_as_a_ring() {
    _ = check_ring("qwen3_vl", "v79", &["--image-size", "64x64"]);
}

/// What the gate of a ring records, its folder does again: prompts that are longer than attention sees are left out, and that is told.
#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn a_ring_is_gated_as_far_as_it_sees() {
    let scratch = scratch();
    let (bundle, prompts, source) = (scratch.path().join("bundle"), scratch.path().join("prompts.json"), fixture("qwen3"));
    let given = ["len65", "len5"].map(|name| prompt("qwen3", "oracle.json", name).0);
    fs::write(&prompts, serde_json::json!(given).to_string()).unwrap();
    let sizes =
        ["--precision", "f16", "--target", "v81", "--for", "emulator", "--kv", "ring", "--context", "32", "--prefill", "16", "--json"];
    let report = json(["forge", text(&source), "--out", text(&bundle), "--prompts", text(&prompts)].iter().chain(&sizes));
    let gate = &report["targets"][0]["gate"];
    assert!(gate["passed"] == true && gate["prompts"] == 1, "{report}");
    assert!(gate["limited"].as_str().unwrap().contains("1 of 2 given prompts do not fit a context of 32"), "{report}");
    let verified = json(["verify", text(&bundle.join("v81")), "--json"]);
    assert!(verified["passed"] == true && verified["device"] == "npu" && verified["tokens"] == gate["tokens"], "{verified}");
}

/// A checkpoint that is right in f32 and beyond what f16 holds: what a layer's first products make 2^16 times as large, the last makes as small again.
fn beyond_f16(to: &Path) -> PathBuf {
    let folder = copy_folder(&fixture("llama"), to);
    let file = folder.join("model.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..start]).unwrap();
    let mut changed = 0;
    for (name, about) in header.as_object().unwrap() {
        let factor = match name {
            name if name.ends_with("up_proj.weight") => 65536.0f32,
            name if name.ends_with("down_proj.weight") => 1.0 / 65536.0,
            _ => continue,
        };
        let [from, to] = [0, 1].map(|end| start + about["data_offsets"][end].as_u64().unwrap() as usize);
        for number in bytes[from..to].chunks_exact_mut(4) {
            let x = f32::from_le_bytes(number.try_into().unwrap()) * factor;
            number.copy_from_slice(&x.to_le_bytes());
        }
        changed += 1;
    }
    assert_eq!(changed, 6, "of three layers");
    fs::write(file, bytes).unwrap();
    folder
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn a_folder_that_failed_its_gate_is_named_so() {
    let scratch = scratch();
    let source = beyond_f16(&scratch.path().join("checkpoint"));
    let prompts = scratch.path().join("prompts.json");
    fs::write(&prompts, "[[5, 6, 7, 8, 9]]").unwrap();
    let bundle = scratch.path().join("bundle");
    let sizes = ["--precision", "f32", "--target", "v81", "--context", "64", "--prefill", "16", "--json", "--prompts", text(&prompts)];
    let run = ran(qhx(["forge", text(&source), "--out", text(&bundle)].iter().chain(&sizes)).output().unwrap());
    assert!(run.code == Some(1) && !run.stderr.contains("panicked"), "{run:?}");
    let told = ["a target failed its gate: v81.rejected: it does not run on v81: ", "left the range of f16"];
    assert!(told.iter().all(|text| run.stderr.contains(text)), "{}", run.stderr);
    let report: Value = serde_json::from_str(&run.stdout).unwrap();
    let target = &report["targets"][0];
    assert!(report["parity"]["passed"] == true && target["gate"]["passed"] == false && target["folder"] == "v81.rejected", "{report}");
    let folders: Vec<String> = listing(&bundle).into_iter().filter(|name| name.starts_with('v')).collect();
    assert_eq!(folders, ["v81.rejected"]);
    assert_eq!(read_json(&bundle.join("v81.rejected/parity.json"))["gate"]["passed"], false);
    // The bundle itself is whole; on the NPU it says the same.
    let ask = ["--ids", "5,6,7", "--max-new", "1", "--context", "32"];
    succeed(["generate", text(&bundle), "--device", common::DEVICE].iter().chain(&ask));
    fail(["generate", text(&bundle), "--device", "npu"].iter().chain(&ask), 1, &["left the range of f16", "place its stage on the CPU"]);
}

/// Weights of four bits, as the forge quantises them, are four bits in the graphs too, and compute what they do on the processor.
#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn four_bits_stay_four_bits() {
    let scratch = scratch();
    let mut config = read_json(&fixture("llama").join("config.json"));
    for (field, value) in [
        ("vocab_size", 512),
        ("hidden_size", 512),
        ("intermediate_size", 1024),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("num_hidden_layers", 2),
    ] {
        config[field] = value.into();
    }
    let file = scratch.path().join("config.json");
    fs::write(&file, config.to_string()).unwrap();
    let sizes = ["--target", "v81", "--for", "emulator", "--context", "32", "--prefill", "none", "--json"];
    let bytes = |precision: &str| {
        let bundle = scratch.path().join(precision);
        json(["synth", text(&file), "--out", text(&bundle), "--precision", precision].iter().chain(&sizes));
        let folder = bundle.join(format!("v81-{precision}"));
        let plan = read_json(&folder.join("text.npu.json"));
        let layers = plan["contexts"].as_array().unwrap().iter().map(|context| context["bytes"].as_u64().unwrap()).max().unwrap();
        let logits = ["cpu", "npu"].map(|device| {
            let (place, file) = (if device == "npu" { &folder } else { &bundle }, scratch.path().join(device));
            let ask = ["--ids", "5,6,7,8,9", "--max-new", "1", "--ignore-eos", "--logits", text(&file)];
            succeed(["generate", text(place), "--device", device].iter().chain(&ask));
            tensors(&file)["step_logits"].1.clone()
        });
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum::<f64>();
        let [a, b] = &logits;
        let cosine = dot(a, b) / (dot(a, a) * dot(b, b)).sqrt();
        println!("{precision}: {layers} bytes, cosine with the processor {cosine:.6}");
        assert!(cosine > 0.998, "{precision}: {cosine}");
        layers
    };
    let (eight, four) = (bytes("w8"), bytes("w4"));
    assert!(four * 100 <= eight * 61, "{four} bytes with four bits, {eight} with eight");
    if crate::extended() {
        let (four_by_row, half_head) = (bytes("w4-row"), bytes("w8-f16head"));
        assert!(four_by_row * 100 <= eight * 55, "{four_by_row} bytes with four bits and a scale per row, {eight} with eight");
        assert!(half_head > eight, "{half_head} bytes with a head of halves, {eight} without");
    }
}

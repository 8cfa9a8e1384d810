//! A real model: SmolLM2-135M-Instruct (Q4_1 and Q8_0 tensors in one GGUF file), held to llama.cpp.
//!
//! Run by `cargo xtask test`, which fetches the file and names it in `QHX_SMOLLM2`.

mod common;

use common::{json, scratch, succeed};
use serde_json::Value;
use std::{
    ffi::OsStr,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// Prompt, its ids and the greedy ids that llama-cpp-python 0.3.36 gives, up to a margin below 0.1: there builds of llama.cpp differ, and so may we.
const COMPLETIONS: &[(&str, &[u32], &[u32])] = &[
    ("The capital of France is", &[504, 3575, 282, 4649, 314], &[7042, 30, 198, 198, 504, 1797, 1918, 553, 253, 2155]),
    ("Once upon a time", &[6403, 1980, 253, 655], &[28, 260, 2240, 282]),
    ("def fibonacci(n):", &[1604, 3987, 46477, 24, 94, 727], &[472, 585, 304, 1758, 216, 32, 42, 448, 1003, 216]),
    ("Water boils at", &[12615, 36411, 418], &[216, 33, 32, 32]),
];

/// The chat of `QUESTION` as llama-cpp-python tokenises what the file's template gives in Jinja: with the template's own system turn, and without.
const QUESTION: &str = "What is the capital of France?";
const CHAT: &[u32] = &[
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198, 1, 4093, 198, 1780,
    314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198,
];
const CHAT_WITHOUT_SYSTEM: &[u32] = &[1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198];

#[test]
#[ignore = "needs a real model: run by `cargo xtask test`"]
fn forged_from_gguf_it_answers_like_llama_cpp() {
    let folder = scratch();
    let bundle = forge(folder.path());
    for (prompt, ids, expected) in COMPLETIONS {
        let found = generate(&bundle, &["--prompt", prompt, "--max-new", "10", "--ignore-eos"]);
        assert_eq!(numbers(&found["prompt_ids"]), *ids, "{prompt}");
        assert_eq!(numbers(&found["ids"])[..expected.len()], **expected, "{prompt}");
        let time = |part: &str| found["timing"][part].as_f64().unwrap();
        assert!(time("lm_head_ms") > 0.0 && time("lm_head_ms") < time("decode_ms") + time("ttft_ms"), "{}", found["timing"]);
    }
    let found = generate(&bundle, &["--prompt", "The capital of France is", "--max-new", "2"]);
    assert_eq!(found["text"], " Paris.");
}

#[test]
#[ignore = "needs a real model: run by `cargo xtask test`"]
fn its_chat_template_can_leave_the_system_turn_out() {
    let folder = scratch();
    let bundle = forge(folder.path());
    let found = generate(&bundle, &["--user", QUESTION, "--max-new", "1"]);
    assert_eq!(numbers(&found["prompt_ids"]), CHAT);
    let found = generate(&bundle, &["--user", QUESTION, "--system", "", "--max-new", "12"]);
    assert_eq!(numbers(&found["prompt_ids"]), CHAT_WITHOUT_SYSTEM);
    assert_eq!(found["text"], "The capital of France is Paris.");
}

fn forge(folder: &Path) -> PathBuf {
    let model = std::env::var_os("QHX_SMOLLM2").expect("QHX_SMOLLM2 names the GGUF file");
    let bundle = folder.join("smollm2");
    let start = Instant::now();
    succeed([OsStr::new("forge"), &model, "--out".as_ref(), bundle.as_ref(), "--gate".as_ref(), "none".as_ref()]);
    assert!(start.elapsed() < Duration::from_secs(10), "forging took {:?}", start.elapsed());
    bundle
}

fn generate(bundle: &Path, flags: &[&str]) -> Value {
    let arguments = [OsStr::new("generate"), bundle.as_ref()].into_iter().chain(flags.iter().map(OsStr::new));
    json(arguments.chain([OsStr::new("--json")]))
}

fn numbers(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as u32).collect()
}

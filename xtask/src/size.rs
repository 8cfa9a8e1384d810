//! The size of what git tracks: everyone who clones the repository fetches it.

use crate::{Failure, graph::output, root};
use std::process::Command;

/// All files together.
const MOST_BYTES: u64 = 60 << 20;
/// A file that is larger needs a reason below.
const LARGE: u64 = 400_000;

/// The large files, and why they are here.
const REASONS: [(&str, &str); 17] = [
    ("crates/qhx-gpu/spirv/step.spv", "the GPU's decoding step, so that a build needs no shader compiler"),
    ("crates/qhx-gpu/spirv/step_timed.spv", "the same with clocks, for traces"),
    ("crates/qhx/builtin/weights/00001-of-00001.safetensors", "the model in the binary"),
    ("demo/gemma4/model.safetensors", "the demo model of its architecture"),
    ("demo/phimoe/model.safetensors", "the demo model of its architecture"),
    ("demo/qwen3-vl/model.safetensors", "the demo model of its architecture"),
    ("demo/qwen3_5/model.safetensors", "the demo model of its architecture, from which the built-in one is forged"),
    ("fixtures/gemma4/media.safetensors", "what transformers computes of images and sounds"),
    ("fixtures/gemma4/model.safetensors", "the weights that the oracle computes with"),
    ("fixtures/llama-gguf/model.gguf", "a file as llama.cpp writes it"),
    ("fixtures/llama/model.safetensors", "the weights that the oracle computes with"),
    ("fixtures/media/numbers.safetensors", "what transformers' front ends make of images and sounds"),
    ("fixtures/phimoe/model.safetensors", "the weights that the oracle computes with"),
    ("fixtures/phimoe_longrope/model.safetensors", "the weights that the oracle computes with"),
    ("fixtures/qwen3-gguf/model.gguf", "a file as llama.cpp writes it"),
    ("fixtures/qwen3_5/model.safetensors", "the weights that the oracle computes with"),
    ("fixtures/qwen3_vl/model.safetensors", "the weights that the oracle computes with"),
];

/// Adds up the tracked files as they lie here.
pub(crate) fn check() -> Result<(), Failure> {
    let listed = output(Command::new("git").args(["ls-files", "-z"]).current_dir(root()))?;
    // One that is deleted and not committed yet counts nothing.
    let size = |file: &str| root().join(file).symlink_metadata().map_or(0, |found| found.len());
    let files: Vec<(&str, u64)> = listed.split_terminator('\0').map(|file| (file, size(file))).collect();
    let large = |name: &str| files.iter().any(|(file, bytes)| *file == name && *bytes > LARGE);
    let mut problems = Vec::new();
    for (file, bytes) in files.iter().filter(|(file, bytes)| *bytes > LARGE && REASONS.iter().all(|(name, _)| name != file)) {
        problems.push(format!("{file} has {} kB: keep it out, or give a reason", bytes / 1000));
    }
    for (name, _) in REASONS.iter().filter(|(name, _)| !large(name)) {
        problems.push(format!("{name} is listed and is not there, or not large"));
    }
    let all: u64 = files.iter().map(|(_, bytes)| bytes).sum();
    if all > MOST_BYTES {
        problems.push(format!("all tracked files have {:.1} MiB; at most {} are allowed", all as f64 / (1 << 20) as f64, MOST_BYTES >> 20));
    }
    match problems.is_empty() {
        true => Ok(()),
        false => Err(format!("what git tracks (xtask/src/size.rs):\n{}", problems.join("\n"))),
    }
}

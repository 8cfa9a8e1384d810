//! A gate holds one stage in f32 at a time, and never a whole table. A test of its own process, because it looks at the process's memory.
#![cfg(target_os = "linux")]

use qhx_forge::{ForgeOptions, GateOptions, Material, Precision, forge_gated, gate::suite::GivenPrompt, write_synthetic_checkpoint};
use serde_json::json;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

/// Memory of the process's own, in bytes.
fn own_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

#[test]
fn peak_memory_is_one_stage() {
    let config = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 80000, "hidden_size": 256, "intermediate_size": 1024,
        "num_hidden_layers": 16, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 48, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": false
    });
    let folder = tempfile::tempdir().unwrap();
    let (checkpoint, out) = (folder.path().join("checkpoint"), folder.path().join("bundle"));
    let mut options = ForgeOptions::new(&checkpoint, Precision::W8);
    write_synthetic_checkpoint(&config, 1, &mut options).unwrap();
    options.out = &out;
    let (peak, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let before = own_memory();
    let watch = std::thread::spawn({
        let (peak, stop) = (peak.clone(), stop.clone());
        move || {
            while !stop.load(Ordering::Relaxed) {
                peak.fetch_max(own_memory(), Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    });
    let prompts = [1usize, 20].map(|n| GivenPrompt::Ids((0..n as u32).map(|i| i * 1999 % 80000).collect()));
    let material = Material::open(&checkpoint).unwrap();
    let gated =
        forge_gated(&material, &mut options, GateOptions { prompts: Some(prompts.to_vec()), ..GateOptions::new(&mut |_| {}) }).unwrap();
    stop.store(true, Ordering::Relaxed);
    watch.join().unwrap();
    let grown = peak.load(Ordering::Relaxed) - before;
    let in_f32 = 4 * gated.manifest.model.parameters;
    println!("{:?}: {} MB of its own at the peak, the model in f32 has {} MB", gated.parity.gate.result, grown >> 20, in_f32 >> 20);
    // The answers' logits (2 · 24 · 80000 numbers, 15 MB), a block of the head (16 MB), and the copies on the way.
    assert!(grown < 160 << 20, "{} MB", grown >> 20);
    assert!(in_f32 > 200 << 20, "the model would not fit in that: {} MB", in_f32 >> 20);
}

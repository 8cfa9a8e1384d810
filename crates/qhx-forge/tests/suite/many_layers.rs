//! What a model of many layers takes grows as its layers do: writing its programs, opening its bundle, placing and compiling it, cutting it into stages, its gate.

use qhx_forge::{ForgeOptions, GateOptions, GateProgress, Material, Precision, forge_gated, gate::suite::GivenPrompt};
use qhx_runtime::{LoadOptions, Model, memory::weight_bytes_per_token};
use serde_json::{Value, json};
use std::{
    path::Path,
    time::{Duration, Instant},
};

/// A tiny Llama.
fn config(layers: usize) -> Value {
    json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
        "num_key_value_heads": 1, "num_hidden_layers": layers, "vocab_size": 64, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true
    })
}

fn material(layers: usize) -> Material {
    Material::Synthetic { config: config(layers), seed: 1 }
}

fn options(out: &Path) -> ForgeOptions<'_> {
    ForgeOptions { replace: true, ..ForgeOptions::new(out, Precision::F32) }
}

/// Four times the layers take about four times as long: far from the 16 of a step that is quadratic. A busy machine gets several tries.
fn grows_with_layers(what: &str, layers: usize, mut work: impl FnMut(usize)) {
    let mut time = |layers: usize| {
        let started = Instant::now();
        work(layers);
        started.elapsed().as_secs_f64()
    };
    let mut ratios = Vec::new();
    for _ in 0..5 {
        let (few, many) = (time(layers), time(4 * layers));
        ratios.push(many / few);
        if many < 8.0 * few {
            return;
        }
    }
    panic!("{what}: with four times {layers} layers {ratios:.1?} times as long");
}

#[test]
fn loading_grows_as_the_layers_do() {
    let folder = tempfile::tempdir().unwrap();
    let place = |layers: usize| folder.path().join(layers.to_string());
    for layers in [128, 512] {
        material(layers).forge(&mut options(&place(layers))).unwrap();
    }
    let open = |layers: usize| Model::open(place(layers), &LoadOptions { threads: Some(1), ..LoadOptions::default() }).unwrap();
    let started = Instant::now();
    open(128);
    assert!(started.elapsed() < Duration::from_secs(3), "128 tiny layers took {:?}", started.elapsed());
    grows_with_layers("loading", 128, |layers| drop(open(layers)));
    let programs = [128, 512].map(|layers| (layers, open(layers).program().clone()));
    let program = |layers: usize| &programs.iter().find(|(n, _)| *n == layers).unwrap().1;
    grows_with_layers("every stage cut out", 128, |layers| {
        let program = program(layers);
        for stage in 0..program.stages.len() {
            program.cut(program.ops_of_stage(stage).iter().copied()).unwrap();
        }
        assert!(weight_bytes_per_token(program) > 0);
    });
}

#[test]
fn a_gate_grows_as_the_layers_do() {
    let folder = tempfile::tempdir().unwrap();
    grows_with_layers("forging with a gate", 64, |layers| {
        let out = folder.path().join(layers.to_string());
        let prompts = Some(vec![GivenPrompt::Ids(vec![1, 2, 3])]);
        let mut silent = |_: GateProgress<'_>| {};
        let gate = GateOptions { prompts, quick: true, threads: Some(1), ..GateOptions::new(&mut silent) };
        let gated = forge_gated(&material(layers), &mut options(&out), gate).unwrap();
        assert!(gated.parity.gate.passed, "{:?}", gated.parity.gate);
    });
}

/// As many layers as a configuration may have are written in a moment; more are refused by a number.
#[test]
fn hostile_numbers_of_layers() {
    let started = Instant::now();
    let (programs, _) = material(4096).checked_programs(Precision::F32).unwrap();
    assert_eq!(programs[0].stages.len(), 2 * 4096 + 2);
    assert!(started.elapsed() < Duration::from_secs(10), "4096 tiny layers took {:?}", started.elapsed());
    for layers in [4097, 1_000_000_000] {
        let error = material(layers).checked_programs(Precision::F32).unwrap_err().to_string();
        assert!(error.contains("`num_hidden_layers` must be a positive integer of at most 4096"), "{error}");
    }
}

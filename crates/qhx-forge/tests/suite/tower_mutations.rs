//! Are the media fixtures sharp enough? As `mutations.rs`, for towers and for text programs that take their rows.

use crate::common::{self, Overlay, media::MediaCases, mistakes::*};
use qhx_ir::{Activation, Mask, Name, Op, OpKind, Program, Rotary, WeightTensor};

/// A typical mistake in the program `program` of a fixture.
struct Mistake {
    fixture: &'static str,
    program: &'static str,
    what: &'static str,
    make: fn(&mut Program, &mut Overlay),
}

const fn mistake(fixture: &'static str, program: &'static str, what: &'static str, make: fn(&mut Program, &mut Overlay)) -> Mistake {
    Mistake { fixture, program, what, make }
}

#[rustfmt::skip]
const MISTAKES: &[Mistake] = &[
    mistake("qwen3_vl", "vision", "erf GELU in the blocks", |p, _| activations(p, Activation::GeluTanh, Activation::GeluErf)),
    mistake("qwen3_vl", "vision", "tanh GELU in the mergers", |p, _| activations(p, Activation::GeluErf, Activation::GeluTanh)),
    mistake("qwen3_vl", "vision", "the merger norms after it joins patches", |p, w| norm_after_merge(p, w, "vision.merger", "visual.merger.norm")),
    mistake("qwen3_vl", "vision", "a deepstack merger norms before it joins patches", |p, w| norm_before_merge(p, w, "vision.deepstack.0", "visual.deepstack_merger_list.0.norm")),
    mistake("qwen3_vl", "vision", "rotary halves of a head: rows, then columns", |p, _| halves(p, [0, 1])),
    mistake("qwen3_vl", "vision", "rows and columns exchanged in the rotary", |p, _| exchange_streams(p)),
    mistake("qwen3_vl", "vision", "rotary frequencies over the whole head", |p, _| rotary(p, "rope", |i, f, n| if i < n / 2 { 1e4f32.powf(-(i as f32) / n as f32) } else { f })),
    mistake("qwen3_vl", "vision", "rows and columns exchanged in the position table", |p, w| rows(p, w, "pos_embed.weight", |r, n| { let side = n.isqrt(); r % side * side + r / side })),
    mistake("qwen3_vl", "vision", "no positions", |p, w| weights(p, w, "pos_embed.weight", |_| 0.0)),
    mistake("qwen3_vl", "vision", "nearest position instead of interpolation", |p, w| weights(p, w, "pos_embed.weight", f32::round)),
    mistake("qwen3_vl", "vision", "scores not scaled", |p, _| attention_scale(p, 1.0)),
    mistake("qwen3_vl", "vision", "a causal tower", |p, _| each(p, "attend", |op| if let OpKind::Attend { mask, .. } = op { *mask = Mask::Causal })),
    mistake("qwen3_vl", "vision", "queries and keys exchanged", |p, _| each(p, "vision.", |op| if let OpKind::Attend { q, kv: Some(kv), .. } = op { std::mem::swap(q, &mut kv.k) })),
    mistake("qwen3_vl", "vision", "no bias of queries, keys and values", |p, _| each(p, "qkv", drop_bias)),
    mistake("qwen3_vl", "vision", "patches with the channel last", |p, w| columns(p, w, "patch_embed.proj.weight", |c, n| { let plane = n / 3; c % 3 * plane + c / 3 })),
    mistake("qwen3_vl", "vision", "deepstack rows taken a block too early", |p, _| each(p, "vision.deepstack.0.merged", |op| if let OpKind::Reshape { x, .. } = op { *x = "vision.embed.add".into() })),
    mistake("qwen3_vl", "vision", "deepstack outputs exchanged", |p, _| { let value = p.outputs[0].value.clone(); p.outputs[0].value = p.outputs[1].value.clone(); p.outputs[1].value = value }),
    mistake("qwen3_vl", "text", "deepstack rows added a layer too late", |p, _| shift_deepstack(p)),
    mistake("qwen3_vl", "text", "no deepstack rows", |p, _| each(p, "deepstack", |op| if let OpKind::ScatterAddRows { x, .. } = op { *op = OpKind::Scale { x: x.clone(), factor: 1.0, weight: None } })),
    mistake("qwen3_vl", "text", "deepstack rows replace instead of adding", |p, _| each(p, "deepstack", |op| if let OpKind::ScatterAddRows { x, rows, at } = op { *op = OpKind::ScatterRows { x: x.clone(), rows: rows.clone(), at: at.clone() } })),
    mistake("qwen3_vl", "text", "positions by sections, not interleaved", |p, _| streams(p, |_, s, all| all.iter().filter(|&&other| other < s).count() )),
    mistake("qwen3_vl", "text", "time, height and width exchanged", |p, _| p.rotaries.values_mut().for_each(|r| r.streams.iter_mut().for_each(|s| *s = (*s + 1) % 3))),
    mistake("qwen3_5", "vision", "erf GELU in the blocks", |p, _| activations(p, Activation::GeluTanh, Activation::GeluErf)),
    mistake("qwen3_5", "vision", "rows and columns exchanged in the rotary", |p, _| exchange_streams(p)),
    mistake("qwen3_5", "text", "time, height and width exchanged", |p, _| p.rotaries.values_mut().for_each(|r| r.streams.iter_mut().for_each(|s| *s = (*s + 1) % 3))),
    mistake("gemma4", "vision", "linears not clipped", |p, _| each(p, "_proj", |op| if let OpKind::Linear { clip, .. } = op { *clip = None })),
    mistake("gemma4", "vision", "inputs not clipped", |p, _| clips(p, |clip| clip.input = [f32::MIN, f32::MAX])),
    mistake("gemma4", "vision", "outputs not clipped", |p, _| clips(p, |clip| clip.output = [f32::MIN, f32::MAX])),
    mistake("gemma4", "vision", "column and row exchanged in the position tables", |p, _| each(p, "vision.embed", |op| if let OpKind::Embed { ids, .. } = op { *ids = if &**ids == "patch_rows" { "patch_columns".into() } else { "patch_rows".into() } })),
    mistake("gemma4", "vision", "column and row exchanged in the rotary", |p, _| exchange_streams(p)),
    mistake("gemma4", "vision", "one rotary over the whole head", |p, _| whole_head(p)),
    mistake("gemma4", "vision", "a rotary base of 10000", |p, _| rotary(p, "rope", |_, f, _| f * f)),
    mistake("gemma4", "vision", "scores are scaled by the head size", |p, _| attention_scale(p, 8f32.powf(-0.5))),
    mistake("gemma4", "vision", "values are not normed", |p, _| each(p, "v_norm", |op| if let OpKind::RmsNorm { x, .. } = op { *op = OpKind::Scale { x: x.clone(), factor: 1.0, weight: None } })),
    mistake("gemma4", "vision", "norms multiply by 1 + w", |p, w| weights(p, w, "layernorm", |x| x + 1.0)),
    mistake("gemma4", "vision", "erf GELU", |p, _| gates(p, Activation::GeluTanh, Activation::GeluErf)),
    mistake("gemma4", "vision", "patches with the channel first", |p, w| columns(p, w, "input_proj.weight", |c, n| { let plane = n / 3; c % plane * 3 + c / plane })),
    mistake("gemma4", "vision", "soft rows not scaled", |p, _| each(p, "vision.pool.scaled", |op| if let OpKind::Scale { factor, .. } = op { *factor = 1.0 })),
    mistake("gemma4", "vision", "no norm before the projection", |p, _| each(p, "vision.project.norm", |op| if let OpKind::RmsNorm { x, .. } = op { *op = OpKind::Scale { x: x.clone(), factor: 1.0, weight: None } })),
    mistake("gemma4", "text", "soft rows scaled like embeddings", |p, _| scale_after_soft_rows(p)),
    mistake("gemma4", "text", "per-layer context from embeddings before soft rows", |p, _| each(p, "per_layer_model_projection", |op| if let OpKind::Linear { x, .. } = op { *x = "embed.embed_tokens".into() })),
    mistake("gemma4", "audio", "a window of 13", |p, _| window(p, 13)),
    mistake("gemma4", "audio", "a window of 11", |p, _| window(p, 11)),
    mistake("gemma4", "audio", "no cap on scores", |p, _| each(p, "attend", |op| if let OpKind::Attend { softcap, .. } = op { *softcap = None })),
    mistake("gemma4", "audio", "keys not scaled", |p, _| attention_scale(p, 1.0)),
    mistake("gemma4", "audio", "scale per number without softplus", |p, w| weights(p, w, "per_dim_scale", |x| x.exp_m1().ln())),
    mistake("gemma4", "audio", "no relative keys", |p, _| each(p, "attend", |op| if let OpKind::Attend { relative_keys, .. } = op { *relative_keys = None })),
    mistake("gemma4", "audio", "relative keys in the opposite order", |p, w| change(p, w, "relative_k_proj.keys", |x, columns| { let distance = x.len() / 13; assert_eq!(distance % columns, 0); x.chunks(distance).rev().flatten().copied().collect() })),
    mistake("gemma4", "audio", "relative keys a distance off", |p, w| change(p, w, "relative_k_proj.keys", |x, _| { let distance = x.len() / 13; [&x[distance..], &x[..distance]].concat() })),
    mistake("gemma4", "audio", "time and frequency exchanged in the convolutions", |p, w| for layer in ["layer0.conv", "layer1.conv"] { change_shaped(p, w, layer, transpose_kernel) }),
    mistake("gemma4", "audio", "channels before frequencies", |p, w| columns(p, w, "input_proj_linear", |c, n| { let channels = 2; let bins = n / channels; c % bins * channels + c / bins })),
    mistake("gemma4", "audio", "light convolution with taps reversed", |p, w| columns(p, w, "depthwise_conv1d", |c, n| n - 1 - c)),
    mistake("gemma4", "audio", "value and gate exchanged", |p, _| each(p, "gated", |op| if let OpKind::GateAct { gate, up, .. } = op { std::mem::swap(gate, up) })),
    mistake("gemma4", "audio", "linears not clipped", |p, _| clips_off(p)),
    mistake("gemma4", "audio", "whole steps of the perceptrons", |p, _| each(p, "residual_weight", |op| if let OpKind::Scale { factor, .. } = op { *factor = 1.0 })),
    mistake("gemma4", "audio", "silu instead of ReLU after the convolutions", |p, _| activations(p, Activation::Relu, Activation::Silu)),
    mistake("gemma4", "audio", "RMS norm after the convolutions", |p, _| each(p, "audio.subsample.norm", |op| if let OpKind::LayerNorm { x, weight, eps, .. } = op { *op = OpKind::RmsNorm { x: x.clone(), weight: Some(weight.clone()), eps: *eps } })),
    mistake("gemma4", "audio", "output projection without bias", |p, _| each(p, "output_proj", drop_bias)),
    mistake("gemma4", "audio", "no norm at the end of a layer", |p, _| each(p, "norm_out", |op| if let OpKind::RmsNorm { x, .. } = op { *op = OpKind::Scale { x: x.clone(), factor: 1.0, weight: None } })),
];

#[test]
fn every_mistake_is_seen() {
    let mut unseen = Vec::new();
    let mut names: Vec<_> = MISTAKES.iter().map(|m| m.fixture).collect();
    names.dedup();
    for name in names {
        let cases = MediaCases::forge(&common::fixtures().join(name)).expect("media cases");
        for program in ["text", "vision", "audio"] {
            let Some(right) = cases.fixture.bundle().program(program).map(|p| (**p).clone()) else { continue };
            let least = cases.difference(right.clone(), &Overlay::default());
            assert!(least < 1e-4, "{name}: the right {program} program differs by {least}");
            for mistake in MISTAKES.iter().filter(|m| m.fixture == name && m.program == program) {
                let (mut program, mut overlay) = (right.clone(), cases.fixture.overlay());
                (mistake.make)(&mut program, &mut overlay);
                let difference = cases.difference(program, &overlay);
                println!("{name} {}: {}: {difference:.5}", mistake.program, mistake.what);
                // More than `towers.rs` allows, and far from rounding. (The two forms of GELU differ by 5e-4 at most.)
                if difference < 1.5e-4 || difference < 5.0 * least {
                    unseen.push(format!("{name} {}: {} ({difference})", mistake.program, mistake.what));
                }
            }
        }
    }
    assert!(unseen.is_empty(), "the fixtures do not show:\n{}", unseen.join("\n"));
}

fn activations(program: &mut Program, right: Activation, wrong: Activation) {
    each(program, "activated", |op| match op {
        OpKind::Activate { activation, .. } if *activation == right => *activation = wrong,
        _ => {}
    });
}

fn clips(program: &mut Program, wrong: impl Fn(&mut qhx_ir::Clip)) {
    each(program, "_proj", |op| {
        if let OpKind::Linear { clip: Some(clip), .. } = op {
            wrong(clip);
        }
    });
}

fn clips_off(program: &mut Program) {
    each(program, "audio.", |op| {
        if let OpKind::Linear { clip, .. } = op {
            *clip = None;
        }
    });
}

fn window(program: &mut Program, wrong: usize) {
    each(program, "attend", |op| {
        if let OpKind::Attend { mask, .. } = op {
            *mask = Mask::Window(wrong);
        }
    });
}

fn exchange_streams(program: &mut Program) {
    program.rotaries.values_mut().for_each(|r| r.streams.iter_mut().for_each(|s| *s = 1 - *s));
}

/// Streams of each frequency by `wrong(frequency, its stream, all)`, which counts how many have a lower one: sections in a row.
fn streams(program: &mut Program, wrong: impl Fn(usize, usize, &[usize]) -> usize) {
    for rotary in program.rotaries.values_mut() {
        let all = rotary.streams.clone();
        let mut order: Vec<usize> = (0..all.len()).collect();
        order.sort_by_key(|&f| (wrong(f, all[f], &all), f));
        rotary.streams = order.iter().map(|&f| all[f]).collect();
    }
}

/// Two rotary blocks, one for each half of the head, turned by these streams.
fn halves(program: &mut Program, streams: [usize; 2]) {
    for rotary in program.rotaries.values_mut() {
        let (length, count) = (rotary.blocks[0].1, rotary.streams.len());
        rotary.blocks = vec![(0, length / 2), (length / 2, length / 2)];
        rotary.streams = streams.iter().flat_map(|&s| vec![s; count / 2]).collect();
    }
}

/// One rotary block over the head.
fn whole_head(program: &mut Program) {
    for Rotary { blocks, .. } in program.rotaries.values_mut() {
        *blocks = vec![(0, 2 * blocks[0].1)];
    }
}

fn find(program: &Program, path: &str) -> usize {
    program.ops.iter().position(|op| *op.path == *path).unwrap_or_else(|| panic!("no op {path}"))
}

/// `norm` then `merged` made `merged` then `norm`, the weights repeated for each patch.
fn norm_after_merge(program: &mut Program, overlay: &mut Overlay, stage: &str, weight: &str) {
    let (norm, merged) = (find(program, &format!("{stage}.norm")), find(program, &format!("{stage}.merged")));
    let (OpKind::LayerNorm { x: first, .. }, OpKind::Reshape { .. }) = (program.ops[norm].op.clone(), program.ops[merged].op.clone())
    else {
        panic!("a norm, then a reshape")
    };
    exchange(program, norm, merged, first);
    resize(program, overlay, weight, |x| x.repeat(4));
}

/// `merged` then `norm` made `norm` then `merged`, with the weights of the first patch.
fn norm_before_merge(program: &mut Program, overlay: &mut Overlay, stage: &str, weight: &str) {
    let (norm, merged) = (find(program, &format!("{stage}.norm")), find(program, &format!("{stage}.merged")));
    let OpKind::Reshape { x: first, .. } = program.ops[merged].op.clone() else { panic!("a reshape") };
    exchange(program, merged, norm, first);
    resize(program, overlay, weight, |x| x[..x.len() / 4].to_vec());
}

/// Op `b`, which follows `a`, now takes `first` and comes before it; what took the result of `b` takes that of `a`.
fn exchange(program: &mut Program, a: usize, b: usize, first: Name) {
    let (a_path, b_path) = (program.ops[a].path.clone(), program.ops[b].path.clone());
    let next = find(program, &b_path.replace("norm", "linear_fc1").replace("merged", "linear_fc1"));
    program.ops.swap(a, b);
    for (at, value) in [(a, first), (b, b_path), (next, a_path)] {
        match &mut program.ops[at] {
            Op { op: OpKind::LayerNorm { x, .. } | OpKind::Reshape { x, .. } | OpKind::Linear { x, .. }, .. } => *x = value,
            other => panic!("unexpected {other:?}"),
        }
    }
}

fn resize(program: &mut Program, overlay: &mut Overlay, prefix: &str, wrong: impl Fn(&[f32]) -> Vec<f32>) {
    for part in ["weight", "bias"] {
        let name = Name::from(format!("{prefix}.{part}"));
        let values = wrong(&overlay.numbers(&name).1);
        program.weights.get_mut(&name).expect("the norm's weight").shape = vec![values.len()];
        overlay.replace(&name, WeightTensor::from_f32(&[values.len()], &values).unwrap());
    }
}

/// The rows that belong after layer `n` are added after layer `n + 1`: the last ones before, for want of a later layer.
fn shift_deepstack(program: &mut Program) {
    each(program, "deepstack", |op| {
        if let OpKind::ScatterAddRows { rows, .. } = op {
            *rows = if rows.ends_with(".0") { "deepstack_rows.1".into() } else { "deepstack_rows.0".into() };
        }
    });
}

/// Soft rows go in before embeddings are scaled.
fn scale_after_soft_rows(program: &mut Program) {
    let (embed, put) = (find(program, "embed.embed_tokens"), find(program, "embed.soft_rows_put"));
    let OpKind::Embed { scale, .. } = &mut program.ops[embed].op else { panic!("a look-up") };
    let factor = std::mem::replace(scale, 1.0);
    program.ops[put].path = "embed.soft_rows_first".into();
    let op = OpKind::Scale { x: "embed.soft_rows_first".into(), factor, weight: None };
    program.ops.insert(put + 1, Op { path: "embed.soft_rows_put".into(), op });
}

fn change_shaped(program: &mut Program, overlay: &mut Overlay, part: &str, wrong: fn(&[usize], &[f32]) -> Vec<f32>) {
    let names: Vec<_> = program.weights.keys().filter(|name| name.contains(part)).cloned().collect();
    for name in names {
        let (shape, values) = overlay.numbers(&name);
        overlay.replace(&name, WeightTensor::from_f32(&shape, &wrong(&shape, &values)).unwrap());
    }
}

/// `[out, row, column, in]` with rows and columns exchanged.
fn transpose_kernel(shape: &[usize], values: &[f32]) -> Vec<f32> {
    let [out, rows, columns, inputs] = *shape else { panic!("a convolution's weight") };
    let mut wrong = Vec::new();
    for o in 0..out {
        for (r, c) in (0..rows).flat_map(|r| (0..columns).map(move |c| (r, c))) {
            wrong.extend_from_slice(&values[((o * rows + c) * columns + r) * inputs..][..inputs]);
        }
    }
    wrong
}

//! Are the fixtures sharp enough? Each entry below makes one typical mistake in a correct program or its weights; the fixture's numbers must show it.
//!
//! The mistakes are made in programs, not in source code: the forge writes the right program, a closure spoils a copy of it, and the reference
//! interpreter runs the copy against the oracle.

use crate::common::{self, Fixture, Overlay, mistakes::*};
use qhx_ir::{Activation, Mask, Name, OpKind, Program, Routing};

/// A typical mistake.
struct Mistake {
    fixture: &'static str,
    what: &'static str,
    make: fn(&mut Program, &mut Overlay),
}

const fn mistake(fixture: &'static str, what: &'static str, make: fn(&mut Program, &mut Overlay)) -> Mistake {
    Mistake { fixture, what, make }
}

#[rustfmt::skip]
const MISTAKES: &[Mistake] = &[
    mistake("phimoe", "router weights are a renormalised softmax", |p, _| routing(p, Routing::Softmax { top_k: 2, renormalise: true })),
    mistake("phimoe", "router weights are a plain softmax", |p, _| routing(p, Routing::Softmax { top_k: 2, renormalise: false })),
    mistake("phimoe", "the band is one jitter wide, not two", |p, _| routing(p, Routing::SparseMixer { jitter: 0.005 })),
    mistake("phimoe", "the window is one row too long", |p, _| window(p, 1)),
    mistake("phimoe", "the window is one row too short", |p, _| window(p, -1)),
    mistake("phimoe", "RMS norm instead of layer norm", |p, _| each(p, "layernorm", |op| if let OpKind::LayerNorm { x, weight, eps, .. } = op {
        *op = OpKind::RmsNorm { x: x.clone(), weight: Some(weight.clone()), eps: *eps };
    })),
    mistake("phimoe", "norms without bias", |p, _| each(p, "layernorm", drop_bias)),
    mistake("phimoe", "output projection without bias", |p, _| each(p, "o_proj", drop_bias)),
    mistake("phimoe", "query projection without bias", |p, _| each(p, "q_proj", drop_bias)),
    mistake("phimoe", "head without bias", |p, _| each(p, "logits", drop_bias)),
    mistake("phimoe", "gate and up of the experts exchanged", |p, _| each(p, "experts", |op| if let OpKind::Experts { gate, up, .. } = op { std::mem::swap(gate, up) })),
    mistake("phimoe", "scores scaled by hidden / heads", |p, _| attention_scale(p, (64f32 / 4.0).powf(-0.5) * 1.3)),
    mistake("phimoe_longrope", "short factors ignored", |p, _| p.rotaries.values_mut().flat_map(|r| &mut r.variants).for_each(|v| v.inv_freq.iter_mut().enumerate().for_each(|(i, f)| *f *= 1.0 + i as f32 * 0.1))),
    mistake("phimoe_longrope", "amplitude ignored", |p, _| p.rotaries.values_mut().flat_map(|r| &mut r.variants).for_each(|v| v.amplitude = 1.0)),
    mistake("phimoe_longrope", "amplitude does not change with the length", |p, _| p.rotaries.values_mut().for_each(|r| r.variants[1] = r.variants[0].clone())),
    mistake("qwen3_5", "norms multiply by w, not by 1 + w", |p, w| weights(p, w, "layernorm", |x| x - 1.0)),
    mistake("qwen3_5", "query norms multiply by w, not by 1 + w", |p, w| weights(p, w, "q_norm", |x| x - 1.0)),
    mistake("qwen3_5", "the delta mixer's norm multiplies by 1 + w", |p, w| weights(p, w, "linear_attn.norm", |x| x + 1.0)),
    mistake("qwen3_5", "query and gate are halves of the vector, not of each head", |p, w| rows(p, w, "q_proj.weight", |r, n| { let head = 64; let (h, i) = (r / head, r % head); if i < 32 { h * 32 + i } else { n / 2 + h * 32 + i - 32 } })),
    mistake("qwen3_5", "attention is gated by silu", |p, _| gates(p, Activation::Sigmoid, Activation::Silu)),
    mistake("qwen3_5", "the delta mixer is gated by sigmoid", |p, _| each(p, "gated", |op| match op { OpKind::GateAct { gate, activation, .. } if gate.contains("in_proj_z") => *activation = Activation::Sigmoid, _ => {} })),
    mistake("qwen3_5", "frequencies count over the head, not over its rotated part", |p, _| p.rotaries.values_mut().flat_map(|r| &mut r.variants).for_each(|v| v.inv_freq.iter_mut().for_each(|f| *f = f.powf(0.25)))),
    mistake("qwen3_5", "convolution without silu", |p, _| each(p, "conv1d", |op| if let OpKind::ShortConv { activation, .. } = op { *activation = None })),
    mistake("qwen3_5", "convolution taps in the wrong order", |p, w| columns(p, w, "conv1d", |c, n| n - 1 - c)),
    mistake("qwen3_5", "queries of the delta rule are not scaled", |p, _| each(p, "gated_delta", |op| if let OpKind::GatedDelta { scale, .. } = op { *scale = 1.0 })),
    mistake("qwen3_5", "the decay has no bias", |p, w| weights(p, w, "dt_bias", |_| 0.0)),
    mistake("qwen3_5", "the decay rate is not exponential", |p, w| weights(p, w, "A_log", |x| x.abs().ln())),
    mistake("qwen3_5", "key heads are tiled over value heads, not repeated", tile_key_heads),
    mistake("gemma4", "norms multiply by 1 + w", |p, w| weights(p, w, "layernorm", |x| x + 1.0)),
    mistake("gemma4", "the window is one row too long", |p, _| window(p, 1)),
    mistake("gemma4", "the window is one row too short", |p, _| window(p, -1)),
    mistake("gemma4", "sharing layers read the wrong donor", wrong_donor),
    mistake("gemma4", "no layer scalar", |p, w| weights(p, w, "layer_scalar", |_| 1.0)),
    mistake("gemma4", "scores are scaled by the head size", |p, _| attention_scale(p, 12f32.powf(-0.5))),
    mistake("gemma4", "no final softcap", |p, _| each(p, "softcap", |op| if let OpKind::Softcap { cap, .. } = op { *cap = 1e6 })),
    mistake("gemma4", "erf GELU instead of the tanh form", |p, _| gates(p, Activation::GeluTanh, Activation::GeluErf)),
    mistake("gemma4", "embeddings are not scaled", |p, _| each(p, "embed.embed_tokens", |op| if let OpKind::Embed { scale, .. } = op { *scale = 1.0 })),
    mistake("gemma4", "per-layer embeddings are not scaled", |p, _| each(p, "embed_tokens_per_layer", |op| if let OpKind::Embed { scale, .. } = op { *scale = 1.0 })),
    mistake("gemma4", "no token part in the per-layer embeddings", |p, _| each(p, "embed_tokens_per_layer", |op| if let OpKind::Embed { scale, .. } = op { *scale = 0.0 })),
    mistake("gemma4", "layers take the next layer's embedding", |p, _| { let last = p.ops.iter().filter(|op| op.path.ends_with("per_layer_row")).count() - 1; each(p, "per_layer_row", move |op| if let OpKind::Slice { start, .. } = op { *start = (*start + 1).min(last) }) }),
    mistake("gemma4", "values are not normed", |p, _| each(p, "v_norm", |op| if let OpKind::RmsNorm { x, .. } = op { *op = OpKind::Scale { x: x.clone(), factor: 1.0, weight: None } })),
    mistake("gemma4", "full layers turn the whole head", |p, _| rotary(p, "full", |i, f, n| if f == 0.0 { 1e6f32.powf(-(i as f32) / n as f32) } else { f })),
    mistake("gemma4", "full layers turn at the sliding layers' base", |p, _| rotary(p, "full", |_, f, _| f.powf(2.0 / 3.0))),
    mistake("qwen3_vl", "no query norm", |p, w| weights(p, w, "q_norm", |_| 1.0)),
    mistake("qwen3_vl", "neighbours are turned instead of halves", |p, w| { let head = head_dim(p); for part in ["q_proj.weight", "k_proj.weight"] { rows(p, w, part, |r, _| neighbour(r, head)) } }),
    mistake("qwen3", "norms multiply by 1 + w", |p, w| weights(p, w, "layernorm", |x| x + 1.0)),
    mistake("llama", "query heads take turns with the key heads", |p, w| rows(p, w, "k_proj.weight", |r, n| (r + n / 2) % n)),
    mistake("llama", "another rotary base", |p, _| rotary(p, "rope", |_, f, _| f.powf(1.1))),
    mistake("llama", "gate and up exchanged", |p, _| each(p, "gated", |op| if let OpKind::GateAct { gate, up, .. } = op { std::mem::swap(gate, up) })),
];

#[test]
fn every_mistake_is_seen() {
    let mut unseen = Vec::new();
    let mut names: Vec<_> = MISTAKES.iter().map(|m| m.fixture).collect();
    names.dedup();
    for name in names {
        let fixture = Fixture::forge(&common::fixtures().join(name));
        let right = fixture.difference(fixture.program().clone(), &Overlay::default());
        assert!(right < 1e-3, "{name}: the right program differs by {right}");
        for mistake in MISTAKES.iter().filter(|m| m.fixture == name) {
            let (mut program, mut overlay) = (fixture.program().clone(), fixture.overlay());
            (mistake.make)(&mut program, &mut overlay);
            let difference = fixture.difference(program, &overlay);
            println!("{name}: {}: {difference:.4}", mistake.what);
            // Twice what rounding may do, or no number at all.
            if difference < 2e-3 {
                unseen.push(format!("{name}: {} ({difference})", mistake.what));
            }
        }
    }
    assert!(unseen.is_empty(), "the fixtures do not show:\n{}", unseen.join("\n"));
}

fn routing(program: &mut Program, wrong: Routing) {
    each(program, "route", |op| {
        if let OpKind::Route { method, .. } = op {
            *method = wrong;
        }
    });
}

fn window(program: &mut Program, by: isize) {
    for slot in program.slots.values_mut() {
        if let qhx_ir::Slot::Kv { window: Some(window), .. } = slot {
            *window = window.saturating_add_signed(by);
        }
    }
    each(program, "attend", |op| {
        if let OpKind::Attend { mask: Mask::Window(window), .. } = op {
            *window = window.saturating_add_signed(by);
        }
    });
}

/// Sharing layers read the slot before their own, of the same size.
fn wrong_donor(program: &mut Program, _: &mut Overlay) {
    let slots: Vec<_> = program.slots.clone().into_iter().collect();
    each(program, "attend", |op| {
        if let OpKind::Attend { kv: None, slot: Some(slot), .. } = op {
            let (at, own) = slots.iter().enumerate().find(|(_, s)| s.0 == *slot).expect("a declared slot");
            if let Some(other) = slots[..at].iter().rev().find(|s| s.1 == own.1) {
                *slot = other.0.clone();
            }
        }
    });
}

/// The size of the heads whose keys are kept.
fn head_dim(program: &Program) -> usize {
    let sizes = program.slots.values().find_map(|slot| if let qhx_ir::Slot::Kv { head_dim, .. } = slot { Some(*head_dim) } else { None });
    sizes.expect("a KV slot")
}

/// The rows of a head as if neighbours made pairs: 0, n/2, 1, n/2 + 1 …
fn neighbour(row: usize, head: usize) -> usize {
    let (first, i) = (row - row % head, row % head);
    first + if i % 2 == 0 { i / 2 } else { head / 2 + i / 2 }
}

/// Value head `h` uses key head `h % key_heads`: the same as putting everything that belongs to a value head in another order.
fn tile_key_heads(program: &mut Program, overlay: &mut Overlay) {
    let Some((value_heads, value_dim, key_heads, key_dim)) = program.ops.iter().find_map(|op| match &op.op {
        OpKind::GatedDelta { slot, .. } => match program.slots[slot] {
            qhx_ir::Slot::Delta { heads, key_dim, value_dim } => {
                let conv = program.slots[&Name::from(slot.replace(".delta", ".conv"))].clone();
                let qhx_ir::Slot::Fifo { channels, .. } = conv else { return None };
                Some((heads, value_dim, (channels - heads * value_dim) / 2 / key_dim, key_dim))
            }
            _ => None,
        },
        _ => None,
    }) else {
        panic!("no delta mixer")
    };
    let group = value_heads / key_heads;
    // The head that stands at place `h` when heads of one key are brought together again.
    let order = move |h: usize| h / group + h % group * key_heads;
    let keys = 2 * key_heads * key_dim;
    let value_row = move |r: usize| order(r / value_dim) * value_dim + r % value_dim;
    for part in ["in_proj_qkv.weight", "conv1d.weight"] {
        rows(program, overlay, part, |r, _| if r < keys { r } else { keys + value_row(r - keys) });
    }
    rows(program, overlay, "in_proj_z.weight", |r, _| value_row(r));
    for part in ["in_proj_a.weight", "in_proj_b.weight"] {
        rows(program, overlay, part, |r, _| order(r));
    }
    for part in ["A_log", "dt_bias"] {
        columns(program, overlay, part, |c, _| order(c));
    }
    columns(program, overlay, "out_proj.weight", |c, _| value_row(c));
}

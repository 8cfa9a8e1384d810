//! Text models.

use super::blocks::{Blocks, rotary};
use crate::{
    Activation, Dim, Encoding, KeyValue, Mask, Name, OpKind, Rotary, RotaryVariant, Routing, Slot,
    conformance::{build::Case, cases::products::add_experts, rng::Rng},
};

const VOCABULARY: usize = 100;

/// Sizes of an attention layer.
struct Heads {
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    dim: usize,
}

/// What an attention layer does with its slot.
enum Keys {
    /// Computes keys and values and stores them, all or in a window.
    Own(Option<usize>),
    /// Reads another layer's.
    Shared(Name, Mask),
}

/// Pre-norm attention with per-head norms on queries and keys, added to `x`. Gives the residual and the slot's name.
fn attention(m: &mut Blocks, stage: &str, x: &Name, positions: &Name, rotary: &Name, h: &Heads, keys: Keys) -> (Name, Name) {
    let path = |name: &str| format!("{stage}.{name}");
    let input = m.rms_norm(&path("norm"), x, h.hidden);
    let make = |m: &mut Blocks, name: &str, heads: usize| {
        let y = m.linear(&path(&format!("{name}_proj")), &input, h.hidden, heads * h.dim);
        m.reshape(&path(&format!("{name}_heads")), &y, Dim::T, &[heads, h.dim])
    };
    let turned = |m: &mut Blocks, name: &str, heads: usize| {
        let y = make(m, name, heads);
        let y = m.rms_norm(&path(&format!("{name}_norm")), &y, h.dim);
        m.rope(&path(&format!("{name}_rope")), &y, positions, rotary)
    };
    let q = turned(m, "q", h.heads);
    let (kv, slot, mask) = match keys {
        Keys::Own(window) => {
            let k = turned(m, "k", h.kv_heads);
            let v = make(m, "v", h.kv_heads);
            let slot = m.b.kv_slot(&path("kv"), h.kv_heads, h.dim, window, m.kv);
            (Some(KeyValue { k, v }), slot, window.map_or(Mask::Causal, Mask::Window))
        }
        Keys::Shared(slot, mask) => (None, slot, mask),
    };
    let scale = 1.0 / (h.dim as f32).sqrt();
    let attend = OpKind::Attend { q, kv, slot: Some(slot.clone()), mask, scale, softcap: None, relative_keys: None };
    let y = m.b.op(&path("attend"), attend);
    let y = m.reshape(&path("joined"), &y, Dim::T, &[h.heads * h.dim]);
    let y = m.linear(&path("o_proj"), &y, h.heads * h.dim, h.hidden);
    let x = m.add(&path("residual"), x, &y);
    m.b.stage(stage, &x);
    (x, slot)
}

/// A dense decoder: tied head, soft rows, rows added after the first layer, a windowed layer and one that shares its keys.
pub(super) fn decoder(rng: Rng, number: usize) -> Case {
    let mut m = Blocks::new(rng, "decoder", number);
    let h = Heads { hidden: 48, heads: 6, kv_heads: 2, dim: 16 };
    let ids = m.b.index("ids", &[], VOCABULARY);
    let positions = m.b.positions(1, None);
    let (soft, at) = m.b.soft(&[h.hidden], 5);
    let table = m.b.weight("embed.table", &[VOCABULARY, h.hidden], m.encoding, 0.5);
    let x = m.b.op("embed.tokens", OpKind::Embed { ids, table: table.clone(), scale: 2.0 });
    let x = m.b.op("embed.soft", OpKind::ScatterRows { x, rows: soft.clone(), at: at.clone() });
    m.b.stage("embed", &x);
    let turn = m.b.rotary("rotary", rotary(1e4, vec![(0, h.dim)], vec![]));
    let (x, _) = attention(&mut m, "layers.0.attn", &x, &positions, &turn, &h, Keys::Own(None));
    let x = m.feed_forward("layers.0.ffn", &x, h.hidden, 80, Activation::Silu);
    let x = m.b.op("layers.0.deepstack.add", OpKind::ScatterAddRows { x, rows: soft, at });
    m.b.stage("layers.0.deepstack", &x);
    let (x, slot) = attention(&mut m, "layers.1.attn", &x, &positions, &turn, &h, Keys::Own(Some(7)));
    let x = m.feed_forward("layers.1.ffn", &x, h.hidden, 80, Activation::GeluTanh);
    let (x, _) = attention(&mut m, "layers.2.attn", &x, &positions, &turn, &h, Keys::Shared(slot, Mask::Window(5)));
    let x = m.feed_forward("layers.2.ffn", &x, h.hidden, 40, Activation::Silu);
    m.head(&x, h.hidden, VOCABULARY, Some(table))
}

/// Gated delta layers with a short convolution, then attention with a gate on its result and partial rotation by three position streams.
pub(super) fn hybrid(rng: Rng, number: usize) -> Case {
    let mut m = Blocks::new(rng, "hybrid", number);
    let hidden = 64;
    let ids = m.b.index("ids", &[], VOCABULARY);
    let positions = m.b.positions(3, Some(60));
    let table = m.b.weight("embed.table", &[VOCABULARY, hidden], m.encoding, 1.0);
    let mut x = m.b.op("embed.tokens", OpKind::Embed { ids, table, scale: 1.0 });
    m.b.stage("embed", &x);
    for layer in 0..2 {
        x = delta_layer(&mut m, &format!("layers.{layer}.attn"), &x, hidden);
        x = m.feed_forward(&format!("layers.{layer}.ffn"), &x, hidden, 96, Activation::Silu);
    }
    let turn = m.b.rotary("rotary", rotary(1e4, vec![(0, 16)], (0..8).map(|f| f % 3).collect()));
    let x = gated_attention(&mut m, "layers.2.attn", &x, &positions, &turn, hidden);
    let x = m.feed_forward("layers.2.ffn", &x, hidden, 96, Activation::Silu);
    m.head(&x, hidden, VOCABULARY, None)
}

fn delta_layer(m: &mut Blocks, stage: &str, x: &Name, hidden: usize) -> Name {
    let (key_heads, heads, key_dim, value_dim) = (2, 4, 16, 24);
    let (keys, values) = (key_heads * key_dim, heads * value_dim);
    let channels = 2 * keys + values;
    let path = |name: &str| format!("{stage}.{name}");
    let h = m.rms_norm(&path("norm"), x, hidden);
    let mixed = m.linear(&path("in_proj_qkv"), &h, hidden, channels);
    let weight = m.b.plain(&path("conv.weight"), &[channels, 4], 0.6);
    let fifo = m.b.slot(&path("fifo"), Slot::Fifo { rows: 3, channels });
    let activation = Some(Activation::Silu);
    let mixed = m.b.op(&path("conv"), OpKind::ShortConv { x: mixed, weight, bias: None, slot: Some(fifo), activation });
    let part = |m: &mut Blocks, name: &str, start: usize, heads: usize, dim: usize| {
        let y = m.slice(&path(name), &mixed, 1, start, heads * dim);
        m.reshape(&path(&format!("{name}_heads")), &y, Dim::T, &[heads, dim])
    };
    let q = part(m, "q", 0, key_heads, key_dim);
    let k = part(m, "k", keys, key_heads, key_dim);
    let v = part(m, "v", 2 * keys, heads, value_dim);
    let a = m.linear(&path("in_proj_a"), &h, hidden, heads);
    let b = m.linear(&path("in_proj_b"), &h, hidden, heads);
    let a_log = m.b.around(&path("a_log"), heads, 0.0, 0.7);
    let dt_bias = m.b.around(&path("dt_bias"), heads, -1.0, 0.7);
    let slot = m.b.slot(&path("delta"), Slot::Delta { heads, key_dim, value_dim });
    let delta = OpKind::GatedDelta { q, k, v, a, b, a_log, dt_bias, slot, scale: 0.25, eps: 1e-6 };
    let y = m.b.op(&path("gated_delta"), delta);
    let up = m.rms_norm(&path("out_norm"), &y, value_dim);
    let z = m.linear(&path("in_proj_z"), &h, hidden, values);
    let gate = m.reshape(&path("z_heads"), &z, Dim::T, &[heads, value_dim]);
    let y = m.b.op(&path("gate"), OpKind::GateAct { gate, up, activation: Activation::Silu });
    let y = m.reshape(&path("joined"), &y, Dim::T, &[values]);
    let y = m.linear(&path("out_proj"), &y, values, hidden);
    let x = m.add(&path("residual"), x, &y);
    m.b.stage(stage, &x);
    x
}

fn gated_attention(m: &mut Blocks, stage: &str, x: &Name, positions: &Name, turn: &Name, hidden: usize) -> Name {
    let (heads, kv_heads, dim) = (4, 1, 32);
    let path = |name: &str| format!("{stage}.{name}");
    let h = m.rms_norm(&path("norm"), x, hidden);
    let both = m.linear(&path("q_proj"), &h, hidden, heads * 2 * dim);
    let both = m.reshape(&path("q_heads"), &both, Dim::T, &[heads, 2 * dim]);
    let q = m.slice(&path("q"), &both, 2, 0, dim);
    let gate = m.slice(&path("gate"), &both, 2, dim, dim);
    let q = m.rope(&path("q_rope"), &q, positions, turn);
    let k = m.linear(&path("k_proj"), &h, hidden, kv_heads * dim);
    let k = m.reshape(&path("k_heads"), &k, Dim::T, &[kv_heads, dim]);
    let k = m.rope(&path("k_rope"), &k, positions, turn);
    let v = m.linear(&path("v_proj"), &h, hidden, kv_heads * dim);
    let v = m.reshape(&path("v_heads"), &v, Dim::T, &[kv_heads, dim]);
    let slot = Some(m.b.kv_slot(&path("kv"), kv_heads, dim, None, m.kv));
    let (kv, mask, scale) = (Some(KeyValue { k, v }), Mask::Causal, 1.0 / (dim as f32).sqrt());
    let y = m.b.op(&path("attend"), OpKind::Attend { q, kv, slot, mask, scale, softcap: Some(20.0), relative_keys: None });
    let gate = m.b.op(&path("sigmoid"), OpKind::Activate { x: gate, activation: Activation::Sigmoid });
    let y = m.b.op(&path("gated"), OpKind::Mul { a: y, b: gate });
    let y = m.reshape(&path("joined"), &y, Dim::T, &[heads * dim]);
    let y = m.linear(&path("o_proj"), &y, heads * dim, hidden);
    let x = m.add(&path("residual"), x, &y);
    m.b.stage(stage, &x);
    x
}

/// A mixture of experts with layer norms and a rotary that changes with the total length. Exact up to the router, whose decisions must not
/// depend on rounding; the experts are in the precision of the case.
pub(super) fn mixture(rng: Rng, number: usize) -> Case {
    let mut m = Blocks::new(rng, "mixture", number);
    let (encoding, form) = (m.encoding, m.form);
    m.exact();
    let h = Heads { hidden: 32, heads: 4, kv_heads: 2, dim: 12 };
    m.b.case.program.epochs = vec![20, 40];
    m.b.case.epoch = m.b.rng.below(3);
    let ids = m.b.index("ids", &[], VOCABULARY);
    let positions = m.b.positions(1, None);
    let table = m.b.weight("embed.table", &[VOCABULARY, h.hidden], Encoding::F16, 1.0);
    let x = m.b.op("embed.tokens", OpKind::Embed { ids, table, scale: 1.0 });
    m.b.stage("embed", &x);
    let variants = [1e4, 2e4, 1e6].map(|theta| {
        let RotaryVariant { inv_freq, .. } = rotary(theta, vec![(0, h.dim)], vec![]).variants.remove(0);
        RotaryVariant { inv_freq, amplitude: 1.0 + theta.log10() / 100.0 }
    });
    let turn = m.b.rotary("rotary", Rotary { blocks: vec![(0, h.dim)], streams: vec![], variants: variants.into() });
    let (x, _) = attention(&mut m, "layers.0.attn", &x, &positions, &turn, &h, Keys::Own(Some(9)));
    let input = m.layer_norm("layers.0.route.norm", &x, h.hidden);
    let scores = m.linear("layers.0.route.scores", &input, h.hidden, 6);
    m.b.op("layers.0.route.choice", OpKind::Route { scores, method: Routing::SparseMixer { jitter: 0.05 } });
    let [chosen, weights] = ["experts", "weights"].map(|part| Name::from(format!("layers.0.route.choice.{part}")));
    m.b.stage("layers.0.route", &input);
    let y = add_experts(&mut m.b, "layers.0.experts.mix", [&input, &chosen, &weights], [6, h.hidden, 24], encoding, Activation::Silu, form);
    let x = m.add("layers.0.experts.residual", &x, &y);
    m.b.stage("layers.0.experts", &x);
    m.head(&x, h.hidden, VOCABULARY, None)
}

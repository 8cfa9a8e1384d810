//! Image and audio towers: no state; every segment is one image or one recording.

use super::blocks::{Blocks, rotary};
use crate::{
    Activation, Clip, Dim, KeyValue, Mask, Name, OpKind, Symbol,
    conformance::{
        build::{Case, normal},
        rng::Rng,
    },
};

/// Patches with interpolated positions, full attention turned by row and column, then two outputs: merged blocks of four patches, and means of them.
pub(super) fn image(rng: Rng, number: usize) -> Case {
    let mut m = Blocks::new(rng, "image", number);
    m.b.case.rows.multiple = 4;
    m.b.case.rows.calls = 2;
    let (numbers, width, heads, dim) = (27, 32, 2, 16);
    let patches = m.b.rows("patches", &[numbers], normal);
    let grid = m.b.positions(2, Some(12));
    let index = m.b.index("taps.index", &[4], 25);
    let factor = m.b.rows("taps.factor", &[4], normal);
    let x = m.linear_bias("embed.patches", &patches, numbers, width);
    let table = m.b.plain("embed.table", &[25, width], 0.3);
    let places = m.b.op("embed.places", OpKind::Interpolate { index, factor, table });
    let mut x = m.add("embed.sum", &x, &places);
    m.b.stage("embed", &x);
    // Row and column each turn a quarter of the pairs.
    let turn = m.b.rotary("rotary", rotary(100.0, vec![(0, dim)], (0..dim / 2).map(|f| f / (dim / 4)).collect()));
    for layer in 0..2 {
        let stage = format!("vision.{layer}");
        let path = |name: &str| format!("{stage}.{name}");
        let h = m.layer_norm(&path("norm1"), &x, width);
        let fused = m.linear_bias(&path("qkv"), &h, width, 3 * width);
        let part = |m: &mut Blocks, name: &str, i: usize| {
            let y = m.slice(&path(name), &fused, 1, i * width, width);
            m.reshape(&path(&format!("{name}_heads")), &y, Dim::T, &[heads, dim])
        };
        let [q, k, v] = [("q", 0), ("k", 1), ("v", 2)].map(|(name, i)| part(&mut m, name, i));
        let q = m.rope(&path("q_rope"), &q, &grid, &turn);
        let k = m.rope(&path("k_rope"), &k, &grid, &turn);
        let kv = Some(KeyValue { k, v });
        let attend = OpKind::Attend { q, kv, slot: None, mask: Mask::Full, scale: 0.25, softcap: None, relative_keys: None };
        let y = m.b.op(&path("attend"), attend);
        let y = m.reshape(&path("joined"), &y, Dim::T, &[width]);
        let y = m.linear_bias(&path("proj"), &y, width, width);
        x = m.add(&path("residual1"), &x, &y);
        let h = m.layer_norm(&path("norm2"), &x, width);
        let h = m.linear_bias(&path("fc1"), &h, width, 50);
        let h = m.b.op(&path("act"), OpKind::Activate { x: h, activation: Activation::GeluTanh });
        let h = m.linear_bias(&path("fc2"), &h, 50, width);
        x = m.add(&path("residual2"), &x, &h);
        m.b.stage(&stage, &x);
    }
    let h = m.layer_norm("merger.norm", &x, width);
    let h = m.reshape("merger.blocks", &h, Dim::Exact(Symbol::T, 4), &[4 * width]);
    let h = m.linear_bias("merger.fc1", &h, 4 * width, 4 * width);
    let h = m.b.op("merger.act", OpKind::Activate { x: h, activation: Activation::GeluErf });
    let h = m.linear_bias("merger.fc2", &h, 4 * width, 24);
    m.b.stage("merger", &h);
    m.b.output("soft_rows", &h);
    let means = m.b.op("pooled.mean", OpKind::Pool { x, size: 4 });
    let means = m.b.op("pooled.scale", OpKind::Scale { x: means, factor: 5.6, weight: None });
    m.b.stage("pooled", &means);
    m.b.output("pooled", &means);
    m.b.case
}

/// Frames through two strided convolutions, then windowed attention with relative keys and a cap, a gated causal convolution, clipped linears.
pub(super) fn audio(rng: Rng, number: usize) -> Case {
    let mut m = Blocks::new(rng, "audio", number);
    m.b.case.rows.calls = 2;
    let (bins, width, heads, dim) = (16, 32, 2, 16);
    let rows = Dim::Ceil(Symbol::T, 4);
    let frames = m.b.rows("frames", &[bins], normal);
    let mut x = m.reshape("subsample.frames", &frames, Dim::T, &[bins, 1]);
    for (i, (inputs, outputs)) in [(1, 6), (6, 8)].into_iter().enumerate() {
        let weight = m.b.plain(&format!("subsample.conv{i}.weight"), &[outputs, 3, 3, inputs], 0.4);
        x = m.b.op(&format!("subsample.conv{i}"), OpKind::Conv2d { x, weight, bias: None, stride: 2 });
        let weight = m.b.around(&format!("subsample.norm{i}.weight"), outputs, 1.0, 0.2);
        x = m.b.op(&format!("subsample.norm{i}"), OpKind::LayerNorm { x, weight, bias: None, eps: 1e-6 });
        x = m.b.op(&format!("subsample.relu{i}"), OpKind::Activate { x, activation: Activation::Relu });
    }
    let x = m.reshape("subsample.flat", &x, rows, &[bins / 4 * 8]);
    let x = m.linear("subsample.proj", &x, bins / 4 * 8, width);
    m.b.stage("subsample", &x);
    let x = listen(&mut m, &x, rows, width, heads, dim);
    let x = convolve(&mut m, &x, width);
    let x = m.linear_bias("project.out", &x, width, 20);
    m.b.stage("project", &x);
    m.b.output("soft_rows", &x);
    m.b.case
}

fn clipped(m: &mut Blocks, path: &str, x: &Name, inputs: usize, outputs: usize) -> Name {
    let y = m.linear(path, x, inputs, outputs);
    if let Some(OpKind::Linear { clip, .. }) = m.b.case.program.ops.last_mut().map(|op| &mut op.op) {
        *clip = Some(Clip { input: [-1.5, 1.5], output: [-1.2, 1.3] });
    }
    y
}

fn listen(m: &mut Blocks, x: &Name, rows: Dim, width: usize, heads: usize, dim: usize) -> Name {
    let h = m.rms_norm("audio.0.attn_norm", x, width);
    let part = |m: &mut Blocks, name: &str| {
        let y = clipped(m, &format!("audio.0.{name}_proj"), &h, width, heads * dim);
        m.reshape(&format!("audio.0.{name}"), &y, rows, &[heads, dim])
    };
    let [q, k, v] = ["q", "k", "v"].map(|name| part(m, name));
    let weight = Some(m.b.around("audio.0.per_dim_scale", dim, 0.5, 0.1));
    let q = m.b.op("audio.0.q_scale", OpKind::Scale { x: q, factor: 1.5, weight });
    let relative_keys = Some(m.b.plain("audio.0.relative", &[6, heads, dim], 0.3));
    let kv = Some(KeyValue { k, v });
    let attend = OpKind::Attend { q, kv, slot: None, mask: Mask::Window(5), scale: 0.3, softcap: Some(10.0), relative_keys };
    let y = m.b.op("audio.0.attend", attend);
    let y = m.reshape("audio.0.joined", &y, rows, &[heads * dim]);
    let y = clipped(m, "audio.0.post", &y, heads * dim, width);
    m.add("audio.0.attn_residual", x, &y)
}

fn convolve(m: &mut Blocks, x: &Name, width: usize) -> Name {
    let h = m.rms_norm("audio.0.conv_norm", x, width);
    let both = clipped(m, "audio.0.linear_start", &h, width, 2 * width);
    let value = m.slice("audio.0.value", &both, 1, 0, width);
    let gate = m.slice("audio.0.gate", &both, 1, width, width);
    let h = m.b.op("audio.0.gated", OpKind::GateAct { gate, up: value, activation: Activation::Sigmoid });
    let weight = m.b.plain("audio.0.conv.weight", &[width, 5], 0.5);
    let h = m.b.op("audio.0.conv", OpKind::ShortConv { x: h, weight, bias: None, slot: None, activation: None });
    let h = m.rms_norm("audio.0.mid_norm", &h, width);
    let h = m.b.op("audio.0.silu", OpKind::Activate { x: h, activation: Activation::Silu });
    let h = m.b.op("audio.0.clamp", OpKind::Clamp { x: h, low: -2.0, high: 2.0 });
    let h = clipped(m, "audio.0.linear_end", &h, width, width);
    let both = m.b.op("audio.0.joined_again", OpKind::Concat { xs: vec![h, x.clone()] });
    let h = m.linear("audio.0.mix", &both, 2 * width, width);
    let x = m.add("audio.0.conv_residual", x, &h);
    m.b.stage("audio.0", &x);
    x
}

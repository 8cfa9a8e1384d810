//! Ops with a running state.

use crate::{
    Activation, OpKind, Slot,
    conformance::{
        build::{Builder, Case, normal},
        compare::tolerance,
        rng::Rng,
    },
};

pub(super) fn short_conv(rng: Rng, _: usize) -> Case {
    let mut b = Builder::new(rng, "short_conv", tolerance::SUM);
    b.case.rows.calls = 5;
    let (channels, kernel) = (b.rng.pick(&super::WIDTHS), b.rng.between(1, 6));
    let with_slot = kernel > 1 && !b.rng.one_in(3);
    let activation = b.rng.pick(&[None, Some(Activation::Silu), Some(Activation::Relu)]);
    let x = b.rows("x", &[channels], normal);
    let weight = b.plain("weight", &[channels, kernel], 0.7);
    let bias = b.rng.one_in(2).then(|| b.plain("bias", &[channels], 0.5));
    let slot = with_slot.then(|| b.slot("fifo", Slot::Fifo { rows: kernel - 1, channels }));
    b.note(format!("[{channels}, {kernel}], slot {with_slot}, bias {}, {activation:?}", bias.is_some()));
    let y = b.op("op.conv", OpKind::ShortConv { x, weight, bias, slot, activation });
    b.finish(&y)
}

/// Inputs of decay and step over their whole range: forgetting everything, forgetting nothing.
fn gates(rng: &mut Rng, row: &mut [f32]) {
    row.iter_mut().for_each(|x| *x = rng.normal() * 3.0);
}

pub(super) fn gated_delta(rng: Rng, _: usize) -> Case {
    let mut b = Builder::new(rng, "gated_delta", tolerance::RECURRENT);
    b.case.rows.calls = 5;
    let key_heads = b.rng.between(1, 3);
    let heads = key_heads * b.rng.between(1, 3);
    let (key_dim, value_dim) = (b.rng.pick(&[1, 8, 16, 31, 64, 128]), b.rng.pick(&[1, 8, 17, 32, 64, 128]));
    b.case.rows.most = (400_000 / (key_dim * value_dim * heads)).clamp(10, 140);
    b.note(format!("{heads} heads on {key_heads}, {key_dim} x {value_dim}"));
    let [q, k] = ["q", "k"].map(|name| b.rows(name, &[key_heads, key_dim], normal));
    let v = b.rows("v", &[heads, value_dim], normal);
    let [a, step] = ["a", "b"].map(|name| b.rows(name, &[heads], gates));
    let a_log = b.around("a_log", heads, 0.0, 1.5);
    let dt_bias = b.around("dt_bias", heads, -2.0, 1.5);
    let slot = b.slot("delta", Slot::Delta { heads, key_dim, value_dim });
    let scale = 1.0 / (key_dim as f32).sqrt();
    let y = b.op("op.delta", OpKind::GatedDelta { q, k, v, a, b: step, a_log, dt_bias, slot, scale, eps: 1e-6 });
    b.finish(&y)
}

//! Attention in all its forms.

use crate::{
    Dim, KeyValue, KvType, Mask, Name, OpKind, Symbol,
    conformance::{
        build::{Builder, Case, RowRules, normal},
        compare::tolerance,
        rng::Rng,
    },
};

struct Heads {
    heads: usize,
    kv_heads: usize,
    dim: usize,
    /// Whether scores reach the hundreds, so that weights of earlier keys vanish altogether.
    extreme: bool,
}

fn heads(b: &mut Builder) -> Heads {
    let kv_heads = b.rng.between(1, 3);
    let heads = kv_heads * b.rng.pick(&[1, 1, 2, 3, 4, 7]);
    let dim = b.rng.pick(&[1, 8, 16, 24, 33, 64, 80, 128, 256]);
    b.note(format!("{heads} heads on {kv_heads} x {dim}"));
    b.case.rows.most = if heads * dim > 800 { 24 } else { 70 };
    Heads { heads, kv_heads, dim, extreme: extreme(b) }
}

fn extreme(b: &mut Builder) -> bool {
    let extreme = b.rng.one_in(6);
    if extreme {
        b.note("large scores");
        b.case.tolerance = tolerance::SHARP;
    }
    extreme
}

/// Scores large enough that the softmax has clear winners now and then.
fn sharp(rng: &mut Rng, row: &mut [f32]) {
    normal(rng, row);
    if rng.one_in(4) {
        row.iter_mut().for_each(|x| *x *= 3.0);
    }
}

/// Some scores are in the hundreds.
fn large(rng: &mut Rng, row: &mut [f32]) {
    normal(rng, row);
    if rng.one_in(4) {
        row.iter_mut().for_each(|x| *x *= 8.0);
    }
}

fn queries(b: &mut Builder, name: &str, h: &Heads) -> Name {
    b.rows(name, &[h.heads, h.dim], if h.extreme { large } else { sharp })
}

fn keys_values(b: &mut Builder, h: &Heads) -> KeyValue {
    let keys = if h.extreme { large } else { sharp };
    KeyValue { k: b.rows("k", &[h.kv_heads, h.dim], keys), v: b.rows("v", &[h.kv_heads, h.dim], normal) }
}

/// Scale, softcap and relative keys.
fn scoring(b: &mut Builder, h: &Heads) -> (f32, Option<f32>, Option<Name>) {
    let scale = if b.rng.one_in(4) { 0.3 } else { 1.0 / (h.dim as f32).sqrt() };
    let softcap = b.rng.one_in(4).then(|| b.rng.pick(&[2.0, 50.0]));
    let relative = b.rng.one_in(4).then(|| {
        let distances = b.rng.between(1, 16);
        b.plain("relative", &[distances, h.heads, h.dim], 1.0 / (h.dim as f32).sqrt())
    });
    b.note(format!("scale {scale}, softcap {softcap:?}, relative {:?}", b.case.program.weights.get("relative").map(|w| w.shape[0])));
    (scale, softcap, relative)
}

fn causal_mask(b: &mut Builder) -> Mask {
    match b.rng.below(3) {
        0 => Mask::Window(b.rng.pick(&[1, 2, 5, 12, 17, 64])),
        _ => Mask::Causal,
    }
}

fn kv_type(b: &mut Builder) -> KvType {
    b.rng.pick(&[KvType::F16, KvType::F32])
}

pub(super) fn with_slot(rng: Rng, _: usize) -> Case {
    let mut b = Builder::new(rng, "attend", tolerance::CHAIN);
    b.case.rows.calls = 5;
    let h = heads(&mut b);
    let mask = causal_mask(&mut b);
    slotted(b, h, mask)
}

/// Sessions of many hundred rows: keys in several blocks, windows that have long left the first rows behind.
pub(super) fn long(rng: Rng, _: usize) -> Case {
    let mut b = Builder::new(rng, "attend_long", tolerance::CHAIN);
    let kv_heads = b.rng.between(1, 2);
    let (heads, dim) = (kv_heads * b.rng.between(1, 2), b.rng.pick(&[16, 40, 64]));
    let h = Heads { heads, kv_heads, dim, extreme: extreme(&mut b) };
    b.note(format!("{} heads on {kv_heads} x {}", h.heads, h.dim));
    b.case.rows = RowRules { least: 120, most: 260, multiple: 1, calls: 6 };
    let mask = if b.rng.one_in(3) { Mask::Window(b.rng.pick(&[12, 64, 100, 300])) } else { Mask::Causal };
    slotted(b, h, mask)
}

fn slotted(mut b: Builder, h: Heads, mask: Mask) -> Case {
    let dtype = kv_type(&mut b);
    let window = match mask {
        // A slot may keep more than this reader sees, or all.
        Mask::Window(w) => b.rng.pick(&[None, Some(w), Some(w), Some(w + 3)]),
        _ => None,
    };
    b.note(format!("{mask:?}, slot {dtype:?} {window:?}"));
    let q = queries(&mut b, "q", &h);
    let kv = Some(keys_values(&mut b, &h));
    let slot = Some(b.kv_slot("kv", h.kv_heads, h.dim, window, dtype));
    let (scale, softcap, relative_keys) = scoring(&mut b, &h);
    let y = b.op("op.attend", OpKind::Attend { q, kv, slot, mask, scale, softcap, relative_keys });
    b.finish(&y)
}

/// One op writes, others (with other queries, heads and windows) only read.
pub(super) fn shared(rng: Rng, _: usize) -> Case {
    let mut b = Builder::new(rng, "attend_shared", tolerance::CHAIN);
    b.case.rows.calls = 4;
    let h = heads(&mut b);
    let dtype = kv_type(&mut b);
    let window = b.rng.one_in(2).then(|| b.rng.between(2, 20));
    let narrower = |b: &mut Builder| match window {
        Some(w) => Mask::Window(b.rng.between(1, w)),
        None => causal_mask(b),
    };
    let writer_mask = window.map_or(Mask::Causal, Mask::Window);
    b.note(format!("slot {dtype:?} {window:?}"));
    let kv = Some(keys_values(&mut b, &h));
    let slot = Some(b.kv_slot("kv", h.kv_heads, h.dim, window, dtype));
    let q = queries(&mut b, "q", &h);
    let (scale, softcap, relative_keys) = (1.0 / (h.dim as f32).sqrt(), None, None);
    let first = OpKind::Attend { q, kv, slot: slot.clone(), mask: writer_mask, scale, softcap, relative_keys };
    let first = b.op("op.writer", first);
    b.output("writer", &first);
    let mut last = first;
    for i in 0..b.rng.between(1, 2) {
        let h = Heads { heads: h.kv_heads * b.rng.pick(&[1, 2, 3]), ..h };
        let mask = narrower(&mut b);
        b.note(format!("reader of {} heads {mask:?}", h.heads));
        let q = queries(&mut b, &format!("q{i}"), &h);
        let reader = OpKind::Attend { q, kv: None, slot: slot.clone(), mask, scale, softcap, relative_keys: None };
        last = b.op(&format!("op.reader{i}"), reader);
        b.output(&format!("reader{i}"), &last);
    }
    b.finish(&last)
}

/// Attention inside a segment: image and audio towers. Sometimes on merged rows.
pub(super) fn without_slot(rng: Rng, _: usize) -> Case {
    let mut b = Builder::new(rng, "attend_free", tolerance::CHAIN);
    let h = heads(&mut b);
    let mask = if b.rng.one_in(2) { Mask::Full } else { causal_mask(&mut b) };
    b.note(format!("{mask:?}"));
    let merge = if b.rng.one_in(4) { b.rng.pick(&[2, 4]) } else { 1 };
    let (q, kv) = if merge > 1 && h.dim % merge == 0 {
        b.note(format!("{merge} rows merged"));
        b.case.rows.multiple = merge;
        let mut merged = |name: &str, heads: usize| {
            let x = b.rows(name, &[heads * h.dim / merge], normal);
            let shape = vec![Dim::Exact(Symbol::T, merge), Dim::Fixed(heads), Dim::Fixed(h.dim)];
            b.op(&format!("op.merge_{name}"), OpKind::Reshape { x, shape })
        };
        let q = merged("q", h.heads);
        (q, KeyValue { k: merged("k", h.kv_heads), v: merged("v", h.kv_heads) })
    } else {
        let q = queries(&mut b, "q", &h);
        (q, keys_values(&mut b, &h))
    };
    let (scale, softcap, mut relative_keys) = scoring(&mut b, &h);
    if mask == Mask::Full && relative_keys.take().is_some() {
        // Distances are not negative: relative keys belong to causal masks.
        b.case.program.weights.clear();
    }
    let y = b.op("op.attend", OpKind::Attend { q, kv: Some(kv), slot: None, mask, scale, softcap, relative_keys });
    b.finish(&y)
}

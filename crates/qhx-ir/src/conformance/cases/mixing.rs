//! Ops that combine neighbouring rows of a segment.

use crate::{
    Dim, Mask, OpKind, Symbol,
    conformance::{
        build::{Builder, Case, normal},
        compare::tolerance,
        rng::Rng,
    },
};

pub(super) fn conv2d(rng: Rng, _: usize) -> Case {
    let mut b = Builder::new(rng, "conv2d", tolerance::SUM);
    let (mut width, inputs, outputs) = (b.rng.between(1, 20), b.rng.pick(&[1, 2, 3, 8, 17]), b.rng.pick(&[1, 3, 8, 16, 33]));
    if inputs < 3 {
        width = b.rng.pick(&[width, 80, 128]);
    }
    let (kernel, stride) = (b.rng.pick(&[1, 3, 3, 5]), b.rng.pick(&[1, 2, 2, 3]));
    b.note(format!("[T, {width}, {inputs}], [{outputs}, {kernel}, {kernel}, {inputs}], stride {stride}"));
    b.case.rows.most = 20;
    let x = b.rows("x", &[width, inputs], normal);
    let weight = b.plain("weight", &[outputs, kernel, kernel, inputs], 1.0 / ((kernel * kernel * inputs) as f32).sqrt());
    let bias = b.rng.one_in(2).then(|| b.plain("bias", &[outputs], 0.5));
    let mut y = b.op("op.conv", OpKind::Conv2d { x, weight, bias, stride });
    let mut width = width.div_ceil(stride);
    let mut rows = stride;
    if b.rng.one_in(2) {
        // Again, on rows that stand for several, as audio towers do.
        let stride = b.rng.between(1, 2);
        let weight = b.plain("weight2", &[2, 3, 3, outputs], 1.0 / ((9 * outputs) as f32).sqrt());
        y = b.op("op.conv2", OpKind::Conv2d { x: y, weight, bias: None, stride });
        width = width.div_ceil(stride);
        rows *= stride;
        if b.rng.one_in(2) {
            // Attention over the frames that are left.
            let rows = if rows == 1 { Dim::T } else { Dim::Ceil(Symbol::T, rows) };
            let heads = b.op("op.heads", OpKind::Reshape { x: y, shape: vec![rows, Dim::Fixed(2), Dim::Fixed(width)] });
            let kv = Some(crate::KeyValue { k: heads.clone(), v: heads.clone() });
            let mask = b.rng.pick(&[Mask::Full, Mask::Causal, Mask::Window(2)]);
            y = b.op("op.attend", OpKind::Attend { q: heads, kv, slot: None, mask, scale: 1.0, softcap: None, relative_keys: None });
        }
    }
    b.finish(&y)
}

pub(super) fn pool(rng: Rng, _: usize) -> Case {
    let mut b = Builder::new(rng, "pool", tolerance::SUM);
    let (width, size) = (b.rng.pick(&super::WIDTHS), b.rng.pick(&[1, 2, 4, 9]));
    b.note(format!("[T, {width}] by {size}"));
    b.case.rows.multiple = size;
    let x = b.rows("x", &[width], normal);
    let y = b.op("op.pool", OpKind::Pool { x, size });
    b.finish(&y)
}

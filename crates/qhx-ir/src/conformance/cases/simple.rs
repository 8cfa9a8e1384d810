//! Ops that look at one row at a time, and ops that move rows.

use crate::{
    Activation, Dim, OpKind, Rotary, RotaryVariant, Symbol,
    conformance::{
        build::{Builder, Case, normal, offset, wild},
        compare::tolerance,
        rng::Rng,
    },
};

/// Rows of any width, sometimes with heads.
fn tail(b: &mut Builder) -> Vec<usize> {
    let width = if b.rng.one_in(6) { b.rng.pick(&[576, 1536, 4100]) } else { b.rng.pick(&super::WIDTHS) };
    let tail: Vec<usize> = b.rng.one_in(3).then(|| b.rng.between(1, 7)).into_iter().chain([width]).collect();
    b.case.rows.most = (200_000 / tail.iter().product::<usize>()).clamp(3, 70);
    b.note(format!("[T, {tail:?}]"));
    tail
}

pub(super) fn rms_norm(rng: Rng, _: usize) -> Case {
    let mut b = Builder::new(rng, "rms_norm", tolerance::SUM);
    let tail = tail(&mut b);
    let n = tail[tail.len() - 1];
    let eps = b.rng.pick(&[1e-6, 1e-5, 0.1]);
    let x = b.rows("x", &tail, wild);
    let weight = if b.rng.one_in(3) { None } else { Some(b.plain("weight", &[n], 1.0)) };
    b.note(format!("eps {eps}, weight {}", weight.is_some()));
    let y = b.op("op.norm", OpKind::RmsNorm { x, weight, eps });
    b.finish(&y)
}

pub(super) fn layer_norm(rng: Rng, _: usize) -> Case {
    let mut b = Builder::new(rng, "layer_norm", tolerance::SUM);
    let tail = tail(&mut b);
    let n = tail[tail.len() - 1];
    // Two or three numbers may lie so close that only their rounding differs.
    let eps = if n < 8 { 0.1 } else { b.rng.pick(&[1e-6, 1e-5, 0.1]) };
    let rows = if b.rng.one_in(2) { offset } else { wild };
    let x = b.rows("x", &tail, rows);
    let weight = b.plain("weight", &[n], 1.0);
    let bias = b.rng.one_in(2).then(|| b.plain("bias", &[n], 1.0));
    b.note(format!("eps {eps}, bias {}", bias.is_some()));
    let y = b.op("op.norm", OpKind::LayerNorm { x, weight, bias, eps });
    b.finish(&y)
}

pub(super) fn rope(rng: Rng, _: usize) -> Case {
    let mut b = Builder::new(rng, "rope", tolerance::FUNCTION);
    let (heads, dim) = (b.rng.between(1, 5), b.rng.pick(&[2, 6, 16, 64, 80, 128, 256]));
    let blocks = match b.rng.below(4) {
        0 => vec![(0, dim)],
        1 => vec![(0, (dim / 4).max(1) * 2)],
        2 if dim >= 4 => vec![(0, dim / 4 * 2), (dim / 4 * 2, dim / 4 * 2)],
        _ if dim >= 6 => vec![(1, 2), (dim - 2, 2)],
        _ => vec![(0, 2)],
    };
    let frequencies: usize = blocks.iter().map(|b| b.1 / 2).sum();
    let stream_count = b.rng.between(1, 3);
    let streams = if b.rng.one_in(2) { vec![] } else { (0..frequencies).map(|f| f % stream_count).collect() };
    if b.rng.one_in(2) {
        b.case.program.epochs = vec![8, 20];
        b.case.epoch = b.rng.below(3);
    }
    let many = b.rng.one_in(2);
    let variants = (0..if many { b.case.program.epochs.len() + 1 } else { 1 }).map(|_| {
        let theta = b.rng.pick(&[100.0f32, 1e4, 1e7]);
        let inv_freq = (0..frequencies).map(|f| if b.rng.one_in(10) { 0.0 } else { theta.powf(-(f as f32) / frequencies as f32) });
        RotaryVariant { inv_freq: inv_freq.collect(), amplitude: b.rng.pick(&[1.0, 1.19]) }
    });
    let variants: Vec<_> = variants.collect();
    let far = b.rng.pick(&[None, Some(50), Some(4096), Some(100_000)]);
    b.note(format!("[T, {heads}, {dim}], blocks {blocks:?}, {stream_count} streams, epoch {}, positions {far:?}", b.case.epoch));
    let rotary = b.rotary("rotary", Rotary { blocks, streams, variants });
    let x = b.rows("x", &[heads, dim], normal);
    let positions = b.positions(stream_count, far);
    let y = b.op("op.rope", OpKind::Rope { x, positions, rotary });
    b.finish(&y)
}

const ACTIVATIONS: [Activation; 5] = [Activation::Silu, Activation::GeluTanh, Activation::GeluErf, Activation::Sigmoid, Activation::Relu];

/// Numbers over the whole range that matters to activations, far tails too.
fn spread(rng: &mut Rng, row: &mut [f32]) {
    let size = rng.pick(&[0.1, 1.0, 4.0, 30.0, 200.0]);
    row.iter_mut().for_each(|x| *x = rng.normal() * size);
}

pub(super) fn gate_act(rng: Rng, number: usize) -> Case {
    let mut b = Builder::new(rng, "gate_act", tolerance::FUNCTION);
    let tail = tail(&mut b);
    let activation = ACTIVATIONS[number % 5];
    b.note(format!("{activation:?}"));
    let (gate, up) = (b.rows("gate", &tail, spread), b.rows("up", &tail, normal));
    let y = b.op("op.gate_act", OpKind::GateAct { gate, up, activation });
    b.finish(&y)
}

pub(super) fn activate(rng: Rng, number: usize) -> Case {
    let mut b = Builder::new(rng, "activate", tolerance::FUNCTION);
    let tail = tail(&mut b);
    let activation = ACTIVATIONS[number % 5];
    b.note(format!("{activation:?}"));
    let x = b.rows("x", &tail, spread);
    let y = b.op("op.activate", OpKind::Activate { x, activation });
    b.finish(&y)
}

pub(super) fn add(rng: Rng, _: usize) -> Case {
    let mut b = Builder::new(rng, "add", tolerance::ARITHMETIC);
    let tail = tail(&mut b);
    let (left, right) = (b.rows("a", &tail, wild), b.rows("b", &tail, normal));
    let y = b.op("op.add", OpKind::Add { a: left, b: right });
    b.finish(&y)
}

pub(super) fn mul(rng: Rng, _: usize) -> Case {
    let mut b = Builder::new(rng, "mul", tolerance::ARITHMETIC);
    let tail = tail(&mut b);
    let (left, right) = (b.rows("a", &tail, wild), b.rows("b", &tail, normal));
    let y = b.op("op.mul", OpKind::Mul { a: left, b: right });
    b.finish(&y)
}

pub(super) fn scale(rng: Rng, _: usize) -> Case {
    let mut b = Builder::new(rng, "scale", tolerance::ARITHMETIC);
    let tail = tail(&mut b);
    let factor = b.rng.pick(&[1.0, 0.70710677, -3.0]);
    let width = tail[tail.len() - 1];
    let weight = match b.rng.below(3) {
        0 => None,
        1 => Some(b.plain("weight", &[1], 1.0)),
        _ => Some(b.plain("weight", &[width], 1.0)),
    };
    b.note(format!("factor {factor}, weight {:?}", b.case.program.weights));
    let x = b.rows("x", &tail, wild);
    let y = b.op("op.scale", OpKind::Scale { x, factor, weight });
    b.finish(&y)
}

/// Powers of two, odd widths and products of both, one number included.
pub(super) const HADAMARD_WIDTHS: [usize; 12] = [64, 576, 1536, 96, 448, 1, 3, 512, 2, 100, 34, 255];

pub(super) fn hadamard(rng: Rng, number: usize) -> Case {
    let mut b = Builder::new(rng, "hadamard", tolerance::SUM);
    let width = HADAMARD_WIDTHS[number % HADAMARD_WIDTHS.len()];
    let tail: Vec<usize> = b.rng.one_in(3).then(|| b.rng.between(1, 7)).into_iter().chain([width]).collect();
    b.case.rows.most = (100_000 / tail.iter().product::<usize>()).clamp(3, 70);
    b.note(format!("[T, {tail:?}]"));
    let x = b.rows("x", &tail, wild);
    let y = b.op("op.hadamard", OpKind::Hadamard { x });
    b.finish(&y)
}

pub(super) fn softcap(rng: Rng, _: usize) -> Case {
    let mut b = Builder::new(rng, "softcap", tolerance::FUNCTION);
    let tail = tail(&mut b);
    let cap = b.rng.pick(&[30.0, 50.0, 1.5]);
    b.note(format!("cap {cap}"));
    let x = b.rows("x", &tail, spread);
    let y = b.op("op.softcap", OpKind::Softcap { x, cap });
    b.finish(&y)
}

pub(super) fn clamp(rng: Rng, _: usize) -> Case {
    let mut b = Builder::new(rng, "clamp", tolerance::MOVE);
    let tail = tail(&mut b);
    let x = b.rows("x", &tail, wild);
    let high = b.rng.pick(&[0.25, f32::INFINITY]);
    let y = b.op("op.clamp", OpKind::Clamp { x, low: -0.5, high });
    b.finish(&y)
}

pub(super) fn concat(rng: Rng, _: usize) -> Case {
    let mut b = Builder::new(rng, "concat", tolerance::MOVE);
    let heads: Vec<usize> = b.rng.one_in(2).then(|| b.rng.between(1, 5)).into_iter().collect();
    let count = b.rng.between(1, 4);
    let xs = (0..count).map(|i| {
        let tail: Vec<usize> = heads.iter().copied().chain([b.rng.pick(&super::WIDTHS)]).collect();
        b.note(format!("{tail:?}"));
        b.rows(&format!("x{i}"), &tail, normal)
    });
    let xs: Vec<_> = xs.collect();
    let y = b.op("op.concat", OpKind::Concat { xs });
    b.finish(&y)
}

pub(super) fn slice(rng: Rng, _: usize) -> Case {
    let mut b = Builder::new(rng, "slice", tolerance::MOVE);
    let rank = b.rng.between(1, 3);
    let tail: Vec<usize> = (0..rank).map(|_| b.rng.between(1, 20)).collect();
    let axis = b.rng.between(1, rank);
    let start = b.rng.below(tail[axis - 1]);
    let length = b.rng.between(1, tail[axis - 1] - start);
    b.note(format!("{length} from {start} of dimension {axis} of [T, {tail:?}]"));
    let x = b.rows("x", &tail, normal);
    let y = b.op("op.slice", OpKind::Slice { x, axis, start, length });
    b.finish(&y)
}

pub(super) fn reshape(rng: Rng, _: usize) -> Case {
    let mut b = Builder::new(rng, "reshape", tolerance::MOVE);
    let (heads, dim) = (b.rng.between(1, 5), b.rng.between(1, 20));
    let x = b.rows("x", &[heads * dim], normal);
    let shape = if b.rng.one_in(2) {
        vec![Dim::T, Dim::Fixed(heads), Dim::Fixed(dim)]
    } else {
        // Merging neighbouring rows, as image towers do.
        b.case.rows.multiple = 4;
        vec![Dim::Exact(Symbol::T, 4), Dim::Fixed(4 * heads * dim)]
    };
    b.note(format!("[T, {}] to {shape:?}", heads * dim));
    let y = b.op("op.reshape", OpKind::Reshape { x, shape });
    let y = b.op("op.after", OpKind::Activate { x: y, activation: Activation::Relu });
    b.finish(&y)
}

pub(super) fn gather(rng: Rng, _: usize) -> Case {
    let mut b = Builder::new(rng, "gather", tolerance::MOVE);
    let tail = tail(&mut b);
    let x = b.rows("x", &tail, normal);
    let rows = b.wanted();
    let y = b.op("op.gather", OpKind::Gather { x, rows });
    b.finish(&y)
}

pub(super) fn scatter_rows(rng: Rng, _: usize) -> Case {
    let mut b = Builder::new(rng, "scatter_rows", tolerance::MOVE);
    let (tail, one_in) = (tail(&mut b), b.rng.pick(&[0, 1, 2, 5]));
    b.note(format!("one in {one_in} soft"));
    let x = b.rows("x", &tail, normal);
    let (rows, at) = b.soft(&tail, one_in);
    let y = b.op("op.scatter", OpKind::ScatterRows { x, rows, at });
    b.finish(&y)
}

pub(super) fn scatter_add_rows(rng: Rng, _: usize) -> Case {
    let mut b = Builder::new(rng, "scatter_add_rows", tolerance::ARITHMETIC);
    let (tail, one_in) = (tail(&mut b), b.rng.pick(&[0, 1, 2, 5]));
    b.note(format!("one in {one_in} soft"));
    let x = b.rows("x", &tail, normal);
    let (rows, at) = b.soft(&tail, one_in);
    let y = b.op("op.scatter", OpKind::ScatterAddRows { x, rows, at });
    b.finish(&y)
}

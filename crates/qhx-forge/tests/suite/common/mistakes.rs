//! Ways to spoil a program or its weights.

use super::Overlay;
use qhx_ir::{Activation, Name, OpKind, Program, WeightTensor};

/// Spoils every op whose path has `part` in it.
pub(crate) fn each(program: &mut Program, part: &str, spoil: impl Fn(&mut OpKind)) {
    let ops = program.ops.iter_mut().filter(|op| op.path.contains(part));
    assert_ne!(ops.map(|op| spoil(&mut op.op)).count(), 0, "no op has `{part}` in its path");
    drop_unused_weights(program);
}

/// A weight that no op uses any more would be refused for that alone.
pub(crate) fn drop_unused_weights(program: &mut Program) {
    let used: Vec<Name> = program.ops.iter().flat_map(|op| op.op.weights()).cloned().collect();
    program.weights.retain(|name, _| used.contains(name));
}

pub(crate) fn drop_bias(op: &mut OpKind) {
    if let OpKind::Linear { bias, .. } | OpKind::LayerNorm { bias, .. } = op {
        *bias = None;
    }
}

pub(crate) fn attention_scale(program: &mut Program, wrong: f32) {
    each(program, "attend", |op| {
        if let OpKind::Attend { scale, .. } = op {
            *scale = wrong;
        }
    });
}

pub(crate) fn gates(program: &mut Program, right: Activation, wrong: Activation) {
    each(program, "gated", |op| match op {
        OpKind::GateAct { activation, .. } if *activation == right => *activation = wrong,
        _ => {}
    });
}

pub(crate) fn rotary(program: &mut Program, name: &str, wrong: impl Fn(usize, f32, usize) -> f32) {
    for variant in &mut program.rotaries.get_mut(name).expect("a rotary of that name").variants {
        let count = variant.inv_freq.len();
        variant.inv_freq.iter_mut().enumerate().for_each(|(i, f)| *f = wrong(i, *f, count));
    }
}

/// Changes every number of the weights whose name has `part` in it.
pub(crate) fn weights(program: &mut Program, overlay: &mut Overlay, part: &str, wrong: impl Fn(f32) -> f32) {
    change(program, overlay, part, |values, _| values.iter().map(|&x| wrong(x)).collect());
}

/// Row `r` of the wrong weight is row `from(r, rows)` of the right one.
pub(crate) fn rows(program: &mut Program, overlay: &mut Overlay, part: &str, from: impl Fn(usize, usize) -> usize) {
    change(program, overlay, part, |values, columns| {
        let rows = values.len() / columns;
        (0..rows).flat_map(|r| &values[from(r, rows) * columns..][..columns]).copied().collect()
    });
}

pub(crate) fn columns(program: &mut Program, overlay: &mut Overlay, part: &str, from: impl Fn(usize, usize) -> usize) {
    change(program, overlay, part, |values, columns| {
        values.chunks(columns).flat_map(|row| (0..columns).map(|c| row[from(c, columns)]).collect::<Vec<_>>()).collect()
    });
}

pub(crate) fn change(program: &mut Program, overlay: &mut Overlay, part: &str, wrong: impl Fn(&[f32], usize) -> Vec<f32>) {
    let names: Vec<_> = program.weights.keys().filter(|name| name.contains(part)).cloned().collect();
    assert!(!names.is_empty(), "no weight has `{part}` in its name");
    for name in names {
        let (shape, values) = overlay.numbers(&name);
        let wrong = wrong(&values, shape[shape.len() - 1]);
        overlay.replace(&name, WeightTensor::from_f32(&shape, &wrong).unwrap());
    }
}

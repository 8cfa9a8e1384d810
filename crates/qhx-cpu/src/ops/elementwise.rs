//! Functions of single numbers.

use super::{Frame, for_rows};
use crate::{
    kernels::{
        Instructions,
        map::{self, Binary, Unary},
    },
    matrix::Plain,
    memory::{Rows, View},
};

/// `out = op(x)`.
#[derive(Debug)]
pub(crate) struct UnaryStep {
    pub(crate) op: Unary,
    pub(crate) x: View,
    pub(crate) out: View,
}

/// `out = op(a, b)`.
#[derive(Debug)]
pub(crate) struct BinaryStep {
    pub(crate) op: Binary,
    pub(crate) a: View,
    pub(crate) b: View,
    pub(crate) out: View,
}

/// `out = x · factor · weight`, the weight along the last dimension.
#[derive(Debug)]
pub(crate) struct ScaleBy {
    pub(crate) factor: f32,
    pub(crate) weight: Plain,
    pub(crate) x: View,
    pub(crate) out: View,
}

impl UnaryStep {
    pub(crate) fn run(&self, frame: &mut Frame<'_, '_>) {
        let (run, ([out], inputs, _)) = (frame.run, frame.memory.split([&self.out]));
        let width = self.out.width(&run.bindings);
        if self.x == self.out {
            return for_rows(&run, out, width, |_, part| map::unary_in_place(run.instructions, self.op, part));
        }
        let x = inputs.own_rows(&self.x);
        for_rows(&run, out, width, |first, part| {
            runs(&x, first, part, |x, part| map::unary(run.instructions, self.op, x, part));
        });
    }
}

impl BinaryStep {
    pub(crate) fn run(&self, frame: &mut Frame<'_, '_>) {
        let (run, ([out], inputs, _)) = (frame.run, frame.memory.split([&self.out]));
        let (width, set, op) = (self.out.width(&run.bindings), run.instructions, self.op);
        if self.a == self.out {
            let b = inputs.own_rows(&self.b);
            for_rows(&run, out, width, |first, part| runs(&b, first, part, |b, part| map::binary_into_left(set, op, part, b)));
        } else if self.b == self.out {
            let a = inputs.own_rows(&self.a);
            for_rows(&run, out, width, |first, part| runs(&a, first, part, |a, part| map::binary_into_right(set, op, a, part)));
        } else {
            let (a, b) = (inputs.own_rows(&self.a), inputs.own_rows(&self.b));
            for_rows(&run, out, width, |first, part| {
                for (i, part) in part.chunks_mut(width).enumerate() {
                    map::binary(set, op, a.row(first + i), b.row(first + i), part);
                }
            });
        }
    }
}

impl ScaleBy {
    pub(crate) fn run(&self, frame: &mut Frame<'_, '_>) {
        let (run, ([out], inputs, _)) = (frame.run, frame.memory.split([&self.out]));
        let weight = self.weight.numbers();
        let width = weight.len();
        let scaled = |set: Instructions, x: Option<&[f32]>, y: &mut [f32]| match x {
            Some(x) => map::binary(set, Binary::ScaledMul(self.factor), x, weight, y),
            None => map::binary_into_left(set, Binary::ScaledMul(self.factor), y, weight),
        };
        let x = (self.x != self.out).then(|| inputs.rows(&self.x, width));
        for_rows(&run, out, width, |first, part| {
            for (i, part) in part.chunks_mut(width).enumerate() {
                scaled(run.instructions, x.map(|x| x.row(first + i)), part);
            }
        });
    }
}

/// Calls `body` with runs of `x`, from row `first` on, and the equally long runs of `part`: one run where `x` is dense.
fn runs(x: &Rows<'_>, first: usize, part: &mut [f32], body: impl Fn(&[f32], &mut [f32])) {
    match x.strided() {
        Some((data, stride)) if stride == x.width => body(&data[first * stride..][..part.len()], part),
        _ => part.chunks_mut(x.width).enumerate().for_each(|(i, part)| body(x.row(first + i), part)),
    }
}

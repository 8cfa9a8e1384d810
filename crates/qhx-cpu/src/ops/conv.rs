//! Ops that join neighbouring rows of a segment without a running state: 2-D convolution and pooling.

use super::{Frame, Run, for_rows, span};
use crate::{
    kernels::{
        gemm::Gemm,
        map::{self, Binary, Unary},
    },
    matrix::Plain,
    memory::{Rows, View},
    work::{Chunks, for_each},
};
use std::ops::Range;

/// 2-D convolution of `x [S, width, channels]` with zeros around each segment.
#[derive(Debug)]
pub(crate) struct Conv2d {
    pub(crate) x: View,
    pub(crate) width: usize,
    pub(crate) channels: usize,
    pub(crate) kernel: usize,
    pub(crate) stride: usize,
    /// `[kernel, kernel, channels, outputs]`: as the right side of a product with patches.
    pub(crate) taps: Vec<f32>,
    pub(crate) outputs: usize,
    pub(crate) bias: Option<Plain>,
    /// Rows of the call that one row of x stands for.
    pub(crate) per_row: usize,
    pub(crate) out: View,
}

/// Places of a row of the result whose patches are gathered at once.
const PATCHES: usize = 32;

impl Conv2d {
    pub(crate) fn scratch(&self) -> usize {
        PATCHES * self.kernel * self.kernel * self.channels
    }

    pub(crate) fn run(&self, frame: &mut Frame<'_, '_>) {
        let (run, ([out], inputs, scratch)) = (frame.run, frame.memory.split([&self.out]));
        let x = inputs.own_rows(&self.x);
        let row = self.width.div_ceil(self.stride) * self.outputs;
        let mut done = 0;
        for segment in frame.segments.iter() {
            let (valid, results) = (span(segment, self.per_row), span(segment, self.per_row * self.stride));
            out[done * row..results.start * row].fill(0.0);
            done = results.end;
            let part = &mut out[results.start * row..results.end * row];
            for_each(run.pool, Chunks::new(part, row), scratch, |number, out, scratch| {
                self.row(&run, &x, valid.clone(), number, out, scratch);
            });
        }
        out[done * row..].fill(0.0);
    }

    /// Row `number` of a segment's result.
    fn row(&self, run: &Run<'_>, x: &Rows<'_>, valid: Range<usize>, number: usize, out: &mut [f32], scratch: &mut [f32]) {
        let (patch, padding) = (self.kernel * self.kernel * self.channels, (self.kernel - 1) / 2);
        let places = self.width.div_ceil(self.stride);
        for first in (0..places).step_by(PATCHES) {
            let count = (places - first).min(PATCHES);
            for (i, patch) in scratch.chunks_mut(patch).take(count).enumerate() {
                for (tap, numbers) in patch.chunks_mut(self.channels).enumerate() {
                    let row = (number * self.stride + tap / self.kernel).checked_sub(padding);
                    let column = ((first + i) * self.stride + tap % self.kernel).checked_sub(padding);
                    match (row, column) {
                        (Some(row), Some(column)) if row < valid.len() && column < self.width => {
                            numbers.copy_from_slice(&x.row(valid.start + row)[column * self.channels..][..self.channels]);
                        }
                        _ => numbers.fill(0.0),
                    }
                }
            }
            let (n, k) = (self.outputs, patch);
            let gemm = Gemm { a: &*scratch, a_stride: patch, b: &self.taps, b_stride: n, m: count, n, k, terms: None, add: false };
            gemm.into(run.instructions, &mut out[first * n..(first + count) * n], n);
        }
        if let Some(bias) = &self.bias {
            for place in out.chunks_mut(self.outputs) {
                map::binary_into_left(run.instructions, Binary::Add, place, bias.numbers());
            }
        }
    }
}

/// Mean of each `size` rows; of a segment's last, partial group the mean of its valid rows.
#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) x: View,
    pub(crate) size: usize,
    pub(crate) per_row: usize,
    pub(crate) out: View,
}

impl Pool {
    pub(crate) fn run(&self, frame: &mut Frame<'_, '_>) {
        let (run, ([out], inputs, _)) = (frame.run, frame.memory.split([&self.out]));
        let x = inputs.own_rows(&self.x);
        let mut done = 0;
        for segment in frame.segments.iter() {
            let (valid, results) = (span(segment, self.per_row), span(segment, self.per_row * self.size));
            out[done * x.width..results.start * x.width].fill(0.0);
            done = results.end;
            for_rows(&run, &mut out[results.start * x.width..results.end * x.width], x.width, |first, part| {
                for (i, mean) in part.chunks_mut(x.width).enumerate() {
                    let start = (results.start + first + i) * self.size;
                    let group = start..(start + self.size).min(valid.end);
                    mean.copy_from_slice(x.row(group.start));
                    for row in group.clone().skip(1) {
                        map::binary_into_left(run.instructions, Binary::Add, mean, x.row(row));
                    }
                    map::unary_in_place(run.instructions, Unary::Scale(1.0 / group.len() as f32), mean);
                }
            });
        }
        out[done * x.width..].fill(0.0);
    }
}

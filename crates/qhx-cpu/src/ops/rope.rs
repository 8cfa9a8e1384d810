//! Rotary embedding: cosines and sines once per call, shared by all layers; then the turning of heads.

use super::{Frame, for_rows, unit_rows};
use crate::{
    kernels::rope,
    memory::View,
    work::{Chunks, for_each},
};
use qhx_ir::Rotary;
use std::sync::Arc;

/// Fills `out [S, 2 · frequencies]`: all cosines of a row, then all sines, amplitude included.
#[derive(Debug)]
pub(crate) struct Table {
    pub(crate) rotary: Arc<Rotary>,
    /// `[streams, S]`.
    pub(crate) positions: View,
    pub(crate) out: View,
}

/// Turns the heads of `x [S, heads, dim]`.
#[derive(Debug)]
pub(crate) struct Rope {
    pub(crate) rotary: Arc<Rotary>,
    pub(crate) table: View,
    pub(crate) dim: usize,
    pub(crate) x: View,
    pub(crate) out: View,
}

impl Table {
    pub(crate) fn run(&self, frame: &mut Frame<'_, '_>) {
        let (run, ([out], inputs, _)) = (frame.run, frame.memory.split([&self.out]));
        let positions = inputs.integers(&self.positions);
        let (rows, width) = (self.out.rows(&run.bindings), self.out.width(&run.bindings));
        let first = frame.segments.first().map_or(0, |segment| segment.epoch);
        // The last row and the epoch of each segment, where they differ; rows outside segments are padding.
        let mixed: Vec<(usize, usize)> = match frame.segments.iter().all(|segment| segment.epoch == first) {
            true => Vec::new(),
            false => frame.segments.iter().map(|segment| (segment.first_row + segment.valid_rows, segment.epoch)).collect(),
        };
        let epoch = |row: usize| mixed.get(mixed.partition_point(|&(end, _)| end <= row)).map_or(first, |own| own.1);
        // A sine takes as long as dozens of other numbers.
        let unit = unit_rows(width * 32);
        for_each(run.pool, Chunks::new(out, unit * width), &mut [], |number, part, _| {
            for (i, part) in part.chunks_mut(width).enumerate() {
                let (cosines, sines) = part.split_at_mut(width / 2);
                let variant = self.rotary.variant(epoch(number * unit + i));
                for (f, inv_freq) in variant.inv_freq.iter().enumerate() {
                    let angle = positions[self.rotary.stream(f) * rows + number * unit + i] as f32 * inv_freq;
                    let (sine, cosine) = angle.sin_cos();
                    (cosines[f], sines[f]) = (cosine * variant.amplitude, sine * variant.amplitude);
                }
            }
        });
    }
}

impl Rope {
    pub(crate) fn run(&self, frame: &mut Frame<'_, '_>) {
        let (run, ([out], inputs, _)) = (frame.run, frame.memory.split([&self.out]));
        let width = self.out.width(&run.bindings);
        let table = inputs.own_rows(&self.table);
        let x = (self.x != self.out).then(|| inputs.own_rows(&self.x));
        for_rows(&run, out, width, |first, part| {
            for (i, part) in part.chunks_mut(width).enumerate() {
                if let Some(x) = x {
                    part.copy_from_slice(x.row(first + i));
                }
                let (cosines, sines) = table.row(first + i).split_at(table.width / 2);
                for head in part.chunks_mut(self.dim) {
                    rope::rotate(run.instructions, head, &self.rotary.blocks, cosines, sines);
                }
            }
        });
    }
}

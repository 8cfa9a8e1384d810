//! Causal depthwise convolution over the rows of a segment.

use super::{Frame, Run, span, state, unit_rows};
use crate::{
    kernels::map::{self, Unary},
    matrix::Plain,
    memory::{Rows, View},
    work::{Chunks, for_each},
};
use qhx_ir::Activation;
use std::ops::Range;

#[derive(Debug)]
pub(crate) struct ShortConv {
    pub(crate) x: View,
    /// `[K, channels]`: tap by tap, the last one is the current row's.
    pub(crate) taps: Vec<f32>,
    pub(crate) channels: usize,
    pub(crate) bias: Option<Plain>,
    /// The FIFO slot's place.
    pub(crate) slot: Option<usize>,
    pub(crate) activation: Option<Activation>,
    /// Rows of the call that one row of x stands for.
    pub(crate) per_row: usize,
    pub(crate) out: View,
}

impl ShortConv {
    pub(crate) fn run(&self, frame: &mut Frame<'_, '_>) {
        let (run, ([out], inputs, _)) = (frame.run, frame.memory.split([&self.out]));
        let x = inputs.own_rows(&self.x);
        let before = self.taps.len() / self.channels - 1;
        let mut done = 0;
        for segment in frame.segments.iter_mut() {
            let rows = span(segment, self.per_row);
            out[done * self.channels..rows.start * self.channels].fill(0.0);
            done = rows.end;
            let part = &mut out[rows.start * self.channels..rows.end * self.channels];
            match self.slot {
                None => self.convolve(&run, &x, rows, None, part),
                Some(slot) => {
                    let (current, next) = state(segment).recurrent(slot);
                    self.convolve(&run, &x, rows.clone(), Some(current), part);
                    // The last K − 1 of the rows from before and the segment's own.
                    for (i, row) in next.chunks_mut(self.channels).enumerate() {
                        row.copy_from_slice(match (rows.len() + i).checked_sub(before) {
                            Some(own) => x.row(rows.start + own),
                            None => &current[(rows.len() + i) * self.channels..][..self.channels],
                        });
                    }
                }
            }
        }
        out[done * self.channels..].fill(0.0);
    }

    /// The rows of one segment; `fifo` holds the rows before it, or they are zero.
    fn convolve(&self, run: &Run<'_>, x: &Rows<'_>, rows: Range<usize>, fifo: Option<&[f32]>, out: &mut [f32]) {
        let (channels, set) = (self.channels, run.instructions);
        let before = self.taps.len() / channels - 1;
        let unit = unit_rows(self.taps.len());
        for_each(run.pool, Chunks::new(out, unit * channels), &mut [], |number, part, _| {
            for (i, sums) in part.chunks_mut(channels).enumerate() {
                let t = number * unit + i;
                match &self.bias {
                    Some(bias) => sums.copy_from_slice(bias.numbers()),
                    None => sums.fill(0.0),
                }
                for (j, taps) in self.taps.chunks(channels).enumerate() {
                    let row = match ((t + j).checked_sub(before), fifo) {
                        (Some(own), _) => x.row(rows.start + own),
                        (None, Some(fifo)) => &fifo[(t + j) * channels..][..channels],
                        (None, None) => continue,
                    };
                    map::accumulate(set, sums, taps, row);
                }
                if let Some(activation) = self.activation {
                    map::unary_in_place(set, Unary::Activate(activation), sums);
                }
            }
        });
    }
}

//! Causal depthwise convolution over the rows of a segment.

use super::{Frame, Run, span, state, unit_rows};
use crate::{
    kernels::map::{self, Unary},
    matrix::Plain,
    memory::{Rows, View},
    work::{SEGMENTS, SegmentRows, Tile, Tiles, for_each},
};
use qhx_ir::Activation;

/// Channels of a unit: of one row alone, all channels of a model take tens of microseconds, which many threads can share.
const COLUMNS: usize = 512;

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

/// A segment's rows of x, and the rows before them that its state keeps.
#[derive(Clone, Copy, Default)]
struct Own<'a> {
    first: usize,
    rows: usize,
    /// None: they are zero.
    before: Option<&'a [f32]>,
}

impl ShortConv {
    pub(crate) fn run(&self, frame: &mut Frame<'_, '_>) {
        let (run, ([out], inputs, _)) = (frame.run, frame.memory.split([&self.out]));
        let x = inputs.own_rows(&self.x);
        let columns = COLUMNS.min(self.channels);
        let unit = unit_rows(self.taps.len() / self.channels * columns);
        let mut out = SegmentRows::new(out, self.channels);
        for segments in frame.segments.chunks_mut(SEGMENTS) {
            let mut own = [Own::default(); SEGMENTS];
            // Of each segment, its results, then what its state becomes.
            let mut cuts = [const { None }; 2 * SEGMENTS];
            for ((segment, own), cuts) in segments.iter_mut().zip(&mut own).zip(cuts.chunks_mut(2)) {
                let rows = span(segment, self.per_row);
                *own = Own { first: rows.start, rows: rows.len(), before: None };
                cuts[0] = Some(Tiles::new(out.take(&rows), self.channels, unit, columns));
                if let Some(slot) = self.slot {
                    let (partial, (current, next, record)) = (segment.partial, state(segment).recurrent(slot));
                    if partial {
                        rows.clone().for_each(|row| record.extend_from_slice(x.row(row)));
                    }
                    own.before = Some(current);
                    cuts[1] = Some(Tiles::new(next, self.channels, self.taps.len() / self.channels, columns));
                }
            }
            for_each(run.pool, &cuts[..], &mut [], |_, (place, tile), _| match (&own[place / 2], place % 2) {
                (own, 0) => self.convolve(&run, &x, own, tile),
                (own, _) => self.keep(&x, own, tile),
            });
        }
        out.finish();
    }

    /// The results of some of a segment's rows and channels.
    fn convolve(&self, run: &Run<'_>, x: &Rows<'_>, own: &Own<'_>, mut out: Tile<'_, f32>) {
        let (set, columns) = (run.instructions, out.first_column..out.first_column + out.columns);
        for row in 0..out.rows {
            let (t, sums) = (out.first_row + row, out.row(row));
            match &self.bias {
                Some(bias) => sums.copy_from_slice(&bias.numbers()[columns.clone()]),
                None => sums.fill(0.0),
            }
            for (j, taps) in self.taps.chunks(self.channels).enumerate() {
                if let Some(row) = self.row(x, own, t + j) {
                    map::accumulate(set, sums, &taps[columns.clone()], &row[columns.clone()]);
                }
            }
            if let Some(activation) = self.activation {
                map::unary_in_place(set, Unary::Activate(activation), sums);
            }
        }
    }

    /// The last K − 1 of the rows from before and the segment's own, some channels of them.
    fn keep(&self, x: &Rows<'_>, own: &Own<'_>, mut next: Tile<'_, f32>) {
        let columns = next.first_column..next.first_column + next.columns;
        for row in 0..next.rows {
            match self.row(x, own, own.rows + row) {
                Some(kept) => next.row(row).copy_from_slice(&kept[columns.clone()]),
                None => next.row(row).fill(0.0),
            }
        }
    }

    /// Row `number` of the K − 1 rows from before and the segment's own.
    fn row<'a>(&self, x: &Rows<'a>, own: &Own<'a>, number: usize) -> Option<&'a [f32]> {
        let before = self.taps.len() / self.channels - 1;
        match number.checked_sub(before) {
            Some(number) => Some(x.row(own.first + number)),
            None => own.before.map(|before| &before[number * self.channels..][..self.channels]),
        }
    }
}

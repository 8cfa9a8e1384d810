//! The gated delta rule: keys and queries of some rows are made unit vectors, then all rows go through the state one after the other.

use super::{Frame, Run, span, state};
use crate::{
    kernels::{
        Instructions,
        delta::DeltaRows,
        map::{self, Unary},
        norm,
    },
    matrix::Plain,
    memory::{Rows, View},
    state::DeltaRecord,
    work::{Chunks, SEGMENTS, SegmentRows, Tile, Tiles, for_each},
};
use std::ops::Range;

#[derive(Debug)]
pub(crate) struct GatedDelta {
    pub(crate) q: View,
    pub(crate) k: View,
    pub(crate) v: View,
    pub(crate) a: View,
    pub(crate) b: View,
    pub(crate) a_log: Plain,
    pub(crate) dt_bias: Plain,
    pub(crate) slot: usize,
    pub(crate) scale: f32,
    pub(crate) eps: f32,
    pub(crate) key_heads: usize,
    pub(crate) heads: usize,
    pub(crate) key_dim: usize,
    pub(crate) value_dim: usize,
    /// Rows of the call that one row of q stands for.
    pub(crate) per_row: usize,
    pub(crate) out: View,
}

/// Rows whose unit vectors are made at once.
const ROWS: usize = 64;

/// The inputs of a call.
struct Inputs<'a> {
    q: Rows<'a>,
    k: Rows<'a>,
    v: Rows<'a>,
    a: Rows<'a>,
    b: Rows<'a>,
}

impl GatedDelta {
    pub(crate) fn scratch(&self) -> usize {
        ROWS * 2 * self.key_dim + DeltaRows::room(self.key_dim)
    }

    pub(crate) fn run(&self, frame: &mut Frame<'_, '_>) {
        let (run, ([out], inputs, scratch)) = (frame.run, frame.memory.split([&self.out]));
        let [q, k, v, a, b] = [&self.q, &self.k, &self.v, &self.a, &self.b].map(|view| inputs.own_rows(view));
        let inputs = Inputs { q, k, v, a, b };
        let size = self.key_dim * self.value_dim;
        let mut out = SegmentRows::new(out, self.heads * self.value_dim);
        for segments in frame.segments.chunks_mut(SEGMENTS) {
            let mut before = [(0, &[][..]); SEGMENTS];
            let mut cuts = [const { None }; SEGMENTS];
            for ((segment, before), cut) in segments.iter_mut().zip(&mut before).zip(&mut cuts) {
                let rows = span(segment, self.per_row);
                let part = out.take(&rows);
                let (current, next, _) = state(segment).recurrent(self.slot);
                *before = (rows.start, current);
                let tiles = Tiles::new(part, self.heads * self.value_dim, rows.len(), self.value_dim);
                *cut = Some((tiles, Chunks::new(next, size)));
            }
            // Every head of every segment by itself.
            for_each(run.pool, &cuts[..], scratch, |_, (segment, (mut tile, s)), scratch| {
                let (head, (first, current)) = (tile.first_column / self.value_dim, before[segment]);
                self.head(&run, &inputs, first..first + tile.rows, head, (&current[head * size..][..size], s), &mut tile, scratch);
            });
        }
        out.finish();
        for segment in frame.segments.iter_mut().filter(|segment| segment.partial) {
            let rows = span(segment, self.per_row);
            self.record(&run, &inputs, rows, state(segment).recurrent(self.slot).2);
        }
    }

    /// Keeps what some rows bring to the state: see [`DeltaRecord`].
    fn record(&self, run: &Run<'_>, inputs: &Inputs<'_>, rows: Range<usize>, record: &mut Vec<f32>) {
        let width = DeltaRecord { key_dim: self.key_dim, value_dim: self.value_dim }.width();
        record.resize(self.heads * rows.len() * width, 0.0);
        let places = (0..self.heads).flat_map(|head| rows.clone().map(move |row| (head, row)));
        for ((head, row), record) in places.zip(record.chunks_mut(width)) {
            let (key, rest) = record.split_at_mut(self.key_dim);
            self.unit(run.instructions, &inputs.k, row, head, 1.0, key);
            rest[..self.value_dim].copy_from_slice(&inputs.v.row(row)[head * self.value_dim..][..self.value_dim]);
            (rest[self.value_dim], rest[self.value_dim + 1]) = self.gates(inputs, row, head);
        }
    }

    /// Decay and step of a row.
    fn gates(&self, inputs: &Inputs<'_>, row: usize, head: usize) -> (f32, f32) {
        let x = inputs.a.row(row)[head] + self.dt_bias.numbers()[head];
        let softplus = x.max(0.0) + (-x.abs()).exp().ln_1p();
        let step = 1.0 / (1.0 + (-inputs.b.row(row)[head]).exp());
        ((-self.a_log.numbers()[head].exp() * softplus).exp(), step)
    }

    /// Puts the unit vector of a row's head into `out`, times `scale`.
    fn unit(&self, set: Instructions, x: &Rows<'_>, row: usize, head: usize, scale: f32, out: &mut [f32]) {
        let key_head = head / (self.heads / self.key_heads);
        let x = &x.row(row)[key_head * self.key_dim..][..self.key_dim];
        let factor = scale / (norm::sum_of_squares(set, x) + self.eps).sqrt();
        map::unary(set, Unary::Scale(factor), x, out);
    }

    /// All rows of one head: from the state `before` to the state `s`.
    #[allow(clippy::too_many_arguments)] // One unit's parts, passed on once.
    fn head(
        &self,
        run: &Run<'_>,
        inputs: &Inputs<'_>,
        rows: Range<usize>,
        head: usize,
        (before, s): (&[f32], &mut [f32]),
        out: &mut Tile<'_, f32>,
        scratch: &mut [f32],
    ) {
        let (set, key_dim, value_dim) = (run.instructions, self.key_dim, self.value_dim);
        let Some((values, value_stride)) = inputs.v.strided() else { unreachable!("a value's own rows are a stride apart") };
        let (queries, rest) = scratch.split_at_mut(ROWS * key_dim);
        let (keys, room) = rest.split_at_mut(ROWS * key_dim);
        let mut gates = [(0.0, 0.0); ROWS];
        for first in (0..rows.len()).step_by(ROWS) {
            let (start, count) = (rows.start + first, (rows.len() - first).min(ROWS));
            for t in 0..count {
                self.unit(set, &inputs.q, start + t, head, self.scale, &mut queries[t * key_dim..][..key_dim]);
                self.unit(set, &inputs.k, start + t, head, 1.0, &mut keys[t * key_dim..][..key_dim]);
                gates[t] = self.gates(inputs, start + t, head);
            }
            let (gates, values) = (&gates[..count], &values[start * value_stride + head * value_dim..]);
            let rule = DeltaRows { queries, keys, gates, key_dim, values, value_stride, value_dim };
            rule.into_tile(set, (first == 0).then_some(before), s, room, &mut out.rows_from(first, count));
        }
    }
}

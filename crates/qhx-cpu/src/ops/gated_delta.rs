//! The gated delta rule: row by row for a few rows, as matrix products over chunks for many.
//!
//! With `b_t` the sum of log decays from a chunk's start, unrolling the rule over a chunk gives, for the change `δ_t` that row t makes,
//! `δ_t + Σ_{i<t} A_ti δ_i = β_t (v_t − e^{b_t} S₀ᵀk_t)` with `A_ti = β_t e^{b_t − b_i} k_t·k_i`, a triangular system that is solved row by row; then
//! `y_t = e^{b_t} S₀ᵀq_t + Σ_{i≤t} e^{b_t − b_i} (k_i·q_t) δ_i` and `S = e^{b_C} S₀ + Σ_i e^{b_C − b_i} k_i δ_iᵀ`. All exponents are at most 0.

use super::{Frame, Run, span, state};
use crate::{
    kernels::{
        Instructions,
        gemm::{Gemm, pack_columns},
        map::{self, Binary, Unary},
        norm,
    },
    matrix::Plain,
    memory::{Rows, View},
    work::{Chunks, Tile, Tiles, for_each},
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

/// Rows of a chunk.
const CHUNK: usize = 64;
/// From so many rows on a segment is done in chunks.
const CHUNKED: usize = 16;

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
        CHUNK * (4 * self.key_dim + 2 * self.value_dim + 2 * CHUNK + 2)
    }

    pub(crate) fn run(&self, frame: &mut Frame<'_, '_>) {
        let (run, ([out], inputs, scratch)) = (frame.run, frame.memory.split([&self.out]));
        let [q, k, v, a, b] = [&self.q, &self.k, &self.v, &self.a, &self.b].map(|view| inputs.own_rows(view));
        let inputs = Inputs { q, k, v, a, b };
        let width = self.heads * self.value_dim;
        let mut done = 0;
        for segment in frame.segments.iter_mut() {
            let rows = span(segment, self.per_row);
            out[done * width..rows.start * width].fill(0.0);
            done = rows.end;
            let part = &mut out[rows.start * width..rows.end * width];
            let (current, next) = state(segment).recurrent(self.slot);
            let size = self.key_dim * self.value_dim;
            let tiles = Tiles::new(part, width, rows.len(), self.value_dim);
            for_each(run.pool, (tiles, Chunks::new(next, size)), scratch, |head, (mut tile, s), scratch| {
                let before = &current[head * size..][..size];
                match rows.len() {
                    CHUNKED.. => {
                        s.copy_from_slice(before);
                        self.chunks(&run, &inputs, rows.clone(), head, s, &mut tile, scratch)
                    }
                    _ => self.rows(&run, &inputs, rows.clone(), head, (before, s), &mut tile, scratch),
                }
            });
        }
        out[done * width..].fill(0.0);
    }

    /// Log decay and step of a row.
    fn gates(&self, inputs: &Inputs<'_>, row: usize, head: usize) -> (f32, f32) {
        let x = inputs.a.row(row)[head] + self.dt_bias.numbers()[head];
        let softplus = x.max(0.0) + (-x.abs()).exp().ln_1p();
        let step = 1.0 / (1.0 + (-inputs.b.row(row)[head]).exp());
        (-self.a_log.numbers()[head].exp() * softplus, step)
    }

    /// Puts the unit vector of a row's head into `out`, times `scale`.
    fn unit(&self, set: Instructions, x: &Rows<'_>, row: usize, head: usize, scale: f32, out: &mut [f32]) {
        let key_head = head / (self.heads / self.key_heads);
        let x = &x.row(row)[key_head * self.key_dim..][..self.key_dim];
        let factor = scale / (norm::sum_of_squares(set, x) + self.eps).sqrt();
        map::unary(set, Unary::Scale(factor), x, out);
    }

    fn value<'a>(&self, inputs: &Inputs<'a>, row: usize, head: usize) -> &'a [f32] {
        &inputs.v.row(row)[head * self.value_dim..][..self.value_dim]
    }

    /// The rule as it is written: from the state `before` to the state `s`.
    #[allow(clippy::too_many_arguments)] // One unit's parts, passed on once.
    fn rows(
        &self,
        run: &Run<'_>,
        inputs: &Inputs<'_>,
        rows: Range<usize>,
        head: usize,
        (before, s): (&[f32], &mut [f32]),
        out: &mut Tile<'_, f32>,
        scratch: &mut [f32],
    ) {
        let (set, dim) = (run.instructions, self.value_dim);
        let (query, rest) = scratch.split_at_mut(self.key_dim);
        let (key, rest) = rest.split_at_mut(self.key_dim);
        let change = &mut rest[..dim];
        for (t, row) in rows.enumerate() {
            self.unit(set, &inputs.q, row, head, self.scale, query);
            self.unit(set, &inputs.k, row, head, 1.0, key);
            let (decay, step) = self.gates(inputs, row, head);
            match t {
                0 => map::unary(set, Unary::Scale(decay.exp()), before, s),
                _ => map::unary_in_place(set, Unary::Scale(decay.exp()), s),
            }
            let product = |a: &[f32], s: &[f32], out: &mut [f32]| {
                let gemm = Gemm { a, a_stride: self.key_dim, b: s, b_stride: dim, m: 1, n: dim, k: self.key_dim, add: false };
                gemm.into(set, out, dim);
            };
            product(key, s, change);
            for (change, value) in change.iter_mut().zip(self.value(inputs, row, head)) {
                *change = step * (value - *change);
            }
            for (s, &key) in s.chunks_mut(dim).zip(&*key) {
                map::binary_into_left(set, Binary::AddScaled(key), s, change);
            }
            product(query, s, out.row(t));
        }
    }

    /// The rule over chunks: see the module's text.
    #[allow(clippy::too_many_arguments)] // One unit's parts, passed on once.
    fn chunks(
        &self,
        run: &Run<'_>,
        inputs: &Inputs<'_>,
        rows: Range<usize>,
        head: usize,
        s: &mut [f32],
        out: &mut Tile<'_, f32>,
        scratch: &mut [f32],
    ) {
        let (set, key_dim, dim) = (run.instructions, self.key_dim, self.value_dim);
        let (queries, rest) = scratch.split_at_mut(CHUNK * key_dim);
        let (keys, rest) = rest.split_at_mut(CHUNK * key_dim);
        let (packed, rest) = rest.split_at_mut(CHUNK * key_dim);
        let (turned, rest) = rest.split_at_mut(CHUNK * key_dim);
        let (changes, rest) = rest.split_at_mut(CHUNK * dim);
        let (read, rest) = rest.split_at_mut(CHUNK * dim);
        let (system, rest) = rest.split_at_mut(CHUNK * CHUNK);
        let (mixing, rest) = rest.split_at_mut(CHUNK * CHUNK);
        let (decays, rest) = rest.split_at_mut(CHUNK);
        let steps = &mut rest[..CHUNK];
        for first in (0..rows.len()).step_by(CHUNK) {
            let n = (rows.len() - first).min(CHUNK);
            let mut decay = 0.0;
            for t in 0..n {
                let row = rows.start + first + t;
                self.unit(set, &inputs.q, row, head, self.scale, &mut queries[t * key_dim..][..key_dim]);
                self.unit(set, &inputs.k, row, head, 1.0, &mut keys[t * key_dim..][..key_dim]);
                let (log_decay, step) = self.gates(inputs, row, head);
                decay += log_decay;
                (decays[t], steps[t]) = (decay, step);
            }
            // k_t·k_i and q_t·k_i.
            pack_columns(set, keys, key_dim, n, key_dim, packed, CHUNK);
            for (a, products) in [(&*keys, &mut *system), (&*queries, &mut *mixing)] {
                let gemm = Gemm { a, a_stride: key_dim, b: &*packed, b_stride: CHUNK, m: n, n, k: key_dim, add: false };
                gemm.into(set, products, CHUNK);
            }
            for t in 0..n {
                for i in 0..=t {
                    let fade = (decays[t] - decays[i]).exp();
                    system[t * CHUNK + i] *= -steps[t] * fade;
                    mixing[t * CHUNK + i] *= fade;
                }
                mixing[t * CHUNK + t + 1..t * CHUNK + n].fill(0.0);
            }
            // What the state from before the chunk gives to keys and to queries.
            let product = |a: &[f32], s: &[f32], out: &mut [f32]| {
                let gemm = Gemm { a, a_stride: key_dim, b: s, b_stride: dim, m: n, n: dim, k: key_dim, add: false };
                gemm.into(set, out, dim);
            };
            product(keys, s, changes);
            product(queries, s, read);
            for t in 0..n {
                let fade = decays[t].exp();
                let (solved, rest) = changes.split_at_mut(t * dim);
                let change = &mut rest[..dim];
                for (change, value) in change.iter_mut().zip(self.value(inputs, rows.start + first + t, head)) {
                    *change = steps[t] * (value - fade * *change);
                }
                // Minus the changes of earlier rows, as far as this row's key sees them.
                let gemm = Gemm { a: &system[t * CHUNK..], a_stride: CHUNK, b: &*solved, b_stride: dim, m: 1, n: dim, k: t, add: true };
                gemm.into(set, change, dim);
                map::unary(set, Unary::Scale(fade), &read[t * dim..][..dim], out.row(first + t));
            }
            let gemm = Gemm { a: &*mixing, a_stride: CHUNK, b: &*changes, b_stride: dim, m: n, n: dim, k: n, add: true };
            gemm.into_tile(set, &mut out.rows_from(first, n));
            // The state after the chunk: keys fade until its end.
            let last = decays[n - 1];
            for i in 0..n {
                let fade = (last - decays[i]).exp();
                for (p, &key) in keys[i * key_dim..][..key_dim].iter().enumerate() {
                    turned[p * CHUNK + i] = key * fade;
                }
            }
            map::unary_in_place(set, Unary::Scale(last.exp()), s);
            let gemm = Gemm { a: &*turned, a_stride: CHUNK, b: &*changes, b_stride: dim, m: key_dim, n: dim, k: n, add: true };
            gemm.into(set, s, dim);
        }
    }
}

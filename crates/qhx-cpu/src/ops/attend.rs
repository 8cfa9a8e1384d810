//! Softmax attention, block by block over the keys.
//!
//! A unit is one key head, a few rows of queries with all the query heads that share it, and a run of keys. Within a run the softmax is carried along from
//! block to block; where there are few queries, long runs of keys are cut into several, whose partial results are merged in order. All cuts depend on
//! row counts alone.

use super::{Frame, Run, span, state};
use crate::{
    kernels::{
        Instructions, convert,
        dot::Dots,
        element::{Element, Store as Stored},
        fetch,
        gemm::{self, Gemm},
        map::{self, Binary, Unary},
        softmax,
    },
    matrix::Plain,
    memory::{Rows, View},
    state::{KvSlice, Numbers},
    work::{Chunks, Tile, Tiles, for_each},
};
use half::f16;
use qhx_ir::Mask;
use std::ops::Range;

/// Writes new keys and values into their slot, provisionally.
#[derive(Debug)]
pub(crate) struct Store {
    pub(crate) keys: View,
    pub(crate) values: View,
    pub(crate) slot: usize,
}

/// Attends.
#[derive(Debug)]
pub(crate) struct Attend {
    pub(crate) q: View,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) dim: usize,
    pub(crate) source: Source,
    pub(crate) mask: Mask,
    pub(crate) scale: f32,
    pub(crate) softcap: Option<f32>,
    /// `[distances, heads, dim]`.
    pub(crate) relative_keys: Option<Plain>,
    /// Rows of the call that one row of q stands for.
    pub(crate) per_row: usize,
    /// Room for partial results.
    pub(crate) partial: View,
    pub(crate) out: View,
}

/// Where keys and values come from.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Source {
    /// A slot, by its place.
    Slot(usize),
    /// The segment's own rows.
    Own { keys: View, values: View },
}

/// Keys that are scored at once.
const KEYS: usize = 64;
/// Terms of a score that are summed at once.
const TERMS: usize = 64;
/// Query rows (of all heads of a group) of a unit, where there are many.
const QUERIES: usize = 48;
/// Up to so many query rows the keys are cut into runs.
const FEW: usize = 16;
/// The most runs of keys.
const RUNS: usize = 16;
/// Keys of a run, at least.
const RUN_KEYS: usize = 256;

impl Store {
    pub(crate) fn run(&self, frame: &mut Frame<'_, '_>) {
        let (run, ([], inputs, _)) = (frame.run, frame.memory.split([]));
        let (keys, values) = (inputs.own_rows(&self.keys), inputs.own_rows(&self.values));
        for segment in frame.segments.iter_mut() {
            let rows = span(segment, 1);
            let (kv, before) = state(segment).kv(self.slot);
            kv.touch(before + rows.len());
            let (dim, capacity) = (kv.head_dim, kv.capacity);
            let place = before * dim..(before + rows.len()) * dim;
            for (new, kept) in [(&keys, &mut kv.keys), (&values, &mut kv.values)] {
                match kept {
                    Numbers::F32(kept) => store(&run, new, rows.clone(), kept, capacity * dim, place.clone(), dim),
                    Numbers::F16(kept) => {
                        store::<f16>(&run, new, rows.clone(), bytemuck::cast_slice_mut(kept), capacity * dim, place.clone(), dim);
                    }
                }
            }
        }
    }
}

/// Copies rows to `place` in each head's part of `kept`.
fn store<E: Stored>(run: &Run<'_>, new: &Rows<'_>, rows: Range<usize>, kept: &mut [E], per_head: usize, place: Range<usize>, dim: usize) {
    let copy = |head: usize, kept: &mut [E]| {
        for (row, kept) in rows.clone().zip(kept[place.clone()].chunks_mut(dim)) {
            convert::narrow(run.instructions, &new.row(row)[head * dim..][..dim], kept);
        }
    };
    match rows.len() * new.width > super::UNIT {
        true => for_each(run.pool, Chunks::new(kept, per_head), &mut [], |head, kept, _| copy(head, kept)),
        false => kept.chunks_mut(per_head).enumerate().for_each(|(head, kept)| copy(head, kept)),
    }
}

/// Keys and values of one segment as a unit reads them: row `j` of head `h` starts at `h · per_head + j · stride`.
#[derive(Clone, Copy)]
struct KeyValues<'a, E> {
    keys: &'a [E],
    values: &'a [E],
    per_head: usize,
    key_stride: usize,
    value_stride: usize,
}

/// How a segment's work is cut.
#[derive(Clone, Copy)]
struct Cut {
    /// Query rows of a unit.
    rows: usize,
    /// Keys from the first that any query sees.
    first_key: usize,
    /// One beyond the last.
    end_key: usize,
    /// Runs of keys.
    runs: usize,
    /// Keys of a run.
    run_keys: usize,
}

impl Cut {
    fn new(mask: Mask, group: usize, rows: usize, before: usize) -> Self {
        let first_key = match mask {
            Mask::Window(window) => (before + 1).saturating_sub(window),
            _ => 0,
        };
        let end_key = before + rows;
        if rows > 1 && rows * group > FEW {
            return Self { rows: (QUERIES / group).max(1), first_key, end_key, runs: 1, run_keys: end_key - first_key };
        }
        let keys = end_key - first_key;
        let run_keys = keys.div_ceil(RUNS).next_multiple_of(KEYS).max(RUN_KEYS);
        Self { rows, first_key, end_key, runs: keys.div_ceil(run_keys), run_keys }
    }

    fn keys(&self, run: usize) -> Range<usize> {
        let start = self.first_key + run * self.run_keys;
        start..(start + self.run_keys).min(self.end_key)
    }
}

impl Attend {
    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    fn distances(&self) -> usize {
        self.relative_keys.as_ref().map_or(0, |table| table.numbers().len() / (self.heads * self.dim))
    }

    /// Query rows of a unit, all heads of a group counted, at most.
    fn most_rows(group: usize) -> usize {
        QUERIES.max(group).max(FEW)
    }

    pub(crate) fn scratch(&self) -> usize {
        let rows = Self::most_rows(self.group());
        // Queries, scores, sums, packed keys, maxima and totals, products with relative keys.
        rows * (2 * self.dim + KEYS + 2 + self.distances()) + KEYS * self.dim + 64
    }

    /// Numbers of room that partial results need.
    pub(crate) fn partial_numbers(heads: usize, kv_heads: usize, dim: usize) -> usize {
        kv_heads * RUNS * Self::most_rows(heads / kv_heads) * (dim + 2)
    }

    pub(crate) fn run(&self, frame: &mut Frame<'_, '_>) {
        let (run, ([out, partial], inputs, scratch)) = (frame.run, frame.memory.split([&self.out, &self.partial]));
        let q = inputs.own_rows(&self.q);
        let width = self.heads * self.dim;
        let mut done = 0;
        for segment in frame.segments.iter_mut() {
            let rows = span(segment, self.per_row);
            out[done * width..rows.start * width].fill(0.0);
            done = rows.end;
            let part = &mut out[rows.start * width..rows.end * width];
            match self.source {
                Source::Own { keys, values } => {
                    let (keys, values) = (inputs.own_rows(&keys), inputs.own_rows(&values));
                    let (Some((keys, key_stride)), Some((values, value_stride))) = (keys.strided(), values.strided()) else {
                        unreachable!("a value's own rows are a stride apart")
                    };
                    let (keys, values) = (&keys[rows.start * key_stride..], &values[rows.start * value_stride..]);
                    let kv = KeyValues { keys, values, per_head: self.dim, key_stride, value_stride };
                    self.segment(&run, &q, rows, 0, &kv, part, partial, scratch);
                }
                Source::Slot(slot) => {
                    let (kv, before) = state(segment).kv(slot);
                    let (per_head, stride) = (kv.capacity * self.dim, self.dim);
                    match (kv.keys.as_slice(), kv.values.as_slice()) {
                        (KvSlice::F32(keys), KvSlice::F32(values)) => {
                            let kv = KeyValues { keys, values, per_head, key_stride: stride, value_stride: stride };
                            self.segment(&run, &q, rows, before, &kv, part, partial, scratch);
                        }
                        (KvSlice::F16(keys), KvSlice::F16(values)) => {
                            let kv = KeyValues { keys, values, per_head, key_stride: stride, value_stride: stride };
                            self.segment(&run, &q, rows, before, &kv, part, partial, scratch);
                        }
                        _ => unreachable!("keys and values of a slot have one type"),
                    }
                }
            }
        }
        out[done * width..].fill(0.0);
    }

    #[allow(clippy::too_many_arguments)] // One call's parts, passed on once.
    fn segment<E: Element>(
        &self,
        run: &Run<'_>,
        q: &Rows<'_>,
        rows: Range<usize>,
        before: usize,
        kv: &KeyValues<'_, E>,
        out: &mut [f32],
        partial: &mut [f32],
        scratch: &mut [f32],
    ) {
        let (width, columns) = (self.heads * self.dim, self.group() * self.dim);
        let cut = Cut::new(self.mask, self.group(), rows.len(), before);
        let unit = |head: usize, first: usize, count: usize, keys: Range<usize>| Unit {
            attend: self,
            set: run.instructions,
            q: *q,
            first_row: rows.start + first,
            rows: count,
            first_index: before + first,
            head,
            keys,
            end_key: cut.end_key,
        };
        if cut.runs <= 1 {
            let tiles = Tiles::new(out, width, cut.rows, columns);
            let body = |_: usize, mut tile: Tile<'_, f32>, scratch: &mut [f32]| {
                let unit = unit(tile.first_column / columns, tile.first_row, tile.rows, cut.keys(0));
                let room = unit.compute(kv, scratch);
                unit.write(&room, &mut tile);
            };
            // Small work is not worth waking anybody.
            if rows.len() * (cut.end_key - cut.first_key) * width <= 2 * super::UNIT {
                return crate::work::for_each_here(tiles, scratch, body);
            }
            return for_each(run.pool, tiles, scratch, body);
        }
        let state = rows.len() * self.group() * (self.dim + 2);
        let partial = &mut partial[..self.kv_heads * cut.runs * state];
        for_each(run.pool, Chunks::new(partial, state), scratch, |number, kept, scratch| {
            let unit = unit(number / cut.runs, 0, rows.len(), cut.keys(number % cut.runs));
            unit.compute(kv, scratch).keep(kept);
        });
        for row in 0..rows.len() {
            for head in 0..self.heads {
                let (kv_head, place) = (head / self.group(), row * self.group() + head % self.group());
                let runs = &partial[kv_head * cut.runs * state..(kv_head + 1) * cut.runs * state];
                let out = &mut out[row * width + head * self.dim..][..self.dim];
                merge(run.instructions, runs.chunks(state), place, self.dim, out);
            }
        }
    }
}

/// Puts the partial results of one query together, in the order of keys.
fn merge<'a>(set: Instructions, runs: impl Iterator<Item = &'a [f32]> + Clone, place: usize, dim: usize, out: &mut [f32]) {
    let part = |run: &'a [f32]| {
        let numbers = &run[place * (dim + 2)..][..dim + 2];
        (numbers[0], numbers[1], &numbers[2..])
    };
    let max = runs.clone().map(|run| part(run).0).fold(f32::NEG_INFINITY, f32::max);
    let mut total = 0.0;
    out.fill(0.0);
    for run in runs {
        let (run_max, run_total, sums) = part(run);
        if run_total > 0.0 {
            let factor = (run_max - max).exp();
            total += run_total * factor;
            map::binary_into_left(set, Binary::AddScaled(factor), out, sums);
        }
    }
    map::unary_in_place(set, Unary::Scale(1.0 / total), out);
}

/// The work of one unit.
struct Unit<'a> {
    attend: &'a Attend,
    set: Instructions,
    q: Rows<'a>,
    /// Its first query row in the call.
    first_row: usize,
    rows: usize,
    /// That row's index among the keys.
    first_index: usize,
    /// Key head.
    head: usize,
    keys: Range<usize>,
    /// One beyond the last key that any query of the segment sees.
    end_key: usize,
}

/// The scratch of a unit: for each (row, query head of the group), in this order, its state.
struct Room<'a> {
    dim: usize,
    queries: &'a mut [f32],
    scores: &'a mut [f32],
    sums: &'a mut [f32],
    maxima: &'a mut [f32],
    totals: &'a mut [f32],
    relative: &'a mut [f32],
    packed: &'a mut [f32],
}

impl Unit<'_> {
    fn compute<'s, E: Element>(&self, kv: &KeyValues<'_, E>, scratch: &'s mut [f32]) -> Room<'s> {
        let Attend { dim, .. } = *self.attend;
        let count = self.rows * self.attend.group();
        let mut room = self.room(count, scratch);
        let (keys, values) = (&kv.keys[self.head * kv.per_head..], &kv.values[self.head * kv.per_head..]);
        let mut first = self.keys.start;
        while first < self.keys.end {
            let n = (self.keys.end - first).min(KEYS);
            // Rows before this one see none of these keys.
            let skip = match self.attend.mask {
                Mask::Full => 0,
                _ => first.saturating_sub(self.first_index) * self.attend.group(),
            };
            if skip >= count {
                break;
            }
            let values = &values[first * kv.value_stride..];
            if count <= FEW {
                // They are read column by column below, which no CPU foresees; the keys are scored meanwhile.
                fetch::rows(self.set, values, kv.value_stride, n, dim);
            }
            self.score(&keys[first * kv.key_stride..], kv.key_stride, skip, n, &mut room);
            for place in skip..count {
                self.weigh(place, first, n, &mut room);
            }
            let gemm = Gemm {
                a: &room.scores[skip * KEYS..],
                a_stride: KEYS,
                b: values,
                b_stride: kv.value_stride,
                m: count - skip,
                n: dim,
                k: n,
                add: true,
            };
            gemm.into(self.set, &mut room.sums[skip * dim..], dim);
            first += n;
        }
        room
    }

    fn room<'s>(&self, count: usize, scratch: &'s mut [f32]) -> Room<'s> {
        let (dim, group, distances) = (self.attend.dim, self.attend.group(), self.attend.distances());
        let (queries, rest) = scratch.split_at_mut(count * dim);
        let (scores, rest) = rest.split_at_mut(count * KEYS);
        let (sums, rest) = rest.split_at_mut(count * dim);
        let (maxima, rest) = rest.split_at_mut(count);
        let (totals, rest) = rest.split_at_mut(count);
        let (relative, rest) = rest.split_at_mut(count * distances);
        let packed = &mut rest[..KEYS * dim];
        sums.fill(0.0);
        maxima.fill(f32::NEG_INFINITY);
        totals.fill(0.0);
        for (place, query) in queries.chunks_mut(dim).enumerate() {
            let head = self.head * group + place % group;
            let own = &self.q.row(self.first_row + place / group)[head * dim..][..dim];
            map::unary(self.set, Unary::Scale(self.attend.scale), own, query);
            if let Some(table) = &self.attend.relative_keys {
                let w_stride = self.attend.heads * dim;
                let w = &table.numbers()[head * dim..];
                let dots = Dots { x: own, x_stride: dim, x_rows: 1, w, w_stride, w_rows: distances, k: dim };
                dots.into(self.set, &mut relative[place * distances..][..distances], distances);
            }
        }
        Room { dim, queries, scores, sums, maxima, totals, relative, packed }
    }

    /// Products of the queries from place `skip` on with `n` keys.
    fn score<E: Element>(&self, keys: &[E], stride: usize, skip: usize, n: usize, room: &mut Room<'_>) {
        let dim = room.dim;
        let (queries, scores) = (&room.queries[skip * dim..], &mut room.scores[skip * KEYS..]);
        let count = queries.len() / dim;
        if count <= 6 {
            let dots = Dots { x: queries, x_stride: dim, x_rows: count, w: keys, w_stride: stride, w_rows: n, k: dim };
            return dots.into(self.set, scores, KEYS);
        }
        gemm::pack_columns(self.set, keys, stride, n, dim, room.packed, KEYS);
        // Long sums in pieces lose fewer digits, and an error in a score is one in an exponent.
        for at in (0..dim).step_by(TERMS) {
            let (a, b, k) = (&queries[at..], &room.packed[at * KEYS..], (dim - at).min(TERMS));
            let gemm = Gemm { a, a_stride: dim, b, b_stride: KEYS, m: count, n, k, add: at > 0 };
            gemm.into(self.set, scores, KEYS);
        }
    }

    /// Turns the scores of one query with keys `first .. first + n` into weights and carries its softmax on.
    fn weigh(&self, place: usize, first: usize, n: usize, room: &mut Room<'_>) {
        let index = self.first_index + place / self.attend.group();
        let visible = match self.attend.mask {
            Mask::Full => 0..self.end_key,
            Mask::Causal => 0..index + 1,
            Mask::Window(window) => (index + 1).saturating_sub(window)..index + 1,
        };
        let (start, end) = (visible.start.clamp(first, first + n) - first, visible.end.clamp(first, first + n) - first);
        let scores = &mut room.scores[place * KEYS..][..n];
        scores[..start].fill(0.0);
        scores[end.max(start)..].fill(0.0);
        if start >= end {
            return;
        }
        let scores = &mut scores[start..end];
        let distances = self.attend.distances();
        if distances > 0 {
            let relative = &room.relative[place * distances..][..distances];
            for (score, key) in scores.iter_mut().zip(first + start..) {
                if let Some(product) = index.checked_sub(key).and_then(|distance| relative.get(distance)) {
                    *score += product;
                }
            }
        }
        if let Some(cap) = self.attend.softcap {
            map::unary_in_place(self.set, Unary::Softcap(cap), scores);
        }
        let before = room.maxima[place];
        let (max, sum) = softmax::exponentials(self.set, scores, before);
        if max > before {
            let factor = (before - max).exp();
            // A factor of 0 (a far larger score) must wipe the sums too: so the total is looked at before it is scaled.
            if room.totals[place] > 0.0 {
                map::unary_in_place(self.set, Unary::Scale(factor), &mut room.sums[place * room.dim..][..room.dim]);
            }
            room.totals[place] *= factor;
            room.maxima[place] = max;
        }
        room.totals[place] += sum;
    }

    /// Writes the finished rows.
    fn write(&self, room: &Room<'_>, tile: &mut Tile<'_, f32>) {
        let group = self.attend.group();
        for row in 0..self.rows {
            for (head, out) in tile.row(row).chunks_mut(room.dim).enumerate() {
                let place = row * group + head;
                map::unary(self.set, Unary::Scale(1.0 / room.totals[place]), &room.sums[place * room.dim..][..room.dim], out);
            }
        }
    }
}

impl Room<'_> {
    /// Keeps maximum, total and sums of each query for the merge.
    fn keep(&self, kept: &mut [f32]) {
        for (place, kept) in kept.chunks_mut(self.dim + 2).enumerate() {
            (kept[0], kept[1]) = (self.maxima[place], self.totals[place]);
            kept[2..].copy_from_slice(&self.sums[place * self.dim..][..self.dim]);
        }
    }
}

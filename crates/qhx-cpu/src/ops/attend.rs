//! Softmax attention, block by block over the keys.
//!
//! Keys are cut at absolute indexes: into blocks of [`KEYS`], which are scored at once, and into runs of [`RUN_KEYS`]. Within a run a query's softmax is carried along
//! from block to block; the results of its runs are folded together from first to last. So the result of a query depends on its own index and the keys that it
//! sees, and on nothing else: not on the rows that are computed with it, nor on where a chunk begins. A key that a query does not see is never looked at.
//!
//! A unit is one key head and a few rows of queries with all the query heads that share it, over all runs; where there are few queries, a unit is a single run.

use super::{Frame, Run, span, state};
use crate::{
    kernels::{
        Instructions,
        columns::Panel,
        convert,
        dot::{self, Dots},
        element::{Element, Store as Stored},
        gemm::Gemm,
        map::{self, Unary},
        scores::{self, Scores},
        softmax,
    },
    matrix::Plain,
    memory::{Rows, View},
    pages::{Kept, KvRows, PAGE_ROWS, Page, numbers_mut},
    work::{Chunks, SEGMENTS, SegmentRows, Tile, Tiles, for_each, for_each_here},
};
use half::f16;
use qhx_ir::{KvType, Mask, Segment};
use std::{ops::Range, sync::Arc};

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
const KEYS: usize = PAGE_ROWS;
/// Keys of a run.
const RUN_KEYS: usize = 256;
/// Query rows (of all heads of a group) of a unit, where there are many.
const QUERIES: usize = 48;
/// Up to so many query rows each run of keys is a unit.
const FEW: usize = 16;
/// The most runs that are computed before they are folded together.
const RUNS: usize = 32;

impl Store {
    pub(crate) fn run(&self, frame: &mut Frame<'_, '_>) {
        let (run, ([], inputs, _)) = (frame.run, frame.memory.split([]));
        let (keys, values) = (inputs.own_rows(&self.keys), inputs.own_rows(&self.values));
        for segment in frame.segments.iter_mut() {
            let rows = span(segment, 1);
            let (kv, before) = state(segment).kv(self.slot);
            let place = before..before + rows.len();
            match kv.dtype {
                KvType::F32 => store::<f32>(&run, kv, place, (&keys, &values), rows.start),
                KvType::F16 => store::<f16>(&run, kv, place, (&keys, &values), rows.start),
            }
        }
    }
}

/// Puts rows of the call, from `first` on, into the rows `place` of a slot.
fn store<E: Stored + Kept>(run: &Run<'_>, kv: &mut KvRows, place: Range<usize>, new: (&Rows<'_>, &Rows<'_>), first: usize) {
    let (heads, dim, start) = (kv.kv_heads, kv.head_dim, place.start / PAGE_ROWS * PAGE_ROWS);
    let copy = |number: usize, pages: &mut [Arc<Page>], _: &mut [f32]| {
        let Some(page) = pages.first_mut() else { return };
        let (keys, values) = numbers_mut::<E>(page);
        let page_start = start + number * PAGE_ROWS;
        for row in place.start.max(page_start)..place.end.min(page_start + PAGE_ROWS) {
            for (new, kept) in [(new.0, &mut *keys), (new.1, &mut *values)] {
                let new = new.row(first + row - place.start);
                for head in 0..heads {
                    let kept = &mut kept[(head * PAGE_ROWS + row - page_start) * dim..][..dim];
                    convert::narrow(run.instructions, &new[head * dim..][..dim], kept);
                }
            }
        }
    };
    let is_large = place.len() * new.0.width > super::UNIT;
    let pages = Chunks::new(kv.pages_mut(&place), 1);
    if is_large { for_each(run.pool, pages, &mut [], copy) } else { for_each_here(pages, &mut [], copy) }
}

/// Keys and values of one segment as a unit reads them.
#[derive(Clone, Copy)]
enum KeyValues<'a, E> {
    /// Row `j` of head `h` starts at `h · dim + j · stride`.
    Own { keys: &'a [E], key_stride: usize, values: &'a [E], value_stride: usize, dim: usize },
    /// The rows of a slot.
    Slot(&'a KvRows),
}

/// What a unit scores at once: keys and values of a head, each a stride apart.
struct Block<'a, E> {
    keys: &'a [E],
    key_stride: usize,
    values: &'a [E],
    value_stride: usize,
}

impl<'a, E: Element + Kept> KeyValues<'a, E> {
    /// The block of keys and values that begins at `first`, where it is worth asking for before it is needed.
    fn next(&self, head: usize, first: usize) -> [&'a [E]; 2] {
        match *self {
            Self::Slot(kv) if head < kv.kv_heads => kv.block(head, first).into(),
            // They were made in this call, or there are none.
            _ => [&[]; 2],
        }
    }

    /// Up to [`KEYS`] keys from `first` on, a multiple of that.
    fn block(&self, head: usize, first: usize) -> Block<'a, E> {
        match *self {
            Self::Own { keys, key_stride, values, value_stride, dim } => {
                let (keys, values) = (&keys[head * dim + first * key_stride..], &values[head * dim + first * value_stride..]);
                Block { keys, key_stride, values, value_stride }
            }
            Self::Slot(kv) => {
                let (keys, values) = kv.block(head, first);
                Block { keys, key_stride: kv.head_dim, values, value_stride: kv.head_dim }
            }
        }
    }
}

impl Attend {
    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    fn distances(&self) -> usize {
        self.relative_keys.as_ref().map_or(0, |table| table.numbers().len() / (self.heads * self.dim))
    }

    pub(crate) fn scratch(&self) -> usize {
        let (group, dim) = (self.group(), self.dim);
        let rows = QUERIES.max(group).max(FEW);
        // Queries, scores, products with relative keys, two states, and packed keys.
        rows * (dim + KEYS + self.distances() + 2 * State::numbers(dim)) + KEYS * dim
    }

    /// Numbers of room that the states of runs need: those of one round, and what they are folded into.
    pub(crate) fn partial_numbers(heads: usize, kv_heads: usize, dim: usize) -> usize {
        kv_heads * (RUNS + 1) * FEW.max(heads / kv_heads) * State::numbers(dim)
    }

    pub(crate) fn run(&self, frame: &mut Frame<'_, '_>) {
        let (run, ([out, partial], inputs, scratch)) = (frame.run, frame.memory.split([&self.out, &self.partial]));
        let q = inputs.own_rows(&self.q);
        let mut out = SegmentRows::new(out, self.heads * self.dim);
        let few = frame.segments.len() * self.kv_heads < 4 * run.pool.threads();
        for segments in frame.segments.chunks_mut(SEGMENTS) {
            match self.source {
                Source::Own { keys, values } => {
                    let (keys, values) = (inputs.own_rows(&keys), inputs.own_rows(&values));
                    let (Some((keys, key_stride)), Some((values, value_stride))) = (keys.strided(), values.strided()) else {
                        unreachable!("a value's own rows are a stride apart")
                    };
                    let own = |segment: &mut Segment<'_>| {
                        let rows = span(segment, self.per_row);
                        let (keys, values) = (&keys[rows.start * key_stride..], &values[rows.start * value_stride..]);
                        Part { kv: KeyValues::Own { keys, key_stride, values, value_stride, dim: self.dim }, rows, before: 0 }
                    };
                    self.segments::<f32>(&run, &q, segments.iter_mut().map(own), &mut out, few, partial, scratch);
                }
                Source::Slot(slot) => {
                    let dtype = segments.first_mut().map(|segment| state(segment).kv(slot).0.dtype);
                    let parts = segments.iter_mut().map(|segment| {
                        let rows = span(segment, self.per_row);
                        let (kv, before) = state(segment).kv(slot);
                        (&*kv, rows, before)
                    });
                    match dtype {
                        Some(KvType::F32) => {
                            let parts = parts.map(|(kv, rows, before)| Part { kv: KeyValues::Slot(kv), rows, before });
                            self.segments::<f32>(&run, &q, parts, &mut out, few, partial, scratch);
                        }
                        Some(KvType::F16) => {
                            let parts = parts.map(|(kv, rows, before)| Part { kv: KeyValues::Slot(kv), rows, before });
                            self.segments::<f16>(&run, &q, parts, &mut out, few, partial, scratch);
                        }
                        None => {}
                    }
                }
            }
        }
        out.finish();
    }

    /// Some segments: those that are cut into units of whole queries all at once, then the others one by one.
    #[allow(clippy::too_many_arguments)] // One call's parts, passed on once.
    fn segments<'a, E: Element + Kept>(
        &self,
        run: &Run<'_>,
        q: &Rows<'_>,
        parts: impl Iterator<Item = Part<'a, E>>,
        out: &mut SegmentRows<'_>,
        few: bool,
        partial: &mut [f32],
        scratch: &mut [f32],
    ) {
        let (width, group) = (self.heads * self.dim, self.group());
        let columns = group * self.dim;
        let mut all = [const { None }; SEGMENTS];
        let mut cuts = [const { None }; SEGMENTS];
        let mut by_runs = [const { None }; SEGMENTS];
        let mut work = 0;
        for (place, part) in parts.enumerate() {
            let own = out.take(&part.rows);
            if part.rows.is_empty() {
                continue;
            }
            let seen = part.unit(self, run, q, 0, 0, part.rows.len()).seen();
            if few && runs_of(&seen).len() > 1 && (part.rows.len() == 1 || part.rows.len() * group <= FEW) {
                by_runs[place] = Some(own);
            } else {
                work += part.rows.len() * seen.len() * width;
                cuts[place] = Some(Tiles::new(own, width, (QUERIES / group).max(1), columns));
            }
            all[place] = Some(part);
        }
        let body = |_: usize, (place, mut tile): (usize, Tile<'_, f32>), scratch: &mut [f32]| {
            let Some(part) = &all[place] else { unreachable!("a segment that was cut has rows") };
            part.unit(self, run, q, tile.first_column / columns, tile.first_row, tile.rows).compute(&part.kv, &mut tile, scratch);
        };
        // Small work is not worth waking anybody.
        match work <= 2 * super::UNIT {
            true => for_each_here(&cuts[..], scratch, body),
            false => for_each(run.pool, &cuts[..], scratch, body),
        }
        for (part, out) in all.iter().zip(by_runs) {
            if let (Some(part), Some(out)) = (part, out) {
                self.by_runs(run, q, part, out, partial, scratch);
            }
        }
    }

    /// Few queries over many keys: each run of keys is a unit.
    fn by_runs<E: Element + Kept>(
        &self,
        run: &Run<'_>,
        q: &Rows<'_>,
        part: &Part<'_, E>,
        out: &mut [f32],
        partial: &mut [f32],
        scratch: &mut [f32],
    ) {
        let (rows, group) = (part.rows.len(), self.group());
        let runs = runs_of(&part.unit(self, run, q, 0, 0, rows).seen());
        let size = rows * group * State::numbers(self.dim);
        let (folded, partial) = partial.split_at_mut(self.kv_heads * size);
        State::clear(folded, self.dim);
        for first in runs.clone().step_by(RUNS) {
            let count = (runs.end - first).min(RUNS);
            let partial = &mut partial[..self.kv_heads * count * size];
            for_each(run.pool, Chunks::new(partial, size), scratch, |number, states, scratch| {
                let unit = part.unit(self, run, q, number / count, 0, rows);
                unit.walk(&part.kv, first + number % count, &mut unit.room(scratch).0, states);
            });
            for (number, states) in partial.chunks(size).enumerate() {
                softmax::fold(run.instructions, &mut folded[number / count * size..][..size], states, State::numbers(self.dim));
            }
        }
        for (row, out) in out.chunks_mut(self.heads * self.dim).enumerate() {
            for (head, out) in out.chunks_mut(self.dim).enumerate() {
                let place = (head / group * rows + row) * group + head % group;
                State(&mut folded[place * State::numbers(self.dim)..][..State::numbers(self.dim)]).write(run.instructions, out);
            }
        }
    }
}

/// A segment's query rows, and what they attend to.
struct Part<'a, E> {
    kv: KeyValues<'a, E>,
    /// Its rows of q.
    rows: Range<usize>,
    /// Keys before those of its own rows.
    before: usize,
}

impl<E> Part<'_, E> {
    /// Some of its rows with one key head.
    fn unit<'u>(&self, attend: &'u Attend, run: &Run<'_>, q: &Rows<'u>, head: usize, first: usize, rows: usize) -> Unit<'u> {
        Unit {
            attend,
            set: run.instructions,
            q: *q,
            first_row: self.rows.start + first,
            rows,
            first_index: self.before + first,
            head,
            end_key: self.before + self.rows.len(),
        }
    }
}

/// The runs that have some of these keys.
fn runs_of(keys: &Range<usize>) -> Range<usize> {
    keys.start / RUN_KEYS..keys.end.div_ceil(RUN_KEYS)
}

/// The softmax of one query over some keys: weighted sums of values, then the largest score and the total of the weights. A total of 0 means that it saw no key yet.
struct State<'a>(&'a mut [f32]);

impl State<'_> {
    /// Numbers of a state, in whole cache lines where values are.
    fn numbers(dim: usize) -> usize {
        dim + softmax::BESIDE_SUMS
    }

    fn clear(states: &mut [f32], dim: usize) {
        states.fill(0.0);
        states.chunks_mut(Self::numbers(dim)).for_each(|state| *State(state).max() = f32::NEG_INFINITY);
    }

    fn sums(&mut self) -> &mut [f32] {
        let dim = self.0.len() - softmax::BESIDE_SUMS;
        &mut self.0[..dim]
    }

    fn max(&mut self) -> &mut f32 {
        let dim = self.0.len() - softmax::BESIDE_SUMS;
        &mut self.0[dim]
    }

    fn total(&mut self) -> &mut f32 {
        let dim = self.0.len() - softmax::BESIDE_SUMS;
        &mut self.0[dim + 1]
    }

    /// From here on `max` is the largest score: what was summed before shrinks with it.
    fn raise(&mut self, set: Instructions, max: f32) {
        let factor = (*self.max() - max).exp();
        // A factor of 0 (a far larger score) must wipe the sums too: so the total is looked at before it is scaled.
        if *self.total() != 0.0 {
            map::unary_in_place(set, Unary::Scale(factor), self.sums());
        }
        *self.total() *= factor;
        *self.max() = max;
    }

    /// The weighted mean of the values.
    fn write(mut self, set: Instructions, out: &mut [f32]) {
        let factor = 1.0 / *self.total();
        map::unary(set, Unary::Scale(factor), self.sums(), out);
    }
}

/// One key head and some query rows.
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
    /// One beyond the segment's last key.
    end_key: usize,
}

/// What a unit keeps for each of its places: (row, query head of the group), in this order.
struct Room<'a> {
    queries: &'a mut [f32],
    scores: &'a mut [f32],
    relative: &'a mut [f32],
    /// Keys of a block, side by side.
    packed: &'a mut [f32],
}

impl Unit<'_> {
    /// The keys that a row of the unit sees.
    fn visible(&self, row: usize) -> Range<usize> {
        let end = self.first_index + row + 1;
        match self.attend.mask {
            Mask::Full => 0..self.end_key,
            Mask::Causal => 0..end,
            Mask::Window(window) => end.saturating_sub(window)..end,
        }
    }

    /// The keys from the first to the last that any row sees: rows see no earlier keys than the rows before them.
    fn seen(&self) -> Range<usize> {
        self.visible(0).start..self.visible(self.rows - 1).end
    }

    /// All runs, folded together, into the finished rows.
    fn compute<E: Element + Kept>(&self, kv: &KeyValues<'_, E>, tile: &mut Tile<'_, f32>, scratch: &mut [f32]) {
        let (dim, group) = (self.attend.dim, self.attend.group());
        let (mut room, states) = self.room(scratch);
        let size = self.rows * group * State::numbers(dim);
        let (folded, later) = states[..2 * size].split_at_mut(size);
        let runs = runs_of(&self.seen());
        self.walk(kv, runs.start, &mut room, folded);
        for run in runs.skip(1) {
            self.walk(kv, run, &mut room, later);
            softmax::fold(self.set, folded, later, State::numbers(dim));
        }
        for (row, states) in folded.chunks_mut(group * State::numbers(dim)).enumerate() {
            for (state, out) in states.chunks_mut(State::numbers(dim)).zip(tile.row(row).chunks_mut(dim)) {
                State(state).write(self.set, out);
            }
        }
    }

    /// Cuts the scratch and fills in the queries. Also gives what is left.
    fn room<'s>(&self, scratch: &'s mut [f32]) -> (Room<'s>, &'s mut [f32]) {
        let (dim, group, distances) = (self.attend.dim, self.attend.group(), self.attend.distances());
        let count = self.rows * group;
        let (queries, rest) = scratch.split_at_mut(count * dim);
        let (scores, rest) = rest.split_at_mut(count * KEYS);
        let (relative, rest) = rest.split_at_mut(count * distances);
        let (packed, rest) = rest.split_at_mut(KEYS * dim);
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
        (Room { queries, scores, relative, packed }, rest)
    }

    /// Fills `states` with what the keys of one run give.
    fn walk<E: Element + Kept>(&self, kv: &KeyValues<'_, E>, run: usize, room: &mut Room<'_>, states: &mut [f32]) {
        let Attend { dim, mask, .. } = *self.attend;
        let (group, numbers) = (self.attend.group(), State::numbers(dim));
        State::clear(states, dim);
        let seen = self.seen();
        let start = (run * RUN_KEYS).max(seen.start / KEYS * KEYS);
        for first in (start..((run + 1) * RUN_KEYS).min(seen.end)).step_by(KEYS) {
            let n = (seen.end - first).min(KEYS);
            // The rows that see some of these keys: earlier ones end before them, later ones begin behind them.
            let rows = match mask {
                Mask::Full => 0..self.rows,
                Mask::Causal => first.saturating_sub(self.first_index)..self.rows,
                Mask::Window(window) => {
                    first.saturating_sub(self.first_index)..(first + n + window - 1).saturating_sub(self.first_index).min(self.rows)
                }
            };
            let places = rows.start * group..rows.end * group;
            let Block { keys, key_stride, values, value_stride } = kv.block(self.head, first);
            let next = match first + KEYS < seen.end {
                true => kv.next(self.head, first + KEYS),
                // What the same thread has next, mostly.
                false => kv.next(self.head + 1, seen.start / KEYS * KEYS),
            };
            self.score(keys, key_stride, next, places.clone(), n, room);
            for some in places.clone().step_by(QUERIES) {
                let m = (places.end - some).min(QUERIES);
                let mut terms: [Range<usize>; QUERIES] = std::array::from_fn(|_| 0..0);
                for (place, terms) in (some..some + m).zip(&mut terms) {
                    *terms = self.weigh(place, first, n, room, State(&mut states[place * numbers..][..numbers]));
                }
                let (a, terms) = (&room.scores[some * KEYS..], Some(&terms[..m]));
                let gemm = Gemm { a, a_stride: KEYS, b: values, b_stride: value_stride, m, n: dim, k: n, terms, add: true };
                gemm.into(self.set, &mut states[some * numbers..], numbers);
            }
        }
    }

    /// Products of some queries with `n` keys.
    fn score<E: Element>(&self, keys: &[E], stride: usize, next: [&[E]; 2], places: Range<usize>, n: usize, room: &mut Room<'_>) {
        let dim = self.attend.dim;
        let (x, scores) = (&room.queries[places.start * dim..], &mut room.scores[places.start * KEYS..]);
        if places.len() <= FEW && scores::in_one_piece(dim) {
            let scored = Scores { queries: &x[..places.len() * dim], dim, keys, key_stride: stride, count: n, next };
            return scored.into(self.set, scores, KEYS);
        }
        if places.len() <= FEW {
            let dots = Dots { x, x_stride: dim, x_rows: places.len(), w: keys, w_stride: stride, w_rows: n, k: dim };
            return dots.into(self.set, scores, KEYS);
        }
        let scores = &mut scores[..places.len() * KEYS];
        let piece = dot::piece(dim);
        for at in (0..dim).step_by(piece) {
            let panel = Panel::pack(self.set, &keys[at..], stride, n, (dim - at).min(piece), room.packed);
            panel.products(self.set, &x[at..], dim, at > 0, scores, KEYS);
        }
    }

    /// Turns the scores of one query with keys `first .. first + n` into weights and carries its softmax on. Gives the keys that it sees, of those.
    fn weigh(&self, place: usize, first: usize, n: usize, room: &mut Room<'_>, mut state: State<'_>) -> Range<usize> {
        let (index, row) = (self.first_index + place / self.attend.group(), place / self.attend.group());
        let visible = self.visible(row);
        let visible = visible.start.max(first) - first..visible.end.min(first + n) - first;
        let scores = &mut room.scores[place * KEYS..][visible.clone()];
        let distances = self.attend.distances();
        if distances > 0 {
            let relative = &room.relative[place * distances..][..distances];
            for (score, key) in scores.iter_mut().zip(first + visible.start..) {
                if let Some(product) = index.checked_sub(key).and_then(|distance| relative.get(distance)) {
                    *score += product;
                }
            }
        }
        if let Some(cap) = self.attend.softcap {
            map::unary_in_place(self.set, Unary::Softcap(cap), scores);
        }
        let (max, sum) = softmax::exponentials(self.set, scores, *state.max());
        if max > *state.max() {
            state.raise(self.set, max);
        }
        *state.total() += sum;
        visible
    }
}

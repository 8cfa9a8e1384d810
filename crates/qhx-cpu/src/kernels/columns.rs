//! Products of many f32 rows with stored rows: prefill with float weights, and attention scores of many queries.
//!
//! Stored rows stand side by side in a panel, one to a lane, and each lane makes its row's sum as [`super::dot`] does, to the last bit: there, lane `r` of a vector of
//! `LANES` adds up the numbers `r`, `r + LANES` and so on, and the lanes are summed in halves. Here the same partial sums are made one after the other, in the order in
//! which they are added together, so that few of them wait. A panel has its numbers in this order too.
#![allow(unsafe_code)] // Vector loads and stores.
#![allow(clippy::needless_range_loop)] // Register tiles are indexed in two directions.

use super::{
    Instructions,
    element::Element,
    run,
    vector::{Kernel, MOST_LANES, Vector},
};
use std::mem::MaybeUninit;

/// The most columns of a panel.
pub(crate) const MOST_COLUMNS: usize = 64;

/// Stored rows side by side.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Panel<'a> {
    numbers: &'a [f32],
    /// Stored rows.
    columns: usize,
    /// Numbers of each.
    k: usize,
}

/// The partial sums of `k` numbers in the order in which they are made: the lane of each, and the place of its first number.
#[inline(always)]
fn lanes_in_order<V: Vector>(k: usize) -> [(usize, usize); MOST_LANES] {
    let mut place = 0;
    std::array::from_fn(|i| {
        // Lanes are added in halves: the next one is always the other of a pair, then of a pair of pairs.
        let lane = i.reverse_bits() >> (usize::BITS - V::LANES.ilog2());
        let lane = if i < V::LANES { lane } else { 0 };
        let first = place;
        place += if i < V::LANES { k.saturating_sub(lane).div_ceil(V::LANES) } else { 0 };
        (lane, first)
    })
}

impl<'a> Panel<'a> {
    /// Numbers of room for a panel.
    pub(crate) fn numbers(columns: usize, k: usize) -> usize {
        columns.next_multiple_of(MOST_LANES) * k
    }

    /// Packs `columns` rows of `k` numbers, `stride` apart, into `room`.
    pub(crate) fn pack<E: Element>(
        instructions: Instructions,
        rows: &[E],
        stride: usize,
        columns: usize,
        k: usize,
        room: &'a mut [f32],
    ) -> Self {
        let room = &mut room[..Self::numbers(columns, k)];
        assert!(columns <= MOST_COLUMNS && (columns == 0 || (columns - 1) * stride + k <= rows.len()), "the rows are too short");
        run(instructions, Pack { rows: rows.as_ptr(), stride, columns, k, panel: room.as_mut_ptr() });
        Self { numbers: room, columns, k }
    }

    /// `out[i · out_stride + j] = x_i · column_j`, or added to what is there: the sum of the pieces before.
    pub(crate) fn products(&self, instructions: Instructions, x: &[f32], x_stride: usize, add: bool, out: &mut [f32], out_stride: usize) {
        let rows = out.len().saturating_sub(self.columns) / out_stride + usize::from(out.len() >= self.columns);
        self.products_to(instructions, (x, x_stride, rows), add, (out.as_mut_ptr(), out_stride));
    }

    /// The same into a tile with as many columns.
    pub(crate) fn products_into_tile(
        &self,
        instructions: Instructions,
        x: &[f32],
        x_stride: usize,
        add: bool,
        out: &mut crate::work::Tile<'_, f32>,
    ) {
        assert!(out.columns == self.columns, "the tile must have the panel's columns");
        let rows = out.rows;
        self.products_to(instructions, (x, x_stride, rows), add, out.as_mut_ptr());
    }

    fn products_to(&self, set: Instructions, (x, x_stride, rows): (&[f32], usize, usize), add: bool, (out, out_stride): (*mut f32, usize)) {
        if rows == 0 || self.columns == 0 {
            return;
        }
        assert!((rows - 1) * x_stride + self.k <= x.len(), "x is too short");
        run(set, Products { panel: *self, x: x.as_ptr(), x_stride, rows, add, out, out_stride });
    }
}

struct Products<'a> {
    panel: Panel<'a>,
    x: *const f32,
    x_stride: usize,
    rows: usize,
    add: bool,
    out: *mut f32,
    out_stride: usize,
}

impl Kernel for Products<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let (mut j, columns) = (0, self.panel.columns);
        // SAFETY: `products_to` checked that all rows are there; a panel is as wide as whole vectors.
        unsafe {
            while j < columns {
                if columns - j > V::LANES {
                    self.columns::<V, 2>(j);
                    j += 2 * V::LANES;
                } else {
                    self.columns::<V, 1>(j);
                    j += V::LANES;
                }
            }
        }
    }
}

impl Products<'_> {
    /// All rows with `N` vectors of columns from `j` on.
    #[inline(always)]
    unsafe fn columns<V: Vector, const N: usize>(&self, j: usize) {
        let mut i = 0;
        // SAFETY: passed on.
        unsafe {
            while i < self.rows {
                // Tall tiles where there are registers for them: sums, and one row of the panel.
                i += match self.rows - i {
                    12.. if V::LANES == 16 => self.tile::<V, 12, N>(i, j),
                    6.. => self.tile::<V, 6, N>(i, j),
                    3.. => self.tile::<V, 3, N>(i, j),
                    _ => self.tile::<V, 1, N>(i, j),
                };
            }
        }
    }

    /// `M` rows from `i` on. Gives `M`.
    #[inline(always)]
    unsafe fn tile<V: Vector, const M: usize, const N: usize>(&self, i: usize, j: usize) -> usize {
        let (k, width) = (self.panel.k, self.panel.columns.next_multiple_of(MOST_LANES));
        // SAFETY: rows i..i+M and columns j..j+N·LANES are there; a waiting sum is read after it was written.
        unsafe {
            let x = self.x.add(i * self.x_stride);
            // Sums of 1, 2, 4 and 8 lanes that wait for as many others.
            let mut waiting = [const { [const { [const { MaybeUninit::<V>::uninit() }; N] }; M] }; MOST_LANES.ilog2() as usize];
            for (number, (lane, place)) in lanes_in_order::<V>(k).into_iter().enumerate().take(V::LANES) {
                let mut sums = [[V::splat(0.0); N]; M];
                let mut from = self.panel.numbers.as_ptr().add(place * width + j);
                let mut p = lane;
                while p < k {
                    let columns: [V; N] = std::array::from_fn(|v| V::load(from.add(v * V::LANES)));
                    for m in 0..M {
                        let factor = V::splat(*x.add(m * self.x_stride + p));
                        for v in 0..N {
                            sums[m][v] = factor.mul_add(columns[v], sums[m][v]);
                        }
                    }
                    from = from.add(width);
                    p += V::LANES;
                }
                // Every second sum meets one that waits, every fourth then one of two lanes, and so on. Number by number: an array that is copied whole would not stay in
                // registers above.
                let mut level = 0;
                while number >> level & 1 == 1 {
                    for m in 0..M {
                        for v in 0..N {
                            sums[m][v] = waiting[level][m][v].assume_init_read().add(sums[m][v]);
                        }
                    }
                    level += 1;
                }
                for m in 0..M {
                    for v in 0..N {
                        match number + 1 < V::LANES {
                            true => _ = waiting[level][m][v].write(sums[m][v]),
                            false => self.put(i + m, j + v * V::LANES, sums[m][v]),
                        }
                    }
                }
            }
            M
        }
    }

    /// Writes the sums of row `i` with the columns from `j` on, as far as there are any.
    #[inline(always)]
    unsafe fn put<V: Vector>(&self, i: usize, j: usize, sums: V) {
        let columns = self.panel.columns - j;
        // SAFETY: the caller's row, and its first column, are there.
        unsafe {
            let to = self.out.add(i * self.out_stride + j);
            match (columns >= V::LANES, self.add) {
                (true, false) => sums.store(to),
                (true, true) => sums.add(V::load(to)).store(to),
                (false, false) => sums.store_part(to, columns),
                (false, true) => sums.add(V::load_part(to, columns)).store_part(to, columns),
            }
        }
    }
}

struct Pack<E> {
    rows: *const E,
    stride: usize,
    columns: usize,
    k: usize,
    panel: *mut f32,
}

impl<E: Element> Kernel for Pack<E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let Self { rows, stride, columns, k, panel } = self;
        let width = columns.next_multiple_of(MOST_LANES);
        let mut places = [0; MOST_LANES];
        lanes_in_order::<V>(k).into_iter().take(V::LANES).for_each(|(lane, place)| places[lane] = place);
        // SAFETY: `Panel::pack` checked that rows and panel are long enough.
        unsafe {
            for r in (0..width).step_by(V::LANES) {
                for (step, p) in (0..k).step_by(V::LANES).enumerate() {
                    let n = (k - p).min(V::LANES);
                    let mut square = [V::splat(0.0); MOST_LANES];
                    for i in 0..V::LANES.min(columns.saturating_sub(r)) {
                        let from = rows.add((r + i) * stride + p);
                        square[i] = if n == V::LANES { E::load(from) } else { E::load_part(from, n) };
                    }
                    V::transpose(&mut square);
                    for i in 0..n {
                        square[i].store(panel.add((places[i] + step) * width + r));
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::dot::Dots;
    use half::f16;

    #[test]
    fn the_very_bits_of_single_rows() {
        for instructions in Instructions::all() {
            for x_rows in [1, 2, 3, 7, 12, 31] {
                for (columns, k) in [(1, 1), (7, 5), (16, 32), (33, 9), (48, 130), (64, 64), (17, 640)] {
                    let (x_stride, w_stride, out_stride) = (k + 2, k + 1, columns + 4);
                    let x: Vec<f32> = (0..x_rows * x_stride).map(|i| ((i * 13 % 29) as f32 - 14.0) / 7.0).collect();
                    let w: Vec<f16> = (0..columns * w_stride).map(|i| f16::from_f32(((i * 7 % 31) as f32 - 15.0) / 11.0)).collect();
                    let dots = Dots { x: &x, x_stride, x_rows, w: &w, w_stride, w_rows: columns, k };
                    let mut wanted = vec![7.0; x_rows * out_stride];
                    dots.into(instructions, &mut wanted, out_stride);
                    let mut room = vec![f32::NAN; Panel::numbers(columns, k)];
                    let panel = Panel::pack(instructions, &w, w_stride, columns, k, &mut room);
                    let mut found = vec![7.0; x_rows * out_stride];
                    panel.products(instructions, &x, x_stride, false, &mut found, out_stride);
                    let same = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same(&wanted, &found), "{instructions:?} {x_rows} {columns} {k}");
                    panel.products(instructions, &x, x_stride, true, &mut found, out_stride);
                    let inside = |i: usize| i % out_stride < columns;
                    let wanted: Vec<f32> = wanted.iter().enumerate().map(|(i, x)| if inside(i) { x + x } else { *x }).collect();
                    assert!(same(&wanted, &found), "{instructions:?} {x_rows} {columns} {k}: added");
                }
            }
        }
    }
}

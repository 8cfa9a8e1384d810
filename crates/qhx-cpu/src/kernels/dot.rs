//! Products of a few f32 rows with stored rows: decode with float weights, and attention scores of a few queries.
//!
//! A product is summed in one order, here and where there are many rows ([`super::columns`]): row by row in [pieces](piece) from first to last; within a piece each
//! lane of a vector adds up the numbers that fall on it, then the lanes are summed. How many rows share a register tile changes nothing.
#![allow(unsafe_code)] // Vector loads.
#![allow(clippy::needless_range_loop)] // Register tiles are indexed in two directions.

use super::{
    Instructions,
    element::Element,
    run,
    vector::{Kernel, Vector},
};

/// `out[i · out_stride + j] = x_i · w_j`, where row `i` of `x` starts at `i · x_stride`, row `j` of `w` at `j · w_stride`, both with `k` numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dots<'a, E> {
    /// The rows.
    pub(crate) x: &'a [f32],
    /// From one of them to the next.
    pub(crate) x_stride: usize,
    /// How many.
    pub(crate) x_rows: usize,
    /// The stored rows.
    pub(crate) w: &'a [E],
    /// From one of them to the next.
    pub(crate) w_stride: usize,
    /// How many.
    pub(crate) w_rows: usize,
    /// Numbers in a row.
    pub(crate) k: usize,
}

/// The most numbers of a piece.
pub(crate) const MOST_OF_A_PIECE: usize = 640;

/// Numbers of a row of `k` that are summed lane by lane before the lanes are added up: few enough that panels of such rows stay at hand, and about as many in each piece.
pub(crate) fn piece(k: usize) -> usize {
    k.div_ceil(k.div_ceil(MOST_OF_A_PIECE).max(1)).next_multiple_of(64)
}

impl<E: Element> Dots<'_, E> {
    /// Computes all products.
    pub(crate) fn into(self, instructions: Instructions, out: &mut [f32], out_stride: usize) {
        if self.x_rows == 0 || self.w_rows == 0 {
            return;
        }
        self.check();
        assert!((self.x_rows - 1) * out_stride + self.w_rows <= out.len(), "out is too short");
        run(instructions, All { dots: self, out: out.as_mut_ptr(), out_stride });
    }

    /// Computes all products into a tile of exactly `x_rows` x `w_rows`.
    pub(crate) fn into_tile(self, instructions: Instructions, out: &mut crate::work::Tile<'_, f32>) {
        assert!(out.rows == self.x_rows && out.columns == self.w_rows, "the tile must have the products' shape");
        if self.x_rows == 0 || self.w_rows == 0 {
            return;
        }
        self.check();
        let (start, out_stride) = out.as_mut_ptr();
        run(instructions, All { dots: self, out: start, out_stride });
    }

    fn check(&self) {
        assert!(self.k > 0, "rows without numbers");
        assert!((self.x_rows - 1) * self.x_stride + self.k <= self.x.len(), "x is too short");
        assert!((self.w_rows - 1) * self.w_stride + self.k <= self.w.len(), "w is too short");
    }
}

/// Bytes of stored rows that are asked for ahead of their use, at least.
const AHEAD: usize = 2048;
/// Bytes of a cache line.
const LINE: usize = 64;

/// What is asked for ahead of its use: beside number `p` of row `r` of a tile, what lies at `start + r · row + p · step`.
#[derive(Clone, Copy)]
struct Ahead<E> {
    start: *const E,
    row: usize,
    step: usize,
}

struct All<'a, E> {
    dots: Dots<'a, E>,
    out: *mut f32,
    out_stride: usize,
}

impl<E: Element> Kernel for All<'_, E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let d = &self.dots;
        let (piece, rows_ahead) = (piece(d.k), AHEAD.div_ceil(d.w_stride.max(1) * size_of::<E>()).next_multiple_of(4));
        // A single row has any stride.
        let is_dense = d.w_stride.checked_sub(d.k).is_some_and(|gap| gap * size_of::<E>() < LINE);
        for j in (0..d.w_rows).step_by(4) {
            let rows = (d.w_rows - j).min(4);
            for at in (0..d.k).step_by(piece) {
                let k = (d.k - at).min(piece);
                let this = d.w.as_ptr().wrapping_add(j * d.w_stride + at);
                let ahead = match is_dense {
                    // A CPU reads memory fastest from front to back: what follows is asked for in the order in which it lies there.
                    true => Ahead { start: this.wrapping_add(4 * d.w_stride + 3 * at), row: V::LANES, step: 4 },
                    // Beyond the last row nothing is asked for: others read what lies there.
                    false if j + rows_ahead + rows > d.w_rows => Ahead { start: this, row: 0, step: 0 },
                    false => Ahead { start: this.wrapping_add(rows_ahead * d.w_stride), row: d.w_stride, step: 1 },
                };
                let mut i = 0;
                while i < d.x_rows {
                    let ahead = if i == 0 { ahead } else { Ahead { start: this, row: 0, step: 0 } };
                    // SAFETY: `Dots::check` saw that all rows are there.
                    i += unsafe {
                        match (d.x_rows - i, rows) {
                            // Three rows against four keep twelve sums in registers; twice as many where there are registers for them.
                            (6.., 4) if V::LANES == 16 => self.tile::<V, 6, 4>((i, j), (at, k), ahead),
                            (3.., 4) => self.tile::<V, 3, 4>((i, j), (at, k), ahead),
                            (2, 4) => self.tile::<V, 2, 4>((i, j), (at, k), ahead),
                            (_, 4) => self.tile::<V, 1, 4>((i, j), (at, k), ahead),
                            _ => (j..j + rows).map(|j| self.tile::<V, 1, 1>((i, j), (at, k), ahead)).max().unwrap_or(1),
                        }
                    };
                }
            }
        }
    }
}

impl<E: Element> All<'_, E> {
    /// `M` rows of x from `i` on with `R` stored rows (one or four) from `j` on: `k` numbers from `at` on. Asks for what stands `ahead` of the stored rows as it
    /// goes, so that memory is busy all the time. Gives `M`.
    #[inline(always)]
    unsafe fn tile<V: Vector, const M: usize, const R: usize>(
        &self,
        (i, j): (usize, usize),
        (at, k): (usize, usize),
        ahead: Ahead<E>,
    ) -> usize {
        let Dots { x_stride, w_stride, .. } = self.dots;
        // SAFETY: the caller's rows are all inside their slices.
        unsafe {
            let x = self.dots.x.as_ptr().add(i * x_stride + at);
            let w = self.dots.w.as_ptr().add(j * w_stride + at);
            let mut sums = [[V::splat(0.0); R]; M];
            let mut p = 0;
            while p + V::LANES <= k {
                let lanes: [V; M] = std::array::from_fn(|m| V::load(x.add(m * x_stride + p)));
                for r in 0..R {
                    let from = w.add(r * w_stride + p);
                    V::fetch(ahead.start.wrapping_add(r * ahead.row + p * ahead.step).cast());
                    let row = E::load::<V>(from);
                    for m in 0..M {
                        sums[m][r] = lanes[m].mul_add(row, sums[m][r]);
                    }
                }
                p += V::LANES;
            }
            if p < k {
                let lanes: [V; M] = std::array::from_fn(|m| V::load_part(x.add(m * x_stride + p), k - p));
                for r in 0..R {
                    let row = E::load_part::<V>(w.add(r * w_stride + p), k - p);
                    for m in 0..M {
                        sums[m][r] = lanes[m].mul_add(row, sums[m][r]);
                    }
                }
            }
            for m in 0..M {
                let out = self.out.add((i + m) * self.out_stride + j);
                let put = |r: usize, sum: f32| *out.add(r) = if at > 0 { *out.add(r) + sum } else { sum };
                if let Some(&four) = sums[m].first_chunk::<4>() {
                    let four = V::sums(four);
                    (0..4).for_each(|r| put(r, four[r]));
                } else {
                    (0..R).for_each(|r| put(r, sums[m][r].sum()));
                }
            }
            M
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    #[test]
    fn matches_plain_sums_in_one_order() {
        for instructions in Instructions::all() {
            for (x_rows, w_rows, k) in [(1, 1, 1), (1, 9, 33), (2, 4, 64), (3, 7, 65), (5, 6, 40), (9, 13, 100), (29, 5, 1100)] {
                let (x_stride, w_stride) = (k + 3, k + 1);
                let x: Vec<f32> = (0..x_rows * x_stride).map(|i| ((i * 13 % 29) as f32 - 14.0) / 7.0).collect();
                let w: Vec<f16> = (0..w_rows * w_stride).map(|i| f16::from_f32(((i * 7 % 31) as f32 - 15.0) / 11.0)).collect();
                let dots = Dots { x: &x, x_stride, x_rows, w: &w, w_stride, w_rows, k };
                let mut out = vec![0.0; x_rows * w_rows];
                dots.into(instructions, &mut out, w_rows);
                for i in 0..x_rows {
                    for j in 0..w_rows {
                        let found = out[i * w_rows + j];
                        let wanted: f32 = (0..k).map(|p| x[i * x_stride + p] * w[j * w_stride + p].to_f32()).sum();
                        assert!((found - wanted).abs() < 1e-5 * k as f32, "{instructions:?} {x_rows} {w_rows} {k}");
                        let (x, w) = (&x[i * x_stride..], &w[j * w_stride..]);
                        let mut alone = [f32::NAN];
                        Dots { x, x_rows: 1, w, w_rows: 1, ..dots }.into(instructions, &mut alone, 1);
                        assert_eq!(alone[0].to_bits(), found.to_bits(), "{instructions:?} {x_rows} {w_rows} {k}: row {i} alone with {j}");
                    }
                }
            }
        }
    }
}

//! Products of a few f32 rows with many stored rows: decoding with float weights, and attention scores of one token.
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
    /// The few rows.
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
}

impl<E: Element> Dots<'_, E> {
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
        assert!((self.x_rows - 1) * self.x_stride + self.k <= self.x.len(), "x is too short");
        assert!((self.w_rows - 1) * self.w_stride + self.k <= self.w.len(), "w is too short");
    }
}

/// Bytes of stored rows that are asked for ahead of their use, at least.
const AHEAD: usize = 2048;

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
        let mut j = 0;
        let rows_ahead = AHEAD.div_ceil(d.w_stride.max(1) * size_of::<E>()).next_multiple_of(4);
        // SAFETY: `Dots::into` checked that all rows are there.
        unsafe {
            while j < d.w_rows {
                let rows = (d.w_rows - j).min(4);
                let w = d.w.as_ptr().add(j * d.w_stride);
                // Beyond the last row nothing is asked for: others read what lies there.
                let mut ahead = if j + rows_ahead + rows <= d.w_rows { rows_ahead * d.w_stride } else { 0 };
                let mut i = 0;
                while i < d.x_rows {
                    let x = d.x.as_ptr().add(i * d.x_stride);
                    let out = self.out.add(i * self.out_stride + j);
                    // Three rows against four keep twelve sums in registers.
                    i += match (d.x_rows - i, rows) {
                        (3.., 4) => self.tile::<V, 3, 4>(x, (w, ahead), out),
                        (2, 4) => self.tile::<V, 2, 4>(x, (w, ahead), out),
                        (_, 4) => self.tile::<V, 1, 4>(x, (w, ahead), out),
                        _ => {
                            (0..rows).for_each(|r| drop_count(self.tile::<V, 1, 1>(x, (w.add(r * d.w_stride), ahead), out.add(r))));
                            1
                        }
                    };
                    ahead = 0;
                }
                j += rows;
            }
        }
    }
}

#[inline(always)]
fn drop_count(_: usize) {}

impl<E: Element> All<'_, E> {
    /// Gives `M`, the rows of x it did. Asks for what stands `ahead` of the stored rows as it goes, so that memory is busy all the time.
    #[inline(always)]
    unsafe fn tile<V: Vector, const M: usize, const R: usize>(&self, x: *const f32, (w, ahead): (*const E, usize), out: *mut f32) -> usize {
        let (k, x_stride, w_stride) = (self.dots.k, self.dots.x_stride, self.dots.w_stride);
        // SAFETY: the caller's rows are all inside their slices.
        unsafe {
            let mut sums = [[V::splat(0.0); R]; M];
            let mut p = 0;
            while p + V::LANES <= k {
                let rows: [V; R] = std::array::from_fn(|r| {
                    let at = w.add(r * w_stride + p);
                    V::fetch(at.wrapping_add(ahead).cast());
                    E::load(at)
                });
                for m in 0..M {
                    let lanes = V::load(x.add(m * x_stride + p));
                    for r in 0..R {
                        sums[m][r] = lanes.mul_add(rows[r], sums[m][r]);
                    }
                }
                p += V::LANES;
            }
            if p < k {
                let rows: [V; R] = std::array::from_fn(|r| E::load_part(w.add(r * w_stride + p), k - p));
                for m in 0..M {
                    let lanes = V::load_part(x.add(m * x_stride + p), k - p);
                    for r in 0..R {
                        sums[m][r] = lanes.mul_add(rows[r], sums[m][r]);
                    }
                }
            }
            for m in 0..M {
                for r in 0..R {
                    *out.add(m * self.out_stride + r) = sums[m][r].sum();
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
    fn matches_plain_sums() {
        for instructions in Instructions::all() {
            for (x_rows, w_rows, k) in [(1, 1, 1), (1, 9, 33), (2, 4, 64), (3, 7, 65), (5, 6, 40), (9, 13, 100)] {
                let (x_stride, w_stride) = (k + 3, k + 1);
                let x: Vec<f32> = (0..x_rows * x_stride).map(|i| ((i * 13 % 29) as f32 - 14.0) / 8.0).collect();
                let w: Vec<f16> = (0..w_rows * w_stride).map(|i| f16::from_f32(((i * 7 % 31) as f32 - 15.0) / 16.0)).collect();
                let mut out = vec![0.0; x_rows * w_rows];
                Dots { x: &x, x_stride, x_rows, w: &w, w_stride, w_rows, k }.into(instructions, &mut out, w_rows);
                for i in 0..x_rows {
                    for j in 0..w_rows {
                        let wanted: f32 = (0..k).map(|p| x[i * x_stride + p] * w[j * w_stride + p].to_f32()).sum();
                        assert!((out[i * w_rows + j] - wanted).abs() < 1e-4, "{instructions:?} {x_rows} {w_rows} {k}");
                    }
                }
            }
        }
    }
}

//! f32 matrix products `C = A · B` in register tiles; `B` may be stored narrower.
#![allow(unsafe_code)] // Vector loads and stores.
#![allow(clippy::needless_range_loop)] // Register tiles are indexed in two directions.

use super::{
    Instructions,
    element::Element,
    run,
    vector::{Kernel, MOST_LANES, Vector},
};

/// `C[m x n] (+)= A[m x k] · B[k x n]`, each with rows `stride` apart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gemm<'a, E> {
    /// Left matrix.
    pub(crate) a: &'a [f32],
    /// From one row of it to the next.
    pub(crate) a_stride: usize,
    /// Right matrix.
    pub(crate) b: &'a [E],
    /// From one row of it to the next.
    pub(crate) b_stride: usize,
    /// Rows of the result.
    pub(crate) m: usize,
    /// Columns of the result.
    pub(crate) n: usize,
    /// Terms of each sum.
    pub(crate) k: usize,
    /// Add to what is there.
    pub(crate) add: bool,
}

impl<E: Element> Gemm<'_, E> {
    /// Computes it into a slice whose rows are `c_stride` apart.
    pub(crate) fn into(self, instructions: Instructions, c: &mut [f32], c_stride: usize) {
        if self.m == 0 || self.n == 0 {
            return;
        }
        assert!(c_stride >= self.n && (self.m - 1) * c_stride + self.n <= c.len(), "c is too short");
        self.check();
        run(instructions, All { gemm: self, c: c.as_mut_ptr(), c_stride });
    }

    /// Computes it into a tile of exactly `m` x `n`.
    pub(crate) fn into_tile(self, instructions: Instructions, c: &mut crate::work::Tile<'_, f32>) {
        assert!(c.rows == self.m && c.columns == self.n, "the tile must have the product's shape");
        if self.m == 0 || self.n == 0 {
            return;
        }
        self.check();
        let (start, c_stride) = c.as_mut_ptr();
        run(instructions, All { gemm: self, c: start, c_stride });
    }

    fn check(&self) {
        assert!(self.k == 0 || (self.m - 1) * self.a_stride + self.k <= self.a.len(), "a is too short");
        assert!(self.k == 0 || (self.k - 1) * self.b_stride + self.n <= self.b.len(), "b is too short");
    }
}

struct All<'a, E> {
    gemm: Gemm<'a, E>,
    c: *mut f32,
    c_stride: usize,
}

impl<E: Element> Kernel for All<'_, E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let (m, n) = (self.gemm.m, self.gemm.n);
        let mut j = 0;
        // SAFETY: `Gemm` checked that all rows are there.
        unsafe {
            while j < n {
                let columns = n - j;
                if columns >= 2 * V::LANES {
                    self.panel::<V, 2, false>(j, m);
                    j += 2 * V::LANES;
                } else if columns >= V::LANES {
                    self.panel::<V, 1, false>(j, m);
                    j += V::LANES;
                } else {
                    self.panel::<V, 1, true>(j, m);
                    j = n;
                }
            }
        }
    }
}

impl<E: Element> All<'_, E> {
    /// All rows of `N` vectors of columns (the last one partial where `PART`).
    #[inline(always)]
    unsafe fn panel<V: Vector, const N: usize, const PART: bool>(&self, j: usize, m: usize) {
        let mut i = 0;
        // SAFETY: passed on.
        unsafe {
            while i < m {
                // Tall tiles where there are registers for them: sums, and one row of B.
                i += match m - i {
                    12.. if V::LANES == 16 => self.tile::<V, 12, N, PART>(i, j),
                    8.. if V::LANES == 16 => self.tile::<V, 8, N, PART>(i, j),
                    6.. => self.tile::<V, 6, N, PART>(i, j),
                    4.. => self.tile::<V, 4, N, PART>(i, j),
                    3 => self.tile::<V, 3, N, PART>(i, j),
                    2 => self.tile::<V, 2, N, PART>(i, j),
                    _ => self.tile::<V, 1, N, PART>(i, j),
                };
            }
        }
    }

    /// Gives `M`, the rows it did.
    #[inline(always)]
    unsafe fn tile<V: Vector, const M: usize, const N: usize, const PART: bool>(&self, i: usize, j: usize) -> usize {
        let Gemm { a, a_stride, b, b_stride, k, n, add, .. } = self.gemm;
        let part = n - j;
        // SAFETY: rows i..i+M and columns j..j+N·LANES (or ..n where PART) are inside.
        unsafe {
            let a = a.as_ptr().add(if k == 0 { 0 } else { i * a_stride });
            let c = self.c.add(i * self.c_stride + j);
            let mut sums = [[V::splat(0.0); N]; M];
            for p in 0..k {
                let row = b.as_ptr().add(p * b_stride + j);
                let columns: [V; N] = std::array::from_fn(|v| if PART { E::load_part(row, part) } else { E::load(row.add(v * V::LANES)) });
                for r in 0..M {
                    let factor = V::splat(*a.add(r * a_stride + p));
                    for v in 0..N {
                        sums[r][v] = factor.mul_add(columns[v], sums[r][v]);
                    }
                }
            }
            for r in 0..M {
                for v in 0..N {
                    let to = c.add(r * self.c_stride + v * V::LANES);
                    let mut sum = sums[r][v];
                    if add {
                        // Last, so that long sums which are made in pieces lose fewer digits.
                        sum = sum.add(if PART { V::load_part(to, part) } else { V::load(to) });
                    }
                    if PART { sum.store_part(to, part) } else { sum.store(to) }
                }
            }
            M
        }
    }
}

/// `panel[p · width + r] = row_r[p]`: `count` rows, `stride` apart, with `k` numbers each, side by side; the columns from `count` to `width` become 0.
pub(crate) fn pack_columns<E: Element>(
    instructions: Instructions,
    rows: &[E],
    stride: usize,
    count: usize,
    k: usize,
    panel: &mut [f32],
    width: usize,
) {
    assert!(count <= width && panel.len() >= k * width, "the panel is too small");
    assert!(count == 0 || (count - 1) * stride + k <= rows.len(), "the rows are too short");
    run(instructions, Pack { rows: rows.as_ptr(), stride, count, k, panel: panel.as_mut_ptr(), width });
}

struct Pack<E> {
    rows: *const E,
    stride: usize,
    count: usize,
    k: usize,
    panel: *mut f32,
    width: usize,
}

impl<E: Element> Kernel for Pack<E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let Self { rows, stride, count, k, panel, width } = self;
        // SAFETY: `pack_columns` checked that rows and panel are long enough.
        unsafe {
            let (squares, whole) = (count - count % V::LANES, k - k % V::LANES);
            for r in (0..squares).step_by(V::LANES) {
                for p in (0..whole).step_by(V::LANES) {
                    let mut square = [V::splat(0.0); MOST_LANES];
                    for i in 0..V::LANES {
                        square[i] = E::load(rows.add((r + i) * stride + p));
                    }
                    V::transpose(&mut square);
                    for i in 0..V::LANES {
                        square[i].store(panel.add((p + i) * width + r));
                    }
                }
            }
            // What is left of the last columns and of the last rows.
            let mut lanes = [0.0f32; MOST_LANES];
            for r in 0..count {
                let row = rows.add(r * stride);
                let mut p = if r < squares { whole } else { 0 };
                while p < k {
                    let n = (k - p).min(V::LANES);
                    if n == V::LANES {
                        E::load::<V>(row.add(p)).store(lanes.as_mut_ptr());
                    } else {
                        E::load_part::<V>(row.add(p), n).store(lanes.as_mut_ptr());
                    }
                    for (i, &x) in lanes[..n].iter().enumerate() {
                        *panel.add((p + i) * width + r) = x;
                    }
                    p += n;
                }
            }
            if count < width {
                for p in 0..k {
                    for r in count..width {
                        *panel.add(p * width + r) = 0.0;
                    }
                }
            }
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
            for m in [1, 2, 3, 5, 7, 12, 13, 31] {
                for (n, k) in [(1, 1), (7, 5), (16, 32), (33, 9), (48, 0), (64, 17)] {
                    let (a_stride, b_stride, c_stride) = (k + 2, n + 1, n + 4);
                    let a: Vec<f32> = (0..m * a_stride).map(|i| ((i * 13 % 29) as f32 - 14.0) / 8.0).collect();
                    let b: Vec<f32> = (0..k * b_stride).map(|i| ((i * 7 % 31) as f32 - 15.0) / 16.0).collect();
                    let half: Vec<f16> = b.iter().map(|&x| f16::from_f32(x)).collect();
                    for add in [false, true] {
                        let start: Vec<f32> = (0..m * c_stride).map(|i| i as f32).collect();
                        let (mut c, mut d) = (start.clone(), start.clone());
                        Gemm { a: &a, a_stride, b: &b, b_stride, m, n, k, add }.into(instructions, &mut c, c_stride);
                        Gemm { a: &a, a_stride, b: &half, b_stride, m, n, k, add }.into(instructions, &mut d, c_stride);
                        assert_eq!(c, d);
                        for i in 0..m * c_stride {
                            let (row, column) = (i / c_stride, i % c_stride);
                            let mut wanted = if add || column >= n { start[i] } else { 0.0 };
                            if column < n {
                                wanted += (0..k).map(|p| a[row * a_stride + p] * b[p * b_stride + column]).sum::<f32>();
                            }
                            assert!((c[i] - wanted).abs() < 1e-3, "{instructions:?} {m} {n} {k}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn columns_are_packed_side_by_side() {
        for instructions in Instructions::all() {
            for (count, k) in [(1, 1), (3, 40), (8, 8), (16, 16), (19, 33), (32, 100), (33, 5)] {
                let (stride, width) = (k + 3, count + 2);
                let rows: Vec<f16> = (0..count * stride).map(|i| f16::from_f32(i as f32)).collect();
                let mut panel = vec![-1.0; k * width];
                pack_columns(instructions, &rows, stride, count, k, &mut panel, width);
                for (i, &found) in panel.iter().enumerate() {
                    let (p, r) = (i / width, i % width);
                    let wanted = if r < count { rows[r * stride + p].to_f32() } else { 0.0 };
                    assert_eq!(found, wanted, "{instructions:?} {count} x {k}: row {r}, place {p}");
                }
            }
        }
    }
}

//! f32 matrix products `C = A · B` in register tiles; `B` may be stored narrower. Each number of C is summed from its first term to its last, whatever the tile.
#![allow(unsafe_code)] // Vector loads and stores.
#![allow(clippy::needless_range_loop)] // Register tiles are indexed in two directions.

use super::{
    Instructions,
    element::Element,
    run,
    vector::{Kernel, Vector},
};
use std::ops::Range;

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
    /// The terms of each row's sums, where not all count: what others hold is not looked at.
    pub(crate) terms: Option<&'a [Range<usize>]>,
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

    fn check(&self) {
        assert!(self.k == 0 || (self.m - 1) * self.a_stride + self.k <= self.a.len(), "a is too short");
        assert!(self.k == 0 || (self.k - 1) * self.b_stride + self.n <= self.b.len(), "b is too short");
        assert!(
            self.terms.is_none_or(|terms| terms.len() == self.m && terms.iter().all(|terms| terms.end <= self.k)),
            "terms beyond the last"
        );
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
                // A sum waits for the one before it: few rows keep a CPU busy only where many columns are summed at once, as far as there are registers for them.
                let wide = if m == 1 || m == 2 && V::LANES == 16 { 8 } else { 4 };
                if wide == 8 && columns >= 8 * V::LANES {
                    self.few::<V, 8>(j, m);
                    j += 8 * V::LANES;
                } else if (m <= 2 || m <= 4 && V::LANES == 16) && columns >= 4 * V::LANES {
                    self.few::<V, 4>(j, m);
                    j += 4 * V::LANES;
                } else if columns >= 2 * V::LANES {
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

    /// All rows, four at most, of `N` vectors of columns.
    #[inline(always)]
    unsafe fn few<V: Vector, const N: usize>(&self, j: usize, m: usize) {
        // SAFETY: passed on.
        unsafe {
            match m {
                4 if N == 4 => self.tile::<V, 4, 4, false>(0, j),
                3 if N == 4 => self.tile::<V, 3, 4, false>(0, j),
                2 => self.tile::<V, 2, N, false>(0, j),
                _ => self.tile::<V, 1, N, false>(0, j),
            };
        }
    }

    /// Gives `M`, the rows it did.
    #[inline(always)]
    unsafe fn tile<V: Vector, const M: usize, const N: usize, const PART: bool>(&self, i: usize, j: usize) -> usize {
        let Gemm { a, a_stride, b, b_stride, k, n, terms, add, .. } = self.gemm;
        let part = n - j;
        // SAFETY: rows i..i+M and columns j..j+N·LANES (or ..n where PART) are inside.
        unsafe {
            let a = a.as_ptr().add(if k == 0 { 0 } else { i * a_stride });
            let c = self.c.add(i * self.c_stride + j);
            let columns = |p: usize| -> [V; N] {
                let row = b.as_ptr().add(p * b_stride + j);
                std::array::from_fn(|v| if PART { E::load_part(row, part) } else { E::load(row.add(v * V::LANES)) })
            };
            let add_terms = |r: usize, terms: Range<usize>, sums: &mut [[V; N]; M]| {
                let mut own = sums[r];
                for p in terms {
                    let (factor, columns) = (V::splat(*a.add(r * a_stride + p)), columns(p));
                    for v in 0..N {
                        own[v] = factor.mul_add(columns[v], own[v]);
                    }
                }
                sums[r] = own;
            };
            // The terms that all rows have are added in registers; those that some have before and after them, row by row in memory.
            let own = |r: usize| terms.map_or((0, k), |terms| (terms[i + r].start, terms[i + r].end));
            let first = (0..M).map(|r| own(r).0).max().unwrap_or(0);
            let end = (0..M).map(|r| own(r).1).min().unwrap_or(0).max(first);
            let mut results = [[V::splat(0.0); N]; M];
            for r in 0..M {
                add_terms(r, own(r).0..first.min(own(r).1), &mut results);
            }
            let mut sums = [[V::splat(0.0); N]; M];
            for r in 0..M {
                for v in 0..N {
                    sums[r][v] = results[r][v];
                }
            }
            for p in first..end {
                let columns = columns(p);
                for r in 0..M {
                    let factor = V::splat(*a.add(r * a_stride + p));
                    for v in 0..N {
                        sums[r][v] = factor.mul_add(columns[v], sums[r][v]);
                    }
                }
            }
            for r in 0..M {
                for v in 0..N {
                    results[r][v] = sums[r][v];
                }
            }
            for r in 0..M {
                add_terms(r, end.max(own(r).0)..own(r).1, &mut results);
            }
            for r in 0..M {
                for v in 0..N {
                    let to = c.add(r * self.c_stride + v * V::LANES);
                    let mut sum = results[r][v];
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
                        Gemm { a: &a, a_stride, b: &b, b_stride, m, n, k, terms: None, add }.into(instructions, &mut c, c_stride);
                        Gemm { a: &a, a_stride, b: &half, b_stride, m, n, k, terms: None, add }.into(instructions, &mut d, c_stride);
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
    fn terms_that_do_not_count_are_not_looked_at() {
        for instructions in Instructions::all() {
            for m in [1, 2, 5, 13] {
                let (n, k) = (19, 24);
                let terms: Vec<Range<usize>> = (0..m).map(|i| [0..k, 3..9, i..i + 5, 20..k, 7..7][i % 5].clone()).collect();
                let inside = |i: usize, p: usize| terms[i].contains(&p);
                let a: Vec<f32> =
                    (0..m * k).map(|at| if inside(at / k, at % k) { (at % 7) as f32 / 3.0 - 0.9 } else { f32::NAN }).collect();
                let b: Vec<f32> = (0..k * n).map(|at| (at % 11) as f32 / 7.0 - 0.6).collect();
                let gemm = Gemm { a: &a, a_stride: k, b: &b, b_stride: n, m, n, k, terms: Some(&terms), add: false };
                let mut c = vec![f32::NAN; m * n];
                gemm.into(instructions, &mut c, n);
                for i in 0..m {
                    let (first, k) = (terms[i].start, terms[i].len());
                    let mut alone = vec![0.0; n];
                    Gemm { a: &a[i * gemm.k + first..], b: &b[first * n..], m: 1, k, terms: None, ..gemm }.into(
                        instructions,
                        &mut alone,
                        n,
                    );
                    assert_eq!(&c[i * n..][..n], alone, "{instructions:?} {m}: row {i}");
                }
            }
        }
    }
}

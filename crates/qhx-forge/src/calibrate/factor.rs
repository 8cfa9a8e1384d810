//! The factors of a moment matrix: `H + λ = M · D · Mᵀ`, with M unit upper triangular and D diagonal.
//!
//! When the columns of a matrix are rounded from the first to the last, the error of column `k` weighs `D[k]`, and column `k` of M says how it best makes up for the errors of
//! the columns before it. This is the same as the Cholesky factor of H⁻¹, without inverting anything.

use super::{
    multiply::{Matrix, Multiplier},
    rows::for_each_row,
};
use crate::ForgeError;
use std::ops::Range;

/// Columns that are handled number by number; matrix products do the rest.
pub(crate) const BLOCK: usize = 128;
/// Rows of the remaining matrix that are updated at a time: what lies above the diagonal is computed in vain.
const SLAB: usize = 512;

/// The factors of a moment matrix.
pub(crate) struct Factor {
    columns: usize,
    /// Mᵀ below the diagonal, on which it is 1; what lies above has no meaning.
    lower: Vec<f32>,
    /// D.
    diagonal: Vec<f32>,
}

impl Factor {
    /// Of moments (the diagonal and what lies below) with `damping` times their mean diagonal added to the diagonal; none where that is not positive definite.
    pub(crate) fn new(multiplier: &Multiplier<'_>, mut second: Vec<f32>, columns: usize, damping: f64) -> Result<Option<Self>, ForgeError> {
        let n = columns;
        let mean = (0..n).map(|i| f64::from(second[i * n + i])).sum::<f64>() / n as f64;
        (0..n).for_each(|i| second[i * n + i] += (mean * damping) as f32);
        let mut diagonal = vec![0.0; n];
        for first in (0..n).step_by(BLOCK).rev() {
            let block = first..n.min(first + BLOCK);
            if !factor_diagonal(&mut second, n, block.clone(), &mut diagonal[block.clone()]) {
                return Ok(None);
            }
            // The block's part of each row before it, times D and without: their product is what the block takes from the rest of the matrix.
            let size = block.len();
            let (mut weighted, mut unit) = (vec![0.0; first * size], vec![0.0; first * size]);
            for k in block.rev() {
                let (before, row) = second.split_at_mut(k * n);
                let (row, d) = (&mut row[..n], diagonal[k]);
                for j in first..k {
                    let factor = row[j];
                    before[j * n..][..first].iter_mut().zip(&*row).for_each(|(x, v)| *x -= factor * v);
                }
                for (a, x) in row[..first].iter_mut().enumerate() {
                    weighted[a * size + k - first] = *x;
                    *x /= d;
                    unit[a * size + k - first] = *x;
                }
            }
            for row in (0..first).step_by(SLAB) {
                let end = first.min(row + SLAB);
                let left = Matrix::dense(&weighted[row * size..end * size], size);
                let right = Matrix::dense(&unit[..end * size], size);
                multiplier.add_product(left, right, -1.0, &mut second[row * n..], n)?;
            }
        }
        Ok(Some(Self { columns, lower: second, diagonal }))
    }

    /// The length of a row.
    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    /// What the error of each column weighs.
    pub(crate) fn weights(&self) -> &[f32] {
        &self.diagonal
    }

    /// The blocks of columns, in order.
    pub(crate) fn blocks(&self) -> impl DoubleEndedIterator<Item = Range<usize>> + use<> {
        let n = self.columns;
        (0..n).step_by(BLOCK).map(move |first| first..n.min(first + BLOCK))
    }

    /// M within a block: rows of `block.len()` numbers, of which those behind the diagonal count.
    pub(crate) fn within(&self, block: &Range<usize>) -> Vec<f32> {
        let at = |j: usize, k: usize| self.lower[k * self.columns + j];
        block.clone().flat_map(|j| block.clone().map(move |k| if k > j { at(j, k) } else { 0.0 })).collect()
    }

    /// Adds `factor · errors · M[block, behind it]` to what stands behind a block in each row; `errors` are rows of `block.len()` numbers.
    pub(crate) fn spread(
        &self,
        multiplier: &Multiplier<'_>,
        block: &Range<usize>,
        factor: f32,
        errors: &[f32],
        rows: &mut [f32],
    ) -> Result<(), ForgeError> {
        let n = self.columns;
        if block.end == n {
            return Ok(());
        }
        let right = Matrix { numbers: &self.lower[block.end * n + block.start..], stride: n, rows: n - block.end, columns: block.len() };
        multiplier.add_product(Matrix::dense(errors, block.len()), right, factor, &mut rows[block.end..], n)
    }

    /// Multiplies rows with `(H + λ)⁻¹`, in place.
    pub(crate) fn solve(&self, multiplier: &Multiplier<'_>, threads: usize, rows: &mut [f32]) -> Result<(), ForgeError> {
        let n = self.columns;
        for block in self.blocks().rev() {
            let size = block.len();
            for_each_row(rows, n, threads, |row| {
                let own = &mut row[block.clone()];
                for k in (1..size).rev() {
                    let (rest, done) = own.split_at_mut(k);
                    let line = &self.lower[(block.start + k) * n + block.start..][..k];
                    rest.iter_mut().zip(line).for_each(|(x, m)| *x -= done[0] * m);
                }
            });
            // Mᵀ of the block's rows, turned round: one row for each column before the block.
            let before: Vec<f32> = (0..block.start).flat_map(|a| block.clone().map(move |k| k * n + a)).map(|at| self.lower[at]).collect();
            let own = columns_of(rows, n, &block);
            multiplier.add_product(Matrix::dense(&own, size), Matrix::dense(&before, size), -1.0, rows, n)?;
        }
        for_each_row(rows, n, threads, |row| row.iter_mut().zip(&self.diagonal).for_each(|(x, d)| *x /= d));
        for block in self.blocks() {
            let within = self.within(&block);
            let size = block.len();
            for_each_row(rows, n, threads, |row| {
                let own = &mut row[block.clone()];
                for k in 0..size {
                    let (done, rest) = own.split_at_mut(k + 1);
                    rest.iter_mut().zip(&within[k * size + k + 1..]).for_each(|(x, m)| *x -= done[k] * m);
                }
            });
            let own = columns_of(rows, n, &block);
            self.spread(multiplier, &block, -1.0, &own, rows)?;
        }
        Ok(())
    }
}

/// Some columns of all rows, without gaps.
pub(crate) fn columns_of(rows: &[f32], columns: usize, block: &Range<usize>) -> Vec<f32> {
    rows.chunks_exact(columns).flat_map(|row| &row[block.clone()]).copied().collect()
}

/// Factors the square on the diagonal in place, in f64; false where a pivot is not positive.
fn factor_diagonal(second: &mut [f32], n: usize, block: Range<usize>, diagonal: &mut [f32]) -> bool {
    let (first, size) = (block.start, block.len());
    let mut square: Vec<f64> =
        block.clone().flat_map(|i| second[i * n + first..][..size].iter().map(|&x| f64::from(x)).collect::<Vec<_>>()).collect();
    for k in (0..size).rev() {
        let d = square[k * size + k];
        if !d.is_normal() || d < 0.0 {
            return false;
        }
        diagonal[k] = d as f32;
        let (before, row) = square.split_at_mut(k * size);
        for i in 0..k {
            let factor = row[i] / d;
            before[i * size..][..=i].iter_mut().zip(&*row).for_each(|(x, v)| *x -= factor * v);
        }
        row[..k].iter_mut().for_each(|x| *x /= d);
    }
    for i in 0..size {
        let to = &mut second[(first + i) * n + first..][..i];
        to.iter_mut().zip(&square[i * size..]).for_each(|(x, &v)| *x = v as f32);
    }
    true
}

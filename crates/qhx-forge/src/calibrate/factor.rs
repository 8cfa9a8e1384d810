//! The factors of a moment matrix: `H + λ = M · D · Mᵀ`, with M unit upper triangular and D diagonal.
//!
//! When the columns of a matrix are rounded from the first to the last, the error of column `k` weighs `D[k]`, and column `k` of M says how it best makes up for the errors of
//! the columns before it. This is the same as the Cholesky factor of H⁻¹, without inverting anything.

use super::multiply::Multiplier;
use crate::{
    ForgeError,
    rows::{for_each_part, for_each_row, transpose},
};
use qhx_ir::Matrix;
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
            let (size, threads) = (block.len(), multiplier.threads);
            let mut taken = transpose(first, &block.clone().map(|k| &second[k * n..][..first]).collect::<Vec<_>>(), threads);
            for_each_row(&mut taken, size, threads, |row| {
                solve_below(&second[first * n + first..], n, row);
                row.iter_mut().for_each(|x| *x = -*x);
            });
            let mut unit = taken.clone();
            for_each_row(&mut unit, size, threads, |row| row.iter_mut().zip(&diagonal[block.clone()]).for_each(|(x, d)| *x /= -d));
            let stored = transpose(size, &unit.chunks_exact(size).collect::<Vec<_>>(), threads);
            for (k, row) in block.clone().zip(stored.chunks(first.max(1))) {
                second[k * n..][..first].copy_from_slice(row);
            }
            for row in (0..first).step_by(SLAB) {
                let end = first.min(row + SLAB);
                let left = Matrix::dense(&taken[row * size..end * size], size);
                let right = Matrix::dense(&unit[..end * size], size);
                multiplier.add_product(left, right, &mut second[row * n..], n)?;
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

    /// Adds `errors · M[block, behind it]` to what stands behind a block in each row; `errors` are rows of `block.len()` numbers.
    pub(crate) fn spread(
        &self,
        multiplier: &Multiplier<'_>,
        block: &Range<usize>,
        errors: &[f32],
        rows: &mut [f32],
    ) -> Result<(), ForgeError> {
        let n = self.columns;
        if block.end == n {
            return Ok(());
        }
        let right = Matrix { numbers: &self.lower[block.end * n + block.start..], stride: n, rows: n - block.end, columns: block.len() };
        multiplier.add_product(Matrix::dense(errors, block.len()), right, &mut rows[block.end..], n)
    }

    /// Multiplies rows with `(H + λ)⁻¹`, in place.
    pub(crate) fn solve(&self, multiplier: &Multiplier<'_>, rows: &mut [f32]) -> Result<(), ForgeError> {
        let (n, threads) = (self.columns, multiplier.threads);
        for block in self.blocks().rev() {
            let square = &self.lower[block.start * n + block.start..];
            for_each_row(rows, n, threads, |row| solve_below(square, n, &mut row[block.clone()]));
            let before: Vec<&[f32]> = block.clone().map(|k| &self.lower[k * n..][..block.start]).collect();
            let before = transpose(block.start, &before, threads);
            let own = negated_columns(rows, n, &block, threads);
            multiplier.add_product(Matrix::dense(&own, block.len()), Matrix::dense(&before, block.len()), rows, n)?;
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
            let own = negated_columns(rows, n, &block, threads);
            self.spread(multiplier, &block, &own, rows)?;
        }
        Ok(())
    }
}

/// Takes from each number of a row what those behind it have of it, from the last on, by a square of Mᵀ below the diagonal whose lines are `n` apart.
fn solve_below(square: &[f32], n: usize, row: &mut [f32]) {
    for k in (1..row.len()).rev() {
        let (rest, done) = row.split_at_mut(k);
        rest.iter_mut().zip(&square[k * n..][..k]).for_each(|(x, m)| *x -= done[0] * m);
    }
}

/// Some columns of all rows, without gaps and with the other sign.
fn negated_columns(rows: &[f32], columns: usize, block: &Range<usize>, threads: usize) -> Vec<f32> {
    let mut out = vec![0.0; rows.len() / columns * block.len()];
    for_each_part(&mut out, block.len(), threads, |first, part| {
        for (to, row) in part.chunks_exact_mut(block.len()).zip(rows[first * columns..].chunks_exact(columns)) {
            to.iter_mut().zip(&row[block.clone()]).for_each(|(to, x)| *to = -x);
        }
    });
    out
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

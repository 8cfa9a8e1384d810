//! Second moments of the rows that enter a product, and what the weights have to do with rows that are away from where they should be.

use super::multiply::Multiplier;
use crate::{ForgeError, rows::transpose};
use qhx_ir::Matrix;

/// Rows that are summed by the device in f32 before the sum is added to those before it, so that long sums lose few digits.
const ROWS_AT_ONCE: usize = 1000;
/// Rows of the result that are computed at a time: what lies above the diagonal of a slab is computed in vain.
const SLAB: usize = 256;

/// `XᵀX` of the rows X of the quantised model.
pub(crate) struct Moments {
    /// Rows that were summed.
    pub(crate) rows: usize,
    /// The diagonal and what lies below it.
    pub(crate) second: Vec<f32>,
}

impl Moments {
    pub(crate) fn of(multiplier: &Multiplier<'_>, columns: usize, x: &[&[f32]]) -> Result<Self, ForgeError> {
        let mut second = vec![0.0; columns * columns];
        for x in x.chunks(ROWS_AT_ONCE) {
            let (transposed, width) = (transpose(columns, x, multiplier.threads), x.len());
            for row in (0..columns).step_by(SLAB) {
                let end = columns.min(row + SLAB);
                let left = Matrix::dense(&transposed[row * width..end * width], width);
                let right = Matrix::dense(&transposed[..end * width], width);
                multiplier.add_product(left, right, &mut second[row * columns..], columns)?;
            }
        }
        Ok(Self { rows: x.len(), second })
    }

    /// Adds `weight` rows that have the mean moments of others.
    pub(crate) fn shrink_towards(&mut self, others: &Self, weight: f32) {
        let factor = weight / others.rows.max(1) as f32;
        self.second.iter_mut().zip(&others.second).for_each(|(own, other)| *own += factor * other);
    }
}

/// How far the quantised model's rows X are from the f32 model's, by Δ, in the form that takes fewest multiplications.
pub(crate) enum Shift<'a> {
    /// `XᵀΔ`, for many rows of weights.
    Summed(Vec<f32>),
    /// The rows of both models, for few.
    Rows { x: Vec<&'a [f32]>, exact: Vec<&'a [f32]> },
}

impl<'a> Shift<'a> {
    /// Of the rows of both models, in the same order, for so many rows of weights.
    pub(crate) fn of(
        multiplier: &Multiplier<'_>,
        columns: usize,
        (x, exact): (Vec<&'a [f32]>, Vec<&'a [f32]>),
        weight_rows: usize,
    ) -> Result<Self, ForgeError> {
        if 2 * weight_rows * x.len() < columns * (weight_rows + x.len()) {
            return Ok(Self::Rows { x, exact });
        }
        let mut sum = vec![0.0; columns * columns];
        for (x, exact) in x.chunks(ROWS_AT_ONCE).zip(exact.chunks(ROWS_AT_ONCE)) {
            let away = away(x, exact);
            let away = transpose(columns, &away.chunks_exact(columns).collect::<Vec<_>>(), multiplier.threads);
            let x = transpose(columns, x, multiplier.threads);
            multiplier.add_product(Matrix::dense(&x, exact.len()), Matrix::dense(&away, exact.len()), &mut sum, columns)?;
        }
        Ok(Self::Summed(sum))
    }

    /// `W · Δᵀ · X` for rows of weights.
    pub(crate) fn of_weights(&self, multiplier: &Multiplier<'_>, columns: usize, weights: &[f32]) -> Result<Vec<f32>, ForgeError> {
        let mut shifted = vec![0.0; weights.len()];
        let weights = Matrix::dense(weights, columns);
        match self {
            Self::Summed(sum) => multiplier.add_product(weights, Matrix::dense(sum, columns), &mut shifted, columns)?,
            Self::Rows { x, exact } => {
                for (x, exact) in x.chunks(ROWS_AT_ONCE).zip(exact.chunks(ROWS_AT_ONCE)) {
                    let mut lost = vec![0.0; weights.rows * x.len()];
                    multiplier.add_product(weights, Matrix::dense(&away(x, exact), columns), &mut lost, x.len())?;
                    let transposed = transpose(columns, x, multiplier.threads);
                    multiplier.add_product(Matrix::dense(&lost, x.len()), Matrix::dense(&transposed, x.len()), &mut shifted, columns)?;
                }
            }
        }
        Ok(shifted)
    }
}

/// Δ: what is missing in each row, one after the other.
pub(super) fn away(x: &[&[f32]], exact: &[&[f32]]) -> Vec<f32> {
    x.iter().zip(exact).flat_map(|(x, exact)| exact.iter().zip(*x).map(|(exact, x)| exact - x)).collect()
}

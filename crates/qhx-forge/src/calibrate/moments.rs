//! Second moments of the rows that enter a product.

use super::multiply::{Matrix, Multiplier};
use crate::ForgeError;

/// Rows that are summed by the device in f32 before the sum is added to those before it, so that long sums lose few digits.
const ROWS_AT_ONCE: usize = 1024;
/// Rows of the result that are computed at a time: what lies above the diagonal of a slab is computed in vain.
const SLAB: usize = 256;

/// `XᵀX` of the rows X of the quantised model, and `XᵀΔ` with what the f32 model's rows are away from them.
pub(crate) struct Moments {
    pub(crate) columns: usize,
    /// Rows that were summed.
    pub(crate) rows: usize,
    /// `XᵀX`, the diagonal and what lies below it.
    pub(crate) second: Vec<f32>,
    /// `XᵀΔ`.
    pub(crate) shift: Option<Vec<f32>>,
}

impl Moments {
    /// Of rows `x`, each with the f32 model's row where `exact` has them, in the same order.
    pub(crate) fn of(multiplier: &Multiplier<'_>, columns: usize, x: &[&[f32]], exact: Option<&[&[f32]]>) -> Result<Self, ForgeError> {
        let mut moments =
            Self { columns, rows: x.len(), second: vec![0.0; columns * columns], shift: exact.map(|_| vec![0.0; columns * columns]) };
        for first in (0..x.len()).step_by(ROWS_AT_ONCE) {
            let rows = first..x.len().min(first + ROWS_AT_ONCE);
            let transposed = transpose(columns, &x[rows.clone()]);
            let width = rows.len();
            for row in (0..columns).step_by(SLAB) {
                let end = columns.min(row + SLAB);
                let left = Matrix::dense(&transposed[row * width..end * width], width);
                let right = Matrix::dense(&transposed[..end * width], width);
                multiplier.add_product(left, right, 1.0, &mut moments.second[row * columns..], columns)?;
            }
            if let (Some(exact), Some(shift)) = (exact, &mut moments.shift) {
                let away: Vec<Vec<f32>> = x[rows.clone()].iter().zip(&exact[rows]).map(|(x, exact)| difference(exact, x)).collect();
                let away = transpose(columns, &away.iter().map(Vec::as_slice).collect::<Vec<_>>());
                multiplier.add_product(Matrix::dense(&transposed, width), Matrix::dense(&away, width), 1.0, shift, columns)?;
            }
        }
        Ok(moments)
    }

    /// Adds `weight` rows that have the mean moments of others.
    pub(crate) fn shrink_towards(&mut self, others: &Self, weight: f32) {
        let factor = weight / others.rows.max(1) as f32;
        self.second.iter_mut().zip(&others.second).for_each(|(own, other)| *own += factor * other);
    }
}

/// `a − b`, number by number.
pub(super) fn difference(a: &[f32], b: &[f32]) -> Vec<f32> {
    a.iter().zip(b).map(|(a, b)| a - b).collect()
}

/// Columns as rows. Tiles keep both sides in the cache.
fn transpose(columns: usize, rows: &[&[f32]]) -> Vec<f32> {
    const TILE: usize = 16;
    let count = rows.len();
    let mut out = vec![0.0; columns * count];
    for first in (0..count).step_by(TILE) {
        for column in (0..columns).step_by(TILE) {
            for c in column..columns.min(column + TILE) {
                let to = &mut out[c * count + first..(c * count + count).min(c * count + first + TILE)];
                to.iter_mut().zip(&rows[first..]).for_each(|(to, row)| *to = row[c]);
            }
        }
    }
    out
}

//! Matrices in memory and their products, for work beside programs: whoever makes weights multiplies matrices that are no weights yet.

/// A matrix of f32 numbers, row after row, `stride` numbers from one row to the next.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    /// All numbers from the first of the first row to the last of the last.
    pub numbers: &'a [f32],
    /// From one row to the next.
    pub stride: usize,
    /// Rows.
    pub rows: usize,
    /// Numbers of a row.
    pub columns: usize,
}

impl<'a> Matrix<'a> {
    /// Rows of `columns` without gaps.
    pub fn dense(numbers: &'a [f32], columns: usize) -> Self {
        Self { numbers, stride: columns, rows: numbers.len() / columns, columns }
    }

    /// One row.
    pub fn row(&self, row: usize) -> &'a [f32] {
        &self.numbers[row * self.stride..][..self.columns]
    }

    /// Adds `self · rightᵀ` to a matrix whose rows are `stride` numbers apart, by plain sums.
    pub fn add_product(&self, right: Matrix<'_>, sum: &mut [f32], stride: usize) {
        for row in 0..self.rows {
            for (column, sum) in sum[row * stride..][..right.rows].iter_mut().enumerate() {
                *sum += self.row(row).iter().zip(right.row(column)).map(|(a, b)| a * b).sum::<f32>();
            }
        }
    }
}

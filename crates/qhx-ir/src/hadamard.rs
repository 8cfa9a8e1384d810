//! The orthogonal transform of [`OpKind::Hadamard`](crate::OpKind::Hadamard), which spreads every number of a row over all of them.
//!
//! A row of `n = 2ᵏ · m` numbers (`m` odd) is multiplied by the Kronecker product of two matrices: the Walsh–Hadamard matrix of order `2ᵏ`,
//! `(−1)^popcount(i & i') / √2ᵏ`, and the Hartley matrix of order `m`, `(cos + sin)(2π·j·j'/m) / √m`. Number `i · m + j` of a row has the indexes `i` and `j`.
//!
//! Both matrices are symmetric and orthogonal, so the transform is its own inverse. No entry is larger than `√2/√n`, and it exists for every width; where the width
//! is a power of two, it is the usual Hadamard transform. Their first rows are constant, so the first number of a transformed row is `√n` times the row's mean, and a
//! row without a mean has a 0 there.

use std::f64::consts::TAU;

/// The largest odd factor of a width that programs may transform: the Hartley part takes `m²` products where the Walsh part takes `k` sums a number.
pub const LARGEST_ODD: usize = 512;

/// A width as `(2ᵏ, m)` with `m` odd. The width is not 0.
pub fn factors(width: usize) -> (usize, usize) {
    let power = 1 << width.trailing_zeros();
    (power, width / power)
}

/// Whether programs may transform rows of this width.
pub fn exists(width: usize) -> bool {
    width > 0 && factors(width).1 <= LARGEST_ODD
}

/// The Hartley matrix of order `m`, row after row, not yet divided by `√m`.
pub fn hartley(m: usize) -> Vec<f64> {
    // The angle is reduced to one turn in integers: `j · j'` would lose digits as a float.
    let entry = |product: usize| (product % m) as f64 * TAU / m as f64;
    (0..m * m).map(|at| entry(at / m * (at % m))).map(|angle| angle.cos() + angle.sin()).collect()
}

/// Transforms a row in place, with sums in f64 that are rounded once. Any width; an empty row stays as it is.
pub fn hadamard_row(row: &mut [f32]) {
    if !row.is_empty() {
        Hadamard::new(row.len()).row(row);
    }
}

/// The transform of rows of one width.
pub struct Hadamard {
    width: usize,
    /// Of the Hartley matrix's order.
    odd: usize,
    hartley: Vec<f64>,
}

impl Hadamard {
    /// For rows of `width` numbers, at least one.
    pub fn new(width: usize) -> Self {
        let (_, odd) = factors(width);
        Self { width, odd, hartley: hartley(odd) }
    }

    /// Transforms a row in place, with sums in f64 that are rounded once.
    pub fn row(&self, row: &mut [f32]) {
        assert_eq!(row.len(), self.width, "a row of the transform's width");
        let mut numbers: Vec<f64> = row.iter().map(|&x| x as f64).collect();
        let mut half = self.odd;
        if self.odd == 1 && self.width >= 8 {
            // The first three steps of a power of two, in registers.
            numbers.chunks_exact_mut(8).for_each(walsh_of_8);
            half = 8;
        }
        while half < numbers.len() {
            for pair in numbers.chunks_exact_mut(2 * half) {
                let (low, high) = pair.split_at_mut(half);
                low.iter_mut().zip(high).for_each(|(a, b)| (*a, *b) = (*a + *b, *a - *b));
            }
            half *= 2;
        }
        let factor = 1.0 / (self.width as f64).sqrt();
        if self.odd == 1 {
            row.iter_mut().zip(numbers).for_each(|(out, x)| *out = (factor * x) as f32);
            return;
        }
        for (numbers, row) in numbers.chunks_exact(self.odd).zip(row.chunks_exact_mut(self.odd)) {
            for (entries, out) in self.hartley.chunks_exact(self.odd).zip(row) {
                *out = (factor * entries.iter().zip(numbers).map(|(e, x)| e * x).sum::<f64>()) as f32;
            }
        }
    }
}

/// Sums and differences of neighbours, then of those two apart, then four apart.
fn walsh_of_8(x: &mut [f64]) {
    let [a, b, c, d, e, f, g, h] = std::array::from_fn(|i| x[i]);
    let [a, b, c, d, e, f, g, h] = [a + b, a - b, c + d, c - d, e + f, e - f, g + h, g - h];
    let [a, b, c, d, e, f, g, h] = [a + c, b + d, a - c, b - d, e + g, f + h, e - g, f - h];
    x.copy_from_slice(&[a + e, b + f, c + g, d + h, a - e, b - f, c - g, d - h]);
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIDTHS: [usize; 11] = [1, 2, 3, 4, 6, 7, 8, 64, 96, 448, 576];

    /// The matrix as the module states it.
    fn entry(width: usize, row: usize, column: usize) -> f64 {
        let (power, m) = factors(width);
        let sign = if ((row / m) & (column / m)).count_ones() % 2 == 0 { 1.0 } else { -1.0 };
        let angle = TAU * ((row % m) * (column % m)) as f64 / m as f64;
        sign / (power as f64).sqrt() * (angle.cos() + angle.sin()) / (m as f64).sqrt()
    }

    fn numbers(width: usize) -> Vec<f32> {
        (0..width).map(|i| ((i * 37 + 11) % 101) as f32 / 50.0 - 1.0).collect()
    }

    #[test]
    fn rows_are_multiplied_by_the_stated_matrix() {
        for width in WIDTHS {
            let x = numbers(width);
            let mut found = x.clone();
            hadamard_row(&mut found);
            for (row, found) in found.iter().enumerate() {
                let wanted: f64 = (0..width).map(|column| entry(width, row, column) * x[column] as f64).sum();
                assert!((wanted - *found as f64).abs() < 1e-6, "width {width}, number {row}: {found}, not {wanted}");
            }
        }
        hadamard_row(&mut []);
    }

    #[test]
    fn the_transform_is_its_own_inverse_and_keeps_lengths() {
        for width in WIDTHS.into_iter().chain([1536, 6144]) {
            let x = numbers(width);
            let mut y = x.clone();
            hadamard_row(&mut y);
            let length = |row: &[f32]| row.iter().map(|&x| (x as f64).powi(2)).sum::<f64>();
            assert!((length(&x) - length(&y)).abs() < 1e-5 * length(&x), "width {width}");
            hadamard_row(&mut y);
            assert!(x.iter().zip(&y).all(|(a, b)| (a - b).abs() < 1e-6), "width {width}");
        }
    }

    #[test]
    fn the_first_number_is_the_mean() {
        for width in WIDTHS {
            let mut row = numbers(width);
            let mean = row.iter().map(|&x| x as f64).sum::<f64>() / width as f64;
            let mut centred: Vec<f32> = row.iter().map(|&x| (x as f64 - mean) as f32).collect();
            [&mut row, &mut centred].into_iter().for_each(|row| hadamard_row(row));
            assert!((row[0] as f64 - (width as f64).sqrt() * mean).abs() < 1e-6 && centred[0].abs() < 1e-6, "width {width}");
            assert!(row.iter().zip(&centred).skip(1).all(|(a, b)| (a - b).abs() < 1e-6), "width {width}");
        }
    }

    #[test]
    fn one_large_number_is_spread_evenly() {
        for width in [64, 576, 1536] {
            let mut row = vec![0.0; width];
            row[5] = 1000.0;
            hadamard_row(&mut row);
            let largest = row.iter().fold(0.0f32, |m, x| m.max(x.abs()));
            assert!(largest as f64 <= 1000.0 * (2.0 / width as f64).sqrt() * 1.0001, "width {width}: {largest}");
        }
    }
}

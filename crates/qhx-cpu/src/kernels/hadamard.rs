//! The Hadamard transform of a row, as [`qhx_ir::hadamard`] states it.
//!
//! A row of `2ᵏ · m` numbers is put into `m` planes of `2ᵏ`. The Walsh part adds and subtracts vectors within planes; where its partners are neighbours, squares of
//! vectors are turned first. The Hartley part then multiplies across planes. Planes shorter than a vector are not worth it: such rows stay as they are.
#![allow(unsafe_code)] // Vector loads and stores.

use super::{
    Instructions, run,
    vector::{Kernel, MOST_LANES, Vector},
};
use qhx_ir::hadamard::{factors, hartley};

/// The transform of rows of one width.
#[derive(Debug)]
pub(crate) struct Hadamard {
    /// 2ᵏ.
    power: usize,
    /// m.
    odd: usize,
    /// The Hartley matrix over `√n`.
    matrix: Vec<f32>,
}

impl Hadamard {
    pub(crate) fn new(width: usize) -> Self {
        let (power, odd) = factors(width);
        let length = (width as f64).sqrt();
        Self { power, odd, matrix: hartley(odd).into_iter().map(|entry| (entry / length) as f32).collect() }
    }

    /// Numbers of a row.
    pub(crate) fn width(&self) -> usize {
        self.power * self.odd
    }

    /// Scratch numbers that [`Self::apply`] needs.
    pub(crate) fn scratch(&self) -> usize {
        self.width()
    }

    /// Transforms a row in place.
    pub(crate) fn apply(&self, instructions: Instructions, row: &mut [f32], scratch: &mut [f32]) {
        assert_eq!(row.len(), self.width(), "the row must have the transform's width");
        run(instructions, Transform { hadamard: self, row, planes: &mut scratch[..self.width()] });
    }
}

struct Transform<'a> {
    hadamard: &'a Hadamard,
    row: &'a mut [f32],
    planes: &'a mut [f32],
}

impl Kernel for Transform<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let Self { hadamard: Hadamard { power, odd, matrix }, row, planes } = self;
        let (power, odd) = (*power, *odd);
        if power < V::LANES {
            let mut half = odd;
            while half < row.len() {
                row.chunks_exact_mut(2 * half).for_each(|pair| {
                    let (low, high) = pair.split_at_mut(half);
                    low.iter_mut().zip(high).for_each(|(a, b)| (*a, *b) = (*a + *b, *a - *b));
                });
                half *= 2;
            }
            planes.copy_from_slice(row);
            for (numbers, out) in planes.chunks_exact(odd).zip(row.chunks_exact_mut(odd)) {
                out.fill(0.0);
                // The matrix is symmetric: its rows are its columns.
                for (x, entries) in numbers.iter().zip(matrix.chunks_exact(odd)) {
                    out.iter_mut().zip(entries).for_each(|(out, entry)| *out += x * entry);
                }
            }
            return;
        }
        for (i, numbers) in row.chunks_exact(odd).enumerate() {
            numbers.iter().enumerate().for_each(|(j, x)| planes[j * power + i] = *x);
        }
        // SAFETY: the caller has V's instructions; planes are whole vectors, and all accesses lie within what was checked.
        unsafe {
            let mut half = V::LANES;
            while half < power {
                for pair in planes.chunks_exact_mut(2 * half) {
                    let (low, high) = pair.split_at_mut(half);
                    for (low, high) in low.chunks_exact_mut(V::LANES).zip(high.chunks_exact_mut(V::LANES)) {
                        let (a, b) = (V::load(low.as_ptr()), V::load(high.as_ptr()));
                        a.add(b).store(low.as_mut_ptr());
                        a.sub(b).store(high.as_mut_ptr());
                    }
                }
                half *= 2;
            }
            planes.chunks_mut(V::LANES * V::LANES).for_each(|square| within_vectors::<V>(square));
            across_planes::<V>(planes, power, matrix, row);
        }
    }
}

/// The Walsh transform of every vector of up to `LANES` whole ones.
#[inline(always)]
unsafe fn within_vectors<V: Vector>(numbers: &mut [f32]) {
    // SAFETY: the caller has V's instructions; all accesses are to whole vectors of `numbers`.
    unsafe {
        let mut square = [V::splat(0.0); MOST_LANES];
        for (vector, numbers) in square.iter_mut().zip(numbers.chunks_exact(V::LANES)) {
            *vector = V::load(numbers.as_ptr());
        }
        V::transpose(&mut square);
        let mut half = 1;
        while half < V::LANES {
            for first in (0..V::LANES).step_by(2 * half) {
                for low in first..first + half {
                    let (a, b) = (square[low], square[low + half]);
                    (square[low], square[low + half]) = (a.add(b), a.sub(b));
                }
            }
            half *= 2;
        }
        V::transpose(&mut square);
        for (vector, numbers) in square.iter().zip(numbers.chunks_exact_mut(V::LANES)) {
            vector.store(numbers.as_mut_ptr());
        }
    }
}

/// `row[i, j] = Σ matrix[j, j'] · planes[j', i]`.
#[inline(always)]
unsafe fn across_planes<V: Vector>(planes: &[f32], power: usize, matrix: &[f32], row: &mut [f32]) {
    let odd = planes.len() / power;
    for i in (0..power).step_by(V::LANES) {
        for (j, entries) in matrix.chunks_exact(odd).enumerate() {
            let mut numbers = [0.0; MOST_LANES];
            // SAFETY: the caller has V's instructions; a plane has whole vectors, and there is room for one.
            unsafe {
                let mut sum = V::splat(0.0);
                for (entry, plane) in entries.iter().zip(planes.chunks_exact(power)) {
                    sum = V::load(plane[i..i + V::LANES].as_ptr()).mul_add(V::splat(*entry), sum);
                }
                sum.store(numbers.as_mut_ptr());
            }
            for (lane, number) in numbers[..V::LANES].iter().enumerate() {
                row[(i + lane) * odd + j] = *number;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matrix::tests::Noise;
    use qhx_ir::hadamard_row;

    #[test]
    fn like_the_plain_transform() {
        let mut noise = Noise::new(11);
        for width in [1, 2, 3, 4, 8, 12, 16, 32, 48, 64, 96, 100, 255, 448, 512, 576, 1022, 1536, 6144] {
            let transform = Hadamard::new(width);
            let x = noise.floats(width);
            let mut wanted = x.clone();
            hadamard_row(&mut wanted);
            for instructions in Instructions::all() {
                let (mut found, mut scratch) = (x.clone(), vec![f32::NAN; transform.scratch()]);
                transform.apply(instructions, &mut found, &mut scratch);
                let close = wanted.iter().zip(&found).all(|(a, b)| (a - b).abs() < 2e-6);
                assert!(close, "width {width}, {instructions:?}");
            }
        }
    }
}

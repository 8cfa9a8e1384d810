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

// Loops, not closures: what a closure calls is not compiled for the vector's instructions.
impl Kernel for Transform<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let Self { hadamard: Hadamard { power, odd, matrix }, row, planes } = self;
        // SAFETY: the caller has V's instructions; planes are whole vectors.
        unsafe {
            match odd {
                _ if *power < V::LANES => few_planes(*odd, matrix, row, planes),
                // The widths of models: with these factors as constants, moving numbers takes a third of the time.
                1 => many_planes::<V>(1, matrix, row, planes),
                3 => many_planes::<V>(3, matrix, row, planes),
                5 => many_planes::<V>(5, matrix, row, planes),
                7 => many_planes::<V>(7, matrix, row, planes),
                9 => many_planes::<V>(9, matrix, row, planes),
                odd => many_planes::<V>(*odd, matrix, row, planes),
            }
        }
    }
}

/// The transform of a row whose Walsh part is made of whole vectors.
#[inline(always)]
unsafe fn many_planes<V: Vector>(odd: usize, matrix: &[f32], row: &mut [f32], planes: &mut [f32]) {
    let power = row.len() / odd;
    for (j, plane) in planes.chunks_exact_mut(power).enumerate() {
        for (x, numbers) in plane.iter_mut().zip(row.chunks_exact(odd)) {
            *x = numbers[j];
        }
    }
    // SAFETY: the caller's promise.
    unsafe {
        between_vectors::<V>(planes, power);
        for square in planes.chunks_mut(V::LANES * V::LANES) {
            within_vectors::<V>(square);
        }
        across_planes::<V>(odd, planes, matrix, row);
    }
}

/// The transform of a row whose Walsh part is smaller than a vector.
#[inline(always)]
fn few_planes(odd: usize, matrix: &[f32], row: &mut [f32], copy: &mut [f32]) {
    let mut half = odd;
    while half < row.len() {
        for pair in row.chunks_exact_mut(2 * half) {
            let (low, high) = pair.split_at_mut(half);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
    copy.copy_from_slice(row);
    for (numbers, out) in copy.chunks_exact(odd).zip(row.chunks_exact_mut(odd)) {
        out.fill(0.0);
        // The matrix is symmetric: its rows are its columns.
        for (x, entries) in numbers.iter().zip(matrix.chunks_exact(odd)) {
            for (out, entry) in out.iter_mut().zip(entries) {
                *out += x * entry;
            }
        }
    }
}

/// The part of the Walsh transform of every plane whose partners lie in different vectors, two steps at a time.
#[inline(always)]
unsafe fn between_vectors<V: Vector>(planes: &mut [f32], power: usize) {
    let (start, end) = (planes.as_mut_ptr(), planes.len());
    let mut half = V::LANES;
    // SAFETY: the caller has V's instructions; groups are whole vectors and end within the planes.
    unsafe {
        while 2 * half < power {
            for first in (0..end).step_by(4 * half) {
                for at in (first..first + half).step_by(V::LANES) {
                    let places = [at, at + half, at + 2 * half, at + 3 * half];
                    let [a, b, c, d] = [
                        V::load(start.add(places[0])),
                        V::load(start.add(places[1])),
                        V::load(start.add(places[2])),
                        V::load(start.add(places[3])),
                    ];
                    let (ab, ba, cd, dc) = (a.add(b), a.sub(b), c.add(d), c.sub(d));
                    ab.add(cd).store(start.add(places[0]));
                    ba.add(dc).store(start.add(places[1]));
                    ab.sub(cd).store(start.add(places[2]));
                    ba.sub(dc).store(start.add(places[3]));
                }
            }
            half *= 4;
        }
        if half < power {
            for first in (0..end).step_by(2 * half) {
                for at in (first..first + half).step_by(V::LANES) {
                    let (a, b) = (V::load(start.add(at)), V::load(start.add(at + half)));
                    a.add(b).store(start.add(at));
                    a.sub(b).store(start.add(at + half));
                }
            }
        }
    }
}

/// The rest of the Walsh transform: that of each of up to `LANES` vectors, which are turned, so that partners lie in different ones.
#[inline(always)]
unsafe fn within_vectors<V: Vector>(numbers: &mut [f32]) {
    // SAFETY: the caller has V's instructions; all accesses are to whole vectors of `numbers`.
    unsafe {
        let mut square = [V::splat(0.0); MOST_LANES];
        for (vector, numbers) in square.iter_mut().zip(numbers.chunks_exact(V::LANES)) {
            *vector = V::load(numbers.as_ptr());
        }
        V::transpose(&mut square);
        step::<V, 1>(&mut square);
        step::<V, 2>(&mut square);
        step::<V, 4>(&mut square);
        step::<V, 8>(&mut square);
        V::transpose(&mut square);
        for (vector, numbers) in square.iter().zip(numbers.chunks_exact_mut(V::LANES)) {
            vector.store(numbers.as_mut_ptr());
        }
    }
}

/// Sums and differences of vectors `HALF` apart.
#[inline(always)]
unsafe fn step<V: Vector, const HALF: usize>(square: &mut [V; MOST_LANES]) {
    for low in 0..MOST_LANES {
        if low & HALF == 0 && low + HALF < V::LANES {
            let (a, b) = (square[low], square[low + HALF]);
            // SAFETY: the caller has V's instructions.
            (square[low], square[low + HALF]) = unsafe { (a.add(b), a.sub(b)) };
        }
    }
}

/// `row[i, j] = Σ matrix[j, j'] · planes[j', i]`.
#[inline(always)]
unsafe fn across_planes<V: Vector>(odd: usize, planes: &[f32], matrix: &[f32], row: &mut [f32]) {
    let power = planes.len() / odd;
    for (i, out) in row.chunks_exact_mut(odd * V::LANES).enumerate() {
        for (j, entries) in matrix.chunks_exact(odd).enumerate() {
            let mut numbers = [0.0; MOST_LANES];
            // SAFETY: the caller has V's instructions; a plane has whole vectors, and there is room for one.
            unsafe {
                let mut sum = V::splat(0.0);
                for (entry, plane) in entries.iter().zip(planes.chunks_exact(power)) {
                    sum = V::load(plane.as_ptr().add(i * V::LANES)).mul_add(V::splat(*entry), sum);
                }
                sum.store(numbers.as_mut_ptr());
            }
            for (numbers_of_row, number) in out.chunks_exact_mut(odd).zip(numbers) {
                numbers_of_row[j] = number;
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

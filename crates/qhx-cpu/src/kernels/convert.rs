//! Between the types in which numbers are stored and f32.
#![allow(unsafe_code)] // Vector loads and stores.

use super::{
    Instructions,
    element::{Element, Store},
    run,
    vector::{Kernel, Vector},
};
use std::marker::PhantomData;

/// `y = x`, widened.
pub(crate) fn widen<E: Element>(instructions: Instructions, x: &[E], y: &mut [f32]) {
    assert_eq!(x.len(), y.len(), "as many numbers");
    run(instructions, Copy::<E, f32> { x: x.as_ptr(), y: y.as_mut_ptr(), n: y.len(), types: PhantomData });
}

/// `y = x`, rounded to nearest even where `y` is narrower.
pub(crate) fn narrow<E: Store>(instructions: Instructions, x: &[f32], y: &mut [E]) {
    assert_eq!(x.len(), y.len(), "as many numbers");
    run(instructions, Copy::<f32, E> { x: x.as_ptr(), y: y.as_mut_ptr(), n: y.len(), types: PhantomData });
}

/// Rounds every number to the nearest f16.
pub(crate) fn round_to_f16(instructions: Instructions, y: &mut [f32]) {
    let mut halves = [half::f16::ZERO; 256];
    for part in y.chunks_mut(256) {
        let halves = &mut halves[..part.len()];
        narrow(instructions, part, halves);
        widen(instructions, halves, part);
    }
}

struct Copy<A, B> {
    x: *const A,
    y: *mut B,
    n: usize,
    types: PhantomData<(A, B)>,
}

impl<A: Element, B: Store> Kernel for Copy<A, B> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: made only by the functions above, which checked the lengths.
        unsafe {
            let (mut i, n) = (0, self.n);
            while i + V::LANES <= n {
                B::store(A::load::<V>(self.x.add(i)), self.y.add(i));
                i += V::LANES;
            }
            if i < n {
                B::store_part(A::load_part::<V>(self.x.add(i), n - i), self.y.add(i), n - i);
            }
        }
    }
}

/// The integer form of a run of numbers: `q = round(x · 127/amax)` with halves to even. Gives the scale `amax / 127`.
pub(crate) fn quantise(instructions: Instructions, x: &[f32], q: &mut [i8]) -> f32 {
    assert_eq!(x.len(), q.len(), "as many numbers");
    run(instructions, Quantise { x: x.as_ptr(), q: q.as_mut_ptr(), n: q.len() })
}

struct Quantise {
    x: *const f32,
    q: *mut i8,
    n: usize,
}

impl Kernel for Quantise {
    type Output = f32;

    #[inline(always)]
    unsafe fn run<V: Vector>(self) -> f32 {
        // SAFETY: made only by `quantise`, which checked the lengths.
        unsafe {
            let n = self.n;
            let mut largest = V::splat(0.0);
            let mut i = 0;
            while i + V::LANES <= n {
                largest = largest.max(V::load(self.x.add(i)).abs());
                i += V::LANES;
            }
            if i < n {
                largest = largest.max(V::load_part(self.x.add(i), n - i).abs());
            }
            let largest = largest.largest();
            let factor = V::splat(if largest > 0.0 { 127.0 / largest } else { 0.0 });
            let mut i = 0;
            while i + V::LANES <= n {
                V::load(self.x.add(i)).mul(factor).store_i8(self.q.add(i));
                i += V::LANES;
            }
            if i < n {
                let mut lanes = [0i8; 16];
                V::load_part(self.x.add(i), n - i).mul(factor).store_i8(lanes.as_mut_ptr());
                std::ptr::copy_nonoverlapping(lanes.as_ptr(), self.q.add(i), n - i);
            }
            largest / 127.0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    #[test]
    fn round_trips_are_exact() {
        for instructions in Instructions::all() {
            for n in [0, 1, 5, 8, 15, 16, 33, 300] {
                let x: Vec<f32> = (0..n).map(|i| (i as f32 - 9.0) * 1.2345e-3).collect();
                let halves: Vec<f16> = x.iter().map(|&v| f16::from_f32(v)).collect();
                let mut narrowed = vec![f16::ZERO; n];
                narrow(instructions, &x, &mut narrowed);
                assert_eq!(narrowed, halves);
                let mut wide = vec![0.0; n];
                widen(instructions, &halves, &mut wide);
                assert!(wide.iter().zip(&halves).all(|(w, h)| *w == h.to_f32()));
                let mut rounded = x.clone();
                round_to_f16(instructions, &mut rounded);
                assert_eq!(rounded, wide);
                let brains: Vec<bf16> = x.iter().map(|&v| bf16::from_f32(v)).collect();
                widen(instructions, &brains, &mut wide);
                assert!(wide.iter().zip(&brains).all(|(w, b)| *w == b.to_f32()));
            }
        }
    }

    #[test]
    fn quantises_as_stated() {
        for instructions in Instructions::all() {
            for n in [1, 7, 16, 32, 45] {
                let x: Vec<f32> = (0..n).map(|i| ((i * 37 % 23) as f32 - 11.0) * 0.37).collect();
                let mut q = vec![0; n];
                let scale = quantise(instructions, &x, &mut q);
                let amax = x.iter().fold(0.0f32, |m, v| m.max(v.abs()));
                assert_eq!(scale, amax / 127.0);
                assert!((0..n).all(|i| q[i] == (x[i] * (127.0 / amax)).round_ties_even() as i8));
                assert_eq!(quantise(instructions, &vec![0.0; n], &mut q), 0.0);
                assert!(q.iter().all(|&v| v == 0));
            }
        }
    }
}

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
}

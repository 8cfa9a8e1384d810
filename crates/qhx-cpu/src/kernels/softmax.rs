//! The pieces of a softmax that is computed block by block.
#![allow(unsafe_code)] // Vector loads and stores.

use super::{
    Instructions, math, run,
    vector::{Kernel, Vector},
};

/// Replaces scores by `e^(score − max)`, where max is the largest of them and of `before`; gives max and the sum. At least one score.
pub(crate) fn exponentials(instructions: Instructions, scores: &mut [f32], before: f32) -> (f32, f32) {
    run(instructions, Exponentials { scores, before })
}

struct Exponentials<'a> {
    scores: &'a mut [f32],
    before: f32,
}

impl Kernel for Exponentials<'_> {
    type Output = (f32, f32);

    #[inline(always)]
    unsafe fn run<V: Vector>(self) -> (f32, f32) {
        let (n, scores) = (self.scores.len(), self.scores.as_mut_ptr());
        // SAFETY: all accesses are within `n`.
        unsafe {
            let mut largest = V::splat(self.before);
            let mut i = 0;
            while i + V::LANES <= n {
                largest = largest.max(V::load(scores.add(i)));
                i += V::LANES;
            }
            let mut max = largest.largest();
            for j in i..n {
                max = max.max(*scores.add(j));
            }
            let (maxima, mut sums) = (V::splat(max), V::splat(0.0));
            let mut i = 0;
            while i + V::LANES <= n {
                let weights = math::exp(V::load(scores.add(i)).sub(maxima));
                weights.store(scores.add(i));
                sums = sums.add(weights);
                i += V::LANES;
            }
            let mut sum = sums.sum();
            if i < n {
                let weights = math::exp(V::load_part(scores.add(i), n - i).sub(maxima));
                weights.store_part(scores.add(i), n - i);
                for j in i..n {
                    sum += *scores.add(j);
                }
            }
            (max, sum)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_f64() {
        for instructions in Instructions::all() {
            for n in [1, 3, 8, 16, 64, 77] {
                for before in [f32::NEG_INFINITY, -3.0, 100.0] {
                    let start: Vec<f32> = (0..n).map(|i| ((i * 7 % 13) as f32 - 6.0) * 1.7).collect();
                    let mut scores = start.clone();
                    let (max, sum) = exponentials(instructions, &mut scores, before);
                    assert_eq!(max, start.iter().copied().fold(before, f32::max));
                    let wanted: f64 = start.iter().map(|&s| (s as f64 - max as f64).exp()).sum();
                    assert!((sum as f64 - wanted).abs() < 1e-6 * wanted.max(1e-30) || before == 100.0);
                    assert!(start.iter().zip(&scores).all(|(a, b)| ((a - max).exp() - b).abs() < 1e-6));
                }
            }
        }
    }
}

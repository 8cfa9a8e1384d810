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

/// A state of a softmax: weighted sums of values, then the largest score, the total of the weights, and what fills a cache line.
pub(crate) const BESIDE_SUMS: usize = 16;

/// Adds what later keys gave to each of some states of `numbers` numbers. A total of 0 means that no key was seen.
pub(crate) fn fold(instructions: Instructions, states: &mut [f32], later: &[f32], numbers: usize) {
    assert!(numbers >= BESIDE_SUMS && states.len() == later.len() && states.len() % numbers == 0, "states of one size");
    run(instructions, Fold { states, later, numbers });
}

/// Numbers ahead of their use that what was computed elsewhere is asked for: it lies in the caches of other cores.
const AHEAD: usize = 1024;

struct Fold<'a> {
    states: &'a mut [f32],
    later: &'a [f32],
    numbers: usize,
}

impl Kernel for Fold<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let dim = self.numbers - BESIDE_SUMS;
        for (state, later) in self.states.chunks_exact_mut(self.numbers).zip(self.later.chunks_exact(self.numbers)) {
            let ((max, total), (later_max, later_total)) = ((state[dim], state[dim + 1]), (later[dim], later[dim + 1]));
            if total == 0.0 {
                state.copy_from_slice(later);
                continue;
            }
            if later_total == 0.0 {
                continue;
            }
            // What has the smaller largest score shrinks.
            let (factor, later_factor) = if later_max > max { ((max - later_max).exp(), 1.0) } else { (1.0, (later_max - max).exp()) };
            state[dim] = if later_max > max { later_max } else { max };
            state[dim + 1] = total * factor + later_total * later_factor;
            // SAFETY: the caller has V's instructions; all accesses are within the first `dim` numbers of both.
            unsafe {
                let (state, later, factors, later_factors) = (state.as_mut_ptr(), later.as_ptr(), V::splat(factor), V::splat(later_factor));
                let mut i = 0;
                while i + V::LANES <= dim {
                    V::fetch(later.wrapping_add(i + AHEAD).cast());
                    let sums = V::load(state.add(i)).mul(factors);
                    V::load(later.add(i)).mul_add(later_factors, sums).store(state.add(i));
                    i += V::LANES;
                }
                if i < dim {
                    let sums = V::load_part(state.add(i), dim - i).mul(factors);
                    V::load_part(later.add(i), dim - i).mul_add(later_factors, sums).store_part(state.add(i), dim - i);
                }
            }
        }
    }
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
    fn folded_states_are_those_of_all_keys() {
        for instructions in Instructions::all() {
            for dim in [1, 8, 16, 70] {
                let numbers = dim + BESIDE_SUMS;
                // Sums, largest score, total.
                let state = |max: f32, total: f32| {
                    let mut state = vec![0.0; numbers];
                    (0..dim).for_each(|i| state[i] = total * (i as f32 - 3.0));
                    (state[dim], state[dim + 1]) = (max, total);
                    state
                };
                let nothing = state(f32::NEG_INFINITY, 0.0);
                let cases = [
                    (state(2.0, 3.0), state(1.0, 5.0)),
                    (state(-1.0, 3.0), state(4.0, 5.0)),
                    (state(0.5, 3.0), nothing.clone()),
                    (nothing.clone(), state(0.5, 3.0)),
                    (nothing.clone(), nothing),
                    (state(-200.0, 3.0), state(200.0, 5.0)),
                ];
                let mut folded: Vec<f32> = cases.iter().flat_map(|case| case.0.clone()).collect();
                let later: Vec<f32> = cases.iter().flat_map(|case| case.1.clone()).collect();
                fold(instructions, &mut folded, &later, numbers);
                for (found, (a, b)) in folded.chunks(numbers).zip(&cases) {
                    let max = a[dim].max(b[dim]);
                    let weight = |x: &[f32]| if x[dim + 1] == 0.0 { 0.0 } else { ((x[dim] - max) as f64).exp() };
                    assert_eq!(found[dim], max);
                    for i in (0..dim).chain([dim + 1]) {
                        let wanted = a[i] as f64 * weight(a) + b[i] as f64 * weight(b);
                        assert!((found[i] as f64 - wanted).abs() <= 1e-6 * wanted.abs(), "{instructions:?} {dim}: {i}");
                    }
                }
            }
        }
    }

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

//! The Fourier transform of real numbers, for lengths that are powers of two.
//!
//! Small and plain on purpose: half a minute of sound takes a few hundredths of a second, and a general library costs minutes of compiling.

use std::f64::consts::TAU;

/// The tables of one length.
pub(super) struct Fourier {
    /// `exp(−2πi k / length)` for the first half: cosines and sines.
    turns: Vec<(f64, f64)>,
    /// Where each input goes: its number with the bits reversed.
    places: Vec<usize>,
}

impl Fourier {
    /// For inputs of `length`, a power of two.
    pub(super) fn new(length: usize) -> Self {
        assert!(length.is_power_of_two(), "manifests with other lengths are refused");
        let turn = |k: usize| {
            let angle = TAU * k as f64 / length as f64;
            (angle.cos(), -angle.sin())
        };
        let bits = length.trailing_zeros();
        let place = |i: usize| if bits == 0 { 0 } else { i.reverse_bits() >> (usize::BITS - bits) };
        Self { turns: (0..length / 2).map(turn).collect(), places: (0..length).map(place).collect() }
    }

    /// The first half of the spectrum of `input`, the middle included: `length / 2 + 1` pairs of real and imaginary part. `work` is overwritten.
    pub(super) fn transform<'w>(&self, input: &[f64], work: &'w mut Vec<(f64, f64)>) -> &'w [(f64, f64)] {
        let length = self.places.len();
        work.clear();
        work.extend(self.places.iter().map(|&place| (input[place], 0.0)));
        let mut half = 1;
        while half < length {
            let step = length / (2 * half);
            for group in work.chunks_exact_mut(2 * half) {
                let (low, high) = group.split_at_mut(half);
                for ((a, b), &(cos, sin)) in low.iter_mut().zip(high).zip(self.turns.iter().step_by(step)) {
                    let turned = (b.0 * cos - b.1 * sin, b.0 * sin + b.1 * cos);
                    *b = (a.0 - turned.0, a.1 - turned.1);
                    *a = (a.0 + turned.0, a.1 + turned.1);
                }
            }
            half *= 2;
        }
        &work[..length / 2 + 1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_sum_that_defines_it() {
        let mut work = Vec::new();
        for length in [1, 2, 4, 8, 64, 512] {
            let input: Vec<f64> = (0..length).map(|n| ((n * n * 7 + 3) % 101) as f64 / 50.0 - 1.0).collect();
            let spectrum = Fourier::new(length).transform(&input, &mut work).to_vec();
            assert_eq!(spectrum.len(), length / 2 + 1);
            for (k, (real, imaginary)) in spectrum.into_iter().enumerate() {
                let angle = |n: usize| TAU * (k * n % length) as f64 / length as f64;
                let sum = |part: fn(f64) -> f64| -> f64 { input.iter().enumerate().map(|(n, x)| x * part(angle(n))).sum() };
                assert!((real - sum(f64::cos)).abs() < 1e-11 && (imaginary + sum(f64::sin)).abs() < 1e-11, "{length}: {k}");
            }
        }
    }
}

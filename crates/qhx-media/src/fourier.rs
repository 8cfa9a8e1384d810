//! The Fourier transform of real numbers, for lengths that are powers of two.
//!
//! Small and plain on purpose: half a minute of sound takes a few hundredths of a second, and a general library costs minutes of compiling.

use std::f64::consts::TAU;

/// The tables of one length.
pub(super) struct Fourier {
    /// For each pass, one after the other, `exp(−2πi k / (2 · half))` of its half: cosines and sines.
    cosines: Vec<f64>,
    sines: Vec<f64>,
    /// Where each input goes: its number with the bits reversed.
    places: Vec<usize>,
}

/// Real and imaginary parts. Apart, since neighbours are then computed together.
#[derive(Default)]
pub(super) struct Spectrum {
    real: Vec<f64>,
    imaginary: Vec<f64>,
}

impl Fourier {
    /// For inputs of `length`, a power of two.
    pub(super) fn new(length: usize) -> Self {
        assert!(length.is_power_of_two(), "manifests with other lengths are refused");
        let halves = std::iter::successors(Some(1), |half| Some(2 * half)).take_while(|half| 2 * half <= length);
        let angles = halves.flat_map(|half| (0..half).map(move |k| TAU * (k * (length / (2 * half))) as f64 / length as f64));
        let (cosines, sines) = angles.map(|angle: f64| (angle.cos(), -angle.sin())).unzip();
        let bits = length.trailing_zeros();
        let place = |i: usize| if bits == 0 { 0 } else { i.reverse_bits() >> (usize::BITS - bits) };
        Self { cosines, sines, places: (0..length).map(place).collect() }
    }

    /// The first half of the spectrum of `input`, the middle included: `length / 2 + 1` pairs of real and imaginary part. `work` is overwritten.
    pub(super) fn transform<'w>(&self, input: &[f64], work: &'w mut Spectrum) -> impl Iterator<Item = (f64, f64)> + use<'w> {
        let length = self.places.len();
        let Spectrum { real, imaginary } = work;
        real.clear();
        real.extend(self.places.iter().map(|&place| input[place]));
        imaginary.clear();
        imaginary.resize(length, 0.0);
        let (mut half, mut passed) = (1, 0);
        while half < length {
            let (cosines, sines) = (&self.cosines[passed..passed + half], &self.sines[passed..passed + half]);
            for (real, imaginary) in real.chunks_exact_mut(2 * half).zip(imaginary.chunks_exact_mut(2 * half)) {
                let ((low_real, high_real), (low_imaginary, high_imaginary)) = (real.split_at_mut(half), imaginary.split_at_mut(half));
                let low = low_real.iter_mut().zip(low_imaginary);
                let high = high_real.iter_mut().zip(high_imaginary);
                for (((a, b), (c, d)), (&cos, &sin)) in low.zip(high).zip(cosines.iter().zip(sines)) {
                    let turned = (*c * cos - *d * sin, *c * sin + *d * cos);
                    (*c, *d) = (*a - turned.0, *b - turned.1);
                    (*a, *b) = (*a + turned.0, *b + turned.1);
                }
            }
            passed += half;
            half *= 2;
        }
        real.iter().copied().zip(imaginary.iter().copied()).take(length / 2 + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_sum_that_defines_it() {
        let mut work = Spectrum::default();
        for length in [1, 2, 4, 8, 64, 512] {
            let input: Vec<f64> = (0..length).map(|n| ((n * n * 7 + 3) % 101) as f64 / 50.0 - 1.0).collect();
            let spectrum: Vec<_> = Fourier::new(length).transform(&input, &mut work).collect();
            assert_eq!(spectrum.len(), length / 2 + 1);
            for (k, (real, imaginary)) in spectrum.into_iter().enumerate() {
                let angle = |n: usize| TAU * (k * n % length) as f64 / length as f64;
                let sum = |part: fn(f64) -> f64| -> f64 { input.iter().enumerate().map(|(n, x)| x * part(angle(n))).sum() };
                assert!((real - sum(f64::cos)).abs() < 1e-11 && (imaginary + sum(f64::sin)).abs() < 1e-11, "{length}: {k}");
            }
        }
    }
}

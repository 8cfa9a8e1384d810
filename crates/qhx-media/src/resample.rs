//! Changing the sampling rate of a sound.
//!
//! Each new sample is the sum of the old ones around its time, weighted by a sinc under a Kaiser window: what the lower of the two rates can
//! carry passes (to 90 % of its half), what it cannot is 100 dB down, and nothing moves in time.

use super::{MediaProblem, SAMPLING_RATES, sound};
use std::f64::consts::PI;

/// Zero crossings of the sinc on each side.
const CROSSINGS: f64 = 64.0;
/// The middle of the filter's slope, as a part of the highest frequency that the lower rate carries.
const CUTOFF: f64 = 0.95;
/// The form of the window.
const KAISER: f64 = 10.0;
/// Places between two old samples for which weights are kept; in between, they are blended.
const MOST_PLACES: u64 = 1024;
/// Weights that are kept at most.
const MOST_WEIGHTS: u64 = 1 << 23;

/// `samples` at `from` hertz as samples at `to` hertz, as long in time.
pub(super) fn to_rate(samples: Vec<f32>, from: u32, to: u32) -> Result<Vec<f32>, MediaProblem> {
    for found in [from, to] {
        if !SAMPLING_RATES.contains(&found) {
            return Err(MediaProblem::Rate { found });
        }
    }
    let length = (samples.len() as u64 * u64::from(to)).div_ceil(from.into()) as usize;
    sound::check_samples(length)?;
    if from == to || samples.is_empty() {
        return Ok(samples);
    }
    let filter = Filter::new(from, to);
    // Silence around the sound, so that every sum has all its terms.
    let mut padded = vec![0.0; filter.reach];
    padded.extend(samples);
    padded.resize(padded.len() + filter.reach + 1, 0.0);
    Ok((0..length as u64).map(|n| filter.sample(&padded, n)).collect())
}

struct Filter {
    /// Old and new samples in the same time, without common divisor.
    down: u64,
    up: u64,
    /// Old samples on each side of a new one.
    reach: usize,
    places: u64,
    /// For each place after an old sample, and the next old sample: the weights of `2 · reach` samples.
    weights: Vec<f32>,
}

impl Filter {
    fn new(from: u32, to: u32) -> Self {
        let common = greatest_common_divisor(from, to);
        let (down, up) = (u64::from(from / common), u64::from(to / common));
        let ratio = (f64::from(to) / f64::from(from)).min(1.0);
        let width = CROSSINGS / ratio;
        let reach = width.ceil() as usize;
        let places = up.min(MOST_PLACES).min((MOST_WEIGHTS / (2 * reach as u64)).max(1));
        let cutoff = CUTOFF * ratio;
        let mut weights = Vec::with_capacity((places as usize + 1) * 2 * reach);
        for place in 0..=places {
            let first = reach as f64 - 1.0 + place as f64 / places as f64;
            let row: Vec<f64> = (0..2 * reach).map(|tap| windowed_sinc(first - tap as f64, cutoff, width)).collect();
            let sum: f64 = row.iter().sum();
            weights.extend(row.iter().map(|weight| (weight / sum) as f32));
        }
        Self { down, up, reach, places, weights }
    }

    /// New sample `n` of a sound that has `reach` samples of silence before it.
    fn sample(&self, padded: &[f32], n: u64) -> f32 {
        let (old, phase) = (n * self.down / self.up, n * self.down % self.up);
        let (place, rest) = (phase * self.places / self.up, phase * self.places % self.up);
        let taps = 2 * self.reach;
        let around = &padded[old as usize + 1..][..taps];
        let row = |place: u64| &self.weights[place as usize * taps..][..taps];
        let here = dot(around, row(place));
        if rest == 0 {
            return here;
        }
        let share = rest as f32 / self.up as f32;
        here + (dot(around, row(place + 1)) - here) * share
    }
}

/// The weight of a sample at a distance in old samples.
fn windowed_sinc(distance: f64, cutoff: f64, width: f64) -> f64 {
    let inside = 1.0 - (distance / width).powi(2);
    if inside < 0.0 {
        return 0.0;
    }
    let x = PI * cutoff * distance;
    let sinc = if x == 0.0 { 1.0 } else { x.sin() / x };
    sinc * bessel(KAISER * inside.sqrt())
}

/// The modified Bessel function of order zero, by its series.
fn bessel(x: f64) -> f64 {
    let (mut term, mut sum, mut k) = (1.0, 1.0, 1.0);
    while term > sum * 1e-17 {
        term *= (x / (2.0 * k)).powi(2);
        sum += term;
        k += 1.0;
    }
    sum
}

/// In sixteen sums, which compilers turn into vectors.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; 16];
    let (a, b) = (a.chunks_exact(16), b.chunks_exact(16));
    let rest: f32 = a.remainder().iter().zip(b.remainder()).map(|(x, y)| x * y).sum();
    for (a, b) in a.zip(b) {
        for ((sum, x), y) in sums.iter_mut().zip(a).zip(b) {
            *sum += x * y;
        }
    }
    sums.iter().sum::<f32>() + rest
}

fn greatest_common_divisor(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::f64::consts::TAU;

    fn tone(frequency: f64, rate: u32, count: usize) -> Vec<f32> {
        (0..count).map(|n| (TAU * frequency * n as f64 / f64::from(rate)).sin() as f32).collect()
    }

    /// The largest difference, away from the ends.
    fn difference(found: &[f32], expected: &[f32]) -> f32 {
        assert_eq!(found.len(), expected.len());
        let edge = found.len() / 10;
        let inner = edge..found.len() - edge;
        found[inner.clone()].iter().zip(&expected[inner]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
    }

    #[test]
    fn a_tone_stays_in_place_and_in_tune() {
        for (from, to) in
            [(44_100, 16_000), (48_000, 16_000), (8_000, 16_000), (22_050, 16_000), (11_025, 16_000), (44_099, 16_000), (96_000, 16_000)]
        {
            let count = from as usize;
            let found = to_rate(tone(440.0, from, count), from, to).expect("resampled");
            let worst = difference(&found, &tone(440.0, to, to as usize));
            assert!(worst < 1e-4, "{from} to {to}: {worst}");
        }
    }

    #[test]
    fn what_the_new_rate_cannot_carry_is_silent() {
        let found = to_rate(tone(11_000.0, 44_100, 44_100), 44_100, 16_000).expect("resampled");
        assert!(difference(&found, &vec![0.0; found.len()]) < 1e-4);
        let high = to_rate(tone(7_000.0, 44_100, 44_100), 44_100, 16_000).expect("resampled");
        assert!(difference(&high, &tone(7_000.0, 16_000, 16_000)) < 1e-4);
    }

    #[test]
    fn lengths_are_those_of_the_time() {
        for count in [0, 1, 2, 3, 100, 1023, 1024, 1025, 44_099, 100_000] {
            for (from, to) in [(44_100, 16_000), (48_000, 16_000), (8_000, 16_000), (16_000, 16_000)] {
                let found = to_rate(vec![0.5; count], from, to).expect("resampled").len();
                assert_eq!(found, (count * to as usize).div_ceil(from as usize), "{count} from {from} to {to}");
            }
        }
    }

    #[test]
    fn rates_without_common_divisor_are_fine() {
        let found = to_rate(tone(440.0, 767_999, 76_800), 767_999, 16_000).expect("resampled");
        assert!(difference(&found, &tone(440.0, 16_000, 1_601)) < 1e-4);
    }

    #[test]
    fn rates_and_lengths_have_limits() {
        assert!(matches!(to_rate(vec![0.0], 999, 16_000), Err(MediaProblem::Rate { found: 999 })));
        assert!(matches!(to_rate(vec![0.0], u32::MAX, 16_000), Err(MediaProblem::Rate { .. })));
        assert!(matches!(to_rate(vec![0.0; 1 << 20], 1_000, 768_000), Err(MediaProblem::TooManySamples)));
    }
}

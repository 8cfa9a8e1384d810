//! Changing the sampling rate of a sound.

use super::{MediaProblem, SAMPLING_RATES, sound};
use rubato::{Fft, FixedSync, Resampler, WindowFunction, audioadapter_buffers::direct::InterleavedSlice};

/// Input samples of a block: long enough that frequencies up to 97 % of the lower rate's half pass.
const BLOCK: usize = 1024;

/// `samples` at `from` hertz as samples at `to` hertz: as long in time, and not delayed. Frequencies that the new rate cannot carry are filtered out.
pub(super) fn to_rate(samples: Vec<f32>, from: u32, to: u32) -> Result<Vec<f32>, MediaProblem> {
    for found in [from, to] {
        if !SAMPLING_RATES.contains(&found) {
            return Err(MediaProblem::Rate { found });
        }
    }
    let length = (samples.len() as u64 * u64::from(to)).div_ceil(from.into());
    sound::check_samples(usize::try_from(length).unwrap_or(usize::MAX))?;
    if from == to || samples.is_empty() {
        return Ok(samples);
    }
    let (rate_in, rate_out) = (from as usize, to as usize);
    let mut resampler = Fft::<f32>::new_custom(rate_in, rate_out, BLOCK, 1, 1, WindowFunction::BlackmanHarris2, FixedSync::Both)
        .expect("rates and block are not zero");
    let input = InterleavedSlice::new(&samples, 1, samples.len()).expect("one channel of all samples");
    let mut output = resampler.process_all(&input, samples.len(), None).expect("the buffers are as long as they say").take_data();
    // Rounding in the ratio may add one.
    output.resize(length as usize, 0.0);
    Ok(output)
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
            assert!(worst < 1e-3, "{from} to {to}: {worst}");
        }
    }

    #[test]
    fn what_the_new_rate_cannot_carry_is_silent() {
        let found = to_rate(tone(11_000.0, 44_100, 44_100), 44_100, 16_000).expect("resampled");
        assert!(difference(&found, &vec![0.0; found.len()]) < 1e-3);
        let high = to_rate(tone(7_000.0, 44_100, 44_100), 44_100, 16_000).expect("resampled");
        assert!(difference(&high, &tone(7_000.0, 16_000, 16_000)) < 1e-3);
    }

    #[test]
    fn lengths_are_those_of_the_time() {
        for count in [0, 1, 2, 3, 100, 1023, 1024, 1025, 44_099, 100_000] {
            for (from, to) in [(44_100, 16_000), (48_000, 16_000), (8_000, 16_000), (16_000, 16_000), (767_999, 16_000)] {
                let found = to_rate(vec![0.5; count], from, to).expect("resampled").len();
                assert_eq!(found, (count * to as usize).div_ceil(from as usize), "{count} from {from} to {to}");
            }
        }
    }

    #[test]
    fn rates_and_lengths_have_limits() {
        assert!(matches!(to_rate(vec![0.0], 999, 16_000), Err(MediaProblem::Rate { found: 999 })));
        assert!(matches!(to_rate(vec![0.0], u32::MAX, 16_000), Err(MediaProblem::Rate { .. })));
        assert!(matches!(to_rate(vec![0.0; 1 << 20], 1_000, 768_000), Err(MediaProblem::TooManySamples)));
    }
}

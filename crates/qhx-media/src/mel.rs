//! Log-mel frames of a sound.
//!
//! The numbers have the types of the models' own preprocessing, because quiet bins beside loud ones show the difference: samples times window in
//! 32 bits, the Fourier transform in 64, its result and the magnitudes in 32, mel sums and logarithms in 64, features in 32.

use super::{
    MediaError, MediaProblem,
    fourier::{Fourier, Spectrum},
};
use qhx_bundle::{Digest, media::AudioFrontEnd};
use std::{f64::consts::PI, fmt, num::NonZero, ops::Range, thread};

/// A sound as its tower takes it: `frames`.
#[derive(Clone, PartialEq)]
pub struct Frames {
    numbers: Vec<f32>,
    bins: usize,
}

impl Frames {
    /// The numbers, `[count, bins]`.
    pub fn numbers(&self) -> &[f32] {
        &self.numbers
    }

    /// The numbers, without a copy.
    pub fn into_numbers(self) -> Vec<f32> {
        self.numbers
    }

    /// Frames.
    pub fn count(&self) -> usize {
        self.numbers.len() / self.bins
    }

    /// Numbers of a frame.
    pub fn bins(&self) -> usize {
        self.bins
    }

    /// Equal for sounds that are the same to the tower, whatever files they came from.
    pub fn digest(&self) -> Digest {
        let bytes: Vec<u8> = self.numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        Digest::of(&bytes)
    }

    /// How many frames a sound of `samples` at the front end's rate has, or why it has none. For counting tokens without computing.
    pub fn count_of(name: &str, samples: usize, front_end: &AudioFrontEnd) -> Result<usize, MediaError> {
        count(samples, front_end).map_err(|p| p.of(name))
    }
}

impl fmt::Debug for Frames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Frames({} x {})", self.count(), self.bins)
    }
}

/// The fewest samples that make a frame: one lies beyond its end.
pub(super) fn fewest_samples(front_end: &AudioFrontEnd) -> usize {
    front_end.frame_length - zeros_before(front_end) + 1
}

/// Zeros before the sound: the first frame's middle is the first sample.
fn zeros_before(front_end: &AudioFrontEnd) -> usize {
    front_end.frame_length / 2
}

/// Frames of real samples only: those whose end, and one sample more, lies inside the sound.
fn count(samples: usize, front_end: &AudioFrontEnd) -> Result<usize, MediaProblem> {
    let (rate, needed) = (front_end.sampling_rate, fewest_samples(front_end));
    if samples > front_end.max_samples {
        let seconds = |count: usize| count as f64 / f64::from(rate);
        return Err(MediaProblem::TooLong { seconds: seconds(samples), most: seconds(front_end.max_samples) });
    }
    if samples < needed {
        return Err(MediaProblem::TooShort { found: samples, needed, rate });
    }
    Ok((samples - needed) / front_end.hop_length + 1)
}

/// Frames from which a second thread pays.
const PARALLEL_FRAMES: usize = 128;
/// More threads gain little.
const MOST_THREADS: usize = 8;

/// The frames of samples at the front end's rate.
pub(super) fn frames(samples: &[f32], front_end: &AudioFrontEnd) -> Result<Frames, MediaProblem> {
    let (count, bins) = (count(samples.len(), front_end)?, front_end.bins);
    let tables = Tables::new(front_end);
    let mut numbers = vec![0.0; count * bins];
    let threads = thread::available_parallelism().map_or(1, NonZero::get).min(MOST_THREADS).min(count / PARALLEL_FRAMES + 1);
    let each = count.div_ceil(threads);
    thread::scope(|scope| {
        let mut parts = numbers.chunks_mut((each * bins).max(1)).enumerate();
        let mine = parts.next();
        for (part, numbers) in parts {
            let tables = &tables;
            scope.spawn(move || tables.frames(samples, part * each, numbers));
        }
        mine.into_iter().for_each(|(_, numbers)| tables.frames(samples, 0, numbers));
    });
    Ok(Frames { numbers, bins })
}

/// What all frames share.
struct Tables<'a> {
    front_end: &'a AudioFrontEnd,
    window: Vec<f32>,
    filters: Vec<(Range<usize>, Vec<f64>)>,
    fourier: Fourier,
}

impl<'a> Tables<'a> {
    fn new(front_end: &'a AudioFrontEnd) -> Self {
        let (window, filters) = (hann(front_end.frame_length), filters(front_end));
        Self { front_end, window, filters, fourier: Fourier::new(front_end.fft_length) }
    }

    /// The frames from `first_frame` on, as many as there is room for.
    fn frames(&self, samples: &[f32], first_frame: usize, numbers: &mut [f32]) {
        let &AudioFrontEnd { frame_length, fft_length, hop_length, bins, mel_floor, .. } = self.front_end;
        let zeros = zeros_before(self.front_end);
        let scale = self.front_end.input_scale as f32;
        let (mut work, mut magnitudes) = (Spectrum::default(), Vec::new());
        let mut input = vec![0.0; fft_length];
        for (frame, numbers) in (first_frame..).zip(numbers.chunks_exact_mut(bins.max(1))) {
            input.fill(0.0);
            let first = frame * hop_length;
            let silent = zeros.saturating_sub(first).min(frame_length);
            let sound = &samples[(first + silent).saturating_sub(zeros)..first + frame_length - zeros];
            for ((input, &sample), &weight) in input[silent..].iter_mut().zip(sound).zip(&self.window[silent..]) {
                *input = f64::from(sample * scale * weight);
            }
            magnitudes.clear();
            magnitudes.extend(self.fourier.transform(&input, &mut work).map(|bin| f64::from(magnitude(bin))));
            for ((bin, (range, weights)), number) in self.filters.iter().enumerate().zip(numbers) {
                let mel: f64 = magnitudes[range.clone()].iter().zip(weights).map(|(m, w)| m * w).sum();
                let log = (mel + mel_floor).ln();
                let mean = self.front_end.bin_mean.get(bin).copied().unwrap_or(0.0);
                let std = self.front_end.bin_std.get(bin).copied().unwrap_or(1.0);
                *number = ((log - mean) / std) as f32;
            }
        }
    }
}

fn magnitude((real, imaginary): (f64, f64)) -> f32 {
    let (real, imaginary) = (f64::from(real as f32), f64::from(imaginary as f32));
    (real * real + imaginary * imaginary).sqrt() as f32
}

/// The periodic Hann window.
fn hann(length: usize) -> Vec<f32> {
    (0..length).map(|n| (0.5 - 0.5 * (2.0 * PI * n as f64 / length as f64).cos()) as f32).collect()
}

/// For each mel bin the bins of the transform that it covers and their weights: triangles that meet at points evenly spaced on the HTK mel scale.
fn filters(front_end: &AudioFrontEnd) -> Vec<(Range<usize>, Vec<f64>)> {
    let spectrum = front_end.fft_length / 2 + 1;
    let (lowest, highest) = (hertz_to_mel(front_end.min_frequency), hertz_to_mel(front_end.max_frequency));
    let step = (highest - lowest) / (front_end.bins + 1) as f64;
    let points: Vec<f64> = (0..front_end.bins + 2).map(|i| mel_to_hertz(lowest + i as f64 * step)).collect();
    let last = f64::from(front_end.sampling_rate / 2);
    let frequency = |bin: usize| bin as f64 * (last / (spectrum - 1).max(1) as f64);
    let triangle = |points: &[f64]| {
        let [left, peak, right] = [points[0], points[1], points[2]];
        let height = |f: f64| ((f - left) / (peak - left)).min((right - f) / (right - peak)).max(0.0);
        let covered = |bin: &usize| height(frequency(*bin)) > 0.0;
        let first = (0..spectrum).find(covered).unwrap_or(0);
        let end = (first..spectrum).take_while(covered).last().map_or(first, |bin| bin + 1);
        (first..end, (first..end).map(|bin| height(frequency(bin))).collect())
    };
    points.windows(3).map(triangle).collect()
}

fn hertz_to_mel(hertz: f64) -> f64 {
    2595.0 * (1.0 + hertz / 700.0).log10()
}

fn mel_to_hertz(mel: f64) -> f64 {
    700.0 * (10.0_f64.powf(mel / 2595.0) - 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_frames_count() {
        let count = |samples| count(samples, &AudioFrontEnd::default()).ok();
        assert_eq!(
            [0, 160, 161, 320, 321, 11_777, 16_000, 480_000].map(count),
            [None, None, Some(1), Some(1), Some(2), Some(73), Some(99), Some(2_999)]
        );
    }

    #[test]
    fn lengths_that_do_not_fit_are_said_in_numbers() {
        let text = |samples: usize| frames(&vec![0.0; samples], &AudioFrontEnd::default()).expect_err("does not fit").to_string();
        assert_eq!(text(160), "is too short: 160 samples at 16000 Hz, and the model needs at least 161 (10.1 ms)");
        let long = "is 30.10 s long and this model takes at most 30.00 s in one piece; cut it, or go through it in windows";
        assert_eq!(text(481_600), long);
    }

    /// However frames are dealt to threads, each is what it is alone.
    #[test]
    fn threads_change_nothing() {
        let front_end = AudioFrontEnd::default();
        let samples: Vec<f32> = (0..7 * PARALLEL_FRAMES * front_end.hop_length).map(|n| (n * n % 1009) as f32 / 1009.0 - 0.5).collect();
        let all = frames(&samples, &front_end).expect("frames");
        let mut alone = vec![0.0; all.numbers().len()];
        let tables = Tables::new(&front_end);
        for (frame, numbers) in alone.chunks_exact_mut(front_end.bins).enumerate() {
            tables.frames(&samples, frame, numbers);
        }
        assert!(all.count() > 6 * PARALLEL_FRAMES);
        assert_eq!(all.numbers(), alone);
    }

    #[test]
    fn silence_is_the_floor_and_bins_are_normalised() {
        let mut front_end = AudioFrontEnd::default();
        let silence = frames(&[0.0; 500], &front_end).expect("frames");
        assert!(silence.numbers().iter().all(|&n| n == 0.001_f64.ln() as f32));
        front_end.bin_mean = vec![1.0; 128];
        front_end.bin_std = vec![2.0; 128];
        let normalised = frames(&[0.0; 500], &front_end).expect("frames");
        assert!(normalised.numbers().iter().all(|&n| n == ((0.001_f64.ln() - 1.0) / 2.0) as f32));
        assert_ne!(silence.digest(), normalised.digest());
    }

    #[test]
    fn odd_parameters_do_no_harm() {
        for (frame_length, hop_length, fft_length, bins) in [(1, 1, 1, 1), (3, 7, 4, 2), (2, 1, 2, 300), (400, 1, 512, 80)] {
            let front_end = AudioFrontEnd { frame_length, hop_length, fft_length, bins, ..AudioFrontEnd::default() };
            for samples in [1, 2, 3, 10, 500] {
                let samples = vec![0.25; samples];
                match frames(&samples, &front_end) {
                    Ok(frames) => assert!(frames.numbers().iter().all(|n| n.is_finite())),
                    Err(problem) => assert!(matches!(problem, MediaProblem::TooShort { .. })),
                }
            }
        }
    }
}

//! Cutting a long sound into pieces that a model takes.
//!
//! A piece is as long as the model allows, but for its end: that lies where the last seconds before the limit are quietest, which in speech is
//! most often between two words. Pieces follow one another without gap or overlap, so that joining their texts joins the sound.

use super::mel;
use qhx_bundle::media::AudioFrontEnd;
use std::ops::Range;

/// How far before the limit a quiet place is looked for, in seconds.
const LOOK_BACK: f64 = 2.0;
/// How long it must be quiet, in seconds.
const PAUSE: f64 = 0.1;

/// The pieces of `samples`, in order. A sound that fits is one piece.
pub(super) fn pieces(samples: &[f32], front_end: &AudioFrontEnd) -> Vec<Range<usize>> {
    let most = front_end.max_samples;
    let fewest = mel::fewest_samples(front_end);
    let (mut pieces, mut start) = (Vec::new(), 0);
    while samples.len() - start > most {
        // What is left after the cut must make a frame, too.
        let latest = (start + most).min(samples.len() - fewest.min(samples.len())).max(start + 1);
        let look_back = ((LOOK_BACK * f64::from(front_end.sampling_rate)) as usize).min(most / 2);
        let earliest = latest.saturating_sub(look_back).max(start + 1);
        let cut = quietest(samples, earliest..latest + 1, front_end);
        pieces.push(start..cut);
        start = cut;
    }
    pieces.push(start..samples.len());
    pieces
}

/// The place in `places` around which the sound has the least energy; the last of several.
fn quietest(samples: &[f32], places: Range<usize>, front_end: &AudioFrontEnd) -> usize {
    let half = ((PAUSE * f64::from(front_end.sampling_rate)) as usize / 2).max(1);
    let (first, end) = (places.start.saturating_sub(half), (places.end + half).min(samples.len()));
    // Energy before each sample, so that a window's is a difference.
    let mut before = Vec::with_capacity(end - first + 1);
    let mut sum = 0.0;
    before.push(sum);
    for &sample in &samples[first..end] {
        sum += f64::from(sample) * f64::from(sample);
        before.push(sum);
    }
    let energy = |place: usize| {
        let (left, right) = (place.saturating_sub(half).max(first), (place + half).min(end));
        before[right - first] - before[left - first]
    };
    let last = places.end - 1;
    let candidates = places.rev().step_by(front_end.hop_length.max(1)).map(|place| (place, energy(place)));
    candidates.min_by(|a, b| a.1.total_cmp(&b.1)).map_or(last, |(place, _)| place)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(samples: &[f32], front_end: &AudioFrontEnd) -> Vec<Range<usize>> {
        let pieces = pieces(samples, front_end);
        assert_eq!((pieces[0].start, pieces[pieces.len() - 1].end), (0, samples.len()));
        for pair in pieces.windows(2) {
            assert_eq!(pair[0].end, pair[1].start, "no gap and no overlap");
        }
        assert!(pieces.iter().all(|p| p.len() <= front_end.max_samples), "{pieces:?}");
        pieces
    }

    #[test]
    fn what_fits_is_one_piece() {
        for length in [0, 1, 479_999, 480_000] {
            assert_eq!(check(&vec![0.1; length], &AudioFrontEnd::default()).len(), 1);
        }
    }

    #[test]
    fn cuts_fall_into_pauses() {
        let mut samples = vec![0.5; 1_200_000];
        samples[460_000..463_200].fill(0.01);
        samples[100_000..110_000].fill(0.0);
        let pieces = check(&samples, &AudioFrontEnd::default());
        assert!((460_000..463_200).contains(&pieces[0].end), "{pieces:?}");
        // Without a pause, pieces are as long as they may be.
        assert_eq!(pieces[1].len(), 480_000);
        assert_eq!(pieces.len(), 3);
    }

    #[test]
    fn the_last_piece_has_a_frame() {
        for extra in [1, 2, 100, 160, 161, 162, 5_000] {
            let pieces = check(&vec![0.5; 480_000 + extra], &AudioFrontEnd::default());
            assert!(pieces.iter().all(|p| p.len() >= 161), "{extra}: {pieces:?}");
        }
    }

    #[test]
    fn tiny_limits_end_too() {
        for (max_samples, frame_length) in [(1, 1), (2, 2), (3, 320), (161, 320), (400, 320)] {
            let front_end = AudioFrontEnd { max_samples, frame_length, ..AudioFrontEnd::default() };
            check(&vec![0.5; 1_000], &front_end);
        }
    }
}

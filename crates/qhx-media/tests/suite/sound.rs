//! Sounds become the oracle's frames, and long ones pieces.

use crate::common::{cases, list, numbers, size, sound, text, worst};
use qhx_bundle::media::AudioFrontEnd;
use qhx_media::{Frames, MediaProblem, Sound};
use serde_json::Value;

fn front_end(case: &Value) -> AudioFrontEnd {
    let number = |field: &str| case[field].as_f64().expect("a number");
    AudioFrontEnd {
        sampling_rate: size(case, "sampling_rate") as u32,
        frame_length: size(case, "frame_length"),
        hop_length: size(case, "hop_length"),
        fft_length: size(case, "fft_length"),
        bins: size(case, "bins"),
        min_frequency: number("min_frequency"),
        max_frequency: number("max_frequency"),
        mel_floor: number("mel_floor"),
        input_scale: number("input_scale"),
        bin_mean: list(case, "bin_mean"),
        bin_std: list(case, "bin_std"),
        ..AudioFrontEnd::default()
    }
}

#[test]
fn frames_are_the_oracles() {
    let numbers = numbers();
    let cases = cases("frames");
    assert!(cases.len() > 20);
    for (number, case) in cases.iter().enumerate() {
        let front_end = front_end(case);
        let samples = sound(text(case, "signal"), size(case, "samples"));
        let sound = Sound::from_samples("sound", front_end.sampling_rate, samples, &front_end).expect("a sound");
        let frames = sound.frames(&front_end).expect("frames");
        assert_eq!((frames.count(), frames.bins()), (size(case, "frames"), front_end.bins), "{case}");
        assert_eq!(Frames::count_of("sound", size(case, "samples"), &front_end).expect("frames"), frames.count());
        // Each of two convolutions with a stride of two keeps half, rounded up.
        assert_eq!(frames.count().div_ceil(2).div_ceil(2), size(case, "tokens"), "{case}");
        let stored = case["stored"].as_array().expect("a list").iter().map(|n| n.as_u64().expect("a number") as usize);
        let found: Vec<f32> = stored.flat_map(|at| &frames.numbers()[at * front_end.bins..][..front_end.bins]).copied().collect();
        let worst = worst(&found, &numbers[&format!("frames.{number}")]);
        assert!(worst < 1e-5, "{case}: {worst}");
    }
}

#[test]
fn long_sound_is_refused_whole_and_taken_in_pieces() {
    let front_end = AudioFrontEnd::default();
    let sound = Sound::from_samples("talk.wav", 16_000, sound("bursts", 1_000_000), &front_end).expect("a sound");
    let error = sound.frames(&front_end).expect_err("too long");
    assert!(matches!(error.problem, MediaProblem::TooLong { .. }));
    assert_eq!(
        error.to_string(),
        "talk.wav: is 62.50 s long and this model takes at most 30.00 s in one piece; cut it, or go through it in windows"
    );
    let pieces = sound.split(&front_end);
    assert_eq!(pieces.len(), 3);
    assert_eq!(pieces.iter().flat_map(|p| p.samples()).copied().collect::<Vec<f32>>(), sound.samples());
    for piece in &pieces {
        assert!(piece.frames(&front_end).expect("frames").count() > 0);
    }
    // The sound is silent every other quarter of a second: that is where it is cut.
    let end = pieces[0].samples().len();
    assert_eq!(end / 4000 % 2, 1, "{end}");
}

#[test]
fn equal_sounds_have_equal_digests() {
    let front_end = AudioFrontEnd::default();
    let digest = |kind| {
        let sound = Sound::from_samples("sound", 16_000, sound(kind, 4_000), &front_end).expect("a sound");
        sound.frames(&front_end).expect("frames").digest()
    };
    assert_eq!(digest("mixed"), digest("mixed"));
    assert_ne!(digest("mixed"), digest("tonal"));
}

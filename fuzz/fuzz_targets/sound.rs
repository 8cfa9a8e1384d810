//! Any bytes as a sound file: decoded, brought to another rate, split, turned into frames.
#![no_main]

use libfuzzer_sys::fuzz_target;
use qhx_bundle::media::{AudioFrontEnd, Placeholder};
use qhx_runtime::media::Sound;

fuzz_target!(|file: &[u8]| {
    let front_end = AudioFrontEnd {
        program: "audio".into(),
        placeholder: Placeholder { token: 0, begin: None, end: None },
        sampling_rate: 16_000,
        max_samples: 4_000,
        pad_multiple: 128,
        frame_length: 320,
        hop_length: 160,
        fft_length: 512,
        bins: 128,
        min_frequency: 0.0,
        max_frequency: 8_000.0,
        mel_floor: 1e-3,
        input_scale: 1.0,
        bin_mean: Vec::new(),
        bin_std: Vec::new(),
    };
    let Ok(sound) = Sound::decode("fuzz", file.to_vec(), &front_end) else { return };
    let pieces = sound.split(&front_end);
    assert_eq!(pieces.iter().map(|piece| piece.samples().len()).sum::<usize>(), sound.samples().len());
    for piece in pieces.iter().take(20) {
        if let Ok(frames) = piece.frames(&front_end) {
            assert!(frames.numbers().iter().all(|n| n.is_finite()));
        }
    }
});

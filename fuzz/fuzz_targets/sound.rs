//! Any bytes as a sound file: decoded, brought to another rate, split, turned into frames.
#![no_main]

use libfuzzer_sys::fuzz_target;
use qhx_bundle::media::AudioFrontEnd;
use qhx_runtime::media::Sound;

fuzz_target!(|file: &[u8]| {
    let front_end = AudioFrontEnd { max_samples: 4_000, ..AudioFrontEnd::default() };
    let Ok(sound) = Sound::decode("fuzz", file.to_vec(), &front_end) else { return };
    let pieces = sound.split(&front_end);
    assert_eq!(pieces.iter().map(|piece| piece.samples().len()).sum::<usize>(), sound.samples().len());
    for piece in pieces.iter().take(20) {
        if let Ok(frames) = piece.frames(&front_end) {
            assert!(frames.numbers().iter().all(|n| n.is_finite()));
        }
    }
});

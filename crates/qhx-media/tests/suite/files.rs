//! Files of every format decode to what Pillow and soundfile see in them, and broken ones to a clear error.

use crate::common::{self, cases, file, fixed, numbers, size, text, worst};
use qhx_bundle::media::AudioFrontEnd;
use qhx_media::{Image, MAX_PIXELS, MediaProblem, Picture, Sound};

#[test]
fn images_decode_to_the_oracles_pixels() {
    let numbers = numbers();
    let mut wrong = Vec::new();
    for case in cases("images") {
        let name = text(&case, "file");
        let picture = Picture::decode(name, &file(name)).expect("an image");
        assert_eq!((picture.height(), picture.width()), (size(&case, "height"), size(&case, "width")), "{name}");
        let levels: Vec<f32> = picture.rgb().iter().map(|&level| f32::from(level)).collect();
        let worst = worst(&levels, &numbers[&format!("image.{name}")]);
        if worst > size(&case, "tolerance") as f32 {
            wrong.push(format!("{name}: {worst} levels"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn sounds_decode_to_the_oracles_samples() {
    let numbers = numbers();
    let mut wrong = Vec::new();
    for case in cases("sounds") {
        let name = text(&case, "file");
        let front_end = AudioFrontEnd { sampling_rate: size(&case, "rate") as u32, ..AudioFrontEnd::default() };
        let sound = Sound::decode(name, file(name), &front_end).expect("a sound");
        if sound.samples().len() != size(&case, "samples") {
            wrong.push(format!("{name}: {} samples for {}", sound.samples().len(), size(&case, "samples")));
            continue;
        }
        let worst = worst(sound.samples(), &numbers[&format!("sound.{name}")]);
        if f64::from(worst) > case["tolerance"].as_f64().expect("a number") {
            wrong.push(format!("{name}: {worst}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn any_rate_and_number_of_channels_is_brought_to_the_front_ends() {
    for case in cases("sounds") {
        let name = text(&case, "file");
        let sound = Sound::decode(name, file(name), &AudioFrontEnd::default()).expect("a sound");
        let expected = (size(&case, "samples") * 16_000).div_ceil(size(&case, "rate"));
        assert_eq!(sound.samples().len(), expected, "{name}");
        sound.frames(&AudioFrontEnd::default()).expect("frames");
    }
}

fn image_error(name: &str, bytes: &[u8]) -> String {
    Image::decode(name, bytes, &fixed(32, 32)).expect_err("no image").to_string()
}

fn sound_error(name: &str, bytes: Vec<u8>) -> String {
    let front_end = AudioFrontEnd::default();
    Sound::decode(name, bytes, &front_end).and_then(|sound| sound.frames(&front_end)).expect_err("no sound").to_string()
}

#[test]
fn a_text_file_is_not_an_image_whatever_it_is_called() {
    let expected = "notes.jpg: is not an image: it starts with the text \"Buy milk\\nand eggs and br\"; PNG, JPEG, WebP and GIF can be read, whatever the file is called";
    assert_eq!(image_error("notes.jpg", b"Buy milk\nand eggs and bread"), expected);
    assert_eq!(image_error("empty.png", b""), "empty.png: is empty: it has no bytes");
    assert!(sound_error("notes.wav", b"Buy milk".to_vec()).starts_with("notes.wav: is not a sound: it starts with the text \"Buy milk\""));
    assert_eq!(sound_error("song.wav", file("rgb.png")), "song.wav: is a PNG image, which is not read; WAV, FLAC, MP3 and Ogg Vorbis are");
}

#[test]
fn an_image_that_claims_to_be_huge_is_refused_before_it_is_decoded() {
    let mut png = file("rgb.png");
    png[16..24].copy_from_slice(&[0, 0, 0xff, 0xff, 0, 0, 0xff, 0xff]);
    let crc = crc32(&png[12..29]);
    png[29..33].copy_from_slice(&crc.to_be_bytes());
    let expected = format!(
        "big.png: says that it is 65535 x 65535: 4294 million pixels, and at most {} million are decoded; use a smaller image",
        MAX_PIXELS / 1_000_000
    );
    assert_eq!(image_error("big.png", &png), expected);
    let mut jpeg = file("rgb.jpg");
    let frame = jpeg.windows(2).position(|two| two == [0xff, 0xc0]).expect("a frame header");
    jpeg[frame + 5..frame + 9].fill(0xff);
    assert_eq!(image_error("big.png", &jpeg), expected);
    let mut gif = file("transparent.gif");
    gif[6..10].fill(0xff);
    assert_eq!(image_error("big.png", &gif), expected);
}

fn crc32(bytes: &[u8]) -> u32 {
    !bytes
        .iter()
        .fold(!0, |sum: u32, &byte| (0..8).fold(sum ^ u32::from(byte), |sum, _| (sum >> 1) ^ (0xedb8_8320 & (sum & 1).wrapping_neg())))
}

#[test]
fn half_an_image_is_an_error_and_not_half_grey() {
    for case in cases("images") {
        let name = text(&case, "file");
        let bytes = file(name);
        if name.starts_with("moving") {
            continue; // The first picture may be whole.
        }
        for end in [bytes.len() / 2, bytes.len() * 3 / 4, bytes.len() - bytes.len() / 10 - 1] {
            let error = match Image::decode(name, &bytes[..end], &fixed(32, 32)) {
                Ok(_) => panic!("{name} of {end} bytes is taken for an image"),
                Err(e) => e.to_string(),
            };
            assert!(error.contains("is cut off") || error.contains("is a damaged"), "{name} of {end} bytes: {error}");
        }
    }
    assert_eq!(
        image_error("photo.jpg", &file("rgb.jpg")[..700]),
        "photo.jpg: is cut off: the JPEG file ends before its image does; copy or download it again"
    );
}

#[test]
fn half_a_sound_is_an_error() {
    for case in cases("sounds") {
        let name = text(&case, "file");
        let bytes = file(name);
        let error = sound_error(name, bytes[..bytes.len() * 2 / 3].to_vec());
        assert!(error.contains("is cut off") || error.contains("is a damaged"), "{name}: {error}");
    }
}

#[test]
fn sounds_with_nothing_in_them_are_named() {
    let mut silent = file("s16.wav");
    silent.truncate(44);
    silent[40..44].fill(0);
    silent[4..8].copy_from_slice(&36u32.to_le_bytes());
    assert_eq!(sound_error("silent.wav", silent), "silent.wav: has no sound in it: the WAV file decodes to 0 samples");
    let mut short = file("s16.wav");
    short.truncate(44 + 2 * 100);
    short[40..44].copy_from_slice(&200u32.to_le_bytes());
    short[4..8].copy_from_slice(&236u32.to_le_bytes());
    let expected = "short.wav: is too short: 100 samples at 16000 Hz, and the model needs at least 161 (10.1 ms)";
    assert_eq!(sound_error("short.wav", short), expected);
}

#[test]
fn samples_that_are_no_numbers_are_refused() {
    let mut wav = file("f32.wav");
    let at = wav.len() - 400;
    wav[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    assert!(sound_error("nan.wav", wav.clone()).contains("is a damaged WAV file: sample 1900 is NaN"));
    wav[at..at + 4].copy_from_slice(&1e30f32.to_le_bytes());
    assert!(sound_error("loud.wav", wav).contains("where 1.0 is full scale"));
}

#[test]
fn what_is_not_decoded_says_what_to_do() {
    let error = sound_error("voice.ogg", file("opus.ogg"));
    assert!(error.contains("voice.ogg: is a kind of Ogg that is not read: its sound is not coded as Vorbis"), "{error}");
}

#[test]
fn a_recorder_that_did_not_know_the_length_is_believed() {
    let mut wav = file("s16.wav");
    wav[4..8].fill(0xff);
    wav[40..44].fill(0xff);
    let sound = Sound::decode("stream.wav", wav, &AudioFrontEnd::default()).expect("a sound");
    assert_eq!(sound.samples().len(), 2000);
}

#[test]
fn broken_bytes_never_panic() {
    let front_end = AudioFrontEnd::default();
    let files = cases("images").into_iter().chain(cases("sounds"));
    for (number, case) in files.enumerate() {
        let bytes = file(text(&case, "file"));
        let mut seed = number as u32 + 1;
        let mut next = || {
            seed ^= seed << 13;
            seed ^= seed >> 17;
            seed ^= seed << 5;
            seed as usize
        };
        for _ in 0..60 {
            let mut broken = bytes.clone();
            for _ in 0..1 + next() % 4 {
                let at = next() % broken.len();
                broken[at] = next() as u8;
            }
            broken.truncate(if next() % 4 == 0 { next() % bytes.len() } else { bytes.len() });
            let _ = Image::decode("broken", &broken, &fixed(32, 32)).map(|image| image.patches());
            let _ = Sound::decode("broken", broken, &front_end).and_then(|sound| sound.frames(&front_end));
        }
    }
}

#[test]
fn files_are_read_from_disk_too() {
    let path = common::folder().join("files").join("turned_6.jpg");
    let image = Image::open(&path, &fixed(64, 32)).expect("an image");
    assert_eq!(image.scaled_rgb().len(), 64 * 32 * 3);
    let missing = Image::open(&common::folder().join("none.png"), &fixed(64, 32)).expect_err("no file");
    assert!(matches!(missing.problem, MediaProblem::Read(_)) && missing.to_string().contains("none.png: cannot be read: "), "{missing}");
    let sound = Sound::open(&common::folder().join("files").join("s16.flac"), &AudioFrontEnd::default()).expect("a sound");
    assert!((sound.seconds() - 0.125).abs() < 1e-9);
}

//! Pictures and sounds that are made by code, so that an oracle has media without carrying any.
//!
//! Whole numbers only, from SplitMix64: the same bytes on every machine and in every version, which the sum in the oracle proves before anything is judged by them.

use super::VerifyError;
use crate::{
    Error, Medium,
    media::{Image, Picture, Sound},
    sample::random::mix,
};
use qhx_bundle::{Digest, media::Media, parity::Drawing};

/// Shapes on a picture.
const SHAPES: usize = 9;
/// Tones of a sound.
const TONES: usize = 3;
/// Pieces of a sound, each with tones of its own.
const PIECES: usize = 6;

/// A drawn medium, ready for the towers of `model`, and the sum of its bytes.
pub fn draw(drawing: Drawing, model: &str, media: &Media) -> Result<(Medium, Digest), VerifyError> {
    let name = name(drawing);
    let bytes = bytes(drawing);
    let sum = Digest::of(&bytes);
    let none = |kind: &str| VerifyError::Oracle { bundle: model.into(), reason: format!("it has {kind}, which the model does not take") };
    let medium = match drawing {
        Drawing::Image { width, height, .. } => {
            let front_end = media.image.as_ref().ok_or_else(|| none("pictures"))?;
            let picture = Picture::from_rgb(&name, width, height, bytes).map_err(Error::from)?;
            Medium::image(&name, Image::from_picture(&name, &picture, front_end).map_err(Error::from)?, front_end)
        }
        Drawing::Audio { rate, .. } => {
            let front_end = media.audio.as_ref().ok_or_else(|| none("sounds"))?;
            let samples = bytes.chunks_exact(2).map(|s| f32::from(i16::from_le_bytes([s[0], s[1]])) / 32768.0).collect();
            Medium::sound(&name, &Sound::from_samples(&name, rate, samples, front_end).map_err(Error::from)?, front_end)?
        }
    };
    Ok((medium, sum))
}

fn name(drawing: Drawing) -> String {
    match drawing {
        Drawing::Image { width, height, seed } => format!("drawn picture {seed} of {width} x {height}"),
        Drawing::Audio { rate, samples, seed } => format!("drawn sound {seed} of {samples} samples at {rate} Hz"),
    }
}

/// Pixels (RGB, row by row) or samples (signed 16 bits, little-endian).
fn bytes(drawing: Drawing) -> Vec<u8> {
    match drawing {
        Drawing::Image { width, height, seed } => picture(width as i64, height as i64, &mut Random(seed)),
        Drawing::Audio { rate, samples, seed } => sound(rate, samples, &mut Random(seed)).into_iter().flat_map(i16::to_le_bytes).collect(),
    }
}

/// A slope from one colour to another, discs and boxes on it, and a little noise over all.
fn picture(width: i64, height: i64, random: &mut Random) -> Vec<u8> {
    let mut colour = || [(); 3].map(|()| random.below(256) as i64);
    let (from, to) = (colour(), colour());
    let shapes: Vec<Shape> = (0..SHAPES)
        .map(|_| Shape {
            is_disc: random.below(2) == 1,
            middle: [random.below(height as u64) as i64, random.below(width as u64) as i64],
            half: [1 + random.below(height as u64 / 3 + 1) as i64, 1 + random.below(width as u64 / 3 + 1) as i64],
            colour: [(); 3].map(|()| random.below(256) as i64),
        })
        .collect();
    let mut rgb = Vec::with_capacity((3 * width * height) as usize);
    for y in 0..height {
        for x in 0..width {
            let over = shapes.iter().rev().find(|shape| shape.covers(y, x));
            for channel in 0..3 {
                let slope = from[channel] + (to[channel] - from[channel]) * (x + y) / (width + height);
                let level = over.map_or(slope, |shape| shape.colour[channel]) + random.below(17) as i64 - 8;
                rgb.push(level.clamp(0, 255) as u8);
            }
        }
    }
    rgb
}

struct Shape {
    is_disc: bool,
    middle: [i64; 2],
    half: [i64; 2],
    colour: [i64; 3],
}

impl Shape {
    fn covers(&self, y: i64, x: i64) -> bool {
        let [dy, dx] = [(y - self.middle[0]).abs(), (x - self.middle[1]).abs()];
        let [h, w] = self.half;
        match self.is_disc {
            true => dy * dy * w * w + dx * dx * h * h <= h * h * w * w,
            false => dy <= h && dx <= w,
        }
    }
}

/// Pieces of a few triangle waves that glide, each piece swelling and fading, and a little noise over all.
fn sound(rate: u32, samples: usize, random: &mut Random) -> Vec<i16> {
    let piece = samples.div_ceil(PIECES).max(1);
    let mut tones = [Tone::default(); TONES];
    let mut out = Vec::with_capacity(samples);
    for i in 0..samples {
        let at = i % piece;
        if at == 0 {
            tones.iter_mut().for_each(|tone| *tone = Tone::new(rate, random));
        }
        let swell = (at.min(piece - 1 - at) * 4).min(piece) as i64;
        let sum: i64 = tones.iter_mut().map(Tone::next).sum();
        let level = sum * swell / piece as i64 + random.below(401) as i64 - 200;
        out.push(level.clamp(-32768, 32767) as i16);
    }
    out
}

/// A triangle wave: the phase is a 32-bit circle.
#[derive(Clone, Copy, Default)]
struct Tone {
    phase: u32,
    step: u32,
    glide: i32,
    loudness: i64,
}

impl Tone {
    /// 80 to 3000 Hz, or what the rate has room for.
    fn new(rate: u32, random: &mut Random) -> Self {
        let hertz = 80 + random.below(2920);
        let step = ((hertz << 32) / u64::from(rate.max(1))).min(1 << 30) as u32;
        Self {
            phase: random.below(1 << 32) as u32,
            step,
            glide: random.below(2001) as i32 - 1000,
            loudness: 1000 + random.below(5000) as i64,
        }
    }

    fn next(&mut self) -> i64 {
        self.phase = self.phase.wrapping_add(self.step);
        self.step = self.step.saturating_add_signed(self.glide);
        // From −2¹⁵ to 2¹⁵ and back.
        let half = i64::from(self.phase >> 15) - (1 << 16);
        ((half.abs() - (1 << 15)) * self.loudness) >> 15
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0) % limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drawings_never_change() {
        // Oracles are told by these bytes: a change makes every bundle's media cases useless.
        let sum = |drawing| Digest::of(&bytes(drawing)).to_string();
        let image = Drawing::Image { width: 61, height: 40, seed: 5 };
        let audio = Drawing::Audio { rate: 16_000, samples: 5000, seed: 5 };
        assert_eq!([sum(image), sum(audio)], KNOWN);
        assert_ne!(sum(Drawing::Image { width: 61, height: 40, seed: 6 }), KNOWN[0]);
    }

    const KNOWN: [&str; 2] = [
        "0aa520e6493e05e4adbcecc85bc7442083703dab51799a12135b1c0cc514091e",
        "e7462e6600e4754f2fb9c0541140c5d70847d5db4119340ff06e242dbcf3e8b5",
    ];

    #[test]
    fn there_is_something_to_see_and_to_hear() {
        let pixels = bytes(Drawing::Image { width: 64, height: 48, seed: 1 });
        assert_eq!(pixels.len(), 3 * 64 * 48);
        let mut levels = [0; 256];
        pixels.iter().for_each(|&p| levels[usize::from(p)] += 1);
        assert!(levels.iter().filter(|&&n| n > 0).count() > 100);
        let samples = sound(16_000, 16_000, &mut Random(1));
        let loudest = samples.iter().map(|s| s.unsigned_abs()).max().unwrap();
        assert!((3000..32_000).contains(&loudest), "{loudest}");
        assert_eq!(bytes(Drawing::Audio { rate: 1, samples: 1, seed: 0 }).len(), 2, "the smallest there is");
        assert_eq!(bytes(Drawing::Image { width: 1, height: 1, seed: 0 }).len(), 3);
    }
}

//! Decoding images to rows of red, green and blue.
//!
//! What comes out is what the image's maker meant to be seen, in 8 bits:
//! - turned upright, where the file says how it was held (EXIF orientation);
//! - transparency lies on white, by the arithmetic of Pillow's `alpha_composite`;
//! - 16-bit channels give their upper byte (Pillow does so for colours; 16-bit grey it would clip at 255, which leaves white);
//! - of animations, the first picture.
//!
//! Colour profiles are not applied: the models' makers did not, either.

use crate::{MAX_PIXELS, MediaProblem, jpeg, orientation::Orientation, picture::check_pixels, sniff::ImageFormat};
use std::{
    fmt,
    io::{self, Cursor},
};

/// Width, height and RGB bytes of an image file, upright.
pub(super) fn decode(bytes: &[u8]) -> Result<(usize, usize, Vec<u8>), MediaProblem> {
    let (width, height, rgb, orientation) = match ImageFormat::of(bytes)? {
        ImageFormat::Jpeg => jpeg::decode(bytes)?,
        ImageFormat::Png => png(bytes)?,
        ImageFormat::WebP => webp(bytes)?,
        ImageFormat::Gif => gif(bytes)?,
    };
    Ok(orientation.apply(width, height, rgb))
}

/// Width, height, RGB bytes and how the camera was held.
pub(super) type Decoded = (usize, usize, Vec<u8>, Orientation);

/// The most that a decoder may allocate: 16 bits in three channels of every pixel.
const MAX_DECODED_BYTES: usize = MAX_PIXELS as usize * 6;

fn png(bytes: &[u8]) -> Result<Decoded, MediaProblem> {
    let problem = |e| match e {
        png::DecodingError::IoError(e) => read_problem("PNG", &e),
        other => damaged("PNG", other),
    };
    let mut decoder = png::Decoder::new_with_limits(Cursor::new(bytes), png::Limits { bytes: MAX_DECODED_BYTES });
    // Palettes and few bits become 8-bit channels; 16 bits stay, and give their upper byte below.
    decoder.set_transformations(png::Transformations::EXPAND);
    decoder.set_ignore_text_chunk(true);
    let header = decoder.read_header_info().map_err(problem)?;
    let (width, height) = header.size();
    check_pixels(width.into(), height.into())?;
    let mut reader = decoder.read_info().map_err(problem)?;
    let orientation = reader.info().exif_metadata.as_deref().map_or_else(Orientation::default, Orientation::of_exif);
    let (color, depth) = reader.output_color_type();
    let size = reader.output_buffer_size().filter(|&size| size <= MAX_DECODED_BYTES);
    let Some(size) = size else { return Err(MediaProblem::TooManyPixels { width: width.into(), height: height.into() }) };
    let mut pixels = vec![0; size];
    reader.next_frame(&mut pixels).map_err(problem)?;
    if depth == png::BitDepth::Sixteen {
        pack(&mut pixels, |&[upper, _]: &[u8; 2]| [upper]);
    }
    Ok((width as usize, height as usize, to_rgb(pixels, color.samples()), orientation))
}

fn webp(bytes: &[u8]) -> Result<Decoded, MediaProblem> {
    let problem = |e| match e {
        image_webp::DecodingError::IoError(e) => read_problem("WebP", &e),
        other => damaged("WebP", other),
    };
    let mut decoder = image_webp::WebPDecoder::new(Cursor::new(bytes)).map_err(problem)?;
    decoder.set_memory_limit(MAX_DECODED_BYTES);
    let (width, height) = decoder.dimensions();
    check_pixels(width.into(), height.into())?;
    // A file whose metadata cannot be read still has its pixels.
    let exif = decoder.exif_metadata().ok().flatten();
    let orientation = exif.as_deref().map_or_else(Orientation::default, Orientation::of_exif);
    let channels = if decoder.has_alpha() { 4 } else { 3 };
    let (width, height) = (width as usize, height as usize);
    let mut pixels = vec![0; width * height * channels];
    decoder.read_image(&mut pixels).map_err(problem)?;
    Ok((width, height, to_rgb(pixels, channels), orientation))
}

/// The first picture, which may cover only a part of the canvas; the rest is transparent.
fn gif(bytes: &[u8]) -> Result<Decoded, MediaProblem> {
    let problem = |e| match e {
        gif::DecodingError::Io(e) => read_problem("GIF", &e),
        other => damaged("GIF", other),
    };
    let mut options = gif::DecodeOptions::new();
    options.set_color_output(gif::ColorOutput::RGBA);
    let mut decoder = options.read_info(Cursor::new(bytes)).map_err(problem)?;
    let (width, height) = (usize::from(decoder.width()), usize::from(decoder.height()));
    check_pixels(width as u64, height as u64)?;
    let Some(frame) = decoder.next_frame_info().map_err(problem)? else {
        return Err(damaged("GIF", "it has no picture"));
    };
    let (left, top) = (usize::from(frame.left), usize::from(frame.top));
    let (frame_width, frame_height) = (usize::from(frame.width), usize::from(frame.height));
    check_pixels(frame_width as u64, frame_height as u64)?;
    let mut part = vec![0; frame_width * frame_height * 4];
    decoder.read_into_buffer(&mut part).map_err(problem)?;
    let mut pixels = vec![0; width * height * 4];
    let visible = frame_width.min(width.saturating_sub(left)) * 4;
    if visible > 0 {
        let rows = pixels.chunks_exact_mut(width * 4).skip(top);
        for (row, part) in rows.zip(part.chunks_exact(frame_width * 4)) {
            row[left * 4..][..visible].copy_from_slice(&part[..visible]);
        }
    }
    Ok((width, height, to_rgb(pixels, 4), Orientation::default()))
}

/// Pixels of 1 to 4 channels of 8 bits (grey or colours, with or without transparency) as colours on white.
fn to_rgb(mut pixels: Vec<u8>, channels: usize) -> Vec<u8> {
    match channels {
        1 => return grey_to_rgb(&pixels),
        2 => pixels = pixels.chunks_exact(2).flat_map(|p| [over_white(p[0], p[1]); 3]).collect(),
        4 => pack(&mut pixels, |p: &[u8; 4]| [over_white(p[0], p[3]), over_white(p[1], p[3]), over_white(p[2], p[3])]),
        _ => {}
    }
    pixels
}

/// Replaces each `N` bytes by `M` fewer ones, in place.
pub(super) fn pack<const N: usize, const M: usize>(bytes: &mut Vec<u8>, of: impl Fn(&[u8; N]) -> [u8; M]) {
    assert!(M <= N);
    let count = bytes.len() / N;
    for i in 0..count {
        let (from, to) = (i * N, i * M);
        let Some(group) = bytes[from..].first_chunk::<N>() else { break };
        let new = of(group);
        bytes[to..to + M].copy_from_slice(&new);
    }
    bytes.truncate(count * M);
}

pub(super) fn grey_to_rgb(pixels: &[u8]) -> Vec<u8> {
    pixels.iter().flat_map(|&level| [level; 3]).collect()
}

/// A level that covers white by `alpha`: the rounding of Pillow, which has seven bits more than the result.
fn over_white(level: u8, alpha: u8) -> u8 {
    let (level, alpha) = (u32::from(level), u32::from(alpha));
    let sum = (level * alpha + 255 * (255 - alpha)) * 128 + (128 << 7);
    ((((sum >> 8) + sum) >> 8) >> 7) as u8
}

/// What a failure to read bytes that are in memory means: the file ends too early.
fn read_problem(format: &'static str, error: &io::Error) -> MediaProblem {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => MediaProblem::Truncated { format, content: "image" },
        _ => damaged(format, error),
    }
}

fn damaged(format: &'static str, reason: impl fmt::Display) -> MediaProblem {
    MediaProblem::Damaged { format, reason: reason.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transparency_lies_on_white() {
        for level in [0, 1, 77, 200, 255] {
            assert_eq!(over_white(level, 255), level);
            assert_eq!(over_white(level, 0), 255);
            let half = f64::from(level) * 128.0 / 255.0 + 127.0;
            assert!((f64::from(over_white(level, 128)) - half).abs() <= 0.51, "{level}");
        }
    }

    #[test]
    fn packing_keeps_the_order_and_drops_a_rest() {
        let mut bytes = vec![1, 2, 3, 4, 5, 6, 7];
        pack(&mut bytes, |p: &[u8; 3]| [p[2], p[0]]);
        assert_eq!(bytes, [3, 1, 6, 4]);
    }
}

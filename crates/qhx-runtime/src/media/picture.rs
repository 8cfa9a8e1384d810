//! Decoding images to rows of red, green and blue.
//!
//! What comes out is what the image's maker meant to be seen, in 8 bits:
//! - turned upright, where the file says how it was held (EXIF orientation);
//! - transparency lies on white, by the arithmetic of Pillow's `alpha_composite`;
//! - 16-bit channels give their upper byte (Pillow does so for colours; 16-bit grey it would clip at 255, which leaves white);
//! - of animations, the first picture.
//!
//! Colour profiles are not applied: the models' makers did not, either.

use super::{MAX_IMAGE_BYTES, MAX_PIXELS, MAX_SIDE, MediaError, MediaProblem, file, jpeg, sniff::ImageFormat};
use image::{
    ColorType, DynamicImage, ImageDecoder, ImageError, Limits, RgbImage,
    codecs::{gif::GifDecoder, png::PngDecoder, webp::WebPDecoder},
    metadata::Orientation,
};
use std::{
    fmt,
    io::{self, Cursor},
    path::Path,
};

/// A decoded image: rows from top to bottom, each pixel red, green, blue.
#[derive(Clone, PartialEq, Eq)]
pub struct Picture {
    width: usize,
    height: usize,
    rgb: Vec<u8>,
}

impl Picture {
    /// Decodes an image file.
    pub fn open(path: &Path) -> Result<Self, MediaError> {
        file::read(path, MAX_IMAGE_BYTES).and_then(|bytes| decode(&bytes)).map_err(|p| p.of_file(path))
    }

    /// Decodes the bytes of an image file. `name` is for errors.
    pub fn decode(name: &str, bytes: &[u8]) -> Result<Self, MediaError> {
        file::check_length(bytes, MAX_IMAGE_BYTES).and_then(|()| decode(bytes)).map_err(|p| p.of(name))
    }

    /// A picture of pixels that are there already. `name` is for errors.
    pub fn from_rgb(name: &str, width: usize, height: usize, rgb: Vec<u8>) -> Result<Self, MediaError> {
        let (w, h) = (width as u64, height as u64);
        check_pixels(w, h).map_err(|p| p.of(name))?;
        match rgb.len() {
            found if found as u64 == w * h * 3 => Ok(Self { width, height, rgb }),
            found => Err(MediaProblem::WrongBytes { width: w, height: h, found }.of(name)),
        }
    }

    /// Columns of pixels.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Rows of pixels.
    pub fn height(&self) -> usize {
        self.height
    }

    /// The pixels, `height · width · 3` bytes.
    pub fn rgb(&self) -> &[u8] {
        &self.rgb
    }
}

impl fmt::Debug for Picture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Picture({} x {})", self.width, self.height)
    }
}

/// An error unless there are pixels, and not too many. To be asked before anything is allocated for them.
pub(super) fn check_pixels(width: u64, height: u64) -> Result<(), MediaProblem> {
    match width.saturating_mul(height) {
        0 => Err(MediaProblem::NoPixels { width, height }),
        1..=MAX_PIXELS if width.max(height) > MAX_SIDE => Err(MediaProblem::SideTooLong { width, height }),
        1..=MAX_PIXELS => Ok(()),
        _ => Err(MediaProblem::TooManyPixels { width, height }),
    }
}

fn decode(bytes: &[u8]) -> Result<Picture, MediaProblem> {
    let format = ImageFormat::of(bytes)?;
    let problem = |e| problem(format, e);
    let input = Cursor::new(bytes);
    let (width, height, rgb, orientation) = match format {
        ImageFormat::Jpeg => jpeg::decode(bytes)?,
        ImageFormat::Png => read(format, PngDecoder::with_limits(input, limits()).map_err(problem)?)?,
        ImageFormat::WebP => read(format, WebPDecoder::new(input).map_err(problem)?)?,
        ImageFormat::Gif => read(format, GifDecoder::new(input).map_err(problem)?)?,
    };
    Ok(upright(width, height, rgb, orientation))
}

/// The most that a decoder may allocate.
fn limits() -> Limits {
    let mut limits = Limits::no_limits();
    limits.max_alloc = Some(MAX_PIXELS * 6);
    limits
}

fn read(format: ImageFormat, mut decoder: impl ImageDecoder) -> Result<(u32, u32, Vec<u8>, Orientation), MediaProblem> {
    let problem = |e| problem(format, e);
    let (width, height) = decoder.dimensions();
    check_pixels(width.into(), height.into())?;
    decoder.set_limits(limits()).map_err(problem)?;
    // A file whose orientation cannot be read still has its pixels.
    let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
    let color = decoder.color_type();
    if decoder.total_bytes() > MAX_PIXELS * 6 {
        return Err(MediaProblem::TooManyPixels { width: width.into(), height: height.into() });
    }
    let mut pixels = vec![0; decoder.total_bytes() as usize];
    decoder.read_image(&mut pixels).map_err(problem)?;
    Ok((width, height, to_rgb(pixels, color, format)?, orientation))
}

fn to_rgb(mut pixels: Vec<u8>, color: ColorType, format: ImageFormat) -> Result<Vec<u8>, MediaProblem> {
    match color {
        ColorType::L8 | ColorType::La8 | ColorType::Rgb8 | ColorType::Rgba8 => {}
        ColorType::L16 | ColorType::La16 | ColorType::Rgb16 | ColorType::Rgba16 => {
            let upper = if cfg!(target_endian = "little") { 1 } else { 0 };
            pack(&mut pixels, |two: &[u8; 2]| [two[upper]]);
        }
        other => return Err(MediaProblem::Unsupported { format: format.name(), reason: format!("its pixels are {other:?}") }),
    }
    match color.channel_count() {
        1 => return Ok(grey_to_rgb(&pixels)),
        2 => pixels = pixels.chunks_exact(2).flat_map(|p| [over_white(p[0], p[1]); 3]).collect(),
        4 => pack(&mut pixels, |p: &[u8; 4]| [over_white(p[0], p[3]), over_white(p[1], p[3]), over_white(p[2], p[3])]),
        _ => {}
    }
    Ok(pixels)
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

fn upright(width: u32, height: u32, rgb: Vec<u8>, orientation: Orientation) -> Picture {
    let whole = |width: u32, height: u32, rgb| Picture { width: width as usize, height: height as usize, rgb };
    if orientation == Orientation::NoTransforms {
        return whole(width, height, rgb);
    }
    let buffer = RgbImage::from_raw(width, height, rgb).expect("decoders give as many bytes as they say");
    let mut image = DynamicImage::ImageRgb8(buffer);
    image.apply_orientation(orientation);
    whole(image.width(), image.height(), image.into_bytes())
}

/// What a decoder's error means to the file's owner.
fn problem(format: ImageFormat, error: ImageError) -> MediaProblem {
    let format = format.name();
    match error {
        ImageError::IoError(e) if e.kind() == io::ErrorKind::UnexpectedEof => MediaProblem::Truncated { format, content: "image" },
        ImageError::Unsupported(e) => MediaProblem::Unsupported { format, reason: e.to_string() },
        other => MediaProblem::Damaged { format, reason: other.to_string() },
    }
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

    #[test]
    fn pixels_are_counted_before_they_are_decoded() {
        assert!(check_pixels(MAX_SIDE, MAX_PIXELS / MAX_SIDE).is_ok());
        assert!(matches!(check_pixels(MAX_SIDE, MAX_PIXELS / MAX_SIDE + 1), Err(MediaProblem::TooManyPixels { .. })));
        assert!(matches!(check_pixels(MAX_SIDE + 1, 1), Err(MediaProblem::SideTooLong { .. })));
        assert!(matches!(check_pixels(u64::MAX, u64::MAX), Err(MediaProblem::TooManyPixels { .. })));
        assert!(matches!(check_pixels(0, 5), Err(MediaProblem::NoPixels { .. })));
        let error = check_pixels(65535, 65535).expect_err("too many").to_string();
        assert!(error.starts_with("says that it is 65535 x 65535: 4294 million pixels, and at most 178 million"), "{error}");
        assert!(Picture::from_rgb("p", 2, 2, vec![0; 11]).is_err());
    }
}

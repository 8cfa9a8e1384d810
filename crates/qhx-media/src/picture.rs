//! A picture: rows of red, green and blue.

use super::{MAX_IMAGE_BYTES, MAX_PIXELS, MAX_SIDE, MediaError, MediaProblem, file};
use std::{fmt, path::Path};

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

#[cfg(feature = "image")]
fn decode(bytes: &[u8]) -> Result<Picture, MediaProblem> {
    let (width, height, rgb) = crate::image_file::decode(bytes)?;
    Ok(Picture { width, height, rgb })
}

/// Says what the file is, since that is all this build can do with it.
#[cfg(not(feature = "image"))]
fn decode(bytes: &[u8]) -> Result<Picture, MediaProblem> {
    crate::sniff::ImageFormat::of(bytes)?;
    Err(MediaProblem::NotBuilt { content: "image" })
}

#[cfg(test)]
mod tests {
    use super::*;

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

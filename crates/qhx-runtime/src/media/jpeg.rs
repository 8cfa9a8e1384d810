//! JPEG files: the one format with its own colour models and with readers that take half a file for a whole one.

use super::{MediaProblem, picture};
use image::metadata::Orientation;
use zune_jpeg::{
    JpegDecoder,
    errors::DecodeErrors,
    zune_core::{bytestream::ZCursor, colorspace::ColorSpace, options::DecoderOptions},
};

const FORMAT: &str = "JPEG";

/// Width, height, RGB bytes and how the camera was held.
pub(super) fn decode(bytes: &[u8]) -> Result<(u32, u32, Vec<u8>, Orientation), MediaProblem> {
    let structure = Structure::of(bytes);
    // Small sins against the standard are common in photos, and forgiven. The size is checked below.
    let options = DecoderOptions::default().set_strict_mode(false).set_max_width(usize::MAX).set_max_height(usize::MAX);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options);
    decoder.decode_headers().map_err(|e| problem(&structure, e))?;
    let (Some((width, height)), Some(found)) = (decoder.dimensions(), decoder.input_colorspace()) else {
        return Err(MediaProblem::Damaged { format: FORMAT, reason: "it has no header of an image".into() });
    };
    picture::check_pixels(width as u64, height as u64)?;
    // The decoder fills what is missing with grey; nobody wants to be told what is in that.
    if !structure.complete {
        return Err(MediaProblem::Truncated { format: FORMAT, content: "image" });
    }
    let orientation = decoder.exif().and_then(|exif| Orientation::from_exif_chunk(exif)).unwrap_or(Orientation::NoTransforms);
    // Ink is asked for as it is stored: only the Adobe mark tells whether 255 means full or none.
    let wanted = match found {
        ColorSpace::Luma | ColorSpace::CMYK => found,
        _ => ColorSpace::RGB,
    };
    decoder.set_options(options.jpeg_set_out_colorspace(wanted));
    let mut pixels = decoder.decode().map_err(|e| problem(&structure, e))?;
    if pixels.len() != width * height * wanted.num_components() {
        return Err(MediaProblem::Damaged { format: FORMAT, reason: format!("it decodes to {} bytes", pixels.len()) });
    }
    match wanted {
        ColorSpace::Luma => pixels = picture::grey_to_rgb(&pixels),
        ColorSpace::CMYK => {
            let flip = if structure.adobe { 0 } else { 255 };
            picture::pack(&mut pixels, |ink: &[u8; 4]| [0, 1, 2].map(|i| dim(ink[i] ^ flip, ink[3] ^ flip)));
        }
        _ => {}
    }
    // At most 65535 each: the format has no more digits.
    Ok((width as u32, height as u32, pixels, orientation))
}

/// The share of light that passes both an ink and black, each given as the light it lets through; rounded as Pillow does.
fn dim(light: u8, black: u8) -> u8 {
    let product = u32::from(255 - light) * u32::from(black) + 128;
    black.saturating_sub((((product >> 8) + product) >> 8) as u8)
}

/// What the markers of a file say.
struct Structure {
    /// Adobe's mark is there: inks are stored as the light they let through.
    adobe: bool,
    /// The end mark comes after the image.
    complete: bool,
}

impl Structure {
    fn of(bytes: &[u8]) -> Self {
        let (mut at, mut adobe, mut has_scan) = (2, false, false);
        while let Some(skipped) = bytes.get(at..).and_then(|rest| rest.iter().position(|&b| b == 0xff)) {
            at += skipped;
            match bytes.get(at + 1) {
                None => break,
                Some(0xd9) => return Self { adobe, complete: has_scan },
                Some(0xff) => at += 1,
                // Stuffing inside a scan, restarts, and marks without content.
                Some(0x00 | 0x01 | 0xd0..=0xd8) => at += 2,
                Some(marker) => {
                    let Some(&[high, low]) = bytes.get(at + 2..).and_then(|rest| rest.first_chunk()) else { break };
                    let content = bytes.get(at + 4..).unwrap_or_default();
                    adobe |= *marker == 0xee && content.starts_with(b"Adobe");
                    has_scan |= *marker == 0xda;
                    at += 2 + usize::from(u16::from_be_bytes([high, low])).max(2);
                }
            }
        }
        Self { adobe, complete: false }
    }
}

fn problem(structure: &Structure, error: DecodeErrors) -> MediaProblem {
    match error {
        _ if !structure.complete => MediaProblem::Truncated { format: FORMAT, content: "image" },
        DecodeErrors::Unsupported(what) => MediaProblem::Unsupported { format: FORMAT, reason: format!("{what:?}") },
        other => MediaProblem::Damaged { format: FORMAT, reason: format!("{other:?}") },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_thumbnail_is_not_the_end_of_the_file() {
        // An APP1 segment that holds an end mark, then a scan with stuffing and a restart.
        let file = [
            &[0xff, 0xd8, 0xff, 0xe1, 0, 6, 0xff, 0xd9, 0, 0, 0xff, 0xee, 0, 7][..],
            b"Adobe",
            &[0xff, 0xda, 0, 3, 9, 1, 2, 0xff, 0x00, 3, 0xff, 0xd1, 4, 0xff, 0xd9],
        ]
        .concat();
        let structure = Structure::of(&file);
        assert!(structure.complete && structure.adobe);
        for end in 0..file.len() {
            assert!(!Structure::of(&file[..end]).complete, "{end}");
        }
        assert!(Structure::of(&[&file[..], b"trailing bytes"].concat()).complete);
    }

    #[test]
    fn inks_dim_each_other() {
        assert_eq!([dim(255, 255), dim(0, 255), dim(255, 0), dim(128, 255), dim(255, 77)], [255, 0, 0, 128, 77]);
    }
}

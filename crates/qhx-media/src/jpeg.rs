//! JPEG files: the one format with its own colour models and with readers that take half a file for a whole one.

use super::{
    MediaProblem,
    image_file::{self, Decoded},
    orientation::Orientation,
    picture,
};
use zune_jpeg::{
    JpegDecoder,
    errors::DecodeErrors,
    zune_core::{bytestream::ZCursor, colorspace::ColorSpace, options::DecoderOptions},
};

const FORMAT: &str = "JPEG";

pub(super) fn decode(bytes: &[u8]) -> Result<Decoded, MediaProblem> {
    let complete = is_complete(bytes);
    // Small sins against the standard are common in photos, and forgiven. The size is checked below.
    let options = DecoderOptions::default().set_strict_mode(false).set_max_width(usize::MAX).set_max_height(usize::MAX);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options);
    decoder.decode_headers().map_err(|e| problem(complete, e))?;
    let (Some((width, height)), Some(found)) = (decoder.dimensions(), decoder.input_colorspace()) else {
        return Err(MediaProblem::Damaged { format: FORMAT, reason: "it has no header of an image".into() });
    };
    picture::check_pixels(width as u64, height as u64)?;
    // The decoder fills what is missing with grey; nobody wants to be told what is in that.
    if !complete {
        return Err(MediaProblem::Truncated { format: FORMAT, content: "image" });
    }
    let orientation = decoder.exif().map_or_else(Orientation::default, |exif| Orientation::of_exif(exif));
    // Inks (CMYK, YCCK) become light in the decoder, by Adobe's convention that the numbers are those of light; Pillow knows no other, either.
    let wanted = if found == ColorSpace::Luma { ColorSpace::Luma } else { ColorSpace::RGB };
    decoder.set_options(options.jpeg_set_out_colorspace(wanted));
    let mut pixels = decoder.decode().map_err(|e| problem(complete, e))?;
    if pixels.len() != width * height * wanted.num_components() {
        return Err(MediaProblem::Damaged { format: FORMAT, reason: format!("it decodes to {} bytes", pixels.len()) });
    }
    if wanted == ColorSpace::Luma {
        pixels = image_file::grey_to_rgb(&pixels);
    }
    Ok((width, height, pixels, orientation))
}

/// Whether the end mark comes after an image. Thumbnails inside segments have end marks of their own.
fn is_complete(bytes: &[u8]) -> bool {
    let (mut at, mut has_scan) = (2, false);
    while let Some(skipped) = bytes.get(at..).and_then(|rest| rest.iter().position(|&b| b == 0xff)) {
        at += skipped;
        match bytes.get(at + 1) {
            None => return false,
            Some(0xd9) => return has_scan,
            Some(0xff) => at += 1,
            // Stuffing inside a scan, restarts, and marks without content.
            Some(0x00 | 0x01 | 0xd0..=0xd8) => at += 2,
            Some(marker) => {
                let Some(&length) = bytes.get(at + 2..).and_then(|rest| rest.first_chunk()) else { return false };
                has_scan |= *marker == 0xda;
                at += 2 + usize::from(u16::from_be_bytes(length)).max(2);
            }
        }
    }
    false
}

fn problem(complete: bool, error: DecodeErrors) -> MediaProblem {
    match error {
        _ if !complete => MediaProblem::Truncated { format: FORMAT, content: "image" },
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
        let file =
            [0xff, 0xd8, 0xff, 0xe1, 0, 6, 0xff, 0xd9, 0, 0, 0xff, 0xda, 0, 3, 9, 1, 2, 0xff, 0x00, 3, 0xff, 0xd1, 4, 0xff, 0xff, 0xd9];
        assert!(is_complete(&file));
        assert!((0..file.len()).all(|end| !is_complete(&file[..end])));
        assert!(is_complete(&[&file[..], b"trailing bytes"].concat()));
    }
}

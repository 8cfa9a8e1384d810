//! What a file is, by its first bytes and never by its name.

use super::MediaProblem;

/// Formats of images that are decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ImageFormat {
    Gif,
    Jpeg,
    Png,
    WebP,
}

/// Formats of sounds that are decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SoundFormat {
    Flac,
    Mp3,
    Ogg,
    Wav,
}

impl ImageFormat {
    pub(super) const ALL: &str = "PNG, JPEG, WebP and GIF";

    /// The format of an image file, or what the bytes are instead.
    pub(super) fn of(bytes: &[u8]) -> Result<Self, MediaProblem> {
        if bytes.starts_with(b"\x89PNG\r\n\x1a\n") {
            Ok(Self::Png)
        } else if bytes.starts_with(&[0xff, 0xd8, 0xff]) {
            Ok(Self::Jpeg)
        } else if bytes.starts_with(b"GIF87a") || bytes.starts_with(b"GIF89a") {
            Ok(Self::Gif)
        } else if riff(bytes) == Some(b"WEBP") {
            Ok(Self::WebP)
        } else {
            Err(other(bytes, "an image", Self::ALL))
        }
    }
}

impl SoundFormat {
    pub(super) const ALL: &str = "WAV, FLAC, MP3 and Ogg Vorbis";

    #[cfg(feature = "sound")]
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Flac => "FLAC",
            Self::Mp3 => "MP3",
            Self::Ogg => "Ogg",
            Self::Wav => "WAV",
        }
    }

    /// The format of a sound file, or what the bytes are instead.
    pub(super) fn of(bytes: &[u8]) -> Result<Self, MediaProblem> {
        if riff(bytes) == Some(b"WAVE") {
            Ok(Self::Wav)
        } else if bytes.starts_with(b"fLaC") {
            Ok(Self::Flac)
        } else if bytes.starts_with(b"OggS") {
            Ok(Self::Ogg)
        } else if bytes.starts_with(b"ID3") || starts_with_mpeg_frame(bytes) {
            Ok(Self::Mp3)
        } else {
            Err(other(bytes, "a sound", Self::ALL))
        }
    }
}

/// What a RIFF file holds.
fn riff(bytes: &[u8]) -> Option<&[u8]> {
    bytes.starts_with(b"RIFF").then(|| bytes.get(8..12)).flatten()
}

/// Eleven bits of synchronisation, then an MPEG version, the third layer, a bit rate and a sampling rate that exist.
fn starts_with_mpeg_frame(bytes: &[u8]) -> bool {
    let Some([0xff, second, third]) = bytes.first_chunk() else { return false };
    second & 0xe0 == 0xe0 && second & 0x18 != 0x08 && second & 0x06 == 0x02 && third >> 4 != 0x0f && third & 0x0c != 0x0c
}

/// Formats that people have and that are not decoded: how they start (after a number of bytes), and what they are.
const OTHERS: &[(usize, &[u8], &str)] = &[
    (0, b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (0, &[0xff, 0xd8, 0xff], "a JPEG image"),
    (0, b"GIF8", "a GIF image"),
    (6, b"\0\0\0\0\x36\0\0\0", "a BMP image"),
    (6, b"\0\0\0\0\x8a\0\0\0", "a BMP image"),
    (0, b"II*\0", "a TIFF image"),
    (0, b"MM\0*", "a TIFF image"),
    (4, b"ftypheic", "a HEIC image"),
    (4, b"ftypheix", "a HEIC image"),
    (4, b"ftypmif1", "a HEIF image"),
    (4, b"ftypavif", "an AVIF image"),
    (0, b"<svg", "an SVG drawing"),
    (0, b"%PDF", "a PDF document"),
    (0, b"fLaC", "a FLAC sound"),
    (0, b"OggS", "an Ogg sound"),
    (0, b"ID3", "an MP3 sound"),
    (4, b"ftypM4A", "an M4A (AAC) sound"),
    (4, b"ftyp", "an MP4 file"),
    (0, &[0x1a, 0x45, 0xdf, 0xa3], "a Matroska or WebM file"),
    (0, b"caff", "a CAF sound"),
    (0, b"FORM", "an AIFF sound"),
    (0, b"#!AMR", "an AMR sound"),
    (8, b"WEBP", "a WebP image"),
    (8, b"WAVE", "a WAV sound"),
    (0, b"PK\x03\x04", "a ZIP archive"),
    (0, &[0x1f, 0x8b], "a gzip archive"),
];

fn other(bytes: &[u8], expected: &'static str, formats: &'static str) -> MediaProblem {
    let fits = |(at, start, _): &&(usize, &[u8], &str)| bytes.get(*at..).is_some_and(|rest| rest.starts_with(start));
    let known = OTHERS.iter().find(fits);
    match known {
        Some((_, _, found)) => MediaProblem::OtherFormat { found: (*found).into(), formats },
        None => MediaProblem::Unknown { expected, starts: readable(bytes), formats },
    }
}

/// The first bytes as text where they are text, otherwise as numbers.
fn readable(bytes: &[u8]) -> String {
    let start = &bytes[..bytes.len().min(24)];
    let is_text = start.iter().all(|b| b.is_ascii_graphic() || b.is_ascii_whitespace());
    if is_text {
        format!("the text {:?}", String::from_utf8_lossy(start))
    } else {
        let numbers: Vec<String> = start.iter().take(8).map(|b| format!("{b:02x}")).collect();
        format!("the bytes {}", numbers.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image_text(bytes: &[u8]) -> String {
        ImageFormat::of(bytes).expect_err("no image").to_string()
    }

    #[test]
    fn files_are_known_by_their_first_bytes() {
        assert_eq!(ImageFormat::of(b"\x89PNG\r\n\x1a\n....").expect("known"), ImageFormat::Png);
        assert_eq!(ImageFormat::of(b"RIFF\x10\0\0\0WEBPVP8 ").expect("known"), ImageFormat::WebP);
        assert_eq!(SoundFormat::of(b"RIFF\x10\0\0\0WAVEfmt ").expect("known"), SoundFormat::Wav);
        assert_eq!(SoundFormat::of(&[0xff, 0xfb, 0x90, 0x64]).expect("known"), SoundFormat::Mp3);
        assert!(SoundFormat::of(&[0xff, 0xfe, b'h', 0]).is_err(), "text in UTF-16");
    }

    #[test]
    fn what_is_something_else_is_named() {
        assert_eq!(
            image_text(b"Dear diary, today"),
            "is not an image: it starts with the text \"Dear diary, today\"; PNG, JPEG, WebP and GIF can be read, whatever the file is called"
        );
        assert!(image_text(&[0, 1, 2, 3]).contains("starts with the bytes 00 01 02 03;"));
        assert_eq!(image_text(b"\0\0\0\x18ftypheic"), "is a HEIC image, which is not read; PNG, JPEG, WebP and GIF are");
        assert!(image_text(b"RIFF\x10\0\0\0WAVEfmt ").starts_with("is a WAV sound"));
        assert!(SoundFormat::of(b"\x89PNG\r\n\x1a\n").expect_err("no sound").to_string().starts_with("is a PNG image"));
    }
}

//! How a camera was held, as EXIF metadata says it, and turning pixels upright.

/// The transformation that shows an image upright.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Orientation {
    #[default]
    Upright,
    MirroredHorizontally,
    UpsideDown,
    MirroredVertically,
    Transposed,
    TurnRight,
    Transversed,
    TurnLeft,
}

/// The EXIF tag of the orientation, and the type that its value has: one number of 16 bits.
const TAG: u16 = 0x0112;
const SHORT: u16 = 3;

impl Orientation {
    /// The orientation in an EXIF block (a TIFF header and its first directory). Metadata that is damaged or silent says nothing: upright.
    pub(super) fn of_exif(exif: &[u8]) -> Self {
        Self::find(exif).unwrap_or_default()
    }

    fn find(exif: &[u8]) -> Option<Self> {
        let big_endian = match exif.first_chunk()? {
            [b'I', b'I', 42, 0] => false,
            [b'M', b'M', 0, 42] => true,
            _ => return None,
        };
        let short = |at: usize| {
            let bytes = *exif.get(at..)?.first_chunk()?;
            Some(if big_endian { u16::from_be_bytes(bytes) } else { u16::from_le_bytes(bytes) })
        };
        let long = |at: usize| {
            let bytes = *exif.get(at..)?.first_chunk()?;
            Some(if big_endian { u32::from_be_bytes(bytes) } else { u32::from_le_bytes(bytes) })
        };
        let directory = usize::try_from(long(4)?).ok()?;
        let entries = usize::from(short(directory)?);
        // An entry: tag, type, count, and the value where it fits into four bytes.
        let entry = (0..entries)
            .map(|number| directory + 2 + 12 * number)
            .take_while(|at| at + 12 <= exif.len())
            .find(|&at| short(at) == Some(TAG) && short(at + 2) == Some(SHORT) && long(at + 4) == Some(1))?;
        Some(match short(entry + 8)? {
            1 => Self::Upright,
            2 => Self::MirroredHorizontally,
            3 => Self::UpsideDown,
            4 => Self::MirroredVertically,
            5 => Self::Transposed,
            6 => Self::TurnRight,
            7 => Self::Transversed,
            8 => Self::TurnLeft,
            _ => return None,
        })
    }

    /// The image turned upright: its width, its height and its RGB pixels.
    pub(super) fn apply(self, width: usize, height: usize, rgb: Vec<u8>) -> (usize, usize, Vec<u8>) {
        if self == Self::Upright {
            return (width, height, rgb);
        }
        let swapped = matches!(self, Self::Transposed | Self::TurnRight | Self::Transversed | Self::TurnLeft);
        let (new_width, new_height) = if swapped { (height, width) } else { (width, height) };
        let mut turned = Vec::with_capacity(rgb.len());
        for y in 0..new_height {
            for x in 0..new_width {
                let (from_x, from_y) = match self {
                    Self::Upright => (x, y),
                    Self::MirroredHorizontally => (width - 1 - x, y),
                    Self::UpsideDown => (width - 1 - x, height - 1 - y),
                    Self::MirroredVertically => (x, height - 1 - y),
                    Self::Transposed => (y, x),
                    Self::TurnRight => (y, height - 1 - x),
                    Self::Transversed => (width - 1 - y, height - 1 - x),
                    Self::TurnLeft => (width - 1 - y, x),
                };
                turned.extend_from_slice(&rgb[(from_y * width + from_x) * 3..][..3]);
            }
        }
        (new_width, new_height, turned)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An EXIF block in either byte order whose second entry is the orientation.
    fn exif(orientation: u16, big_endian: bool) -> Vec<u8> {
        let short = |n: u16| if big_endian { n.to_be_bytes() } else { n.to_le_bytes() };
        let long = |n: u32| if big_endian { n.to_be_bytes() } else { n.to_le_bytes() };
        let mut block = if big_endian { b"MM\0\x2a".to_vec() } else { b"II\x2a\0".to_vec() };
        block.extend(long(8));
        block.extend(short(2));
        for (tag, value) in [(0x0100, 7), (TAG, orientation)] {
            block.extend([short(tag), short(SHORT)].concat());
            block.extend(long(1));
            block.extend([short(value), short(0)].concat());
        }
        block
    }

    #[test]
    fn both_byte_orders_are_read_and_damage_says_nothing() {
        for big_endian in [false, true] {
            let whole = exif(6, big_endian);
            assert_eq!(Orientation::of_exif(&whole), Orientation::TurnRight);
            for end in 0..whole.len() {
                assert_eq!(Orientation::of_exif(&whole[..end]), Orientation::Upright, "cut at {end}");
            }
            for unknown in [0, 9, u16::MAX] {
                assert_eq!(Orientation::of_exif(&exif(unknown, big_endian)), Orientation::Upright);
            }
        }
        assert_eq!(Orientation::of_exif(b"II\x2a\0\xff\xff\xff\xff"), Orientation::Upright, "a directory beyond the end");
    }

    #[test]
    fn turning_moves_the_corners() {
        // a b c
        // d e f
        let image: Vec<u8> = b"abcdef".iter().flat_map(|&pixel| [pixel; 3]).collect();
        let turned = |number: u16| {
            let (width, height, rgb) = Orientation::of_exif(&exif(number, false)).apply(3, 2, image.clone());
            assert_eq!(rgb.len(), width * height * 3);
            let rows: Vec<String> = rgb.chunks(width * 3).map(|row| row.chunks(3).map(|pixel| char::from(pixel[0])).collect()).collect();
            rows.join("/")
        };
        let all: Vec<String> = (1..=8).map(turned).collect();
        assert_eq!(all, ["abc/def", "cba/fed", "fed/cba", "def/abc", "ad/be/cf", "da/eb/fc", "fc/eb/da", "cf/be/ad"]);
    }
}

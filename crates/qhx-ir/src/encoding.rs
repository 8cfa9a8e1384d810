//! How weight tensors are stored, with a plain decoder for each encoding.
//!
//! There is one layout for all devices. A tensor of any rank is a stack of **rows** (the last dimension); every row of numbers or quants starts at a
//! multiple of [`ALIGNMENT`] bytes. Quantised tensors store quants, scales and minima separately, as up to three tensors:
//!
//! | stored | content of one row of `n` numbers |
//! |---|---|
//! | `NAME` | the numbers (f32, f16, bf16) or the quants (int8, int6 or int4, packed as [`crate::quants`] says) |
//! | `NAME.scale` | one scale per block (f16 or f32), padded to a multiple of [`SCALES_AT_ONCE`]; for `i8_row` the whole tensor is one f32 per row, unpadded |
//! | `NAME.min` | one minimum per block, in the scale's type; only where the encoding has minima |
//!
//! The last block of a row may be partial: its quants are stored in full (the surplus has no meaning).
//!
//! | quants | value |
//! |---|---|
//! | int8 (signed) | `q · scale`, or `q · scale + min` |
//! | int6 (0..=63) | `(q − 32) · scale` |
//! | int4 (0..=15) | `(q − 8) · scale`, or `q · scale + min` |

use crate::{
    bytes::{ALIGNMENT, AlignedBytes, Bytes},
    quants::Quants,
};
use half::{bf16, f16};
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// Block scales and minima are read in vectors of at most this many, so a row of them is padded to a multiple of it. For rows of a few hundred
/// values, padding to whole cache lines would take more space than the scales.
pub const SCALES_AT_ONCE: usize = 16;

/// How a weight tensor is stored. Manifests and programs use its text form (`f16`, `i8_row`, `i4_block32_min`, `i8_block16/f32` …).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Encoding {
    /// 32-bit floats.
    F32,
    /// 16-bit IEEE floats.
    F16,
    /// 16-bit brain floats.
    Bf16,
    /// int8, symmetric, one f32 scale per row.
    I8Row,
    /// int8, int6 or int4 with a scale and optionally a minimum per block.
    Block(BlockEncoding),
}

/// A block-quantised form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockEncoding {
    /// int8, int6 or int4.
    pub quants: Quants,
    /// Values per scale: 16 or 32.
    pub block: usize,
    /// Whether each block has a minimum that is added.
    pub min: bool,
    /// The type of scales and minima.
    pub scale: ScaleType,
}

/// The type of block scales and minima.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ScaleType {
    /// 16-bit IEEE floats.
    F16,
    /// 32-bit floats (products such as GGUF's super-block scales are exact only here).
    F32,
}

impl ScaleType {
    /// Bytes of one scale.
    pub fn bytes(self) -> usize {
        match self {
            Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

impl Encoding {
    /// int8 blocks of 32 with f16 scales.
    pub const I8_BLOCK32: Self = Self::Block(BlockEncoding { quants: Quants::I8, block: 32, min: false, scale: ScaleType::F16 });
    /// int6 blocks of 32 with f16 scales: 6.5 bits a number.
    pub const I6_BLOCK32: Self = Self::Block(BlockEncoding { quants: Quants::I6, block: 32, min: false, scale: ScaleType::F16 });
    /// int4 blocks of 32 with f16 scales.
    pub const I4_BLOCK32: Self = Self::Block(BlockEncoding { quants: Quants::I4, block: 32, min: false, scale: ScaleType::F16 });
    /// int4 blocks of 32 with f16 scales and minima.
    pub const I4_BLOCK32_MIN: Self = Self::Block(BlockEncoding { quants: Quants::I4, block: 32, min: true, scale: ScaleType::F16 });

    /// Whether the tensor is stored as plain floats.
    pub fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::Bf16)
    }

    /// All encodings, for tests and tables.
    pub fn all() -> Vec<Self> {
        let mut all = vec![Self::F32, Self::F16, Self::Bf16, Self::I8Row];
        for (quants, block) in [(Quants::I8, 32), (Quants::I8, 16), (Quants::I4, 32)] {
            for min in [false, true] {
                for scale in [ScaleType::F16, ScaleType::F32] {
                    all.push(Self::Block(BlockEncoding { quants, block, min, scale }));
                }
            }
        }
        all.push(Self::I6_BLOCK32);
        all
    }

    /// Bytes of one row of `columns` values in each stored tensor, including padding. `None` on overflow.
    pub fn row_bytes(self, columns: usize) -> Option<RowBytes> {
        let pad = |bytes: usize| bytes.checked_next_multiple_of(ALIGNMENT);
        Some(match self {
            Self::F32 => RowBytes { data: pad(columns.checked_mul(4)?)?, scale: 0, min: 0 },
            Self::F16 | Self::Bf16 => RowBytes { data: pad(columns.checked_mul(2)?)?, scale: 0, min: 0 },
            Self::I8Row => RowBytes { data: pad(columns)?, scale: 4, min: 0 },
            Self::Block(b) => {
                let data = b.quants.row_bytes(columns, b.block)?;
                let scale = columns.div_ceil(b.block).checked_next_multiple_of(SCALES_AT_ONCE)?.checked_mul(b.scale.bytes())?;
                RowBytes { data: pad(data)?, scale, min: if b.min { scale } else { 0 } }
            }
        })
    }
}

/// Bytes that one row takes in the stored tensors `NAME`, `NAME.scale` and `NAME.min`; 0 where there is no such tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowBytes {
    /// In `NAME`.
    pub data: usize,
    /// In `NAME.scale`.
    pub scale: usize,
    /// In `NAME.min`.
    pub min: usize,
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::F32 => f.write_str("f32"),
            Self::F16 => f.write_str("f16"),
            Self::Bf16 => f.write_str("bf16"),
            Self::I8Row => f.write_str("i8_row"),
            Self::Block(b) => {
                let quants = match b.quants {
                    Quants::I8 => "i8",
                    Quants::I6 => "i6",
                    Quants::I4 => "i4",
                };
                write!(f, "{quants}_block{}{}", b.block, if b.min { "_min" } else { "" })?;
                match b.scale {
                    ScaleType::F16 => Ok(()),
                    ScaleType::F32 => f.write_str("/f32"),
                }
            }
        }
    }
}

impl FromStr for Encoding {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        Self::all().into_iter().find(|e| e.to_string() == text).ok_or_else(|| {
            let names: Vec<_> = Self::all().iter().map(Self::to_string).collect();
            format!("unknown weight encoding `{text}`; expected one of {}", names.join(", "))
        })
    }
}

impl Serialize for Encoding {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Encoding {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
    }
}

/// A weight tensor in memory, in the common layout. Lengths are checked on creation, so row access cannot fail.
#[derive(Clone, Debug)]
pub struct WeightTensor {
    encoding: Encoding,
    shape: Vec<usize>,
    row_bytes: RowBytes,
    data: Bytes,
    scale: Option<Bytes>,
    min: Option<Bytes>,
}

impl WeightTensor {
    /// Assembles the stored parts; the error says which part has the wrong length.
    pub fn new(encoding: Encoding, shape: Vec<usize>, data: Bytes, scale: Option<Bytes>, min: Option<Bytes>) -> Result<Self, String> {
        let overflow = || format!("a tensor of shape {shape:?} is too large");
        let columns = *shape.last().ok_or("a weight needs at least one dimension")?;
        let rows = shape[..shape.len() - 1].iter().try_fold(1usize, |n, &d| n.checked_mul(d)).ok_or_else(overflow)?;
        let row_bytes = encoding.row_bytes(columns).ok_or_else(overflow)?;
        let parts =
            [("data", row_bytes.data, Some(&data)), ("scale", row_bytes.scale, scale.as_ref()), ("min", row_bytes.min, min.as_ref())];
        for (part, per_row, bytes) in parts {
            let expected = rows.checked_mul(per_row).ok_or_else(overflow)?;
            match bytes {
                Some(bytes) if bytes.len() != expected || per_row == 0 => {
                    return Err(format!(
                        "{part} of a {encoding} tensor of shape {shape:?} must have {expected} bytes, found {}",
                        bytes.len()
                    ));
                }
                None if per_row != 0 => return Err(format!("a {encoding} tensor needs its `.{part}` tensor")),
                _ => {}
            }
            if bytes.is_some_and(|b| b.as_ptr() as usize % 4 != 0) {
                return Err(format!("{part} is not aligned to 4 bytes"));
            }
        }
        Ok(Self { encoding, shape, row_bytes, data, scale, min })
    }

    /// An f32 tensor with a copy of `values` (rows padded as the layout requires).
    pub fn from_f32(shape: &[usize], values: &[f32]) -> Result<Self, String> {
        let columns = *shape.last().ok_or("a weight needs at least one dimension")?;
        let row_bytes = Encoding::F32.row_bytes(columns).ok_or("the tensor is too large")?.data;
        let rows = values.len().checked_div(columns).unwrap_or(0);
        let mut data = AlignedBytes::zeroed(rows * row_bytes);
        for (row, values) in values.chunks_exact(columns.max(1)).enumerate() {
            data.as_mut()[row * row_bytes..][..columns * 4].copy_from_slice(bytemuck::cast_slice(values));
        }
        Self::new(Encoding::F32, shape.to_vec(), data.into(), None, None)
    }

    /// One of the matrices of a tensor of rank 3, or of the rows of one of rank 2, without a copy; none where there is no such part.
    pub fn part(&self, number: usize) -> Option<Self> {
        let (&count, shape) = self.shape.split_first().filter(|(_, shape)| !shape.is_empty())?;
        let rows: usize = shape[..shape.len() - 1].iter().product();
        let part = |bytes: &Bytes, per_row: usize| bytes.slice(number * rows * per_row..(number + 1) * rows * per_row);
        let RowBytes { data, scale, min, .. } = self.row_bytes;
        if number >= count {
            return None;
        }
        // Lengths were checked when the tensor was made.
        let optional = |bytes: &Option<Bytes>, per_row| bytes.as_ref().and_then(|bytes| part(bytes, per_row));
        let (data, scale, min) = (part(&self.data, data)?, optional(&self.scale, scale), optional(&self.min, min));
        Some(Self { shape: shape.to_vec(), data, scale, min, ..self.clone() })
    }

    /// Tensors of one encoding and shape as the parts of one whose rank is higher by one, copied.
    pub fn stacked(parts: &[Self]) -> Result<Self, String> {
        let first = parts.first().ok_or("there is nothing to stack")?;
        let (encoding, shape) = (first.encoding, &first.shape);
        if let Some(other) = parts.iter().find(|other| other.encoding != encoding || other.shape != *shape) {
            return Err(format!("{} {:?} does not fit {encoding} {shape:?}", other.encoding, other.shape));
        }
        let join = |bytes_of: fn(&Self) -> &[u8]| {
            let bytes = parts.iter().map(|part| bytes_of(part).len()).sum();
            let (mut joined, mut at) = (AlignedBytes::zeroed(bytes), 0);
            for part in parts.iter().map(bytes_of) {
                joined.as_mut()[at..at + part.len()].copy_from_slice(part);
                at += part.len();
            }
            (bytes > 0).then(|| Bytes::from(joined))
        };
        let data = join(Self::data).unwrap_or_else(|| AlignedBytes::zeroed(0).into());
        Self::new(encoding, [&[parts.len()][..], shape].concat(), data, join(Self::scale), join(Self::min))
    }

    /// The encoding.
    pub fn encoding(&self) -> Encoding {
        self.encoding
    }

    /// The logical shape, without padding.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Length of a row: the last dimension.
    pub fn columns(&self) -> usize {
        self.shape.last().copied().unwrap_or(0)
    }

    /// Number of rows: the product of all dimensions except the last.
    pub fn rows(&self) -> usize {
        self.shape[..self.shape.len().saturating_sub(1)].iter().product()
    }

    /// Bytes of a row in each stored tensor.
    pub fn row_bytes(&self) -> RowBytes {
        self.row_bytes
    }

    /// All stored bytes: data, scales and minima.
    pub fn stored_bytes(&self) -> usize {
        self.rows() * (self.row_bytes.data + self.row_bytes.scale + self.row_bytes.min)
    }

    /// The values or quants, row by row.
    pub fn data(&self) -> &[u8] {
        &self.data
    }

    /// The scales (empty for floats).
    pub fn scale(&self) -> &[u8] {
        self.scale.as_deref().unwrap_or(&[])
    }

    /// The minima (empty where the encoding has none).
    pub fn min(&self) -> &[u8] {
        self.min.as_deref().unwrap_or(&[])
    }

    /// Decodes row `row` into `out`, which has `columns` elements. Simple rather than fast; devices have faster decoders.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.columns(), "decode_row needs room for exactly one row");
        let bytes = &self.data()[row * self.row_bytes.data..][..self.row_bytes.data];
        match self.encoding {
            Encoding::F32 => out.copy_from_slice(&bytemuck::cast_slice(bytes)[..out.len()]),
            Encoding::F16 => out.iter_mut().zip(bytemuck::cast_slice::<u8, f16>(bytes)).for_each(|(o, v)| *o = v.to_f32()),
            Encoding::Bf16 => out.iter_mut().zip(bytemuck::cast_slice::<u8, bf16>(bytes)).for_each(|(o, v)| *o = v.to_f32()),
            Encoding::I8Row => {
                let scale = bytemuck::cast_slice::<u8, f32>(self.scale())[row];
                out.iter_mut().zip(bytes).for_each(|(o, &q)| *o = q as i8 as f32 * scale);
            }
            Encoding::Block(b) => {
                for (i, o) in out.iter_mut().enumerate() {
                    let scale = self.block_number(self.scale(), self.row_bytes.scale, b.scale, row, i / b.block);
                    let min = if b.min { self.block_number(self.min(), self.row_bytes.min, b.scale, row, i / b.block) } else { 0.0 };
                    *o = self.quant(row, i) as f32 * scale + min;
                }
            }
        }
    }

    /// The integer at `row` and `column` that is multiplied by its scale: as stored, or without minima minus [`Quants::zero`]; 0 for floats.
    pub fn quant(&self, row: usize, column: usize) -> i32 {
        let bytes = &self.data()[row * self.row_bytes.data..][..self.row_bytes.data];
        match self.encoding {
            Encoding::I8Row => bytes[column] as i8 as i32,
            Encoding::Block(b) => b.quants.get(bytes, column) - if b.min { 0 } else { b.quants.zero() },
            _ => 0,
        }
    }

    /// The scale at `row` and `column` (1 for floats).
    pub fn scale_at(&self, row: usize, column: usize) -> f32 {
        match self.encoding {
            Encoding::I8Row => bytemuck::cast_slice::<u8, f32>(self.scale())[row],
            Encoding::Block(b) => self.block_number(self.scale(), self.row_bytes.scale, b.scale, row, column / b.block),
            _ => 1.0,
        }
    }

    /// The minimum at `row` and `column` (0 where there is none).
    pub fn min_at(&self, row: usize, column: usize) -> f32 {
        match self.encoding {
            Encoding::Block(b) if b.min => self.block_number(self.min(), self.row_bytes.min, b.scale, row, column / b.block),
            _ => 0.0,
        }
    }

    fn block_number(&self, bytes: &[u8], row_bytes: usize, kind: ScaleType, row: usize, block: usize) -> f32 {
        let row = &bytes[row * row_bytes..][..row_bytes];
        match kind {
            ScaleType::F16 => bytemuck::cast_slice::<u8, f16>(row)[block].to_f32(),
            ScaleType::F32 => bytemuck::cast_slice::<u8, f32>(row)[block],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for encoding in Encoding::all() {
            assert_eq!(encoding.to_string().parse::<Encoding>().unwrap(), encoding);
        }
        assert_eq!(Encoding::I6_BLOCK32.to_string(), "i6_block32");
        assert!("i4_block16".parse::<Encoding>().unwrap_err().contains("expected one of"));
    }

    #[test]
    fn rows_are_padded_and_sizes_checked() {
        assert_eq!(Encoding::I4_BLOCK32_MIN.row_bytes(576).unwrap(), RowBytes { data: 320, scale: 64, min: 64 });
        assert_eq!(
            Encoding::I4_BLOCK32.row_bytes(448).unwrap(),
            RowBytes { data: 256, scale: 32, min: 0 },
            "14 scales and padding for two"
        );
        assert_eq!(Encoding::I6_BLOCK32.row_bytes(576).unwrap(), RowBytes { data: 448, scale: 64, min: 0 }, "18 blocks of 24 bytes");
        assert_eq!("i8_block16_min/f32".parse::<Encoding>().unwrap().row_bytes(272).unwrap(), RowBytes { data: 320, scale: 128, min: 128 });
        assert_eq!(Encoding::F32.row_bytes(1).unwrap().data, 64);
        assert!(Encoding::F32.row_bytes(usize::MAX / 2).is_none());
        let short = WeightTensor::new(Encoding::F16, vec![2, 3], AlignedBytes::zeroed(64).into(), None, None);
        assert!(short.unwrap_err().contains("must have 128 bytes, found 64"));
        let bare = WeightTensor::new(Encoding::I8Row, vec![2, 3], AlignedBytes::zeroed(128).into(), None, None);
        assert!(bare.unwrap_err().contains(".scale"));
    }

    #[test]
    fn quants_without_minima_are_shifted() {
        for (encoding, high) in [(Encoding::I4_BLOCK32, 15), (Encoding::I6_BLOCK32, 63)] {
            let Encoding::Block(BlockEncoding { quants, .. }) = encoding else { unreachable!("a block encoding") };
            let mut data = AlignedBytes::zeroed(64);
            quants.put(data.as_mut(), 0, high);
            quants.put(data.as_mut(), 16, 2);
            let mut scale = AlignedBytes::zeroed(32);
            scale.as_mut()[..2].copy_from_slice(&f16::from_f32(0.5).to_le_bytes());
            let w = WeightTensor::new(encoding, vec![1, 32], data.into(), Some(scale.into()), None).unwrap();
            let mut row = [0.0; 32];
            w.decode_row(0, &mut row);
            let zero = quants.zero() as f32;
            assert_eq!((row[0], row[16], row[1]), ((high as f32 - zero) / 2.0, (2.0 - zero) / 2.0, -zero / 2.0));
        }
    }
}

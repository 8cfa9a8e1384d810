//! From f32 rows to the stored form of each encoding.
//!
//! int8 rows: `scale = amax / 127`, nearest integer. int4 and int6 blocks: the scale is the number of largest magnitude over −8 or −32, so that this number is met exactly; with
//! minima, the block's range over 15. A block's scale is rounded to its stored type first and the quants are chosen for the rounded one.
//! Where all blocks of a row share one scale, it is the row's largest magnitude over 7 or 31.

use half::{bf16, f16};
use qhx_ir::{BlockEncoding, Encoding, Quants, RowBytes, ScaleType};

/// Which numbers share a scale, where an encoding has blocks without minima.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scales {
    /// Those of a block.
    Block,
    /// Those of a row: all its blocks have the same.
    Row,
}

/// Some rows in stored form: the bytes of `NAME`, `NAME.scale` and `NAME.min`, padding included.
#[derive(Debug, Default, PartialEq)]
pub struct EncodedRows {
    /// Numbers or quants.
    pub data: Vec<u8>,
    /// Scales.
    pub scale: Vec<u8>,
    /// Minima.
    pub min: Vec<u8>,
}

impl EncodedRows {
    /// Room for `rows` rows, all zero.
    pub fn zeroed(row_bytes: RowBytes, rows: usize) -> Self {
        Self { data: vec![0; row_bytes.data * rows], scale: vec![0; row_bytes.scale * rows], min: vec![0; row_bytes.min * rows] }
    }

    /// Adds the rows that follow.
    pub fn add(&mut self, rows: &Self) {
        self.data.extend_from_slice(&rows.data);
        self.scale.extend_from_slice(&rows.scale);
        self.min.extend_from_slice(&rows.min);
    }

    /// Rows that were encoded apart, one after the other.
    pub fn concat(parts: Vec<Self>) -> Self {
        let mut parts = parts.into_iter();
        let mut all = parts.next().unwrap_or_default();
        parts.for_each(|part| all.add(&part));
        all
    }
}

/// Encodes `values`, a whole number of rows of `columns`, whose stored form has `row_bytes` per row.
pub fn encode(encoding: Encoding, scales: Scales, columns: usize, row_bytes: RowBytes, values: &[f32]) -> EncodedRows {
    let rows = values.len() / columns;
    let mut out = EncodedRows::zeroed(row_bytes, rows);
    for (i, values) in values.chunks_exact(columns).enumerate() {
        let data = &mut out.data[i * row_bytes.data..][..row_bytes.data];
        let scale = &mut out.scale[i * row_bytes.scale..][..row_bytes.scale];
        let min = &mut out.min[i * row_bytes.min..][..row_bytes.min];
        match encoding {
            Encoding::F32 => each(data, values, f32::to_le_bytes),
            Encoding::F16 => each(data, values, |x| f16::from_f32(x).to_le_bytes()),
            Encoding::Bf16 => each(data, values, |x| bf16::from_f32(x).to_le_bytes()),
            Encoding::I8Row => {
                let amax = amax(values);
                let inverse = if amax > 0.0 { 127.0 / amax } else { 0.0 };
                data.iter_mut().zip(values).for_each(|(q, x)| *q = nearest((x * inverse).clamp(-127.0, 127.0)) as u8);
                scale.copy_from_slice(&(amax / 127.0).to_le_bytes());
            }
            Encoding::Block(block) => encode_blocks(block, scales, values, data, scale, min),
        }
    }
    out
}

fn encode_blocks(encoding: BlockEncoding, scales: Scales, row: &[f32], data: &mut [u8], stored: &mut [u8], minima: &mut [u8]) {
    let (least, most) = quant_range(encoding);
    let of_row = (scales == Scales::Row && !encoding.min).then(|| (amax(row) / most, 0.0));
    let zero = if encoding.min { 0 } else { encoding.quants.zero() };
    for (b, values) in row.chunks(encoding.block).enumerate() {
        let (scale, min) = of_row.unwrap_or_else(|| block_scale(encoding, values));
        let scale = put(encoding.scale, stored, b, scale);
        let min = if encoding.min { put(encoding.scale, minima, b, min) } else { 0.0 };
        let inverse = if scale != 0.0 { 1.0 / scale } else { 0.0 };
        for (i, x) in values.iter().enumerate() {
            let q = nearest(((x - min) * inverse).clamp(least, most));
            encoding.quants.put(data, b * encoding.block + i, q + zero);
        }
    }
}

/// The integer that is nearest to a number of at most 2²² in size, the even one of two; 0 in its last eight bits for a NaN. Adding 1.5 · 2²³ leaves no bits for fractions, on any CPU in one instruction.
fn nearest(x: f32) -> i32 {
    const SHIFT: f32 = 12_582_912.0;
    (x + SHIFT).to_bits().wrapping_sub(SHIFT.to_bits()) as i32
}

/// The least and the largest integer that stands for a number of a block, before what stands for zero is added.
pub(crate) fn quant_range(encoding: BlockEncoding) -> (f32, f32) {
    match (encoding.quants, encoding.min) {
        (Quants::I8, _) => (-127.0, 127.0),
        (Quants::I6, false) => (-32.0, 31.0),
        (Quants::I6, true) => (0.0, 63.0),
        (Quants::I4, false) => (-8.0, 7.0),
        (Quants::I4, true) => (0.0, 15.0),
    }
}

fn block_scale(encoding: BlockEncoding, values: &[f32]) -> (f32, f32) {
    let (low, high) = values.iter().fold((f32::MAX, f32::MIN), |(l, h), &x| (l.min(x), h.max(x)));
    match (encoding.quants, encoding.min) {
        (Quants::I8, false) => (amax(values) / 127.0, 0.0),
        (_, false) => (if high > -low { high } else { low } / quant_range(encoding).0, 0.0),
        (_, true) => ((high - low) / quant_range(encoding).1, low),
    }
}

fn amax(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |m, x| m.max(x.abs()))
}

fn each<const N: usize>(data: &mut [u8], values: &[f32], convert: impl Fn(f32) -> [u8; N]) {
    data.chunks_exact_mut(N).zip(values).for_each(|(bytes, &x)| bytes.copy_from_slice(&convert(x)));
}

/// Stores number `index` of a row of scales; gives back what was stored.
pub(crate) fn put(kind: ScaleType, row: &mut [u8], index: usize, x: f32) -> f32 {
    match kind {
        ScaleType::F16 => {
            let x = f16::from_f32(x);
            row[index * 2..][..2].copy_from_slice(&x.to_le_bytes());
            x.to_f32()
        }
        ScaleType::F32 => {
            row[index * 4..][..4].copy_from_slice(&x.to_le_bytes());
            x
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use qhx_ir::{AlignedBytes, WeightTensor};

    /// The largest error of one number, as a share of the block's (or row's) largest magnitude.
    fn bound(encoding: Encoding) -> f32 {
        match encoding {
            Encoding::F32 => 0.0,
            Encoding::F16 => 1e-3,
            Encoding::Bf16 => 1e-2,
            Encoding::I8Row => 0.51 / 127.0,
            Encoding::Block(BlockEncoding { quants: Quants::I8, .. }) => 1.1 / 127.0,
            Encoding::Block(BlockEncoding { quants: Quants::I6, .. }) => 1.05 / 32.0,
            Encoding::Block(_) => 0.14,
        }
    }

    #[test]
    fn the_nearest_integer_is_that_of_the_float() {
        for i in -1024..=1024 {
            let x = i as f32 / 8.0;
            for x in [x, x.next_up(), x.next_down()] {
                assert_eq!(nearest(x), x.round_ties_even() as i32, "{x}");
            }
        }
        assert_eq!([f32::NAN, -f32::NAN].map(|x| nearest(x) as u8), [0; 2]);
    }

    #[test]
    fn every_encoding_comes_back_within_its_bound() {
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        for encoding in Encoding::all() {
            for (columns, scales) in [1, 5, 31, 32, 33, 100, 256].into_iter().flat_map(|n| [(n, Scales::Block), (n, Scales::Row)]) {
                let values: Vec<f32> = (0..3 * columns).map(|_| random()).collect();
                let row_bytes = encoding.row_bytes(columns).unwrap();
                let encoded = encode(encoding, scales, columns, row_bytes, &values);
                let part = |bytes: &[u8]| (!bytes.is_empty()).then(|| AlignedBytes::copy_of(bytes).into());
                let data = AlignedBytes::copy_of(&encoded.data).into();
                let tensor = WeightTensor::new(encoding, vec![3, columns], data, part(&encoded.scale), part(&encoded.min)).unwrap();
                let mut row = vec![0.0; columns];
                for r in 0..3 {
                    if let (Encoding::Block(BlockEncoding { block, min: false, .. }), Scales::Row) = (encoding, scales) {
                        assert!(
                            (0..columns).step_by(block).all(|column| tensor.scale_at(r, column) == tensor.scale_at(r, 0)),
                            "{encoding}"
                        );
                    }
                    tensor.decode_row(r, &mut row);
                    let expected = &values[r * columns..][..columns];
                    for (x, y) in expected.iter().zip(&row) {
                        assert!(
                            (x - y).abs() <= bound(encoding) * amax(expected).max(1e-6),
                            "{encoding} {scales:?} {columns}: {x} became {y}"
                        );
                    }
                }
            }
        }
    }
}

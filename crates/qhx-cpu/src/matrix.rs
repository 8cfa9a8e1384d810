//! Weights as the steps use them: matrices that stay where they are mapped, and the small plain ones as f32.

use crate::kernels::{
    Instructions, convert,
    integer::{self, Offsets, Scales},
    quants,
    quants::Stored,
};
use half::{bf16, f16};
use qhx_ir::{BlockEncoding, Encoding, Quants, RowBytes, ScaleType, WeightTensor};
use std::ops::Range;

/// A weight of `[.., columns]` whose rows are streamed from the mapping.
#[derive(Clone, Debug)]
pub(crate) struct Matrix {
    tensor: WeightTensor,
    row_bytes: RowBytes,
    /// How it is stored.
    pub(crate) encoding: Encoding,
    /// All rows.
    pub(crate) rows: usize,
    /// Numbers in a row.
    pub(crate) columns: usize,
}

/// The most blocks whose scales are decoded at once.
const BLOCKS_AT_ONCE: usize = 64;

impl Matrix {
    pub(crate) fn new(tensor: WeightTensor) -> Self {
        let (encoding, rows, columns, row_bytes) = (tensor.encoding(), tensor.rows(), tensor.columns(), tensor.row_bytes());
        Self { tensor, row_bytes, encoding, rows, columns }
    }

    /// Stored bytes of a row: numbers or quants, scales and minima.
    pub(crate) fn bytes_per_row(&self) -> usize {
        self.row_bytes.data + self.row_bytes.scale + self.row_bytes.min
    }

    /// The stored numbers or quants of some rows, `stride` bytes apart.
    pub(crate) fn data(&self, rows: Range<usize>) -> (&[u8], usize) {
        let stride = self.row_bytes.data;
        (&self.tensor.data()[rows.start * stride..rows.end * stride], stride)
    }

    /// The form of the quants; a scale for a whole row counts as one for each block of it. `None` for floats.
    pub(crate) fn stored(&self) -> Option<Stored> {
        match self.encoding {
            Encoding::I8Row => Some(Stored::I8Block32),
            Encoding::Block(BlockEncoding { quants: Quants::I4, .. }) => Some(Stored::I4Block32),
            Encoding::Block(BlockEncoding { quants: Quants::I6, .. }) => Some(Stored::I6Block32),
            Encoding::Block(BlockEncoding { block: 16, .. }) => Some(Stored::I8Block16),
            Encoding::Block(_) => Some(Stored::I8Block32),
            _ => None,
        }
    }

    /// Some rows as the integer kernels take them; `None` for floats.
    pub(crate) fn integer_rows(&self, rows: Range<usize>) -> Option<integer::Weights<'_>> {
        let stored = self.stored()?;
        let scales = match self.encoding {
            Encoding::Block(b) => scales_of(b.scale, self.tensor.scale(), self.row_bytes.scale, rows.clone()),
            _ => Scales::Row(&bytemuck::cast_slice(self.tensor.scale())[rows.clone()]),
        };
        let offsets = match self.encoding {
            Encoding::Block(b) if b.min => Offsets::Min(scales_of(b.scale, self.tensor.min(), self.row_bytes.min, rows.clone())),
            Encoding::Block(BlockEncoding { quants: Quants::I4, .. }) => Offsets::MinusEight,
            _ => Offsets::None,
        };
        let (data, stride) = self.data(rows.clone());
        let blocks = self.columns.div_ceil(stored.block());
        Some(integer::Weights { stored, data, stride, scales, offsets, rows: rows.len(), blocks })
    }

    /// The scales of a row's blocks from block `first` on.
    pub(crate) fn scales(&self, instructions: Instructions, row: usize, first: usize, out: &mut [f32]) {
        match self.encoding {
            Encoding::I8Row => out.fill(bytemuck::cast_slice::<u8, f32>(self.tensor.scale())[row]),
            Encoding::Block(b) => read_scales(instructions, b.scale, self.tensor.scale(), self.row_bytes.scale, row, first, out),
            _ => out.fill(1.0),
        }
    }

    /// What is added to `stored quant · scale`, block by block.
    pub(crate) fn offsets(&self, instructions: Instructions, row: usize, first: usize, out: &mut [f32]) {
        match self.encoding {
            Encoding::Block(b) if b.min => read_scales(instructions, b.scale, self.tensor.min(), self.row_bytes.min, row, first, out),
            Encoding::Block(BlockEncoding { quants: Quants::I4, .. }) => {
                self.scales(instructions, row, first, out);
                out.iter_mut().for_each(|scale| *scale *= -8.0);
            }
            _ => out.fill(0.0),
        }
    }

    /// Decodes columns `first ..` of a row, as many as `out` has places; `first` is a multiple of 32.
    pub(crate) fn decode(&self, instructions: Instructions, row: usize, first: usize, out: &mut [f32]) {
        debug_assert!(first % 32 == 0 && first + out.len() <= self.columns);
        let (data, _) = self.data(row..row + 1);
        match self.encoding {
            Encoding::F32 => out.copy_from_slice(&bytemuck::cast_slice(data)[first..][..out.len()]),
            Encoding::F16 => convert::widen(instructions, &bytemuck::cast_slice::<u8, f16>(data)[first..][..out.len()], out),
            Encoding::Bf16 => convert::widen(instructions, &bytemuck::cast_slice::<u8, bf16>(data)[first..][..out.len()], out),
            Encoding::I8Row | Encoding::Block(_) => {
                let stored = self.stored().unwrap_or(Stored::I8Block32);
                let (mut scales, mut offsets) = ([0.0; BLOCKS_AT_ONCE], [0.0; BLOCKS_AT_ONCE]);
                for (part, out) in out.chunks_mut(BLOCKS_AT_ONCE * stored.block()).enumerate() {
                    let (block, blocks) = (first / stored.block() + part * BLOCKS_AT_ONCE, out.len().div_ceil(stored.block()));
                    self.scales(instructions, row, block, &mut scales[..blocks]);
                    self.offsets(instructions, row, block, &mut offsets[..blocks]);
                    quants::decode(instructions, stored, &data[stored.bytes(block)..], &scales, &offsets, out);
                }
            }
        }
    }
}

fn scales_of(kind: ScaleType, bytes: &[u8], stride: usize, rows: Range<usize>) -> Scales<'_> {
    let bytes = &bytes[rows.start * stride..rows.end * stride];
    match kind {
        ScaleType::F16 => Scales::F16(bytemuck::cast_slice(bytes), stride / 2),
        ScaleType::F32 => Scales::F32(bytemuck::cast_slice(bytes), stride / 4),
    }
}

fn read_scales(instructions: Instructions, kind: ScaleType, bytes: &[u8], stride: usize, row: usize, first: usize, out: &mut [f32]) {
    let row = &bytes[row * stride..][..stride];
    match kind {
        ScaleType::F16 => convert::widen(instructions, &bytemuck::cast_slice::<u8, f16>(row)[first..][..out.len()], out),
        ScaleType::F32 => out.copy_from_slice(&bytemuck::cast_slice(row)[first..][..out.len()]),
    }
}

/// A small weight (norm, bias, convolution) as dense f32 numbers: those of the mapping where they are, else a decoded copy.
#[derive(Clone, Debug)]
pub(crate) enum Plain {
    /// One f32 row of the mapping.
    Mapped(WeightTensor),
    /// Decoded.
    Decoded(Vec<f32>),
}

impl Plain {
    pub(crate) fn new(tensor: WeightTensor) -> Self {
        if tensor.encoding() == Encoding::F32 && tensor.rows() == 1 {
            return Self::Mapped(tensor);
        }
        let mut numbers = vec![0.0; tensor.rows() * tensor.columns()];
        numbers.chunks_exact_mut(tensor.columns()).enumerate().for_each(|(row, out)| tensor.decode_row(row, out));
        Self::Decoded(numbers)
    }

    /// The numbers, row after row, without padding.
    pub(crate) fn numbers(&self) -> &[f32] {
        match self {
            Self::Mapped(tensor) => &bytemuck::cast_slice(tensor.data())[..tensor.columns()],
            Self::Decoded(numbers) => numbers,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use qhx_ir::AlignedBytes;

    /// A small generator, so that tests need no crate for it.
    pub(crate) struct Noise(u64);

    impl Noise {
        pub(crate) fn new(seed: u64) -> Self {
            Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
        }

        pub(crate) fn bits(&mut self) -> u32 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 >> 24) as u32
        }

        /// From −1 to 1.
        pub(crate) fn float(&mut self) -> f32 {
            self.bits() as f32 / u32::MAX as f32 * 2.0 - 1.0
        }

        pub(crate) fn floats(&mut self, n: usize) -> Vec<f32> {
            (0..n).map(|_| self.float()).collect()
        }
    }

    /// A tensor of any encoding with every quant drawn from all values (−128 too), garbage in the padding of quants.
    pub(crate) fn random_tensor(encoding: Encoding, shape: &[usize], noise: &mut Noise) -> WeightTensor {
        let columns = shape[shape.len() - 1];
        let rows: usize = shape[..shape.len() - 1].iter().product();
        let bytes = encoding.row_bytes(columns).unwrap();
        let floats = |count: usize, half: Option<bool>, noise: &mut Noise| {
            let mut out = AlignedBytes::zeroed(count);
            match half {
                Some(true) => bytemuck::cast_slice_mut::<u8, f16>(out.as_mut()).iter_mut().for_each(|x| *x = f16::from_f32(noise.float())),
                Some(false) => {
                    bytemuck::cast_slice_mut::<u8, bf16>(out.as_mut()).iter_mut().for_each(|x| *x = bf16::from_f32(noise.float()));
                }
                None => bytemuck::cast_slice_mut::<u8, f32>(out.as_mut()).iter_mut().for_each(|x| *x = noise.float()),
            }
            out.into()
        };
        let quants = |count: usize, noise: &mut Noise| {
            let mut out = AlignedBytes::zeroed(count);
            out.as_mut().iter_mut().for_each(|q| *q = noise.bits() as u8);
            out.into()
        };
        let (data, scale, min) = (rows * bytes.data, rows * bytes.scale, rows * bytes.min);
        let (data, scale, min) = match encoding {
            Encoding::F32 => (floats(data, None, noise), None, None),
            Encoding::F16 => (floats(data, Some(true), noise), None, None),
            Encoding::Bf16 => (floats(data, Some(false), noise), None, None),
            Encoding::I8Row => (quants(data, noise), Some(floats(scale, None, noise)), None),
            Encoding::Block(b) => {
                let half = (b.scale == ScaleType::F16).then_some(true);
                (quants(data, noise), Some(floats(scale, half, noise)), b.min.then(|| floats(min, half, noise)))
            }
        };
        WeightTensor::new(encoding, shape.to_vec(), data, scale, min).unwrap()
    }

    #[test]
    fn decodes_like_the_plain_decoder() {
        let mut noise = Noise::new(1);
        for encoding in Encoding::all() {
            for columns in [1, 16, 31, 32, 50, 576, 3000] {
                let tensor = random_tensor(encoding, &[3, columns], &mut noise);
                let matrix = Matrix::new(tensor.clone());
                for instructions in Instructions::all() {
                    for row in 0..3 {
                        let (mut wanted, mut found) = (vec![0.0; columns], vec![0.0; columns]);
                        tensor.decode_row(row, &mut wanted);
                        matrix.decode(instructions, row, 0, &mut found);
                        let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 2e-5 * a.abs().max(1.0);
                        assert!(wanted.iter().zip(&found).all(close), "{encoding} {columns} {instructions:?}");
                        let first = columns / 2 / 32 * 32;
                        matrix.decode(instructions, row, first, &mut found[first..]);
                        assert!(wanted.iter().zip(&found).all(close), "{encoding} {columns} from {first}");
                    }
                }
            }
        }
    }
}

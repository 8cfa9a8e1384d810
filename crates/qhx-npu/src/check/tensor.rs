//! Single tensors: shape, size, quantisation, stored values.

use super::Checked;
use crate::graph::{DataType, Quantization, Role, Tensor};

/// The most axes that have been seen to work.
const MOST_AXES: usize = 5;
/// Block sizes (in columns) that have been seen to work.
const BLOCKS: [u32; 6] = [8, 16, 32, 64, 128, 256];

impl Tensor {
    pub(super) fn check(&self) -> Checked {
        if self.dims.is_empty() || self.dims.len() > MOST_AXES || self.dims.contains(&0) {
            return Err(format!("has shape {:?}, but must have one to {MOST_AXES} axes, none of them 0", self.dims));
        }
        let bytes = self.dtype.byte_len(&self.dims).filter(|&bytes| u32::try_from(bytes).is_ok());
        bytes.ok_or_else(|| format!("{:?} has more bytes than QNN's 32-bit sizes can express", self.dims))?;
        self.check_quantization()?;
        match &self.role {
            Role::Constant(bytes) => self.check_constant(bytes),
            _ => Ok(()),
        }
    }

    fn check_quantization(&self) -> Checked {
        let quantized = self.quantization != Quantization::None;
        if quantized != (self.dtype == DataType::Fixed8) {
            return Err(format!("has type {:?}: tensors of type Fixed8, and only those, must have a quantisation", self.dtype));
        }
        let constant = matches!(self.role, Role::Constant(_) | Role::Lazy(_));
        let several = !matches!(self.quantization, Quantization::None | Quantization::Tensor(_));
        if several && !constant {
            return Err("has several scales, which only constants may have".into());
        }
        let (expected, scales) = match &self.quantization {
            Quantization::None => return Ok(()),
            Quantization::Tensor(scale) => (1, std::slice::from_ref(scale)),
            Quantization::Channel8 { axis, scales } | Quantization::Channel4 { axis, scales } => {
                let length = self.dims.get(*axis as usize);
                (*length.ok_or_else(|| format!("has its scales along axis {axis}, which {:?} does not have", self.dims))?, &scales[..])
            }
            Quantization::Block4 { block, scales } => (self.blocks(*block)?, &scales[..]),
        };
        if scales.len() != expected as usize {
            return Err(format!("{:?} has {} scales, but needs {expected}", self.dims, scales.len()));
        }
        // Block scales may be negative: half of all 4-bit blocks store their largest value as −8.
        let in_blocks = matches!(self.quantization, Quantization::Block4 { .. });
        match scales.iter().find(|scale| !(scale.is_normal() && (in_blocks || **scale > 0.0))) {
            Some(scale) => Err(format!(
                "has the scale {scale}, but scales must be {}",
                if in_blocks { "finite and not 0" } else { "positive numbers" }
            )),
            None => Ok(()),
        }
    }

    /// The number of blocks of a weight `[out, in]`.
    fn blocks(&self, block: u32) -> Checked<u32> {
        let [out, depth] = self.dims[..] else {
            return Err(format!("{:?} has block scales, which only weights [out, in] may have", self.dims));
        };
        if !BLOCKS.contains(&block) || depth % block != 0 {
            return Err(format!("has blocks of {block} columns, but the size must be one of {BLOCKS:?} and divide the {depth} columns"));
        }
        out.checked_mul(depth / block).ok_or_else(|| "has too many blocks".into())
    }

    /// Checks the stored bytes of a constant.
    pub(crate) fn check_constant(&self, bytes: &[u8]) -> Checked {
        let expected = self.dtype.byte_len(&self.dims);
        if expected != Some(bytes.len()) {
            return Err(format!("{:?} {:?} needs {} bytes, but {} are given", self.dtype, self.dims, expected.unwrap_or(0), bytes.len()));
        }
        let four_bits = matches!(self.quantization, Quantization::Channel4 { .. } | Quantization::Block4 { .. });
        let beyond = |byte: &&u8| !(-8..=7).contains(&byte.cast_signed());
        match bytes.iter().find(beyond) {
            Some(byte) if four_bits => Err(format!("contains {}, but 4-bit values must be -8 to 7", byte.cast_signed())),
            _ => Ok(()),
        }
    }
}

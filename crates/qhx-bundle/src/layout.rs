//! How a weight stands in a safetensors file: up to three stored tensors with padded rows.
//!
//! The logical shape and the encoding are the program's; this module says which stored tensors they ask for, of which type and shape.
//! The last stored dimension is the padded row, so that any safetensors reader sees whole rows.

use qhx_ir::{BlockEncoding, Encoding, Quants, ScaleType};
use std::fmt;

/// Where the data of a weight file starts: at a multiple of this, so that a mapping of the file is aligned for every use.
pub const DATA_ALIGNMENT: usize = 4096;
/// What the names of padding tensors start with. They fill gaps, since the format knows none.
pub const PADDING_PREFIX: &str = "__pad.";

/// One of the stored tensors of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// `NAME`: numbers or quants.
    Data,
    /// `NAME.scale`.
    Scale,
    /// `NAME.min`.
    Min,
}

impl Part {
    /// The stored tensor's name for the weight `name`.
    pub fn stored_name(self, name: &str) -> String {
        match self {
            Self::Data => name.to_string(),
            Self::Scale => format!("{name}.scale"),
            Self::Min => format!("{name}.min"),
        }
    }
}

/// The element types that weight files use, with the names of the safetensors format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum StoredType {
    /// 32-bit floats.
    F32,
    /// 16-bit IEEE floats.
    F16,
    /// 16-bit brain floats.
    Bf16,
    /// Signed bytes.
    I8,
    /// Bytes: pairs of int4, padding.
    U8,
}

impl StoredType {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::I8 | Self::U8 => 1,
        }
    }
}

impl fmt::Display for StoredType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::I8 => "I8",
            Self::U8 => "U8",
        })
    }
}

/// What a stored tensor must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredPart {
    /// Which part of the weight.
    pub part: Part,
    /// Element type in the file.
    pub dtype: StoredType,
    /// Shape in the file, padding included.
    pub shape: Vec<usize>,
    /// Rows: the product of the logical dimensions but the last.
    pub rows: usize,
    /// Bytes of one row, padding included.
    pub row_bytes: usize,
}

impl StoredPart {
    /// Bytes of the whole stored tensor. Cannot overflow: [`stored_parts`] has checked the product.
    pub fn bytes(&self) -> usize {
        self.rows * self.row_bytes
    }
}

/// The stored tensors of a weight, in file order; an error where the shape makes no sense.
pub fn stored_parts(encoding: Encoding, shape: &[usize]) -> Result<Vec<StoredPart>, String> {
    let too_large = || format!("a tensor of shape {shape:?} is too large");
    let Some((&columns, outer)) = shape.split_last() else { return Err("a weight needs at least one dimension".into()) };
    if shape.contains(&0) {
        return Err(format!("a weight of shape {shape:?} has no numbers"));
    }
    let rows = outer.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).ok_or_else(too_large)?;
    let row_bytes = encoding.row_bytes(columns).ok_or_else(too_large)?;
    let (data, scale) = stored_types(encoding);
    let mut parts = Vec::new();
    for (part, dtype, bytes) in
        [(Part::Data, data, row_bytes.data), (Part::Scale, scale, row_bytes.scale), (Part::Min, scale, row_bytes.min)]
    {
        if bytes == 0 {
            continue;
        }
        // All three parts of a tensor must fit the address space together with the file around them.
        rows.checked_mul(bytes).filter(|&total| total <= isize::MAX as usize / 4).ok_or_else(too_large)?;
        let mut shape = outer.to_vec();
        // One scale per row needs no dimension of its own.
        if (encoding, part) != (Encoding::I8Row, Part::Scale) {
            shape.push(bytes / dtype.bytes());
        }
        parts.push(StoredPart { part, dtype, shape, rows, row_bytes: bytes });
    }
    Ok(parts)
}

/// Element types of the data and of scales and minima.
fn stored_types(encoding: Encoding) -> (StoredType, StoredType) {
    match encoding {
        Encoding::F32 => (StoredType::F32, StoredType::F32),
        Encoding::F16 => (StoredType::F16, StoredType::F32),
        Encoding::Bf16 => (StoredType::Bf16, StoredType::F32),
        Encoding::I8Row => (StoredType::I8, StoredType::F32),
        Encoding::Block(BlockEncoding { quants, scale, .. }) => {
            let data = match quants {
                Quants::I8 => StoredType::I8,
                Quants::I6 | Quants::I4 => StoredType::U8,
            };
            let scale = match scale {
                ScaleType::F16 => StoredType::F16,
                ScaleType::F32 => StoredType::F32,
            };
            (data, scale)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shapes(encoding: Encoding, shape: &[usize]) -> Vec<(StoredType, Vec<usize>)> {
        stored_parts(encoding, shape).unwrap().into_iter().map(|p| (p.dtype, p.shape)).collect()
    }

    #[test]
    fn stored_shapes() {
        use StoredType::*;
        assert_eq!(shapes(Encoding::F32, &[3, 17]), [(F32, vec![3, 32])]);
        assert_eq!(shapes(Encoding::Bf16, &[17]), [(Bf16, vec![32])]);
        assert_eq!(shapes(Encoding::I8Row, &[5, 3, 65]), [(I8, vec![5, 3, 128]), (F32, vec![5, 3])]);
        assert_eq!(shapes(Encoding::I8Row, &[65]), [(I8, vec![128]), (F32, vec![])]);
        assert_eq!(shapes(Encoding::I4_BLOCK32_MIN, &[2, 576]), [(U8, vec![2, 320]), (F16, vec![2, 32]), (F16, vec![2, 32])]);
    }

    #[test]
    fn bytes_are_those_of_the_shape() {
        for encoding in Encoding::all() {
            for part in stored_parts(encoding, &[3, 5, 97]).unwrap() {
                assert_eq!(part.shape.iter().product::<usize>() * part.dtype.bytes(), part.bytes(), "{encoding}");
            }
        }
    }

    #[test]
    fn senseless_shapes_are_errors() {
        assert!(stored_parts(Encoding::F32, &[]).is_err());
        assert!(stored_parts(Encoding::F32, &[3, 0]).unwrap_err().contains("no numbers"));
        assert!(stored_parts(Encoding::F32, &[1 << 30, 1 << 30, 1 << 30]).unwrap_err().contains("too large"));
        assert!(stored_parts(Encoding::I8Row, &[1 << 31, 1 << 30]).unwrap_err().contains("too large"));
    }
}

//! The tensors of a checkpoint, whatever files they lie in, read one at a time.
//!
//! A tensor of any rank is a stack of rows (the last dimension), as in the bundle's layout. A [`Tensor`] is a handle to one of them: its
//! rows can be read as stored bytes or decoded to f32, in any portions, and when the handle goes, its pages go back to the system.

use super::{Mapping, ReadError, chunks, gguf_blocks};
use half::{bf16, f16};
use qhx_ir::encoding::BlockEncoding;
use std::{collections::HashMap, fmt, ops::Range};

/// How a source file stores the numbers of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // the names are those of the formats
pub enum SourceType {
    F64,
    F32,
    F16,
    Bf16,
    I64,
    I32,
    I16,
    I8,
    U8,
    Bool,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
}

impl SourceType {
    /// Numbers per block (1 for plain types) and bytes per block.
    pub fn block(self) -> (usize, usize) {
        match self {
            Self::F64 | Self::I64 => (1, 8),
            Self::F32 | Self::I32 => (1, 4),
            Self::F16 | Self::Bf16 | Self::I16 => (1, 2),
            Self::I8 | Self::U8 | Self::Bool => (1, 1),
            Self::Q4_0 => (32, 18),
            Self::Q4_1 => (32, 20),
            Self::Q5_0 => (32, 22),
            Self::Q5_1 => (32, 24),
            Self::Q8_0 => (32, 34),
            Self::Q4K => (256, 144),
            Self::Q5K => (256, 176),
            Self::Q6K => (256, 210),
        }
    }

    /// Bytes of a row of `columns` numbers; `None` if it is not a whole number of blocks or too large.
    pub fn row_bytes(self, columns: usize) -> Option<usize> {
        let (numbers, bytes) = self.block();
        if columns % numbers != 0 {
            return None;
        }
        (columns / numbers).checked_mul(bytes)
    }

    /// Decodes whole blocks to f32. F64 and wide integers are rounded to the nearest f32; everything else is exact.
    /// `source` must hold exactly `out.len()` numbers.
    pub fn decode(self, source: &[u8], out: &mut [f32]) {
        assert_eq!(self.row_bytes(out.len()), Some(source.len()), "decode needs the bytes of exactly {} {self} numbers", out.len());
        match self {
            Self::F64 => each(source, out, |b| f64::from_le_bytes(b) as f32),
            Self::F32 => each(source, out, f32::from_le_bytes),
            Self::F16 => each(source, out, |b| f16::from_le_bytes(b).to_f32()),
            Self::Bf16 => each(source, out, |b| bf16::from_le_bytes(b).to_f32()),
            Self::I64 => each(source, out, |b| i64::from_le_bytes(b) as f32),
            Self::I32 => each(source, out, |b| i32::from_le_bytes(b) as f32),
            Self::I16 => each(source, out, |b| i16::from_le_bytes(b) as f32),
            Self::I8 => each(source, out, |b| i8::from_le_bytes(b) as f32),
            Self::U8 => each(source, out, |[b]: [u8; 1]| b as f32),
            Self::Bool => each(source, out, |[b]: [u8; 1]| (b != 0) as u8 as f32),
            _ => gguf_blocks::decode(self, source, out),
        }
    }
}

fn each<const N: usize>(source: &[u8], out: &mut [f32], convert: impl Fn([u8; N]) -> f32) {
    for (bytes, out) in chunks::<N>(source).zip(out) {
        *out = convert(bytes);
    }
}

impl fmt::Display for SourceType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F64 => "F64",
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::I64 => "I64",
            Self::I32 => "I32",
            Self::I16 => "I16",
            Self::I8 => "I8",
            Self::U8 => "U8",
            Self::Bool => "BOOL",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
        })
    }
}

/// What a tensor is, without its numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name, in the Hugging Face spelling.
    pub name: String,
    /// How the file stores it.
    pub source_type: SourceType,
    /// Row-major shape, e.g. `[out, in]`; empty for a scalar.
    pub shape: Vec<usize>,
}

impl TensorInfo {
    /// Length of a row: the last dimension (1 for a scalar).
    pub fn columns(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Number of rows: the product of all dimensions but the last.
    pub fn rows(&self) -> usize {
        self.shape.split_last().map_or(1, |(_, leading)| leading.iter().product())
    }
}

/// The order in which a file stores the rows of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowOrder {
    /// As they are.
    Stored,
    /// Per head of this many rows, the two halves are interleaved (0, h, 1, h+1, …): what rotary pairs next to each other ask for.
    InterleavedHalves { head: usize },
}

impl RowOrder {
    /// Where the file keeps row `row`.
    pub(crate) fn stored_row(self, row: usize) -> usize {
        match self {
            Self::Stored => row,
            Self::InterleavedHalves { head } => {
                let (first, within) = (row - row % head, row % head);
                first + within % (head / 2) * 2 + within / (head / 2)
            }
        }
    }
}

/// A tensor's place in one of the files.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) info: TensorInfo,
    pub(crate) file: usize,
    pub(crate) range: Range<usize>,
    pub(crate) order: RowOrder,
}

/// All tensors of a checkpoint, over the mapped files.
#[derive(Debug)]
pub struct TensorSource {
    files: Vec<Mapping>,
    entries: Vec<Entry>,
    by_name: HashMap<String, usize>,
}

impl TensorSource {
    /// Entries must have been checked: ranges inside their file, as long as shape and type say, names unique.
    pub(crate) fn new(files: Vec<Mapping>, entries: Vec<Entry>) -> Self {
        let by_name = entries.iter().enumerate().map(|(i, e)| (e.info.name.clone(), i)).collect();
        Self { files, entries, by_name }
    }

    /// The same with all tensors of another, their names behind `prefix`, which no name here begins with.
    pub(crate) fn with(mut self, other: Self, prefix: &str) -> Self {
        let files = self.files.len();
        self.files.extend(other.files);
        self.entries.extend(other.entries.into_iter().map(|mut entry| {
            entry.info.name.insert_str(0, prefix);
            Entry { file: files + entry.file, ..entry }
        }));
        Self::new(self.files, self.entries)
    }

    /// All tensors, in the order of the files.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &TensorInfo> {
        self.entries.iter().map(|entry| &entry.info)
    }

    /// What is known of the tensor `name`, if there is one.
    pub fn find(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).map(|&i| &self.entries[i].info)
    }

    /// A handle to the tensor `name`.
    pub fn tensor(&self, name: &str) -> Result<Tensor<'_>, ReadError> {
        let Some(&i) = self.by_name.get(name) else {
            return Err(ReadError::MissingTensor { name: name.to_string(), hint: self.hint(name) });
        };
        let entry = &self.entries[i];
        Ok(Tensor { entry, file: &self.files[entry.file] })
    }

    /// Decodes some rows of the tensor `name` into `out`: [`Tensor::read_f32`] for a single reading.
    pub fn read_f32(&self, name: &str, rows: Range<usize>, out: &mut [f32]) -> Result<(), ReadError> {
        self.tensor(name)?.read_f32(rows, out)
    }

    /// Another tensor that ends like the missing one: the usual case is a different prefix.
    fn hint(&self, name: &str) -> String {
        let mut suffix = name;
        while let Some((_, rest)) = suffix.split_once('.') {
            suffix = rest;
            let similar = self.entries.iter().find(|e| e.info.name.ends_with(suffix));
            match similar {
                Some(entry) if suffix.contains('.') => return format!(" (it has `{}`)", super::shown(&entry.info.name)),
                _ => {}
            }
        }
        format!(" (it has {} tensors)", self.entries.len())
    }
}

/// One tensor, open for reading. Dropping it lets the system take its pages back.
#[derive(Debug)]
pub struct Tensor<'a> {
    entry: &'a Entry,
    file: &'a Mapping,
}

impl Tensor<'_> {
    /// Name, type and shape.
    pub fn info(&self) -> &TensorInfo {
        &self.entry.info
    }

    /// All bytes as stored, if the file has the rows in their order; otherwise they can only be had row by row.
    pub fn bytes(&self) -> Option<&[u8]> {
        match self.entry.order {
            RowOrder::Stored => Some(&self.file.bytes()[self.entry.range.clone()]),
            RowOrder::InterleavedHalves { .. } => None,
        }
    }

    /// The stored bytes of one row.
    pub fn row(&self, row: usize) -> Result<&[u8], ReadError> {
        let rows = self.info().rows();
        if row >= rows {
            return Err(self.bad(format!("row {row} of {rows} was asked for")));
        }
        let bytes = &self.file.bytes()[self.entry.range.clone()];
        let row_bytes = bytes.len() / rows;
        Ok(&bytes[self.entry.order.stored_row(row) * row_bytes..][..row_bytes])
    }

    /// Decodes rows to f32, row after row, into `out`, which must have room for exactly these.
    pub fn read_f32(&self, rows: Range<usize>, out: &mut [f32]) -> Result<(), ReadError> {
        let (columns, all_rows, source_type) = (self.info().columns(), self.info().rows(), self.info().source_type);
        if rows.start > rows.end || rows.end > all_rows {
            return Err(self.bad(format!("rows {rows:?} of {all_rows} were asked for")));
        }
        if rows.len().checked_mul(columns) != Some(out.len()) {
            return Err(self.bad(format!("{} rows of {columns} do not fill a buffer of {}", rows.len(), out.len())));
        }
        if columns == 0 {
            return Ok(());
        }
        for (row, out) in rows.zip(out.chunks_exact_mut(columns)) {
            source_type.decode(self.row(row)?, out);
        }
        Ok(())
    }

    /// The encoding of the bundle's layout that holds this tensor's blocks without loss; `None` for plain types.
    pub fn block_encoding(&self) -> Option<BlockEncoding> {
        gguf_blocks::encoding(self.info().source_type)
    }

    /// Splits one row of blocks into quants, scales and minima, without loss; see [`gguf_blocks::split`].
    pub fn split_row(&self, row: usize, quants: &mut [u8], scales: &mut [f32], minima: &mut [f32]) -> Result<(), ReadError> {
        let Some(encoding) = self.block_encoding() else {
            return Err(self.bad(format!("{} has no blocks to split", self.info().source_type)));
        };
        let expected = gguf_blocks::split_lengths(encoding, self.info().columns());
        let found = (quants.len(), scales.len(), minima.len());
        if found != expected {
            return Err(self.bad(format!("a row splits into (quants, scales, minima) of {expected:?} places, not {found:?}")));
        }
        gguf_blocks::split(self.info().source_type, self.row(row)?, quants, scales, minima);
        Ok(())
    }

    fn bad(&self, reason: String) -> ReadError {
        ReadError::BadRequest { name: self.info().name.clone(), reason }
    }
}

impl Drop for Tensor<'_> {
    fn drop(&mut self) {
        self.file.release(self.entry.range.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(order: RowOrder, shape: &[usize], numbers: &[f32]) -> TensorSource {
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        let info = TensorInfo { name: "layers.0.w".into(), source_type: SourceType::F32, shape: shape.to_vec() };
        let entry = Entry { info, file: 0, range: 0..bytes.len(), order };
        TensorSource::new(vec![Mapping::from_bytes("test", bytes)], vec![entry])
    }

    #[test]
    fn rows_in_portions() {
        let source = source(RowOrder::Stored, &[3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let mut out = [0.0; 4];
        source.read_f32("layers.0.w", 1..3, &mut out).unwrap();
        assert_eq!(out, [3.0, 4.0, 5.0, 6.0]);
        let tensor = source.tensor("layers.0.w").unwrap();
        assert_eq!(tensor.row(1).unwrap(), &[0, 0, 64, 64, 0, 0, 128, 64]);
        assert_eq!(tensor.bytes().unwrap().len(), 24);
        assert!(tensor.row(3).unwrap_err().to_string().contains("row 3 of 3"));
        assert!(tensor.read_f32(2..4, &mut out).unwrap_err().to_string().contains("rows 2..4 of 3"));
        assert!(tensor.read_f32(0..1, &mut out).unwrap_err().to_string().contains("buffer of 4"));
        assert!(tensor.split_row(0, &mut [], &mut [], &mut []).unwrap_err().to_string().contains("no blocks"));
    }

    #[test]
    fn interleaved_halves_are_put_back() {
        // Two heads of 4 rows; the file has 0 2 1 3 of each.
        let source = source(RowOrder::InterleavedHalves { head: 4 }, &[8, 1], &[0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]);
        let mut out = [0.0; 8];
        source.read_f32("layers.0.w", 0..8, &mut out).unwrap();
        assert_eq!(out, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
        assert!(source.tensor("layers.0.w").unwrap().bytes().is_none());
    }

    #[test]
    fn a_missing_tensor_names_a_similar_one() {
        let source = source(RowOrder::Stored, &[1], &[1.0]);
        let error = source.tensor("model.layers.0.w").unwrap_err().to_string();
        assert_eq!(error, "the checkpoint has no tensor `model.layers.0.w` (it has `layers.0.w`)");
        let error = source.tensor("lm_head.weight").unwrap_err().to_string();
        assert_eq!(error, "the checkpoint has no tensor `lm_head.weight` (it has 1 tensors)");
    }

    #[test]
    fn plain_types_decode() {
        let check = |t: SourceType, bytes: &[u8], expected: &[f32]| {
            let mut out = vec![0.0; expected.len()];
            t.decode(bytes, &mut out);
            assert_eq!(out, expected, "{t}");
        };
        check(SourceType::F64, &(-2.5f64).to_le_bytes(), &[-2.5]);
        check(SourceType::F16, &[0x00, 0x3c, 0x01, 0x00], &[1.0, 5.9604645e-8]);
        check(SourceType::Bf16, &[0x80, 0x3f, 0x40, 0xc0], &[1.0, -3.0]);
        check(SourceType::I64, &(-7i64).to_le_bytes(), &[-7.0]);
        check(SourceType::I32, &70000i32.to_le_bytes(), &[70000.0]);
        check(SourceType::I16, &(-300i16).to_le_bytes(), &[-300.0]);
        check(SourceType::I8, &[0x80, 0x7f], &[-128.0, 127.0]);
        check(SourceType::U8, &[0x80], &[128.0]);
        check(SourceType::Bool, &[0, 1, 2], &[0.0, 1.0, 1.0]);
    }
}

//! The GGUF reader: metadata and tensor table of versions 2 and 3, little endian.
//!
//! A file is `GGUF`, a version, two counts, the metadata (key → typed value), the tensor table (name, dimensions, type, offset), and
//! after padding the data. Strings and arrays carry their length in front, so every length is held against what is left of the file
//! before anything is allocated for it.
//!
//! This module knows the container only. What the keys mean is the matter of [`super::gguf_tokenizer`] and of the checkpoint.

use super::gguf_metadata::{Array, Metadata, Value};
use super::{Problem, SourceType, chunks, element_count, malformed, shown, unsupported};
use std::ops::Range;

/// The longest metadata and tensor table that is read. The largest real ones, with vocabularies of 260 000 tokens, have about 20 MB.
pub const MAX_HEADER: usize = 256 << 20;
/// How deep arrays may stand in arrays.
const MAX_DEPTH: usize = 4;
/// How many dimensions a tensor may have.
const MAX_DIMENSIONS: u32 = 4;

/// A GGUF file's metadata and tensor table.
#[derive(Clone, Debug)]
pub struct Gguf {
    /// The version of the format: 2 or 3.
    pub version: u32,
    /// Keys and values.
    pub metadata: Metadata,
    /// The tensors, in the order of the table.
    pub tensors: Vec<GgufTensor>,
}

/// A tensor of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensor {
    /// Its name, as in the file.
    pub name: String,
    /// How its numbers are stored.
    pub source_type: SourceType,
    /// Row-major shape: the file's dimensions in reverse.
    pub shape: Vec<usize>,
    /// Where its data is, counted from the start of the file.
    pub range: Range<usize>,
}

/// Reads and checks the metadata and the tensor table of a file's bytes: afterwards every tensor's range lies inside the file, fits its shape and
/// type, and shares no byte with another.
pub fn parse(file: &[u8]) -> Result<Gguf, Problem> {
    let mut cursor = Cursor { file, at: 0 };
    let version = read_version(&mut cursor)?;
    let tensor_count = cursor.u64("the number of tensors")?;
    let key_count = cursor.u64("the number of metadata keys")?;

    let key_count = cursor.count(key_count, 13, "the metadata")?; // an empty key, its type, one byte
    let mut metadata = Metadata::default();
    for i in 0..key_count {
        let key = cursor.text(&format!("metadata key {i}"))?;
        let value = cursor.value(&key)?;
        if metadata.insert(key.clone(), value).is_some() {
            malformed!("the metadata has the key `{}` twice", shown(&key));
        }
    }
    let alignment = alignment(&metadata)?;

    let tensor_count = cursor.count(tensor_count, 24, "the tensor table")?; // an empty name, no dimensions, a type, an offset
    let mut table = Vec::new(); // grows as lines are really found
    for i in 0..tensor_count {
        table.push(cursor.tensor(i)?);
    }
    let Some(data_start) = cursor.at.checked_next_multiple_of(alignment) else {
        malformed!("the alignment of {alignment} is too large");
    };
    let tensors = table.into_iter().map(|t| t.locate(data_start, alignment, file.len())).collect::<Result<Vec<_>, _>>()?;
    check_distinct(&tensors)?;
    Ok(Gguf { version, metadata, tensors })
}

fn read_version(cursor: &mut Cursor<'_>) -> Result<u32, Problem> {
    let magic = cursor.array::<4>("the magic number")?;
    match &magic {
        b"GGUF" => {}
        b"lmgg" | b"fmgg" | b"tjgg" | b"algg" => {
            unsupported!("this is an older GGML file, from before GGUF; convert the original model again")
        }
        _ => malformed!("it begins with {magic:02x?} and not with `GGUF`"),
    }
    match cursor.u32("the version")? {
        version @ (2 | 3) => Ok(version),
        1 => unsupported!("this is GGUF version 1, which qhx does not read (2 and 3 are); convert the original model again"),
        version if version & 0xffff == 0 && version != 0 => {
            unsupported!("the file is big endian, which qhx does not read; turn it with `gguf-convert-endian FILE little`")
        }
        version => unsupported!("this is GGUF version {version}; qhx reads 2 and 3"),
    }
}

fn alignment(metadata: &Metadata) -> Result<usize, Problem> {
    let alignment = metadata.unsigned("general.alignment")?.unwrap_or(32);
    match usize::try_from(alignment) {
        Ok(alignment) if alignment.is_power_of_two() => Ok(alignment),
        _ => malformed!("`general.alignment` is {alignment}, which is not a power of two"),
    }
}

fn check_distinct(tensors: &[GgufTensor]) -> Result<(), Problem> {
    let mut names = std::collections::HashSet::new();
    for tensor in tensors {
        if !names.insert(&tensor.name) {
            malformed!("the file has tensor `{}` twice", shown(&tensor.name));
        }
    }
    let mut order: Vec<&GgufTensor> = tensors.iter().filter(|t| !t.range.is_empty()).collect();
    order.sort_by_key(|t| t.range.start);
    for pair in order.windows(2) {
        if pair[1].range.start < pair[0].range.end {
            let (a, b) = (shown(&pair[0].name), shown(&pair[1].name));
            malformed!("tensors `{a}` and `{b}` overlap at byte {} of the file", pair[1].range.start);
        }
    }
    Ok(())
}

/// A line of the tensor table, before its place is known.
struct TableLine {
    name: String,
    source_type: SourceType,
    shape: Vec<u64>,
    offset: u64,
}

impl TableLine {
    fn locate(self, data_start: usize, alignment: usize, file_len: usize) -> Result<GgufTensor, Problem> {
        let Self { name, source_type, shape, offset } = self;
        let tensor = shown(&name);
        let elements = element_count(&tensor, &shape)?;
        let (numbers, bytes) = source_type.block();
        let columns = shape.last().copied().unwrap_or(1);
        if columns % numbers as u64 != 0 {
            malformed!(
                "tensor `{tensor}` has rows of {columns} numbers, which is no multiple of the {numbers} in a block of {source_type}"
            );
        }
        if offset % alignment as u64 != 0 {
            malformed!("tensor `{tensor}` begins at byte {offset} of the data, which is no multiple of the alignment of {alignment}");
        }
        let size = elements / numbers as u64 * bytes as u64; // element_count keeps this far from overflow
        let start = offset.checked_add(data_start as u64);
        let Some((start, end)) = start.and_then(|start| Some((start, start.checked_add(size)?))) else {
            malformed!("tensor `{tensor}` begins at byte {offset} of the data, beyond any file");
        };
        if end > file_len as u64 {
            malformed!("tensor `{tensor}` ends at byte {end} but the file has only {file_len}: is it truncated?");
        }
        // Without elements a dimension may still be too large for this machine.
        let Ok(shape) = shape.iter().map(|&d| usize::try_from(d)).collect::<Result<Vec<_>, _>>() else {
            malformed!("tensor `{tensor}` has shape {shape:?}, too large for this machine");
        };
        Ok(GgufTensor { name, source_type, shape, range: start as usize..end as usize })
    }
}

/// Reads from the front of the file and never beyond its end.
struct Cursor<'a> {
    file: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, count: u64, what: &str) -> Result<&'a [u8], Problem> {
        let left = self.file.len() - self.at;
        if count > left as u64 {
            malformed!("{what} at byte {} needs {count} bytes but only {left} are left: is it truncated?", self.at);
        }
        let end = self.at + count as usize;
        if end > MAX_HEADER {
            malformed!("{what} lies beyond the first {MAX_HEADER} bytes, in which metadata and tensor table must fit");
        }
        let taken = &self.file[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], Problem> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.take(N as u64, what)?);
        Ok(bytes)
    }

    fn u32(&mut self, what: &str) -> Result<u32, Problem> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64, Problem> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A count of things that take at least `least` bytes each; refused when the rest of the file could not hold them.
    fn count(&self, count: u64, least: u64, what: &str) -> Result<usize, Problem> {
        let left = (self.file.len() - self.at) as u64;
        if count > left / least {
            malformed!("{what} at byte {} claims {count} entries but only {left} bytes are left: is it truncated?", self.at);
        }
        Ok(count as usize)
    }

    fn text(&mut self, what: &str) -> Result<String, Problem> {
        let at = self.at;
        let length = self.u64(what)?;
        match std::str::from_utf8(self.take(length, what)?) {
            Ok(text) => Ok(text.to_string()),
            Err(_) => malformed!("{what} at byte {at} is not valid UTF-8"),
        }
    }

    fn value(&mut self, key: &str) -> Result<Value, Problem> {
        let what = format!("the value of `{}`", shown(key));
        Ok(match self.u32(&what)? {
            0 => Value::U8(u8::from_le_bytes(self.array(&what)?)),
            1 => Value::I8(i8::from_le_bytes(self.array(&what)?)),
            2 => Value::U16(u16::from_le_bytes(self.array(&what)?)),
            3 => Value::I16(i16::from_le_bytes(self.array(&what)?)),
            4 => Value::U32(u32::from_le_bytes(self.array(&what)?)),
            5 => Value::I32(i32::from_le_bytes(self.array(&what)?)),
            6 => Value::F32(f32::from_le_bytes(self.array(&what)?)),
            7 => Value::Bool(truth(self.array(&what)?, &what)?),
            8 => Value::Text(self.text(&what)?),
            9 => Value::Array(self.values(&what, 1)?),
            10 => Value::U64(u64::from_le_bytes(self.array(&what)?)),
            11 => Value::I64(i64::from_le_bytes(self.array(&what)?)),
            12 => Value::F64(f64::from_le_bytes(self.array(&what)?)),
            other => malformed!("{what} has the unknown type {other}"),
        })
    }

    fn values(&mut self, what: &str, depth: usize) -> Result<Array, Problem> {
        let kind = self.u32(what)?;
        let count = self.u64(what)?;
        Ok(match kind {
            0 => Array::U8(self.numbers(count, what, u8::from_le_bytes)?),
            1 => Array::I8(self.numbers(count, what, i8::from_le_bytes)?),
            2 => Array::U16(self.numbers(count, what, u16::from_le_bytes)?),
            3 => Array::I16(self.numbers(count, what, i16::from_le_bytes)?),
            4 => Array::U32(self.numbers(count, what, u32::from_le_bytes)?),
            5 => Array::I32(self.numbers(count, what, i32::from_le_bytes)?),
            6 => Array::F32(self.numbers(count, what, f32::from_le_bytes)?),
            7 => {
                let count = self.count(count, 1, what)?;
                Array::Bool((0..count).map(|_| truth(self.array(what)?, what)).collect::<Result<_, _>>()?)
            }
            8 => {
                let count = self.count(count, 8, what)?;
                Array::Text((0..count).map(|_| self.text(what)).collect::<Result<_, _>>()?)
            }
            9 if depth >= MAX_DEPTH => malformed!("{what} has arrays in arrays more than {MAX_DEPTH} deep"),
            9 => {
                let count = self.count(count, 12, what)?;
                Array::Array((0..count).map(|_| self.values(what, depth + 1)).collect::<Result<_, _>>()?)
            }
            10 => Array::U64(self.numbers(count, what, u64::from_le_bytes)?),
            11 => Array::I64(self.numbers(count, what, i64::from_le_bytes)?),
            12 => Array::F64(self.numbers(count, what, f64::from_le_bytes)?),
            other => malformed!("{what} is an array of the unknown type {other}"),
        })
    }

    fn numbers<const N: usize, T>(&mut self, count: u64, what: &str, convert: impl Fn([u8; N]) -> T) -> Result<Vec<T>, Problem> {
        let count = self.count(count, N as u64, what)?;
        let bytes = self.take((count * N) as u64, what)?;
        Ok(chunks(bytes).map(convert).collect())
    }

    fn tensor(&mut self, index: usize) -> Result<TableLine, Problem> {
        let name = self.text(&format!("the name of tensor {index}"))?;
        let tensor = format!("tensor `{}`", shown(&name));
        let dimensions = self.u32(&tensor)?;
        if dimensions > MAX_DIMENSIONS {
            malformed!("{tensor} has {dimensions} dimensions; at most {MAX_DIMENSIONS} are possible");
        }
        let mut shape = (0..dimensions).map(|_| self.u64(&tensor)).collect::<Result<Vec<_>, _>>()?;
        shape.reverse();
        let source_type = source_type(&tensor, self.u32(&tensor)?)?;
        let offset = self.u64(&tensor)?;
        Ok(TableLine { name, source_type, shape, offset })
    }
}

fn truth([byte]: [u8; 1], what: &str) -> Result<bool, Problem> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        _ => malformed!("{what} should be true (1) or false (0) but is {byte}"),
    }
}

/// All types that GGUF files have had, by their number.
const TYPE_NAMES: [&str; 43] = [
    "F32",
    "F16",
    "Q4_0",
    "Q4_1",
    "Q4_2",
    "Q4_3",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q8_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "Q8_K",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ3_XXS",
    "IQ1_S",
    "IQ4_NL",
    "IQ3_S",
    "IQ2_S",
    "IQ4_XS",
    "I8",
    "I16",
    "I32",
    "I64",
    "F64",
    "IQ1_M",
    "BF16",
    "Q4_0_4_4",
    "Q4_0_4_8",
    "Q4_0_8_8",
    "TQ1_0",
    "TQ2_0",
    "IQ4_NL_4_4",
    "IQ4_NL_4_8",
    "IQ4_NL_8_8",
    "MXFP4",
    "NVFP4",
    "Q1_0",
    "Q2_0",
];

const READABLE: [(u32, SourceType); 16] = [
    (0, SourceType::F32),
    (1, SourceType::F16),
    (30, SourceType::Bf16),
    (8, SourceType::Q8_0),
    (2, SourceType::Q4_0),
    (3, SourceType::Q4_1),
    (6, SourceType::Q5_0),
    (7, SourceType::Q5_1),
    (12, SourceType::Q4K),
    (13, SourceType::Q5K),
    (14, SourceType::Q6K),
    (24, SourceType::I8),
    (25, SourceType::I16),
    (26, SourceType::I32),
    (27, SourceType::I64),
    (28, SourceType::F64),
];

fn source_type(tensor: &str, number: u32) -> Result<SourceType, Problem> {
    if let Some((_, source_type)) = READABLE.iter().find(|(n, _)| *n == number) {
        return Ok(*source_type);
    }
    let readable = "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K and Q6_K";
    match TYPE_NAMES.get(number as usize) {
        Some(name) => unsupported!("{tensor} has type {name}, which qhx does not read; take a file whose tensors are {readable}"),
        None => unsupported!("{tensor} has the unknown type number {number}; qhx reads {readable}"),
    }
}

/// The number by which GGUF files call a type; `None` for types that GGUF does not have.
pub(crate) fn type_number(source_type: SourceType) -> Option<u32> {
    READABLE.iter().find(|(_, t)| *t == source_type).map(|(n, _)| *n)
}

#[cfg(test)]
mod tests;

//! Headers of weight files: reading them from hostile bytes, and writing them so that the data is aligned.
//!
//! A file is `u64` header length, JSON header, data. Every byte of the data belongs to exactly one tensor.

use crate::layout::{DATA_ALIGNMENT, StoredType};
use qhx_ir::Encoding;
use serde::{
    Deserialize, Serialize,
    de::{Error as _, MapAccess, Visitor},
};
use std::{
    collections::{BTreeMap, HashMap, btree_map::Entry as MapEntry},
    fmt,
    ops::Range,
};

/// The largest header, in bytes. Enough for a hundred thousand tensors.
pub const MAX_HEADER_BYTES: usize = 16 << 20;
const METADATA: &str = "__metadata__";
const MAX_RANK: usize = 8;

/// A stored tensor's place in its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    /// Element type.
    pub dtype: StoredType,
    /// Stored shape.
    pub shape: Vec<usize>,
    /// Where its bytes are, counted from the start of the file.
    pub range: Range<usize>,
}

/// What a header says.
#[derive(Debug, Default)]
pub struct Header {
    /// The stored tensors by name.
    pub tensors: HashMap<String, StoredTensor>,
    /// What the file says about itself. Weight files name each weight with its encoding and logical shape: see [`description`].
    pub metadata: BTreeMap<String, String>,
}

/// How a weight file describes a weight: `i8_row [5, 33]`. Padding hides the length of rows from the stored shapes; this does not.
pub fn description(encoding: Encoding, shape: &[usize]) -> String {
    format!("{encoding} {shape:?}")
}

/// Reads the header of a whole file. Every range is inside the file, fits its shape, and overlaps no other.
pub fn read_header(file: &[u8]) -> Result<Header, String> {
    let (prefix, rest) = file.split_first_chunk::<8>().ok_or_else(|| format!("has {} bytes, too few for a header", file.len()))?;
    let length = usize::try_from(u64::from_le_bytes(*prefix)).unwrap_or(usize::MAX);
    if length > MAX_HEADER_BYTES {
        return Err(format!("claims a header of {length} bytes, more than the limit of {MAX_HEADER_BYTES}: not a weight file"));
    }
    let header = rest.get(..length).ok_or_else(|| format!("is truncated: its header has {length} bytes, the file {}", file.len()))?;
    if header.first() != Some(&b'{') {
        return Err("has no JSON header: not a weight file".into());
    }
    let Entries { entries, metadata } = serde_json::from_slice(header).map_err(|e| format!("header: {e}"))?;
    let start = 8 + length;
    let mut tensors = Vec::with_capacity(entries.len());
    for (name, entry) in entries {
        let tensor = entry.place(start, file.len()).map_err(|reason| format!("tensor `{}`: {reason}", shown(&name)))?;
        tensors.push((name, tensor));
    }
    check_cover(&mut tensors, start, file.len())?;
    Ok(Header { tensors: tensors.into_iter().collect(), metadata })
}

/// Every byte of the data belongs to exactly one tensor.
fn check_cover(tensors: &mut [(String, StoredTensor)], start: usize, end: usize) -> Result<(), String> {
    tensors.sort_by_key(|(_, t)| (t.range.start, t.range.end));
    let mut next = start;
    let mut previous = "the header";
    for (name, tensor) in tensors.iter() {
        if tensor.range.start < next {
            return Err(format!("tensors `{}` and `{}` overlap", shown(previous), shown(name)));
        }
        if tensor.range.start > next {
            return Err(format!("bytes {next} to {} belong to no tensor", tensor.range.start));
        }
        (next, previous) = (tensor.range.end, name);
    }
    if next != end {
        return Err(format!("has {} bytes after its last tensor", end - next));
    }
    Ok(())
}

/// The first bytes of a file with these tensors (name, type, shape, bytes), which follow each other in this order: length and header, padded
/// with spaces so that the data starts at a multiple of [`DATA_ALIGNMENT`].
pub(crate) fn write_header<'a>(
    tensors: impl IntoIterator<Item = (&'a str, StoredType, &'a [usize], usize)>,
    metadata: BTreeMap<String, String>,
) -> Result<Vec<u8>, String> {
    let mut header = serde_json::Map::new();
    header.insert(METADATA.into(), serde_json::to_value(metadata).map_err(|e| e.to_string())?);
    let mut offset = 0usize;
    for (name, dtype, shape, bytes) in tensors {
        let end = offset.checked_add(bytes).ok_or("the file would be too large")?;
        let entry = Entry { dtype, shape: shape.to_vec(), data_offsets: (offset, end) };
        let entry = serde_json::to_value(entry).map_err(|e| e.to_string())?;
        if name == METADATA || header.insert(name.into(), entry).is_some() {
            return Err(format!("two stored tensors would be named `{name}`"));
        }
        offset = end;
    }
    let mut json = serde_json::to_vec(&header).map_err(|e| e.to_string())?;
    json.resize((8 + json.len()).next_multiple_of(DATA_ALIGNMENT) - 8, b' ');
    if json.len() > MAX_HEADER_BYTES {
        return Err(format!("a header of {} bytes is more than the {MAX_HEADER_BYTES} that can be read", json.len()));
    }
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut json);
    Ok(bytes)
}

/// A tensor as the header describes it.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    dtype: StoredType,
    shape: Vec<usize>,
    data_offsets: (usize, usize),
}

impl Entry {
    fn place(self, start: usize, file: usize) -> Result<StoredTensor, String> {
        let (from, to) = self.data_offsets;
        let range = start.checked_add(from).zip(start.checked_add(to)).map(|(a, b)| a..b).filter(|r| r.start <= r.end);
        let range = range.ok_or_else(|| format!("data_offsets [{from}, {to}] are not a valid range"))?;
        if self.shape.len() > MAX_RANK {
            return Err(format!("has {} dimensions, more than {MAX_RANK}", self.shape.len()));
        }
        let bytes = self.shape.iter().try_fold(self.dtype.bytes(), |n, &d| n.checked_mul(d));
        if bytes != Some(range.len()) {
            return Err(format!("{} {:?} does not take the {} bytes that the header gives it", self.dtype, self.shape, range.len()));
        }
        if range.end > file {
            return Err(format!("ends at byte {}, but the file has {file}: it is truncated", range.end));
        }
        Ok(StoredTensor { dtype: self.dtype, shape: self.shape, range })
    }
}

#[derive(Default)]
struct Entries {
    entries: BTreeMap<String, Entry>,
    metadata: BTreeMap<String, String>,
}

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with an entry for each tensor")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Entries, A::Error> {
                let mut all = Entries::default();
                while let Some(name) = access.next_key::<String>()? {
                    if name == METADATA {
                        all.metadata = access.next_value()?;
                        continue;
                    }
                    match all.entries.entry(name) {
                        MapEntry::Occupied(known) => {
                            return Err(A::Error::custom(format_args!("tensor `{}` appears twice", shown(known.key()))));
                        }
                        MapEntry::Vacant(place) => {
                            place.insert(access.next_value()?);
                        }
                    }
                }
                Ok(all)
            }
        }
        deserializer.deserialize_map(Reader)
    }
}

/// A name out of a file may be long or strange: an error shows its start, escaped.
fn shown(name: &str) -> String {
    name.chars().take(120).flat_map(char::escape_debug).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    fn error(header: &str, data: usize) -> String {
        read_header(&file(header, data)).unwrap_err()
    }

    #[test]
    fn written_headers_are_read_and_aligned() {
        let about = BTreeMap::from([("a".to_string(), description(Encoding::F32, &[2, 3]))]);
        let tensors = [("a", StoredType::F32, &[2, 3][..], 24), ("__pad.0", StoredType::U8, &[40], 40)];
        let mut bytes = write_header(tensors, about).unwrap();
        assert_eq!(bytes.len(), 4096);
        bytes.resize(4096 + 64, 0);
        let Header { tensors, metadata } = read_header(&bytes).unwrap();
        assert_eq!(metadata["a"], "f32 [2, 3]");
        assert_eq!(tensors["a"], StoredTensor { dtype: StoredType::F32, shape: vec![2, 3], range: 4096..4120 });
        assert_eq!(tensors["__pad.0"].range, 4120..4160);
    }

    #[test]
    fn names_cannot_collide() {
        let two = [("a", StoredType::U8, &[1][..], 1), ("a", StoredType::U8, &[1][..], 1)];
        assert!(write_header(two, BTreeMap::new()).unwrap_err().contains("two stored tensors"));
        assert!(write_header([("__metadata__", StoredType::U8, &[1][..], 1)], BTreeMap::new()).is_err());
    }

    #[test]
    fn wrong_headers_are_errors() {
        assert!(read_header(&[1, 2]).unwrap_err().contains("2 bytes"));
        assert!(read_header(&u64::MAX.to_le_bytes()).unwrap_err().contains("claims a header"));
        assert!(read_header(&100u64.to_le_bytes()).unwrap_err().contains("truncated"));
        assert!(error("[]", 0).contains("no JSON header"));
        assert!(error("{", 0).contains("header"));
        let one = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
        assert!(read_header(&file(one, 8)).is_ok());
        assert!(error(one, 7).contains("truncated"));
        assert!(error(one, 9).contains("after its last tensor"));
        assert!(error(&one.replace("[2]", "[3]"), 8).contains("`a`: F32 [3] does not take the 8 bytes"));
        assert!(error(&one.replace("[2]", "[1152921504606846976,1152921504606846976]"), 8).contains("does not take"));
        assert!(error(&one.replace("[0,8]", "[8,0]"), 8).contains("are not a valid range"));
        assert!(error(&one.replace("[0,8]", "[18446744073709551608,18446744073709551615]"), 8).contains("are not a valid range"));
        assert!(error(&one.replace("[0,8]", "[1,9]"), 9).contains("belong to no tensor"));
        assert!(error(&one.replace("F32", "F33"), 8).contains("F33"));
        assert!(error(&one.replace("\"shape\"", "\"shapes\""), 8).contains("shapes"));
        let two = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#;
        assert!(error(two, 6).contains("`a` and `b` overlap"));
        assert!(error(&two.replace("\"b\"", "\"a\""), 6).contains("twice"));
    }
}

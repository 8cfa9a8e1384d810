//! The safetensors reader: one file, or a folder of shards with an index.
//!
//! A file is 8 bytes of header length, a JSON header (name → dtype, shape, begin and end), then the data. The header is read here and
//! not by the `safetensors` crate, because every mistake must be reported with the tensor's name and both numbers, duplicate names must
//! be seen (a JSON map hides them), and types that we cannot forge (8-bit floats) should be refused by name before any work is done.

use super::source::{Entry, RowOrder};
use super::{Mapping, Problem, ReadError, SourceType, TensorInfo, TensorSource, element_count, malformed, shown, unsupported};
use serde::de::{Deserializer, MapAccess, Visitor};
use serde::{Deserialize, de};
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::{fmt, ops::Range};

/// The longest header that is read: 100 MB, as in the format's own library.
pub const MAX_HEADER: u64 = 100_000_000;

const FORMAT: &str = "safetensors file";
const INDEX: &str = "model.safetensors.index.json";

/// A tensor of a header and the bytes of the file that hold it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderTensor {
    /// Name, type and shape.
    pub info: TensorInfo,
    /// Where its data is, counted from the start of the file.
    pub range: Range<usize>,
}

/// Reads and checks the header of a file's bytes: all ranges lie inside the file, fit shape and type, and cover the data without overlap or hole.
pub fn parse_header(file: &[u8]) -> Result<Vec<HeaderTensor>, Problem> {
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        malformed!("it has {} bytes, too short even for the header's length: is it truncated?", file.len());
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER {
        malformed!("it claims a header of {length} bytes, more than the {MAX_HEADER} allowed: is it a safetensors file at all?");
    }
    let Some((header, data)) = rest.split_at_checked(length as usize) else {
        malformed!("the header should have {length} bytes but the file ends after {}: is it truncated?", rest.len());
    };
    if header.first() != Some(&b'{') {
        malformed!("the header does not begin with `{{`: is it a safetensors file at all?");
    }
    let header: Header = serde_json::from_slice(header).map_err(|e| Problem::Malformed(format!("the header: {e}")))?;

    let data_start = file.len() - data.len();
    let mut names = HashSet::new();
    let mut tensors = Vec::with_capacity(header.0.len());
    for (name, entry) in &header.0 {
        if !names.insert(name) {
            malformed!("the header has tensor `{}` twice", shown(name));
        }
        tensors.push(check_entry(name, entry, data.len(), data_start)?);
    }
    check_cover(&tensors, data_start, file.len())?;
    Ok(tensors)
}

/// A header entry as written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// The header as a list, so that duplicates can be seen.
struct Header(Vec<(String, RawEntry)>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Header;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Header, M::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<Option<BTreeMap<String, String>>>()
                            .map_err(|e| de::Error::custom(format!("`__metadata__` must map text to text: {e}")))?;
                        continue;
                    }
                    let entry = map.next_value().map_err(|e| de::Error::custom(format!("tensor `{}`: {e}", shown(&name))))?;
                    entries.push((name, entry));
                }
                Ok(Header(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

fn check_entry(name: &str, entry: &RawEntry, data_len: usize, data_start: usize) -> Result<HeaderTensor, Problem> {
    let tensor = shown(name);
    let source_type = source_type(&tensor, &entry.dtype)?;
    let elements = element_count(&tensor, &entry.shape)?;
    let (begin, end) = entry.data_offsets;
    if begin > end {
        malformed!("tensor `{tensor}` begins at byte {begin} of the data but ends before it, at {end}");
    }
    if end > data_len as u64 {
        malformed!("tensor `{tensor}` ends at byte {end} of the data but the file has only {data_len} there: is it truncated?");
    }
    let expected = elements * source_type.block().1 as u64; // element_count keeps this far from overflow
    if end - begin != expected {
        let shape = &entry.shape;
        malformed!("tensor `{tensor}` has {} bytes but its shape {shape:?} of {source_type} needs {expected}", end - begin);
    }
    // Without elements a dimension may still be too large for this machine.
    let Ok(shape) = entry.shape.iter().map(|&d| usize::try_from(d)).collect::<Result<Vec<_>, _>>() else {
        malformed!("tensor `{tensor}` has shape {:?}, too large for this machine", entry.shape);
    };
    let info = TensorInfo { name: name.to_string(), source_type, shape };
    Ok(HeaderTensor { info, range: data_start + begin as usize..data_start + end as usize })
}

fn source_type(tensor: &str, dtype: &str) -> Result<SourceType, Problem> {
    Ok(match dtype {
        "F64" => SourceType::F64,
        "F32" => SourceType::F32,
        "F16" => SourceType::F16,
        "BF16" => SourceType::Bf16,
        "I64" => SourceType::I64,
        "I32" => SourceType::I32,
        "I16" => SourceType::I16,
        "I8" => SourceType::I8,
        "U8" => SourceType::U8,
        "BOOL" => SourceType::Bool,
        "F8_E4M3" | "F8_E5M2" | "F8_E8M0" | "F8_E4M3FNUZ" | "F8_E5M2FNUZ" | "F6_E2M3" | "F6_E3M2" | "F4" | "U16" | "U32" | "U64"
        | "C64" => {
            unsupported!(
                "tensor `{tensor}` has type {dtype}, which qhx does not read (this is an already quantised checkpoint); \
                 take the original one in BF16, F16 or F32, or a GGUF file"
            )
        }
        _ => malformed!(
            "tensor `{tensor}` has the unknown type `{}`; known are F64, F32, F16, BF16, I64, I32, I16, I8, U8, BOOL",
            shown(dtype)
        ),
    })
}

/// The format asks that the tensors cover the data exactly. A hole or a tail could hide anything, and an overlap is never honest.
fn check_cover(tensors: &[HeaderTensor], data_start: usize, file_len: usize) -> Result<(), Problem> {
    let mut order: Vec<&HeaderTensor> = tensors.iter().collect();
    order.sort_by_key(|t| (t.range.start, t.range.end));
    let (mut end, mut previous) = (data_start, "");
    for tensor in order {
        let name = shown(&tensor.info.name);
        let at = tensor.range.start - data_start;
        if tensor.range.start < end {
            malformed!("tensors `{}` and `{name}` overlap at byte {at} of the data", shown(previous));
        }
        if tensor.range.start > end {
            malformed!("{} bytes before tensor `{name}` (byte {at} of the data) belong to no tensor", tensor.range.start - end);
        }
        (end, previous) = (tensor.range.end, &tensor.info.name);
    }
    if end != file_len {
        malformed!("the last {} bytes belong to no tensor: is it two files in one, or still being written?", file_len - end);
    }
    Ok(())
}

/// Opens the safetensors files of a Hugging Face folder: `model.safetensors`, the shards that an index names, or the only such file there is.
pub fn open_folder(folder: &Path) -> Result<TensorSource, ReadError> {
    let single = folder.join("model.safetensors");
    let index = folder.join(INDEX);
    if single.is_file() {
        open_file(&single)
    } else if index.is_file() {
        open_shards(folder, &index)
    } else {
        open_file(&only_file(folder)?)
    }
}

/// Opens one file.
pub fn open_file(path: &Path) -> Result<TensorSource, ReadError> {
    let (file, tensors) = open_mapped(path)?;
    let entries = tensors.into_iter().map(|t| entry(t, 0)).collect();
    Ok(TensorSource::new(vec![file], entries))
}

fn open_mapped(path: &Path) -> Result<(Mapping, Vec<HeaderTensor>), ReadError> {
    let file = Mapping::open(path)?;
    let tensors = parse_header(file.bytes()).map_err(|e| e.at(path, FORMAT))?;
    Ok((file, tensors))
}

fn entry(tensor: HeaderTensor, file: usize) -> Entry {
    Entry { info: tensor.info, file, range: tensor.range, order: RowOrder::Stored }
}

/// The index names the shard of every tensor; all shards must be there and have what the index says.
fn open_shards(folder: &Path, index: &Path) -> Result<TensorSource, ReadError> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let bytes = super::checkpoint::read_limited(index, MAX_HEADER)?;
    let malformed = |reason: String| Problem::Malformed(reason).at(index, "safetensors index");
    let weight_map = serde_json::from_slice::<Index>(&bytes).map_err(|e| malformed(e.to_string()))?.weight_map;
    if weight_map.is_empty() {
        return Err(malformed("its `weight_map` is empty".into()));
    }

    let mut shards: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (tensor, shard) in &weight_map {
        if !is_plain_file_name(shard) {
            let (tensor, shard) = (shown(tensor), shown(shard));
            return Err(malformed(format!(
                "tensor `{tensor}` is said to be in `{shard}`, which is not the plain name of a .safetensors file"
            )));
        }
        shards.entry(shard).or_default().push(tensor);
    }

    let (mut files, mut entries) = (Vec::new(), Vec::new());
    for (shard, tensors) in shards {
        let path = folder.join(shard);
        if !path.is_file() {
            return Err(malformed(format!("it names the shard `{shard}`, which is not in the folder: is the download complete?")));
        }
        let (file, mut found) = open_mapped(&path)?;
        let wanted: HashSet<&str> = tensors.iter().copied().collect();
        found.retain(|t| wanted.contains(t.info.name.as_str()));
        if found.len() != wanted.len() {
            let there: HashSet<&str> = found.iter().map(|t| t.info.name.as_str()).collect();
            let missing = tensors.iter().find(|t| !there.contains(*t)).copied().unwrap_or_default();
            return Err(malformed(format!("it says that tensor `{}` is in `{shard}`, but that shard does not have it", shown(missing))));
        }
        entries.extend(found.into_iter().map(|t| entry(t, files.len())));
        files.push(file);
    }
    Ok(TensorSource::new(files, entries))
}

/// A name without any path in it, on any system.
fn is_plain_file_name(name: &str) -> bool {
    name.ends_with(".safetensors") && !name.starts_with('.') && !name.contains(['/', '\\', ':', '\0'])
}

/// The one `*.safetensors` of a folder that has neither the usual file nor an index.
fn only_file(folder: &Path) -> Result<PathBuf, ReadError> {
    let io = |source| ReadError::Io { path: folder.to_path_buf(), source };
    let mut found = Vec::new();
    let mut pickled = false;
    for item in std::fs::read_dir(folder).map_err(io)? {
        let path = item.map_err(io)?.path();
        match path.extension().and_then(|e| e.to_str()) {
            Some("safetensors") => found.push(path),
            Some("bin" | "pt" | "pth") => pickled = true,
            _ => {}
        }
    }
    let unsupported = |reason| Err(ReadError::Unsupported { path: folder.to_path_buf(), reason });
    match found.len() {
        1 => Ok(found.remove(0)),
        0 if pickled => unsupported(
            "the weights are PyTorch pickle files, which qhx does not read; save the model again with `save_pretrained`, which writes safetensors"
                .to_string(),
        ),
        0 => unsupported("there are no .safetensors files in this folder: is the download complete?".to_string()),
        n => unsupported(format!("there are {n} .safetensors files but no `{INDEX}` that says which holds what")),
    }
}

#[cfg(test)]
mod tests;

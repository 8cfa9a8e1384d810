//! Files of named f32 tensors (safetensors): traces and logits, for other tools to read and for `diff` to compare.

use crate::{Error, files};
use qhx_bundle::{files::read_given, layout::StoredType, safetensors::read_header};
use std::path::Path;

/// The largest file of tensors that is read, in bytes.
pub const MAX_TENSOR_FILE_BYTES: u64 = 16 << 30;

/// Numbers with a name and a shape.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Its name in the file.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// The numbers, row-major.
    pub values: Vec<f32>,
}

/// Writes tensors in their order, whole or not at all. An existing file is replaced.
pub fn write(path: &Path, tensors: &[Tensor]) -> Result<(), Error> {
    let wrong = |reason: String| Error::Tensors { path: path.to_owned(), reason };
    let mut header = serde_json::Map::new();
    let mut offset = 0;
    for tensor in tensors {
        if tensor.shape.iter().product::<usize>() != tensor.values.len() {
            return Err(wrong(format!("tensor `{}` of shape {:?} has {} numbers", tensor.name, tensor.shape, tensor.values.len())));
        }
        let end = offset + 4 * tensor.values.len();
        let entry = serde_json::json!({ "dtype": "F32", "shape": tensor.shape, "data_offsets": [offset, end] });
        if header.insert(tensor.name.clone(), entry).is_some() {
            return Err(wrong(format!("two tensors are named `{}`", tensor.name)));
        }
        offset = end;
    }
    let mut header = serde_json::to_vec(&header).map_err(|e| wrong(e.to_string()))?;
    header.resize(header.len().next_multiple_of(8), b' ');
    files::write_atomically(path, |file| {
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(&header)?;
        tensors.iter().flat_map(|t| &t.values).try_for_each(|x| file.write_all(&x.to_le_bytes()))
    })
}

/// Reads all tensors of a file that a person named, in the order of their content. Every one must be F32.
pub fn read(path: &Path) -> Result<Vec<Tensor>, Error> {
    parse(path, &read_given(path, MAX_TENSOR_FILE_BYTES)?)
}

/// The tensors of `bytes`, which errors say were read from `path`.
pub(crate) fn parse(path: &Path, bytes: &[u8]) -> Result<Vec<Tensor>, Error> {
    let wrong = |reason: String| Error::Tensors { path: path.to_owned(), reason };
    let mut stored: Vec<_> = read_header(bytes).map_err(wrong)?.tensors.into_iter().collect();
    stored.sort_by(|(a, x), (b, y)| (x.range.start, x.range.end, a).cmp(&(y.range.start, y.range.end, b)));
    let load = |(name, tensor): (String, qhx_bundle::safetensors::StoredTensor)| match tensor.dtype {
        StoredType::F32 => {
            let values = bytes[tensor.range].chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
            Ok(Tensor { name, shape: tensor.shape, values })
        }
        other => Err(wrong(format!("tensor `{name}` holds {other} numbers, expected F32"))),
    };
    stored.into_iter().map(load).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip_and_wrong_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.safetensors");
        let tensor = |name: &str, shape: &[usize]| {
            let numbers = shape.iter().product::<usize>();
            Tensor { name: name.into(), shape: shape.to_vec(), values: (0..numbers).map(|i| i as f32 - 0.5).collect() }
        };
        let tensors = [tensor("z", &[2, 3]), tensor("empty", &[0, 3]), tensor("a", &[4])];
        write(&path, &tensors).unwrap();
        let read_back = read(&path).unwrap();
        assert_eq!(read_back.len(), 3);
        assert!(tensors.iter().all(|t| read_back.contains(t)));
        assert_eq!((read_back[0].name.as_str(), read_back[2].name.as_str()), ("z", "a"), "in the order of the content");

        assert!(write(&path, &[tensor("a", &[1]), tensor("a", &[1])]).unwrap_err().to_string().contains("two tensors"));
        let mut bytes = std::fs::read(&path).unwrap();
        bytes.pop();
        std::fs::write(&path, &bytes).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("truncated"));
    }
}

//! What a tower gives, as a file holds it.

use crate::{
    Error,
    tensors::{self, Tensor},
};
use qhx_bundle::Digest;
use std::path::Path;

/// Soft rows of a medium, and what else its tower gave.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Features {
    pub(crate) rows: usize,
    pub(crate) soft: Vec<f32>,
    pub(crate) deepstack: Vec<Vec<f32>>,
    /// Rows and columns of an image's soft rows.
    pub(crate) grid: Option<[usize; 2]>,
}

impl Features {
    /// Of the bytes of a file.
    pub(crate) fn parse(file: &Path, bytes: &[u8]) -> Result<Self, Error> {
        let wrong = |reason: String| Error::Tensors { path: file.to_owned(), reason };
        let mut tensors = tensors::parse(file, bytes)?;
        let mut take = |name: &str| tensors.iter().position(|tensor| tensor.name == name).map(|at| tensors.remove(at));
        let Tensor { shape, values: soft, .. } = take("soft_rows").ok_or_else(|| wrong("has no tensor `soft_rows`".into()))?;
        let &[rows, _] = &shape[..] else { return Err(wrong(format!("`soft_rows` must be [rows, width], found {shape:?}"))) };
        if rows == 0 || soft.iter().any(|x| !x.is_finite()) {
            return Err(wrong("`soft_rows` must be at least one row of numbers".into()));
        }
        let mut deepstack = Vec::new();
        while let Some(tensor) = take(&format!("deepstack.{}", deepstack.len())) {
            if tensor.shape != shape {
                return Err(wrong(format!("`{}` must be {shape:?} as `soft_rows`, found {:?}", tensor.name, tensor.shape)));
            }
            deepstack.push(tensor.values);
        }
        let grid = match take("grid") {
            None => None,
            Some(grid) => {
                let sides: Vec<usize> = grid.values.iter().map(|&side| side as usize).collect();
                match sides[..] {
                    [height, width] if height.checked_mul(width) == Some(rows) => Some([height, width]),
                    _ => return Err(wrong(format!("`grid` must be two numbers whose product is {rows}, found {:?}", grid.values))),
                }
            }
        };
        Ok(Self { rows, soft, deepstack, grid })
    }

    pub(crate) fn digest(&self) -> Digest {
        let numbers = self.soft.iter().chain(self.deepstack.iter().flatten());
        Digest::of(&numbers.flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_or_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("0.safetensors");
        let tensor = |name: &str, shape: &[usize], value: f32| Tensor {
            name: name.into(),
            shape: shape.to_vec(),
            values: vec![value; shape.iter().product()],
        };
        let read = |tensors: &[Tensor]| {
            tensors::write(&file, tensors).unwrap();
            Features::parse(&file, &std::fs::read(&file).unwrap()).map_err(|e| e.to_string())
        };
        let found = read(&[tensor("soft_rows", &[4, 3], 1.0), tensor("deepstack.0", &[4, 3], 2.0), tensor("grid", &[2], 2.0)]).unwrap();
        assert_eq!((found.rows, found.grid, found.deepstack.len()), (4, Some([2, 2]), 1));
        assert!(read(&[tensor("grid", &[2], 2.0)]).unwrap_err().contains("no tensor `soft_rows`"));
        assert!(read(&[tensor("soft_rows", &[4], 1.0)]).unwrap_err().contains("[rows, width]"));
        assert!(read(&[tensor("soft_rows", &[1, 2], f32::NAN)]).unwrap_err().contains("at least one row of numbers"));
        assert!(read(&[tensor("soft_rows", &[4, 3], 1.0), tensor("grid", &[2], 3.0)]).unwrap_err().contains("product is 4"));
        assert!(read(&[tensor("soft_rows", &[4, 3], 1.0), tensor("deepstack.0", &[4, 2], 1.0)]).unwrap_err().contains("[4, 2]"));
    }
}

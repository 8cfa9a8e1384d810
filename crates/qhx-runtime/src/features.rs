//! What an encoder made, read from files: a decoder can be tried without its towers and front ends.

use crate::{
    Error, MediaKind, Medium,
    tensors::{self, Tensor},
};
use qhx_bundle::{BundlePath, Digest, files, media::Media};
use std::path::Path;

/// The most bytes that the staged media of a bundle have together.
const MAX_STAGED_BYTES: u64 = 1 << 30;

/// Soft rows of a medium, and what else its tower gave.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Features {
    pub(crate) rows: usize,
    pub(crate) soft: Vec<f32>,
    pub(crate) deepstack: Vec<Vec<f32>>,
    /// Rows and columns of an image's soft rows.
    pub(crate) grid: Option<[usize; 2]>,
}

/// The media of a manifest's `fixture_dir`, the folder `staged` of the bundle at `root`: `0.safetensors` for a prompt's first medium, and so on. Each has `soft_rows` (rows by width); `deepstack.N` of the
/// same shape where the model reads them; and, for an image, `grid` of two numbers.
///
/// The files must be regular ones inside the bundle.
pub fn staged_media(root: &Path, staged: &BundlePath, model: &str, media: &Media) -> Result<Vec<Medium>, Error> {
    let cannot = |source| Error::File { what: "read", path: root.to_owned(), source };
    let root = root.canonicalize().map_err(cannot)?;
    let (mut found, mut left) = (Vec::new(), MAX_STAGED_BYTES);
    loop {
        let name = format!("{}/{}.safetensors", staged.as_str(), found.len());
        let path = root.join(&name);
        let inside = BundlePath::new(name).map_err(|e| Error::Tensors { path: path.clone(), reason: e.to_string() })?;
        let bytes = match files::read_inside(&root, &inside, left) {
            Err(error) if error.is_missing() && !found.is_empty() => return Ok(found),
            bytes => bytes?,
        };
        left -= bytes.len() as u64;
        let features = Features::parse(&path, &bytes)?;
        let kind = if features.grid.is_some() { MediaKind::Image } else { MediaKind::Audio };
        found.push(Medium::staged(kind, path.display().to_string(), features, model, media)?);
    }
}

impl Features {
    /// Of the bytes of a file.
    fn parse(file: &Path, bytes: &[u8]) -> Result<Self, Error> {
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

    #[cfg(unix)]
    #[test]
    fn only_regular_files_inside_the_bundle_are_read() {
        use std::{fs, os::unix::fs::symlink};
        let folder = tempfile::tempdir().unwrap();
        let (root, outside) = (folder.path().join("bundle"), folder.path().join("outside.safetensors"));
        fs::create_dir_all(root.join("staged")).unwrap();
        let file = root.join("staged/0.safetensors");
        let soft = Tensor { name: "soft_rows".into(), shape: vec![1, 2], values: vec![1.0; 2] };
        tensors::write(&outside, &[soft]).unwrap();
        let error = |name: &str| {
            let path = BundlePath::new(name).unwrap();
            staged_media(&root, &path, "m", &Media::default()).unwrap_err().to_string()
        };
        assert!(error("none").contains("cannot read") && error("staged").contains("cannot read"));
        symlink(&outside, &file).unwrap();
        assert!(error("staged").contains("outside the folder"), "{}", error("staged"));
        // A whole folder that is a link out.
        symlink(folder.path(), root.join("up")).unwrap();
        fs::rename(&outside, folder.path().join("0.safetensors")).unwrap();
        assert!(error("up").contains("outside the folder"), "{}", error("up"));
        fs::remove_file(&file).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(&file).status().unwrap().success());
        assert!(error("staged").contains("is a FIFO"), "{}", error("staged"));
        fs::remove_file(&file).unwrap();
        fs::File::create(&file).unwrap().set_len(1 << 40).unwrap();
        assert!(error("staged").contains("has 1099511627776 bytes; the limit is 1073741824 bytes"), "{}", error("staged"));
    }
}

//! Media of which a bundle has what their towers make: a decoder can be tried without its towers and front ends.

use crate::{Error, Medium, features::Features};
use qhx_bundle::{BundlePath, files, media::Media};
use qhx_media::MediaKind;
use std::path::Path;

/// The most bytes that the staged media of a bundle have together.
const MAX_STAGED_BYTES: u64 = 1 << 30;

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
        let digest = features.digest();
        found.push(Medium::staged(kind, path.display().to_string(), features, digest, model, media)?);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensors::{self, Tensor};

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

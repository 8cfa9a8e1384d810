//! Writing a bundle: complete under its final name, or not there at all.
//!
//! ```no_run
//! # use qhx_bundle::{*, write::*};
//! # fn example(program: &qhx_ir::Program, rows: &[u8], manifest: Manifest) -> Result<(), BundleError> {
//! let mut writer = BundleWriter::create("my-model", WriteOptions::default())?;
//! writer.add_program(program)?;
//! writer.declare_weights(TensorSpec::of_programs([program]))?;
//! writer.write_rows("embed_tokens", layout::Part::Data, 0, rows)?; // and so on, in any order, from any thread
//! let mut staged = writer.stage(manifest)?;                        // everything is on disk, under a temporary name
//! let bundle = staged.open()?;                                     // … so the gates can run it
//! staged.set_parity(b"{}")?;
//! staged.publish()?;                                               // or `reject`; dropping it removes everything
//! # Ok(()) }
//! ```

mod folder;
mod listed;
mod ours;
mod target;
mod tensors;

use crate::{
    Bundle, BundleError, BundlePath, Digest, Manifest, OpenOptions, Verify,
    layout::Part,
    manifest::{FileEntry, MANIFEST_FILE},
    parity::PARITY_FILE,
};
use folder::write_synced;
pub use folder::{TemporaryFolder, check_free};
use listed::Listed;
pub use ours::check_replaceable;
use qhx_ir::{Program, WeightTensor};
use std::{
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicBool},
};
pub use target::TargetWriter;
pub use tensors::TensorSpec;
use tensors::{PartSum, PartSums, WeightFiles, sum_of_rows};

/// How a bundle is written.
#[derive(Clone, Debug)]
pub struct WriteOptions {
    /// Whether a bundle that is there already is replaced. Anything else that is there never is, nor is a bundle with files that it does not list.
    pub replace: bool,
    /// Data bytes per weight file; a larger tensor gets a file of its own.
    pub weight_file_bytes: u64,
    /// Ends the writing with [`BundleError::Cancelled`] when set.
    pub cancel: Option<Arc<AtomicBool>>,
}

impl Default for WriteOptions {
    fn default() -> Self {
        Self { replace: false, weight_file_bytes: 4 << 30, cancel: None }
    }
}

/// A bundle that is being written. Dropping it removes everything.
pub struct BundleWriter {
    listed: Listed,
    weight_file_bytes: u64,
    weights: Option<WeightFiles>,
}

/// A complete bundle under a temporary name. Dropping it removes it.
pub struct Staged {
    folder: TemporaryFolder,
    manifest: Manifest,
    /// Of the weights as they were given.
    sums: PartSums,
}

impl BundleWriter {
    /// Starts a bundle that will stand at `place`. What dead processes left half-written for that place is removed.
    pub fn create(place: impl AsRef<Path>, options: WriteOptions) -> Result<Self, BundleError> {
        let folder = TemporaryFolder::create(place.as_ref(), options.replace)?;
        Ok(Self { listed: Listed::new(folder, options.cancel), weight_file_bytes: options.weight_file_bytes, weights: None })
    }

    /// Writes a file: a tokenizer, a template …
    pub fn add_file(&mut self, path: &BundlePath, content: &[u8]) -> Result<(), BundleError> {
        self.listed.add_file(path, content)
    }

    /// Writes a program as `programs/NAME.json`.
    pub fn add_program(&mut self, program: &Program) -> Result<(), BundleError> {
        self.listed.add_program(program)
    }

    /// Says which weights there will be, once, so that every place in the files is known before the first number is.
    pub fn declare_weights(&mut self, tensors: impl IntoIterator<Item = TensorSpec>) -> Result<(), BundleError> {
        self.listed.check_cancel()?;
        if self.weights.is_some() {
            return Err(self.listed.folder.wrong("weights are declared twice".into()));
        }
        let all = vec![(String::new(), tensors.into_iter().collect())];
        self.weights = Some(WeightFiles::create(&self.listed.folder, all, self.weight_file_bytes)?);
        Ok(())
    }

    /// Writes whole rows of one stored part of a weight: `bytes` are rows as stored, padding included. Rows come in any order, each once.
    pub fn write_rows(&self, name: &str, part: Part, first_row: usize, bytes: &[u8]) -> Result<(), BundleError> {
        match &self.weights {
            Some(weights) => weights.write_rows(&self.listed.folder, name, part, first_row, bytes, || self.listed.check_cancel()),
            None => Err(self.listed.folder.wrong("weights are written before they are declared".into())),
        }
    }

    /// Writes all parts of consecutive rows, given as a tensor of the same encoding and row length.
    pub fn write_tensor_rows(&self, name: &str, first_row: usize, rows: &WeightTensor) -> Result<(), BundleError> {
        match &self.weights {
            Some(weights) => weights.write_tensor(&self.listed.folder, name, first_row, rows, &|| self.listed.check_cancel()),
            None => Err(self.listed.folder.wrong("weights are written before they are declared".into())),
        }
    }

    /// Completes all files under the temporary name. `programs`, `weights` and `files` of the manifest are filled in here.
    pub fn stage(self, manifest: Manifest) -> Result<Staged, BundleError> {
        self.listed.check_cancel()?;
        let Self { listed: Listed { folder, programs, mut files, cancel }, weights, .. } = self;
        let sums = weights.as_ref().map(WeightFiles::sums).unwrap_or_default();
        let weights = match weights {
            Some(weights) => weights.complete(&folder, cancel.as_deref())?,
            None => Vec::new(),
        };
        let names = weights.iter().map(|(path, _)| path.clone()).collect();
        files.extend(weights);
        let staged = Staged { folder, manifest: Manifest { programs, weights: names, files, ..manifest }, sums };
        staged.write_manifest()?;
        Ok(staged)
    }

    /// Completes the bundle, opens it once as a reader would, and gives it its final name, which is returned.
    pub fn finish(self, manifest: Manifest) -> Result<PathBuf, BundleError> {
        let staged = self.stage(manifest)?;
        staged.open()?;
        staged.publish()
    }
}

impl Staged {
    /// Where it is now.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Its manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Opens it with every check but the sums of large files, which were taken a moment ago.
    pub fn open(&self) -> Result<Bundle, BundleError> {
        Bundle::open_with(self.path(), &OpenOptions { verify: Verify::Written, cache_dir: None, cancel: None })
    }

    /// A weight, and the part of it, whose bytes in the files are not those that were given to the writer; none where all are.
    pub fn changed_weight(&self) -> Result<Option<(&str, Part)>, BundleError> {
        let bundle = self.open()?;
        for (name, parts) in &self.sums {
            let Some(tensor) = bundle.weights().tensor(name) else { continue };
            for &PartSum { part, row_bytes, sum } in parts {
                let bytes = match part {
                    Part::Data => tensor.data(),
                    Part::Scale => tensor.scale(),
                    Part::Min => tensor.min(),
                };
                if sum_of_rows(0, row_bytes, bytes) != sum {
                    return Ok(Some((name, part)));
                }
            }
        }
        Ok(None)
    }

    /// Adds, or replaces, what the gates measured.
    pub fn set_parity(&mut self, content: &[u8]) -> Result<(), BundleError> {
        let path = BundlePath::new(PARITY_FILE).map_err(|e| self.folder.wrong(e.to_string()))?;
        self.manifest.parity = Some(path.clone());
        self.set_file(&path, content)
    }

    /// Replaces a program by one that names the same weights in the same form.
    pub fn set_program(&mut self, program: &Program) -> Result<(), BundleError> {
        let known = self.manifest.programs.get(&*program.name).map(|entry| entry.file.clone());
        let file = known.ok_or_else(|| self.folder.wrong(format!("there is no program `{}` to replace", program.name)))?;
        self.set_file(&file, program.to_json().as_bytes())
    }

    /// Adds, or replaces, a file that is no weight file.
    pub fn set_file(&mut self, path: &BundlePath, content: &[u8]) -> Result<(), BundleError> {
        if path.as_str() == MANIFEST_FILE || self.manifest.weights.contains(path) {
            return Err(self.folder.wrong(format!("`{path}` is not for replacing")));
        }
        self.folder.add(path, content)?;
        self.manifest.files.insert(path.clone(), FileEntry { bytes: content.len() as u64, sha256: Digest::of(content) });
        self.write_manifest()
    }

    /// Gives it its final name, which is returned. Until the one rename that does it, nothing at the final place has changed.
    pub fn publish(self) -> Result<PathBuf, BundleError> {
        self.folder.publish()
    }

    /// Gives it the final name with `.rejected` behind it, for a person to look at: it has not passed its gate. An earlier rejected one is replaced.
    pub fn reject(self) -> Result<PathBuf, BundleError> {
        self.folder.reject()
    }

    fn write_manifest(&self) -> Result<(), BundleError> {
        let wrong = |source| BundleError::Manifest { manifest: self.folder.place().display().to_string(), source };
        self.manifest.check().map_err(wrong)?;
        let text = self.manifest.to_json().map_err(wrong)?;
        write_synced(&self.path().join(MANIFEST_FILE), text.as_bytes())
    }
}

//! Writing an arch folder inside a bundle that is staged: it appears with the bundle, or not at all.

use super::{
    Staged,
    folder::write_synced,
    listed::Listed,
    tensors::{TensorSpec, WeightFiles},
};
use crate::{Bundle, BundleError, BundlePath, Manifest, OpenOptions, Verify, parity::REJECTED};
use qhx_ir::{Program, WeightTensor};
use std::{
    collections::BTreeSet,
    path::Path,
    sync::{Arc, atomic::AtomicBool},
};

/// An arch folder that is being written.
pub struct TargetWriter {
    listed: Listed,
    weights: Option<WeightFiles>,
}

impl Staged {
    /// Starts the arch folder `name`.
    pub fn target(&self, name: &str, cancel: Option<Arc<AtomicBool>>) -> Result<TargetWriter, BundleError> {
        let name = BundlePath::new(name).map_err(|e| self.folder.wrong(e.to_string()))?;
        Ok(TargetWriter { listed: Listed::new(self.folder.inside(&name)?, cancel), weights: None })
    }

    /// Puts `.rejected` behind the name of an arch folder: it has not passed its gate.
    pub fn reject_target(&self, name: &str) -> Result<(), BundleError> {
        let place = self.path().join(name);
        std::fs::rename(&place, self.path().join(format!("{name}{REJECTED}"))).map_err(BundleError::io("rename", &place))
    }
}

impl TargetWriter {
    /// Where files are to be put that [`TargetWriter::adopt`] will list.
    pub fn path(&self) -> &Path {
        self.listed.folder.path()
    }

    /// Writes a file.
    pub fn add_file(&mut self, path: &BundlePath, content: &[u8]) -> Result<(), BundleError> {
        self.listed.add_file(path, content)
    }

    /// Lists a file that somebody else wrote into the folder.
    pub fn adopt(&mut self, path: &BundlePath) -> Result<(), BundleError> {
        self.listed.adopt(path)
    }

    /// Writes a program as `programs/NAME.json`.
    pub fn add_program(&mut self, program: &Program) -> Result<(), BundleError> {
        self.listed.add_program(program)
    }

    /// Writes weights, those of each group into files of their own: `weights/GROUP-00001-of-00001.safetensors`.
    pub fn add_weights(&mut self, groups: Vec<(String, Vec<(String, WeightTensor)>)>, file_bytes: u64) -> Result<(), BundleError> {
        let spec = |(name, tensor): &(String, WeightTensor)| TensorSpec {
            name: name.clone(),
            encoding: tensor.encoding(),
            shape: tensor.shape().to_vec(),
        };
        let specs = groups.iter().map(|(group, tensors)| (format!("{group}-"), tensors.iter().map(spec).collect())).collect();
        let listed = &self.listed;
        let files = WeightFiles::create(&listed.folder, specs, file_bytes)?;
        for (name, tensor) in groups.iter().flat_map(|(_, tensors)| tensors) {
            files.write_tensor(&listed.folder, name, 0, tensor, &|| listed.check_cancel())?;
        }
        self.weights = Some(files);
        Ok(())
    }

    /// Completes the folder: one manifest for each use, which lists the files that it needs and no others. `programs` of each given manifest names the programs
    /// of that use; their files, `weights` and `files` are filled in here. Every use is then opened once, as a reader would.
    pub fn finish(self, uses: Vec<(BundlePath, Manifest, BTreeSet<String>)>) -> Result<(), BundleError> {
        self.listed.check_cancel()?;
        let Self { listed: Listed { folder, cancel, programs, mut files }, weights } = self;
        let weights = match weights {
            Some(weights) => weights.complete(&folder, cancel.as_deref())?,
            None => Vec::new(),
        };
        files.extend(weights.iter().cloned());
        for (file, manifest, used) in uses {
            let is_of = |path: &&BundlePath| used.iter().any(|program| path.as_str().starts_with(&format!("weights/{program}-")));
            let mut manifest = Manifest {
                programs: programs.iter().filter(|(name, _)| used.contains(*name)).map(|(n, p)| (n.clone(), p.clone())).collect(),
                weights: weights.iter().map(|(path, _)| path).filter(is_of).cloned().collect(),
                ..manifest
            };
            let named: BTreeSet<BundlePath> = manifest.named_files().map(|(_, path)| path.clone()).collect();
            manifest.files = files.iter().filter(|(path, _)| named.contains(path)).map(|(path, entry)| (path.clone(), *entry)).collect();
            let place = folder.path().join(file.to_relative());
            let wrong = |source| BundleError::Manifest { manifest: folder.place().join(file.to_relative()).display().to_string(), source };
            manifest.check().map_err(wrong)?;
            if files.contains_key(&file) || place.exists() {
                return Err(folder.wrong(format!("`{file}` is written twice")));
            }
            write_synced(&place, manifest.to_json().map_err(wrong)?.as_bytes())?;
            Bundle::open_with(&place, &OpenOptions { verify: Verify::Written, cache_dir: None, cancel: None })?;
        }
        Ok(())
    }
}

//! Files that are written one by one and listed with their sums: what bundles and arch folders have in common.

use super::folder::TemporaryFolder;
use crate::{
    BundleError, BundlePath, Digest,
    manifest::{FileEntry, MANIFEST_FILE, ProgramEntry},
};
use qhx_ir::Program;
use std::{
    collections::BTreeMap,
    fs::File,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

/// A folder and what has been written into it.
pub(super) struct Listed {
    pub(super) folder: TemporaryFolder,
    pub(super) programs: BTreeMap<String, ProgramEntry>,
    pub(super) files: BTreeMap<BundlePath, FileEntry>,
    pub(super) cancel: Option<Arc<AtomicBool>>,
}

impl Listed {
    pub(super) fn new(folder: TemporaryFolder, cancel: Option<Arc<AtomicBool>>) -> Self {
        Self { folder, programs: BTreeMap::new(), files: BTreeMap::new(), cancel }
    }

    /// Writes a file.
    pub(super) fn add_file(&mut self, path: &BundlePath, content: &[u8]) -> Result<(), BundleError> {
        self.check_new(path)?;
        self.folder.add(path, content)?;
        self.files.insert(path.clone(), FileEntry { bytes: content.len() as u64, sha256: Digest::of(content) });
        Ok(())
    }

    /// Writes a program as `programs/NAME.json`.
    pub(super) fn add_program(&mut self, program: &Program) -> Result<(), BundleError> {
        let file = BundlePath::new(format!("programs/{}.json", program.name)).map_err(|e| self.folder.wrong(e.to_string()))?;
        self.add_file(&file, program.to_json().as_bytes())?;
        self.programs.insert(program.name.to_string(), ProgramEntry { file });
        Ok(())
    }

    /// Lists a file that somebody else wrote into the folder.
    pub(super) fn adopt(&mut self, path: &BundlePath) -> Result<(), BundleError> {
        self.check_new(path)?;
        let place = self.folder.path().join(path.to_relative());
        let file = File::open(&place).and_then(|file| file.sync_all().map(|()| file)).map_err(BundleError::io("read", &place))?;
        let (sha256, bytes) = Digest::of_reader(&file, self.cancel.as_deref()).map_err(|e| match e.kind() {
            std::io::ErrorKind::Interrupted => BundleError::Cancelled,
            _ => BundleError::io("read", &place)(e),
        })?;
        self.files.insert(path.clone(), FileEntry { bytes, sha256 });
        Ok(())
    }

    fn check_new(&self, path: &BundlePath) -> Result<(), BundleError> {
        self.check_cancel()?;
        match path.as_str() == MANIFEST_FILE || self.files.contains_key(path) {
            true => Err(self.folder.wrong(format!("`{path}` is written twice"))),
            false => Ok(()),
        }
    }

    /// Whether somebody asked to stop.
    pub(super) fn check_cancel(&self) -> Result<(), BundleError> {
        match &self.cancel {
            Some(flag) if flag.load(Ordering::Relaxed) => Err(BundleError::Cancelled),
            _ => Ok(()),
        }
    }
}

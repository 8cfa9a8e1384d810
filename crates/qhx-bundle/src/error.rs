//! What can go wrong with a bundle.

use crate::Digest;
use std::{io, path::PathBuf};

/// The version of the manifest that this code reads and writes.
pub const SCHEMA_VERSION: u32 = 1;

/// Why a bundle cannot be opened or written. Every message names the file and says what was expected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BundleError {
    /// There is no bundle at that place.
    #[error("{}: {reason}", path.display())]
    NotABundle {
        /// Where it was looked for.
        path: PathBuf,
        /// What is there instead, and what to do.
        reason: String,
    },
    /// The file system refused.
    #[error("cannot {doing} {}: {source}", path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// With which file or folder.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The manifest is wrong.
    #[error("{manifest}: {source}")]
    Manifest {
        /// The manifest's place.
        manifest: String,
        /// What is wrong.
        source: ManifestError,
    },
    /// A file of the bundle is not what the manifest says.
    #[error("{bundle}: file `{file}` (manifest field `{field}`): {reason}")]
    File {
        /// The bundle's place.
        bundle: String,
        /// The file inside the bundle.
        file: String,
        /// The field that names it.
        field: String,
        /// What was expected and found.
        reason: String,
    },
    /// A file's content is not the one that the bundle was made with.
    #[error(
        "{bundle}: file `{file}` is damaged or was changed: sha256 must be {expected}, found {found}; copy or download the bundle again"
    )]
    Sum {
        /// The bundle's place.
        bundle: String,
        /// The file inside the bundle.
        file: String,
        /// The manifest's sum.
        expected: Digest,
        /// The file's sum.
        found: Digest,
    },
    /// A program cannot be used.
    #[error("{bundle}: `{file}`: {reason}")]
    Program {
        /// The bundle's place.
        bundle: String,
        /// The program's file.
        file: String,
        /// What is wrong.
        reason: String,
    },
    /// A weight that a program declares is missing or stored otherwise.
    #[error("{bundle}: weight `{name}` of program `{program}`: {reason}")]
    Weight {
        /// The bundle's place.
        bundle: String,
        /// The program that declares it.
        program: String,
        /// The weight's name.
        name: String,
        /// What was expected and found.
        reason: String,
    },
    /// A bundle that is being written was given something that does not fit.
    #[error("writing {}: {reason}", path.display())]
    Write {
        /// The bundle's final place.
        path: PathBuf,
        /// What does not fit.
        reason: String,
    },
    /// The place is taken.
    #[error("{} exists already and is not empty; choose another place or ask to replace it", .0.display())]
    Exists(PathBuf),
    /// The place holds a bundle and files that are none of the bundle's.
    #[error(
        "{} is not replaced: it holds files that the bundle in it does not list: {}; move them away, or choose another place",
        path.display(), files.join(", ")
    )]
    Foreign {
        /// The place.
        path: PathBuf,
        /// The first of these files.
        files: Vec<String>,
    },
    /// Another process writes a bundle to the same place.
    #[error("another process is writing {}; wait for it or choose another place", .0.display())]
    Busy(PathBuf),
    /// Somebody asked to stop.
    #[error("cancelled")]
    Cancelled,
}

impl BundleError {
    /// For `map_err`: `doing` with `path` failed.
    pub(crate) fn io(doing: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { doing, path, source }
    }
}

/// What is wrong with a manifest.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ManifestError {
    /// Made by a later qhx.
    #[error("schema_version {found} is newer than {SCHEMA_VERSION}, the newest that this qhx reads: update qhx")]
    NewerSchema {
        /// The manifest's version.
        found: u32,
    },
    /// A field is not what it should be.
    #[error("field `{field}`: {reason}")]
    Field {
        /// Dotted path of the field.
        field: String,
        /// What was expected and found.
        reason: String,
    },
    /// It lists context binaries for another runtime.
    #[error("this manifest belongs to another runtime (it has the field `{field}`); its context binaries run only there")]
    OtherRuntime {
        /// The field that says so.
        field: &'static str,
    },
    /// No JSON, or no JSON object with a `schema_version`.
    #[error("not a bundle manifest: {0}")]
    NotAManifest(String),
}

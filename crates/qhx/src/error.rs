//! What can go wrong between a reference and an answer.

use crate::messages::MessagesError;
use qhx_bundle::BundleError;
use qhx_forge::ForgeError;
use qhx_runtime::verify::VerifyError;
use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
};

/// Why something could not be done. Each text says what was expected, what was found and where.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The reference names no model.
    #[error("{0}")]
    NotFound(Box<NotFound>),
    /// This build has no built-in model.
    #[error("the built-in model is not part of this build (cargo feature `builtin`)")]
    NoBuiltin,
    /// A checkpoint where a bundle is needed.
    #[error("{} is a checkpoint, not a bundle", path.display())]
    NotForged {
        /// Where it is.
        path: PathBuf,
    },
    /// A checkpoint cannot be forged, because there is no folder to keep the bundle in.
    #[error("there is no cache folder to keep the forged bundle in")]
    NoCache,
    /// What a checkpoint was forged into does not compute what the checkpoint does.
    #[error("{} at its stored precision failed its gate: {result}", source_path.display())]
    FailedGate {
        /// The checkpoint.
        source_path: PathBuf,
        /// What was measured.
        result: String,
        /// The report with all measurements.
        report: PathBuf,
    },
    /// A file or folder cannot be used.
    #[error("cannot {doing} {}: {source}", path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// With what.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file of text is something else.
    #[error("{} is not a text file: expected UTF-8 without NUL characters", path.display())]
    NotText {
        /// Where it is.
        path: PathBuf,
    },
    /// A file that a person named cannot be read.
    #[error(transparent)]
    Read(#[from] qhx_bundle::files::ReadError),
    /// Somebody asked to stop.
    #[error("cancelled")]
    Cancelled,
    /// A conversation in JSON cannot be used.
    #[error(transparent)]
    Messages(#[from] MessagesError),
    /// A list of tools cannot be used.
    #[error(transparent)]
    Tools(#[from] qhx_runtime::text::reply::ToolsError),
    /// The bundle is wrong.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// No bundle could be made.
    #[error(transparent)]
    Forge(Box<ForgeError>),
    /// The model cannot be loaded, or cannot answer.
    #[error(transparent)]
    Runtime(#[from] qhx_runtime::Error),
    /// The bundle's oracle cannot be replayed.
    #[error(transparent)]
    Verify(#[from] VerifyError),
}

impl Error {
    /// Whether it only says that somebody asked to stop.
    pub fn is_cancelled(&self) -> bool {
        use qhx_runtime::Error as Runtime;
        match self {
            Self::Cancelled | Self::Runtime(Runtime::Cancelled) | Self::Bundle(BundleError::Cancelled) => true,
            Self::Verify(error) => is_cancelled_verify(error),
            Self::Forge(error) => match &**error {
                ForgeError::Run(Runtime::Cancelled) | ForgeError::Bundle(BundleError::Cancelled) => true,
                ForgeError::Verify(error) => is_cancelled_verify(error),
                _ => false,
            },
            _ => false,
        }
    }

    pub(crate) fn io(doing: &'static str, path: &Path) -> impl Fn(io::Error) -> Self {
        move |source| Self::Io { doing, path: path.to_path_buf(), source }
    }
}

impl From<ForgeError> for Error {
    fn from(error: ForgeError) -> Self {
        Self::Forge(Box::new(error))
    }
}

fn is_cancelled_verify(error: &VerifyError) -> bool {
    matches!(error, VerifyError::Run(qhx_runtime::Error::Cancelled) | VerifyError::Bundle(BundleError::Cancelled))
}

/// A reference that names no model, and what was seen while looking for one.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NotFound {
    /// As it was given.
    pub reference: PathBuf,
    /// What is there instead.
    pub found: Found,
    /// Models with nearly that name, closest first.
    pub near: Vec<String>,
    /// Where the Hugging Face cache was looked into, if the reference could be a repository.
    pub hub: Option<PathBuf>,
}

/// What is at a place where there is no model.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Found {
    /// Neither a file nor a folder.
    Nothing,
    /// A folder that is neither a bundle nor a checkpoint.
    Folder,
    /// A file of another kind.
    File,
    /// A repository of several GGUF files, of which one must be named.
    SeveralGguf(Vec<PathBuf>),
}

impl Found {
    /// What is at a path.
    pub fn at(path: &Path) -> Self {
        match fs::metadata(path) {
            Ok(about) if about.is_dir() => Self::Folder,
            Ok(_) => Self::File,
            Err(_) => Self::Nothing,
        }
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => f.write_str("nothing"),
            Self::Folder => f.write_str("a folder with neither qhx.json nor config.json"),
            Self::File => f.write_str("a file that is not a GGUF file"),
            Self::SeveralGguf(files) => {
                let files: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
                write!(f, "several GGUF files, of which one must be named: {}", files.join(", "))
            }
        }
    }
}

impl fmt::Display for NotFound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "there is no model at {}: found {}", self.reference.display(), self.found)?;
        match (&self.hub, &self.found) {
            (None, _) => Ok(()),
            (Some(hub), Found::Nothing) => {
                write!(f, "; nor is it in the Hugging Face cache at {}, and qhx does not download models yet", hub.display())
            }
            (Some(hub), _) => write!(f, " in the Hugging Face cache at {}; qhx does not download models yet", hub.display()),
        }
    }
}

//! Reading checkpoints: safetensors folders and GGUF files.
//!
//! [`Checkpoint::open`] is the way in. It owns everything that is about *file formats*: headers, offsets, block layouts, names of
//! metadata keys, and the tokenizer that a GGUF file carries. It hands out a configuration, a tokenizer, and tensors one at a time,
//! all in the Hugging Face spelling, whatever the file was. It knows nothing of programs, bundles or devices.
//!
//! Every file is untrusted: sizes, counts and offsets are checked before anything is allocated or read, and a mistake is an error that
//! says where it is.

pub mod checkpoint;
pub mod gguf;
pub mod gguf_blocks;
pub mod gguf_metadata;
mod gguf_model;
pub mod gguf_tokenizer;
pub mod gguf_writer;
mod mapping;
pub mod safetensors;
mod source;
#[cfg(test)]
pub(crate) mod testing;

pub use checkpoint::Checkpoint;
pub use mapping::Mapping;
pub use source::{SourceType, Tensor, TensorInfo, TensorSource};

use qhx_bundle::files;
use std::path::{Path, PathBuf};

/// Why a checkpoint could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The operating system refused.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file is damaged, or is not what its name says.
    #[error("{} is not a valid {format}: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What it should have been.
        format: &'static str,
        /// What is wrong, and where in the file.
        reason: String,
    },
    /// The checkpoint is well formed, but of a kind that qhx does not read.
    #[error("{}: {reason}", path.display())]
    Unsupported {
        /// The file or folder.
        path: PathBuf,
        /// What is not supported, and what to do.
        reason: String,
    },
    /// A tensor was asked for that the checkpoint does not have.
    #[error("the checkpoint has no tensor `{name}`{hint}")]
    MissingTensor {
        /// The name asked for.
        name: String,
        /// A similar name that is there, if any.
        hint: String,
    },
    /// Rows or a buffer that do not fit the tensor.
    #[error("tensor `{name}`: {reason}")]
    BadRequest {
        /// The tensor.
        name: String,
        /// What does not fit.
        reason: String,
    },
}

impl ReadError {
    /// A file that is not read.
    pub(crate) fn of_file(error: files::ReadError) -> Self {
        use files::ReadError::{Io, NotRegular, Outside, TooLarge};
        let reason = format!("this file {}", error.reason());
        match error {
            Io { path, source } => Self::Io { path, source },
            NotRegular { path, .. } | TooLarge { path, .. } | Outside { path, .. } => Self::Unsupported { path, reason },
        }
    }
}

/// What is wrong with the bytes of a file; the path is added by whoever opened it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// The file is damaged or wrong.
    #[error("{0}")]
    Malformed(String),
    /// The file is well formed but of a kind that qhx does not read.
    #[error("{0}")]
    Unsupported(String),
}

impl Problem {
    fn at(self, path: &Path, format: &'static str) -> ReadError {
        let path = path.to_path_buf();
        match self {
            Self::Malformed(reason) => ReadError::Malformed { path, format, reason },
            Self::Unsupported(reason) => ReadError::Unsupported { path, reason },
        }
    }
}

/// Returns early with [`Problem::Malformed`], written like `format!`.
macro_rules! malformed {
    ($($text:tt)*) => { return Err($crate::read::Problem::Malformed(format!($($text)*))) };
}
/// Returns early with [`Problem::Unsupported`], written like `format!`.
macro_rules! unsupported {
    ($($text:tt)*) => { return Err($crate::read::Problem::Unsupported(format!($($text)*))) };
}
use {malformed, unsupported};

/// The most elements that one tensor may have. Far above any real tensor, and low enough that sizes in bytes cannot overflow 64 bits.
pub const MAX_ELEMENTS: u64 = 1 << 58;

/// Number of elements of a shape, or an error that shows it.
fn element_count(name: &str, shape: &[u64]) -> Result<u64, Problem> {
    let mut count = 1u64;
    for &dimension in shape {
        count = match count.checked_mul(dimension) {
            Some(count) if count <= MAX_ELEMENTS => count,
            _ => malformed!("tensor `{name}` has shape {shape:?}, more than the {MAX_ELEMENTS} elements that a tensor may have"),
        };
    }
    Ok(count)
}

/// The bytes in pieces of `N`; what is left over is left out.
fn chunks<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> {
    bytes.chunks_exact(N).filter_map(|chunk| chunk.first_chunk().copied())
}

/// A name from a file, shortened and with control characters made visible, for error messages.
fn shown(name: &str) -> String {
    let mut text: String = name.chars().take(80).flat_map(char::escape_debug).collect();
    if name.chars().nth(80).is_some() {
        text.push('…');
    }
    text
}

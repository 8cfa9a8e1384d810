//! Bundles: a folder with a manifest, programs, weights and a tokenizer, and the checks that make it safe to run.
//!
//! This crate owns the manifest and its schema, paths that cannot leave the folder, integrity sums, weights over a mapping or over
//! memory, and atomic writing. It knows neither checkpoints nor devices, and no model family.

mod bundle;
mod error;
mod hash;
mod json;
pub mod layout;
pub mod manifest;
mod map;
mod path;
pub mod safetensors;
mod source;
mod verified;
pub mod write;

pub use bundle::{Bundle, OpenOptions, Verify};
pub use error::BundleError;
pub use hash::Digest;
pub use manifest::{Manifest, ManifestError};
pub use path::{BundlePath, PathError};
pub use verified::cache_dir;
pub use write::{BundleWriter, Staged, TensorSpec, WriteOptions};

//! Bundles: a folder with a manifest, programs, weights and a tokenizer, and the checks that make it safe to run.
//!
//! This crate owns the manifest and its schema, paths that cannot leave the folder, checksums, weights over a mapping or over memory, and
//! the reading and writing of files with care ([`mod@files`]). It knows neither checkpoints nor devices, and no model family.
//!
//! ```no_run
//! # fn main() -> Result<(), qhx_bundle::BundleError> {
//! let bundle = qhx_bundle::Bundle::open("my-model")?;         // every check, weights mapped
//! let text = bundle.program("text").expect("always there");   // a checked program …
//! let table = bundle.weights().tensor("embed_tokens");        // … and its weights, not copied
//! if let Some(tokenizer) = &bundle.manifest().tokenizer {
//!     let json = bundle.read(tokenizer)?;                     // its sum is checked as it is read
//! }
//! # Ok(()) }
//! ```
//!
//! The format is described in `docs/bundle.md`; [`mod@write`] makes bundles.

mod bundle;
mod error;
pub mod files;
mod hash;
mod json;
pub mod layout;
pub mod manifest;
mod map;
pub mod media;
pub mod parity;
mod path;
pub mod safetensors;
mod source;
pub mod target;
mod verified;
pub mod write;

pub use bundle::{Bundle, OpenOptions, Verify, is_target_manifest, manifest_in};
pub use error::{BundleError, ManifestError};
pub use hash::Digest;
pub use manifest::Manifest;
pub use path::{BundlePath, PathError};
pub use write::{BundleWriter, Staged, TargetWriter, TemporaryFolder, TensorSpec, WriteOptions};

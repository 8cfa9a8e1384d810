//! The forge: turns Hugging Face checkpoints and GGUF files into bundles.
//!
//! ```text
//! checkpoint ──read──▶ config, tensors ──families──▶ programs + recipes ──forge──▶ bundle
//!   folder or GGUF                          precision decides encodings      streamed, row by row
//! ```
//!
//! [`read`] knows file formats, [`families`] know models, [`pen`] is the pen they write with, [`precision`] and [`encode`] know how weights are stored,
//! [`forge`] runs the whole, and [`target`] adds arch folders. Nothing here knows one device from another.

pub mod calibrate;
pub mod config;
pub mod encode;
pub mod families;
pub mod forge;
pub mod gate;
pub mod media;
mod mixture;
mod numbers;
pub mod pen;
pub mod plan;
pub mod precision;
pub mod read;
pub mod rotary;
pub mod rotate;
mod rows;
mod skew;
pub mod synth;
mod synth_checkpoint;
pub mod target;

pub use calibrate::{Calibration, CalibrationTexts};
pub use config::Config;
pub use forge::{ForgeOptions, Forged, Material, Progress, forge_checkpoint, forge_synthetic};
pub use gate::{F32Reference, GateOptions, GateProgress, Gated, forge_gated, forge_gated_with_targets};
pub use precision::{MeanBits, Precision};
pub use rotate::Rotations;
pub use skew::ROUTER_SKEW;
pub use synth_checkpoint::write_synthetic_checkpoint;
pub use target::{MadeTarget, TargetOrder, TargetPlacement, forge_with_targets};

/// Why no bundle was made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ForgeError {
    /// The checkpoint cannot be read.
    #[error(transparent)]
    Read(#[from] read::ReadError),
    /// The configuration is wrong, or of a variant that is not supported.
    #[error("{file}: `{field}` {reason}")]
    Config {
        /// `config.json`, or another file of settings.
        file: String,
        /// The field, with its section.
        field: String,
        /// What was expected and found.
        reason: String,
    },
    /// A tensor does not fit what the configuration says.
    #[error("tensor `{tensor}`: {reason}")]
    Tensor {
        /// Its name in the checkpoint.
        tensor: String,
        /// What was expected and found.
        reason: String,
    },
    /// The program that was written does not type-check.
    #[error(transparent)]
    Program(#[from] qhx_ir::CheckError),
    /// The bundle could not be written.
    #[error(transparent)]
    Bundle(#[from] qhx_bundle::BundleError),
    /// A prompt of the user's own suite cannot be used.
    #[error("prompt {prompt} of the gate's suite {reason}")]
    Prompts {
        /// Its number, from 1.
        prompt: usize,
        /// What was expected and found.
        reason: String,
    },
    /// The model cannot be stored in a precision.
    #[error("{0}")]
    Precision(String),
    /// Weights could not be rounded by what they are multiplied with.
    #[error("the weights cannot be calibrated: {0}")]
    Calibration(String),
    /// An arch folder cannot be made as it was asked for.
    #[error("{0}")]
    Target(String),
    /// The gate could not measure.
    #[error("the gate cannot measure: {0}")]
    Gate(String),
    /// The bundle, or the f32 program, could not be run.
    #[error(transparent)]
    Run(#[from] qhx_runtime::Error),
    /// The bundle's weights could not be read again.
    #[error(transparent)]
    Verify(#[from] qhx_runtime::verify::VerifyError),
}

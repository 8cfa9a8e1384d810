//! Holding a bundle to what is known of it: its own oracle (`parity.json`), or one from outside.
//!
//! Three kinds of evidence, each found from numbers: [`weight_sums`] read every stored weight, [`replay()`] lets the device answer the oracle's prompts again and
//! compares tokens, logits and what each stage made, and [`golden`] does the same for a folder that other software wrote. The forge uses the same pieces
//! to make the oracle in the first place.

mod drawn;
pub mod golden;
mod notes;
mod play;
mod replay;
mod sums;

pub use drawn::draw;
pub use notes::{Notes, centred, centred_stages, check_numbers, encode_noted, row_stages, share, tower_stages};
pub use play::{Answer, Listener, Player, play, play_together, top};
pub use replay::{Difference, Report, StageDifference, Verdict, choices, oracle, replay, tolerance, verdict};
pub use sums::weight_sums;

use std::path::PathBuf;

/// Why a bundle could not be held to anything. That it was and failed is no error.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// The bundle has no oracle.
    #[error("{bundle} carries no oracle: it was made without a gate")]
    NoOracle {
        /// Where it is.
        bundle: String,
    },
    /// The bundle's oracle cannot be used.
    #[error("the oracle of {bundle} cannot be used: {reason}")]
    Oracle {
        /// Where it is.
        bundle: String,
        /// What was expected and found.
        reason: String,
    },
    /// A golden folder cannot be used.
    #[error("{}: {reason}", path.display())]
    Golden {
        /// The file.
        path: PathBuf,
        /// What was expected and found.
        reason: String,
    },
    /// The bundle cannot be read.
    #[error(transparent)]
    Bundle(#[from] qhx_bundle::BundleError),
    /// The model could not run.
    #[error(transparent)]
    Run(#[from] crate::Error),
}

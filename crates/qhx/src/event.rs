//! What opening a model tells of.

use crate::Error;
use qhx_bundle::parity::GateResult;
use qhx_forge::{GateProgress, Progress};
use std::path::Path;

/// Something worth telling about while a model is opened.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum OpenEvent<'a> {
    /// Another process is forging this very checkpoint; its bundle will be used.
    Waiting {
        /// Where the bundle will be.
        place: &'a Path,
    },
    /// A checkpoint is being forged into the cache, once.
    Forging {
        /// The checkpoint.
        source: &'a Path,
        /// Where the bundle will be.
        place: &'a Path,
    },
    /// The cache has the bundle, but it cannot be used; it is forged again.
    ForgingAgain {
        /// What is wrong with it.
        reason: &'a Error,
    },
    /// A folder in the cache that holds files of somebody else was renamed.
    Kept {
        /// Where it was.
        place: &'a Path,
        /// Where it is.
        kept: &'a Path,
        /// Why it was not replaced.
        reason: &'a str,
    },
    /// How far writing the bundle is.
    Writing(Progress<'a>),
    /// How far comparing it with the checkpoint is.
    Gating(GateProgress<'a>),
    /// It passed its gate.
    Passed(&'a GateResult),
    /// A folder for phones is not used, because this machine emulates the NPU and compiles the bundle instead.
    ForPhonesOnly {
        /// The folder.
        folder: &'a Path,
    },
}

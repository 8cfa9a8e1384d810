//! A device in a process of its own, so that a crash of its driver is not a crash of ours.
//!
//! The process is this program again, started with arguments that make it call [`serve`]. It has the device; here is what stands for it: the same contract, every call
//! of which is a message and its reply, over the process's input and output. A process that ends, or that does not reply, is a lost device: sessions continue from
//! their rows elsewhere.
//!
//! Weights are asked for one by one while a program is loaded, so that the process holds no more of them than its device does.

// Only the GPU's driver is kept apart.
#[cfg(feature = "gpu")]
mod client;
#[cfg(feature = "gpu")]
mod link;
mod wire;
mod worker;

#[cfg(feature = "gpu")]
pub(crate) use client::IsolatedDevice;
pub use worker::serve;

use std::{ffi::OsString, path::PathBuf};

/// The command that starts the process of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Worker {
    /// The program: usually [`std::env::current_exe`].
    pub program: PathBuf,
    /// Arguments with which it calls [`crate::registry::work`].
    pub arguments: Vec<OsString>,
}

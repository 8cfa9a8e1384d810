//! Why a device could not do what it was asked.

use crate::{CheckError, Name};
use thiserror::Error;

/// Why a device operation failed.
#[derive(Debug, Error)]
pub enum DeviceError {
    /// The device does not support this op: under automatic placement the stage goes to another device.
    #[error("{device} does not support `{path}`: {reason}")]
    Refused {
        /// The device's name.
        device: String,
        /// The op's path.
        path: Name,
        /// Why.
        reason: String,
    },
    /// A weight is missing or is not what the program declares.
    #[error("weight `{name}`: {reason}")]
    Weight {
        /// The weight's name.
        name: Name,
        /// What was expected and found.
        reason: String,
    },
    /// The program does not type-check.
    #[error(transparent)]
    Program(#[from] CheckError),
    /// The call does not match the program, the state or the load options.
    #[error("{0}")]
    Call(String),
    /// The call was cancelled; the states are as they were before it.
    #[error("cancelled")]
    Cancelled,
    /// The machine lacks what the model needs.
    #[error("{0}")]
    Resources(String),
    /// The states together would need more memory than they may have.
    #[error("the states of all sessions need {needed} bytes together, more than the limit of {limit} bytes")]
    StatesFull {
        /// Bytes that would be needed.
        needed: u64,
        /// Bytes that all states together may have.
        limit: u64,
    },
    /// The device's own memory is used up in the middle of the work: sessions continue from their rows on another one.
    #[error("{device} has no memory left: {reason}")]
    Exhausted {
        /// The device's name.
        device: String,
        /// What was needed, and what there is.
        reason: String,
    },
    /// This machine does not have the device, or not what is needed to drive it.
    #[error("{device}: {reason}")]
    Absent {
        /// The device's name.
        device: String,
        /// Why.
        reason: String,
    },
    /// The device is gone, and with it all executables and states on it: sessions continue from their rows on another one.
    #[error("{device} was lost: {reason}")]
    Lost {
        /// The device's name.
        device: String,
        /// What happened.
        reason: String,
    },
}

impl DeviceError {
    /// The device that can no longer go on with its sessions, which another one can.
    pub fn left_device(&self) -> Option<&str> {
        match self {
            Self::Lost { device, .. } | Self::Exhausted { device, .. } => Some(device),
            _ => None,
        }
    }
}

//! The bindings: everything that talks to Vulkan, and all `unsafe` of this crate.
//!
//! What stands here is safe to call as long as the addresses that a [`Command`] passes to a shader are those of buffers that live until its submission has ended,
//! and large enough for what the shader does: the recorder sees to that. Buffers are read and written by the host with checked lengths only.
#![allow(unsafe_code)]

mod adapter;
mod buffer;
mod commands;
mod gpu;
mod queues;

pub(crate) use adapter::{Adapter, Driver, Kind, SmallMatrices};
pub(crate) use buffer::{Buffer, PAGE_BYTES, Use, pages_of};
use commands::Event;
pub(crate) use commands::{Command, PauseEvents, Recording};
pub(crate) use gpu::{Conduct, Gpu, Pipeline, Profile};
use queues::Lane;
pub(crate) use queues::Submission;

use ash::vk;

/// What goes wrong for tests, from a number on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Injected {
    /// The device is lost, when so many submissions were made.
    Loss,
    /// Work does not end, when so many submissions were made.
    Hang,
    /// There is no memory, when so many buffers were made.
    OutOfMemory,
}

/// What went wrong below.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// There is not enough memory.
    Memory(String),
    /// The device or its driver does not go on.
    Lost(String),
}

impl Fault {
    /// From what Vulkan reports of an action.
    fn of(action: &str, result: vk::Result) -> Self {
        match result {
            vk::Result::ERROR_OUT_OF_DEVICE_MEMORY | vk::Result::ERROR_OUT_OF_HOST_MEMORY | vk::Result::ERROR_TOO_MANY_OBJECTS => {
                Self::Memory(format!("{action}: {result}"))
            }
            _ => Self::Lost(format!("{action}: {result}")),
        }
    }
}

impl From<Fault> for qhx_ir::DeviceError {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Memory(reason) => Self::Exhausted { device: "gpu".into(), reason },
            Fault::Lost(reason) => Self::Lost { device: "gpu".into(), reason },
        }
    }
}

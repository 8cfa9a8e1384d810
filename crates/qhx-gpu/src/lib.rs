//! The GPU device: whole programs on any GPU with a Vulkan driver.
//!
//! [`GpuDevice`] loads a checked program: weights go to the device's memory, intermediate values get places in one arena by their lifetimes, and every op becomes a few
//! dispatches of the shaders in `shaders/`. For each shape of a call (`T`, `R`, `L`) they are recorded into a command buffer once and submitted again and again;
//! everything else that differs between calls (segments, positions, pages of keys and values) is read from a small buffer that the host fills.
//!
//! Shaders find memory by address, so there are no descriptors and no limits on the range of a binding. SPIR-V is committed beside the sources; `cargo xtask shaders` makes it anew.
//! All `unsafe` is in `vulkan/`.
//!
//! It knows the IR and Vulkan, and nothing of bundles, tokens or model families.

mod arenas;
mod cache;
mod device;
mod executable;
mod kernels;
mod lower;
mod memory;
mod parameters;
mod plan;
mod recorder;
mod state;
mod stream;
mod transfers;
mod trial;
mod upload;
mod vulkan;
mod weights;

pub use device::{Features, GpuDevice, GpuMachine, GpuOptions};
pub use vulkan::Injected;

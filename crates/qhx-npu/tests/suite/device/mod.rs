//! The NPU as a device, in the emulator.

mod paths;
mod prepared;
mod ring;
mod support;

//! The NPU as a device, in the emulator. Needs the QNN libraries: `QHX_QNN_DIR`; without it nothing is run.

mod paths;
mod prepared;
mod support;

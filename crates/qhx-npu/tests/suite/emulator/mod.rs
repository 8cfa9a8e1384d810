//! QNN's own library on a PC: graphs compiled for each processor, executed by its emulator, written, read and broken.
//!
//! The library is fetched, never committed: `cargo xtask test` does it. By hand:
//! `pip download --no-deps --only-binary=:all: --python-version 3.11 --platform manylinux_2_35_x86_64 onnxruntime-qnn==2.7.0`, unpack the wheel and
//! `QHX_QNN_DIR=…/onnxruntime_qnn cargo test -p qhx-npu --test suite emulator -- --ignored`.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod binaries;
mod execution;
mod linears;
mod ops;
mod processes;
mod support;

//! The integration tests of this crate, in one program: `cargo test -p qhx-npu --test suite MODULE`.

mod conformance;
mod device;
mod emulator;
mod fake;
mod libraries;

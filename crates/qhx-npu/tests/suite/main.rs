//! The integration tests of this crate, in one program: `cargo test -p qhx-npu --test suite MODULE`.

mod conformance;
mod device;
mod emulator;
mod fake;
mod libraries;

/// Whether all is tested that can be (`cargo xtask test --extended`), and not an instance of it.
fn extended() -> bool {
    std::env::var_os("QHX_EXTENDED").is_some()
}

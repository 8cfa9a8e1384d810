//! The integration tests of this crate, in one program: `cargo test -p qhx-cli --test suite MODULE`.

mod bad_input;
mod batch;
mod builtin;
mod chat;
mod commands;
mod common;
mod connect;
mod demo;
mod docs;
mod doctor;
mod forging;
mod fullsize;
mod gates;
mod gpu;
mod interface;
mod media;
mod modules;
mod npu;
mod oracle;
mod safe_files;
mod serve;
mod smollm2;

/// Whether all is tested that can be (`cargo xtask test --extended`), and not an instance of it.
fn extended() -> bool {
    std::env::var_os("QHX_EXTENDED").is_some()
}

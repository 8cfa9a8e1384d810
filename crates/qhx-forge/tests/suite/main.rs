//! The integration tests of this crate, in one program: `cargo test -p qhx-forge --test suite MODULE`.

mod calibrate;
mod chunks;
mod common;
mod drafter;
mod drafts;
mod engine;
mod gate;
mod gguf;
mod gpu;
mod hot_experts;
mod laptop;
mod many_layers;
mod mtp;
mod mutations;
mod npu;
mod parity;
mod placement;
mod precisions;
mod sessions;
mod synthetic;
mod tower_mutations;
mod towers;
mod verify;

/// Whether all is tested that can be (`cargo xtask test --extended`), and not an instance of it.
fn extended() -> bool {
    std::env::var_os("QHX_EXTENDED").is_some()
}

//! The integration tests of this crate, in one program: `cargo test -p qhx-cpu --test suite MODULE`.

mod company;
mod conformance;
mod cuts;
mod decoder;
mod expert_bytes;
mod largest;
mod threads;
mod wants;

/// Whether all is tested that can be (`cargo xtask test --extended`), and not an instance of it.
fn extended() -> bool {
    std::env::var_os("QHX_EXTENDED").is_some()
}

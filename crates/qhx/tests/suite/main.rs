//! The integration tests of this crate, in one program: `cargo test -p qhx --test suite MODULE`.

mod eval;
mod library;

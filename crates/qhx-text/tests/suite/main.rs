//! The integration tests of this crate, in one program: `cargo test -p qhx-text --test suite MODULE`.

mod fixtures;
mod long;
mod real;
mod templates;

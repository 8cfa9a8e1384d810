//! The integration tests of this crate, in one program: `cargo test -p qhx-text --test suite MODULE`.

mod fixtures;
mod real;
mod templates;

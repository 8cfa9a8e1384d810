//! The integration tests of this crate, in one program: `cargo test -p qhx-server --test suite MODULE`.

mod common;
mod hostile;
mod limits;
mod media;
mod models;
mod openai;
mod protocols;
mod structure;

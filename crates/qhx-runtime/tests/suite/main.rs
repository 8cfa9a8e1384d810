//! The integration tests of this crate, in one program: `cargo test -p qhx-runtime --test suite MODULE`.

mod answers_together;
mod common;
mod conversation;
mod drafts;
mod engine;
mod engine_media;
mod generate;
mod model;
mod no_family_names;
mod prompt_media;
mod session;
mod session_media;
mod session_snapshot;
mod session_trouble;
mod split;

//! The integration tests of this crate, in one program: `cargo test -p qhx-media --test suite MODULE`.

mod common;
#[cfg(all(feature = "image", feature = "sound"))]
mod files;
mod image;
mod sound;

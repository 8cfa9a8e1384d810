//! Runs bundles: text in, tokens through a device, text out.
//!
//! The crate knows bundles, programs and devices; it never knows a model family by name. What differs between models
//! (tokenizer, chat template, end-of-turn ids) arrives as data from the bundle.

pub mod sample;
pub mod text;

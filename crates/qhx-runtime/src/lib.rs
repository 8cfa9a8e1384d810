//! Runs bundles: text in, tokens through a device, text out.
//!
//! The crate knows bundles, programs and devices; it never knows a model family by name. What differs between models
//! (tokenizer, chat template, end-of-turn ids) arrives as data from the bundle.

pub mod bench;
mod cancel;
mod chat;
mod encoder;
pub mod engine;
mod error;
mod features;
mod files;
pub mod generate;
mod inputs;
mod language;
mod medium;
pub mod memory;
mod model;
pub mod placement;
mod processor;
mod prompt;
pub mod registry;
mod rows;
mod runner;
pub mod sample;
mod saved_chat;
mod session;
pub mod split;
pub mod tensors;
pub mod text;
pub mod timing;
pub mod trace;
pub mod verify;
mod writer;

pub use cancel::Cancel;
pub use chat::Conversation;
pub use encoder::Encoded;
pub use error::Error;
pub use features::staged_media;
pub use generate::{FinishReason, GenerateOptions, Generation, Piece, generate, generate_with};
pub use inputs::WholeInputs;
pub use language::{Language, Vocabulary};
pub use medium::{MediaKind, Medium, MediumNumbers};
pub use model::{
    DEFAULT_CHUNK, DEFAULT_CONTEXT, LoadOptions, LoadPlan, Model, ModelParts, ModelTemplate, Prepared as PreparedFiles, check_processor,
};
pub use processor::{LogitBias, LogitProcessor};
pub use prompt::{PlacedMedium, Prompt};
pub use qhx_media as media;
pub use registry::DeviceChoice;
pub use saved_chat::{restore_session, save_session};
pub use session::{NextToken, Prepared, Session, ShowLogits, ShowTap, Work};

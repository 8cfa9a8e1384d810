//! Runs bundles: text in, tokens through a device, text out.
//!
//! The crate knows bundles, programs and devices; it never knows a model family by name. What differs between models
//! (tokenizer, chat template, end-of-turn ids) arrives as data from the bundle.

pub mod bench;
mod cancel;
mod chat;
mod choice;
pub mod draft;
mod drafter;
mod encoded;
mod encoder;
pub mod engine;
mod error;
pub mod eval;
mod eval_error;
mod features;
mod files;
mod generate;
mod generation;
#[cfg(feature = "grammar")]
mod grammar;
mod inputs;
mod language;
mod log_probs;
mod medium;
pub mod memory;
mod model;
mod options;
mod parts;
pub mod placement;
mod processor;
mod prompt;
pub mod registry;
mod row_costs;
mod rows;
mod runner;
pub mod sample;
mod saved_chat;
mod score;
mod sequence;
mod session;
mod soft_rows;
pub mod split;
mod staged;
mod structure;
pub mod tensors;
pub mod text;
pub mod timing;
pub mod trace;
pub mod verify;
mod writer;

pub use cancel::Cancel;
pub use chat::Conversation;
pub use choice::DeviceChoice;
pub use encoded::Encoded;
pub use error::Error;
pub use generate::{generate, generate_with};
pub use generation::{FinishReason, GenerateOptions, Generation, Piece, StageRuns};
pub use inputs::WholeInputs;
pub use language::{Language, Vocabulary};
pub use log_probs::TokenLogProbs;
pub use medium::{Medium, MediumNumbers};
pub use model::{LoadPlan, Model, check_processor};
pub use options::{DEFAULT_CHUNK, DEFAULT_CONTEXT, LoadOptions};
pub use parts::{ModelParts, ModelTemplate, PreparedFiles};
pub use processor::{LogitBias, LogitProcessor, OccurrencePenalty};
pub use prompt::{PlacedMedium, Prompt};
pub use qhx_media as media;
pub use qhx_media::MediaKind;
pub use runner::{ShowLogits, ShowTap};
pub use saved_chat::{restore_session, save_session};
pub use sequence::{NextToken, Work};
pub use session::{PromptReuse, Session};
pub use staged::staged_media;
pub use structure::{Constraint, Structure, ToolChoice};

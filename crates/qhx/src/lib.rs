#![doc = include_str!("../README.md")]

/// The README's example is run, too.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

pub mod batch;
pub mod builtin;
mod cache;
mod chat;
pub mod compare;
mod completion;
mod error;
pub mod eval;
mod event;
mod forge_lock;
mod hub;
pub mod json;
pub mod messages;
mod model;
mod names;
mod opener;
mod places;
mod reference;
mod reply;
mod settings;
mod source;
mod stream;
pub mod tools;
mod turn;
pub mod windows;

pub use chat::Chat;
pub use completion::Completion;
pub use error::{Error, Found, NotFound};
pub use event::OpenEvent;
pub use hub::is_repository;
pub use model::{Model, ModelOptions};
pub use names::suggestions;
pub use opener::{Opened, Opener};
pub use places::Places;
pub use reply::{Reply, ReplyEvent, ReplyRequest};
pub use source::{Checkpoint, Source};
pub use stream::Stream;

pub use qhx_bundle as bundle;
pub use qhx_forge as forge;
pub use qhx_ir as ir;
pub use qhx_runtime as runtime;
pub use qhx_runtime::{
    Cancel, Constraint, DeviceChoice, FinishReason, GenerateOptions, Generation, LogitBias, LogitProcessor, MediaKind, Medium,
    OccurrencePenalty, Piece, Structure, TokenLogProbs, ToolChoice, bench, engine, media, placement, sample, text, trace, verify,
};

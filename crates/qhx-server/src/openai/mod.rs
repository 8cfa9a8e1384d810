//! The OpenAI API.

pub(crate) mod chat;
mod chat_stream;
pub(crate) mod completions;
pub(crate) mod log_probs;
pub(crate) mod models;
pub(crate) mod requests;
pub(crate) mod responses;
pub(crate) mod structure;
pub(crate) mod transcriptions;
pub(crate) mod types;

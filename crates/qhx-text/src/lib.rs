//! Between people's text and the model's ids.
//!
//! Owns the tokenizer, the incremental detokeniser, chat templates, the encoding of whole conversations, stop strings, and the parts of a reply (reasoning, content, tool calls). Knows nothing of
//! models, devices, sessions or media: all it has of a model is the bytes of its tokenizer file and the source of its chat template, and what
//! a message carries besides text is any type that is an [`Attachment`].
//!
//! Two promises hold throughout. Text that a user wrote never turns into control tokens unless the caller asks for it; and what is
//! streamed piece by piece is, put together, exactly what decoding everything at once gives.

mod added;
mod chat;
mod check;
mod clock;
mod detokenize;
pub mod guard;
mod jinja;
mod prompt;
pub mod reply;
mod stop;
mod system_turn;
#[cfg(test)]
mod testing;
mod tokenizer;

pub use chat::{Attachment, Chat, ChatError, ChatTemplate, Message};
pub use detokenize::Detokenizer;
pub use prompt::RenderedChat;
pub use stop::{StopStrings, StopStringsError, Stopped};
pub use tokenizer::{SpecialTokens, Tokenizer, TokenizerError};

//! What a reply of a chat model is made of: reasoning, content, tool calls. How a model writes them follows from its chat template ([`ReplyFormat`]); the parser takes the
//! text as it comes and gives the parts ([`ReplyParser`]).

mod calls;
mod format;
mod parser;

pub use calls::{ToolCall, Tools, ToolsError};
pub use format::{CallFormat, Marks, Reasoning, ReplyFormat};
pub use parser::{ReplyParser, ReplyPart};

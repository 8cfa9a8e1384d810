//! Text for this runtime: [`qhx_text`], with messages that carry media.

use crate::Medium;

pub use qhx_text::*;

/// A conversation that may have images and sounds in it.
pub type Chat = qhx_text::Chat<Medium>;

/// A message that may carry images and sounds.
pub type Message = qhx_text::Message<Medium>;

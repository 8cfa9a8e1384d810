//! Conversations of several turns on one session.
//!
//! Each turn renders and encodes the whole conversation; the session keeps what it has in common with it and reads the rest. So a template may rewrite
//! earlier turns, and an answer may encode otherwise than it was chosen: the result is always that of a fresh session on the same text.

use crate::{
    Cancel, Error, GenerateOptions, Generation, Model, Piece, Prompt, Session, generate,
    text::{Chat, Message},
};

/// A conversation and the session that answers it.
pub struct Conversation {
    session: Session,
    chat: Chat,
}

impl Conversation {
    /// A conversation on a fresh session, beginning with `chat` (a system message, earlier turns, tools; see [`Chat::new`]). A model without
    /// chat template refuses.
    pub fn new(model: &Model, chat: Chat) -> Result<Self, Error> {
        model.template()?;
        Ok(Self { session: model.session()?, chat })
    }

    /// The conversation so far.
    pub fn chat(&self) -> &Chat {
        &self.chat
    }

    /// The conversation so far, to change: the next turn reads again what has changed.
    pub fn chat_mut(&mut self) -> &mut Chat {
        &mut self.chat
    }

    /// The session beneath.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Adds `message`, and the model's answer to it.
    ///
    /// An answer that was cancelled stays as far as it came; if nothing had come, and on an error, the conversation is as it was.
    pub fn say(
        &mut self,
        message: Message,
        options: &GenerateOptions,
        cancel: &Cancel,
        on_piece: &mut dyn FnMut(Piece<'_>),
    ) -> Result<Generation, Error> {
        self.chat.messages.push(message);
        let answer = self.answer(options, cancel, on_piece);
        match &answer {
            Ok(generation) if !generation.ids.is_empty() || options.max_new == 0 => {
                // What the model wrote out is text: its own control tokens are not part of it.
                self.chat.messages.push(Message::new("assistant", generation.text.as_str()));
            }
            _ => drop(self.chat.messages.pop()),
        }
        answer
    }

    fn answer(&mut self, options: &GenerateOptions, cancel: &Cancel, on_piece: &mut dyn FnMut(Piece<'_>)) -> Result<Generation, Error> {
        let prompt = Prompt::chat(self.session.model(), &self.chat)?;
        generate(&mut self.session, &prompt, options, cancel, on_piece)
    }
}

//! Conversations of several turns on one session.
//!
//! Each turn renders and encodes the whole conversation; the session keeps what it has in common with it and reads the rest. So a template may rewrite
//! earlier turns, and an answer may encode otherwise than it was chosen: the result is always that of a fresh session on the same text.

use crate::{
    Cancel, Error, GenerateOptions, Generation, Model, Piece, Prompt, Session, generate, restore_session, save_session,
    text::{Chat, Message},
};
use std::path::Path;

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

    /// A conversation with its session, as it was saved.
    pub fn restore(model: &Model, path: &Path) -> Result<Self, Error> {
        model.template()?;
        match restore_session(model, path)? {
            (session, Some(chat)) => Ok(Self { session, chat }),
            (_, None) => Err(Error::Snapshot { path: path.to_owned(), reason: "holds no conversation".into() }),
        }
    }

    /// Writes the conversation with its session to a file, whole or not at all.
    pub fn save(&self, path: &Path) -> Result<(), Error> {
        save_session(&self.session, Some(&self.chat), path)
    }

    /// The conversation so far.
    pub fn chat(&self) -> &Chat {
        &self.chat
    }

    /// The conversation so far, to change: the next turn reads again what has changed.
    pub fn chat_mut(&mut self) -> &mut Chat {
        &mut self.chat
    }

    /// The conversation and the session beneath.
    pub fn into_parts(self) -> (Chat, Session) {
        (self.chat, self.session)
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

    /// How many tokens the conversation would have with `message` added, the beginning of the answer included.
    pub fn tokens_with(&self, message: &Message) -> Result<usize, Error> {
        let mut chat = self.chat.clone();
        chat.messages.push(message.clone());
        Ok(Prompt::chat(self.session.model(), &chat)?.ids().len())
    }

    /// Forgets the oldest turn: everything from the first message that is no system message to the next one of the user. `false` where there is no such turn.
    pub fn drop_oldest_turn(&mut self) -> bool {
        let messages = &mut self.chat.messages;
        let Some(first) = messages.iter().position(|message| message.role() != "system") else { return false };
        let next = messages.iter().skip(first + 1).position(|message| message.role() == "user");
        messages.drain(first..next.map_or(messages.len(), |next| first + 1 + next));
        true
    }

    fn answer(&mut self, options: &GenerateOptions, cancel: &Cancel, on_piece: &mut dyn FnMut(Piece<'_>)) -> Result<Generation, Error> {
        let prompt = Prompt::chat(self.session.model(), &self.chat)?;
        generate(&mut self.session, &prompt, options, cancel, on_piece)
    }
}

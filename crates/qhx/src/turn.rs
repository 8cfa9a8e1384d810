//! What a conversation is made of while it is answered.

use qhx_runtime::{
    Cancel, FinishReason, Generation, Medium, Prompt,
    text::{self, Message},
};

/// What was said so far.
pub(crate) struct Said {
    pub(crate) chat: text::Chat,
    /// The latest prompt with its answer, as the model has computed them.
    pub(crate) computed: Option<Prompt>,
}

/// A turn that is being answered.
pub(crate) struct Turn<'a> {
    pub(crate) said: &'a mut Said,
    /// What went with the message.
    pub(crate) attached: &'a mut Vec<Medium>,
    pub(crate) prompt: Prompt,
    /// The message that is answered, where it is new.
    pub(crate) message: Option<Message>,
    pub(crate) cancel: Cancel,
    /// The most rows that the model holds.
    pub(crate) context: usize,
}

impl Turn<'_> {
    /// The answer has ended: it becomes part of the conversation, unless nothing came of it.
    pub(crate) fn end(self, generation: &Generation) {
        if generation.ids.is_empty() && generation.finish_reason == FinishReason::Cancelled {
            return;
        }
        let messages = &mut self.said.chat.messages;
        if let Some(message) = self.message {
            messages.push(message);
            self.attached.clear();
        }
        // What the model wrote out is text: its own control tokens are not part of it.
        messages.push(Message::new("assistant", generation.text.as_str()));
        // A full context has no row for the last token.
        let room = self.context.saturating_sub(self.prompt.ids().len());
        self.said.computed = Some(self.prompt.followed_by(&generation.ids[..generation.ids.len().min(room)]));
    }
}

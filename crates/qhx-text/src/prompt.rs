//! From a conversation to ids, with what users wrote kept apart from what the template wrote.
//!
//! A template writes control tokens as text (`<|user|>`), and a user may write the same text. So that only the template's become control
//! tokens, each place in a message where a special token begins gets a marker, one private character behind the token's first character.
//! The template carries the markers along; they are taken out of the rendered text again, and a special token with a marker in that place
//! stays text. The text is then encoded in one piece: marking changes nothing about how anything else is encoded.
//!
//! What a template decides by looking for special tokens in a message, it decides without seeing those marked. Messages that the program made
//! from the model's own tokens can be exempted ([`Message::trusted`]).

use super::chat::{Chat, ChatError, ChatTemplate, Message, NEVER};
use super::tokenizer::{SpecialTokens, Tokenizer};
use serde_json::Value;
use std::sync::atomic::AtomicBool;

/// A rendered and encoded conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RenderedChat {
    /// The conversation as the template wrote it.
    pub text: String,
    /// Its ids, control tokens included. Nothing is to be added to them.
    pub ids: Vec<u32>,
}

impl ChatTemplate {
    /// Renders and encodes a conversation. `special` says what special tokens written out in messages, tools and documents become; the template's
    /// own are control tokens in any case.
    pub fn prompt<A>(&self, chat: &Chat<A>, tokenizer: &Tokenizer, special: SpecialTokens) -> Result<RenderedChat, ChatError> {
        self.prompt_until(chat, tokenizer, special, &NEVER)
    }

    /// The same, until `cancel` is set: then rendering soon ends with [`ChatError::Cancelled`].
    pub fn prompt_until<A>(
        &self,
        chat: &Chat<A>,
        tokenizer: &Tokenizer,
        special: SpecialTokens,
        cancel: &AtomicBool,
    ) -> Result<RenderedChat, ChatError> {
        self.prompt_changed(chat.text(), tokenizer, special, cancel, |_| {})
    }

    /// Like [`ChatTemplate::prompt_until`] for templates that know content as text only: each medium becomes the text that `placeholder` gives for its
    /// type, as a control token, with a line's end between it and what is next to it.
    pub fn prompt_flat<A>(
        &self,
        chat: &Chat<A>,
        tokenizer: &Tokenizer,
        special: SpecialTokens,
        placeholder: &dyn Fn(&str) -> Option<String>,
        cancel: &AtomicBool,
    ) -> Result<RenderedChat, ChatError> {
        self.prompt_changed(chat.text(), tokenizer, special, cancel, |chat| {
            for message in &mut chat.messages {
                if let Some(Value::Array(parts)) = message.fields_mut().get_mut("content") {
                    let part = |part: &Value| match part["text"].as_str() {
                        Some(text) => text.to_owned(),
                        None => part["type"].as_str().and_then(placeholder).unwrap_or_default(),
                    };
                    let text = parts.iter().map(part).collect::<Vec<_>>().join("\n");
                    message.fields_mut().insert("content".to_owned(), Value::String(text));
                }
            }
        })
    }

    /// `change` is made after users' text was marked: what it adds is the program's own.
    fn prompt_changed(
        &self,
        mut chat: Chat,
        tokenizer: &Tokenizer,
        special: SpecialTokens,
        cancel: &AtomicBool,
        change: impl Fn(&mut Chat),
    ) -> Result<RenderedChat, ChatError> {
        if special == SpecialTokens::AsText {
            let marker = Marker::for_chat(&chat, tokenizer)?;
            if marker.mark_chat(&mut chat) > 0 {
                change(&mut chat);
                let (text, forged) = unmark(&self.render_until(&chat, cancel)?, marker.character);
                let ids = tokenizer.encode_except(&text, &forged)?;
                return Ok(RenderedChat { text, ids });
            }
        }
        change(&mut chat);
        let text = self.render_until(&chat, cancel)?;
        let ids = tokenizer.encode(&text, false, SpecialTokens::Parse)?;
        Ok(RenderedChat { text, ids })
    }
}

struct Marker<'a> {
    character: char,
    tokenizer: &'a Tokenizer,
}

impl<'a> Marker<'a> {
    /// A marker that occurs nowhere in the conversation.
    fn for_chat(chat: &Chat, tokenizer: &'a Tokenizer) -> Result<Self, ChatError> {
        let mut taken = Vec::new();
        let messages = chat.messages.iter().flat_map(|message| message.fields().values());
        let all = messages.chain(&chat.tools).chain(&chat.documents).chain(chat.options.values());
        all.for_each(|value| private_characters(value, &mut taken));
        taken.sort_unstable();
        let character = ('\u{F0000}'..='\u{FFFFD}').find(|character| taken.binary_search(character).is_err());
        let character = character.ok_or(ChatError::NoMarkerLeft)?;
        Ok(Self { character, tokenizer })
    }

    /// Marks everything that is not the template's or the program's own, and counts the marks.
    fn mark_chat(&self, chat: &mut Chat) -> usize {
        let messages: usize = chat.messages.iter_mut().filter(|message| !message.trusted).map(|message| self.mark_message(message)).sum();
        messages + chat.tools.iter_mut().chain(&mut chat.documents).map(|value| self.mark(value)).sum::<usize>()
    }

    fn mark_message(&self, message: &mut Message) -> usize {
        message.fields_mut().iter_mut().filter(|(name, _)| *name != "role").map(|(_, value)| self.mark(value)).sum()
    }

    fn mark(&self, value: &mut Value) -> usize {
        match value {
            Value::String(text) => {
                let marks = self.tokenizer.special_marks(text);
                for &at in marks.iter().rev() {
                    text.insert(at, self.character);
                }
                marks.len()
            }
            Value::Array(items) => items.iter_mut().map(|item| self.mark(item)).sum(),
            Value::Object(entries) => entries.iter_mut().filter(|(name, _)| *name != "type").map(|(_, entry)| self.mark(entry)).sum(),
            _ => 0,
        }
    }
}

/// Takes the markers out of a text and says where they were.
fn unmark(marked: &str, marker: char) -> (String, Vec<usize>) {
    let mut text = String::with_capacity(marked.len());
    let mut places = Vec::new();
    for piece in marked.split_inclusive(marker) {
        match piece.strip_suffix(marker) {
            Some(piece) => {
                text.push_str(piece);
                places.push(text.len());
            }
            None => text.push_str(piece),
        }
    }
    places.dedup();
    (text, places)
}

fn private_characters(value: &Value, found: &mut Vec<char>) {
    match value {
        Value::String(text) => found.extend(text.chars().filter(|c| *c >= '\u{F0000}')),
        Value::Array(items) => items.iter().for_each(|item| private_characters(item, found)),
        Value::Object(entries) => entries.values().for_each(|entry| private_characters(entry, found)),
        _ => {}
    }
}

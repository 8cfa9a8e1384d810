//! What is put in, as ids, and how long it took to make.

use crate::{
    Error, Model, ModelTemplate,
    text::{Chat, SpecialTokens},
};
use std::time::{Duration, Instant};

/// A prompt, ready to be read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    ids: Vec<u32>,
    encode_time: Duration,
}

impl Prompt {
    /// These ids as they are.
    pub fn from_ids(ids: Vec<u32>) -> Self {
        Self { ids, encode_time: Duration::ZERO }
    }

    /// A text to be continued, with the special tokens that the tokenizer itself adds and no template. Special tokens written out in the text stay text.
    pub fn completion(model: &Model, text: &str) -> Result<Self, Error> {
        let started = Instant::now();
        let tokenizer = model.tokenizer().ok_or(Error::NoTokenizer { what: "a text prompt" })?;
        let ids = tokenizer.encode(text, true, SpecialTokens::AsText)?;
        Ok(Self { ids, encode_time: started.elapsed() })
    }

    /// A conversation, by the model's chat template. Special tokens written out in messages stay text, unless a message is trusted.
    pub fn chat(model: &Model, chat: &Chat) -> Result<Self, Error> {
        let started = Instant::now();
        let ModelTemplate { template, defaults } = model.template()?;
        let tokenizer = model.tokenizer().ok_or(Error::NoTokenizer { what: "a conversation" })?;
        let mut chat = chat.clone();
        for (name, value) in defaults {
            chat.options.entry(name).or_insert_with(|| value.clone());
        }
        let rendered = template.prompt(&chat, tokenizer, SpecialTokens::AsText)?;
        Ok(Self { ids: rendered.ids, encode_time: started.elapsed() })
    }

    /// The ids.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// How long making them took.
    pub fn encode_time(&self) -> Duration {
        self.encode_time
    }
}

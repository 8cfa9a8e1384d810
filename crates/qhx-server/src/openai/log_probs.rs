//! Probabilities of tokens in the forms of the OpenAI API.

use super::types::{CompletionLogProbs, TokenJson, TopTokenJson};
use qhx::{Model, TokenLogProbs};
use serde_json::{Map, Value};
use std::fmt::Write;

/// The text of a token; bytes that are no whole characters are written as `bytes:\xe2\x96`.
pub(crate) fn token_text(model: &Model, id: u32) -> String {
    match String::from_utf8(token_bytes(model, id)) {
        Ok(text) => text,
        Err(error) => error.as_bytes().iter().fold("bytes:".to_owned(), |mut text, byte| {
            let _ = write!(text, "\\x{byte:02x}");
            text
        }),
    }
}

fn token_bytes(model: &Model, id: u32) -> Vec<u8> {
    model.runtime().tokenizer().and_then(|tokenizer| tokenizer.token_bytes(id)).unwrap_or_default()
}

/// JSON has no infinity.
fn finite(log_prob: f32) -> f32 {
    log_prob.max(-9999.0)
}

/// A token of a chat answer.
pub(crate) fn chat_token(model: &Model, token: &TokenLogProbs) -> TokenJson {
    let top = token.top.iter().map(|&(id, log_prob)| TopTokenJson {
        token: token_text(model, id),
        logprob: finite(log_prob),
        bytes: token_bytes(model, id),
    });
    TokenJson {
        token: token_text(model, token.id),
        logprob: finite(token.log_prob),
        bytes: token_bytes(model, token.id),
        top_logprobs: top.collect(),
    }
}

impl CompletionLogProbs {
    /// The first token of a text, before which there is nothing.
    pub(crate) fn first(&mut self, model: &Model, id: u32) {
        self.add(token_text(model, id), None, None);
    }

    /// One more token.
    pub(crate) fn push(&mut self, model: &Model, token: &TokenLogProbs) {
        // The token itself is always among them.
        let all = token.top.iter().copied().chain([(token.id, token.log_prob)]);
        let mut top = Map::new();
        for (id, log_prob) in all {
            top.entry(token_text(model, id)).or_insert_with(|| Value::from(finite(log_prob)));
        }
        self.add(token_text(model, token.id), Some(finite(token.log_prob).into()), Some(top));
    }

    fn add(&mut self, text: String, log_prob: Option<f64>, top: Option<Map<String, Value>>) {
        let offset = match (self.text_offset.last(), self.tokens.last()) {
            (Some(offset), Some(before)) => offset + before.chars().count(),
            _ => 0,
        };
        self.text_offset.push(offset);
        self.tokens.push(text);
        self.token_logprobs.push(log_prob);
        self.top_logprobs.push(top);
    }
}

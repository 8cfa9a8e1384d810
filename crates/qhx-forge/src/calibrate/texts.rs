//! What a model reads while its weights are rounded: texts of our own, or the user's.

use crate::{ForgeError, gate::suite::NOW};
use qhx_bundle::{Digest, files::read_given};
use qhx_runtime::{
    Language, Prompt,
    text::{Chat, Message, SpecialTokens},
};
use serde_json::Value;
use std::path::Path;

/// The longest file that is read.
const MAX_BYTES: u64 = 64 << 20;
/// Tokens that are read at most.
pub(crate) const MOST_TOKENS: usize = 8192;
/// The fewest tokens that are enough to go by.
const FEWEST_TOKENS: usize = 256;
/// Tokens of one sequence.
const SEQUENCE: usize = 512;

/// Documents, with a line of dashes between them.
const DOCUMENTS: &str = include_str!("texts/documents.txt");
/// Conversations, one on a line.
const CONVERSATIONS: &str = include_str!("texts/conversations.jsonl");
/// What is between two documents.
const BETWEEN: &str = "\n--------\n";

/// What a model reads while its weights are rounded.
#[derive(Clone, Debug, PartialEq)]
pub struct CalibrationTexts {
    /// What the manifest calls them.
    pub name: String,
    /// Of the files that they were read from.
    pub sha256: Digest,
    texts: Vec<Text>,
}

#[derive(Clone, Debug, PartialEq)]
enum Text {
    Document(String),
    /// Messages as in the OpenAI API.
    Conversation(Value),
}

impl Default for CalibrationTexts {
    /// The built-in texts.
    fn default() -> Self {
        let documents: Vec<Text> = DOCUMENTS.split(BETWEEN).map(|text| Text::Document(text.trim().to_owned())).collect();
        let conversations = CONVERSATIONS.lines().filter_map(|line| serde_json::from_str(line).ok()).map(Text::Conversation);
        Self {
            name: "built-in".into(),
            sha256: Digest::of(&[DOCUMENTS.as_bytes(), CONVERSATIONS.as_bytes()].concat()),
            texts: documents.into_iter().chain(conversations).collect(),
        }
    }
}

impl CalibrationTexts {
    /// Reads a file: lines of JSON with `messages` as `qhx batch` reads them, or a text in UTF-8. The error says what is wrong with it.
    pub fn read(path: &Path) -> Result<Self, String> {
        let place = path.display();
        let bytes = read_given(path, MAX_BYTES).map_err(|e| e.to_string())?;
        let sha256 = Digest::of(&bytes);
        let text =
            String::from_utf8(bytes).map_err(|e| format!("{place} is not UTF-8 text: byte {} is wrong", e.utf8_error().valid_up_to()))?;
        if text.contains('\0') {
            return Err(format!("{place} is not text: it has zero bytes"));
        }
        if text.trim().is_empty() {
            return Err(format!("{place} is empty"));
        }
        let texts = match text.trim_start().starts_with('{') {
            false => vec![Text::Document(text)],
            true => text
                .lines()
                .enumerate()
                .filter(|(_, line)| !line.trim().is_empty())
                .map(|(i, line)| conversation(&place, i + 1, line))
                .collect::<Result<_, _>>()?,
        };
        let name = path.file_name().map_or_else(|| "stdin".into(), |name| name.to_string_lossy().into_owned());
        Ok(Self { name, sha256, texts })
    }

    /// Sequences of ids for a model, at most `most` ids in all: of documents and conversations in turn, so that fewer ids are still of all kinds.
    pub(crate) fn sequences(&self, model: &Language, most: usize) -> Result<Vec<Vec<u32>>, ForgeError> {
        let length = SEQUENCE.min(model.context_limit());
        let (mut documents, mut conversations) = (Vec::new(), Vec::new());
        for text in &self.texts {
            match text {
                Text::Document(text) => documents.extend(self.document(model, text, length)?),
                Text::Conversation(messages) => conversations.extend(self.conversation(model, messages, length)?),
            }
        }
        let pairs = documents.len().max(conversations.len());
        let (mut documents, mut conversations) = (documents.into_iter(), conversations.into_iter());
        let in_turn = (0..pairs).flat_map(|_| [documents.next(), conversations.next()]).flatten().collect::<Vec<_>>();
        let (mut left, limit) = (most, model.vocabulary().ids as u32);
        let mut sequences = Vec::new();
        for mut ids in in_turn {
            ids.truncate(left);
            // A tokenizer may know more ids than the model has rows for.
            ids.iter_mut().for_each(|id| *id = (*id).min(limit.saturating_sub(1)));
            left -= ids.len();
            if !ids.is_empty() {
                sequences.push(ids);
            }
        }
        let tokens = most - left;
        if tokens < FEWEST_TOKENS.min(most) {
            let reason = format!("{} has {tokens} tokens; at least {} are needed", self.name, FEWEST_TOKENS.min(most));
            return Err(ForgeError::Calibration(reason));
        }
        Ok(sequences)
    }

    /// A document in sequences, each begun as the tokenizer begins a text.
    fn document(&self, model: &Language, text: &str, length: usize) -> Result<Vec<Vec<u32>>, ForgeError> {
        let Some(tokenizer) = model.tokenizer() else { return Ok(Vec::new()) };
        let encode = |text: &str, whole: bool| tokenizer.encode(text, whole, SpecialTokens::AsText).map_err(qhx_runtime::Error::from);
        let ids = encode(text, false)?;
        let begin: Vec<u32> = encode("a", true)?.into_iter().take_while(|&id| tokenizer.is_special(id)).collect();
        let room = length.saturating_sub(begin.len()).max(1);
        Ok(ids.chunks(room).map(|ids| begin.iter().chain(ids).copied().collect()).collect())
    }

    /// A conversation by the model's template, or without one the texts of its messages.
    fn conversation(&self, model: &Language, messages: &Value, length: usize) -> Result<Vec<Vec<u32>>, ForgeError> {
        if model.template().is_err() {
            let texts = messages["messages"].as_array().into_iter().flatten().filter_map(|message| message["content"].as_str());
            return self.document(model, &texts.collect::<Vec<_>>().join("\n\n"), length);
        }
        let messages = Message::list_from_json(messages["messages"].clone()).map_err(qhx_runtime::Error::from)?;
        let chat = Chat { now: Some(NOW), add_generation_prompt: false, ..Chat::new(messages) };
        // Templates differ in what they take: one that refuses a conversation does without it.
        let ids = Prompt::chat(model, &chat).map(|prompt| prompt.ids().to_vec()).unwrap_or_default();
        Ok(ids.chunks(length).map(<[u32]>::to_vec).collect())
    }
}

fn conversation(place: &dyn std::fmt::Display, number: usize, line: &str) -> Result<Text, String> {
    let value: Value = serde_json::from_str(line).map_err(|e| format!("{place}: line {number} is not valid JSON: {e}"))?;
    let messages = Message::list_from_json(value["messages"].clone());
    messages.map_err(|e| format!("{place}: line {number}: expected `messages`: {e}"))?;
    Ok(Text::Conversation(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_texts_are_whole() {
        let texts = CalibrationTexts::default().texts;
        let conversations = texts.iter().filter(|text| matches!(text, Text::Conversation(_))).count();
        assert_eq!(conversations, CONVERSATIONS.lines().count(), "a line is not valid JSON");
        assert!(conversations > 20 && texts.len() - conversations > 10);
        for text in &texts {
            match text {
                Text::Document(text) => assert!(text.len() > 500),
                Text::Conversation(value) => _ = Message::list_from_json(value["messages"].clone()).unwrap(),
            }
        }
    }

    #[test]
    fn files_are_texts_or_lines_of_messages() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("texts");
        let read = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            CalibrationTexts::read(&path)
        };
        let line = r#"{"id": 1, "messages": [{"role": "user", "content": "a"}]}"#;
        let found = read(format!("{line}\n\n{line}\n").as_bytes()).unwrap();
        assert!(found.texts.len() == 2 && found.name == "texts");
        assert_eq!(read(b"plain text").unwrap().texts, [Text::Document("plain text".into())]);
        for (bytes, expected) in [
            (&b""[..], "is empty"),
            (b" \n", "is empty"),
            (b"ab\xff", "not UTF-8 text: byte 2"),
            (b"a\0b", "zero bytes"),
            (b"{\"messages\": []}\n{", "line 2 is not valid JSON"),
            (b"{\"prompt\": \"a\"}", "line 1: expected `messages`"),
        ] {
            let error = read(bytes).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}

//! Conversations and the templates that turn them into prompts.

use super::jinja::{self, Limits, Template};
use super::{TokenizerError, clock, system_turn};
use serde_json::{Map, Value, json};
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};

/// What a message can carry besides text: an image, a sound.
pub trait Attachment {
    /// What templates call a part of a message's content that stands for it: `image`, `audio`.
    fn part_type(&self) -> &'static str;
}

/// Messages of text alone.
impl Attachment for Infallible {
    fn part_type(&self) -> &'static str {
        match *self {}
    }
}

/// One message of a conversation: a JSON object with a `role`, a `content` (text, or a list of parts such as `{"type": "text", "text": …}` and
/// `{"type": "image"}`), and whatever else the template reads (`tool_calls`, `name`, `reasoning_content`), in order.
#[derive(Clone, Debug, PartialEq)]
pub struct Message<A = Infallible> {
    fields: Map<String, Value>,
    /// Whether special tokens written out in this message are meant as control tokens. Off by default; on for text that the program itself
    /// made from the model's own tokens.
    pub trusted: bool,
    /// The media of the content, in order: one for each part that is not text.
    pub media: Vec<A>,
}

/// What a template renders.
#[derive(Clone, Debug, PartialEq)]
pub struct Chat<A = Infallible> {
    /// The conversation, oldest message first.
    pub messages: Vec<Message<A>>,
    /// Tools the model may call, as JSON schemas.
    pub tools: Option<Value>,
    /// Documents the model may use.
    pub documents: Option<Value>,
    /// Whether to end with the beginning of the assistant's next message.
    pub add_generation_prompt: bool,
    /// Anything else the template knows, such as `enable_thinking`.
    pub options: Map<String, Value>,
    /// Leave out the system turn: any system message given, and the one that some templates add of their own. Where the turn cannot be told
    /// apart exactly, it stays, empty.
    pub without_system: bool,
    /// The moment that templates call now, in seconds since 1970; the system's clock if absent.
    pub now: Option<i64>,
}

/// A compiled chat template.
pub struct ChatTemplate {
    source: String,
    template: Template,
    tokens: Map<String, Value>,
}

/// For those who never cancel.
pub(super) static NEVER: AtomicBool = AtomicBool::new(false);

/// Why a conversation gave no prompt.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ChatError {
    /// The template cannot be compiled.
    #[error("the chat template cannot be used: {problem}")]
    Template {
        /// What is wrong, and where.
        problem: String,
    },
    /// The template itself refused the conversation, in its own words.
    #[error("the chat template refuses this conversation: {message}")]
    Refused {
        /// What it said.
        message: String,
    },
    /// The template failed while rendering.
    #[error("the chat template fails on this conversation: {problem}")]
    Render {
        /// What went wrong, and where.
        problem: String,
    },
    /// The template needs far more than the conversation warrants.
    #[error("the chat template needs more than it may use for this conversation: {limit}")]
    Endless {
        /// Which limit it reached, and where.
        limit: String,
    },
    /// The caller stopped it.
    #[error("cancelled")]
    Cancelled,
    /// There is nothing to render.
    #[error("the conversation is empty; give at least one message")]
    NoMessages,
    /// A message is not of the expected form.
    #[error("message {number}: {problem}")]
    Message {
        /// Which one, counted from 1.
        number: usize,
        /// What is wrong with it.
        problem: String,
    },
    /// The conversation contains each of 65,534 private characters, one of which is needed to tell its text from the template's.
    #[error("the conversation uses up all of Unicode's private characters U+F0000 to U+FFFFD; remove some")]
    NoMarkerLeft,
    /// The rendered conversation cannot be encoded.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

impl<A> Message<A> {
    /// A message of plain text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        let fields = [("role".to_owned(), Value::String(role.into())), ("content".to_owned(), Value::String(content.into()))];
        Self { fields: fields.into_iter().collect(), trusted: false, media: Vec::new() }
    }

    /// A message of media and, behind them, text. Without media it is one of plain text.
    pub fn with_media(role: impl Into<String>, media: Vec<A>, text: &str) -> Self
    where
        A: Attachment,
    {
        let mut message = Self::new(role, text);
        if !media.is_empty() {
            let mut parts: Vec<Value> = media.iter().map(|medium| json!({ "type": medium.part_type() })).collect();
            if !text.is_empty() {
                parts.push(json!({ "type": "text", "text": text }));
            }
            message.fields.insert("content".to_owned(), Value::Array(parts));
        }
        message.media = media;
        message
    }

    /// Reads one message in the form of the OpenAI API.
    pub fn from_json(json: Value) -> Result<Self, String> {
        let Value::Object(fields) = json else { return Err(format!("expected an object, found {}", kind_of(&json))) };
        match fields.get("role") {
            Some(Value::String(_)) => {}
            Some(other) => return Err(format!("`role` must be a string, found {}", kind_of(other))),
            None => return Err("`role` is missing".to_owned()),
        }
        match fields.get("content") {
            None | Some(Value::Null | Value::String(_)) => {}
            Some(Value::Array(parts)) => {
                for (place, part) in parts.iter().enumerate() {
                    match &part["type"] {
                        Value::String(kind) if kind == "text" && !part["text"].is_string() => {
                            return Err(format!("content part {}: `text` must be a string", place + 1));
                        }
                        Value::String(_) => {}
                        _ => return Err(format!("content part {}: expected an object with a `type`", place + 1)),
                    }
                }
            }
            Some(other) => return Err(format!("`content` must be a string or a list of parts, found {}", kind_of(other))),
        }
        Ok(Self { fields, trusted: false, media: Vec::new() })
    }

    /// Reads a list of messages in the form of the OpenAI API.
    pub fn list_from_json(json: Value) -> Result<Vec<Self>, ChatError> {
        let Value::Array(messages) = json else {
            return Err(ChatError::Message { number: 1, problem: format!("expected a list of messages, found {}", kind_of(&json)) });
        };
        let numbered = messages.into_iter().enumerate();
        numbered
            .map(|(place, message)| Self::from_json(message).map_err(|problem| ChatError::Message { number: place + 1, problem }))
            .collect()
    }

    /// Who speaks.
    pub fn role(&self) -> &str {
        self.fields.get("role").and_then(Value::as_str).unwrap_or_default()
    }

    /// What is said: a text, a list of parts, or nothing.
    pub fn content(&self) -> &Value {
        self.fields.get("content").unwrap_or(&Value::Null)
    }

    /// The types of the content's parts, in order; none where the content is one text.
    pub fn part_types(&self) -> impl Iterator<Item = &str> {
        self.content().as_array().into_iter().flatten().filter_map(|part| part["type"].as_str())
    }

    /// All fields, in order.
    pub fn fields(&self) -> &Map<String, Value> {
        &self.fields
    }

    /// All fields, in order, to change.
    pub fn fields_mut(&mut self) -> &mut Map<String, Value> {
        &mut self.fields
    }
}

impl<A> Default for Chat<A> {
    fn default() -> Self {
        Self {
            messages: Vec::new(),
            tools: None,
            documents: None,
            add_generation_prompt: false,
            options: Map::new(),
            without_system: false,
            now: None,
        }
    }
}

impl<A> Chat<A> {
    /// A conversation that asks for the assistant's next message.
    pub fn new(messages: Vec<Message<A>>) -> Self {
        Self { messages, add_generation_prompt: true, ..Self::default() }
    }

    /// The conversation without what its messages carry besides text; the parts that stand for it stay.
    pub(super) fn text(&self) -> Chat {
        let text = |message: &Message<A>| Message { fields: message.fields.clone(), trusted: message.trusted, media: Vec::new() };
        Chat {
            messages: self.messages.iter().map(text).collect(),
            tools: self.tools.clone(),
            documents: self.documents.clone(),
            add_generation_prompt: self.add_generation_prompt,
            options: self.options.clone(),
            without_system: self.without_system,
            now: self.now,
        }
    }

    /// Bytes of text in messages, tools, documents and options.
    pub fn text_bytes(&self) -> usize {
        let messages = self.messages.iter().flat_map(|message| message.fields.values());
        messages.chain(&self.tools).chain(&self.documents).chain(self.options.values()).map(|value| size(value).1 as usize).sum()
    }
}

impl ChatTemplate {
    /// Compiles a template. `tokens` are the texts of special tokens under the names templates use (`bos_token`, `eos_token`).
    pub fn new<'a>(source: &str, tokens: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Self, ChatError> {
        let template = Template::new(source).map_err(|problem| ChatError::Template { problem })?;
        let tokens = tokens.into_iter().map(|(name, text)| (name.to_owned(), Value::from(text))).collect();
        Ok(Self { source: source.to_owned(), template, tokens })
    }

    /// As it was written.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether the template looks for a field of this name in what it is given: as an attribute, a subscript, with `get`, `in` or in a filter.
    pub fn reads_field(&self, name: &str) -> bool {
        self.template.reads_field(name)
    }

    /// Whether this stands between the template's tags or in one of its strings.
    pub(super) fn has_text(&self, text: &str) -> bool {
        self.template.has_text(text)
    }

    /// The conversation as the template writes it, as `apply_chat_template(…, tokenize=False)` gives it; less its system turn if the chat says
    /// so.
    pub fn render<A>(&self, chat: &Chat<A>) -> Result<String, ChatError> {
        self.render_until(chat, &NEVER)
    }

    /// The same, until `cancel` is set: then it soon ends with [`ChatError::Cancelled`].
    pub fn render_until<A>(&self, chat: &Chat<A>, cancel: &AtomicBool) -> Result<String, ChatError> {
        if !chat.without_system {
            return self.render_as_given(chat, cancel);
        }
        let rendered = system_turn::render(self, &chat.text(), cancel);
        if cancel.load(Ordering::Relaxed) { Err(ChatError::Cancelled) } else { rendered }
    }

    pub(super) fn render_as_given<A>(&self, chat: &Chat<A>, cancel: &AtomicBool) -> Result<String, ChatError> {
        if chat.messages.is_empty() {
            return Err(ChatError::NoMessages);
        }
        let messages = chat.messages.iter().map(|message| Value::Object(with_reasoning(&message.fields))).collect();
        let (messages, add_generation_prompt) = (Value::Array(messages), Value::Bool(chat.add_generation_prompt));
        let given = [
            ("messages", &messages),
            ("tools", chat.tools.as_ref().unwrap_or(&Value::Null)),
            ("documents", chat.documents.as_ref().unwrap_or(&Value::Null)),
            ("add_generation_prompt", &add_generation_prompt),
        ];
        let variables = [entries(&self.tokens), given.to_vec(), entries(&chat.options)].concat();
        let (values, bytes) = variables.iter().map(|(_, value)| size(value)).fold((0, 0), |sum, more| (sum.0 + more.0, sum.1 + more.1));
        let now = chat.now.unwrap_or_else(clock::now);
        let limits = Limits::for_conversation(chat.messages.len() as u64, values, bytes);
        self.template.render(variables, limits, now, cancel).map_err(|error| match error {
            jinja::Error::Problem(problem) => ChatError::Render { problem },
            jinja::Error::Raised(message) => ChatError::Refused { message },
            jinja::Error::Limit(limit) => ChatError::Endless { limit },
            jinja::Error::Cancelled => ChatError::Cancelled,
        })
    }
}

fn entries(map: &Map<String, Value>) -> Vec<(&str, &Value)> {
    map.iter().map(|(name, value)| (name.as_str(), value)).collect()
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").field("tokens", &self.tokens).finish_non_exhaustive()
    }
}

/// Reasoning goes by several names; templates find it under each.
fn with_reasoning(fields: &Map<String, Value>) -> Map<String, Value> {
    let names = ["reasoning_content", "thinking", "reasoning"];
    let mut fields = fields.clone();
    if let Some(reasoning) = names.iter().filter_map(|name| fields.get(*name)).find(|value| !value.is_null()).cloned() {
        fields.entry("thinking").or_insert_with(|| reasoning.clone());
        fields.insert("reasoning_content".to_owned(), reasoning);
    }
    fields
}

/// How many values there are in a value, and how many bytes of text.
fn size(value: &Value) -> (u64, u64) {
    let sum = |sizes: &mut dyn Iterator<Item = (u64, u64)>| sizes.fold((1, 0), |sum, more| (sum.0 + more.0, sum.1 + more.1));
    match value {
        Value::String(text) => (1, text.len() as u64),
        Value::Array(items) => sum(&mut items.iter().map(size)),
        Value::Object(entries) => sum(&mut entries.values().map(size)),
        _ => (1, 0),
    }
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests;

//! Conversations in the form of the OpenAI API: from JSON to a [`Chat`] whose images and sounds are open.
//!
//! A part of a message's content may name an image or a sound by the path of a local file:
//! `{"type": "image", "path": "photo.jpg"}`, `{"type": "image_url", "image_url": {"url": "file://photo.jpg"}}`. Nothing is fetched.

use qhx_bundle::{Bundle, files};
use qhx_runtime::{
    MediaKind, Medium,
    text::{Chat, ChatError, Message},
};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Why a conversation in JSON cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MessagesError {
    /// The text is no JSON.
    #[error("is not valid JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// An object without `messages`.
    #[error("has no `messages`")]
    NoMessages,
    /// A field of another type than it should have.
    #[error("`{field}` must be {expected}")]
    Field {
        /// Its name.
        field: &'static str,
        /// What it should be.
        expected: &'static str,
    },
    /// A field that is not known, which could be a misspelled one.
    #[error("unknown field `{field}`")]
    UnknownField {
        /// Its name.
        field: String,
    },
    /// A message is wrong.
    #[error(transparent)]
    Chat(#[from] ChatError),
    /// A part of a message's content is wrong.
    #[error("message {message}: content part {part}: {problem}")]
    Part {
        /// The message, counted from 1.
        message: usize,
        /// The part, counted from 1.
        part: usize,
        /// What is wrong.
        problem: Box<PartProblem>,
    },
}

/// What is wrong with a part of a message's content.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PartProblem {
    /// Neither text nor a medium.
    #[error("unknown type `{found}`")]
    UnknownType {
        /// Its type.
        found: String,
    },
    /// A medium that names no file.
    #[error("a part of type `{part_type}` needs a `path`")]
    NoPath {
        /// Its type.
        part_type: &'static str,
    },
    /// A medium that is somewhere else than in a file.
    #[error("`{found}` is not a file")]
    NotAFile {
        /// The beginning of what it names.
        found: String,
    },
    /// The file cannot be used.
    #[error(transparent)]
    Medium(#[from] qhx_runtime::Error),
}

/// The fields that a conversation may have beside its messages.
pub const KNOWN_FIELDS: [&str; 4] = ["messages", "tools", "documents", "chat_template_kwargs"];

/// Reads a conversation: a list of messages, or an object with `messages` and what else templates take ([`KNOWN_FIELDS`]). Its media are not opened
/// yet: see [`open_media`].
pub fn parse(json: &str) -> Result<Chat, MessagesError> {
    from_json(serde_json::from_str(json)?)
}

/// The same for JSON that was read already.
pub fn from_json(json: Value) -> Result<Chat, MessagesError> {
    let mut chat = Chat::new(Vec::new());
    let messages = match json {
        Value::Object(mut fields) => {
            let messages = fields.remove("messages").ok_or(MessagesError::NoMessages)?;
            chat.tools = fields.remove("tools").filter(|tools| !tools.is_null());
            chat.documents = fields.remove("documents").filter(|documents| !documents.is_null());
            if let Some(options) = fields.remove("chat_template_kwargs") {
                let Value::Object(options) = options else {
                    return Err(MessagesError::Field { field: "chat_template_kwargs", expected: "an object" });
                };
                chat.options = options;
            }
            if let Some(field) = fields.keys().next() {
                return Err(MessagesError::UnknownField { field: field.clone() });
            }
            messages
        }
        list => list,
    };
    chat.messages = Message::list_from_json(messages)?;
    if chat.messages.is_empty() {
        return Err(ChatError::NoMessages.into());
    }
    Ok(chat)
}

/// Opens the media that the messages name by their paths. Templates then see parts of type `image` and `audio` without paths.
pub fn open_media(chat: &mut Chat, bundle: &Bundle) -> Result<(), MessagesError> {
    for (number, message) in chat.messages.iter_mut().enumerate() {
        let mut media = Vec::new();
        if let Some(Value::Array(parts)) = message.fields_mut().get_mut("content") {
            for (place, part) in parts.iter_mut().enumerate() {
                let wrong = |problem| MessagesError::Part { message: number + 1, part: place + 1, problem: Box::new(problem) };
                if let Some((kind, path)) = medium_of(part).map_err(wrong)? {
                    media.push(open_part(kind, &path, bundle).map_err(|error| wrong(error.into()))?);
                    *part = json!({ "type": kind.part_type() });
                }
            }
        }
        message.media = media;
    }
    Ok(())
}

/// Opens an image or a sound for the encoders of a bundle's model.
pub fn open_medium(kind: MediaKind, path: &Path, bundle: &Bundle) -> Result<Medium, qhx_runtime::Error> {
    Medium::open(kind, path, &bundle.manifest().model.name, &bundle.manifest().media)
}

/// Opens a file that a file names: a regular one, never a pipe or a device.
fn open_part(kind: MediaKind, path: &Path, bundle: &Bundle) -> Result<Medium, qhx_runtime::Error> {
    // What the model takes is told before what the file is.
    if path.exists() && !path.is_file() {
        files::open(path)?;
    }
    open_medium(kind, path, bundle)
}

/// The kind and the file of a part that is no text. `image_url` and the like may name a file as well.
fn medium_of(part: &Value) -> Result<Option<(MediaKind, PathBuf)>, PartProblem> {
    let (kind, part_type) = match part["type"].as_str() {
        Some("text") => return Ok(None),
        Some("image") => (MediaKind::Image, "image"),
        Some("image_url") => (MediaKind::Image, "image_url"),
        Some("audio") => (MediaKind::Audio, "audio"),
        Some("audio_url") => (MediaKind::Audio, "audio_url"),
        other => return Err(PartProblem::UnknownType { found: other.unwrap_or_default().to_owned() }),
    };
    let own = &part[part_type];
    let place = [&part["path"], &part["url"], own, &own["path"], &own["url"]].into_iter().find_map(Value::as_str);
    let place = place.ok_or(PartProblem::NoPath { part_type })?;
    let path = place.strip_prefix("file://").unwrap_or(place);
    if path.contains("://") || path.starts_with("data:") {
        return Err(PartProblem::NotAFile { found: path.chars().take(60).collect() });
    }
    Ok(Some((kind, path.into())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_name_files_in_several_ways() {
        let image = Some((MediaKind::Image, PathBuf::from("a b.png")));
        for part in [
            json!({"type": "image", "path": "a b.png"}),
            json!({"type": "image", "image": "a b.png"}),
            json!({"type": "image", "url": "file://a b.png"}),
            json!({"type": "image_url", "image_url": {"url": "a b.png"}}),
        ] {
            assert_eq!(medium_of(&part).unwrap(), image, "{part}");
        }
        assert_eq!(medium_of(&json!({"type": "text", "text": "x"})).unwrap(), None);
        assert_eq!(medium_of(&json!({"type": "audio", "path": "x.wav"})).unwrap(), Some((MediaKind::Audio, "x.wav".into())));
        for (part, expected) in [
            (json!({"type": "video", "path": "x"}), "unknown type `video`"),
            (json!({"type": "image"}), "needs a `path`"),
            (json!({"type": "image_url", "image_url": {"url": "https://host/x.png"}}), "is not a file"),
            (json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}), "is not a file"),
        ] {
            let problem = medium_of(&part).unwrap_err().to_string();
            assert!(problem.contains(expected), "{problem}");
        }
    }

    #[test]
    fn conversations_are_lists_or_objects() {
        let message = r#"{"role": "user", "content": "Hi"}"#;
        assert_eq!(parse(&format!("[{message}]")).unwrap().messages.len(), 1);
        let whole = format!(r#"{{"messages": [{message}], "tools": null, "chat_template_kwargs": {{"enable_thinking": false}}}}"#);
        let chat = parse(&whole).unwrap();
        assert!(chat.tools.is_none() && chat.options["enable_thinking"] == false && chat.add_generation_prompt);
        let refused = |text: &str| parse(text).unwrap_err().to_string();
        assert!(refused("[").contains("not valid JSON"));
        assert!(refused("{}").contains("no `messages`"));
        assert!(refused("[]").contains("empty"));
        assert!(refused(&format!(r#"{{"messages": [{message}], "modle": 1}}"#)).contains("unknown field `modle`"));
        assert!(refused(&format!(r#"{{"messages": [{message}], "chat_template_kwargs": 1}}"#)).contains("must be an object"));
        assert!(refused(r#"[{"content": "Hi"}]"#).contains("message 1: `role` is missing"));
    }
}

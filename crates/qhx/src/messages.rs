//! Conversations in the form of the OpenAI API: from JSON to a [`Chat`] whose images and sounds are open.
//!
//! A part of a message's content may name an image or a sound by the path of a local file, `{"type": "image", "path": "photo.jpg"}`,
//! `{"type": "image_url", "image_url": {"url": "file://photo.jpg"}}`, or carry it: `{"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}`,
//! `{"type": "input_audio", "input_audio": {"data": "…", "format": "wav"}}`. Nothing is fetched. Which files may be opened is for the caller to say ([`FileAccess`]).

use crate::json;
use qhx_bundle::{Bundle, files};
use qhx_runtime::{
    MediaKind, Medium,
    media::{MAX_IMAGE_BYTES, MAX_SOUND_BYTES},
    text::{Chat, ChatError, Message},
};
use serde_json::{Value, json};
use std::{
    borrow::Cow,
    path::{Path, PathBuf},
};

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
    /// Data that is not what it should be.
    #[error("the data of this part cannot be used: {reason}")]
    Data {
        /// Why.
        reason: String,
    },
    /// A file that must not be opened.
    #[error("the file `{found}` may not be opened: {reason}")]
    Forbidden {
        /// Its path.
        found: String,
        /// Why.
        reason: Cow<'static, str>,
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
    from_json(json::read(json)?)
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
    chat.messages.iter_mut().for_each(as_templates_expect);
    if chat.messages.is_empty() {
        return Err(ChatError::NoMessages.into());
    }
    Ok(chat)
}

/// Changes what templates know otherwise than the OpenAI API has it: `developer` is `system`, a message of tool calls alone has an empty content, and arguments of tool calls are
/// objects.
fn as_templates_expect(message: &mut Message) {
    let is = |message: &Message, role: &str| message.role() == role;
    let fields = match (is(message, "developer"), is(message, "assistant")) {
        (true, _) => {
            message.fields_mut().insert("role".to_owned(), "system".into());
            return;
        }
        (_, true) => message.fields_mut(),
        _ => return,
    };
    let content = fields.entry("content").or_insert(Value::Null);
    if content.is_null() {
        *content = "".into();
    }
    for call in fields.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
        let arguments = call.pointer_mut("/function/arguments");
        if let Some(arguments) = arguments
            && let Some(object) = arguments.as_str().and_then(|text| serde_json::from_str(text).ok()).filter(Value::is_object)
        {
            *arguments = object;
        }
    }
}

/// Which files messages may name.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileAccess {
    /// Any: the messages are the user's own.
    All,
    /// Those in a folder; paths are relative to it, and no link leads out of it.
    Below(PathBuf),
    /// None: media come with the messages.
    None,
}

/// Opens the media that the messages name or carry. Templates then see parts of type `image` and `audio` without paths.
pub fn open_media(chat: &mut Chat, bundle: &Bundle, access: &FileAccess) -> Result<(), MessagesError> {
    open_media_while(chat, bundle, access, |_| Ok(()))
}

/// The same as long as `go_on` agrees, which is asked after each medium: a conversation may carry many of them.
pub fn open_media_while(
    chat: &mut Chat,
    bundle: &Bundle,
    access: &FileAccess,
    mut go_on: impl FnMut(&Medium) -> Result<(), qhx_runtime::Error>,
) -> Result<(), MessagesError> {
    for (number, message) in chat.messages.iter_mut().enumerate() {
        let mut media = Vec::new();
        if let Some(Value::Array(parts)) = message.fields_mut().get_mut("content") {
            for (place, part) in parts.iter_mut().enumerate() {
                let wrong = |problem| MessagesError::Part { message: number + 1, part: place + 1, problem: Box::new(problem) };
                if let Some((kind, place)) = medium_of(part).map_err(wrong)? {
                    let opened = match place {
                        Place::File(path) => access.open(kind, path, bundle),
                        Place::Data(bytes) => {
                            let name = format!("{kind} {} of message {}", place_among(&media, kind), number + 1);
                            Medium::decode(kind, &name, bytes, &bundle.manifest().model.name, &bundle.manifest().media)
                                .map_err(PartProblem::from)
                        }
                    };
                    let opened = opened.and_then(|medium| go_on(&medium).map(|()| medium).map_err(PartProblem::from));
                    media.push(opened.map_err(wrong)?);
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

/// The number that one more medium of a kind has.
fn place_among(media: &[Medium], kind: MediaKind) -> usize {
    media.iter().filter(|medium| medium.kind() == kind).count() + 1
}

impl FileAccess {
    /// Opens a file that a message names.
    fn open(&self, kind: MediaKind, path: PathBuf, bundle: &Bundle) -> Result<Medium, PartProblem> {
        match self {
            Self::All => Ok(open_part(kind, &path, bundle)?),
            Self::None => Err(PartProblem::forbidden(&path, "only media that come with the messages are taken")),
            Self::Below(folder) => {
                // Whoever named it learns nothing of where the folder is.
                let name = path.display().to_string();
                let limit = match kind {
                    MediaKind::Image => MAX_IMAGE_BYTES,
                    MediaKind::Audio => MAX_SOUND_BYTES,
                };
                let bytes = read_below(folder, &path, limit)?;
                Ok(Medium::decode(kind, &name, bytes, &bundle.manifest().model.name, &bundle.manifest().media)?)
            }
        }
    }
}

/// All bytes of a file below a folder.
fn read_below(folder: &Path, path: &Path, limit: u64) -> Result<Vec<u8>, PartProblem> {
    // Links are followed before the path is judged.
    let (Ok(folder), Ok(real)) = (folder.canonicalize(), folder.join(path).canonicalize()) else {
        return Err(PartProblem::forbidden(path, "there is no such file in the folder that messages may name files of"));
    };
    if !real.starts_with(folder) {
        return Err(PartProblem::forbidden(path, "it is outside the folder that messages may name files of"));
    }
    files::read(&real, limit).map_err(|error| PartProblem::forbidden(path, format!("it {}", error.reason())))
}

impl PartProblem {
    fn forbidden(path: &Path, reason: impl Into<Cow<'static, str>>) -> Self {
        Self::Forbidden { found: path.display().to_string(), reason: reason.into() }
    }
}

/// Opens a file that a file names: a regular one, never a pipe or a device.
fn open_part(kind: MediaKind, path: &Path, bundle: &Bundle) -> Result<Medium, qhx_runtime::Error> {
    // What the model takes is told before what the file is.
    if path.exists() && !path.is_file() {
        files::open(path)?;
    }
    open_medium(kind, path, bundle)
}

/// Where a medium is.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    File(PathBuf),
    /// In the message.
    Data(Vec<u8>),
}

/// The kind and the place of a part that is no text. `image_url` and the like may name a file as well.
fn medium_of(part: &Value) -> Result<Option<(MediaKind, Place)>, PartProblem> {
    let (kind, part_type) = match part["type"].as_str() {
        Some("text") => return Ok(None),
        Some("image") => (MediaKind::Image, "image"),
        Some("image_url") => (MediaKind::Image, "image_url"),
        Some("audio") => (MediaKind::Audio, "audio"),
        Some("audio_url") => (MediaKind::Audio, "audio_url"),
        Some("input_audio") => {
            let data = part["input_audio"]["data"].as_str();
            let data = data.ok_or(PartProblem::Data { reason: "`input_audio.data` must be base64".to_owned() })?;
            return Ok(Some((MediaKind::Audio, Place::Data(from_base64(data)?))));
        }
        other => return Err(PartProblem::UnknownType { found: other.unwrap_or_default().to_owned() }),
    };
    let own = &part[part_type];
    let place = [&part["path"], &part["url"], own, &own["path"], &own["url"]].into_iter().find_map(Value::as_str);
    let place = place.ok_or(PartProblem::NoPath { part_type })?;
    if let Some(uri) = place.strip_prefix("data:") {
        let (about, data) = uri.split_once(',').ok_or(PartProblem::Data { reason: "a data URI has a comma before its data".to_owned() })?;
        if !about.ends_with(";base64") {
            return Err(PartProblem::Data { reason: "expected a data URI in base64: `data:image/png;base64,…`".to_owned() });
        }
        return Ok(Some((kind, Place::Data(from_base64(data)?))));
    }
    let path = place.strip_prefix("file://").unwrap_or(place);
    if path.contains("://") {
        return Err(PartProblem::NotAFile { found: path.chars().take(60).collect() });
    }
    Ok(Some((kind, Place::File(path.into()))))
}

fn from_base64(text: &str) -> Result<Vec<u8>, PartProblem> {
    base64::decode(text).map_err(|error| PartProblem::Data { reason: format!("it is not base64: {error}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_name_files_in_several_ways() {
        let image = Some((MediaKind::Image, Place::File("a b.png".into())));
        for part in [
            json!({"type": "image", "path": "a b.png"}),
            json!({"type": "image", "image": "a b.png"}),
            json!({"type": "image", "url": "file://a b.png"}),
            json!({"type": "image_url", "image_url": {"url": "a b.png"}}),
        ] {
            assert_eq!(medium_of(&part).unwrap(), image, "{part}");
        }
        assert_eq!(medium_of(&json!({"type": "text", "text": "x"})).unwrap(), None);
        assert_eq!(medium_of(&json!({"type": "audio", "path": "x.wav"})).unwrap(), Some((MediaKind::Audio, Place::File("x.wav".into()))));
        let data = medium_of(&json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAEC"}})).unwrap();
        assert_eq!(data, Some((MediaKind::Image, Place::Data(vec![0, 1, 2]))));
        let sound = medium_of(&json!({"type": "input_audio", "input_audio": {"data": "AAEC", "format": "wav"}})).unwrap();
        assert_eq!(sound, Some((MediaKind::Audio, Place::Data(vec![0, 1, 2]))));
        for (part, expected) in [
            (json!({"type": "video", "path": "x"}), "unknown type `video`"),
            (json!({"type": "image"}), "needs a `path`"),
            (json!({"type": "image_url", "image_url": {"url": "https://host/x.png"}}), "is not a file"),
            (json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,A"}}), "not base64"),
            (json!({"type": "image_url", "image_url": {"url": "data:image/png,A"}}), "in base64"),
            (json!({"type": "image_url", "image_url": {"url": "data:image/png"}}), "a comma"),
            (json!({"type": "input_audio", "input_audio": {}}), "must be base64"),
        ] {
            let problem = medium_of(&part).unwrap_err().to_string();
            assert!(problem.contains(expected), "{problem}");
        }
    }

    #[test]
    fn files_are_opened_only_where_they_may_be() {
        let folder = tempfile::tempdir().unwrap();
        let inside = folder.path().join("in");
        std::fs::create_dir(&inside).unwrap();
        std::fs::write(inside.join("a.png"), "x").unwrap();
        std::fs::write(folder.path().join("secret.png"), "x").unwrap();
        let below = |path: &str| read_below(&inside, Path::new(path), 2);
        assert_eq!(below("a.png").unwrap(), b"x");
        // A folder beside it whose name begins with its name is another folder.
        let beside = folder.path().join("in-other");
        std::fs::create_dir(&beside).unwrap();
        std::fs::write(beside.join("a.png"), "x").unwrap();
        let whole_path = beside.join("a.png").display().to_string();
        for outside in ["../secret.png", "/etc/passwd", "missing.png", "../in-other/a.png", &whole_path] {
            assert!(matches!(below(outside), Err(PartProblem::Forbidden { .. })), "{outside}");
        }
        std::fs::write(inside.join("large.png"), "xyz").unwrap();
        for unreadable in ["large.png", "."] {
            let told = below(unreadable).unwrap_err().to_string();
            assert!(told.contains(unreadable) && !told.contains(inside.to_str().unwrap()), "{told}");
        }
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink(folder.path().join("secret.png"), inside.join("link.png")).unwrap();
            assert!(below("link.png").is_err());
        }
    }

    #[test]
    fn conversations_are_lists_or_objects() {
        let message = r#"{"role": "user", "content": "Hi"}"#;
        assert_eq!(parse(&format!("[{message}]")).unwrap().messages.len(), 1);
        let whole = format!(r#"{{"messages": [{message}], "tools": null, "chat_template_kwargs": {{"enable_thinking": false}}}}"#);
        let chat = parse(&whole).unwrap();
        assert!(chat.tools.is_none() && chat.options["enable_thinking"] == false && chat.add_generation_prompt);
        let calls = r#"{"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": "{\"a\": 1}"}}, {"function": {"arguments": "["}}]}"#;
        let chat = parse(&format!(r#"[{{"role": "developer", "content": "x"}}, {message}, {calls}]"#)).unwrap();
        assert_eq!((chat.messages[0].role(), chat.messages[2].content()), ("system", &json!("")));
        let calls = &chat.messages[2].fields()["tool_calls"];
        assert_eq!((&calls[0]["function"]["arguments"], &calls[1]["function"]["arguments"]), (&json!({ "a": 1 }), &json!("[")));
        let refused = |text: &str| parse(text).unwrap_err().to_string();
        assert!(refused("[").contains("not valid JSON"));
        assert!(refused("{}").contains("no `messages`"));
        assert!(refused("[]").contains("empty"));
        assert!(refused(&format!(r#"{{"messages": [{message}], "modle": 1}}"#)).contains("unknown field `modle`"));
        assert!(refused(&format!(r#"{{"messages": [{message}], "chat_template_kwargs": 1}}"#)).contains("must be an object"));
        assert!(refused(r#"[{"content": "Hi"}]"#).contains("message 1: `role` is missing"));
    }
}

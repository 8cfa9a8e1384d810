//! Conversations in saved sessions: the messages as JSON, their media by what the session holds of them.

use crate::{
    Error, MediaKind, Medium, Model, Session,
    text::{Chat, Message},
};
use qhx_bundle::Digest;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::Path;

/// A conversation in a file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedChat {
    messages: Vec<SavedMessage>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tools: Option<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    documents: Option<Value>,
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    options: Map<String, Value>,
    #[serde(default)]
    without_system: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedMessage {
    message: Value,
    #[serde(default)]
    trusted: bool,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    media: Vec<SavedMedium>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedMedium {
    kind: MediaKind,
    digest: Digest,
    name: String,
}

/// Writes a session to a file and, with it, the conversation that it answers. The file is written whole or not at all.
pub fn save_session(session: &Session, chat: Option<&Chat>, path: &Path) -> Result<(), Error> {
    let wrong = |reason: String| Error::Snapshot { path: path.to_owned(), reason };
    let chat = chat.map(|chat| SavedChat::new(chat, session)).transpose().map_err(wrong)?;
    let chat = chat.map(serde_json::to_value).transpose().map_err(|e| wrong(format!("cannot be written: {e}")))?;
    session.save_with(path, chat.as_ref())
}

/// A session as it was saved, and the conversation that was saved with it. The file must be undamaged and of this very model; the device may be another.
pub fn restore_session(model: &Model, path: &Path) -> Result<(Session, Option<Chat>), Error> {
    let wrong = |reason: String| Error::Snapshot { path: path.to_owned(), reason };
    let (session, chat) = model.restore_with(path)?;
    let chat = chat.map(|chat| {
        let chat: SavedChat = serde_json::from_value(chat).map_err(|e| format!("has an invalid conversation: {e}"))?;
        chat.restore(&session)
    });
    Ok((session, chat.transpose().map_err(wrong)?))
}

impl SavedChat {
    fn new(chat: &Chat, session: &Session) -> Result<Self, String> {
        let medium = |medium: &Medium| match session.encoded(medium.kind(), medium.digest()) {
            Some(_) => Ok(SavedMedium { kind: medium.kind(), digest: medium.digest(), name: medium.name().to_owned() }),
            None => Err(format!("cannot be written: {} is in the conversation but was not encoded yet", medium.name())),
        };
        let message = |message: &Message| {
            let media = message.media.iter().map(medium).collect::<Result<_, _>>()?;
            Ok(SavedMessage { message: Value::Object(message.fields().clone()), trusted: message.trusted, media })
        };
        Ok(Self {
            messages: chat.messages.iter().map(message).collect::<Result<_, String>>()?,
            tools: chat.tools.clone(),
            documents: chat.documents.clone(),
            options: chat.options.clone(),
            without_system: chat.without_system,
        })
    }

    fn restore(self, session: &Session) -> Result<Chat, String> {
        let medium = |SavedMedium { kind, digest, name }: SavedMedium| {
            let encoded = session.encoded(kind, digest).ok_or_else(|| format!("lacks the {kind} {name} of its conversation"))?;
            session.model().restored_medium(name, encoded).map_err(|e| e.to_string())
        };
        let message = |(place, saved): (usize, SavedMessage)| {
            let mut message =
                Message::from_json(saved.message).map_err(|problem| format!("has an invalid message {}: {problem}", place + 1))?;
            message.trusted = saved.trusted;
            message.media = saved.media.into_iter().map(medium).collect::<Result<_, _>>()?;
            Ok(message)
        };
        let messages = self.messages.into_iter().enumerate().map(message).collect::<Result<_, String>>()?;
        let Self { tools, documents, options, without_system, .. } = self;
        Ok(Chat { tools, documents, options, without_system, ..Chat::new(messages) })
    }
}

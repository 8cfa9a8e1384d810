//! What goes in: ids, a text to continue, or a conversation, with images and sounds. From flags to a prompt.

use crate::{failure::Failure, media::MediaFlags, texts::read_text};
use clap::Args;
use qhx::messages::{self, FileAccess, MessagesError};
use qhx_bundle::{Bundle, manifest::ChatMode};
use qhx_runtime::{
    Error, Medium, Model, Prompt,
    text::{Chat, Message},
};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// What goes in.
#[derive(Args)]
#[group(skip)]
#[command(next_help_heading = "Input (one of the first four)")]
pub(crate) struct InputFlags {
    #[command(flatten)]
    kind: InputKind,
    /// System message before --user; "" leaves out the system turn where the template allows it
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    system: Option<String>,
}

/// Exactly one way to say it.
#[derive(Args)]
#[group(required = true, multiple = false)]
struct InputKind {
    /// Token ids separated by commas, used as they are: no template, no special tokens added; @FILE reads them from a file
    #[arg(long, value_name = "1,2,3", allow_hyphen_values = true)]
    ids: Option<String>,
    /// Text to continue, with the tokenizer's own special tokens and no chat template
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// User message, rendered by the bundle's chat template
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    user: Option<String>,
    /// Conversation as OpenAI messages, rendered by the bundle's chat template; - reads it from stdin
    #[arg(long, value_name = "FILE.json")]
    chat: Option<PathBuf>,
}

/// What goes in, read and checked as far as it can be without a model.
pub(crate) struct Input {
    text: Text,
    /// The media of ids and of a text to continue; a conversation's stand in its messages.
    media: Vec<Medium>,
}

enum Text {
    Ids(Vec<u32>),
    Completion(String),
    /// A message to come, and the conversation before it.
    User(Box<Chat>, String),
    Chat(Box<Chat>, PathBuf),
}

impl InputFlags {
    pub(crate) fn read(&self) -> Result<Input, Failure> {
        // Not clap's `requires`: that gives way where what is required conflicts with what is there.
        if self.system.is_some() && self.kind.user.is_none() {
            return Err(Failure::usage("--system goes with --user only").hint("in --chat, add a message of role `system`"));
        }
        let text = match &self.kind {
            InputKind { ids: Some(ids), .. } => match ids.strip_prefix('@') {
                Some(file) => Text::Ids(parse_ids(&read_text(Path::new(file))?)?),
                None => Text::Ids(parse_ids(ids)?),
            },
            InputKind { prompt: Some(text), .. } => Text::Completion(not_empty(text.clone(), "--prompt")?),
            InputKind { user: Some(text), .. } => {
                Text::User(Box::new(conversation(self.system.as_deref())), not_empty(text.clone(), "--user")?)
            }
            InputKind { chat: Some(file), .. } => Text::Chat(Box::new(read_chat(file)?), file.clone()),
            // The argument group lets none of this through.
            InputKind { .. } => return Err(Failure::usage("there is no prompt").hint("give one of --ids, --prompt, --user, --chat")),
        };
        Ok(Input { text, media: Vec::new() })
    }
}

impl Input {
    /// Ids as they are.
    pub(crate) fn of_ids(ids: Vec<u32>) -> Self {
        Self { text: Text::Ids(ids), media: Vec::new() }
    }

    /// A person's text: a message where the bundle has a chat template, else a text to continue.
    pub(crate) fn of_text(bundle: &Bundle, text: String, system: Option<&str>) -> Result<Self, Failure> {
        let text = match (bundle.manifest().chat.mode, system) {
            (ChatMode::Template, system) => Text::User(Box::new(conversation(system)), text),
            (ChatMode::Completion, None | Some("")) => Text::Completion(text),
            (ChatMode::Completion, Some(_)) => {
                return Err(Failure::usage("--system: this model has no chat template and only continues text").hint("leave out --system"));
            }
        };
        Ok(Self { text, media: Vec::new() })
    }

    /// Whether the bundle can take it, as far as that is known before it is loaded; opens the media that go with it.
    pub(crate) fn attach(&mut self, flags: &MediaFlags, bundle: &Bundle) -> Result<(), Failure> {
        match &mut self.text {
            Text::Chat(..) if !flags.files.is_empty() => {
                return Err(Failure::usage("--image and --audio do not go with --chat")
                    .hint("in --chat, add a part {\"type\": \"image\", \"path\": …} to the content of a message"));
            }
            Text::Chat(chat, file) => {
                needs_template(bundle)?;
                messages::open_media(chat, bundle, &FileAccess::All).map_err(|error| in_file(file, error))?;
            }
            Text::User(..) => needs_template(bundle)?,
            Text::Ids(_) | Text::Completion(_) => {}
        }
        self.media = flags.open(bundle)?;
        Ok(())
    }

    /// Tells the model of the tools that it may call.
    pub(crate) fn set_tools(&mut self, tools: Value, model: &Model) -> Result<(), Failure> {
        let (Text::User(chat, _) | Text::Chat(chat, _)) = &mut self.text else {
            return Err(Failure::usage("--tools goes with a conversation only").hint("use --user or --chat"));
        };
        chat.tools = Some(tools);
        if model.reply_format().calls.is_none() {
            qhx::tools::write_out(chat);
        }
        Ok(())
    }

    /// The same text with these media.
    pub(crate) fn set_media(&mut self, media: Vec<Medium>) {
        self.media = media;
    }

    /// Goes on with a conversation that was saved, where it is a message to come.
    pub(crate) fn follow(&mut self, saved: Chat) -> Result<(), Failure> {
        if let Text::User(before, _) = &mut self.text {
            if before.without_system || !before.messages.is_empty() {
                return Err(Failure::usage("--system does not go with --load-session: the saved conversation has its own system message")
                    .hint("leave out --system"));
            }
            **before = saved;
        }
        Ok(())
    }

    /// The conversation with its answer, where it is one.
    pub(crate) fn conversation_with(&self, answer: &str) -> Option<Chat> {
        let mut chat = self.conversation()?;
        chat.messages.push(Message::new("assistant", answer));
        Some(chat)
    }

    fn conversation(&self) -> Option<Chat> {
        match &self.text {
            Text::User(before, text) => {
                let mut chat = (**before).clone();
                chat.messages.push(Message::with_media("user", self.media.clone(), text));
                Some(chat)
            }
            Text::Chat(chat, _) => Some((**chat).clone()),
            Text::Ids(_) | Text::Completion(_) => None,
        }
    }

    /// All media that go with it.
    pub(crate) fn media(&self) -> Vec<Medium> {
        let in_chat = match &self.text {
            Text::Chat(chat, _) => chat.messages.iter().flat_map(|message| &message.media).cloned().collect(),
            _ => Vec::new(),
        };
        [in_chat, self.media.clone()].concat()
    }

    /// The prompt for a model.
    pub(crate) fn prompt(&self, model: &Model) -> Result<Prompt, Error> {
        Ok(match (&self.text, self.conversation()) {
            (Text::Ids(ids), _) => Prompt::from_ids_with_media(model, ids.clone(), &self.media)?,
            (Text::Completion(text), _) => Prompt::completion_with_media(model, text, &self.media)?,
            (_, conversation) => Prompt::chat(model, &conversation.unwrap_or_default())?,
        })
    }
}

/// A conversation that has not begun. An empty system message stands for none at all, not even the template's own.
pub(crate) fn conversation(system: Option<&str>) -> Chat {
    let mut chat = Chat::new(Vec::new());
    match system {
        Some("") => chat.without_system = true,
        Some(text) => chat.messages.push(Message::new("system", text)),
        None => {}
    }
    chat
}

/// A completion model cannot converse.
pub(crate) fn needs_template(bundle: &Bundle) -> Result<(), Failure> {
    match bundle.manifest().chat.mode {
        ChatMode::Template => Ok(()),
        ChatMode::Completion => {
            let model = bundle.manifest().model.name.clone();
            Err(Failure::from(Error::NoTemplate { model }).hint("use `qhx run MODEL TEXT` or `qhx generate MODEL --prompt TEXT`"))
        }
    }
}

/// A list of messages, or an object with `messages` and what else templates take.
fn read_chat(file: &Path) -> Result<Chat, Failure> {
    messages::parse(&read_text(file)?).map_err(|error| in_file(file, error))
}

fn in_file(file: &Path, error: MessagesError) -> Failure {
    let between = if matches!(error, MessagesError::Json(_) | MessagesError::NoMessages) { " " } else { ": " };
    Failure::from(error).after(&format!("{}{between}", file.display()))
}

/// Nothing to read is no prompt.
pub(crate) fn not_empty(text: String, what: &str) -> Result<String, Failure> {
    if text.is_empty() { Err(Failure::usage(format!("{what}: the prompt is empty")).hint("give some text")) } else { Ok(text) }
}

fn parse_ids(text: &str) -> Result<Vec<u32>, Failure> {
    if text.trim().is_empty() {
        return Err(Failure::usage("--ids: the prompt is empty").hint("give at least one token id: --ids 1,2,3"));
    }
    let parse = |(place, id): (usize, &str)| {
        let id = id.trim();
        id.parse().map_err(|_| Failure::usage(format!("--ids: entry {} is {id:?}, expected a token id (0 to {})", place + 1, u32::MAX)))
    };
    text.split(',').enumerate().map(parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids() {
        assert_eq!(parse_ids("1, 2,\n3").unwrap(), [1, 2, 3]);
        for (text, expected) in
            [("", "empty"), ("1,,2", "entry 2 is \"\""), ("-4", "entry 1 is \"-4\""), ("4294967296", "expected a token id")]
        {
            let message = parse_ids(text).unwrap_err().message().to_owned();
            assert!(message.contains(expected), "{message}");
        }
    }
}

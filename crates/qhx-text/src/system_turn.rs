//! Rendering a conversation without any system turn.
//!
//! Some templates write a system turn of their own when the conversation has none, and an empty one when it is given an empty one; models can
//! answer worse with either than with no system turn at all. Templates have no switch for it, so the turn is cut out of the rendered
//! text. It is cut only where it can be told exactly, by rendering probes and looking at what stands between their messages.

use super::chat::{Chat, ChatError, ChatTemplate, Message};
use std::sync::atomic::AtomicBool;

/// The conversation without its system turn where that can be told exactly, otherwise with an empty one.
pub(super) fn render(template: &ChatTemplate, chat: &Chat, cancel: &AtomicBool) -> Result<String, ChatError> {
    let mut bare = chat.clone();
    bare.messages.retain(|message| message.role() != "system");
    let without = template.render_as_given(&bare, cancel);
    // What takes too much is not tried again.
    if matches!(without, Err(ChatError::Endless { .. } | ChatError::Cancelled)) {
        return without;
    }
    let [system, first, second] = probes(&bare);
    let Ok(with) = template.render_as_given(&with_system(&bare, &system), cancel) else {
        // The template takes no system messages: then it writes none either.
        return without;
    };
    if let (Some((before, after)), Ok(without)) = (split_once_only(&with, &system), &without) {
        let between = Between::turns(template, &bare, [&system, &first, &second], cancel);
        if let Some((head, rest)) = between.and_then(|between| between.cut(before, after))
            && without.starts_with(head)
            && without.ends_with(rest)
        {
            return Ok([head, rest].concat());
        }
        // Given no system message the template writes the same text less one stretch: it has no system turn of its own.
        if common_prefix(before, without) + common_suffix(after, without) >= without.len() {
            return Ok(without.clone());
        }
    }
    template.render_as_given(&with_system(&bare, ""), cancel).or(without)
}

/// What a template writes between two messages: the end of one turn and the beginning of the next.
struct Between {
    /// From a user's text to a system message's.
    user_to_system: String,
    /// From either's text to a user's; without a common form nothing can be cut.
    to_user: String,
}

impl Between {
    fn turns(template: &ChatTemplate, chat: &Chat, [system, first, second]: [&str; 3], cancel: &AtomicBool) -> Option<Self> {
        let render = |messages: &[(&str, &str)]| {
            let messages = messages.iter().map(|(role, text)| message_like(chat, role, text)).collect();
            let probe = Chat { messages, tools: None, documents: None, ..chat.clone() };
            template.render_as_given(&probe, cancel).ok()
        };
        let all = render(&[("user", first), ("system", system), ("user", second)])?;
        let users = render(&[("user", first), ("user", second)])?;
        let (_, after_first) = split_once_only(&all, first)?;
        let (user_to_system, after_system) = split_once_only(after_first, system)?;
        let (system_to_user, _) = split_once_only(after_system, second)?;
        let (_, after_first) = split_once_only(&users, first)?;
        let (user_to_user, _) = split_once_only(after_first, second)?;
        (system_to_user == user_to_user).then(|| Self { user_to_system: user_to_system.to_owned(), to_user: user_to_user.to_owned() })
    }

    /// The text around a system message less its turn. The beginnings of a system and of a user turn may have a common part, which then
    /// stands on both sides of the cut; taking either is the same.
    fn cut<'a>(&self, before: &'a str, after: &'a str) -> Option<(&'a str, &'a str)> {
        let common = common_prefix(&self.user_to_system, &self.to_user);
        let head = before.strip_suffix(&self.user_to_system[common..])?;
        let rest = after.strip_prefix(&self.to_user[..common])?;
        Some((head, rest))
    }
}

fn with_system(chat: &Chat, text: &str) -> Chat {
    let mut chat = chat.clone();
    chat.messages.insert(0, message_like(&chat, "system", text));
    chat
}

/// A message whose content has the form (text, or a list of parts) that the conversation's have: some templates know only one.
fn message_like(chat: &Chat, role: &str, text: &str) -> Message {
    let mut message = Message::new(role, text);
    if chat.messages.first().is_some_and(|first| first.content().is_array()) {
        message.fields_mut().insert("content".to_owned(), serde_json::json!([{"type": "text", "text": text}]));
    }
    message
}

/// Three texts that occur nowhere in the conversation and that no template would trim or split.
fn probes(chat: &Chat) -> [String; 3] {
    let taken = format!("{chat:?}");
    let mut unused = (0u64..).map(|number| format!("probe{number}text")).filter(|probe| !taken.contains(probe.as_str()));
    std::array::from_fn(|_| unused.next().unwrap_or_default())
}

fn split_once_only<'a>(text: &'a str, probe: &str) -> Option<(&'a str, &'a str)> {
    text.split_once(probe).filter(|(_, after)| !after.contains(probe))
}

/// Length of the longest common beginning, in whole characters.
fn common_prefix(a: &str, b: &str) -> usize {
    a.chars().zip(b.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum()
}

/// Length of the longest common end, in whole characters.
fn common_suffix(a: &str, b: &str) -> usize {
    a.chars().rev().zip(b.chars().rev()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum()
}

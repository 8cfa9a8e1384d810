//! What is put in: ids, and the media that some of them stand for.

use crate::{
    Cancel, Error, Language, MediaKind, Medium, ModelTemplate,
    text::{self, Chat, ChatError, Message, SpecialTokens, Tokenizer},
};
use serde_json::json;
use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// A prompt, ready to be read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    ids: Vec<u32>,
    media: Vec<PlacedMedium>,
    stable_rows: usize,
    encode_time: Duration,
    is_chat: bool,
}

/// A medium and the place of its soft rows among the ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedMedium {
    first: usize,
    medium: Medium,
}

impl PlacedMedium {
    /// The first id that stands for it.
    pub fn first(&self) -> usize {
        self.first
    }

    /// The medium itself.
    pub fn medium(&self) -> &Medium {
        &self.medium
    }
}

const KINDS: [MediaKind; 2] = [MediaKind::Image, MediaKind::Audio];

impl Prompt {
    /// These ids as they are.
    pub fn from_ids(ids: Vec<u32>) -> Self {
        Self { ids, ..Self::default() }
    }

    /// The same with more ids behind it: what was answered.
    pub fn followed_by(mut self, ids: &[u32]) -> Self {
        self.ids.extend_from_slice(ids);
        self
    }

    /// These ids as they are, with as many placeholders among them as the media have soft rows, those of each medium together.
    pub fn from_ids_with_media(model: &Language, ids: Vec<u32>, media: &[Medium]) -> Result<Self, Error> {
        let mut placed = Vec::with_capacity(media.len());
        for kind in KINDS.into_iter().filter(|_| !media.is_empty()) {
            let of_kind: Vec<_> = media.iter().filter(|medium| medium.kind() == kind).collect();
            let needs = of_kind.iter().map(|medium| model.soft_rows(medium)).collect::<Result<Vec<_>, _>>()?;
            let Some(token) = model.placeholder(kind).map(|placeholder| placeholder.token) else { continue };
            let places: Vec<usize> = ids.iter().enumerate().filter(|(_, id)| **id == token).map(|(at, _)| at).collect();
            let each = || of_kind.iter().zip(&needs).map(|(medium, rows)| format!("{} takes {rows}", medium.name())).collect::<Vec<_>>();
            let wrong = |reason: String| Error::Placeholders { kind, found: places.len(), expected: needs.iter().sum(), reason };
            if places.len() != needs.iter().sum::<usize>() {
                return Err(wrong(if of_kind.is_empty() { format!("no {kind} is given") } else { each().join(", ") }));
            }
            let mut rest = &places[..];
            for (medium, &rows) in of_kind.iter().zip(&needs) {
                let (own, others) = rest.split_at(rows);
                if let (Some(&first), Some(&last)) = (own.first(), own.last()) {
                    if last - first + 1 != rows {
                        return Err(wrong(format!("the {rows} of {} must stand together, from id {first} on", medium.name())));
                    }
                    placed.push(PlacedMedium { first, medium: (*medium).clone() });
                }
                rest = others;
            }
        }
        placed.sort_by_key(PlacedMedium::first);
        Ok(Self { ids, media: placed, ..Self::default() })
    }

    /// A text to be continued, with the special tokens that the tokenizer itself adds and no template. Special tokens written out in the text stay text.
    pub fn completion(model: &Language, text: &str) -> Result<Self, Error> {
        Self::completion_with_media(model, text, &[])
    }

    /// The same, with the special tokens that the tokenizer adds or without.
    pub fn of_text(model: &Language, text: &str, add_special_tokens: bool) -> Result<Self, Error> {
        let started = Instant::now();
        let ids = tokenizer_for_text(model, text)?.encode(text, add_special_tokens, SpecialTokens::AsText)?;
        Ok(Self { ids, encode_time: started.elapsed(), ..Self::default() })
    }

    /// The same with media before the text. Each stands as the model's chat template, if it has one, writes it within a text.
    pub fn completion_with_media(model: &Language, text: &str, media: &[Medium]) -> Result<Self, Error> {
        if media.is_empty() {
            return Self::of_text(model, text, true);
        }
        let started = Instant::now();
        let tokenizer = tokenizer_for_text(model, text)?;
        let mut control = String::new();
        for medium in media {
            model.soft_rows(medium)?;
            let ids = around(model, tokenizer, medium.kind());
            control.extend(ids.iter().filter_map(|&id| tokenizer.id_to_token(id)));
        }
        let ids = tokenizer.encode_behind(&control, text)?;
        Self::expanded(model, &ids, media, started)
    }

    /// A conversation, by the model's chat template. Special tokens written out in messages stay text, unless a message is trusted.
    pub fn chat(model: &Language, chat: &Chat) -> Result<Self, Error> {
        Self::chat_until(model, chat, &Cancel::new())
    }

    /// The same, until somebody cancels it: a template may take a second for a long conversation.
    pub fn chat_until(model: &Language, chat: &Chat, cancel: &Cancel) -> Result<Self, Error> {
        let started = Instant::now();
        let tokenizer = model.tokenizer().ok_or(Error::NoTokenizer { what: "a conversation" })?;
        check_length(model, tokenizer, chat.text_bytes())?;
        let media = media_of(chat)?;
        for medium in &media {
            model.soft_rows(medium)?;
        }
        let rendered = render(model, tokenizer, chat, &media, cancel)?;
        let mut prompt = Self::expanded(model, &rendered.ids, &media, started)?;
        prompt.is_chat = true;
        if model.is_recurrent() && chat.add_generation_prompt {
            // What begins the answer is often written otherwise once the answer is there.
            let without = Chat { add_generation_prompt: false, ..chat.clone() };
            let without = render(model, tokenizer, &without, &media, cancel).and_then(|r| Self::expanded(model, &r.ids, &media, started));
            prompt.stable_rows = without.map_or(0, |without| without.ids.iter().zip(&prompt.ids).take_while(|(a, b)| a == b).count());
            prompt.encode_time = started.elapsed();
        }
        Ok(prompt)
    }

    /// Puts as many placeholders as each medium needs where `ids` has one for it.
    fn expanded(model: &Language, ids: &[u32], media: &[Medium], started: Instant) -> Result<Self, Error> {
        let mut prompt = Self::default();
        if media.is_empty() {
            // Placeholders that stand for nothing are ids like any other.
            prompt.ids = ids.to_vec();
        } else {
            check_counts(model, ids, media)?;
            let mut waiting = KINDS.map(|kind| media.iter().filter(|m| m.kind() == kind).collect::<VecDeque<_>>());
            let placeholders = KINDS.map(|kind| model.placeholder(kind));
            for &id in ids {
                let which = placeholders.iter().position(|placeholder| placeholder.is_some_and(|p| p.token == id));
                let medium = which.and_then(|kind| Some((placeholders[kind]?, waiting[kind].pop_front()?)));
                let Some((placeholder, medium)) = medium else {
                    prompt.ids.push(id);
                    continue;
                };
                prompt.ids.extend(placeholder.begin);
                prompt.media.push(PlacedMedium { first: prompt.ids.len(), medium: medium.clone() });
                prompt.ids.extend(std::iter::repeat_n(id, model.soft_rows(medium)?));
                prompt.ids.extend(placeholder.end);
            }
        }
        prompt.encode_time = started.elapsed();
        Ok(prompt)
    }

    /// The ids.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The media, in the order of their places.
    pub fn media(&self) -> &[PlacedMedium] {
        &self.media
    }

    /// How many of its first rows a next turn of the conversation begins with, too; 0 where that does not matter or is not known. With recurrent slots, what was
    /// computed can only be used again from rows at which it was kept: this is one.
    pub fn stable_rows(&self) -> usize {
        self.stable_rows
    }

    /// Whether it is a conversation, so that the answer is a reply, which may begin with reasoning.
    pub fn is_chat(&self) -> bool {
        self.is_chat
    }

    /// How long making the ids took; towers run when the prompt is read.
    pub fn encode_time(&self) -> Duration {
        self.encode_time
    }
}

/// Bytes of text beyond what a full context of the longest tokens holds: text that normalising drops, or blanks that a token swallows.
const SLACK_BYTES: usize = 1 << 20;

/// The tokenizer for a text that is not too long for the model.
fn tokenizer_for_text<'a>(model: &'a Language, text: &str) -> Result<&'a Tokenizer, Error> {
    let tokenizer = model.tokenizer().ok_or(Error::NoTokenizer { what: "a text prompt" })?;
    check_length(model, tokenizer, text.len())?;
    Ok(tokenizer)
}

/// Refuses a text that is longer than the context by far, before it is rendered and encoded.
fn check_length(model: &Language, tokenizer: &Tokenizer, bytes: usize) -> Result<(), Error> {
    let (context, limit) = (model.context(), model.context_limit());
    let most = context.saturating_mul(tokenizer.longest_token()).saturating_add(SLACK_BYTES);
    if bytes > most { Err(Error::TextTooLong { bytes, most, context, limit }) } else { Ok(()) }
}

/// All media of a conversation, in order. Each must stand in its message's content.
fn media_of(chat: &Chat) -> Result<Vec<Medium>, Error> {
    for (place, message) in chat.messages.iter().enumerate() {
        let parts: Vec<_> = message.part_types().filter_map(MediaKind::of_part).collect();
        if !message.media.iter().map(Medium::kind).eq(parts.iter().copied()) {
            let problem =
                format!("its content has {} parts that are media, and {} media are given for it", parts.len(), message.media.len());
            return Err(ChatError::Message { number: place + 1, problem }.into());
        }
    }
    Ok(chat.messages.iter().flat_map(|message| &message.media).cloned().collect())
}

/// The conversation by the template: content as it is given or, where the template fails on that or does not write a placeholder for each medium, as
/// one text.
fn render(model: &Language, tokenizer: &Tokenizer, chat: &Chat, media: &[Medium], cancel: &Cancel) -> Result<text::RenderedChat, Error> {
    let ModelTemplate { template, defaults } = model.template()?;
    let mut chat = chat.clone();
    for (name, value) in defaults {
        chat.options.entry(name).or_insert_with(|| value.clone());
    }
    let rendered = template.prompt_until(&chat, tokenizer, SpecialTokens::AsText, cancel.flag()).map_err(Error::from);
    let rendered = rendered.and_then(|rendered| check_counts(model, &rendered.ids, media).map(|()| rendered));
    rendered.or_else(|error| {
        // What is refused for its size or cost is not tried again.
        if matches!(error, Error::Cancelled | Error::Chat(ChatError::Endless { .. } | ChatError::Tokenizer(_))) {
            return Err(error);
        }
        let token_of = |kind| tokenizer.id_to_token(model.placeholder(kind)?.token);
        let placeholder = |part: &str| MediaKind::of_part(part).and_then(token_of);
        let flat = template.prompt_flat(&chat, tokenizer, SpecialTokens::AsText, &placeholder, cancel.flag());
        flat.ok().filter(|flat| check_counts(model, &flat.ids, media).is_ok()).ok_or(error)
    })
}

/// Whether there is one placeholder for each medium. Without media any number is right.
fn check_counts(model: &Language, ids: &[u32], media: &[Medium]) -> Result<(), Error> {
    for kind in KINDS.into_iter().filter(|_| !media.is_empty()) {
        let Some(placeholder) = model.placeholder(kind) else { continue };
        let found = ids.iter().filter(|id| **id == placeholder.token).count();
        let expected = media.iter().filter(|medium| medium.kind() == kind).count();
        if found != expected {
            let reason = "the chat template does not write one for each; give the ids themselves, or fix the bundle's template".to_owned();
            return Err(Error::Placeholders { kind, found, expected, reason });
        }
    }
    Ok(())
}

/// The placeholder of a kind with the control tokens that the chat template writes directly around it in the middle of a text.
fn around(model: &Language, tokenizer: &Tokenizer, kind: MediaKind) -> Vec<u32> {
    let Some(placeholder) = model.placeholder(kind) else { return Vec::new() };
    let alone = || vec![placeholder.token];
    let Ok(ModelTemplate { template, defaults }) = model.template() else { return alone() };
    let mut message = Message::new("user", "");
    let text = json!({ "type": "text", "text": "a" });
    message.fields_mut().insert("content".to_owned(), json!([text, { "type": kind.part_type() }, text]));
    let probe = Chat { options: defaults.clone(), ..Chat::new(vec![message]) };
    let Ok(rendered) = template.prompt(&probe, tokenizer, SpecialTokens::AsText) else { return alone() };
    let mut places = rendered.ids.iter().enumerate().filter(|(_, id)| **id == placeholder.token).map(|(at, _)| at);
    let (Some(at), None) = (places.next(), places.next()) else { return alone() };
    let (before, after) = rendered.ids.split_at(at);
    let is_special = |id: &&u32| tokenizer.is_special(**id);
    let start = at - before.iter().rev().take_while(is_special).count();
    let end = at + after.iter().take_while(is_special).count();
    rendered.ids[start..end].to_vec()
}

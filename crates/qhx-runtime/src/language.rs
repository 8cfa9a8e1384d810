//! The language side of a model: what turns texts, conversations and media into rows and tokens into text. Needs no device and no weights.

use crate::{
    Encoded, Error, LogitProcessor, ModelParts, ModelTemplate, Structure,
    encoder::Towers,
    inputs::{self, Placeholders},
    medium::{Medium, takes},
};
#[cfg(feature = "grammar")]
use crate::{
    grammar::{Grammars, Shape},
    text::reply::Reasoning,
};
use qhx_bundle::media::{Media, Placeholder};
use qhx_ir::{Checked, Dim, Generator, OpKind, Slot};
use qhx_media::MediaKind;
use qhx_text::{
    Tokenizer,
    reply::{CallFormat, ReplyFormat},
};
use std::sync::{Arc, OnceLock};

/// Sizes that ids and logits of a model have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vocabulary {
    /// Ids that may be put in: `0..ids`.
    pub ids: usize,
    /// Numbers in a row of logits.
    pub logits: usize,
}

/// The language side of a model. A loaded [`crate::Model`] has one, and can be used as one.
pub struct Language {
    name: String,
    context: usize,
    context_limit: usize,
    vocabulary: Vocabulary,
    eos: Vec<u32>,
    tokenizer: Option<Tokenizer>,
    template: Option<ModelTemplate>,
    media: Media,
    pub(crate) towers: Arc<Towers>,
    placeholders: Placeholders,
    recurrent: bool,
    /// How replies are written, once somebody has asked.
    reply_format: OnceLock<ReplyFormat>,
    #[cfg(feature = "grammar")]
    grammars: OnceLock<Grammars>,
}

impl Language {
    /// That of a model which is described by its parts, for sessions as long as it was made for.
    pub fn new(parts: &ModelParts) -> Result<Self, Error> {
        Self::with_context(parts, parts.context_limit)
    }

    /// The same for sessions of another length.
    pub(crate) fn with_context(parts: &ModelParts, context: usize) -> Result<Self, Error> {
        Ok(Self {
            name: parts.name.clone(),
            context,
            context_limit: parts.context_limit,
            vocabulary: check_text_program(&parts.program)?,
            eos: parts.eos.clone(),
            tokenizer: parts.tokenizer.clone(),
            template: parts.template.clone(),
            media: parts.media.clone(),
            towers: Arc::new(Towers::new(&parts.media, &parts.towers, &parts.program)?),
            placeholders: Placeholders::new(&parts.media, parts.pad),
            recurrent: parts.program.slots.values().any(Slot::is_recurrent),
            reply_format: OnceLock::new(),
            #[cfg(feature = "grammar")]
            grammars: OnceLock::new(),
        })
    }

    /// What people call it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Rows that a session can hold.
    pub fn context(&self) -> usize {
        self.context
    }

    /// The longest session that the model was made for.
    pub fn context_limit(&self) -> usize {
        self.context_limit
    }

    /// How many ids and logits there are.
    pub fn vocabulary(&self) -> Vocabulary {
        self.vocabulary
    }

    /// Ids that end an answer.
    pub fn eos(&self) -> &[u32] {
        &self.eos
    }

    /// Text to ids and back.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_ref()
    }

    /// How a conversation becomes text; the error says that this model has no such way.
    pub fn template(&self) -> Result<&ModelTemplate, Error> {
        self.template.as_ref().ok_or_else(|| Error::NoTemplate { model: self.name.clone() })
    }

    /// How the model writes reasoning and tool calls: found out from its chat template.
    pub fn reply_format(&self) -> &ReplyFormat {
        self.reply_format.get_or_init(|| self.template.as_ref().map(|chat| ReplyFormat::of(&chat.template)).unwrap_or_default())
    }

    /// The special tokens that stand around the parts of a reply: [`crate::GenerateOptions::shown_special`] for whoever takes it apart.
    pub fn special_marks(&self) -> Vec<u32> {
        let format = self.reply_format();
        let marks = format.reasoning.iter().chain(format.calls.iter().map(|(marks, _)| marks));
        let mut texts: Vec<&str> = marks.flat_map(|marks| [marks.open.as_str(), marks.close.as_str()]).collect();
        if let Some((_, CallFormat::Braces { quote })) = &format.calls {
            texts.push(quote);
        }
        let Some(tokenizer) = &self.tokenizer else { return Vec::new() };
        let is_in_mark = |id: &&u32| tokenizer.id_to_token(**id).is_some_and(|token| texts.iter().any(|text| text.contains(&token)));
        tokenizer.special_ids().iter().filter(is_in_mark).copied().collect()
    }

    /// The last characters of a prompt, special tokens written out: whether it begins the answer's reasoning shows there.
    pub fn end_of_prompt(&self, ids: &[u32]) -> String {
        const LAST: usize = 16;
        let last = &ids[ids.len().saturating_sub(LAST)..];
        self.tokenizer.as_ref().and_then(|tokenizer| tokenizer.decode(last, false).ok()).unwrap_or_default()
    }

    /// What keeps an answer to its structure; none where it is free. Only a reply in a conversation may begin with reasoning by itself.
    pub(crate) fn shape(&self, prompt: &[u32], is_chat: bool, structure: &Structure) -> Result<Option<Box<dyn LogitProcessor>>, Error> {
        if structure.is_free() {
            return Ok(None);
        }
        #[cfg(feature = "grammar")]
        {
            let grammars = match self.grammars.get() {
                Some(grammars) => grammars,
                None => {
                    let tokenizer = self.tokenizer.as_ref().ok_or(Error::NoTokenizer { what: "a grammar" })?;
                    let made = Grammars::new(tokenizer, self.vocabulary.logits, &self.eos)?;
                    self.grammars.get_or_init(|| made)
                }
            };
            let format = self.reply_format();
            let reasoning = match format.reasoning_at(&self.end_of_prompt(prompt)) {
                Reasoning::NotBegun if !is_chat => Reasoning::Over,
                reasoning => reasoning,
            };
            let shape = Shape::new(grammars, format, structure, reasoning)?;
            Ok(shape.map(|shape| Box::new(shape) as Box<dyn LogitProcessor>))
        }
        #[cfg(not(feature = "grammar"))]
        {
            let _ = (prompt, is_chat);
            Err(Error::NoGrammars)
        }
    }

    /// What it takes beside text, and how.
    pub fn media(&self) -> &Media {
        &self.media
    }

    /// What it takes, in words: `text and images`.
    pub fn takes(&self) -> String {
        takes(self.towers.kinds())
    }

    /// How media of a kind stand among the tokens; none where the model does not take them.
    pub fn placeholder(&self, kind: MediaKind) -> Option<&Placeholder> {
        match kind {
            MediaKind::Image => self.media.image.as_ref().map(|front_end| &front_end.placeholder),
            MediaKind::Audio => self.media.audio.as_ref().map(|front_end| &front_end.placeholder),
        }
    }

    /// How many soft rows a medium becomes: as many placeholders stand for it.
    pub fn soft_rows(&self, medium: &Medium) -> Result<usize, Error> {
        self.towers.soft_rows(&self.name, medium)
    }

    /// A medium of which a session holds what its tower made.
    pub(crate) fn restored_medium(&self, name: String, encoded: &Encoded) -> Result<Medium, Error> {
        Medium::staged(encoded.kind(), name, encoded.features(), encoded.digest(), &self.name, &self.media)
    }

    /// The program that encodes media of a kind.
    pub fn tower_program(&self, kind: MediaKind) -> Option<&Checked> {
        self.towers.program(kind)
    }

    /// Whether the text program has state that cannot be cut off at any row.
    pub(crate) fn is_recurrent(&self) -> bool {
        self.recurrent
    }

    pub(crate) fn placeholders(&self) -> &Placeholders {
        &self.placeholders
    }

    /// Whether ids can be put in.
    pub(crate) fn check_ids(&self, ids: &[u32]) -> Result<(), Error> {
        if ids.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        let vocabulary = self.vocabulary().ids;
        match ids.iter().position(|&id| id as usize >= vocabulary) {
            Some(at) => Err(Error::UnknownId { id: ids[at], at, vocabulary }),
            None => Ok(()),
        }
    }

    /// Whether ids can be a prompt.
    pub(crate) fn check_prompt(&self, ids: &[u32]) -> Result<(), Error> {
        self.check_ids(ids)?;
        match ids.len() > self.context() {
            true => Err(Error::PromptTooLong { prompt: ids.len(), context: self.context(), limit: self.context_limit() }),
            false => Ok(()),
        }
    }
}

/// Whether a text session can run `program`: it reads ids, gives logits of wanted rows, and asks for nothing that only media bring.
fn check_text_program(program: &Checked) -> Result<Vocabulary, Error> {
    let not_text = |reason: &str| Error::NotText { program: program.name.to_string(), reason: reason.to_owned() };
    inputs::check(program)?;
    let logits = program.outputs.iter().find(|o| &*o.name == "logits").ok_or_else(|| not_text("it has no output `logits`"))?;
    let logits = match program.value_type(&logits.value).shape[..] {
        [Dim::L, Dim::Fixed(logits)] => logits,
        _ => return Err(not_text("its output `logits` must have the shape [L, vocabulary]")),
    };
    let is_ids = |name: &str| {
        let by = program.inputs.iter().find(|i| &*i.name == name).map(|i| &i.generator);
        matches!(by, Some(Generator::Ids | Generator::IdsMediaAsPad))
    };
    let tables = program.ops.iter().filter_map(|op| match &op.op {
        OpKind::Embed { ids, table, .. } if is_ids(ids) => program.weights[table].shape.first(),
        _ => None,
    });
    let ids = *tables.min().ok_or_else(|| not_text("no op looks up token ids"))?;
    Ok(Vocabulary { ids: ids.min(i32::MAX as usize), logits })
}

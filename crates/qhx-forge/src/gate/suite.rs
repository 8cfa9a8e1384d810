//! The prompts of a gate: built in, swept by length, or the user's own.
//!
//! A model with a tokenizer reads plain sentences cut to the wanted number of ids, and a few as a conversation if it has a template; one without reads ids from a
//! seeded generator. One with eyes or ears gets pictures and sounds too, made by code. Nothing depends on the machine or on the time.

use crate::ForgeError;
use qhx_bundle::{Digest, files::read_given, parity::Drawing};
use qhx_runtime::{
    Error, MediaKind, Medium, Model, Prompt,
    sample::random::mix,
    text::{Chat, Message},
    verify::draw,
};
use serde_json::Value;
use std::{collections::BTreeSet, path::Path};

/// Tokens that each prompt is answered with.
pub const NEW_TOKENS: usize = 64;
/// The same in a quick suite …
const QUICK_TOKENS: usize = 16;
/// … which has so many prompts without media …
const QUICK_PROMPTS: usize = 8;
/// … of at most so many ids.
const QUICK_ROWS: usize = 160;
/// The longest file of prompts that is read.
const MAX_BYTES: u64 = 16 << 20;
/// Lengths in ids. Interleaved, so that a suite that is cut short still has short and long ones.
const LENGTHS: [usize; 12] = [17, 600, 1, 150, 33, 384, 8, 100, 257, 3, 513, 64];
/// Sentences that are given as conversations.
const CONVERSATIONS: usize = 4;
/// The moment that templates take for now: a gate gives the same numbers at any time.
const NOW: i64 = 1_767_225_600;

/// What the prompts are made of. Everyday prose with names, numbers, quotes and lists, so that many kinds of tokens occur.
const SENTENCES: [&str; 24] = [
    "The old lighthouse keeper counted the ships as they passed, writing each name in a book with a green cover.",
    "In the spring of 1893 the river rose eleven feet, and the baker moved his ovens to the upper floor.",
    "A good recipe for bread needs flour, water, salt, yeast and more patience than most people have on a Monday.",
    "She said, \"If the train is late again, we shall walk along the canal and look for herons.\"",
    "Heat the oil slowly; when it shimmers, add the onions, then the garlic, and stir until the edges turn brown.",
    "The committee met three times, agreed on nothing, and published a report of 212 pages.",
    "There are two kinds of clouds that sailors fear: those that stand still, and those that come from two sides at once.",
    "My grandfather repaired watches; he used to say that a second is long if you listen to it.",
    "To find the area of a triangle, multiply the base by the height and divide the product by two.",
    "The museum is open from Tuesday to Sunday, 10 a.m. to 6 p.m., and free for children under twelve.",
    "Foxes cross the garden at night, one behind the other, and never touch the lettuce.",
    "First we measured the temperature, then the pressure, and last of all the speed of the wind: 4.7 metres per second.",
    "He bought a map, a compass, two apples and a second-hand coat, and left before the shops had closed.",
    "Why do bees dance? They tell each other where the flowers are, how far, and in which direction from the sun.",
    "The third chapter explains how glass is made from sand, soda and lime, and why it breaks the way it does.",
    "It rained for forty minutes; afterwards the square smelled of dust and warm stone.",
    "A letter arrived from the north: the harbour was frozen, the coffee was bad, and everyone was well.",
    "The function returns the number of words in a line, or zero if the line is empty.",
    "Between the mountains and the sea there is a narrow road on which only one cart can pass at a time.",
    "They planted 36 cherry trees in six rows, and by the fifth year every one of them bore fruit.",
    "Please close the window, water the plants, and leave the key under the blue pot.",
    "The violin is older than the house, and the house is older than the town hall.",
    "When the lamp went out, nobody moved; then somebody laughed, and the story went on in the dark.",
    "Some words are short because they are used often, and some because they were once longer.",
];

/// A prompt of the suite.
#[derive(Clone, Debug, PartialEq)]
pub struct SuitePrompt {
    /// A name for people.
    pub name: String,
    /// What is put in.
    pub prompt: Prompt,
    /// Its media, in their order.
    pub media: Vec<Drawn>,
    /// The answer ends where the model ends it; otherwise it has [`new_tokens`], whatever they are.
    pub until_end: bool,
}

/// A picture or a sound that code made.
#[derive(Clone, Debug, PartialEq)]
pub struct Drawn {
    /// How it is made.
    pub drawing: Drawing,
    /// Sum of its bytes.
    pub sha256: Digest,
    /// Ready for its tower.
    pub medium: Medium,
}

impl SuitePrompt {
    /// What kind of prompt it is, by what it brings beside text.
    pub fn kind(&self) -> &'static str {
        let has = |kind: MediaKind| self.media.iter().any(|drawn| drawn.medium.kind() == kind);
        kind_of(has(MediaKind::Image), has(MediaKind::Audio))
    }

    fn of_ids(name: String, ids: Vec<u32>) -> Self {
        Self { name, prompt: Prompt::from_ids(ids), media: Vec::new(), until_end: false }
    }
}

/// The kind of a prompt with such media.
fn kind_of(image: bool, sound: bool) -> &'static str {
    match (image, sound) {
        (false, false) => "text",
        (true, false) => "image",
        (false, true) => "sound",
        (true, true) => "image and sound",
    }
}

/// The prompts of a gate, and why some are not among them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Suite {
    /// In the order in which they are asked: one of every kind, then the others.
    pub prompts: Vec<SuitePrompt>,
    /// Tokens that each is answered with.
    pub tokens: usize,
    /// What was left out.
    pub left_out: Vec<String>,
    /// How many prompts of each kind the suite has, those that were left out among them.
    kinds: Vec<(String, usize)>,
}

impl Suite {
    fn new(model: &Model, prompts: Vec<SuitePrompt>) -> Self {
        let mut suite = Self { prompts: Vec::new(), tokens: new_tokens(model.context_limit()), left_out: Vec::new(), kinds: Vec::new() };
        suite.count("text", prompts.len());
        suite.prompts = prompts;
        suite
    }

    fn count(&mut self, kind: &str, prompts: usize) {
        match self.kinds.iter_mut().find(|(known, _)| known == kind) {
            Some((_, count)) => *count += prompts,
            None => self.kinds.push((kind.into(), prompts)),
        }
    }

    /// The kinds of prompts with how many there are of each, also of those that do not fit.
    pub(super) fn kinds(&self) -> &[(String, usize)] {
        &self.kinds
    }

    /// How many of the first prompts are asked whatever it takes: one of every kind. A budget shortens a suite; it never leaves out a kind.
    pub fn required(&self) -> usize {
        let mut seen = BTreeSet::new();
        self.prompts.iter().take_while(|prompt| seen.insert(prompt.kind())).count()
    }

    /// The first of every kind first, each kind's in the order in which they are.
    fn kinds_first(mut self) -> Self {
        let mut seen = BTreeSet::new();
        let (first, rest): (Vec<_>, Vec<_>) = std::mem::take(&mut self.prompts).into_iter().partition(|prompt| seen.insert(prompt.kind()));
        self.prompts = first.into_iter().chain(rest).collect();
        self
    }

    /// The same with the shortest prompts first, one of every kind before all others.
    pub(super) fn shortest_first(mut self) -> Self {
        self.prompts.sort_by_key(|prompt| prompt.prompt.ids().len());
        self.kinds_first()
    }

    /// A suite that takes seconds: a few short texts and the first of every kind of media, with short answers.
    pub(super) fn quick(mut self) -> Self {
        let mut seen = BTreeSet::new();
        let mut texts = 0;
        let all = self.prompts.len();
        self.prompts.retain(|prompt| {
            let is_first = seen.insert(prompt.kind());
            let is_short_text = prompt.media.is_empty() && prompt.prompt.ids().len() <= QUICK_ROWS;
            texts += usize::from(is_short_text);
            is_first || is_short_text && texts <= QUICK_PROMPTS
        });
        let tokens = self.tokens;
        self.tokens = tokens.min(QUICK_TOKENS);
        if self.prompts.len() < all || self.tokens < tokens {
            self.left_out.push(format!("a quick gate: {} of {all} prompts, {} tokens of each answer", self.prompts.len(), self.tokens));
        }
        self
    }
}

/// What a user wants the suite to be.
#[derive(Clone, Debug, PartialEq)]
pub enum GivenPrompt {
    /// A text to be continued.
    Text(String),
    /// A user's turn, by the chat template. The answer ends where the model ends its own.
    User(String),
    /// Ids as they are.
    Ids(Vec<u32>),
}

/// Tokens that a suite asks for on a model with this context.
pub fn new_tokens(context: usize) -> usize {
    NEW_TOKENS.min(context / 2).max(1)
}

/// The suite for a model: the user's prompts or the built-in ones, and pictures and sounds where it takes them.
pub fn suite(model: &Model, given_prompts: Option<&[GivenPrompt]>) -> Result<Suite, ForgeError> {
    with_drawings(model, given_prompts.map_or_else(|| built_in(model), |prompts| given(model, prompts).collect())?)
}

/// The same for a model with less room than the one that the user's prompts are for: those that do not fit are left out.
pub(super) fn fitting(model: &Model, given_prompts: Option<&[GivenPrompt]>) -> Result<Suite, ForgeError> {
    let Some(all) = given_prompts else { return suite(model, None) };
    let fitting: Vec<SuitePrompt> = given(model, all).filter_map(Result::ok).collect();
    let (fit, instead) = (fitting.len(), if fitting.is_empty() { ", the built-in ones are asked" } else { "" });
    let mut suite = with_drawings(model, if fitting.is_empty() { built_in(model)? } else { fitting })?;
    if fit < all.len() {
        suite.count("text", if fit > 0 { all.len() - fit } else { 0 });
        let context = model.context_limit();
        suite.left_out.insert(0, format!("{} of {} given prompts do not fit a context of {context}{instead}", all.len() - fit, all.len()));
    }
    Ok(suite)
}

/// Prompts, and among them pictures and sounds where the model takes them.
fn with_drawings(model: &Model, prompts: Vec<SuitePrompt>) -> Result<Suite, ForgeError> {
    let mut suite = Suite::new(model, prompts);
    for (i, (name, drawings)) in drawings(model).into_iter().enumerate() {
        let prompt = with_media(model, name.clone(), &drawings, SENTENCES[7 * i % SENTENCES.len()])?;
        let (rows, most) = (prompt.prompt.ids().len(), most_rows(model));
        suite.count(prompt.kind(), 1);
        if rows <= most {
            // Among the first, so that a suite that is cut short still has one.
            suite.prompts.insert((3 * i + 2).min(suite.prompts.len()), prompt);
        } else {
            suite.left_out.push(format!("{name}: its {rows} rows do not fit the context, which has room for {most}"));
        }
    }
    Ok(suite.kinds_first())
}

/// The built-in suite for a model.
fn built_in(model: &Model) -> Result<Vec<SuitePrompt>, ForgeError> {
    let mut prompts = Vec::new();
    for (i, length) in lengths(model.context_limit()).into_iter().enumerate() {
        prompts.push(SuitePrompt::of_ids(format!("len{length}"), ids(model, i, length)?));
    }
    if model.template().is_ok() {
        for (i, sentence) in SENTENCES.iter().step_by(SENTENCES.len() / CONVERSATIONS).enumerate() {
            let ids = conversation(model, sentence)?;
            if ids.len() + new_tokens(model.context_limit()) <= model.context_limit() {
                prompts.insert(2 * i + 1, SuitePrompt::of_ids(format!("chat{}", i + 1), ids));
            }
        }
    }
    Ok(prompts)
}

/// The most rows that a prompt may have.
fn most_rows(model: &Model) -> usize {
    model.context_limit() - new_tokens(model.context_limit()) + 1
}

/// The pictures and sounds of each media case: wide and high, one and two, short and longer.
fn drawings(model: &Model) -> Vec<(String, Vec<Drawing>)> {
    let image = |width, height, seed| Drawing::Image { width, height, seed };
    let mut cases = Vec::new();
    let has_image = model.media().image.is_some();
    if has_image {
        cases.push(("image1".into(), vec![image(96, 64, 1)]));
        cases.push(("image2".into(), vec![image(56, 120, 2), image(80, 80, 3)]));
    }
    if let Some(front_end) = &model.media().audio {
        let rate = front_end.sampling_rate;
        let sound = |tenths: usize, seed| {
            let samples = (rate as usize * tenths / 10).clamp(front_end.frame_length, front_end.max_samples.max(front_end.frame_length));
            Drawing::Audio { rate, samples, seed }
        };
        cases.push(("sound1".into(), vec![sound(8, 1)]));
        cases.push(("sound2".into(), vec![sound(19, 2)]));
        if has_image {
            cases.push(("image and sound".into(), vec![image(72, 48, 4), sound(11, 3)]));
        }
    }
    cases
}

/// A prompt with media before a text: as a conversation where there is a template that takes them, else as a text, else among ids.
fn with_media(model: &Model, name: String, drawings: &[Drawing], text: &str) -> Result<SuitePrompt, ForgeError> {
    let drawn = drawings
        .iter()
        .map(|&drawing| draw(drawing, model.name(), model.media()).map(|(medium, sha256)| Drawn { drawing, sha256, medium }));
    let drawn = drawn.collect::<Result<Vec<_>, _>>()?;
    let media: Vec<Medium> = drawn.iter().map(|drawn| drawn.medium.clone()).collect();
    let prompt = match (model.tokenizer(), model.template()) {
        (Some(_), Ok(_)) => {
            let chat = Chat { now: Some(NOW), ..Chat::new(vec![Message::with_media("user", media.clone(), text)]) };
            Prompt::chat(model, &chat).or_else(|_| Prompt::completion_with_media(model, text, &media))
        }
        (Some(_), Err(_)) => Prompt::completion_with_media(model, text, &media),
        (None, _) => among_ids(model, &media),
    };
    Ok(SuitePrompt { name, prompt: prompt?, media: drawn, until_end: false })
}

/// Media with random ids around each.
fn among_ids(model: &Model, media: &[Medium]) -> Result<Prompt, Error> {
    let tokens: Vec<u32> = [MediaKind::Image, MediaKind::Audio].iter().filter_map(|&kind| Some(model.placeholder(kind)?.token)).collect();
    let mut plain = random_ids(model, media.len() + 100).filter(|id| !tokens.contains(id));
    let mut ids: Vec<u32> = plain.by_ref().take(4).collect();
    for medium in media {
        let Some(placeholder) = model.placeholder(medium.kind()) else { continue };
        ids.extend(placeholder.begin);
        ids.extend(std::iter::repeat_n(placeholder.token, model.soft_rows(medium)?));
        ids.extend(placeholder.end);
        ids.extend(plain.by_ref().take(5));
    }
    Prompt::from_ids_with_media(model, ids, media)
}

/// The user's prompts for a model, each named by its place.
fn given<'a>(model: &'a Model, prompts: &'a [GivenPrompt]) -> impl Iterator<Item = Result<SuitePrompt, ForgeError>> + 'a {
    let most = most_rows(model);
    prompts.iter().enumerate().map(move |(i, prompt)| {
        let ids = match prompt {
            GivenPrompt::Text(text) => Prompt::completion(model, text)?.ids().to_vec(),
            GivenPrompt::User(text) => conversation(model, text)?,
            GivenPrompt::Ids(ids) => ids.clone(),
        };
        let wrong = |reason: String| ForgeError::Prompts { prompt: i + 1, reason };
        if ids.is_empty() {
            return Err(wrong("has no ids".into()));
        }
        if let Some(id) = ids.iter().find(|&&id| id as usize >= model.vocabulary().ids) {
            return Err(wrong(format!("has the id {id}, which is not in the vocabulary of {}", model.vocabulary().ids)));
        }
        if ids.len() > most {
            return Err(wrong(format!("has {} ids; with the answer at most {most} fit the model's context", ids.len())));
        }
        let until_end = matches!(prompt, GivenPrompt::User(_));
        Ok(SuitePrompt { until_end, ..SuitePrompt::of_ids(format!("prompt{}", i + 1), ids) })
    })
}

/// Reads a file of prompts: a JSON list whose items are a text, a list of ids, `{"user": TEXT}`, `{"text": TEXT}` or `{"ids": [ … ]}`.
pub fn read(path: &Path) -> Result<Vec<GivenPrompt>, String> {
    let place = path.display();
    let text = read_given(path, MAX_BYTES).map_err(|e| e.to_string())?;
    let value: Value = serde_json::from_slice(&text).map_err(|e| format!("{place} is not valid JSON: {e}"))?;
    let items = value
        .as_array()
        .filter(|items| !items.is_empty())
        .ok_or_else(|| format!("{place} must hold a JSON list of at least one prompt"))?;
    let ids = |value: &Value| value.as_array()?.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect::<Option<Vec<_>>>();
    let prompt = |item: &Value| match item {
        Value::String(text) => Some(GivenPrompt::Text(text.clone())),
        Value::Array(_) => ids(item).map(GivenPrompt::Ids),
        Value::Object(fields) if fields.len() == 1 => match fields.iter().next()? {
            (name, Value::String(text)) if name == "text" => Some(GivenPrompt::Text(text.clone())),
            (name, Value::String(text)) if name == "user" => Some(GivenPrompt::User(text.clone())),
            (name, value) if name == "ids" => ids(value).map(GivenPrompt::Ids),
            _ => None,
        },
        _ => None,
    };
    let expected = "must be a text, a list of ids, or an object with one field `text`, `user` or `ids`";
    items.iter().enumerate().map(|(i, item)| prompt(item).ok_or_else(|| format!("{place}: prompt {} {expected}", i + 1))).collect()
}

/// The lengths that fit a context, at least ten where it has room for that many different ones.
fn lengths(context: usize) -> Vec<usize> {
    let most = context.saturating_sub(new_tokens(context)).max(1);
    let mut lengths: Vec<usize> = Vec::new();
    for length in LENGTHS {
        // Too long: the longest possible one that is not there yet.
        let length = if length <= most { Some(length) } else { (1..=most).rev().find(|l| !lengths.contains(l) && !LENGTHS.contains(l)) };
        lengths.extend(length);
    }
    lengths
}

/// `length` ids: those of sentences from number `start` on, or random ones.
fn ids(model: &Model, start: usize, length: usize) -> Result<Vec<u32>, ForgeError> {
    let limit = model.vocabulary().ids as u32;
    if model.tokenizer().is_none() {
        return Ok(random_ids(model, start).take(length).collect());
    }
    let mut text = String::new();
    for sentence in SENTENCES.iter().cycle().skip(5 * start) {
        text += sentence;
        // No tokenizer makes more than a few ids of a character, so this ends.
        if text.len() >= length {
            let ids = Prompt::completion(model, &text)?.ids().to_vec();
            // A tokenizer may put an id at the end: cut only a text that is longer.
            if ids.len() > length + 2 {
                return Ok(ids.into_iter().take(length).map(|id| id.min(limit - 1)).collect());
            }
        }
        if text.len() > 64 * length + 4096 {
            break;
        }
        text.push(' ');
    }
    Ok((0..length as u32).map(|i| i % limit).collect())
}

fn conversation(model: &Model, text: &str) -> Result<Vec<u32>, ForgeError> {
    let chat = Chat { now: Some(NOW), ..Chat::new(vec![Message::new("user", text)]) };
    Ok(Prompt::chat(model, &chat)?.ids().to_vec())
}

/// Ids without end, by SplitMix64.
fn random_ids(model: &Model, start: usize) -> impl Iterator<Item = u32> + use<> {
    const STEP: u64 = 0x9E37_79B9_7F4A_7C15;
    let (first, limit) = (STEP.wrapping_mul(start as u64 + 1), model.vocabulary().ids as u64);
    (1..).map(move |i| (mix(first.wrapping_add(STEP.wrapping_mul(i))) % limit) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_fit_the_context() {
        assert_eq!(lengths(4096), LENGTHS);
        assert!(LENGTHS.iter().any(|&l| l > 512) && LENGTHS.contains(&1) && LENGTHS.contains(&600));
        for context in [1, 2, 5, 40, 100, 300, 600, 663, 664] {
            let found = lengths(context);
            assert!(found.iter().all(|l| l + new_tokens(context) <= context.max(2)), "{context}: {found:?}");
            assert!(found.len() >= 10 || context < 40, "{context}: {found:?}");
            let mut different = found.clone();
            different.sort();
            different.dedup();
            assert_eq!(different.len(), found.len(), "{context}: {found:?}");
        }
    }

    #[test]
    fn files_of_prompts() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("prompts.json");
        let read_text = |text: &str| {
            std::fs::write(&path, text).unwrap();
            read(&path)
        };
        let found = read_text(r#"["a", [1, 2], {"user": "b"}, {"text": "c"}, {"ids": [3]}]"#).unwrap();
        let text = |s: &str| GivenPrompt::Text(s.into());
        assert_eq!(found, [text("a"), GivenPrompt::Ids(vec![1, 2]), GivenPrompt::User("b".into()), text("c"), GivenPrompt::Ids(vec![3])]);
        for (bad, expected) in [
            ("", "not valid JSON"),
            ("{}", "must hold a JSON list"),
            ("[]", "at least one prompt"),
            ("[1]", "prompt 1 must be a text"),
            ("[\"a\", [1, -2]]", "prompt 2 must be"),
            ("[{\"user\": \"a\", \"text\": \"b\"}]", "one field"),
        ] {
            let error = read_text(bad).unwrap_err();
            assert!(error.contains(expected), "{bad}: {error}");
        }
        assert!(read(folder.path()).unwrap_err().contains("must be a file"));
        assert!(read(&folder.path().join("none")).unwrap_err().contains("cannot read"));
    }
}

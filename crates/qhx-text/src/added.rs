//! Finding a tokenizer's added tokens in a text, with a say in which of the special ones count.
//!
//! The tokenizers library finds either all special tokens in a text or none. A rendered chat needs both at once: the template's are
//! control tokens, the same strings inside a message are not. The rules here (leftmost, longest, tokens that swallow the white space
//! beside them) are the library's, and a test holds them to it.

use std::collections::{HashMap, HashSet};
use std::sync::LazyLock;
use tokenizers::normalizer::Range;
use tokenizers::utils::SysRegex;
use tokenizers::{AddedToken, AddedVocabulary, NormalizedString, Normalizer, NormalizerWrapper, PreTokenizedString, Token};

/// The added tokens, ready to be searched for. Some are looked for in the text as written, some after normalisation.
pub(super) struct AddedTokens {
    written: Search,
    normalised: Search,
}

/// A tree of the tokens' bytes.
#[derive(Default)]
struct Search {
    children: HashMap<(u32, u8), u32>,
    ends: HashMap<u32, (u32, AddedToken)>,
    /// Nodes on the way to a special token.
    towards_special: HashSet<u32>,
    nodes: u32,
}

impl AddedTokens {
    pub(super) fn of(vocabulary: &AddedVocabulary) -> Self {
        let mut written = Search::default();
        let mut normalised = Search::default();
        let mut tokens: Vec<_> = vocabulary.get_added_tokens_decoder().iter().collect();
        tokens.sort_unstable_by_key(|(id, _)| **id);
        for (&id, token) in tokens {
            match vocabulary.simple_id_to_token(id) {
                Some(form) if token.normalized => normalised.insert(&form, id, token),
                _ => written.insert(&token.content, id, token),
            }
        }
        Self { written, normalised }
    }

    /// Splits the text at its added tokens and normalises the rest. A special token is passed over as text when `forged` says so of the
    /// place where it would be marked.
    pub(super) fn split(
        &self,
        text: &str,
        normalizer: Option<&NormalizerWrapper>,
        forged: impl Fn(usize) -> bool,
    ) -> tokenizers::Result<PreTokenizedString> {
        let forged_at = |start| mark_place(text, start).is_some_and(&forged);
        let mut split = PreTokenizedString::from(text);
        split.split(|_, part| {
            let shift = part.offsets_original().0;
            self.written.split(part, |_, range| forged_at(shift + range.start))
        })?;
        split.split(|_, mut part| {
            if let Some(normalizer) = normalizer {
                normalizer.normalize(&mut part)?;
            }
            let shift = part.offsets_original().0;
            self.normalised.split(part, |part, range| {
                let written = part.convert_offsets(Range::Normalized(range));
                written.is_some_and(|written| forged_at(shift + written.start))
            })
        })?;
        Ok(split)
    }

    /// The places to mark in `text`, ascending: one for each special token in it, and for what may become one if more text follows.
    pub(super) fn special_marks(&self, text: &str, normalizer: Option<&NormalizerWrapper>) -> Vec<usize> {
        let starts = text.char_indices().map(|(at, _)| at).filter(|at| self.written.special_may_start(&text[*at..]));
        let mut marks: Vec<usize> = starts.filter_map(|start| mark_place(text, start)).collect();
        if !self.normalised.ends.is_empty() {
            let mut part = NormalizedString::from(text);
            // Where normalisation fails, encoding will report it.
            let normalised = normalizer.is_none_or(|normalizer| normalizer.normalize(&mut part).is_ok());
            let here = part.get().char_indices().filter(|(at, _)| normalised && self.normalised.special_may_start(&part.get()[*at..]));
            let written = here.filter_map(|(at, c)| part.convert_offsets(Range::Normalized(at..at + c.len_utf8())));
            marks.extend(written.filter_map(|range| mark_place(text, range.start)));
        }
        marks.sort_unstable();
        marks.dedup();
        marks
    }
}

impl Search {
    fn insert(&mut self, form: &str, id: u32, token: &AddedToken) {
        if form.is_empty() {
            return;
        }
        let mut node = 0;
        for &byte in form.as_bytes() {
            let nodes = &mut self.nodes;
            node = *self.children.entry((node, byte)).or_insert_with(|| {
                *nodes += 1;
                *nodes
            });
            if token.special {
                self.towards_special.insert(node);
            }
        }
        self.ends.insert(node, (id, token.clone()));
    }

    /// The nodes along `text`, each with how many bytes it took to get there.
    fn walk<'a>(&'a self, text: &'a str) -> impl Iterator<Item = (usize, u32)> + 'a {
        let mut node = 0;
        text.bytes().enumerate().map_while(move |(at, byte)| {
            node = *self.children.get(&(node, byte))?;
            Some((at + 1, node))
        })
    }

    /// The longest token at the start of `text`.
    fn longest(&self, text: &str) -> Option<(usize, u32, &AddedToken)> {
        let ends = self.walk(text).filter_map(|(length, node)| self.ends.get(&node).map(|(id, token)| (length, *id, token)));
        ends.last()
    }

    /// Whether a special token starts `text`, or all of `text` starts a special token.
    fn special_may_start(&self, text: &str) -> bool {
        let is_special = |node| self.ends.get(&node).is_some_and(|(_, token)| token.special);
        let mut path = self.walk(text);
        path.any(|(length, node)| is_special(node) || (length == text.len() && self.towards_special.contains(&node)))
    }

    /// Cuts `part` into its tokens and what lies between them.
    fn split(
        &self,
        part: NormalizedString,
        forged: impl Fn(&NormalizedString, std::ops::Range<usize>) -> bool,
    ) -> tokenizers::Result<Vec<(NormalizedString, Option<Vec<Token>>)>> {
        let text = part.get();
        let mut pieces = Vec::new();
        let mut cut = |from: usize, to: usize, id: Option<u32>| -> tokenizers::Result<()> {
            let piece = part.slice(Range::Normalized(from..to)).ok_or("an added token does not lie on characters")?;
            let token = id.map(|id| vec![Token::new(id, piece.get().to_owned(), (0, to - from))]);
            pieces.push((piece, token));
            Ok(())
        };
        let (mut done, mut at) = (0, 0);
        while let Some(character) = text[at..].chars().next() {
            let Some((length, id, token)) = self.longest(&text[at..]) else {
                at += character.len_utf8();
                continue;
            };
            if token.special && forged(&part, at..at + length) {
                at += character.len_utf8();
                continue;
            }
            let (mut from, mut to) = (at, at + length);
            at = to;
            if token.single_word && (is_word(text[..from].chars().next_back()) || is_word(text[to..].chars().next())) {
                continue;
            }
            if token.lstrip {
                from = text[..from].trim_end().len().max(done);
            }
            if token.rstrip {
                to = text.len() - text[to..].trim_start().len();
            }
            if done < from {
                cut(done, from, None)?;
            }
            cut(from, to, Some(id))?;
            done = to;
        }
        if done < text.len() {
            cut(done, text.len(), None)?;
        }
        Ok(pieces)
    }
}

/// Where a token that starts at `start` is marked: behind its first character that is not white space. (A mark behind white space would keep a
/// template from trimming it.)
fn mark_place(text: &str, start: usize) -> Option<usize> {
    let rest = text.get(start..)?;
    rest.char_indices().find(|(_, c)| !c.is_whitespace()).map(|(at, c)| start + at + c.len_utf8())
}

/// The library's notion of a word character, asked of the library.
static WORD: LazyLock<Option<SysRegex>> = LazyLock::new(|| SysRegex::new(r"\w").ok());

fn is_word(character: Option<char>) -> bool {
    let is_match = |regex: &SysRegex| character.is_some_and(|c| regex.find_iter(c.encode_utf8(&mut [0; 4])).next().is_some());
    WORD.as_ref().is_some_and(is_match)
}

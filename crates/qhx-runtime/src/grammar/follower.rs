//! An answer's place in a grammar: what may come next, and what must.

use super::{guarded, wrong};
use crate::Error;
use llguidance::{
    TokenParser,
    toktrie::{SimpleVob, TokTrie},
};
use qhx_ir::IdMask;
use std::collections::VecDeque;

/// The most bytes that must come which are looked for at a time: what a grammar forces may be endless, and other answers wait meanwhile.
pub(super) const WINDOW: usize = 256;
/// What looking ahead may cost, in the grammar library's units of work (some ten thousand a millisecond). What is found by then is
/// taken, and the rest looked for later.
const EFFORT: u64 = 20_000;
/// The most tokens that are all beginnings of one text.
const MOST_BEGINNINGS: usize = 64;

/// An answer's place in a grammar.
pub(super) struct Follower {
    parser: TokenParser,
    /// What ended it early.
    problem: Option<String>,
    /// The token before, with which what follows is cut.
    last: Option<u32>,
    /// What comes next, once it was asked for.
    next: Option<Next>,
}

enum Next {
    /// One of these.
    OneOf(SimpleVob),
    /// These, one after the other.
    Forced(VecDeque<u32>),
}

impl Follower {
    /// At the beginning. An error if there is no answer that follows the grammar.
    pub(super) fn new(mut parser: TokenParser) -> Result<Self, Error> {
        if parser.is_fresh() {
            parser.start_without_prompt();
        }
        let mut follower = Self { parser, problem: None, last: None, next: None };
        follower.look(1);
        match follower.problem {
            Some(problem) => Err(Error::Grammar { problem }),
            None => Ok(follower),
        }
    }

    /// Another answer at the same place.
    pub(super) fn fork(&self) -> Self {
        Self { parser: self.parser.deep_clone(), problem: self.problem.clone(), last: self.last, next: None }
    }

    /// Why nothing may come next, where that is so and the answer has not ended.
    pub(super) fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }

    /// Whether nothing more belongs to the answer.
    pub(super) fn has_ended(&self) -> bool {
        self.problem.is_none() && self.parser.stopped()
    }

    pub(super) fn take(&mut self, id: u32) {
        // What was forced stays so, however the answer asks for it.
        match &mut self.next {
            Some(Next::Forced(ids)) if ids.len() > 1 && ids[0] == id => drop(ids.pop_front()),
            _ => self.next = None,
        }
        self.last = Some(id);
        self.attempt(|parser| advance(parser, id));
    }

    /// The ids that must come next, of which `most` are of use; none where there is a choice.
    pub(super) fn forced(&mut self, most: usize) -> Vec<u32> {
        match self.look(most) {
            Some(Next::Forced(ids)) => ids.iter().take(most).copied().collect(),
            _ => Vec::new(),
        }
    }

    /// The ids that may come next.
    pub(super) fn allowed(&mut self, eos: &[u32], width: usize) -> IdMask {
        let mut mask = IdMask::none(width);
        if self.has_ended() {
            eos.iter().for_each(|id| mask.allow(*id));
            return mask;
        }
        match self.look(usize::MAX) {
            Some(Next::Forced(ids)) => mask.allow(ids[0]),
            Some(Next::OneOf(allowed)) => {
                let words = mask.0.len().min(allowed.as_slice().len());
                mask.0[..words].copy_from_slice(&allowed.as_slice()[..words]);
            }
            None => {}
        }
        mask
    }

    /// What comes next, with what must follow it as far as it is of use.
    fn look(&mut self, most: usize) -> Option<&Next> {
        if self.next.is_none() && self.problem.is_none() && !self.has_ended() {
            let last = self.last;
            self.next = self.attempt(|parser| look(parser, last, most));
        }
        self.next.as_ref()
    }

    fn attempt<T>(&mut self, work: impl FnOnce(&mut TokenParser) -> Result<T, Error>) -> Option<T> {
        if self.problem.is_some() {
            return None;
        }
        match guarded(|| work(&mut self.parser)) {
            Ok(done) => Some(done),
            Err(error) => {
                self.problem = Some(match error {
                    Error::Grammar { problem } => problem,
                    other => other.to_string(),
                });
                None
            }
        }
    }
}

fn advance(parser: &mut TokenParser, id: u32) -> Result<(), Error> {
    parser.consume_token(id).map_err(wrong)?;
    parser.check_stop().map(drop).map_err(wrong)
}

/// What comes next, after `last`: `most` tokens, as they are looked for.
fn look(parser: &mut TokenParser, last: Option<u32>, most: usize) -> Result<Next, Error> {
    let environment = parser.token_env.clone();
    let trie = environment.tok_trie();
    let first = parser.compute_mask().map_err(wrong)?;
    let Some(mut id) = only_text(trie, &first) else { return Ok(Next::OneOf(first)) };
    let mut text = trie.decode_raw(last.as_slice());
    let before = text.len();
    let mut ahead = parser.deep_clone();
    let (mut effort, mut tokens) = (0, 0);
    loop {
        text.extend(trie.decode_raw(&[id]));
        advance(&mut ahead, id)?;
        tokens += 1;
        if tokens >= most || text.len() - before >= WINDOW || effort >= EFFORT || ahead.stopped() {
            break;
        }
        // Whatever is wrong further on is found when the answer comes there.
        let Ok(mask) = ahead.compute_mask() else { break };
        let stats = ahead.last_step_stats();
        effort += stats.lexer_cost + stats.all_items as u64;
        match only_text(trie, &mask) {
            Some(next) => id = next,
            None => break,
        }
    }
    // Cut as the model has learnt it, together with the token before if that keeps it as it is.
    let (mut ids, mut fixed) = environment.tokenize_bytes_marker(&text);
    if let Some(last) = last {
        match ids.first() == Some(&last) {
            true => (ids, fixed) = (ids.split_off(1), fixed.saturating_sub(1)),
            false => (ids, fixed) = environment.tokenize_bytes_marker(&text[before..]),
        }
    }
    // The last ones may be cut otherwise, once it is known what follows.
    let (open, _) = ahead.parser.with_recognizer(|recognizer| trie.chop_tokens(recognizer, &ids[fixed..]));
    ids.truncate(ids.len() - open);
    Ok(if ids.is_empty() { Next::OneOf(first) } else { Next::Forced(ids.into()) })
}

/// The longest of the tokens, if all others are beginnings of its text: then that text must come.
fn only_text(trie: &TokTrie, mask: &SimpleVob) -> Option<u32> {
    let words = mask.as_slice();
    let count: usize = words.iter().map(|word| word.count_ones() as usize).sum();
    if count == 0 || count > MOST_BEGINNINGS {
        return None;
    }
    let ids = || (0..words.len() as u32 * 32).filter(|id| words[*id as usize / 32] >> (id % 32) & 1 == 1);
    if ids().any(|id| trie.eos_tokens().contains(&id)) {
        return None;
    }
    let longest = ids().max_by_key(|id| trie.token_len(*id))?;
    let text = trie.token(longest);
    ids().all(|id| id == longest || text.starts_with(trie.token(id))).then_some(longest)
}

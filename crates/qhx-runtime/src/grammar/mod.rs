//! Answers that follow a grammar: which tokens may come next is asked before each is chosen, so an answer that has ended is right.
//!
//! Owns the table of the tokens' bytes and what grammars are compiled to. Knows nothing of devices and sessions.

mod calls;
mod schema;
mod shape;
#[cfg(test)]
mod tests;
mod words;

pub(crate) use shape::Shape;

use crate::{
    Constraint, Error,
    text::{Tokenizer, guard::caught},
};
use llguidance::{
    Matcher, ParserFactory,
    api::{GrammarWithLexer, TopLevelGrammar},
    toktrie::{InferenceCapabilities, TokEnv, TokRxInfo, TokTrie},
};
use schema::written;
use serde_json::json;
use std::sync::Arc;
use words::Words;

/// Tokens with more bytes are never chosen where a grammar is followed.
const LONGEST_TOKEN: usize = 250;
/// The largest grammar that is read.
const MAX_GRAMMAR_BYTES: usize = 4 << 20;

/// Compiles grammars for one model.
pub(crate) struct Grammars {
    factory: ParserFactory,
    tokenizer: Tokenizer,
    eos: Vec<u32>,
    /// Numbers in a row of logits.
    width: usize,
}

fn wrong(problem: impl std::fmt::Display) -> Error {
    // The library's messages may show all it knows; the first line says what is wrong.
    let text = problem.to_string();
    let first = text.lines().next().unwrap_or_default();
    let problem = match first.strip_prefix("Unimplemented keys: ") {
        Some(keys) => format!("these keywords of its JSON schema are not supported: {}", keys.replace(['[', ']', '"'], "")),
        None => first.to_owned(),
    };
    Error::Grammar { problem }
}

/// The library reports some faults by panics.
fn guarded<T>(work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    caught(work).unwrap_or_else(|| Err(wrong("it cannot be compiled")))
}

impl Grammars {
    /// For a model with this tokenizer, so many logits, and these ids that end an answer.
    pub(crate) fn new(tokenizer: &Tokenizer, width: usize, eos: &[u32]) -> Result<Self, Error> {
        let eos: Vec<u32> = eos.iter().copied().filter(|id| (*id as usize) < width).collect();
        let Some(&first_eos) = eos.first() else {
            return Err(wrong("the model has no token that ends an answer"));
        };
        let words: Vec<Vec<u8>> = (0..width as u32)
            .map(|id| {
                let bytes = tokenizer.token_bytes(id).unwrap_or_default();
                match tokenizer.is_added(id) {
                    // A token of its own, which the same text is not.
                    true => [&[TokTrie::SPECIAL_TOKEN_MARKER], &bytes[..]].concat(),
                    false if bytes.len() > LONGEST_TOKEN || bytes.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER) => Vec::new(),
                    false => bytes,
                }
            })
            .collect();
        guarded(|| {
            let trie = TokTrie::from(&TokRxInfo::new(width as u32, first_eos), &words).with_eos_tokens(&eos);
            let environment: TokEnv = Arc::new(Words::new(trie, tokenizer.clone()));
            let slices = llguidance::earley::SlicedBiasComputer::general_slices();
            let mut factory = ParserFactory::new(&environment, InferenceCapabilities::default(), &slices).map_err(wrong)?;
            factory.quiet();
            factory.limits_mut().verbose_errors = false;
            Ok(Self { factory, tokenizer: tokenizer.clone(), eos, width })
        })
    }

    /// What follows a grammar in Lark's syntax.
    fn lark(&self, grammar: String) -> Result<Matcher, Error> {
        self.compile(TopLevelGrammar::from_lark(grammar))
    }

    fn compile(&self, grammar: TopLevelGrammar) -> Result<Matcher, Error> {
        guarded(|| {
            let matcher = Matcher::new(self.factory.create_parser(grammar));
            match matcher.get_error() {
                Some(problem) => Err(wrong(problem)),
                None => Ok(matcher),
            }
        })
    }

    /// What follows a constraint.
    fn matcher(&self, constraint: &Constraint) -> Result<Matcher, Error> {
        let bytes = match constraint {
            Constraint::JsonSchema(schema) => schema.to_string().len(),
            Constraint::JsonObject => 0,
            Constraint::Regex(text) | Constraint::Lark(text) => text.len(),
        };
        if bytes > MAX_GRAMMAR_BYTES {
            return Err(wrong(format!("it has {bytes} bytes, at most {MAX_GRAMMAR_BYTES} are read")));
        }
        self.compile(match constraint {
            Constraint::JsonSchema(schema) => TopLevelGrammar::from_json_schema(written(schema.clone())?),
            Constraint::JsonObject => TopLevelGrammar::from_json_schema(written(json!({ "type": "object" }))?),
            Constraint::Regex(text) => TopLevelGrammar::from_grammar(GrammarWithLexer::from_regex(text)),
            Constraint::Lark(text) => TopLevelGrammar::from_lark(text.clone()),
        })
    }
}

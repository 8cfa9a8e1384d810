//! Answers that follow a grammar: which tokens may come next is asked before each is chosen, so an answer that has ended is right.
//!
//! Owns the table of the tokens' bytes and what grammars are compiled to. Knows nothing of devices and sessions.

mod calls;
mod compile;
mod follower;
mod schema;
mod shape;
mod size;
#[cfg(test)]
mod tests;
mod words;

pub(crate) use shape::Shape;

use crate::{
    Constraint, Error,
    text::{Tokenizer, guard::caught},
};
use compile::Compiled;
use follower::Follower;
use llguidance::{
    ParserFactory,
    api::{GrammarWithLexer, TopLevelGrammar},
    toktrie::{InferenceCapabilities, TokEnv, TokRxInfo, TokTrie},
};
use schema::written;
use serde_json::json;
use std::sync::Arc;
use words::Words;

/// Tokens with more bytes are never chosen where a grammar is followed.
const LONGEST_TOKEN: usize = 250;
/// Characters of what is wrong with a grammar.
const LONGEST_PROBLEM: usize = 300;
/// The most states of a grammar's lexer, each of one or two kB. Schemas that people write have some hundreds.
const MOST_LEXER_STATES: usize = 30_000;

/// Compiles grammars for one model.
pub(crate) struct Grammars {
    factory: Arc<ParserFactory>,
    compiled: Compiled,
    tokenizer: Tokenizer,
    eos: Vec<u32>,
    /// Numbers in a row of logits.
    width: usize,
}

fn wrong(problem: impl std::fmt::Display) -> Error {
    // The library's messages may show all it knows; the first line says what is wrong.
    let text = problem.to_string();
    // It may show the whole grammar.
    let first: String = text.lines().next().unwrap_or_default().chars().take(LONGEST_PROBLEM).collect();
    let problem = match first.strip_prefix("Unimplemented keys: ") {
        Some(keys) => format!("these keywords of its JSON schema are not supported: {}", keys.replace(['[', ']', '"'], "")),
        None if first.contains("Current row has") => {
            "it allows too many things at one place, such as hundreds of optional properties".to_owned()
        }
        None => first,
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
            factory.limits_mut().max_lexer_states = MOST_LEXER_STATES;
            Ok(Self { factory: Arc::new(factory), compiled: Compiled::default(), tokenizer: tokenizer.clone(), eos, width })
        })
    }

    /// What follows a grammar in Lark's syntax.
    fn lark(&self, grammar: String) -> Result<Follower, Error> {
        size::check_lark(&grammar)?;
        self.compiled.get(&self.factory, format!("lark {grammar}"), || TopLevelGrammar::from_lark(grammar))
    }

    /// What follows a constraint.
    fn follower(&self, constraint: &Constraint) -> Result<Follower, Error> {
        let json = |schema| {
            let schema = written(schema)?;
            self.compiled.get(&self.factory, format!("json {schema}"), || TopLevelGrammar::from_json_schema(schema))
        };
        match constraint {
            Constraint::JsonSchema(schema) => {
                size::check_schema(schema)?;
                json(schema.clone())
            }
            Constraint::JsonObject => json(json!({ "type": "object" })),
            Constraint::Regex(text) => {
                size::check_text(text)?;
                let own = text.clone();
                let grammar = move || TopLevelGrammar::from_grammar(GrammarWithLexer::from_regex(&own));
                self.compiled.get(&self.factory, format!("regex {text}"), grammar)
            }
            Constraint::Lark(text) => self.lark(text.clone()),
        }
    }
}

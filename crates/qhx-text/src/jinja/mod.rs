//! The template language of chat templates: Jinja as Hugging Face sets it up.
//!
//! A template is a program by a stranger. This interpreter has the language that published templates are written in (Jinja's immutable sandbox with
//! `trim_blocks`, `lstrip_blocks`, loop controls, `generation` blocks, and the values and methods of Python that templates see), and it counts: steps,
//! memory, depth and output are bounded in here ([`budget`]), so that any template ends soon, by itself, with an error that says why. Nothing in here
//! reaches files or the network. What is not supported is an error that names it and its line.
//!
//! Source to tokens ([`lexer`]), tokens to a tree ([`parser`], [`ast`]), a tree and values to text ([`interpreter`], [`expression`]).

mod arguments;
mod ast;
mod budget;
mod compare;
mod error;
mod expression;
mod filters;
mod format;
mod functions;
mod index;
mod interpreter;
mod json;
mod lexer;
mod literal;
mod loops;
mod methods;
mod object;
mod operators;
mod parser;
mod predicates;
mod print;
mod text;
mod value;

pub(super) use budget::Limits;
pub(super) use error::Error;

use budget::MAX_SOURCE_BYTES;
use error::Failure;
use interpreter::Interpreter;
use lexer::{Placed, Token};
use parser::Parsed;
use serde_json::Value as Json;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use value::Value;

/// A compiled template.
#[derive(Debug)]
pub(super) struct Template {
    source: String,
    parsed: Parsed,
    /// What stands between its tags, and its strings.
    texts: Vec<Arc<str>>,
}

impl Template {
    /// Compiles a template, or says what is wrong and where.
    pub(super) fn new(source: &str) -> Result<Self, String> {
        if source.len() > MAX_SOURCE_BYTES {
            return Err(format!("it has {} bytes, at most {MAX_SOURCE_BYTES} are compiled", source.len()));
        }
        let source = lexer::normalised(source);
        let located = |(failure, at): (Failure, usize)| failure.located(&source, at).words();
        let tokens = lexer::tokens(&source).map_err(located)?;
        let text = |placed: &Placed| match &placed.token {
            Token::Text(text) | Token::Str(text) => Some(text.clone()),
            _ => None,
        };
        let texts = tokens.iter().filter_map(text).collect();
        let parsed = parser::parse(tokens).map_err(located)?;
        Ok(Self { parsed, texts, source })
    }

    /// Whether it looks for an attribute or item of this name in some value.
    pub(super) fn reads_field(&self, name: &str) -> bool {
        self.parsed.fields.contains(name)
    }

    /// Whether this stands between its tags or in one of its strings.
    pub(super) fn has_text(&self, text: &str) -> bool {
        self.texts.iter().any(|own| own.contains(text))
    }

    /// Renders the template with these variables. `now` is the moment that `strftime_now` tells, in seconds since 1970. Stops soon after `cancel` is set.
    pub(super) fn render<'v>(
        &self,
        variables: impl IntoIterator<Item = (&'v str, &'v Json)>,
        limits: Limits,
        now: i64,
        cancel: &AtomicBool,
    ) -> Result<String, Error> {
        let mut interpreter = Interpreter::new(&self.parsed.symbols, limits, now, cancel);
        let values = variables.into_iter().map(|(name, json)| Ok((name, Value::from_json(json)?)));
        let rendered = values.collect::<error::Result<Vec<_>>>().and_then(|variables| {
            let frame = interpreter.root_frame(variables);
            interpreter.render(&self.parsed.body, &frame)
        });
        rendered.map_err(|failure| failure.located(&self.source, interpreter.at))
    }
}

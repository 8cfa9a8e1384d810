//! Tokens to a compiled template. The grammar, with its oddities, is Jinja's.

mod expression;
mod postfix;
mod statement;

use super::ast::{Body, Symbol, Symbols};
use super::budget::MAX_NESTING;
use super::error::{Failure, Result, fail};
use super::lexer::{Placed, Token};
use std::collections::HashSet;
use std::sync::Arc;

/// A parsed template.
#[derive(Debug)]
pub(super) struct Parsed {
    pub(super) body: Body,
    pub(super) symbols: Symbols,
    /// The names of all attributes and items that it looks for in values.
    pub(super) fields: HashSet<Arc<str>>,
}

/// Parses a template's tokens, or says what is wrong and at which byte.
pub(super) fn parse(tokens: Vec<Placed>) -> std::result::Result<Parsed, (Failure, usize)> {
    let mut parser = Parser {
        tokens,
        next: 0,
        symbols: Symbols::new(),
        fields: HashSet::new(),
        nesting: 0,
        loops: 0,
        can_break: false,
        macros: Vec::new(),
    };
    match parser.body(&[]) {
        Ok(body) => Ok(Parsed { body, symbols: parser.symbols, fields: parser.fields }),
        Err(failure) => Err((failure, parser.at())),
    }
}

struct Parser {
    tokens: Vec<Placed>,
    next: usize,
    symbols: Symbols,
    fields: HashSet<Arc<str>>,
    nesting: usize,
    /// How many loops are open.
    loops: usize,
    /// Whether `break` and `continue` have a loop to act on.
    can_break: bool,
    /// For each open macro, which of the names it binds on demand were met.
    macros: Vec<Mentioned>,
}

#[derive(Default)]
struct Mentioned {
    caller: bool,
    kwargs: bool,
    varargs: bool,
}

impl Parser {
    fn token(&self) -> &Token {
        self.tokens.get(self.next).map_or(&Token::End, |placed| &placed.token)
    }

    fn at(&self) -> usize {
        self.tokens.get(self.next).or(self.tokens.last()).map_or(0, |placed| placed.at)
    }

    fn place(&self) -> u32 {
        self.at() as u32
    }

    fn following(&self) -> &Token {
        self.tokens.get(self.next + 1).map_or(&Token::End, |placed| &placed.token)
    }

    fn is(&self, operator: &str) -> bool {
        matches!(self.token(), Token::Operator(found) if *found == operator)
    }

    fn is_name(&self, name: &str) -> bool {
        matches!(self.token(), Token::Name(found) if **found == *name)
    }

    fn is_any_name(&self, names: &[&str]) -> bool {
        names.iter().any(|name| self.is_name(name))
    }

    fn skip(&mut self, operator: &str) -> bool {
        let found = self.is(operator);
        self.next += usize::from(found);
        found
    }

    fn skip_name(&mut self, name: &str) -> bool {
        let found = self.is_name(name);
        self.next += usize::from(found);
        found
    }

    fn expect(&mut self, operator: &'static str) -> Result<()> {
        if self.skip(operator) { Ok(()) } else { self.unexpected(&format!("`{operator}`")) }
    }

    fn expect_token(&mut self, token: &Token, name: &str) -> Result<()> {
        if self.token() != token {
            return self.unexpected(name);
        }
        self.next += 1;
        Ok(())
    }

    fn expect_name(&mut self) -> Result<Arc<str>> {
        match self.token() {
            Token::Name(name) => {
                let name = name.clone();
                self.next += 1;
                Ok(name)
            }
            _ => self.unexpected("a name"),
        }
    }

    fn unexpected<T>(&self, expected: &str) -> Result<T> {
        let found = match self.token() {
            Token::Text(_) => "text".to_owned(),
            Token::PrintStart => "`{{`".to_owned(),
            Token::PrintEnd => "`}}`".to_owned(),
            Token::BlockStart => "`{%`".to_owned(),
            Token::BlockEnd => "`%}`".to_owned(),
            Token::Name(name) => format!("`{name}`"),
            Token::Str(_) => "a string".to_owned(),
            Token::Int(_) | Token::Float(_) => "a number".to_owned(),
            Token::Operator(operator) => format!("`{operator}`"),
            Token::End => "the end of the template".to_owned(),
        };
        fail!("expected {expected}, found {found}")
    }

    /// Parses something that is nested in something else.
    fn nested<T>(&mut self, parse: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.nesting += 1;
        if self.nesting > MAX_NESTING {
            fail!("blocks and brackets are nested more than {MAX_NESTING} deep");
        }
        let parsed = parse(self)?;
        self.nesting -= 1;
        Ok(parsed)
    }

    /// A name that is read.
    fn mention(&mut self, name: &Arc<str>) -> Symbol {
        let mention: fn(&mut Mentioned) = match &**name {
            "caller" => |mentioned| mentioned.caller = true,
            "kwargs" => |mentioned| mentioned.kwargs = true,
            "varargs" => |mentioned| mentioned.varargs = true,
            _ => return self.symbols.number(name),
        };
        self.macros.iter_mut().for_each(mention);
        self.symbols.number(name)
    }
}

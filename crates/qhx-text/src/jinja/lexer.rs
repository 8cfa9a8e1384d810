//! Template source to tokens, white space control included.
//!
//! The rules are those of Jinja with `trim_blocks` and `lstrip_blocks`: the first newline behind a block tag goes, and so do the blanks between a line's
//! beginning and a block tag. A `-` in a tag takes all white space on its side, a `+` keeps it.

use super::error::{Failure, Result};
use super::literal;
use super::print::is_python_space;
use std::sync::Arc;

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token {
    /// What stands between tags.
    Text(Arc<str>),
    /// `{{`
    PrintStart,
    /// `}}`
    PrintEnd,
    /// `{%`
    BlockStart,
    /// `%}`
    BlockEnd,
    Name(Arc<str>),
    Str(Arc<str>),
    Int(i128),
    Float(f64),
    Operator(&'static str),
    /// The end of the template.
    End,
}

/// A token and the byte it begins at.
#[derive(Debug)]
pub(super) struct Placed {
    pub(super) token: Token,
    pub(super) at: usize,
}

/// Longer ones first.
const OPERATORS: [&str; 26] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}", ">", "<", "=", ".", ":", "|", ",", ";",
];

/// All line ends as one character, and the last one gone: what the lexer works on and places refer to.
pub(super) fn normalised(source: &str) -> String {
    let mut source = source.replace("\r\n", "\n").replace('\r', "\n");
    if source.ends_with('\n') {
        source.pop();
    }
    source
}

/// The tokens of a normalised source, or what is wrong and at which byte.
pub(super) fn tokens(source: &str) -> std::result::Result<Vec<Placed>, (Failure, usize)> {
    let mut lexer = Lexer { source, at: 0, line_starting: true, tokens: Vec::new() };
    lexer.template().map_err(|failure| (failure, lexer.at))?;
    lexer.push(Token::End, source.len());
    Ok(lexer.tokens)
}

struct Lexer<'s> {
    source: &'s str,
    at: usize,
    /// Whether the last tag took a newline with it, or there was none.
    line_starting: bool,
    tokens: Vec<Placed>,
}

impl<'s> Lexer<'s> {
    fn rest(&self) -> &'s str {
        &self.source[self.at..]
    }

    fn push(&mut self, token: Token, at: usize) {
        self.tokens.push(Placed { token, at });
    }

    fn template(&mut self) -> Result<()> {
        while let Some(length) = next_tag(self.rest()) {
            let (text, tag) = self.rest().split_at(length);
            let sign = Some(tag.as_bytes().get(2).copied().unwrap_or_default()).filter(|sign| matches!(sign, b'-' | b'+'));
            let is_print = tag.starts_with("{{");
            self.text(text, sign, is_print);
            self.at += length;
            if let Some(length) = raw_start(tag) {
                self.line_starting = tag[..length].ends_with('\n');
                self.at += length;
                self.raw()?;
                continue;
            }
            let start = self.at;
            self.at += 2 + usize::from(sign.is_some());
            if tag.starts_with("{#") {
                self.comment()?;
            } else {
                self.push(if is_print { Token::PrintStart } else { Token::BlockStart }, start);
                self.tag(is_print)?;
            }
        }
        let rest = self.rest();
        self.keep(rest, self.at);
        self.at = self.source.len();
        Ok(())
    }

    /// Text before a tag, less what white space control takes off its end.
    fn text(&mut self, text: &str, sign: Option<u8>, before_print: bool) {
        let line = text.rfind('\n').map_or(0, |newline| newline + 1);
        let kept = match sign {
            Some(b'-') => text.trim_end_matches(is_python_space),
            None if !before_print && (line > 0 || self.line_starting) && text[line..].chars().all(is_python_space) => &text[..line],
            _ => text,
        };
        self.keep(kept, self.at);
    }

    fn keep(&mut self, text: &str, at: usize) {
        if !text.is_empty() {
            self.push(Token::Text(text.into()), at);
        }
    }

    /// Takes what closes a tag off the beginning of the rest, with the white space that belongs to it.
    fn closed(&mut self, close: &str, plus: bool, newline: bool) -> bool {
        let rest = self.rest();
        let after = |sign: &str| rest.strip_prefix(sign).and_then(|rest| rest.strip_prefix(close));
        let left = if let Some(left) = after("-") {
            left.trim_start_matches(is_python_space)
        } else if let Some(left) = after("+").filter(|_| plus) {
            left
        } else if let Some(left) = after("") {
            left.strip_prefix('\n').filter(|_| newline).unwrap_or(left)
        } else {
            return false;
        };
        let length = rest.len() - left.len();
        self.line_starting = rest[..length].ends_with('\n');
        self.at += length;
        true
    }

    fn comment(&mut self) -> Result<()> {
        let start = self.at;
        while let Some(length) = self.rest().find("#}") {
            let sign = self.rest()[..length].ends_with(['-', '+']);
            self.at += length - usize::from(sign);
            if self.closed("#}", true, true) {
                return Ok(());
            }
        }
        self.at = start;
        Err(Failure::problem("the comment is not closed with `#}`"))
    }

    fn raw(&mut self) -> Result<()> {
        let (source, start) = (self.source, self.at);
        while let Some(length) = self.rest().find("{%") {
            self.at += length;
            let (text, begin) = (&source[start..self.at], self.at);
            let inside = &self.rest()[2..];
            let signed = inside.strip_prefix(['-', '+']).unwrap_or(inside);
            let sign = inside.bytes().next().filter(|_| signed.len() < inside.len());
            if let Some(behind) = signed.trim_start_matches(is_python_space).strip_prefix("endraw") {
                let behind = behind.trim_start_matches(is_python_space);
                let line_starting = self.line_starting;
                self.at = source.len() - behind.len();
                if self.closed("%}", true, true) {
                    let (end, ended) = (self.at, self.line_starting);
                    (self.at, self.line_starting) = (start, line_starting);
                    self.text(text, sign, false);
                    (self.at, self.line_starting) = (end, ended);
                    return Ok(());
                }
            }
            self.at = begin + 2;
        }
        self.at = start;
        Err(Failure::problem("the raw block is not closed with `{% endraw %}`"))
    }

    /// The tokens inside a tag, its end included. Where the source ends first, the parser says so.
    fn tag(&mut self, is_print: bool) -> Result<()> {
        let mut open = Vec::new();
        loop {
            let left = self.rest().trim_start_matches(is_python_space);
            self.at = self.source.len() - left.len();
            let start = self.at;
            let Some(character) = left.chars().next() else { return Ok(()) };
            if open.is_empty() && if is_print { self.closed("}}", false, false) } else { self.closed("%}", true, true) } {
                self.push(if is_print { Token::PrintEnd } else { Token::BlockEnd }, start);
                return Ok(());
            }
            let (token, length) = match character {
                '0'..='9' => literal::number(left, self.source[..start].ends_with('.'))?,
                '\'' | '"' => literal::string(left)?,
                _ if character.is_alphabetic() || character == '_' => {
                    let end = left.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(left.len());
                    (Token::Name(left[..end].into()), end)
                }
                _ => {
                    let Some(operator) = OPERATORS.into_iter().find(|operator| left.starts_with(operator)) else {
                        return Err(Failure::problem(format!("unexpected character {character:?}")));
                    };
                    balance(operator, &mut open)?;
                    (Token::Operator(operator), operator.len())
                }
            };
            self.push(token, start);
            self.at += length;
        }
    }
}

/// Where the next tag begins.
fn next_tag(text: &str) -> Option<usize> {
    text.match_indices('{').map(|(at, _)| at).find(|at| matches!(text.as_bytes().get(at + 1), Some(b'%' | b'{' | b'#')))
}

/// The length of the tag `{% raw %}` at the beginning of a text that begins with a tag.
fn raw_start(tag: &str) -> Option<usize> {
    let inside = tag.strip_prefix("{%")?;
    let inside = inside.strip_prefix(['-', '+']).unwrap_or(inside).trim_start_matches(is_python_space);
    let behind = inside.strip_prefix("raw")?.trim_start_matches(is_python_space);
    let left = match behind.strip_prefix("-%}") {
        Some(left) => left.trim_start_matches(is_python_space),
        None => behind.strip_prefix("%}")?,
    };
    Some(tag.len() - left.len())
}

/// Brackets must match: within them, `}}` and `%}` do not end a tag.
fn balance(operator: &'static str, open: &mut Vec<&'static str>) -> Result<()> {
    match operator {
        "{" => open.push("}"),
        "(" => open.push(")"),
        "[" => open.push("]"),
        "}" | ")" | "]" => match open.pop() {
            Some(expected) if expected == operator => {}
            Some(expected) => return Err(Failure::problem(format!("unexpected `{operator}`, expected `{expected}`"))),
            None => return Err(Failure::problem(format!("unexpected `{operator}`"))),
        },
        _ => {}
    }
    Ok(())
}

//! The template language of chat templates: Jinja as Hugging Face sets it up, on minijinja.
//!
//! Templates are published for Python's Jinja. What they use of Python and minijinja does not have by itself is added here. Templates come
//! from strangers: work and nesting are limited, and nothing here reaches files or the network.

use super::{clock, json_text};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value};

/// The name under which the one template of an environment stands. Without an extension: nothing is escaped.
pub(super) const TEMPLATE: &str = "chat template";

/// What a template said with `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Raised(pub(super) String);

/// An environment with the template compiled in it.
pub(super) fn environment(source: &str) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_unknown_method_callback(method);
    environment.set_formatter(|output, state, value| {
        check_depth(value, 0)?;
        minijinja::escape_formatter(output, state, value)
    });
    environment.add_filter("batch", |state: &State, value: Value, count: usize, fill: Option<Value>| {
        minijinja::filters::batch(state, value, modest(count)?, fill)
    });
    environment.add_filter("slice", |state: &State, value: Value, count: usize, fill: Option<Value>| {
        minijinja::filters::slice(state, value, modest(count)?, fill)
    });
    environment.add_filter("format", |state: &mut State, format: &Value, arguments: Rest<ValueOrKwargs>| {
        check_widths(&format.to_string(), '%')?;
        minijinja::filters::format(state, format, arguments)
    });
    environment.add_filter("tojson", |arguments: Rest<ValueOrKwargs>| json_text::tojson(&arguments.into_values()));
    environment.add_filter("trim", |text: &Value, characters: Option<&str>| strip(&text.to_string(), characters, true, true));
    environment.add_test("sequence", |value: &Value| matches!(value.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map));
    environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    environment.add_test("callable", |value: &Value| matches!(value.kind(), ValueKind::Plain));
    environment.add_function("raise_exception", |message: &Value| -> Result<Value, Error> {
        Err(Error::from(ErrorKind::InvalidOperation).with_source(Raised(message.to_string())))
    });
    environment.add_template_owned(TEMPLATE, without_generation_tags(source))?;
    Ok(environment)
}

/// Numbers that a template gives as a width or a count: beyond this they are an attack on memory.
fn modest(number: usize) -> Result<usize, Error> {
    if number <= 10_000 { Ok(number) } else { Err(Error::new(ErrorKind::InvalidOperation, format!("{number} is too large here"))) }
}

/// Refuses a width of a billion in a format string whose fields start with `opening`.
fn check_widths(format: &str, opening: char) -> Result<(), Error> {
    for field in format.split(opening).skip(1) {
        let specification = field.split(|c: char| c.is_ascii_alphabetic() || c == '}').next().unwrap_or_default();
        for digits in specification.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty()) {
            modest(digits.parse().unwrap_or(usize::MAX))?;
        }
    }
    Ok(())
}

/// Refuses to print values that contain themselves, which a namespace can, or that are nested absurdly deep.
fn check_depth(value: &Value, depth: usize) -> Result<(), Error> {
    if depth > 100 {
        return Err(Error::new(ErrorKind::InvalidOperation, "the value is nested too deep to print"));
    }
    match value.kind() {
        ValueKind::Seq => value.try_iter()?.try_for_each(|item| check_depth(&item, depth + 1)),
        ValueKind::Map => value.try_iter()?.try_for_each(|key| check_depth(&value.get_item(&key)?, depth + 1)),
        _ => Ok(()),
    }
}

/// The function `strftime_now` at a given moment.
pub(super) fn strftime_now(seconds: i64) -> Value {
    Value::from_function(move |format: &str| clock::format(seconds, format))
}

/// A JSON value as a template sees it.
pub(super) fn value_of(json: &serde_json::Value) -> Value {
    match json {
        serde_json::Value::Null => Value::from(()),
        serde_json::Value::Bool(value) => Value::from(*value),
        serde_json::Value::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(value), _) => Value::from(value),
            (None, Some(value)) => Value::from(value),
            (None, None) => Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        serde_json::Value::String(text) => Value::from(text),
        serde_json::Value::Array(items) => items.iter().map(value_of).collect(),
        serde_json::Value::Object(entries) => Value::from_pairs(entries.iter().map(|(key, value)| (key.as_str(), value_of(value)))),
    }
}

/// `{% generation %}` marks what the assistant wrote, for training. For a prompt it is a block that adds nothing but its own scope.
fn without_generation_tags(source: &str) -> String {
    let mut plain = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        plain.push_str(before);
        let Some(length) = tag.find("%}") else { break };
        let inside = &tag[2..length];
        let bare = inside.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']);
        let replacement = match bare.trim() {
            "generation" => Some("with"),
            "endgeneration" => Some("endwith"),
            _ => None,
        };
        match replacement {
            Some(word) => plain.push_str(&format!("{{%{}%}}", inside.replace(bare.trim(), word))),
            None => plain.push_str(&tag[..length + 2]),
        }
        rest = &tag[length + 2..];
        if bare.trim() == "raw" {
            // What stands in a raw block is text, tags included.
            let end = rest.find("endraw").unwrap_or(rest.len());
            plain.push_str(&rest[..end]);
            rest = &rest[end..];
        }
    }
    plain + rest
}

/// Methods of Python's types: those that differ from, or are missing in, minijinja's own set come first.
fn method(state: &mut State, value: &Value, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    match value.as_str() {
        Some(text) if value.kind() == ValueKind::String => match string_method(text, name, arguments)? {
            Some(result) => Ok(result),
            None => minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments),
        },
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments),
    }
}

fn string_method(text: &str, name: &str, arguments: &[Value]) -> Result<Option<Value>, Error> {
    let result = match name {
        "strip" | "lstrip" | "rstrip" => {
            let (characters,): (Option<&str>,) = from_args(arguments)?;
            Value::from(strip(text, characters, name != "rstrip", name != "lstrip"))
        }
        "split" | "rsplit" => {
            let (separator, most) = split_arguments(arguments)?;
            split(text, separator.as_deref(), most, name == "rsplit")?
        }
        "splitlines" => {
            let (keep,): (Option<bool>,) = from_args(arguments)?;
            lines(text, keep.unwrap_or(false)).map(Value::from).collect()
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(arguments)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(arguments)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(arguments)?;
            let parts = if name == "partition" { text.split_once(separator) } else { text.rsplit_once(separator) };
            match parts {
                Some((before, after)) => Value::from((before, separator, after)),
                None if name == "partition" => Value::from((text, "", "")),
                None => Value::from(("", "", text)),
            }
        }
        "index" => {
            let (part,): (&str,) = from_args(arguments)?;
            let found = text.find(part).ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "index: substring not found"))?;
            Value::from(text[..found].chars().count())
        }
        "zfill" => {
            let (width,): (usize,) = from_args(arguments)?;
            let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
            let zeros = width.min(4096).saturating_sub(text.chars().count());
            Value::from(format!("{sign}{}{digits}", "0".repeat(zeros)))
        }
        "format" => {
            check_widths(text, '{')?;
            return Ok(None);
        }
        "casefold" => Value::from(text.to_lowercase()),
        _ => return Ok(None),
    };
    Ok(Some(result))
}

fn split_arguments(arguments: &[Value]) -> Result<(Option<String>, Option<i64>), Error> {
    let (separator, most, named): (Option<String>, Option<i64>, Kwargs) = from_args(arguments)?;
    let arguments = (separator.or(named.get("sep")?), most.or(named.get("maxsplit")?));
    named.assert_all_used()?;
    Ok(arguments)
}

fn split(text: &str, separator: Option<&str>, most: Option<i64>, from_right: bool) -> Result<Value, Error> {
    let most = most.map_or(usize::MAX, |most| usize::try_from(most).unwrap_or(usize::MAX));
    let mut parts: Vec<&str> = match separator {
        Some("") => return Err(Error::new(ErrorKind::InvalidOperation, "split: the separator is empty")),
        Some(separator) if from_right => text.rsplitn(most.saturating_add(1), separator).collect(),
        Some(separator) => text.splitn(most.saturating_add(1), separator).collect(),
        None => split_at_white_space(text, most, from_right),
    };
    if from_right {
        parts.reverse();
    }
    Ok(parts.into_iter().map(Value::from).collect())
}

/// Parts between white space, at most `most` cuts; what remains then keeps the white space on its far side. From the right, the parts come last
/// first.
fn split_at_white_space(text: &str, most: usize, from_right: bool) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text;
    loop {
        rest = if from_right { rest.trim_end_matches(is_python_space) } else { rest.trim_start_matches(is_python_space) };
        let cut = if from_right { rest.rfind(is_python_space) } else { rest.find(is_python_space) };
        match cut.filter(|_| parts.len() < most) {
            Some(cut) if from_right => {
                let space = rest[cut..].chars().next().map_or(0, char::len_utf8);
                parts.push(&rest[cut + space..]);
                rest = &rest[..cut];
            }
            Some(cut) => {
                parts.push(&rest[..cut]);
                rest = &rest[cut..];
            }
            None => {
                parts.extend(Some(rest).filter(|rest| !rest.is_empty()));
                return parts;
            }
        }
    }
}

/// Lines as Python sees them: more characters end a line than in Rust.
fn lines(text: &str, keep_ends: bool) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let ends = ['\n', '\r', '\u{b}', '\u{c}', '\u{1c}', '\u{1d}', '\u{1e}', '\u{85}', '\u{2028}', '\u{2029}'];
        let end = rest.find(ends).unwrap_or(rest.len());
        let length = if rest[end..].starts_with("\r\n") { 2 } else { rest[end..].chars().next().map_or(0, char::len_utf8) };
        let line = &rest[..if keep_ends { end + length } else { end }];
        rest = &rest[end + length..];
        Some(line)
    })
}

fn strip(text: &str, characters: Option<&str>, left: bool, right: bool) -> String {
    let stripped = |c: char| characters.map_or_else(|| is_python_space(c), |characters| characters.contains(c));
    let text = if left { text.trim_start_matches(stripped) } else { text };
    if right { text.trim_end_matches(stripped) } else { text }.to_owned()
}

/// Python counts four separators of ASCII as white space that Unicode does not.
fn is_python_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

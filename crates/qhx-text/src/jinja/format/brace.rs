//! `"{} {name!r:>10}".format(…)`

use super::Form;
use crate::jinja::arguments::Arguments;
use crate::jinja::error::{Result, fail};
use crate::jinja::interpreter::Interpreter;
use crate::jinja::value::Value;

/// How fields without a name or number are counted.
#[derive(Default)]
struct Counting {
    next: usize,
    /// Whether a field so far had a number.
    numbered: bool,
}

impl Interpreter<'_> {
    pub(in crate::jinja) fn brace_format(&mut self, format: &str, arguments: &Arguments) -> Result<String> {
        self.brace_format_within(format, arguments, &mut Counting::default(), 2)
    }

    /// A field's form may have fields itself, `levels` deep.
    fn brace_format_within(&mut self, format: &str, arguments: &Arguments, counting: &mut Counting, levels: usize) -> Result<String> {
        if levels == 0 {
            fail!("format: fields are nested too deep");
        }
        let mut text = String::new();
        let mut rest = format;
        while let Some(at) = rest.find(['{', '}']) {
            self.append(&mut text, &rest[..at])?;
            let brace = &rest[at..at + 1];
            rest = &rest[at + 1..];
            if let Some(behind) = rest.strip_prefix(brace) {
                self.append(&mut text, brace)?;
                rest = behind;
                continue;
            }
            if brace == "}" {
                fail!("format: a single '}}' stands in the text");
            }
            let Some(end) = closing(rest) else { fail!("format: a '{{' is not closed") };
            self.append_field(&mut text, &rest[..end], arguments, counting, levels)?;
            rest = &rest[end + 1..];
        }
        self.append(&mut text, rest)?;
        Ok(text)
    }

    fn append_field(
        &mut self,
        text: &mut String,
        field: &str,
        arguments: &Arguments,
        counting: &mut Counting,
        levels: usize,
    ) -> Result<()> {
        let end = field.find(['!', ':']).unwrap_or(field.len());
        let (name, behind) = field.split_at(end);
        let (conversion, specification) = match behind.strip_prefix('!') {
            Some(behind) => {
                let (conversion, specification) = behind.split_once(':').unwrap_or((behind, ""));
                (Some(conversion), specification)
            }
            None => (None, behind.strip_prefix(':').unwrap_or("")),
        };
        let mut value = self.field_value(name, arguments, counting)?;
        match conversion {
            None => {}
            Some("s") => {
                let string = self.string_of(&value)?;
                value = self.made(string)?;
            }
            Some("r") => {
                let mut string = String::new();
                self.represent(&value, &mut string)?;
                value = self.made(string)?;
            }
            Some(other) => fail!("format: the conversion '!{other}' is not supported"),
        }
        let specification = self.brace_format_within(specification, arguments, counting, levels - 1).or_else(|failure| {
            // Where nothing is nested, the last level needs no further one.
            if specification.contains(['{', '}']) { Err(failure) } else { Ok(specification.to_owned()) }
        })?;
        if specification.is_empty() {
            return self.print(&value, text);
        }
        let form = Form::parse(&specification)?;
        self.append_formatted(text, &value, &form)
    }

    fn field_value(&mut self, name: &str, arguments: &Arguments, counting: &mut Counting) -> Result<Value> {
        let end = name.find(['.', '[']).unwrap_or(name.len());
        let (first, mut rest) = name.split_at(end);
        let positional = |index: usize| arguments.positional.get(index).cloned();
        let value = if first.is_empty() {
            if counting.numbered {
                fail!("format: fields with and without numbers are mixed");
            }
            counting.next += 1;
            positional(counting.next - 1)
        } else if first.bytes().all(|byte| byte.is_ascii_digit()) {
            if counting.next > 0 {
                fail!("format: fields with and without numbers are mixed");
            }
            counting.numbered = true;
            first.parse().ok().and_then(positional)
        } else {
            self.budget.steps(arguments.named.len())?;
            arguments.named.iter().find(|(name, _)| **name == *first).map(|(_, value)| value.clone())
        };
        let Some(mut value) = value else { fail!("format: there is no value for the field '{{{name}}}'") };
        while !rest.is_empty() {
            self.budget.steps(1)?;
            if let Some(behind) = rest.strip_prefix('.') {
                let end = behind.find(['.', '[']).unwrap_or(behind.len());
                value = self.attribute(&value, &behind[..end].into())?;
                rest = &behind[end..];
            } else {
                let Some((item, behind)) = rest.strip_prefix('[').and_then(|rest| rest.split_once(']')) else {
                    fail!("format: the field '{{{name}}}' cannot be read");
                };
                let item = match item.parse() {
                    Ok(index) => Value::Int(index),
                    Err(_) => self.text(item)?,
                };
                value = self.item(&value, &item)?;
                rest = behind;
            }
        }
        Ok(value)
    }
}

/// Where the field that has been opened ends.
fn closing(text: &str) -> Option<usize> {
    let mut open = 1;
    for (at, character) in text.char_indices() {
        match character {
            '{' => open += 1,
            '}' => open -= 1,
            _ => {}
        }
        if open == 0 {
            return Some(at);
        }
    }
    None
}

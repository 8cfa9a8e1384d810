//! Template values as JSON text, spelled as Python's `json.dumps` spells them.
//!
//! Chat templates put tools and arguments into prompts as JSON, and a model has seen Python's spelling of it in training: a blank after
//! each comma and colon, characters as they are, floats in Python's shortest form.

use minijinja::value::{Kwargs, ValueKind, from_args};
use minijinja::{Error, ErrorKind, Value};

/// Deeper values are refused. JSON from outside has at most 128 levels.
const MAX_DEPTH: usize = 200;

/// How `json.dumps` was asked to write.
struct Style {
    escape_non_ascii: bool,
    /// One level of indentation; without it everything stands on one line.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

/// The filter `tojson(ensure_ascii=false, indent=none, separators=none, sort_keys=false)`.
pub(super) fn tojson(arguments: &[Value]) -> Result<Value, Error> {
    let (positional, named): (&[Value], Kwargs) = from_args(arguments)?;
    let Some((value, options)) = positional.split_first() else { return Err(Error::from(ErrorKind::MissingArgument)) };
    let option = |place: usize, name: &str| -> Result<Value, Error> {
        let named: Option<Value> = named.get(name)?;
        Ok(named.or_else(|| options.get(place).cloned()).unwrap_or(Value::from(())))
    };
    let escape_non_ascii = option(0, "ensure_ascii")?.is_true();
    let indent = indentation(&option(1, "indent")?)?;
    let separators = option(2, "separators")?;
    let sort_keys = option(3, "sort_keys")?.is_true();
    named.assert_all_used()?;
    let (item_separator, key_separator) = if separators.is_none() {
        (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned())
    } else {
        let part = |index| separators.get_item_by_index(index).ok().and_then(|part| part.as_str().map(str::to_owned));
        let parts = part(0).zip(part(1));
        parts.ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "tojson: separators must be two strings"))?
    };
    let style = Style { escape_non_ascii, indent, item_separator, key_separator, sort_keys };
    let mut text = String::new();
    style.write(value, 0, &mut text)?;
    Ok(Value::from(text))
}

fn indentation(value: &Value) -> Result<Option<String>, Error> {
    match value.kind() {
        ValueKind::None | ValueKind::Undefined => Ok(None),
        ValueKind::String => Ok(value.as_str().map(str::to_owned)),
        _ => {
            let width = i64::try_from(value.clone())?;
            // Python treats a negative width as 0; the upper bound only guards against absurd templates.
            Ok(Some(" ".repeat(width.clamp(0, 64) as usize)))
        }
    }
}

impl Style {
    fn write(&self, value: &Value, depth: usize, text: &mut String) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(Error::new(ErrorKind::InvalidOperation, format!("tojson: the value has more than {MAX_DEPTH} levels")));
        }
        match value.kind() {
            ValueKind::None => text.push_str("null"),
            ValueKind::Bool => text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => text.push_str(&value.to_string()),
            ValueKind::Number => text.push_str(&float(f64::try_from(value.clone())?)),
            ValueKind::String => self.write_string(value.as_str().unwrap_or_default(), text),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.write_items(items, ['[', ']'], depth, text, |item, text| self.write(item, depth + 1, text))?;
            }
            ValueKind::Map => {
                let mut entries = Vec::new();
                for key in value.try_iter()? {
                    let entry = value.get_item(&key)?;
                    entries.push((key_text(&key)?, entry));
                }
                if self.sort_keys {
                    entries.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.write_items(entries, ['{', '}'], depth, text, |(key, entry), text| {
                    self.write_string(key, text);
                    text.push_str(&self.key_separator);
                    self.write(entry, depth + 1, text)
                })?;
            }
            other => return Err(Error::new(ErrorKind::InvalidOperation, format!("tojson: a value of kind {other} has no JSON form"))),
        }
        Ok(())
    }

    fn write_items<T>(
        &self,
        items: Vec<T>,
        brackets: [char; 2],
        depth: usize,
        text: &mut String,
        write: impl Fn(&T, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let new_line = |depth: usize, text: &mut String| {
            if let Some(indent) = &self.indent {
                text.push('\n');
                text.push_str(&indent.repeat(depth));
            }
        };
        text.push(brackets[0]);
        for (place, item) in items.iter().enumerate() {
            if place > 0 {
                text.push_str(&self.item_separator);
            }
            new_line(depth + 1, text);
            write(item, text)?;
        }
        if !items.is_empty() {
            new_line(depth, text);
        }
        text.push(brackets[1]);
        Ok(())
    }

    fn write_string(&self, string: &str, text: &mut String) {
        text.push('"');
        for character in string.chars() {
            match character {
                '"' => text.push_str("\\\""),
                '\\' => text.push_str("\\\\"),
                '\n' => text.push_str("\\n"),
                '\r' => text.push_str("\\r"),
                '\t' => text.push_str("\\t"),
                '\u{8}' => text.push_str("\\b"),
                '\u{c}' => text.push_str("\\f"),
                _ if character < ' ' || (self.escape_non_ascii && !character.is_ascii()) => {
                    for unit in character.encode_utf16(&mut [0; 2]) {
                        text.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                _ => text.push(character),
            }
        }
        text.push('"');
    }
}

fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.as_str().unwrap_or_default().to_owned()),
        ValueKind::None => Ok("null".to_owned()),
        ValueKind::Bool => Ok(key.is_true().to_string()),
        ValueKind::Number if key.is_integer() => Ok(key.to_string()),
        ValueKind::Number => Ok(float(f64::try_from(key.clone())?)),
        other => Err(Error::new(ErrorKind::InvalidOperation, format!("tojson: a key cannot be of kind {other}"))),
    }
}

/// Python's shortest form: exponents below −4 and from 16 on, always with a point or an exponent.
fn float(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if value != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let plain = value.to_string();
    if plain.contains('.') { plain } else { plain + ".0" }
}

#[cfg(test)]
mod tests {
    use super::float;

    #[test]
    fn floats_are_spelled_as_in_python() {
        let spelled = [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (-2.5, "-2.5"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (123_456_789.125, "123456789.125"),
            (f64::INFINITY, "Infinity"),
        ];
        for (value, text) in spelled {
            assert_eq!(float(value), text);
        }
    }
}

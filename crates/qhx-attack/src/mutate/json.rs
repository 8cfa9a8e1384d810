//! Changes to the structure of a JSON document, which keep it JSON (nearly always) and make it say something else.

use super::{NASTY_INTEGERS, mutate_bytes};
use crate::random::Random;
use serde_json::Value;
use std::fmt::Write;

/// A document that can hold what a parsed one cannot: fields given twice, numbers beyond every type, broken escapes.
#[derive(Clone, Debug)]
pub(crate) enum Json {
    /// A literal as it is spelled.
    Literal(String),
    /// `[…]`.
    List(Vec<Json>),
    /// `{…}`, the keys without their quotes.
    Object(Vec<(String, Json)>),
    /// So many brackets around a literal.
    Nested(usize, String),
}

/// A few changes to a document. What is no JSON is changed as bytes.
pub(crate) fn mutate_json(document: &[u8], random: &mut Random) -> Vec<u8> {
    let Ok(value) = serde_json::from_slice::<Value>(document) else {
        let mut bytes = document.to_vec();
        mutate_bytes(&mut bytes, usize::MAX, b"", random);
        return bytes;
    };
    let mut json = Json::from(&value);
    for _ in 0..1 + random.below(3) {
        json.mutate(random);
    }
    let mut bytes = json.to_string().into_bytes();
    if random.one_in(12) {
        mutate_bytes(&mut bytes, usize::MAX, document, random);
    }
    bytes
}

impl From<&Value> for Json {
    fn from(value: &Value) -> Self {
        match value {
            Value::Array(items) => Self::List(items.iter().map(Self::from).collect()),
            Value::Object(fields) => Self::Object(fields.iter().map(|(key, value)| (quoted_inside(key), Self::from(value))).collect()),
            literal => Self::Literal(literal.to_string()),
        }
    }
}

/// A key's spelling between quotes.
fn quoted_inside(key: &str) -> String {
    let quoted = Value::from(key).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

impl Json {
    /// One change somewhere.
    pub(crate) fn mutate(&mut self, random: &mut Random) {
        let donor = self.somewhere(random).clone();
        let place = self.somewhere(random);
        match (random.below(16), &mut *place) {
            (0..=4, Self::List(items)) if !items.is_empty() => change_items(items, |item, _| item, random),
            (0..=4, Self::Object(fields)) if !fields.is_empty() => {
                let rename = |(key, value): (String, Self), random: &mut Random| (other_key(&key, random), value);
                change_items(fields, rename, random);
            }
            (0..=4, Self::Literal(text)) => *text = near(text, random),
            (7 | 8, _) => *place = Self::Literal(nasty_number(random)),
            (9 | 10, _) => *place = Self::Literal(nasty_text(random)),
            (11, _) => *place = Self::Nested(random.length(100_000), "0".into()),
            (12, _) => *place = donor,
            (5 | 6 | 14, Self::Literal(text)) => {
                // Another literal of the same kind: a name for a name, a number for a number.
                if let Self::Literal(other) = &donor
                    && other.starts_with('"') == text.starts_with('"')
                {
                    *text = other.clone();
                }
            }
            (13, Self::List(items)) => items.extend(vec![donor; random.length(300)]),
            _ => *place = Self::Literal(random.word(&["[]", "{}", "null", "true", "[[]]", "{\"a\":[]}"]).to_owned()),
        }
    }

    /// A node: near the root as likely as deep inside.
    fn somewhere(&mut self, random: &mut Random) -> &mut Self {
        let inside = match self {
            Self::List(items) => items.len(),
            Self::Object(fields) => fields.len(),
            Self::Literal(_) | Self::Nested(..) => 0,
        };
        if inside == 0 || random.one_in(5) {
            return self;
        }
        let child = random.below(inside);
        match self {
            Self::List(items) => items[child].somewhere(random),
            Self::Object(fields) => fields[child].1.somewhere(random),
            leaf => leaf,
        }
    }

    fn write(&self, out: &mut String) {
        match self {
            Self::Literal(text) => out.push_str(text),
            Self::Nested(depth, inner) => {
                out.extend(std::iter::repeat_n('[', *depth));
                out.push_str(inner);
                out.extend(std::iter::repeat_n(']', *depth));
            }
            Self::List(items) => {
                out.push('[');
                for (place, item) in items.iter().enumerate() {
                    out.push_str(if place > 0 { "," } else { "" });
                    item.write(out);
                }
                out.push(']');
            }
            Self::Object(fields) => {
                out.push('{');
                for (place, (key, value)) in fields.iter().enumerate() {
                    let _ = write!(out, "{}\"{key}\":", if place > 0 { "," } else { "" });
                    value.write(out);
                }
                out.push('}');
            }
        }
    }
}

impl std::fmt::Display for Json {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut text = String::new();
        self.write(&mut text);
        f.write_str(&text)
    }
}

/// Removes, doubles, moves or renames what a list or an object holds.
fn change_items<T: Clone>(items: &mut Vec<T>, rename: impl Fn(T, &mut Random) -> T, random: &mut Random) {
    let at = random.below(items.len());
    match random.below(5) {
        0 => drop(items.remove(at)),
        1 => items.push(items[at].clone()),
        2 => {
            let other = random.below(items.len());
            items.swap(at, other);
        }
        3 => items.truncate(at),
        _ => items[at] = rename(items[at].clone(), random),
    }
}

fn other_key(key: &str, random: &mut Random) -> String {
    match random.below(4) {
        0 => format!("{key}_"),
        1 => key.to_uppercase(),
        2 => String::new(),
        _ => "\\u001b]0;pwned\\u0007".to_owned(),
    }
}

/// A literal that is close to what was there.
fn near(text: &str, random: &mut Random) -> String {
    if let Ok(number) = text.parse::<i64>() {
        let other = match random.below(7) {
            0 => number.wrapping_add(1),
            1 => number.wrapping_sub(1),
            2 => number.wrapping_mul(2),
            3 => number / 2,
            4 => number.wrapping_neg(),
            5 => number.wrapping_mul(1000),
            _ => return format!("{number}.5"),
        };
        return other.to_string();
    }
    match text {
        "true" => "false".into(),
        "false" => "true".into(),
        text if text.starts_with('"') && text.len() > 2 => {
            let mut characters: Vec<char> = text[1..text.len() - 1].chars().collect();
            let at = random.below(characters.len());
            match random.below(3) {
                0 => drop(characters.remove(at)),
                1 => characters.insert(at, *random.pick(&['x', '.', '/', '*', '\u{202e}', '\u{fffd}', ' '])),
                _ => characters[at] = *random.pick(&['0', '9', 'T', '_', 'é']),
            }
            format!("\"{}\"", characters.into_iter().collect::<String>())
        }
        text => format!("{text}0"),
    }
}

fn nasty_number(random: &mut Random) -> String {
    let special =
        ["-1", "-0", "0.1", "-1e999", "1e999", "1e308", "1e-320", "-9223372036854775808", "1e18", "123456789012345678901234567890", "NaN"];
    match random.below(2) {
        0 => random.pick(&NASTY_INTEGERS).to_string(),
        _ => random.word(&special).to_owned(),
    }
}

fn nasty_text(random: &mut Random) -> String {
    let texts = [
        r#""""#,
        r#"" ""#,
        r#""\u0000""#,
        r#""\u001b[31mred\u001b[0m\u0007""#,
        r#""\ud800""#,
        r#""../../../../etc/passwd""#,
        r#""/dev/zero""#,
        r#""/dev/stdin""#,
        r#""C:\\Windows""#,
        r#""a\nb\rc\td""#,
        r#""\u202edesrever\u2066""#,
        r#""e\u0301\u0301\u0301\u0301""#,
        r#""{{ 7 * 7 }}""#,
        r#""T""#,
        r#""%s%n""#,
    ];
    match random.below(5) {
        0 => format!("\"{}\"", random.word(&["x", "é", "\\u0000", "[", "%", "a.", "\u{1f600}"]).repeat(random.length(300_000))),
        _ => random.word(&texts).to_owned(),
    }
}

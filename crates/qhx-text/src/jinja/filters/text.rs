//! Filters that give texts.

use crate::jinja::arguments::{Arguments, count, integer, optional_integer, optional_text, text};
use crate::jinja::error::{Result, fail};
use crate::jinja::interpreter::Interpreter;
use crate::jinja::methods::string::lines;
use crate::jinja::print::is_python_space;
use crate::jinja::value::{Dict, Value};

#[rustfmt::skip]
pub(super) const NAMES: &[&str] = &[
    "capitalize", "center", "e", "escape", "format", "indent", "join", "lower", "replace", "safe", "string", "title", "tojson", "trim",
    "truncate", "upper", "urlencode", "wordcount", "xmlattr",
];

impl Interpreter<'_> {
    pub(super) fn text_filter(&mut self, name: &str, value: Value, arguments: Arguments) -> Result<Value> {
        match name {
            "tojson" => self.tojson(&value, arguments),
            "join" => self.join(&value, arguments),
            "indent" => self.indented(&value, arguments),
            "truncate" => self.truncated(&value, arguments),
            "format" => {
                if !arguments.positional.is_empty() && !arguments.named.is_empty() {
                    fail!("format takes values either by name or without, not both");
                }
                let values = if arguments.named.is_empty() {
                    self.tuple(arguments.positional)?
                } else {
                    let mut dict = Dict::default();
                    for (name, value) in arguments.named {
                        self.insert(&mut dict, Value::Str(name), value)?;
                    }
                    self.dict(dict)?
                };
                let format = self.string_of(&value)?;
                let formatted = self.percent_format(&format, &values)?;
                self.made(formatted)
            }
            "urlencode" => {
                arguments.none(name)?;
                self.url_encoded(&value)
            }
            "xmlattr" => self.xml_attributes(&value, arguments),
            "string" if value.as_str().is_some() => arguments.none(name).map(|()| value),
            _ => {
                let text = self.string_of(&value)?;
                self.text_of_text(name, &text, matches!(value, Value::Safe(_)), arguments)
            }
        }
    }

    /// Filters that see any value as a text.
    fn text_of_text(&mut self, name: &str, this: &str, safe: bool, arguments: Arguments) -> Result<Value> {
        match name {
            "trim" => {
                let [characters] = arguments.bind(name, ["chars"], 0)?;
                let characters = optional_text(name, characters.as_ref())?;
                self.stripped(this, characters.as_deref(), true, true)
            }
            "replace" => {
                let [old, new, most] = arguments.bind(name, ["old", "new", "count"], 2)?;
                let most = optional_integer(name, most.as_ref())?.unwrap_or(-1);
                let (old, new) = (old.unwrap_or(Value::None), new.unwrap_or(Value::None));
                let (old, new) = (self.string_of(&old)?, self.string_of(&new)?);
                self.replaced(this, &old, &new, most)
            }
            "center" => {
                let [width] = arguments.bind(name, ["width"], 0)?;
                let arguments = Arguments { positional: vec![width.unwrap_or(Value::Int(80))], named: Vec::new() };
                self.string_method(this, name, arguments)
            }
            _ => {
                arguments.none(name)?;
                match name {
                    "title" => self.titled(this),
                    "upper" | "lower" | "capitalize" => self.in_case(this, name),
                    "wordcount" => {
                        self.budget.work(this.len().saturating_mul(4))?;
                        let is_word = |c: &char| c.is_alphanumeric() || *c == '_';
                        let before = std::iter::once(' ').chain(this.chars());
                        let starts = before.zip(this.chars()).filter(|(before, c)| is_word(c) && !is_word(before));
                        Ok(Value::Int(starts.count() as i128))
                    }
                    "e" | "escape" if !safe => {
                        let mut escaped = String::new();
                        self.append_escaped(&mut escaped, this)?;
                        self.safe(escaped)
                    }
                    "e" | "escape" | "safe" => {
                        self.budget.allocate(this.len())?;
                        self.safe(this.to_owned())
                    }
                    _ => self.text(this),
                }
            }
        }
    }

    /// Words begin behind blanks, hyphens and opening brackets, unlike those of the method of this name.
    fn titled(&mut self, this: &str) -> Result<Value> {
        self.budget.allocate(this.len().saturating_mul(3))?;
        self.budget.work(this.len().saturating_mul(6))?;
        let mut title = String::with_capacity(this.len());
        let mut starting = true;
        for character in this.chars() {
            if starting {
                title.extend(character.to_uppercase())
            } else {
                title.extend(character.to_lowercase())
            }
            starting = is_python_space(character) || matches!(character, '-' | '(' | '{' | '[' | '<');
        }
        self.made(title)
    }

    /// Appends a text with the characters of HTML escaped.
    pub(in crate::jinja) fn append_escaped(&mut self, escaped: &mut String, plain: &str) -> Result<()> {
        self.budget.work(plain.len())?;
        let mut rest = plain;
        while let Some(at) = rest.find(['&', '<', '>', '"', '\'']) {
            self.append(escaped, &rest[..at])?;
            let name = match rest.as_bytes()[at] {
                b'&' => "&amp;",
                b'<' => "&lt;",
                b'>' => "&gt;",
                b'"' => "&#34;",
                _ => "&#39;",
            };
            self.append(escaped, name)?;
            rest = &rest[at + 1..];
        }
        self.append(escaped, rest)
    }

    fn join(&mut self, value: &Value, arguments: Arguments) -> Result<Value> {
        let [separator, attribute] = arguments.bind("join", ["d", "attribute"], 0)?;
        let separator = self.string_of(&separator.unwrap_or(Value::Str("".into())))?;
        let path = self.path(attribute.as_ref())?;
        let mut joined = String::new();
        for (place, item) in self.items(value)?.into_iter().enumerate() {
            let item = self.along(item, &path, None)?;
            self.append(&mut joined, if place > 0 { &separator } else { "" })?;
            self.print(&item, &mut joined)?;
        }
        self.made(joined)
    }

    fn indented(&mut self, value: &Value, arguments: Arguments) -> Result<Value> {
        let [width, first, blank] = arguments.bind("indent", ["width", "first", "blank"], 0)?;
        let mut indention = String::new();
        match width {
            Some(Value::Str(text) | Value::Safe(text)) => self.append(&mut indention, &text)?,
            width => {
                let width = integer("indent", &width.unwrap_or(Value::Int(4)))?;
                self.append_repeated(&mut indention, ' ', count(width))?;
            }
        }
        let [first, blank] = [first, blank].map(|flag| flag.is_some_and(|flag| self.truth(&flag)));
        let mut this = text("indent", Some(value))?.to_string();
        self.budget.allocate(this.len() + 1)?;
        self.budget.work(this.len())?;
        this.push('\n');
        let mut result = String::new();
        for (place, line) in lines(&this, false).enumerate() {
            self.append(&mut result, if place > 0 { "\n" } else { "" })?;
            if if place == 0 { first } else { blank || !line.is_empty() } {
                self.append(&mut result, &indention)?;
            }
            self.append(&mut result, line)?;
        }
        self.made(result)
    }

    fn truncated(&mut self, value: &Value, arguments: Arguments) -> Result<Value> {
        let [length, kill_words, end, leeway] = arguments.bind("truncate", ["length", "killwords", "end", "leeway"], 0)?;
        let length = count(optional_integer("truncate", length.as_ref())?.unwrap_or(255));
        let leeway = count(optional_integer("truncate", leeway.as_ref())?.unwrap_or(5));
        let end = optional_text("truncate", end.as_ref())?.unwrap_or_else(|| "...".into());
        let this = text("truncate", Some(value))?;
        self.budget.work(this.len())?;
        let Some(kept) = length.checked_sub(end.chars().count()) else { fail!("truncate: the length is shorter than the end") };
        if this.chars().count() <= length.saturating_add(leeway) {
            return Ok(value.clone());
        }
        let cut = &this[..this.char_indices().nth(kept).map_or(this.len(), |(at, _)| at)];
        let cut = if kill_words.is_some_and(|kill| self.truth(&kill)) { cut } else { cut.rsplit_once(' ').map_or(cut, |(words, _)| words) };
        let mut result = String::new();
        self.append(&mut result, cut)?;
        self.append(&mut result, &end)?;
        self.made(result)
    }

    fn url_encoded(&mut self, value: &Value) -> Result<Value> {
        let mut encoded = String::new();
        match value {
            Value::Dict(_) | Value::List(_) | Value::Tuple(_) | Value::View(..) => {
                let pairs = match value {
                    Value::Dict(dict) => Value::View(crate::jinja::value::View::Items, dict.clone()),
                    _ => value.clone(),
                };
                for (place, pair) in self.items(&pairs)?.iter().enumerate() {
                    let pair = self.items(pair)?;
                    let [key, value] = &pair[..] else { fail!("urlencode expects pairs of a key and a value") };
                    self.append(&mut encoded, if place > 0 { "&" } else { "" })?;
                    self.append_url(&mut encoded, key, true)?;
                    self.append(&mut encoded, "=")?;
                    self.append_url(&mut encoded, value, true)?;
                }
            }
            _ => self.append_url(&mut encoded, value, false)?,
        }
        self.made(encoded)
    }

    fn append_url(&mut self, encoded: &mut String, value: &Value, in_query: bool) -> Result<()> {
        for byte in self.string_of(value)?.bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'~' => {
                    self.append(encoded, char::from(byte).encode_utf8(&mut [0; 4]))?;
                }
                b'/' if !in_query => self.append(encoded, "/")?,
                b' ' if in_query => self.append(encoded, "+")?,
                _ => {
                    self.budget.steps(8)?;
                    self.append(encoded, &format!("%{byte:02X}"))?;
                }
            }
        }
        Ok(())
    }

    fn xml_attributes(&mut self, value: &Value, arguments: Arguments) -> Result<Value> {
        let [space] = arguments.bind("xmlattr", ["autospace"], 0)?;
        let space = space.is_none_or(|space| self.truth(&space));
        let Value::Dict(dict) = value else { fail!("xmlattr expects a dict") };
        let mut attributes = String::new();
        for (key, value) in dict.entries() {
            if matches!(value, Value::None | Value::Undefined(_)) {
                continue;
            }
            let key = text("xmlattr", Some(key))?;
            if key.contains([' ', '\t', '\n', '\r', '\u{b}', '\u{c}', '/', '>', '=']) {
                fail!("xmlattr: {key:?} is not the name of an attribute");
            }
            let gap = if space || !attributes.is_empty() { " " } else { "" };
            self.append(&mut attributes, gap)?;
            self.append_escaped(&mut attributes, &key)?;
            self.append(&mut attributes, "=\"")?;
            let plain = self.string_of(value)?;
            if matches!(value, Value::Safe(_)) {
                self.append(&mut attributes, &plain)?
            } else {
                self.append_escaped(&mut attributes, &plain)?
            }
            self.append(&mut attributes, "\"")?;
        }
        self.made(attributes)
    }
}

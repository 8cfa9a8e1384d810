//! Values as JSON text, spelled as Python's `json.dumps` spells them.
//!
//! Chat templates put tools and arguments into prompts as JSON, and a model has seen Python's spelling of it in training: a blank after
//! each comma and colon, characters as they are, floats in Python's shortest form.

use super::arguments::{Arguments, count, integer, text};
use super::error::{Result, fail};
use super::interpreter::Interpreter;
use super::print::float;
use super::text::Text;
use super::value::{Dict, Value};

/// How `json.dumps` was asked to write.
struct Style {
    escape_non_ascii: bool,
    /// One level of indentation; without it everything stands on one line.
    indent: Option<String>,
    item_separator: Text,
    key_separator: Text,
    sort_keys: bool,
}

impl Interpreter<'_> {
    /// The filter `tojson(ensure_ascii=false, indent=none, separators=none, sort_keys=false)`.
    pub(super) fn tojson(&mut self, value: &Value, arguments: Arguments) -> Result<Value> {
        let [ascii, indent, separators, sort_keys] = arguments.bind("tojson", ["ensure_ascii", "indent", "separators", "sort_keys"], 0)?;
        let indent = self.indentation(indent)?;
        let (item_separator, key_separator) = match separators {
            None | Some(Value::None) => (if indent.is_some() { "," } else { ", " }.into(), ": ".into()),
            Some(separators) => match separators.as_items() {
                Some([item, key]) => (text("tojson", Some(item))?, text("tojson", Some(key))?),
                _ => fail!("tojson: separators must be two texts"),
            },
        };
        let style = Style {
            escape_non_ascii: ascii.is_some_and(|ascii| self.truth(&ascii)),
            indent,
            item_separator,
            key_separator,
            sort_keys: sort_keys.is_some_and(|sort| self.truth(&sort)),
        };
        let mut json = String::new();
        self.write_json(value, &style, 0, &mut json)?;
        self.made(json)
    }

    fn indentation(&mut self, indent: Option<Value>) -> Result<Option<String>> {
        match indent {
            None | Some(Value::None) => Ok(None),
            Some(Value::Str(text) | Value::Safe(text)) => Ok(Some(text.to_string())),
            Some(width) => {
                let mut blanks = String::new();
                self.append_repeated(&mut blanks, ' ', count(integer("tojson: indent", &width)?))?;
                Ok(Some(blanks))
            }
        }
    }

    fn write_json(&mut self, value: &Value, style: &Style, depth: usize, json: &mut String) -> Result<()> {
        self.budget.steps(1)?;
        match value {
            Value::None => self.append(json, "null"),
            Value::Bool(value) => self.append(json, if *value { "true" } else { "false" }),
            Value::Int(value) => self.append(json, &value.to_string()),
            Value::Float(value) => self.append(json, &json_float(*value)),
            Value::Str(string) | Value::Safe(string) => self.write_json_string(string, style, json),
            Value::List(list) | Value::Tuple(list) => {
                self.append(json, "[")?;
                for (place, item) in list.items.iter().enumerate() {
                    self.write_json_gap(place, style, depth + 1, json)?;
                    self.write_json(item, style, depth + 1, json)?;
                }
                self.write_json_end(list.items.is_empty(), style, depth, json)?;
                self.append(json, "]")
            }
            Value::Dict(dict) => self.write_json_object(dict, style, depth, json),
            _ => fail!("tojson: a value of type '{}' has no JSON form", self.type_of(value)),
        }
    }

    fn write_json_object(&mut self, dict: &Dict, style: &Style, depth: usize, json: &mut String) -> Result<()> {
        self.budget.allocate_many(dict.len(), size_of::<(Value, Value)>())?;
        let mut entries = dict.entries().to_vec();
        if style.sort_keys {
            let keyed = entries.iter().enumerate().map(|(place, (key, _))| (key.clone(), Value::Int(place as i128))).collect();
            let places = self.sorted(keyed, false)?;
            entries = places.iter().filter_map(|place| dict.entries().get(place.as_int()? as usize).cloned()).collect();
        }
        self.append(json, "{")?;
        for (place, (key, value)) in entries.iter().enumerate() {
            self.write_json_gap(place, style, depth + 1, json)?;
            match key {
                Value::Str(key) | Value::Safe(key) => self.write_json_string(key, style, json)?,
                Value::None => self.append(json, "\"null\"")?,
                Value::Bool(key) => self.append(json, if *key { "\"true\"" } else { "\"false\"" })?,
                Value::Int(key) => self.append(json, &format!("\"{key}\""))?,
                Value::Float(key) => self.append(json, &format!("\"{}\"", json_float(*key)))?,
                _ => fail!("tojson: a key cannot be of type '{}'", self.type_of(key)),
            }
            self.append(json, &style.key_separator)?;
            self.write_json(value, style, depth + 1, json)?;
        }
        self.write_json_end(entries.is_empty(), style, depth, json)?;
        self.append(json, "}")
    }

    /// What stands before an item.
    fn write_json_gap(&mut self, place: usize, style: &Style, depth: usize, json: &mut String) -> Result<()> {
        if place > 0 {
            self.append(json, &style.item_separator)?;
        }
        self.write_json_line(style, depth, json)
    }

    fn write_json_end(&mut self, empty: bool, style: &Style, depth: usize, json: &mut String) -> Result<()> {
        if empty { Ok(()) } else { self.write_json_line(style, depth, json) }
    }

    fn write_json_line(&mut self, style: &Style, depth: usize, json: &mut String) -> Result<()> {
        let Some(indent) = &style.indent else { return Ok(()) };
        self.append(json, "\n")?;
        (0..depth).try_for_each(|_| self.append(json, indent))
    }

    fn write_json_string(&mut self, string: &str, style: &Style, json: &mut String) -> Result<()> {
        self.budget.allocate(string.len() + 2)?;
        self.budget.work(string.len())?;
        json.push('"');
        for character in string.chars() {
            match character {
                '"' => json.push_str("\\\""),
                '\\' => json.push_str("\\\\"),
                '\n' => json.push_str("\\n"),
                '\r' => json.push_str("\\r"),
                '\t' => json.push_str("\\t"),
                '\u{8}' => json.push_str("\\b"),
                '\u{c}' => json.push_str("\\f"),
                // Python's ASCII ends before the delete character here.
                _ if character < ' ' || (style.escape_non_ascii && character > '~') => {
                    self.budget.allocate(12)?;
                    for unit in character.encode_utf16(&mut [0; 2]) {
                        json.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                _ => json.push(character),
            }
        }
        json.push('"');
        Ok(())
    }
}

fn json_float(value: f64) -> String {
    match float(value).as_str() {
        "nan" => "NaN".to_owned(),
        "inf" => "Infinity".to_owned(),
        "-inf" => "-Infinity".to_owned(),
        plain => plain.to_owned(),
    }
}

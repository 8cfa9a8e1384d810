//! Values as text: Python's `str` and `repr`.

use super::error::{Failure, Result};
use super::interpreter::Interpreter;
use super::object::{Object, ObjectId};
use super::value::{Dict, Value, View};

/// How many namespaces may lie in each other where one is printed.
const MAX_NAMESPACES: usize = 100;

impl Interpreter<'_> {
    /// What printing a value writes.
    pub(super) fn string_of(&mut self, value: &Value) -> Result<String> {
        let mut text = String::new();
        self.print(value, &mut text)?;
        Ok(text)
    }

    /// Appends what printing a value writes.
    pub(super) fn print(&mut self, value: &Value, text: &mut String) -> Result<()> {
        match value {
            Value::Undefined(_) => Ok(()),
            Value::Str(string) | Value::Safe(string) => self.append(text, string),
            Value::Object(id) => match self.get(id) {
                Object::Joiner { .. } | Object::Cycler { .. } | Object::Iterator(..) => {
                    Err(Failure::Problem(format!("a value of type '{}' cannot be printed", self.type_of(value))))
                }
                _ => self.represent(value, text),
            },
            _ => self.represent(value, text),
        }
    }

    /// Appends what a value looks like within a list.
    pub(super) fn represent(&mut self, value: &Value, text: &mut String) -> Result<()> {
        self.represent_within(value, text, &mut Vec::new())
    }

    /// `within` are the namespaces that are being written.
    fn represent_within(&mut self, value: &Value, text: &mut String, within: &mut Vec<ObjectId>) -> Result<()> {
        self.budget.steps(1)?;
        match value {
            Value::Undefined(_) => self.append(text, "Undefined"),
            Value::None => self.append(text, "None"),
            Value::Bool(value) => self.append(text, if *value { "True" } else { "False" }),
            Value::Int(value) => self.append(text, &value.to_string()),
            Value::Float(value) => self.append(text, &float(*value)),
            Value::Str(string) => self.represent_string(string, text),
            Value::Safe(string) => {
                self.append(text, "Markup(")?;
                self.represent_string(string, text)?;
                self.append(text, ")")
            }
            Value::List(list) => self.represent_items(&list.items, ["[", "]"], text, within),
            Value::Tuple(list) => {
                let end = if list.items.len() == 1 { ",)" } else { ")" };
                self.represent_items(&list.items, ["(", end], text, within)
            }
            Value::Dict(dict) => self.represent_entries(dict, text, within),
            Value::View(view, _) => {
                let items = self.items(value)?;
                let start = match view {
                    View::Keys => "dict_keys([",
                    View::Values => "dict_values([",
                    View::Items => "dict_items([",
                };
                self.represent_items(&items, [start, "])"], text, within)
            }
            Value::Range(range) if range.step == 1 => self.append(text, &format!("range({}, {})", range.start, range.stop)),
            Value::Range(range) => self.append(text, &format!("range({}, {}, {})", range.start, range.stop, range.step)),
            Value::Object(id) => self.represent_object(id, text, within),
            Value::Function(function) => self.append(text, &format!("<function {}>", function.name())),
            Value::Method(method) => self.append(text, &format!("<built-in method {} of {} object>", method.1, method.0.type_name())),
        }
    }

    fn represent_object(&mut self, id: &ObjectId, text: &mut String, within: &mut Vec<ObjectId>) -> Result<()> {
        match self.get(id) {
            Object::Namespace(_) if within.contains(id) => self.append(text, "<Namespace {...}>"),
            Object::Namespace(entries) => {
                let entries = entries.entries().to_vec();
                self.budget.allocate_many(entries.len(), size_of::<(Value, Value)>())?;
                if within.len() >= MAX_NAMESPACES {
                    return Err(Failure::Limit(format!("{MAX_NAMESPACES} namespaces in each other")));
                }
                within.push(id.clone());
                self.append(text, "<Namespace {")?;
                self.represent_pairs(&entries, text, within)?;
                within.pop();
                self.append(text, "}>")
            }
            Object::Macro(closure) => {
                let name = closure.definition.name.clone();
                self.append(text, &format!("<Macro '{name}'>"))
            }
            Object::Loop(state) => {
                let (index, length) = (state.index0 + 1, state.length.unwrap_or(state.index0 + 1));
                self.append(text, &format!("<LoopContext {index}/{length}>"))
            }
            _ => {
                let name = self.type_of(&Value::Object(id.clone()));
                Err(Failure::Problem(format!("a value of type '{name}' cannot be printed")))
            }
        }
    }

    fn represent_items(&mut self, items: &[Value], [start, end]: [&str; 2], text: &mut String, within: &mut Vec<ObjectId>) -> Result<()> {
        self.append(text, start)?;
        for (place, item) in items.iter().enumerate() {
            self.append(text, if place > 0 { ", " } else { "" })?;
            self.represent_within(item, text, within)?;
        }
        self.append(text, end)
    }

    fn represent_entries(&mut self, dict: &Dict, text: &mut String, within: &mut Vec<ObjectId>) -> Result<()> {
        self.append(text, "{")?;
        self.represent_pairs(dict.entries(), text, within)?;
        self.append(text, "}")
    }

    fn represent_pairs(&mut self, pairs: &[(Value, Value)], text: &mut String, within: &mut Vec<ObjectId>) -> Result<()> {
        for (place, (key, value)) in pairs.iter().enumerate() {
            self.append(text, if place > 0 { ", " } else { "" })?;
            self.represent_within(key, text, within)?;
            self.append(text, ": ")?;
            self.represent_within(value, text, within)?;
        }
        Ok(())
    }

    fn represent_string(&mut self, string: &str, text: &mut String) -> Result<()> {
        // No character becomes more than ten bytes per byte of its own.
        self.budget.allocate(string.len() + 2)?;
        self.budget.work(string.len())?;
        let quote = if string.contains('\'') && !string.contains('"') { '"' } else { '\'' };
        text.push(quote);
        for character in string.chars() {
            match character {
                '\\' => text.push_str("\\\\"),
                '\n' => text.push_str("\\n"),
                '\r' => text.push_str("\\r"),
                '\t' => text.push_str("\\t"),
                _ if character == quote => text.extend(['\\', quote]),
                _ if is_printable(character) => text.push(character),
                _ => {
                    self.budget.allocate(10)?;
                    text.push_str(&escape(character));
                }
            }
        }
        text.push(quote);
        Ok(())
    }
}

/// A character by its code, as Python writes it.
fn escape(character: char) -> String {
    match u32::from(character) {
        code @ 0..0x100 => format!("\\x{code:02x}"),
        code @ 0x100..0x1_0000 => format!("\\u{code:04x}"),
        code => format!("\\U{code:08x}"),
    }
}

/// Whether Python shows a character in a string's representation. Rust escapes in its own the same characters, and some that combine with others.
fn is_printable(character: char) -> bool {
    match character {
        ' '..='~' => true,
        _ if character.is_ascii() || character.is_whitespace() || character.is_control() => false,
        '\u{ad}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}' | '\u{180e}' | '\u{200b}'..='\u{200f}' => false,
        '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{e000}'..='\u{f8ff}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' => false,
        '\u{e0000}'..='\u{e0fff}' | '\u{f0000}'..='\u{10ffff}' => false,
        _ => true,
    }
}

/// Python's shortest form: exponents below −4 and from 16 on, always with a point or an exponent.
pub(super) fn float(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_owned();
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

/// Python counts four separators of ASCII as white space that Unicode does not.
pub(super) fn is_python_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
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
            (f64::INFINITY, "inf"),
        ];
        for (value, text) in spelled {
            assert_eq!(float(value), text);
        }
    }
}

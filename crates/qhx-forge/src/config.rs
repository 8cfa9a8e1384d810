//! A checkpoint's `config.json` (or another of its JSON files), read field by field with errors that name file and field.

use crate::ForgeError;
use serde_json::Value;

/// More layers, or experts of a layer, than any model has.
const MOST_REPEATS: usize = 4096;

/// A section of a configuration, with its place for error messages.
#[derive(Clone, Copy, Debug)]
pub struct Config<'a> {
    value: &'a Value,
    section: &'a str,
    file: &'a str,
}

impl<'a> Config<'a> {
    /// The whole configuration.
    pub fn new(value: &'a Value) -> Self {
        Self::of_file("config.json", value)
    }

    /// The whole of another file.
    pub fn of_file(file: &'a str, value: &'a Value) -> Self {
        Self { value, section: "", file }
    }

    /// The section `name`, or this one where there is none (text-only checkpoints have their fields at the top).
    pub fn section_or_self(self, name: &'a str) -> Self {
        match self.value.get(name) {
            Some(value) if value.is_object() => Self { value, section: name, ..self },
            _ => self,
        }
    }

    /// The section `name`.
    pub fn section(self, name: &'a str) -> Option<Self> {
        self.value.get(name).filter(|v| v.is_object()).map(|value| Self { value, section: name, ..self })
    }

    /// A field's value; JSON `null` counts as absent.
    pub fn get(self, field: &str) -> Option<&'a Value> {
        self.value.get(field).filter(|v| !v.is_null())
    }

    /// A field that must be there and be a positive integer.
    pub fn size(self, field: &str) -> Result<usize, ForgeError> {
        self.size_if_any(field)?.ok_or_else(|| self.error(field, "is missing"))
    }

    /// A field that must be there and say how many layers, or experts of a layer, there are: each of them is written down by itself.
    pub fn repeats(self, field: &str) -> Result<usize, ForgeError> {
        match self.size(field)? {
            count if count <= MOST_REPEATS => Ok(count),
            count => Err(self.error(field, format!("is {count}, at most {MOST_REPEATS} are supported"))),
        }
    }

    /// A field that, where it is there, must be a positive integer.
    pub fn size_if_any(self, field: &str) -> Result<Option<usize>, ForgeError> {
        let positive = |v: &Value| v.as_u64().filter(|&n| n > 0 && n <= 1 << 40).map(|n| n as usize);
        self.parse(field, "a positive integer of at most 2^40", positive)
    }

    /// A field that, where it is there, must be an integer of 0 or more.
    pub fn count_or(self, field: &str, default: usize) -> Result<usize, ForgeError> {
        let count = |v: &Value| v.as_u64().filter(|&n| n <= 1 << 40).map(|n| n as usize);
        Ok(self.parse(field, "an integer from 0 to 2^40", count)?.unwrap_or(default))
    }

    /// A field that must be there and be a number.
    pub fn number(self, field: &str) -> Result<f64, ForgeError> {
        self.number_if_any(field)?.ok_or_else(|| self.error(field, "is missing"))
    }

    /// A field that, where it is there, must be a number.
    pub fn number_if_any(self, field: &str) -> Result<Option<f64>, ForgeError> {
        self.parse(field, "a number", |v| v.as_f64().filter(|n| n.is_finite()))
    }

    /// A field that, where it is there, must be true or false.
    pub fn flag_or(self, field: &str, default: bool) -> Result<bool, ForgeError> {
        Ok(self.parse(field, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    /// A field that, where it is there, must be text.
    pub fn text_if_any(self, field: &str) -> Result<Option<&'a str>, ForgeError> {
        self.parse(field, "text", Value::as_str)
    }

    /// A field that, where it is there, must be a list of numbers.
    pub fn numbers_if_any(self, field: &str) -> Result<Option<Vec<f64>>, ForgeError> {
        self.parse(field, "a list of numbers", |v| v.as_array()?.iter().map(Value::as_f64).collect())
    }

    /// A field that, where it is there, must be a list of texts.
    pub fn texts_if_any(self, field: &str) -> Result<Option<Vec<&'a str>>, ForgeError> {
        self.parse(field, "a list of texts", |v| v.as_array()?.iter().map(Value::as_str).collect())
    }

    /// Refuses a variant: `field` must be absent or one of `supported`.
    pub fn only(self, field: &str, supported: &[Value]) -> Result<(), ForgeError> {
        match self.get(field) {
            Some(found) if !supported.contains(found) => {
                let list: Vec<_> = supported.iter().map(Value::to_string).collect();
                Err(self.error(field, format!("is {found}, a variant that is not supported; supported: {}", list.join(", "))))
            }
            _ => Ok(()),
        }
    }

    /// An error about a field of this section.
    pub fn error(self, field: &str, reason: impl Into<String>) -> ForgeError {
        let field = if self.section.is_empty() { field.to_string() } else { format!("{}.{field}", self.section) };
        ForgeError::Config { file: self.file.into(), field, reason: reason.into() }
    }

    fn parse<T>(self, field: &str, wanted: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>, ForgeError> {
        match self.get(field) {
            None => Ok(None),
            Some(value) => {
                let shown: String = value.to_string().chars().take(60).collect();
                read(value).map(Some).ok_or_else(|| self.error(field, format!("must be {wanted}, found {shown}")))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn errors_name_section_and_field() {
        let json = json!({"text_config": {"hidden_size": -3, "layers": 2, "none": null}, "act": "swish"});
        let text = Config::new(&json).section_or_self("text_config");
        let error = text.size("hidden_size").unwrap_err().to_string();
        assert_eq!(error, "config.json: `text_config.hidden_size` must be a positive integer, found -3");
        assert!(text.size("none").unwrap_err().to_string().contains("`text_config.none` is missing"));
        assert_eq!(text.size("layers").unwrap(), 2);
        let error = Config::new(&json).only("act", &["silu".into()]).unwrap_err().to_string();
        assert!(error.contains("`act` is \"swish\", a variant that is not supported"), "{error}");
    }
}

//! A checkpoint's `config.json` (or another of its JSON files), read field by field with errors that name file and field.

use crate::ForgeError;
use serde_json::Value;

/// More layers, or experts of a layer, than any model has.
const MOST_REPEATS: usize = 4096;
/// Wider than any row, head or table of positions. The products of sizes that programs are written with stay far below 2^63.
pub(crate) const MOST_SIZE: usize = 1 << 20;
/// More than any side of a kernel, a patch or a block: several of them are multiplied.
const MOST_KERNEL: usize = 1 << 10;
/// More than any vocabulary.
const MOST_TOKENS: usize = 1 << 24;
/// More than any text has tokens and any picture pixels.
const MOST_LENGTH: usize = 1 << 40;

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

    /// Whether a field is there and JSON `null`.
    pub fn is_null(self, field: &str) -> bool {
        self.value.get(field).is_some_and(Value::is_null)
    }

    /// A field that must be there and be a size: a width, a number of heads, rows of a small table.
    pub fn size(self, field: &str) -> Result<usize, ForgeError> {
        self.present(field, self.size_if_any(field)?)
    }

    /// A field that, where it is there, must be a size.
    pub fn size_if_any(self, field: &str) -> Result<Option<usize>, ForgeError> {
        self.positive(field, MOST_SIZE)
    }

    /// A field that must be there and be the side of a kernel, a patch or a block.
    pub fn kernel(self, field: &str) -> Result<usize, ForgeError> {
        self.present(field, self.kernel_if_any(field)?)
    }

    /// A field that, where it is there, must be the side of a kernel, a patch or a block.
    pub fn kernel_if_any(self, field: &str) -> Result<Option<usize>, ForgeError> {
        self.positive(field, MOST_KERNEL)
    }

    /// A field that must be there and say how many layers, or experts of a layer, there are: each of them is written down by itself.
    pub fn repeats(self, field: &str) -> Result<usize, ForgeError> {
        self.present(field, self.positive(field, MOST_REPEATS)?)
    }

    /// A field that must be there and say how many tokens there are.
    pub fn vocabulary(self, field: &str) -> Result<usize, ForgeError> {
        self.present(field, self.positive(field, MOST_TOKENS)?)
    }

    /// A field that must be there and be the length of a text.
    pub fn length(self, field: &str) -> Result<usize, ForgeError> {
        self.present(field, self.length_if_any(field)?)
    }

    /// A field that, where it is there, must be the length of a text or the area of a picture.
    pub fn length_if_any(self, field: &str) -> Result<Option<usize>, ForgeError> {
        self.positive(field, MOST_LENGTH)
    }

    /// A field that, where it is there, must be an integer of 0 or more.
    pub fn count_or(self, field: &str, default: usize) -> Result<usize, ForgeError> {
        Ok(self.parse(field, &format!("an integer from 0 to {MOST_SIZE}"), count)?.unwrap_or(default))
    }

    /// A field that, where it is there, must be a list of integers of 0 or more.
    pub fn counts_if_any(self, field: &str) -> Result<Option<Vec<usize>>, ForgeError> {
        self.parse(field, &format!("a list of integers from 0 to {MOST_SIZE}"), |v| v.as_array()?.iter().map(count).collect())
    }

    /// A field that must be there and be a number.
    pub fn number(self, field: &str) -> Result<f64, ForgeError> {
        self.present(field, self.number_if_any(field)?)
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

    fn positive(self, field: &str, most: usize) -> Result<Option<usize>, ForgeError> {
        self.parse(field, &format!("a positive integer of at most {most}"), |v| integer(v, most).filter(|&n| n > 0))
    }

    fn present<T>(self, field: &str, value: Option<T>) -> Result<T, ForgeError> {
        value.ok_or_else(|| self.error(field, "is missing"))
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

fn integer(value: &Value, most: usize) -> Option<usize> {
    value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|&n| n <= most)
}

fn count(value: &Value) -> Option<usize> {
    integer(value, MOST_SIZE)
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
        assert_eq!(error, "config.json: `text_config.hidden_size` must be a positive integer of at most 1048576, found -3");
        assert!(text.size("none").unwrap_err().to_string().contains("`text_config.none` is missing"));
        assert_eq!(text.size("layers").unwrap(), 2);
        let error = Config::new(&json).only("act", &["silu".into()]).unwrap_err().to_string();
        assert!(error.contains("`act` is \"swish\", a variant that is not supported"), "{error}");
    }

    #[test]
    fn every_kind_of_size_has_its_bound() {
        let json = json!({"size": (1 << 20) + 1, "length": 1u64 << 40, "list": [3, 1 << 20], "long_list": [3, u64::MAX], "parts": [1.5]});
        let config = Config::new(&json);
        let refused = |found: Result<usize, ForgeError>, bound: &str| {
            let error = found.unwrap_err().to_string();
            assert!(error.contains(&format!("must be a positive integer of at most {bound}, found")), "{error}");
        };
        refused(config.size("size"), "1048576");
        refused(config.kernel("size"), "1024");
        refused(config.repeats("size"), "4096");
        refused(config.vocabulary("length"), "16777216");
        assert_eq!((config.vocabulary("size").unwrap(), config.length("length").unwrap()), ((1 << 20) + 1, 1 << 40));
        assert!(config.count_or("size", 0).is_err() && config.count_or("none", 7).unwrap() == 7);
        assert_eq!(config.counts_if_any("list").unwrap(), Some(vec![3, 1 << 20]));
        assert!(config.counts_if_any("long_list").is_err() && config.counts_if_any("parts").is_err());
    }
}

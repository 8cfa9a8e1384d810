//! The metadata of a GGUF file: typed values by key.

use super::{Problem, malformed, shown};
use std::collections::HashMap;

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // the names say it
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    Text(String),
    Array(Array),
}

/// An array of values of one type.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // the names say it
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bool(Vec<bool>),
    Text(Vec<String>),
    Array(Vec<Array>),
}

/// The metadata of a file, with typed look-up: `None` when a key is not there, an error when it is there with another type.
#[derive(Clone, Debug, Default)]
pub struct Metadata {
    entries: HashMap<String, Value>,
}

impl Metadata {
    /// Sets a value; returns the one it replaces.
    pub fn insert(&mut self, key: String, value: Value) -> Option<Value> {
        self.entries.insert(key, value)
    }

    /// The value of `key` as it is.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.entries.get(key)
    }

    /// All keys and values, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// A text.
    pub fn text(&self, key: &str) -> Result<Option<&str>, Problem> {
        self.typed(key, "text", |value| match value {
            Value::Text(text) => Some(text.as_str()),
            _ => None,
        })
    }

    /// A whole number that is not negative, of any width.
    pub fn unsigned(&self, key: &str) -> Result<Option<u64>, Problem> {
        self.typed(key, "a whole number of at least 0", |value| match *value {
            Value::U8(n) => Some(n.into()),
            Value::U16(n) => Some(n.into()),
            Value::U32(n) => Some(n.into()),
            Value::U64(n) => Some(n),
            Value::I8(n) => n.try_into().ok(),
            Value::I16(n) => n.try_into().ok(),
            Value::I32(n) => n.try_into().ok(),
            Value::I64(n) => n.try_into().ok(),
            _ => None,
        })
    }

    /// A finite number.
    pub fn float(&self, key: &str) -> Result<Option<f64>, Problem> {
        self.typed(key, "a number", |value| match *value {
            // By way of its shortest decimal form: 1e-5 should stay 1e-5 and not become 9.99999974e-6.
            Value::F32(x) if x.is_finite() => x.to_string().parse().ok(),
            Value::F64(x) if x.is_finite() => Some(x),
            _ => None,
        })
    }

    /// True or false.
    pub fn boolean(&self, key: &str) -> Result<Option<bool>, Problem> {
        self.typed(key, "true or false", |value| match *value {
            Value::Bool(truth) => Some(truth),
            _ => None,
        })
    }

    /// A list of texts.
    pub fn texts(&self, key: &str) -> Result<Option<&[String]>, Problem> {
        self.typed(key, "a list of texts", |value| match value {
            Value::Array(Array::Text(texts)) => Some(texts.as_slice()),
            _ => None,
        })
    }

    fn typed<'a, T>(&'a self, key: &str, expected: &str, convert: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>, Problem> {
        match self.entries.get(key) {
            None => Ok(None),
            Some(value) => match convert(value) {
                Some(converted) => Ok(Some(converted)),
                None => malformed!("the metadata key `{}` should be {expected} but is {}", shown(key), described(value)),
            },
        }
    }
}

fn described(value: &Value) -> String {
    match value {
        Value::Text(text) => format!("the text `{}`", shown(text)),
        Value::Array(_) => "a list".to_string(),
        other => shown(&format!("{other:?}")),
    }
}

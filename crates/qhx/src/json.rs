//! JSON that people write: an object with the same key twice says two things, and is refused.

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Result, Value};
use std::{collections::HashSet, fmt};

/// Reads JSON in which no object has a key twice.
pub fn read(text: &str) -> Result<Value> {
    check(text)?;
    serde_json::from_str(text)
}

/// Checks that no object of a JSON text has a key twice.
pub(crate) fn check(text: &str) -> Result<()> {
    serde_json::from_str::<Unique>(text).map(drop)
}

struct Unique;

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_any(Self)
    }
}

impl<'de> Visitor<'de> for Unique {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E>(self, _: bool) -> std::result::Result<Self, E> {
        Ok(self)
    }

    fn visit_i64<E>(self, _: i64) -> std::result::Result<Self, E> {
        Ok(self)
    }

    fn visit_u64<E>(self, _: u64) -> std::result::Result<Self, E> {
        Ok(self)
    }

    fn visit_f64<E>(self, _: f64) -> std::result::Result<Self, E> {
        Ok(self)
    }

    fn visit_unit<E>(self) -> std::result::Result<Self, E> {
        Ok(self)
    }

    fn visit_str<E>(self, _: &str) -> std::result::Result<Self, E> {
        Ok(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> std::result::Result<Self, A::Error> {
        while values.next_element::<Self>()?.is_some() {}
        Ok(self)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> std::result::Result<Self, A::Error> {
        let mut keys = HashSet::new();
        while let Some((key, _)) = fields.next_entry::<String, Self>()? {
            if let Some(twice) = keys.replace(key) {
                return Err(A::Error::custom(format!("the key `{}` occurs twice in an object", twice.escape_debug())));
            }
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_key_occurs_once_in_an_object() {
        assert_eq!(
            read(r#"[{"a": [1, -2.5, null]}, {"a": {"a": true}}]"#).unwrap(),
            json!([{ "a": [1, -2.5, null] }, { "a": { "a": true } }])
        );
        for text in [r#"{"a": 1, "\u0061": 2}"#, r#"[{"b": {"a": "x", "a": "x"}}]"#] {
            assert!(read(text).unwrap_err().to_string().contains("the key `a` occurs twice in an object"), "{text}");
        }
        assert!(read(&"[".repeat(100_000)).is_err());
    }
}

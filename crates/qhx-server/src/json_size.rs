//! What a request in JSON takes, before it is read.

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use std::{collections::HashSet, fmt};

/// The most values of a request.
const MOST_VALUES: usize = 500_000;
/// What a value takes in memory, with its key.
const VALUE_BYTES: usize = 96;
/// An object takes as much as so many values, beside those in it.
const OBJECT_VALUES: usize = 4;
/// The most bytes of texts that are no media.
const MOST_TEXT: usize = 8 << 20;
/// Fields whose texts are files in base64 or addresses that hold one.
const MEDIA: [&str; 7] = ["data", "url", "images", "image", "image_url", "audio", "audio_url"];

/// The bytes that its values take, beside those of its texts. An error if they are too many, or if an object has a key twice.
pub(crate) fn measure(json: &[u8]) -> Result<usize, String> {
    let mut size = Size::default();
    let mut reader = serde_json::Deserializer::from_slice(json);
    match size.deserialize(&mut reader) {
        Ok(()) => Ok(size.values * VALUE_BYTES),
        // Malformed JSON is reported by the parser that follows.
        Err(error) if error.is_data() => Err(format!("the request is not what was expected: {error}")),
        Err(_) => Ok(size.values * VALUE_BYTES),
    }
}

#[derive(Default)]
struct Size {
    values: usize,
    text: usize,
    /// Whether what is read may be a file.
    in_media: bool,
}

impl Size {
    fn values<E: Error>(&mut self, more: usize) -> Result<(), E> {
        self.values += more;
        match self.values > MOST_VALUES {
            true => Err(E::custom(format!("it has more than {MOST_VALUES} values, of which an object is {OBJECT_VALUES}"))),
            false => Ok(()),
        }
    }

    fn text<E: Error>(&mut self, text: &str) -> Result<(), E> {
        if !self.in_media || !is_base64(text) {
            self.text += text.len();
        }
        match self.text > MOST_TEXT {
            true => Err(E::custom(format!("its texts have more than {MOST_TEXT} bytes"))),
            false => Ok(()),
        }
    }
}

/// Whether a text can be a file: base64, as it is or in an address.
fn is_base64(text: &str) -> bool {
    let data = text.strip_prefix("data:").and_then(|rest| rest.split_once(',')).map_or(text, |(_, data)| data);
    data.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+/-_=".contains(&byte))
}

impl<'de> DeserializeSeed<'de> for &mut Size {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        self.values(1)?;
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for &mut Size {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<(), E> {
        self.text(text)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<(), A::Error> {
        while values.next_element_seed(&mut *self)?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<(), A::Error> {
        self.values(OBJECT_VALUES - 1)?;
        let mut keys = HashSet::new();
        let around = self.in_media;
        while let Some(Key(key)) = fields.next_key()? {
            self.in_media = false;
            self.text(&key)?;
            self.in_media = MEDIA.contains(&key.as_str());
            fields.next_value_seed(&mut *self)?;
            if let Some(twice) = keys.replace(key) {
                return Err(A::Error::custom(format!("the key `{}` occurs twice in an object", twice.escape_debug())));
            }
        }
        self.in_media = around;
        Ok(())
    }
}

#[derive(serde::Deserialize)]
struct Key(String);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_too_much_is_refused() {
        let wrong = |json: &str, told: &str| {
            let error = measure(json.as_bytes()).unwrap_err();
            assert!(error.contains(told) && error.len() < 300, "{error}");
        };
        wrong(r#"{"messages": [{"role": "user", "content": "a", "role": "system"}]}"#, "the key `role` occurs twice");
        wrong(r#"{"a": 1, "\u0061": 2}"#, "the key `a` occurs twice");
        wrong(&format!("[{}0]", "0,".repeat(MOST_VALUES)), "more than 500000 values");
        wrong(&format!("[{}[]]", "[],".repeat(MOST_VALUES)), "more than 500000 values");
        wrong(&format!("[{}{{}}]", "{},".repeat(MOST_VALUES / OBJECT_VALUES)), "more than 500000 values");
        wrong(&format!("{{\"x\": \"{}\"}}", "a b ".repeat(MOST_TEXT / 4 + 1)), "texts have more than");
        let long = "A".repeat(2 * MOST_TEXT);
        for media in [
            format!("{{\"url\": \"data:image/png;base64,{long}\"}}"),
            format!("{{\"data\": \"{long}\"}}"),
            format!("{{\"images\": [\"{long}\"]}}"),
        ] {
            assert!(measure(media.as_bytes()).is_ok());
        }
        // What only looks like a file, or stands behind one.
        for text in [
            format!("{{\"prompt\": \"{long}\"}}"),
            format!("[\"data:,{long}\"]"),
            format!("{{\"images\": {{\"x\": \"{long}\"}}}}"),
            format!("[{{\"url\": \"A\"}}, \"{long}\"]"),
            format!("{{\"url\": \"A\", \"{long}\": 1}}"),
        ] {
            wrong(&text, "texts have more than");
        }
        let media = format!("{{\"url\": \"data:image/png;base64,{long}\"}}");
        assert_eq!(measure(media.as_bytes()), Ok((OBJECT_VALUES + 1) * VALUE_BYTES));
        // Left to the parser that follows, with what was seen of it.
        assert_eq!(measure(b"[1,"), Ok(2 * VALUE_BYTES));
        for broken in ["", "{", "[1,", "nul", &"[".repeat(1000)] {
            assert!(measure(broken.as_bytes()).is_ok(), "{broken}");
        }
    }

    #[test]
    fn as_much_as_may_be_is_taken() {
        let measure = |json: String| measure(json.as_bytes());
        assert_eq!(measure(r#"{"a": [null, true, -1, 1, 0.5, "x"]}"#.into()), Ok((OBJECT_VALUES + 7) * VALUE_BYTES));
        assert_eq!(measure(format!("[{}0]", "0,".repeat(MOST_VALUES - 2))), Ok(MOST_VALUES * VALUE_BYTES));
        // Keys are texts too.
        let text = |bytes: usize| format!("{{\"x\": \"{}\"}}", " ".repeat(bytes - 1));
        assert!(measure(text(MOST_TEXT)).is_ok() && measure(text(MOST_TEXT + 1)).is_err());
    }
}

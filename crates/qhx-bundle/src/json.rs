//! Help for reading JSON that may be wrong: which field an error is about, and maps that refuse a key given twice.

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
use std::{collections::BTreeMap, fmt, marker::PhantomData};

/// The dotted path of the field that `error` is about: `programs.text.file`, `weights[1]` … The whole text is `(top level)`.
pub(crate) fn field_of(text: &str, error: &serde_json::Error) -> String {
    let mut steps = steps_before(text.as_bytes(), offset(text, error.line(), error.column()));
    // A missing field is noticed when its object ends: the last key seen there is a neighbour of it.
    let message = error.to_string();
    if let Some(missing) = message.strip_prefix("missing field `").and_then(|rest| rest.split('`').next()) {
        match steps.last_mut() {
            Some(Step::Key(key)) => *key = Some(missing.into()),
            _ => steps.push(Step::Key(Some(missing.into()))),
        }
    }
    let mut path = String::new();
    for step in steps {
        match step {
            Step::Key(Some(key)) if path.is_empty() => path = key,
            Step::Key(Some(key)) => path = format!("{path}.{key}"),
            Step::Key(None) => {}
            Step::Index(i) => path = format!("{path}[{i}]"),
        }
    }
    if path.is_empty() { "(top level)".into() } else { path }
}

enum Step {
    Key(Option<String>),
    Index(usize),
}

/// Where in `text` a line (from 1) and column (bytes of the line that were read) are.
fn offset(text: &str, line: usize, column: usize) -> usize {
    let start: usize = text.split_inclusive('\n').take(line.saturating_sub(1)).map(str::len).sum();
    start.saturating_add(column).min(text.len())
}

/// The objects and lists that are open at `end`, with the key or index reached in each. The text before `end` was read by a JSON parser already.
fn steps_before(text: &[u8], end: usize) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut at = 0;
    while at < end.min(text.len()) {
        match text[at] {
            b'{' => steps.push(Step::Key(None)),
            b'[' => steps.push(Step::Index(0)),
            // The last byte read may be the bracket at which an error was noticed: what it closes is still the place.
            b'}' | b']' if at + 1 < end => drop(steps.pop()),
            b',' => match steps.last_mut() {
                Some(Step::Key(key)) => *key = None,
                Some(Step::Index(i)) => *i += 1,
                None => {}
            },
            b'"' => {
                let start = at + 1;
                at = start;
                while at < text.len() && text[at] != b'"' {
                    at += if text[at] == b'\\' { 2 } else { 1 };
                }
                if let Some(Step::Key(key @ None)) = steps.last_mut() {
                    let name = String::from_utf8_lossy(&text[start..at.min(text.len())]);
                    *key = Some(name.chars().take(120).collect());
                }
            }
            _ => {}
        }
        at += 1;
    }
    steps
}

/// A map in which no key may stand twice: which of the two counts would be anybody's guess.
pub(crate) fn unique_map<'de, D, K, V>(deserializer: D) -> Result<BTreeMap<K, V>, D::Error>
where
    D: Deserializer<'de>,
    K: Deserialize<'de> + Ord + fmt::Display,
    V: Deserialize<'de>,
{
    struct Unique<K, V>(PhantomData<(K, V)>);
    impl<'de, K: Deserialize<'de> + Ord + fmt::Display, V: Deserialize<'de>> Visitor<'de> for Unique<K, V> {
        type Value = BTreeMap<K, V>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
            let mut map = BTreeMap::new();
            while let Some(key) = access.next_key::<K>()? {
                if map.contains_key(&key) {
                    return Err(A::Error::custom(format_args!("`{key}` appears twice")));
                }
                map.insert(key, access.next_value()?);
            }
            Ok(map)
        }
    }
    deserializer.deserialize_map(Unique(PhantomData))
}

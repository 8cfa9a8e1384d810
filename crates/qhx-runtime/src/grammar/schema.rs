//! JSON schemas as the grammar library takes them.

use super::wrong;
use crate::Error;
use serde_json::{Map, Value, json};

/// The formats that the standard defines. Any other is a note for people: it says nothing about which texts are right.
const FORMATS: [&str; 19] = [
    "date",
    "date-time",
    "duration",
    "email",
    "hostname",
    "idn-email",
    "idn-hostname",
    "ipv4",
    "ipv6",
    "iri",
    "iri-reference",
    "json-pointer",
    "regex",
    "relative-json-pointer",
    "time",
    "uri",
    "uri-reference",
    "uri-template",
    "uuid",
];
/// What names a draft of the standard.
const DRAFTS: [&str; 2] = ["json-schema.org/draft-0", "json-schema.org/draft/20"];
/// Keywords whose values are data and no schemas.
const DATA: [&str; 4] = ["const", "default", "enum", "examples"];

/// A schema with a say in how JSON is written: with single spaces, so that no answer is lost in blanks.
pub(super) fn written(schema: Value) -> Result<Value, Error> {
    let how = json!({ "whitespace_flexible": false, "item_separator": ", ", "key_separator": ": " });
    match schema {
        Value::Object(mut fields) => {
            // A draft that nobody knows is read as the newest.
            if fields.get("$schema").and_then(Value::as_str).is_some_and(|draft| !DRAFTS.iter().any(|known| draft.contains(known))) {
                fields.remove("$schema");
            }
            drop_notes(&mut fields);
            fields.entry("x-guidance").or_insert(how);
            Ok(Value::Object(fields))
        }
        // Everything.
        Value::Bool(true) => Ok(json!({ "x-guidance": how })),
        other => Err(wrong(format!("a JSON schema is an object, found {other}"))),
    }
}

/// Drops formats that are only notes.
fn drop_notes(schema: &mut Map<String, Value>) {
    let mut left = vec![schema];
    while let Some(schema) = left.pop() {
        if schema.get("format").and_then(Value::as_str).is_some_and(|format| !FORMATS.contains(&format)) {
            schema.remove("format");
        }
        for (_, below) in schema.iter_mut().filter(|(keyword, _)| !DATA.contains(&keyword.as_str())) {
            match below {
                Value::Object(below) => left.push(below),
                Value::Array(all) => left.extend(all.iter_mut().filter_map(Value::as_object_mut)),
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_dropped_and_nothing_else() {
        let schema = json!({
            "$schema": "https://json-schema.org/schema",
            "properties": { "path": { "type": "string", "format": "path" }, "day": { "type": "string", "format": "date" }, "format": { "const": { "format": "path" } } },
            "anyOf": [{ "format": "int32" }, { "format": "uri" }],
            "x-guidance": {},
        });
        let expected = json!({
            "properties": { "path": { "type": "string" }, "day": { "type": "string", "format": "date" }, "format": { "const": { "format": "path" } } },
            "anyOf": [{}, { "format": "uri" }],
            "x-guidance": {},
        });
        assert_eq!(written(schema).unwrap(), expected);
        let known = json!({ "$schema": "http://json-schema.org/draft-07/schema#", "x-guidance": {} });
        assert_eq!(written(known.clone()).unwrap(), known);
        assert!(written(json!(false)).is_err() && written(json!(true)).is_ok());
    }
}

//! How large a grammar may be. Compiling recurses from rule to rule and from schema to schema, so they are counted before.

use super::wrong;
use crate::Error;
use serde_json::{Deserializer, Value};

const MOST_BYTES: usize = 1 << 20;
/// How deep a schema may be nested.
const DEEPEST: usize = 128;
/// Values of all schemas of a grammar, those of them that are objects, and references.
const MOST_VALUES: usize = 100_000;
const MOST_OBJECTS: usize = 6_000;
const MOST_REFERENCES: usize = 2_000;
/// Lines in Lark's syntax: each begins a rule at most.
const MOST_LINES: usize = 8_000;

/// Checks a grammar that is a text and nothing else, such as a regular expression.
pub(super) fn check_text(text: &str) -> Result<(), Error> {
    at_most("bytes", text.len(), MOST_BYTES)
}

/// Checks a JSON schema, before it is cloned, written or compiled.
pub(super) fn check_schema(schema: &Value) -> Result<(), Error> {
    Counts::default().add(schema)
}

/// Checks a grammar in Lark's syntax with the JSON schemas in it.
pub(super) fn check_lark(text: &str) -> Result<(), Error> {
    const JSON: &str = "%json";
    check_text(text)?;
    at_most("lines", text.lines().count(), MOST_LINES)?;
    let (mut counts, mut rest) = (Counts::default(), text);
    while let Some(at) = rest.find(JSON) {
        rest = &rest[at + JSON.len()..];
        let mut values = Deserializer::from_str(rest).into_iter::<Value>();
        // Malformed JSON is reported when the grammar is compiled.
        if let Some(Ok(schema)) = values.next() {
            counts.add(&schema)?;
            rest = &rest[values.byte_offset()..];
        }
    }
    Ok(())
}

#[derive(Default)]
struct Counts {
    bytes: usize,
    values: usize,
    objects: usize,
    references: usize,
}

impl Counts {
    fn add(&mut self, schema: &Value) -> Result<(), Error> {
        let mut left = vec![(schema, 1)];
        while let Some((value, depth)) = left.pop() {
            self.values += 1;
            if depth > DEEPEST {
                return Err(wrong(format!("its JSON schema is nested more than {DEEPEST} deep")));
            }
            match value {
                Value::Object(fields) => {
                    self.objects += 1;
                    self.references += ["$ref", "$dynamicRef", "$recursiveRef"].iter().filter(|name| fields.contains_key(**name)).count();
                    self.bytes += fields.keys().map(String::len).sum::<usize>();
                    left.extend(fields.values().map(|below| (below, depth + 1)));
                }
                Value::Array(all) => left.extend(all.iter().map(|below| (below, depth + 1))),
                Value::String(text) => self.bytes += text.len(),
                _ => {}
            }
        }
        at_most("bytes", self.bytes, MOST_BYTES)?;
        at_most("JSON values", self.values, MOST_VALUES)?;
        at_most("JSON objects", self.objects, MOST_OBJECTS)?;
        at_most("references", self.references, MOST_REFERENCES)
    }
}

fn at_most(what: &str, count: usize, most: usize) -> Result<(), Error> {
    match count > most {
        true => Err(wrong(format!("it has {count} {what}, at most {most} are allowed"))),
        false => Ok(()),
    }
}

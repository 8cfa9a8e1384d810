//! How large a grammar may be. Compiling recurses from rule to rule and from schema to schema, copies what schemas combine, and
//! cannot be stopped, so all of that is counted before.

use super::wrong;
use crate::Error;
use serde_json::{Deserializer, Map, Value};
use std::collections::HashMap;

const MOST_BYTES: usize = 1 << 20;
/// How deep a schema may be nested.
const DEEPEST: usize = 128;
/// Values of all schemas of a grammar, those of them that are schemas or other objects, and references.
const MOST_VALUES: usize = 100_000;
const MOST_OBJECTS: usize = 6_000;
const MOST_REFERENCES: usize = 2_000;
/// Names in `patternProperties`, in all and of one object: of an object each pair of them is compared.
const MOST_PATTERNS: usize = 512;
const MOST_PATTERNS_OF_ONE: usize = 64;
/// Values that combining schemas may copy: `allOf` with `anyOf`, for example, copies the first for each alternative of the second.
/// Of 686 schemas that npm packages carry, none comes to more than 3,400.
const MOST_COPIES: usize = 100_000;
/// Pairs of alternatives in `oneOf`, which are all compared.
const MOST_PAIRS: usize = 1_000_000;
/// References that are followed from one to the next where schemas are combined.
const MOST_FOLLOWED: usize = 64;
/// Places in a grammar that look like the beginning of a schema and are none.
const MOST_MALFORMED: usize = 64;
/// Lines in Lark's syntax: each begins a rule at most.
const MOST_LINES: usize = 8_000;

/// Checks a grammar that is a text and nothing else, such as a regular expression.
pub(super) fn check_text(text: &str) -> Result<(), Error> {
    at_most("bytes", text.len(), MOST_BYTES)
}

/// Checks a JSON schema, before it is cloned, written or compiled.
pub(super) fn check_schema(schema: &Value) -> Result<(), Error> {
    Counts::default().add(schema)?;
    Combining::new(schema).check()
}

/// Checks a grammar in Lark's syntax with the JSON schemas in it.
pub(super) fn check_lark(text: &str) -> Result<(), Error> {
    const JSON: &str = "%json";
    check_text(text)?;
    at_most("lines", text.lines().count(), MOST_LINES)?;
    let (mut counts, mut malformed) = (Counts::default(), 0);
    // What follows the keyword is a schema, or the rest of a literal in which somebody wrote the keyword: both are looked at, so
    // that no literal hides a schema.
    for (at, _) in text.match_indices(JSON) {
        match Deserializer::from_str(&text[at + JSON.len()..]).into_iter::<Value>().next() {
            Some(Ok(schema)) => {
                counts.add(&schema)?;
                Combining::new(&schema).check()?;
            }
            // Malformed JSON is reported when the grammar is compiled.
            _ => malformed += 1,
        }
        at_most("malformed JSON schemas", malformed, MOST_MALFORMED)?;
    }
    Ok(())
}

#[derive(Default)]
struct Counts {
    bytes: usize,
    values: usize,
    objects: usize,
    references: usize,
    patterns: usize,
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
                    let patterns = fields.get("patternProperties").and_then(Value::as_object).map_or(0, Map::len);
                    at_most("names in one patternProperties", patterns, MOST_PATTERNS_OF_ONE)?;
                    self.patterns += patterns;
                    self.bytes += fields.keys().map(String::len).sum::<usize>();
                    left.extend(fields.values().map(|below| (below, depth + 1)));
                }
                Value::Array(all) => left.extend(all.iter().map(|below| (below, depth + 1))),
                Value::String(text) => self.bytes += text.len(),
                // A schema that everything follows, or nothing.
                Value::Bool(_) => self.objects += 1,
                _ => {}
            }
        }
        at_most("bytes", self.bytes, MOST_BYTES)?;
        at_most("JSON values", self.values, MOST_VALUES)?;
        at_most("JSON objects", self.objects, MOST_OBJECTS)?;
        at_most("references", self.references, MOST_REFERENCES)?;
        at_most("names in patternProperties", self.patterns, MOST_PATTERNS)
    }
}

/// What it costs to combine the parts of schemas. The library merges them one by one and copies each for all alternatives of the
/// others, so a few lines can stand for millions of schemas.
struct Combining<'a> {
    whole: &'a Value,
    /// What references refer to; none for those that are being looked at.
    known: HashMap<&'a str, Option<Weight>>,
    copies: usize,
    pairs: usize,
}

/// How large a schema is once it is compiled, where it does not exceed the limits.
#[derive(Clone, Copy)]
struct Weight {
    values: usize,
    /// Schemas of which any may be followed.
    alternatives: usize,
    /// Names in the `patternProperties` of each.
    patterns: usize,
}

/// Keywords that say nothing about what follows a schema, or whose schemas are used where they are referred to.
const NOTES: [&str; 11] =
    ["$schema", "$id", "$anchor", "$comment", "$defs", "definitions", "title", "description", "default", "examples", "x-guidance"];

/// Keywords whose schemas are combined with the rest of the schema that they stand in.
const APPLIED: [&str; 6] = ["allOf", "anyOf", "oneOf", "enum", "const", "$ref"];

/// A schema without others in it.
const ONE: Weight = Weight { values: 1, alternatives: 1, patterns: 0 };

impl<'a> Combining<'a> {
    fn new(whole: &'a Value) -> Self {
        Self { whole, known: HashMap::new(), copies: 0, pairs: 0 }
    }

    fn check(mut self) -> Result<(), Error> {
        self.weigh(self.whole, false, 0).map(drop)
    }

    /// Weighs a schema, which is no deeper than is allowed. What it refers to is copied only where it is combined with something.
    fn weigh(&mut self, schema: &'a Value, combined: bool, followed: usize) -> Result<Weight, Error> {
        let fields = match schema {
            Value::Object(fields) => fields,
            Value::Array(all) => return self.side_by_side(all, followed),
            _ => return Ok(ONE),
        };
        let parts = fields.iter().map(|(keyword, below)| match keyword.as_str() {
            "allOf" => below.as_array().map_or(0, Vec::len),
            "anyOf" | "oneOf" | "enum" | "const" | "$ref" => 1,
            _ => 0,
        });
        let is_own = |keyword: &String| !NOTES.contains(&keyword.as_str()) && !APPLIED.contains(&keyword.as_str());
        let combines = parts.sum::<usize>() + usize::from(fields.keys().any(is_own)) > 1;
        let combined = combined || combines;
        let (mut own, mut parts) = (ONE, Vec::new());
        for (keyword, below) in fields {
            match (keyword.as_str(), below) {
                ("allOf", Value::Array(all)) => {
                    for part in all {
                        parts.push(self.weigh(part, combined, followed)?);
                    }
                }
                ("anyOf" | "oneOf", Value::Array(all)) => {
                    let mut any = Weight { alternatives: 0, ..ONE };
                    for part in all {
                        let part = self.weigh(part, combined, followed)?;
                        any.values = any.values.saturating_add(part.values);
                        any.alternatives = any.alternatives.saturating_add(part.alternatives);
                        any.patterns = any.patterns.max(part.patterns);
                    }
                    if keyword == "oneOf" {
                        self.pairs = self.pairs.saturating_add(any.alternatives.saturating_mul(any.alternatives) / 2);
                    }
                    parts.push(any);
                }
                ("enum", Value::Array(all)) => {
                    parts.push(Weight { alternatives: all.len(), ..self.side_by_side(all, followed)? });
                }
                ("$ref", _) if combined => parts.push(self.target(below, followed + 1)?),
                // Copied where they are referred to.
                ("$defs" | "definitions", Value::Object(by_name)) => _ = self.side_by_side(by_name.values(), followed)?,
                ("properties" | "patternProperties", Value::Object(by_name)) => {
                    own.patterns += if keyword == "patternProperties" { by_name.len() } else { 0 };
                    own.values = own.values.saturating_add(self.side_by_side(by_name.values(), followed)?.values);
                }
                _ => own.values = own.values.saturating_add(self.weigh(below, false, followed)?.values),
            }
        }
        parts.push(own);
        let alternatives = parts.iter().fold(1_usize, |product, part| product.saturating_mul(part.alternatives.max(1)));
        let copied = |part: &Weight| part.values.saturating_mul(alternatives / part.alternatives.max(1));
        let values = parts.iter().fold(0_usize, |sum, part| sum.saturating_add(copied(part)));
        let patterns = parts.iter().map(|part| part.patterns).sum::<usize>();
        if combines {
            // Each part that is added compares all names anew.
            let compared = patterns.saturating_pow(3).saturating_mul(alternatives);
            self.copies = self.copies.saturating_add(values).saturating_add(compared);
        }
        at_most("values that allOf, anyOf, oneOf and $ref multiply to", self.copies, MOST_COPIES)?;
        at_most("pairs of alternatives in oneOf", self.pairs, MOST_PAIRS)?;
        Ok(Weight { values, alternatives, patterns })
    }

    /// Weighs schemas of which each is for something else.
    fn side_by_side(&mut self, all: impl IntoIterator<Item = &'a Value>, followed: usize) -> Result<Weight, Error> {
        let mut weight = ONE;
        for below in all {
            weight.values = weight.values.saturating_add(self.weigh(below, false, followed)?.values);
        }
        Ok(weight)
    }

    /// Weighs what a reference refers to.
    fn target(&mut self, reference: &'a Value, followed: usize) -> Result<Weight, Error> {
        let Some(pointer) = reference.as_str().and_then(|reference| reference.strip_prefix('#')) else { return Ok(ONE) };
        if let Some(known) = self.known.get(pointer) {
            // What refers to itself is refused when it is compiled.
            return Ok(known.unwrap_or(ONE));
        }
        let Some(target) = self.whole.pointer(pointer) else { return Ok(ONE) };
        at_most("references to references that are combined", followed, MOST_FOLLOWED)?;
        self.known.insert(pointer, None);
        let weight = self.weigh(target, true, followed)?;
        self.known.insert(pointer, Some(weight));
        Ok(weight)
    }
}

fn at_most(what: &str, count: usize, most: usize) -> Result<(), Error> {
    match count > most {
        true => Err(wrong(format!("it has {count} {what}, at most {most} are allowed"))),
        false => Ok(()),
    }
}

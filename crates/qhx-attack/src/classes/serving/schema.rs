//! JSON schemas: chains of references, many properties, deep nesting, and keywords where they do not belong.

use super::of_schema;
use crate::{classes::Case, mutate::mutate_json, random::Random, seeds::Seeds};
use serde_json::{Map, Value, json};

pub(super) fn make(_: &Seeds, random: &mut Random) -> Case {
    let mut schema = shape(random);
    if random.one_in(3) {
        // What is no JSON any more is the class `body`.
        schema = serde_json::from_slice(&mutate_json(schema.to_string().as_bytes(), random)).unwrap_or(schema);
    }
    let tokens = random.below(8) + 1;
    of_schema(schema, tokens, random)
}

fn fields(count: usize, of: impl Fn(usize) -> Value) -> Value {
    (0..count).map(|n| (format!("p{n}"), of(n))).collect::<Map<String, Value>>().into()
}

fn shape(random: &mut Random) -> Value {
    let (n, deep, large) = (random.length(10_000), random.length(40), random.length(1_000_000_000));
    let reference = |n: usize| json!({ "$ref": format!("#/$defs/p{n}") });
    // The chain's own definitions, and its end.
    let chain = |count: usize, of: &dyn Fn(Value) -> Value| {
        let mut defs = fields(count, |n| of(reference(n + 1)));
        defs[format!("p{count}")] = json!({ "type": "null" });
        json!({ "$ref": "#/$defs/p0", "$defs": defs })
    };
    let nested = |count: usize, of: &dyn Fn(Value) -> Value| (0..count).fold(json!({ "type": "integer" }), |inner, _| of(inner));
    // Deeper than JSON may be read, too.
    let levels = n.min(200);
    match random.below(20) {
        0 => chain(n, &|next| json!({ "type": "array", "items": next })),
        1 => chain(n, &|next| json!({ "type": "object", "properties": { "a": next }, "required": ["a"] })),
        2 => chain(n, &|next| json!({ "allOf": [next] })),
        3 => chain(deep, &|next| json!({ "anyOf": [next, next] })),
        4 => chain(deep, &|next| json!({ "allOf": [next, next] })),
        5 => chain(deep, &|next| json!({ "type": "array", "prefixItems": [next, next], "minItems": 2 })),
        6 => json!({ "type": "object", "properties": fields(n, |_| json!({ "type": "null" })), "additionalProperties": false }),
        7 => {
            json!({ "type": "object", "properties": fields(n, |_| json!({})), "required": (0..n).map(|n| format!("p{n}")).collect::<Vec<_>>() })
        }
        8 => nested(levels, &|inner| json!({ "type": "object", "properties": { "a": inner } })),
        9 => nested(levels, &|inner| json!({ "type": "array", "items": inner, "minItems": 1 })),
        10 => nested(levels, &|inner| json!({ "not": inner })),
        11 => json!({ "type": "array", "prefixItems": vec![json!({ "type": "boolean" }); n], "minItems": n }),
        12 => json!({ "enum": (0..n).map(|n| format!("v{n}")).collect::<Vec<_>>() }),
        13 => json!({ "const": nested(levels, &|inner| json!([inner])) }),
        14 => json!({ "type": "array", "items": { "type": "string", "minLength": large }, "minItems": large, "uniqueItems": true }),
        15 => json!({ "type": "integer", "multipleOf": large, "minimum": -1e300, "exclusiveMaximum": large }),
        16 => {
            json!({ "oneOf": (0..n.min(300)).map(|n| json!({ "type": "object", "properties": { "a": { "const": n } } })).collect::<Vec<_>>() })
        }
        17 => random
            .pick(&[
                json!({ "$ref": "#" }),
                json!({ "$ref": "https://example.com/schema.json" }),
                json!({ "$ref": "file:///etc/passwd" }),
                json!({ "$id": "a", "$dynamicRef": "#b", "$dynamicAnchor": "b" }),
                json!({ "anyOf": [{ "$ref": "#" }, { "$ref": "#" }] }),
                json!({ "type": "object", "patternProperties": { "(a*)*b": {}, "^": { "$ref": "#" } }, "propertyNames": false }),
                json!({ "if": { "$ref": "#" }, "then": false, "else": true, "unevaluatedProperties": false }),
                json!(false),
                json!([]),
                json!("string"),
                json!({ "type": ["object", "array", 3] }),
            ])
            .clone(),
        18 => json!({ "type": "string", "pattern": format!("^({}){{{deep}}}$", "[a-z]?".repeat(deep)), "maxLength": n }),
        _ => {
            let word = json!({ "type": "string", "format": "date-time" });
            json!({ "type": "object", "properties": { "name": word, "list": { "type": "array", "items": { "enum": [1, null, "x"] } } },
                "required": ["name", "list"], "additionalProperties": false })
        }
    }
}

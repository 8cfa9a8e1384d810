//! Answers that have hardly a choice: long texts that must come, of which a few tokens are wanted.

use super::{formatted, of_schema};
use crate::{classes::Case, random::Random, seeds::Seeds};
use serde_json::json;

pub(super) fn make(_: &Seeds, random: &mut Random) -> Case {
    let (n, tokens) = (random.length(200_000), random.below(4) + 1);
    let text = random.word(&["a", "zq9-", "\u{e9}", "\u{1f600}", "\"", "\n", "the ", "\u{0}"]).repeat(n);
    let schema = match random.below(9) {
        0 => json!({ "const": text }),
        1 => json!({ "enum": [text] }),
        2 => json!({ "type": "object", "properties": { text: { "type": "null" } }, "minProperties": 1, "additionalProperties": false }),
        3 => json!({ "type": "array", "prefixItems": vec![json!({ "const": "abc" }); n.min(5000)], "minItems": n.min(5000) }),
        4 => json!({ "type": "string", "minLength": n, "maxLength": n }),
        5 => json!({ "const": vec!["abc"; n] }),
        6 => {
            return formatted(
                json!({ "type": "regex", "regex": format!("{}{{{n}}}", random.word(&["a", "(ab)", "\\."])) }),
                tokens,
                random,
            );
        }
        7 => {
            let literal: String = text.chars().filter(|letter| letter.is_alphanumeric() || *letter == ' ').collect();
            return formatted(json!({ "type": "regex", "regex": literal }), tokens, random);
        }
        _ => {
            let deep = random.length(40);
            let doublings: String = (0..deep).map(|n| format!("r{n}: r{0} r{0}\n", n + 1)).collect();
            let grammar = format!("start: r0\n{doublings}r{deep}: \"ab\"\n");
            return formatted(json!({ "type": "lark", "grammar": grammar }), tokens, random);
        }
    };
    of_schema(schema, tokens, random)
}

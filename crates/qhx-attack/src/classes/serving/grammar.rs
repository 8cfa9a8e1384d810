//! Lark grammars and regular expressions: long, deep, doubling, recursive, without any text, and none at all.

use super::formatted;
use crate::{classes::Case, mutate::mutate_bytes, random::Random, seeds::Seeds};
use serde_json::json;

const GOOD: [&str; 4] = [
    "start: \"yes\" | \"no\"\n",
    "start: item (\",\" item)*\nitem: NAME \"=\" NUMBER\nNAME: /[a-z]+/\nNUMBER: /[0-9]{1,3}/\n%ignore / /\n",
    "%llguidance {}\nstart: \"a\" value \"b\"\nvalue: %json {\"type\": \"object\", \"properties\": {\"x\": {\"type\": \"integer\"}}}\n",
    "start: sum\nsum: product | sum \"+\" product\nproduct: INT | product \"*\" INT\n%import common.INT\n",
];

pub(super) fn make(_: &Seeds, random: &mut Random) -> Case {
    let tokens = random.below(8) + 1;
    let format = match random.one_in(3) {
        true => json!({ "type": "regex", "regex": regex(random) }),
        false => json!({ "type": "lark", "grammar": lark(random) }),
    };
    formatted(format, tokens, random)
}

pub(super) fn lark(random: &mut Random) -> String {
    let (n, deep) = (random.length(20_000), random.length(60));
    let rules = |count: usize, of: &dyn Fn(usize) -> String| (0..count).map(|n| format!("r{n}: {}\n", of(n))).collect::<String>();
    match random.below(12) {
        0 => format!("start: r0\n{}r{n}: \"b\"\n", rules(n, &|n| format!("\"a\" r{}", n + 1))),
        1 => format!("start: r0\n{}r{deep}: \"ab\"\n", rules(deep, &|n| format!("r{0} r{0}", n + 1))),
        2 => format!("start: r0\n{}r{deep}: \"ab\"\n", rules(deep, &|n| format!("r{0} | r{0} r{0} | r{0}?", n + 1))),
        3 => format!("start: {}\n", (0..n).map(|n| format!("\"x{n}\"")).collect::<Vec<_>>().join(" | ")),
        4 => format!("start: {}\"a\"{}\n", "(".repeat(n), random.word(&[")", ")*", ")+", ")?"]).repeat(n)),
        5 => format!("start: T0\n{}T{deep}: \"a\"\n", (0..deep).map(|n| format!("T{n}: T{0} T{0}\n", n + 1)).collect::<String>()),
        6 => format!(
            "start: {}\n",
            random.word(&["start", "start start", "start \"a\" | \"a\"", "(start?)*", "\"\"", "a\na: b?\nb: a?", "/x*/*"])
        ),
        7 => format!("start: A\nA: /{}/\n", regex(random).replace('/', "\\/")),
        8 => format!("root ::= {}\n", (0..n).map(|n| format!("\"a{n}\"")).collect::<Vec<_>>().join(" | ")),
        9 => format!("start: \"a\"{{{}}}\n", random.length(1_000_000_000)),
        _ => {
            let mut bytes = random.pick(&GOOD).as_bytes().to_vec();
            mutate_bytes(&mut bytes, usize::MAX, random.pick(&GOOD).as_bytes(), random);
            String::from_utf8_lossy(&bytes).into_owned()
        }
    }
}

fn regex(random: &mut Random) -> String {
    let (n, deep) = (random.length(20_000), random.length(40));
    let atom =
        random.word(&["a", "[^a]", ".", "\\w", "\\p{L}", "(ab|cd)", "[\\s\\S]", "\u{1f600}", "(?i:ß)", "\\b", "^", "$", "(?=a)", "\\1"]);
    match random.below(11) {
        0 => format!("{atom}{{{n}}}"),
        1 => format!("({atom}{{{deep}}}){{{deep}}}"),
        2 => format!("{}{atom}{}", "(".repeat(n), random.word(&[")*", ")+", ")?", "){2}", ")"]).repeat(n)),
        3 => format!("({}|{atom})*", (0..n).map(|n| n.to_string()).collect::<Vec<_>>().join("|")),
        4 => random
            .word(&["[^\\s\\S]", "", "a{2,1}", "(", "[z-a]", "\\", "(?P<n>a)(?P=n)", "a{99999999999}", "\\x{110000}", "(?R)"])
            .to_owned(),
        5 => format!("{atom}?").repeat(deep) + &atom.repeat(deep),
        6 => format!("(.*{atom}.*){{{deep}}}"),
        7 => format!("[ab]*a[ab]{{{}}}", random.length(200)),
        8 => (0..n).map(|n| char::from_u32(0x4e00 + n as u32).unwrap_or('x')).collect(),
        9 => format!("(?&x){atom}&{atom}~({atom})"),
        _ => {
            let mut bytes = format!("({atom}[0-9]{{1,3}}|x+?)*").into_bytes();
            mutate_bytes(&mut bytes, usize::MAX, b"(?:a|b)*", random);
            String::from_utf8_lossy(&bytes).into_owned()
        }
    }
}

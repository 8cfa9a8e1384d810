//! Answers that follow a grammar, drawn at random among all that it allows, with tokenizers of several kinds.

use super::{Grammars, Shape, follower, size};
use crate::{
    Constraint, LogitProcessor, Structure,
    text::{
        Tokenizer,
        reply::{Reasoning, ReplyFormat, Tools},
    },
};
use qhx_ir::{IdMask, random::uniform};
use serde_json::{Value, json};
use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

/// What an answer follows.
fn structures() -> Vec<Structure> {
    let person = json!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "maxLength": 40 },
            "größe_in_centimetres": { "type": "integer", "minimum": 0, "maximum": 300 },
            "born": { "type": "string", "format": "date" },
            "state": { "enum": ["employed", "employed part-time", "unemployed", "\u{00fc}ber 65"] },
            "address": { "type": "object", "properties": { "street": { "type": "string", "pattern": "^[A-Z][a-z]+ [0-9]+$" } }, "required": ["street"], "additionalProperties": false },
            "tags": { "type": "array", "items": { "type": "string", "maxLength": 12 }, "maxItems": 4 },
        },
        "required": ["name", "größe_in_centimetres", "born", "state", "address", "tags"],
        "additionalProperties": false,
    });
    let tools = json!([{ "type": "function", "function": { "name": "tell_the_weather", "parameters": person } }]);
    let constrained = |constraint| Structure { constraint: Some(constraint), ..Structure::default() };
    let calls = Structure {
        tools: Some(Tools::from_json(&tools).unwrap()),
        tool_choice: crate::ToolChoice::Required,
        one_call: true,
        ..Structure::default()
    };
    vec![constrained(Constraint::JsonSchema(person)), constrained(Constraint::JsonObject), calls]
}

fn grammars(tokenizer: &Tokenizer) -> Grammars {
    let eos = tokenizer.special_ids().iter().copied().find(|id| tokenizer.token_bytes(*id).is_some()).unwrap();
    Grammars::new(tokenizer, tokenizer.id_limit(), &[eos]).unwrap()
}

fn shape(grammars: &Grammars, structure: &Structure) -> Shape {
    let format = ReplyFormat { reasoning: None, calls: None };
    Shape::new(grammars, &format, structure, Reasoning::Over).unwrap().unwrap()
}

/// One of the ids that are allowed.
fn drawn(mask: &IdMask, seed: u64, draw: u64) -> u32 {
    let allowed: Vec<u32> = (0..mask.0.len() as u32 * 32).filter(|id| mask.allows(*id)).collect();
    allowed[(uniform(seed, draw) * allowed.len() as f64) as usize]
}

#[test]
fn what_is_forced_is_all_that_may_come() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures");
    let folders = fs::read_dir(fixtures).unwrap().map(|folder| folder.unwrap().path());
    for file in folders.map(|folder| folder.join("tokenizer.json")).filter(|file| file.exists()) {
        let family = file.display();
        let tokenizer = Tokenizer::from_bytes(&fs::read(&file).unwrap()).unwrap();
        let grammars = grammars(&tokenizer);
        let (mut forced_tokens, mut finished) = (0, 0);
        for (number, structure) in structures().iter().enumerate() {
            for seed in 0..4 {
                // The same answer, with what is forced taken at once and asked for token by token.
                let (mut quick, mut slow) = (shape(&grammars, structure), shape(&grammars, structure));
                let mut ids = vec![0];
                while ids.len() < 600 {
                    let mask = slow.mask(&ids).unwrap();
                    assert_eq!(quick.mask(&ids).unwrap().0, mask.0);
                    let id = drawn(&mask, seed, ids.len() as u64);
                    if grammars.eos.contains(&id) {
                        finished += 1;
                        break;
                    }
                    let forced = quick.forced(&ids, id, usize::MAX);
                    ids.push(id);
                    forced_tokens += forced.len();
                    for id in forced {
                        let mask = slow.mask(&ids).unwrap();
                        assert_eq!(mask.0.iter().map(|word| word.count_ones()).sum::<u32>(), 1, "{family}: more than {id} is allowed");
                        assert!(mask.allows(id));
                        ids.push(id);
                    }
                }
                let bytes: Vec<u8> = ids[1..].iter().flat_map(|id| tokenizer.token_bytes(*id).unwrap()).collect();
                if number == 0 && ids.len() < 600 {
                    let value: Value = serde_json::from_slice(&bytes).unwrap();
                    assert!(value["größe_in_centimetres"].is_u64(), "{value}");
                }
            }
        }
        assert!(forced_tokens > 100 && finished > 4, "{family}: {forced_tokens} tokens forced, {finished} answers finished");
    }
}

/// How many tokens are forced after the first one where three are of use.
fn forced_of_three(grammars: &Grammars, structure: &Structure) -> usize {
    let mut shape = shape(grammars, structure);
    let mask = shape.mask(&[0]).unwrap();
    shape.forced(&[0], drawn(&mask, 1, 0), 3).len()
}

fn any_tokenizer() -> Tokenizer {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures");
    let mut files: Vec<PathBuf> = fs::read_dir(fixtures).unwrap().map(|folder| folder.unwrap().path().join("tokenizer.json")).collect();
    files.sort();
    let file = files.iter().find(|file| file.exists()).unwrap();
    Tokenizer::from_bytes(&fs::read(file).unwrap()).unwrap()
}

/// What recursed once: chains of rules and references, wide objects, deep schemas. Each is followed or refused, on a thread with little stack.
#[test]
fn large_grammars_are_followed_or_refused() {
    let lark = |rules: usize| {
        let chain: String = (1..rules).map(|n| format!("r{n}: \"a\" r{}\n", n + 1)).collect();
        Constraint::Lark(format!("start: r1\n{chain}r{rules}: \"b\"\n"))
    };
    let references = |count: usize| {
        let next = |n: usize| json!({ "type": "array", "items": { "$ref": format!("#/$defs/d{n}") } });
        let mut defs: serde_json::Map<String, Value> = (1..count).map(|n| (format!("d{n}"), next(n + 1))).collect();
        defs.insert(format!("d{count}"), json!({ "type": "null" }));
        Constraint::JsonSchema(json!({ "$ref": "#/$defs/d1", "$defs": defs }))
    };
    let wide = |count: usize| {
        let properties: serde_json::Map<String, Value> = (0..count).map(|n| (format!("p{n}"), json!({ "type": "null" }))).collect();
        let required: Vec<&String> = properties.keys().collect();
        Constraint::JsonSchema(json!({ "type": "object", "required": required, "properties": properties, "additionalProperties": false }))
    };
    let optional = |count: usize| {
        let properties: serde_json::Map<String, Value> = (0..count).map(|n| (format!("p{n}"), json!({ "type": "null" }))).collect();
        Constraint::JsonSchema(json!({ "type": "object", "properties": properties, "additionalProperties": false }))
    };
    let any = |count: usize| {
        let properties: serde_json::Map<String, Value> = (0..count).map(|n| (format!("p{n}"), json!(true))).collect();
        Constraint::JsonSchema(json!({ "type": "object", "properties": properties }))
    };
    let patterns = |count: usize| {
        let patterns: serde_json::Map<String, Value> = (0..count).map(|n| (format!("^a{n}$"), json!({ "type": "null" }))).collect();
        Constraint::JsonSchema(json!({ "type": "object", "patternProperties": patterns, "additionalProperties": false }))
    };
    let hidden = |constraint: Constraint| match constraint {
        Constraint::JsonSchema(schema) => Constraint::Lark(format!("start: \"%json\" %json {schema}\n")),
        _ => unreachable!(),
    };
    // Put together by hand: `json!` copies what it is given, all the way down.
    let around = |below: Value| Value::Object([("not".to_owned(), below)].into_iter().collect());
    let deep = move |depth: usize| Constraint::JsonSchema((0..depth).fold(json!({ "type": "null" }), |below, _| around(below)));
    let embedded = move |count: usize| match wide(count) {
        Constraint::JsonSchema(schema) => Constraint::Lark(format!("start: %json {schema}\n")),
        _ => unreachable!(),
    };
    let small_stack = thread::Builder::new().stack_size(512 << 10);
    let work = move || {
        let grammars = grammars(&any_tokenizer());
        for (what, constraint, refused) in [
            ("a chain of 657 rules", lark(657), None),
            ("a chain of 7,000 rules", lark(7000), None),
            ("a chain of 100,000 rules", lark(100_000), Some("")),
            ("a chain of 287 references", references(287), None),
            ("a chain of 1,900 references", references(1900), None),
            ("a chain of 2,500 references", references(2500), Some("references, at most")),
            ("an object with 3,000 properties", wide(3000), None),
            ("an object with 6,751 properties", wide(6751), Some("JSON objects, at most")),
            ("an object with 300 optional properties", optional(300), None),
            ("an object with 1,500 optional properties", optional(1500), Some("too many things at one place")),
            ("an object with 30,000 properties", wide(30_000), Some("JSON objects, at most")),
            ("a schema in a grammar", embedded(30_000), Some("JSON objects, at most")),
            ("90,000 properties of any kind", any(90_000), Some("JSON objects, at most")),
            ("a schema after a literal with its keyword", hidden(references(2500)), Some("references, at most")),
            ("5,000 patterns", patterns(5000), Some("names in one patternProperties, at most")),
            ("60 patterns", patterns(60), None),
            ("a schema nested 5,000 deep", deep(5000), Some("nested more than 128 deep")),
            ("brackets nested 30,000 deep", Constraint::Lark(format!("start: {}\"a\"", "(".repeat(30_000))), Some("")),
            ("groups nested 30,000 deep", Constraint::Regex("(".repeat(30_000)), Some("")),
            ("nothing that could be followed", Constraint::Regex("[^\\s\\S]".to_owned()), Some("")),
            ("2 MB", Constraint::Regex("a".repeat(2 << 20)), Some("2097152 bytes, at most 1048576")),
        ] {
            match (grammars.follower(&constraint), refused) {
                (Ok(_), None) => {}
                (Err(error), Some(told)) => {
                    let error = error.to_string();
                    assert!(error.contains(told) && error.len() < 500, "{what}: {error}");
                }
                (Ok(_), Some(_)) => panic!("{what} is followed"),
                (Err(error), None) => panic!("{what}: {error}"),
            }
            // The schema itself is dropped here: Value recurses, on a stack of its own.
            thread::Builder::new().stack_size(64 << 20).spawn(move || drop(constraint)).unwrap().join().unwrap();
        }
    };
    small_stack.spawn(work).unwrap().join().unwrap();
}

/// Schemas that combine others are copied for each alternative: what would come to millions is refused before, and what people write
/// is not.
#[test]
fn schemas_that_multiply_are_refused() {
    let any_of = |n: usize| json!({ "anyOf": [{ "required": [format!("a{n}")] }, { "required": [format!("b{n}")] }] });
    let pairs = |count: usize| json!({ "type": "object", "allOf": (0..count).map(any_of).collect::<Vec<_>>() });
    let named = |count: usize| {
        let properties: serde_json::Map<String, Value> = (0..count).map(|n| (format!("p{n}"), json!(true))).collect();
        json!({ "type": "object", "properties": properties })
    };
    let wide = json!({ "anyOf": (0..2900).map(|n| json!({ "required": [format!("p{n}")] })).collect::<Vec<_>>(), "allOf": [named(2900)] });
    let one_of = |count: usize| {
        let kind = |n: usize| json!({ "properties": { "kind": { "const": n.to_string() } }, "required": ["kind"] });
        json!({ "oneOf": (0..count).map(kind).collect::<Vec<_>>() })
    };
    let patterns = |count: usize| {
        let one = |n: usize| json!({ "type": "object", "patternProperties": { format!("^a{n}$"): { "type": "null" } } });
        json!({ "allOf": (0..count).map(one).collect::<Vec<_>>() })
    };
    let doubled = |count: usize| {
        let next = |n: usize| json!({ "allOf": [any_of(n), { "$ref": format!("#/$defs/d{}", n + 1) }] });
        let mut definitions: serde_json::Map<String, Value> = (0..count).map(|n| (format!("d{n}"), next(n))).collect();
        definitions.insert(format!("d{count}"), json!({ "type": "object" }));
        json!({ "$ref": "#/$defs/d0", "minProperties": 1, "$defs": definitions })
    };
    for (what, schema) in [
        ("pairs", pairs(30)),
        ("a wide object", wide),
        ("alternatives", one_of(5000)),
        ("references", doubled(40)),
        ("longer", doubled(200)),
    ] {
        let began = Instant::now();
        let error = size::check_schema(&schema).unwrap_err().to_string();
        assert!(error.contains("at most"), "{what}: {error}");
        assert!(began.elapsed() < Duration::from_secs(1), "{what}: {:?}", began.elapsed());
    }
    let base = json!({ "type": "object", "properties": { "id": { "type": "string" }, "next": { "$ref": "#/$defs/node" } } });
    let node = json!({ "allOf": [{ "$ref": "#/$defs/base" }, { "type": "object", "properties": { "kind": { "type": "string", "enum": vec!["a"; 500] } } }] });
    let inherited = json!({ "$ref": "#/$defs/node", "$defs": { "base": base, "node": node } });
    for schema in [pairs(6), one_of(300), patterns(20), doubled(8), inherited] {
        size::check_schema(&schema).unwrap();
    }
}

/// However long a text is that must come, each step looks only a little ahead, and the whole of it comes out.
#[test]
fn long_forced_texts_are_taken_in_parts() {
    let grammars = grammars(&any_tokenizer());
    let text = "zq9-".repeat(2000);
    let doublings: String = (1..30).map(|n| format!("r{n}: r{} r{}\n", n + 1, n + 1)).collect();
    let tuple: Vec<Value> = (0..1000).map(|n| json!({ "const": format!("number {n}") })).collect();
    for (what, constraint, expected) in [
        ("a constant", Constraint::JsonSchema(json!({ "const": text })), Some(format!("\"{text}\""))),
        ("a repetition", Constraint::Regex("a{20000}".to_owned()), Some("a".repeat(20_000))),
        ("a tuple", Constraint::JsonSchema(json!({ "type": "array", "prefixItems": tuple, "items": false, "minItems": 1000 })), None),
        ("doublings", Constraint::Lark(format!("start: r1\n{doublings}r30: \"ab\"\n")), None),
    ] {
        let structure = Structure { constraint: Some(constraint), ..Structure::default() };
        let mut shape = shape(&grammars, &structure);
        let (mut ids, mut bytes, began) = (vec![0], Vec::new(), Instant::now());
        let mut longest = Duration::ZERO;
        while bytes.len() < 20_000 {
            let began = Instant::now();
            let mask = shape.mask(&ids).unwrap();
            let id = drawn(&mask, 1, ids.len() as u64);
            if grammars.eos.contains(&id) {
                break;
            }
            let forced = shape.forced(&ids, id, usize::MAX);
            longest = longest.max(began.elapsed());
            assert!(forced.len() <= follower::WINDOW, "{what}: {} tokens at once", forced.len());
            ids.push(id);
            ids.extend(forced);
            bytes = ids[1..].iter().flat_map(|id| grammars.tokenizer.token_bytes(*id).unwrap()).collect();
        }
        println!("{what}: {} tokens in {:.1?}, the longest look took {longest:.1?}", ids.len(), began.elapsed());
        // What is not of use is not looked for.
        assert!(forced_of_three(&grammars, &structure) <= 3, "{what}");
        // Without bounds it took minutes.
        assert!(longest < Duration::from_secs(1), "{what}: {longest:?}");
        if let Some(expected) = expected {
            assert!(bytes == expected.as_bytes(), "{what}: {} bytes", bytes.len());
        }
    }
}

/// How long it takes to find out what may come next, with vocabularies of real size. Run by hand:
///
/// `QHX_REAL_TOKENIZERS=target/assets/real-tokenizers-3.7.2 cargo test --release -p qhx-runtime --lib masks_take -- --ignored --nocapture`
#[test]
#[ignore = "measures, and needs real tokenizers"]
fn masks_take_little_time() {
    let folder = PathBuf::from(std::env::var_os("QHX_REAL_TOKENIZERS").expect("QHX_REAL_TOKENIZERS names the folder"));
    // Beside each tokenizer lie its cases.
    let is_tokenizer = |file: &PathBuf| file.to_str().is_some_and(|name| name.ends_with(".json") && !name.ends_with(".cases.json"));
    for file in fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).filter(is_tokenizer) {
        let (name, tokenizer) = (file.display(), Tokenizer::from_bytes(&fs::read(&file).unwrap()).unwrap());
        let began = Instant::now();
        let grammars = grammars(&tokenizer);
        println!("{name}: {} ids, table made in {:.0?}", tokenizer.id_limit(), began.elapsed());
        for structure in structures() {
            let (mut times, mut begins): (Vec<Duration>, Vec<Duration>) = (Vec::new(), Vec::new());
            for seed in 0..20 {
                let began = Instant::now();
                let mut shape = shape(&grammars, &structure);
                begins.push(began.elapsed());
                let mut ids = vec![0];
                while ids.len() < 300 {
                    let began = Instant::now();
                    let mask = shape.mask(&ids).unwrap();
                    times.push(began.elapsed());
                    let id = drawn(&mask, seed, ids.len() as u64);
                    if grammars.eos.contains(&id) {
                        break;
                    }
                    ids.push(id);
                }
            }
            times.sort();
            begins.sort();
            let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize];
            println!(
                "  {} masks: median {:.0?}, p99 {:.0?}, longest {:.0?}; a grammar is compiled in {:.0?}",
                times.len(),
                at(0.5),
                at(0.99),
                at(1.0),
                begins[begins.len() / 2]
            );
            assert!(at(0.99) < Duration::from_millis(2), "p99 is {:?}", at(0.99));
        }
    }
}

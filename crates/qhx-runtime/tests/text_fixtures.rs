//! Tokenizers and chat templates of all fixtures against what their Python counterparts make of the same inputs.
//!
//! Every folder under `fixtures/` that has a `tokenizer_cases.json` is tested; `oracle/tokenizer_cases.py` writes that file.

use qhx_runtime::text::{SpecialTokens, Tokenizer};
use serde_json::Value;
use std::path::{Path, PathBuf};

struct Fixture {
    name: String,
    folder: PathBuf,
    tokenizer: Tokenizer,
    cases: Value,
}

fn fixtures() -> Vec<Fixture> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures");
    let mut folders: Vec<PathBuf> =
        std::fs::read_dir(&root).expect("fixtures/ exists").map(|entry| entry.expect("readable").path()).collect();
    folders.retain(|folder| folder.join("tokenizer_cases.json").is_file());
    folders.sort();
    assert!(!folders.is_empty(), "no fixture has tokenizer_cases.json");
    folders.into_iter().map(load).collect()
}

fn load(folder: PathBuf) -> Fixture {
    let name = folder.file_name().expect("a name").to_string_lossy().into_owned();
    let bytes = std::fs::read(folder.join("tokenizer.json")).expect("tokenizer.json");
    let tokenizer = Tokenizer::from_bytes(&bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
    Fixture { cases: json(&folder.join("tokenizer_cases.json")), tokenizer, name, folder }
}

fn json(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().expect("a list of ids").iter().map(|id| id.as_u64().expect("an id") as u32).collect()
}

fn cases<'a>(fixture: &'a Fixture, kind: &str) -> &'a [Value] {
    let cases = fixture.cases[kind].as_array().unwrap_or_else(|| panic!("{}: no {kind}", fixture.name));
    assert!(!cases.is_empty(), "{}: no {kind}", fixture.name);
    cases
}

#[test]
fn texts_encode_to_the_same_ids() {
    for fixture in fixtures() {
        let encode = |text: &str, add_special, special| fixture.tokenizer.encode(text, add_special, special).expect("encodes");
        let mut literal = 0;
        for case in cases(&fixture, "texts") {
            let text = case["text"].as_str().expect("a text");
            let parsed = ids(&case["ids"]);
            assert_eq!(encode(text, false, SpecialTokens::Parse), parsed, "{}: {text:?}", fixture.name);
            assert_eq!(encode(text, true, SpecialTokens::Parse), ids(&case["ids_with_special"]), "{}: {text:?}", fixture.name);
            let expected = case.get("ids_literal").map_or(parsed, ids);
            let as_text = encode(text, false, SpecialTokens::AsText);
            assert_eq!(as_text, expected, "{}: {text:?}", fixture.name);
            if let Some(decoded) = case.get("decoded_literal") {
                literal += 1;
                assert_eq!(fixture.tokenizer.decode(&as_text, false).expect("decodes"), decoded.as_str().expect("a text"));
                assert!(!as_text.iter().any(|id| fixture.tokenizer.is_special(*id)), "{}: {text:?}", fixture.name);
            }
        }
        assert!(literal > 0, "{}: no text with special tokens in it", fixture.name);
    }
}

#[test]
fn ids_decode_to_the_same_text_at_once_and_streamed() {
    for fixture in fixtures() {
        for case in cases(&fixture, "texts").iter().chain(cases(&fixture, "decodes")) {
            let ids = ids(&case["ids"]);
            for skip_special in [false, true] {
                let skipped = case.get("decoded_skip_special").filter(|_| skip_special);
                let expected = skipped.unwrap_or(&case["decoded"]).as_str().expect("a text");
                assert_eq!(fixture.tokenizer.decode(&ids, skip_special).expect("decodes"), expected, "{}: {ids:?}", fixture.name);
                let mut detokenizer = fixture.tokenizer.detokenizer(skip_special);
                let mut streamed = String::new();
                for &id in &ids {
                    streamed += detokenizer.push(id).expect("decodes");
                }
                streamed += detokenizer.flush().expect("decodes");
                assert_eq!(streamed, expected, "{}: {ids:?}", fixture.name);
            }
        }
    }
}

#[test]
fn random_ids_stream_to_what_they_decode_to() {
    for fixture in fixtures() {
        let limit = fixture.tokenizer.id_limit() as f64 + 2.0;
        for seed in 0..400 {
            let ids: Vec<u32> = (0..1 + seed % 50).map(|n| (qhx_runtime::sample::random::uniform(seed, n) * limit) as u32).collect();
            let mut detokenizer = fixture.tokenizer.detokenizer(seed % 2 == 0);
            let mut streamed = String::new();
            for &id in &ids {
                streamed += detokenizer.push(id).expect("decodes");
            }
            streamed += detokenizer.flush().expect("decodes");
            assert_eq!(streamed, fixture.tokenizer.decode(&ids, seed % 2 == 0).expect("decodes"), "{}: {ids:?}", fixture.name);
        }
    }
}

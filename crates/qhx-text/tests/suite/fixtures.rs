//! Tokenizers and chat templates of all fixtures against what their Python counterparts make of the same inputs.
//!
//! Every folder under `fixtures/` that has a `tokenizer_cases.json` is tested; `oracle/tokenizer_cases.py` writes that file.

use qhx_text::{Chat, ChatError, ChatTemplate, Message, SpecialTokens, Tokenizer};
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
            let ids: Vec<u32> = (0..1 + seed % 50).map(|n| (qhx_ir::random::uniform(seed, n) * limit) as u32).collect();
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

/// The fixture's chat template, from whichever file holds it, with the texts of its special tokens.
fn template(fixture: &Fixture) -> ChatTemplate {
    let config = json(&fixture.folder.join("tokenizer_config.json"));
    let beside = fixture.folder.join("chat_template.json");
    let source = std::fs::read_to_string(fixture.folder.join("chat_template.jinja")).unwrap_or_else(|_| {
        let holder = if beside.is_file() { json(&beside) } else { config.clone() };
        holder["chat_template"].as_str().unwrap_or_else(|| panic!("{}: no chat template", fixture.name)).to_owned()
    });
    let entries = config.as_object().expect("an object").iter().filter(|(name, _)| name.ends_with("_token"));
    let tokens = entries.filter_map(|(name, value)| Some((name.as_str(), value.as_str().or_else(|| value["content"].as_str())?)));
    ChatTemplate::new(&source, tokens).unwrap_or_else(|error| panic!("{}: {error}", fixture.name))
}

fn chat(case: &Value) -> Chat {
    let mut chat: Chat = Chat::new(Message::list_from_json(case["messages"].clone()).expect("messages"));
    chat.add_generation_prompt = case["add_generation_prompt"].as_bool().expect("a flag");
    let known = ["name", "messages", "add_generation_prompt", "text", "ids", "error", "ids_literal"];
    chat.options = case.as_object().expect("an object").clone().into_iter().filter(|(name, _)| !known.contains(&name.as_str())).collect();
    chat
}

#[test]
fn chats_render_and_encode_to_the_same() {
    for fixture in fixtures() {
        let template = template(&fixture);
        for case in cases(&fixture, "chats") {
            let chat = chat(case);
            let prompt = template.prompt(&chat, &fixture.tokenizer, SpecialTokens::Parse);
            let name = format!("{}: {}", fixture.name, case["name"]);
            if let Some(message) = case.get("error") {
                let message = message.as_str().expect("a message").to_owned();
                assert!(matches!(&prompt, Err(ChatError::Refused { .. } | ChatError::Render { .. })), "{name}: {prompt:?}");
                if let Err(ChatError::Refused { message: ours }) = prompt {
                    assert_eq!(ours, message, "{name}");
                }
                continue;
            }
            let prompt = prompt.unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!(prompt.text, case["text"].as_str().expect("a text"), "{name}");
            assert_eq!(prompt.ids, ids(&case["ids"]), "{name}");
        }
    }
}

#[test]
fn special_tokens_in_messages_stay_text() {
    for fixture in fixtures() {
        let template = template(&fixture);
        let special = |ids: &[u32]| ids.iter().copied().filter(|id| fixture.tokenizer.is_special(*id)).collect::<Vec<_>>();
        let (mut kept, mut same) = (0, 0);
        for case in cases(&fixture, "chats").iter().filter(|case| case.get("error").is_none()) {
            let chat = chat(case);
            let text = template.prompt(&chat, &fixture.tokenizer, SpecialTokens::AsText).expect("renders");
            let parsed = template.prompt(&chat, &fixture.tokenizer, SpecialTokens::Parse).expect("renders");
            assert_eq!(text.text, parsed.text, "{}: {}", fixture.name, case["name"]);
            if case["name"] == "special_inside" {
                // The template's own control tokens are those of the same conversation with harmless text.
                let mut harmless = chat.clone();
                harmless.messages[0] = Message::new("user", "say this and that\nnow");
                let template_only = template.prompt(&harmless, &fixture.tokenizer, SpecialTokens::Parse).expect("renders");
                assert_eq!(special(&text.ids), special(&template_only.ids), "{}", fixture.name);
                assert!(special(&parsed.ids).len() > special(&text.ids).len());
                let decoded = fixture.tokenizer.decode(&text.ids, false).expect("decodes");
                assert!(decoded.contains(chat.messages[0].content().as_str().expect("a text")), "{}: {decoded:?}", fixture.name);
                kept += 1;
            } else {
                assert_eq!(text.ids, parsed.ids, "{}: {}", fixture.name, case["name"]);
                same += 1;
            }
        }
        assert!(kept > 0 && same > 0, "{}", fixture.name);
    }
}

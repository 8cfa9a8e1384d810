//! The template language against Jinja as transformers sets it up: about a thousand small templates, each a feature, a filter or an oddity.
//!
//! `oracle/template_cases.py` writes the cases.

use qhx_text::{Chat, ChatError, ChatTemplate, Message};
use serde_json::Value;
use std::path::Path;

#[test]
fn templates_render_as_in_python() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/templates/cases.json");
    let file: Value = serde_json::from_slice(&std::fs::read(path).expect("cases.json")).expect("JSON");
    let mut options = file["context"].as_object().expect("an object").clone();
    let mut chat: Chat = Chat::new(Message::list_from_json(options.remove("messages").expect("messages")).expect("messages"));
    chat.tools = options.remove("tools");
    chat.options = options;

    let cases = file["cases"].as_array().expect("a list");
    assert!(cases.len() > 1000);
    let mut wrong = Vec::new();
    for case in cases {
        let source = case["template"].as_str().expect("a template");
        let rendered = ChatTemplate::new(source, []).and_then(|template| template.render(&chat));
        let right = match &rendered {
            Ok(text) => case["text"] == *text,
            Err(ChatError::Refused { message }) => case["raised"] == *message,
            Err(ChatError::Template { .. } | ChatError::Render { .. }) => case["error"].is_string(),
            Err(_) => false,
        };
        if !right {
            wrong.push(format!("{source}\n    ours:   {rendered:?}\n    python: {case}"));
        }
    }
    assert!(wrong.is_empty(), "{} of {} differ:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

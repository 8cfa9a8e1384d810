//! Conversations as JSON, for every template.

use super::{Bench, Case, Outcome, bundle, refused};
use crate::{mutate::mutate_json, random::Random, seeds::Seeds};
use qhx_runtime::{
    Model, Prompt,
    text::{Chat, Message},
};
use serde_json::{Value, json};
use std::cell::RefCell;

const FILE: &str = "chat.json";
/// The good bundles that have a template, by their place among the seeds.
const TEMPLATED: [(usize, &str); 3] = [(0, "llama"), (4, "qwen3_vl"), (8, "gemma4")];

pub(super) fn make(_: &Seeds, random: &mut Random) -> Case {
    let chat = mutate_json(random.pick(&conversations()).to_string().as_bytes(), random);
    let (_, bundle) = random.pick(&TEMPLATED);
    Case::of(FILE, chat).command(&format!("generate {{bundles}}/{bundle} --chat {{case}}/{FILE} --max-new 1 --json"))
}

/// Conversations with everything that templates look at.
fn conversations() -> [Value; 4] {
    [
        json!([{"role": "user", "content": "Hello"}]),
        json!([
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is 1 + 1?"},
            {"role": "assistant", "content": "2", "reasoning_content": "One and one."},
            {"role": "user", "content": [{"type": "text", "text": "And 2 + 2?"}]}
        ]),
        json!({"messages": [
            {"role": "user", "content": [{"type": "image", "path": "photo.png"}, {"type": "text", "text": "Describe it."}]},
            {"role": "assistant", "content": null, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{\"at\": 3}"}}]},
            {"role": "tool", "tool_call_id": "1", "name": "look", "content": "a cat"},
            {"role": "user", "content": "Thanks."}
        ], "tools": [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}}}}],
           "documents": [{"title": "A", "text": "B"}], "chat_template_kwargs": {"enable_thinking": true, "date": "2024-01-01"}}),
        json!({"messages": [{"role": "user", "content": [{"type": "audio", "path": "/dev/zero"}, {"type": "text", "text": "Transcribe."}]}]}),
    ]
}

thread_local! {
    /// Models of good bundles: each is loaded once.
    static MODELS: RefCell<Vec<Model>> = const { RefCell::new(Vec::new()) };
}

pub(super) fn attempt(case: &Case, bench: &Bench) -> Outcome {
    let mut chat = Chat::new(Vec::new());
    let messages = match serde_json::from_slice(case.file(FILE)).map_err(refused)? {
        Value::Object(mut fields) => {
            chat.tools = fields.remove("tools");
            chat.documents = fields.remove("documents");
            if let Some(Value::Object(options)) = fields.remove("chat_template_kwargs") {
                chat.options = options;
            }
            fields.remove("messages").unwrap_or_default()
        }
        list => list,
    };
    chat.messages = Message::list_from_json(messages).map_err(refused)?;
    chat.now = Some(1_700_000_000);
    MODELS.with_borrow_mut(|models| {
        if models.is_empty() {
            for (place, name) in TEMPLATED {
                let bundle = bundle::in_memory(&bench.seeds.bundles[place])?;
                let options = bundle::load_options(&bundle);
                models.push(Model::load(&bundle, &options).unwrap_or_else(|error| panic!("the good bundle {name} does not load: {error}")));
            }
        }
        let mut told = String::new();
        let mut accepted = false;
        for model in models {
            match Prompt::chat(model, &chat) {
                Ok(prompt) => {
                    accepted = true;
                    told += &format!("{} ids ", prompt.ids().len());
                }
                Err(error) => told += &error.to_string(),
            }
        }
        if accepted { Ok(told) } else { Err(told) }
    })
}

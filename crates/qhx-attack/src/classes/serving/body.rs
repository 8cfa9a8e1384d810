//! Bodies: requests to every path that takes one, changed; trees, huge texts, keys given twice, thousands of messages, forms.

use super::FILE;
use crate::{
    classes::Case,
    http::request,
    mutate::{mutate_bytes, mutate_json},
    random::Random,
    seeds::Seeds,
};
use serde_json::{Value, json};

pub(super) fn make(seeds: &Seeds, random: &mut Random) -> Case {
    if random.one_in(8) {
        return form(seeds, random);
    }
    let (path, good) = random.pick(&requests()).clone();
    let body = match random.below(3) {
        0 => large(&good, random).into_bytes(),
        _ => mutate_json(good.to_string().as_bytes(), random),
    };
    Case::of(FILE, request("POST", path, "Content-Type: application/json\r\n", &body))
}

/// Good requests, with fields of every kind.
fn requests() -> [(&'static str, Value); 12] {
    let messages = json!([{ "role": "system", "content": "Be brief." }, { "role": "user", "content": [{ "type": "text", "text": "Hi" }] }]);
    let tool = json!({ "name": "look", "description": "Looks.", "parameters": { "type": "object", "properties": { "at": { "type": "integer" } } } });
    let call = json!({ "id": "1", "type": "function", "function": { "name": "look", "arguments": "{\"at\": 3}" } });
    let turns = json!([{ "role": "user", "content": "Look." }, { "role": "assistant", "content": null, "tool_calls": [call] },
        { "role": "tool", "tool_call_id": "1", "content": "a cat" }]);
    let blocks = json!([{ "role": "user", "content": [{ "type": "text", "text": "Hi" }] },
        { "role": "assistant", "content": [{ "type": "tool_use", "id": "1", "name": "look", "input": { "at": 3 } }] },
        { "role": "user", "content": [{ "type": "tool_result", "tool_use_id": "1", "content": "a cat" }] }]);
    let options = json!({ "num_predict": 3, "temperature": 0.5, "seed": 1, "stop": ["x"] });
    [
        (
            "/v1/chat/completions",
            json!({ "messages": messages, "max_tokens": 3, "n": 2, "logprobs": true, "top_logprobs": 2, "temperature": 1.0,
            "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": 3,
            "stop": ["x", "\n"], "logit_bias": { "5": -100, "7": 3.5 }, "metadata": { "a": "b" }, "user": "u", "reasoning_effort": "low" }),
        ),
        (
            "/v1/chat/completions",
            json!({ "messages": turns, "max_completion_tokens": 3, "tools": [{ "type": "function", "function": tool }],
            "tool_choice": "auto", "parallel_tool_calls": false, "chat_template_kwargs": { "enable_thinking": true, "x": [1, { "y": null }] } }),
        ),
        (
            "/v1/chat/completions",
            json!({ "messages": messages, "max_tokens": 3, "stream": true, "stream_options": { "include_usage": true } }),
        ),
        ("/v1/completions", json!({ "prompt": ["Once", "upon"], "max_tokens": 3, "logprobs": 2, "echo": true, "best_of": 1, "stop": "x" })),
        ("/v1/completions", json!({ "prompt": [[1, 2, 3], [4]], "max_tokens": 3, "stream": true, "ignore_eos": true })),
        (
            "/v1/responses",
            json!({ "input": [{ "role": "user", "content": "Hi" }], "instructions": "Be brief.", "max_output_tokens": 3,
            "tools": [{ "type": "function", "name": "look", "parameters": {} }], "reasoning": { "effort": "low" }, "store": false }),
        ),
        (
            "/v1/messages",
            json!({ "model": "builtin", "max_tokens": 3, "system": "Be brief.", "messages": blocks, "stop_sequences": ["x"],
            "tools": [{ "name": "look", "input_schema": { "type": "object" } }], "thinking": { "type": "disabled" } }),
        ),
        ("/v1/messages/count_tokens", json!({ "model": "builtin", "messages": blocks })),
        ("/api/chat", json!({ "model": "builtin", "messages": turns, "options": options, "keep_alive": "5m" })),
        ("/api/generate", json!({ "model": "builtin", "prompt": "Once", "system": "Be brief.", "options": options, "stream": false })),
        ("/tokenize", json!({ "messages": messages, "add_generation_prompt": true, "return_token_strs": true })),
        ("/detokenize", json!({ "tokens": [1, 2, 300] })),
    ]
}

/// A request with far too much of something. The text may be no JSON that a parsed document could hold.
fn large(good: &Value, random: &mut Random) -> String {
    let (n, most) = (random.length(100_000), random.length(3_000_000));
    let tree = random.word(&["[],", "{},", "0,", "[[1]],", "\"\",", "{\"a\":{}},"]).repeat(n.min(500_000));
    let text = random.word(&["a", "a ", "\\u0000", "\\ud83d\\ude00", "<|im_start|>", "\\n", "\u{e9}"]).repeat(most / 4 + 1);
    let mut messages = vec![json!({ "role": "user", "content": "Hi" }); n.min(20_000)];
    messages.extend([json!({ "role": "assistant", "content": "Hi" }), json!({ "role": "user", "content": "Bye" })]);
    let mut body = good.clone();
    let field = random.word(&["metadata", "chat_template_kwargs", "tools", "messages", "prompt", "logit_bias", "stop", "tokens", "input"]);
    match random.below(7) {
        0 if good.get("messages").is_some() => {
            body["messages"] = messages.into();
            body.to_string()
        }
        1 => {
            let token = |n: usize| (n % 600).into();
            body["tokens"] = (0..n).map(token).collect::<Vec<Value>>().into();
            body.to_string()
        }
        2 => {
            let parts = vec![json!({ "type": "text", "text": "a" }); n.min(20_000)];
            body["messages"] = json!([{ "role": "user", "content": parts }]);
            body.to_string()
        }
        3 => {
            body["stop"] = vec!["stop"; n].into();
            body["logit_bias"] = (0..n.min(20_000)).map(|n| (n.to_string(), 1.into())).collect::<serde_json::Map<_, Value>>().into();
            body.to_string()
        }
        // By hand: what follows is put in front of the other fields.
        4 => body.to_string().replacen('{', &format!("{{\"{field}\":{{\"x\":[{tree}0]}},"), 1),
        5 => body.to_string().replacen('{', &format!("{{\"{field}\":\"{text}\","), 1),
        _ => {
            body.to_string().replacen('{', &format!("{{\"messages\":[{{\"role\":\"user\",\"content\":\"{text}\",\"content\":\"b\"}}],"), 1)
        }
    }
}

/// A form, for the path that takes one.
fn form(seeds: &Seeds, random: &mut Random) -> Case {
    let mut form = random.pick(&seeds.forms).clone();
    mutate_bytes(&mut form, usize::MAX, &seeds.forms[0], random);
    let end = form.iter().position(|byte| *byte == b'\n').unwrap_or(form.len());
    let kind: String = String::from_utf8_lossy(&form[..end]).chars().filter(|letter| (' '..='~').contains(letter)).collect();
    let body = form.get(end + 1..).unwrap_or_default();
    Case::of(FILE, request("POST", "/v1/audio/transcriptions", &format!("Content-Type: {kind}\r\n"), body))
}

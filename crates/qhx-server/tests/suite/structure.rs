//! Answers that have a form: JSON schemas, regular expressions, grammars, tool calls, limited reasoning. The demo model knows nothing of JSON, and is asked at a temperature at which it
//! says anything: what comes out is right because nothing else can.

use crate::common::TestServer;
use serde_json::{Value, json};
use std::sync::LazyLock;

static SERVER: LazyLock<TestServer> = LazyLock::new(TestServer::new);

fn ask(more: Value) -> Value {
    let mut request =
        json!({ "messages": [{ "role": "user", "content": "What is the capital of Spain?" }], "temperature": 1.5, "max_tokens": 300 });
    for (name, value) in more.as_object().unwrap() {
        request[name] = value.clone();
    }
    let response = SERVER.post("/v1/chat/completions", request);
    assert_eq!(response.status, 200, "{response:?}");
    response.json()
}

fn content(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().unwrap_or_else(|| panic!("{answer}"))
}

fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "maxLength": 8 },
            "age": { "type": "integer", "minimum": 0, "maximum": 120 },
            "tags": { "type": "array", "items": { "enum": ["red", "green"] }, "minItems": 1, "maxItems": 3 },
            "next": { "anyOf": [{ "type": "null" }, { "type": "boolean" }] },
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": false,
    })
}

fn check(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let fields = value.as_object().unwrap();
    assert!(fields["name"].as_str().unwrap().chars().count() <= 8, "{text}");
    assert!((0..=120).contains(&fields["age"].as_i64().unwrap()), "{text}");
    let tags = fields["tags"].as_array().unwrap();
    assert!((1..=3).contains(&tags.len()) && tags.iter().all(|tag| tag == "red" || tag == "green"), "{text}");
    assert!(fields.get("next").is_none_or(|next| next.is_null() || next.is_boolean()), "{text}");
    assert!(fields.keys().all(|key| ["name", "age", "tags", "next"].contains(&key.as_str())), "{text}");
}

#[test]
fn content_follows_a_json_schema() {
    let format = json!({ "type": "json_schema", "json_schema": { "name": "person", "schema": schema(), "strict": true } });
    let mut texts = Vec::new();
    for seed in 0..8 {
        let answer = ask(json!({ "response_format": format, "seed": seed }));
        assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{answer}");
        check(content(&answer));
        texts.push(content(&answer).to_owned());
    }
    texts.dedup();
    assert!(texts.len() > 1, "{texts:?}");
    // Greedy asks the device for the largest allowed logit only, and with probabilities for all.
    let greedy = ask(json!({ "response_format": format, "temperature": 0 }));
    check(content(&greedy));
    assert_eq!(content(&greedy), content(&ask(json!({ "response_format": format, "temperature": 0, "logprobs": true }))));
}

#[test]
fn content_follows_a_regular_expression_or_a_grammar() {
    for seed in 0..4 {
        let answer = ask(json!({ "response_format": { "type": "regex", "regex": "[A-F]{3}-[0-9]{4}" }, "seed": seed }));
        let (letters, digits) = content(&answer).split_once('-').unwrap();
        assert!(
            letters.len() == 3 && letters.bytes().all(|b| (b'A'..=b'F').contains(&b)) && digits.len() == 4 && digits.parse::<u32>().is_ok()
        );
        let grammar = "start: \"sum: \" number (\" + \" number){2}\nnumber: /[1-9]/";
        let answer = ask(json!({ "response_format": { "type": "lark", "grammar": grammar }, "seed": seed }));
        let numbers: Vec<&str> = content(&answer).strip_prefix("sum: ").unwrap().split(" + ").collect();
        assert!(numbers.len() == 3 && numbers.iter().all(|number| number.len() == 1), "{answer}");
    }
    // A text to be continued has no reasoning, whatever the model is.
    for seed in 0..16 {
        let format = json!({ "type": "regex", "regex": "(yes|no)" });
        let completion =
            SERVER.post("/v1/completions", json!({ "prompt": "Once", "response_format": format, "temperature": 1.5, "seed": seed })).json();
        assert!(["yes", "no"].contains(&completion["choices"][0]["text"].as_str().unwrap()), "{completion}");
    }
}

#[test]
fn grammars_that_cannot_be_followed_are_refused() {
    for (format, expected) in [
        (json!({ "type": "json_schema", "json_schema": { "schema": { "type": "objekt" } } }), "objekt"),
        (
            json!({ "type": "json_schema", "json_schema": { "schema": { "type": "string", "not": { "minLength": 3 } } } }),
            "not supported: not",
        ),
        (json!({ "type": "json_schema", "json_schema": { "schema": { "$ref": "https://host/x" } } }), "https://host/x"),
        (json!({ "type": "json_schema", "json_schema": { "schema": 1 } }), "schema"),
        (json!({ "type": "json_schema", "json_schema": {} }), "json_schema.schema"),
        (json!({ "type": "regex", "regex": "(" }), "grammar"),
        (json!({ "type": "lark", "grammar": "start: missing" }), "missing"),
        (json!({ "type": "xml" }), "xml"),
    ] {
        let messages = json!([{ "role": "user", "content": "Hi" }]);
        let response = SERVER.post("/v1/chat/completions", json!({ "messages": messages, "response_format": format }));
        assert!(response.status == 400 && response.text().contains(expected), "{format}: {response:?}");
    }
}

fn tools() -> Value {
    let weather = json!({ "type": "object", "properties": { "city": { "type": "string", "maxLength": 6 }, "days": { "type": "integer", "minimum": 1, "maximum": 9 } }, "required": ["city"], "additionalProperties": false });
    let unit = json!({ "type": "object", "properties": { "unit": { "type": "string", "enum": ["C", "F"] } }, "required": ["unit"], "additionalProperties": false });
    json!([
        { "type": "function", "function": { "name": "weather", "description": "Tells the weather", "parameters": weather } },
        { "type": "function", "function": { "name": "set_unit", "parameters": unit } },
    ])
}

fn check_call(call: &Value) {
    assert_eq!(call["type"], "function");
    assert!(call["id"].as_str().unwrap().starts_with("call_"), "{call}");
    let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
    match call["function"]["name"].as_str().unwrap() {
        "weather" => assert!(arguments["city"].as_str().unwrap().chars().count() <= 6, "{call}"),
        "set_unit" => assert!(arguments["unit"] == "C" || arguments["unit"] == "F", "{call}"),
        other => panic!("{other}"),
    }
}

#[test]
fn tools_are_called_as_they_must_be() {
    for seed in 0..4 {
        let answer = ask(json!({ "tools": tools(), "tool_choice": "required", "parallel_tool_calls": false, "seed": seed }));
        let choice = &answer["choices"][0];
        let calls = choice["message"]["tool_calls"].as_array().unwrap_or_else(|| panic!("{answer}"));
        assert!(calls.len() == 1 && choice["finish_reason"] == "tool_calls" && choice["message"]["content"].is_null(), "{answer}");
        check_call(&calls[0]);
    }
    let named = ask(json!({ "tools": tools(), "tool_choice": { "type": "function", "function": { "name": "set_unit" } } }));
    assert_eq!(named["choices"][0]["message"]["tool_calls"][0]["function"]["name"], "set_unit");
    // Where it is free to, the demo model does not call anything, and answers.
    let free = ask(json!({ "tools": tools(), "temperature": 0 }));
    assert!(free["choices"][0]["message"].get("tool_calls").is_none() && !content(&free).is_empty(), "{free}");
    let none = ask(json!({ "tools": tools(), "tool_choice": "none", "temperature": 0 }));
    assert!(content(&none).contains("Madrid"));
}

#[test]
fn calls_in_streams_are_whole() {
    let messages = json!([{ "role": "user", "content": "Hi" }]);
    let request = json!({ "messages": messages, "tools": tools(), "tool_choice": "required", "parallel_tool_calls": false, "temperature": 1.5, "stream": true, "max_tokens": 300 });
    let frames = SERVER.stream("/v1/chat/completions", request);
    let calls: Vec<&Value> = frames.iter().filter_map(|frame| frame["choices"][0]["delta"]["tool_calls"].as_array()).flatten().collect();
    assert!(!calls.is_empty(), "{frames:?}");
    for call in calls {
        assert_eq!(call["index"], 0);
        check_call(call);
    }
    assert_eq!(frames.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
}

#[test]
fn a_conversation_with_tools_goes_on() {
    let call = json!({ "id": "call_1", "type": "function", "function": { "name": "weather", "arguments": "{\"city\": \"Rome\"}" } });
    let messages = json!([
        { "role": "system", "content": "Be brief." },
        { "role": "user", "content": "What is the capital of Spain?" },
        { "role": "assistant", "content": null, "tool_calls": [call] },
        { "role": "tool", "tool_call_id": "call_1", "content": "sunny" },
    ]);
    let answer = ask(json!({ "messages": messages, "tools": tools(), "temperature": 0 }));
    assert!(!content(&answer).is_empty());
    for (more, param) in [
        (json!({ "tool_choice": "required" }), "tool_choice"),
        (json!({ "tools": tools(), "tool_choice": { "type": "function", "function": { "name": "other" } } }), "tool_choice"),
        (json!({ "tools": [{ "type": "web_search" }] }), "tools"),
    ] {
        let mut request = json!({ "messages": [{ "role": "user", "content": "Hi" }] });
        for (name, value) in more.as_object().unwrap() {
            request[name] = value.clone();
        }
        let response = SERVER.post("/v1/chat/completions", request);
        assert!(response.status == 400 && response.json()["error"]["param"] == param, "{more}: {response:?}");
    }
}

#[test]
fn reasoning_is_apart_and_limited_and_before_what_has_a_form() {
    let thinking = json!({ "enable_thinking": true });
    let answer = ask(json!({ "chat_template_kwargs": thinking, "reasoning_budget": 6, "ignore_eos": true, "max_tokens": 40 }));
    let message = &answer["choices"][0]["message"];
    assert!(!message["reasoning_content"].as_str().unwrap().is_empty() && !message["content"].as_str().unwrap().is_empty(), "{answer}");
    let tokens = answer["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
    assert!((6..=12).contains(&tokens), "{answer}");
    // The grammar begins behind the reasoning, in streams as well.
    let format = json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": schema() } });
    let more = json!({ "response_format": format, "chat_template_kwargs": thinking, "reasoning_budget": 6, "seed": 3 });
    let answer = ask(more.clone());
    check(content(&answer));
    assert!(!answer["choices"][0]["message"]["reasoning_content"].as_str().unwrap().is_empty());
    let mut request = json!({ "messages": [{ "role": "user", "content": "What is the capital of Spain?" }], "temperature": 1.5, "max_tokens": 300, "stream": true });
    for (name, value) in more.as_object().unwrap() {
        request[name] = value.clone();
    }
    let frames = SERVER.stream("/v1/chat/completions", request);
    let joined = |field: &str| frames.iter().filter_map(|frame| frame["choices"][0]["delta"][field].as_str()).collect::<String>();
    assert_eq!(joined("content"), content(&answer));
    assert_eq!(joined("reasoning_content"), answer["choices"][0]["message"]["reasoning_content"].as_str().unwrap());
    // Off.
    let off = ask(json!({ "reasoning_effort": "none", "temperature": 0 }));
    assert!(content(&off).contains("Madrid"));
    assert!(off["choices"][0]["message"].get("reasoning_content").is_none());
}

/// What a grammar leaves no choice about is not computed token by token, and the answer is the same as if it were: asked for probabilities, the engine computes each.
#[test]
fn forced_tokens_change_the_speed_and_not_the_answer() {
    let schema = json!({
        "type": "object",
        "properties": { "the_temperature_of_the_water": { "enum": ["below freezing", "above boiling"] }, "certain": { "type": "boolean" } },
        "required": ["the_temperature_of_the_water", "certain"],
        "additionalProperties": false,
    });
    let format = json!({ "type": "json_schema", "json_schema": { "schema": schema } });
    let told = |more: Value| {
        let mut request = json!({ "messages": [{ "role": "user", "content": "Hi" }], "temperature": 1.5, "stream": true, "details": true });
        more.as_object().unwrap().iter().for_each(|(name, value)| request[name] = value.clone());
        let frames = SERVER.stream("/v1/chat/completions", request);
        let text: String = frames.iter().filter_map(|frame| frame["choices"][0]["delta"]["content"].as_str()).collect();
        let timing = frames.iter().find_map(|frame| frame["details"]["timing"].as_object()).unwrap().clone();
        let number = |name: &str| timing.get(name).and_then(Value::as_u64).unwrap_or(0);
        (text, number("generated_tokens"), number("forced_tokens"))
    };
    for seed in 0..6 {
        let quick = told(json!({ "response_format": format, "seed": seed }));
        let slow = told(json!({ "response_format": format, "seed": seed, "logprobs": true }));
        assert_eq!((&quick.0, quick.1, slow.2), (&slow.0, slow.1, 0));
        assert!(quick.2 * 2 > quick.1, "most of {quick:?} was forced");
    }
    // The end of reasoning that has spent its budget is forced, too; greedy answers as well.
    let thinking = json!({ "enable_thinking": true });
    let reasoned = json!({ "chat_template_kwargs": thinking, "reasoning_budget": 6, "temperature": 0, "response_format": format });
    let mut slow = reasoned.clone();
    slow["logprobs"] = true.into();
    let (quick, slow) = (told(reasoned), told(slow));
    assert_eq!((&quick.0, quick.1), (&slow.0, slow.1));
    assert!(quick.2 > 0 && slow.2 == 0, "{quick:?} {slow:?}");
    // An answer may end among them.
    for limit in 2..12 {
        let (text, tokens, _) = told(json!({ "response_format": format, "max_tokens": limit }));
        assert!(tokens == limit && text.starts_with('{'), "{text}");
    }
    let (text, ..) = told(json!({ "response_format": format, "stop": "temperature" }));
    assert_eq!(text, "{\"the_");
}

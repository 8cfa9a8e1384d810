//! The APIs of Anthropic, ollama and vLLM, OpenAI's responses, and what operators look at.

use crate::common::TestServer;
use serde_json::{Value, json};
use std::sync::LazyLock;

static SERVER: LazyLock<TestServer> = LazyLock::new(TestServer::new);

const PORTUGAL: &str = "What is the capital of Portugal?";
const LISBON: &str = "The capital of Portugal is Lisbon.";

fn question() -> Value {
    json!([{ "role": "user", "content": PORTUGAL }])
}

fn tool_schema() -> Value {
    json!({ "type": "object", "properties": { "unit": { "type": "string", "enum": ["C", "F"] } }, "required": ["unit"], "additionalProperties": false })
}

/// The events of a stream, each with its name.
fn events(path: &str, body: Value) -> Vec<(String, Value)> {
    let response = SERVER.post(path, body);
    assert_eq!(response.status, 200, "{response:?}");
    let text = response.text();
    let event = |frame: &str| {
        let (name, data) = frame.strip_prefix("event: ")?.split_once("\ndata: ")?;
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["type"], name);
        Some((name.to_owned(), data))
    };
    text.split("\n\n").filter_map(event).collect()
}

#[test]
fn anthropic_messages() {
    let request = json!({ "model": "builtin", "max_tokens": 50, "messages": question(), "temperature": 0 });
    let answer = SERVER.post("/v1/messages", request.clone()).json();
    assert_eq!(answer["content"], json!([{ "type": "text", "text": LISBON }]));
    assert_eq!((&answer["stop_reason"], &answer["role"], &answer["type"]), (&json!("end_turn"), &json!("assistant"), &json!("message")));
    let mut streaming = request.clone();
    streaming["stream"] = true.into();
    let events = events("/v1/messages", streaming);
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!((names[0], names[1], *names.last().unwrap()), ("message_start", "content_block_start", "message_stop"));
    let text: String = events.iter().filter_map(|(_, event)| event["delta"]["text"].as_str()).collect();
    assert_eq!(text, LISBON);
    let count = SERVER.post("/v1/messages/count_tokens", json!({ "model": "builtin", "messages": question() })).json();
    let usage = &answer["usage"];
    assert_eq!(count["input_tokens"], usage["input_tokens"].as_u64().unwrap() + usage["cache_read_input_tokens"].as_u64().unwrap());
    let mut stopped = request.clone();
    stopped["stop_sequences"] = json!([" Lisbon"]);
    let stopped = SERVER.post("/v1/messages", stopped).json();
    assert_eq!((&stopped["stop_reason"], &stopped["stop_sequence"]), (&json!("stop_sequence"), &json!(" Lisbon")));
}

#[test]
fn anthropic_tools_and_errors() {
    let tool = json!({ "name": "set_unit", "description": "Sets it", "input_schema": tool_schema() });
    let request = json!({ "model": "builtin", "max_tokens": 200, "messages": question(), "tools": [tool], "tool_choice": { "type": "any", "disable_parallel_tool_use": true }, "temperature": 1.5 });
    let answer = SERVER.post("/v1/messages", request.clone()).json();
    let used = &answer["content"][0];
    assert!(
        used["type"] == "tool_use" && answer["stop_reason"] == "tool_use" && (used["input"]["unit"] == "C" || used["input"]["unit"] == "F"),
        "{answer}"
    );
    let mut streaming = request;
    streaming["stream"] = true.into();
    let events = events("/v1/messages", streaming);
    let input: String = events.iter().filter_map(|(_, event)| event["delta"]["partial_json"].as_str()).collect();
    assert!(serde_json::from_str::<Value>(&input).unwrap()["unit"].is_string(), "{events:?}");
    for (more, named) in [
        (json!({ "frobnicate": 1 }), "frobnicate"),
        (json!({ "max_tokens": 0 }), "max_tokens"),
        (json!({ "tools": [{ "type": "web_search_20250305", "name": "web_search" }] }), "web_search_20250305"),
        (json!({ "messages": [{ "role": "user", "content": [{ "type": "document" }] }] }), "document"),
        (json!({ "tool_choice": { "type": "any" } }), "tool_choice"),
    ] {
        let mut request = json!({ "model": "builtin", "max_tokens": 5, "messages": question() });
        more.as_object().unwrap().iter().for_each(|(name, value)| request[name] = value.clone());
        let response = SERVER.post("/v1/messages", request);
        let error = response.json();
        assert!(response.status == 400 && error["type"] == "error" && error["error"]["type"] == "invalid_request_error", "{error}");
        assert!(error["error"]["message"].as_str().unwrap().contains(named), "{error}");
    }
}

#[test]
fn responses() {
    let answer = SERVER.post("/v1/responses", json!({ "model": "builtin", "input": PORTUGAL, "temperature": 0 })).json();
    assert_eq!((&answer["status"], &answer["output"][0]["content"][0]["text"]), (&json!("completed"), &json!(LISBON)));
    let events = events("/v1/responses", json!({ "input": question(), "temperature": 0, "stream": true }));
    let numbers: Vec<u64> = events.iter().map(|(_, event)| event["sequence_number"].as_u64().unwrap()).collect();
    assert!(numbers.iter().enumerate().all(|(place, number)| place as u64 == *number), "{numbers:?}");
    let text: String =
        events.iter().filter(|(name, _)| name == "response.output_text.delta").filter_map(|(_, event)| event["delta"].as_str()).collect();
    let last = &events.last().unwrap().1["response"];
    assert_eq!((text.as_str(), &last["output"][0]["content"][0]["text"], &last["status"]), (LISBON, &json!(LISBON), &json!("completed")));
    let short = SERVER.post("/v1/responses", json!({ "input": PORTUGAL, "max_output_tokens": 2 })).json();
    assert_eq!((&short["status"], &short["incomplete_details"]["reason"]), (&json!("incomplete"), &json!("max_output_tokens")));
    let function = json!({ "type": "function", "name": "set_unit", "parameters": tool_schema() });
    let called = SERVER
        .post(
            "/v1/responses",
            json!({ "input": PORTUGAL, "tools": [function], "tool_choice": "required", "temperature": 1.5, "max_output_tokens": 200 }),
        )
        .json();
    assert!(called["output"][0]["type"] == "function_call" && called["output"][0]["call_id"].is_string(), "{called}");
    for (more, param) in [
        (json!({ "store": true }), "store"),
        (json!({ "previous_response_id": "x" }), "previous_response_id"),
        (json!({ "truncation": "auto" }), "truncation"),
    ] {
        let mut request = json!({ "input": "Hi" });
        more.as_object().unwrap().iter().for_each(|(name, value)| request[name] = value.clone());
        let response = SERVER.post("/v1/responses", request);
        assert!(response.status == 400 && response.json()["error"]["param"] == param, "{response:?}");
    }
}

/// The lines of an answer.
fn lines(path: &str, body: Value) -> Vec<Value> {
    let response = SERVER.post(path, body);
    assert!(response.status == 200 && response.header("content-type") == "application/x-ndjson", "{response:?}");
    response.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn ollama() {
    let options = json!({ "temperature": 0 });
    let parts = lines("/api/chat", json!({ "model": "builtin:latest", "messages": question(), "options": options }));
    let text: String = parts.iter().map(|part| part["message"]["content"].as_str().unwrap()).collect();
    let last = parts.last().unwrap();
    assert_eq!((text.as_str(), &last["done"], &last["done_reason"]), (LISBON, &json!(true), &json!("stop")));
    assert!(last["eval_count"].as_u64().unwrap() > 0 && last["total_duration"].as_u64().unwrap() > 0, "{last}");
    let whole = SERVER.post("/api/generate", json!({ "model": "builtin", "prompt": PORTUGAL, "stream": false, "options": options })).json();
    assert_eq!(whole["response"], LISBON);
    let raw = lines(
        "/api/generate",
        json!({ "model": "builtin", "prompt": "Once", "raw": true, "options": { "temperature": 0, "num_predict": 4 } }),
    );
    assert_eq!(raw.last().unwrap()["eval_count"], 4);
    let formed = SERVER.post("/api/chat", json!({ "model": "builtin", "messages": question(), "stream": false, "format": tool_schema(), "options": { "temperature": 1.5 } })).json();
    assert!(serde_json::from_str::<Value>(formed["message"]["content"].as_str().unwrap()).unwrap()["unit"].is_string(), "{formed}");
    assert_eq!(SERVER.post("/api/chat", json!({ "model": "builtin", "messages": [] })).json()["done_reason"], "load");
    assert_eq!(SERVER.get("/api/tags").json()["models"][0]["name"], "builtin");
    assert_eq!(SERVER.get("/api/ps").json()["models"][0]["name"], "builtin");
    assert!(
        SERVER.post("/api/show", json!({ "model": "builtin" })).json()["capabilities"].as_array().unwrap().contains(&json!("completion"))
    );
    assert!(SERVER.get("/api/version").json()["version"].is_string());
    let missing = SERVER.post("/api/chat", json!({ "model": "other", "messages": question() }));
    assert!(missing.status == 404 && missing.json()["error"].as_str().unwrap().contains("`other`"), "{missing:?}");
    let large = SERVER.post("/api/chat", json!({ "model": "builtin", "messages": question(), "options": { "num_ctx": 1_000_000 } }));
    assert!(large.status == 400 && large.text().contains("1000000"), "{large:?}");
}

#[test]
fn tokens() {
    let tokens = SERVER.post("/tokenize", json!({ "prompt": LISBON, "return_token_strs": true })).json();
    let ids = tokens["tokens"].as_array().unwrap();
    assert_eq!(tokens["count"], ids.len());
    let joined: String = tokens["token_strs"].as_array().unwrap().iter().map(|token| token.as_str().unwrap()).collect();
    assert_eq!(joined, LISBON);
    assert_eq!(SERVER.post("/detokenize", json!({ "tokens": ids })).json()["prompt"], LISBON);
    let chat = SERVER.post("/tokenize", json!({ "messages": question() })).json();
    let answer = SERVER.post("/v1/chat/completions", json!({ "messages": question(), "max_tokens": 1 })).json();
    assert_eq!(chat["count"], answer["usage"]["prompt_tokens"]);
    assert_eq!(SERVER.post("/tokenize", json!({})).status, 400);
    for add in [true, false] {
        let long = SERVER.post("/tokenize", json!({ "prompt": "a ".repeat(2 << 20), "add_special_tokens": add }));
        assert!(long.status == 400 && long.json()["error"]["code"] == "context_length_exceeded", "{long:?}");
    }
    let many = SERVER.post("/v1/completions", json!({ "prompt": vec!["x"; 1025] }));
    assert!(many.status == 400 && many.text().contains("1025 prompts"), "{many:?}");
    let info = SERVER.get("/tokenizer_info").json();
    assert!(info["eos_token"].is_string() && info["chat_template"].as_str().unwrap().contains("im_start"), "{info}");
}

/// The demo model has no ears; what is checked is the form, and that a file beyond the usual limit of two megabytes gets as far as the model.
#[test]
fn transcriptions() {
    let form = |name: &str| {
        let sound = "x".repeat(3 << 20);
        format!(
            "--edge\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nbuiltin\r\n--edge\r\nContent-Disposition: form-data; name=\"{name}\"; filename=\"a.wav\"\r\n\r\n{sound}\r\n--edge--\r\n"
        )
    };
    let post = |body: &str| {
        SERVER.request("POST", "/v1/audio/transcriptions", &[("Content-Type", "multipart/form-data; boundary=edge")], body.as_bytes())
    };
    let deaf = post(&form("file"));
    assert!(deaf.status == 400 && deaf.text().contains("takes no"), "{deaf:?}");
    let unknown = post(&form("frobnicate"));
    assert!(unknown.status == 400 && unknown.json()["error"]["param"] == "frobnicate", "{unknown:?}");
    assert_eq!(post("").status, 400);
}

#[test]
fn operators() {
    SERVER.post("/v1/chat/completions", json!({ "messages": question(), "temperature": 0 }));
    let metrics = SERVER.get("/metrics").text();
    for name in [
        "vllm:time_to_first_token_seconds_bucket{model_name=\"builtin\",le=\"+Inf\"}",
        "vllm:inter_token_latency_seconds_count",
        "vllm:e2e_request_latency_seconds_sum",
        "vllm:prefix_cache_hits_total",
        "vllm:kv_cache_usage_perc",
        "vllm:request_success_total{model_name=\"builtin\",finished_reason=\"stop\"}",
    ] {
        assert!(metrics.contains(name), "{name} in\n{metrics}");
    }
    assert_eq!(SERVER.get("/health").json()["status"], "ok");
    assert_eq!(SERVER.get("/slots").json().as_array().unwrap().len(), 8);
    let info = SERVER.get("/server_info").json();
    assert!(info["models"][0]["stages"].as_array().unwrap().len() > 3 && info["model_names"] == json!(["builtin"]), "{info}");
    assert_eq!((&info["models"][0]["device"], &info["models"][0]["test_device"]), (&json!("cpu"), &json!(false)), "{info}");
    assert!(SERVER.get("/page.js").text().contains("test_device"));
    let verified = SERVER.post("/verify", json!({ "model": "builtin" })).json();
    assert_eq!(verified["passed"], true, "{verified}");
    let description = SERVER.get("/openapi.json").json();
    assert_eq!(description["openapi"], "3.1.0");
    let text = description.to_string();
    for place in text.split("\"$ref\":\"#/components/schemas/").skip(1).map(|rest| rest.split('"').next().unwrap()) {
        assert!(description["components"]["schemas"].get(place).is_some(), "{place} is described");
    }
    assert!(description["components"]["schemas"]["ChatRequest"]["properties"]["max_completion_tokens"].is_object());
}

#[test]
fn the_page_asks_nobody_else() {
    for (path, kind) in
        [("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript"), ("/markdown.js", "text/javascript")]
    {
        let file = SERVER.get(path);
        assert!(file.status == 200 && file.header("content-type").starts_with(kind), "{file:?}");
        assert!(file.header("content-security-policy").contains("default-src 'none'"));
        let text = file.text();
        // What browsers offer on https and localhost only is not called.
        assert!(
            !text.contains("randomUUID(") && !text.contains("innerHTML") && !text.contains("src=\"http") && !text.contains("href=\"http"),
            "{path}"
        );
    }
}

#[test]
fn the_stream_with_details_says_where_it_ran() {
    let frames = SERVER.stream("/v1/chat/completions", json!({ "messages": question(), "stream": true, "details": true }));
    let details = frames.iter().find_map(|frame| frame.get("details")).unwrap();
    assert!(details["stages"].as_array().unwrap().len() > 3 && details["timing"]["prompt_tokens"].as_u64().unwrap() > 0, "{details}");
}

//! The OpenAI API, as its clients use it.

use crate::common::TestServer;
use serde_json::{Value, json};
use std::sync::LazyLock;

static SERVER: LazyLock<TestServer> = LazyLock::new(TestServer::new);

fn ask(question: &str) -> Value {
    json!([{ "role": "user", "content": question }])
}

fn with(mut body: Value, more: Value) -> Value {
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

const PORTUGAL: &str = "What is the capital of Portugal?";
const LISBON: &str = "The capital of Portugal is Lisbon.";

#[test]
fn a_chat_is_answered() {
    let response = SERVER.post("/v1/chat/completions", json!({ "model": "builtin", "messages": ask(PORTUGAL), "temperature": 0 }));
    assert_eq!(response.status, 200, "{response:?}");
    let answer = response.json();
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"]["content"], LISBON);
    assert_eq!((&choice["message"]["role"], &choice["finish_reason"], &choice["index"]), (&json!("assistant"), &json!("stop"), &json!(0)));
    assert_eq!((&answer["object"], &answer["model"]), (&json!("chat.completion"), &json!("builtin")));
    let usage = &answer["usage"];
    assert_eq!(usage["total_tokens"], usage["prompt_tokens"].as_u64().unwrap() + usage["completion_tokens"].as_u64().unwrap());
    assert!(answer["id"].as_str().unwrap().starts_with("chatcmpl-") && answer["created"].as_u64().unwrap() > 1_700_000_000);
}

#[test]
fn a_stream_is_the_answer_in_parts() {
    let frames = SERVER
        .stream("/v1/chat/completions", json!({ "messages": ask(PORTUGAL), "stream": true, "stream_options": { "include_usage": true } }));
    assert_eq!(frames[0]["choices"][0]["delta"], json!({ "role": "assistant", "content": "" }));
    let (last, others) = frames.split_last().unwrap();
    assert!(last["choices"].as_array().unwrap().is_empty() && last["usage"]["completion_tokens"].as_u64().unwrap() > 0, "{last}");
    assert!(others.iter().all(|frame| frame["usage"].is_null() && frame.get("usage").is_some()));
    let end = others.last().unwrap();
    assert_eq!((&end["choices"][0]["delta"], &end["choices"][0]["finish_reason"]), (&json!({}), &json!("stop")));
    let content: String = others.iter().filter_map(|frame| frame["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(content, LISBON);
    assert!(frames.iter().all(|frame| frame["id"] == frames[0]["id"] && frame["object"] == "chat.completion.chunk"));
    // Without being asked for, usage is not told.
    let frames = SERVER.stream("/v1/chat/completions", json!({ "messages": ask(PORTUGAL), "stream": true }));
    assert!(frames.iter().all(|frame| frame.get("usage").is_none() && frame["choices"].as_array().unwrap().len() == 1));
}

#[test]
fn several_answers_and_seeds() {
    let request = json!({ "messages": ask("Tell me a story."), "n": 3, "temperature": 1.2, "seed": 7, "max_tokens": 24 });
    let texts = |request: &Value| {
        let answer = SERVER.post("/v1/chat/completions", request.clone()).json();
        let choices = answer["choices"].as_array().unwrap().clone();
        let indices: Vec<_> = choices.iter().map(|choice| choice["index"].as_u64().unwrap()).collect();
        assert_eq!(indices, [0, 1, 2], "{answer}");
        choices.iter().map(|choice| choice["message"]["content"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let first = texts(&request);
    assert_eq!(first, texts(&request), "the same seed gives the same texts");
    assert!(first[0] != first[1] || first[1] != first[2], "{first:?}");
    // Streamed, each choice is the same.
    let mut streamed = vec![String::new(); 3];
    for frame in SERVER.stream("/v1/chat/completions", with(request.clone(), json!({ "stream": true }))) {
        let choice = &frame["choices"][0];
        streamed[choice["index"].as_u64().unwrap() as usize] += choice["delta"]["content"].as_str().unwrap_or_default();
    }
    assert_eq!(streamed, first);
    // Without a seed requests differ: not every two, the model knows few stories.
    let unseeded = json!({ "messages": ask("Tell me a story."), "n": 3, "temperature": 2, "max_tokens": 24 });
    let told = texts(&unseeded);
    assert!((0..8).any(|_| texts(&unseeded) != told), "{told:?}");
}

#[test]
fn answers_end_where_they_should() {
    let answer = |more: Value| {
        let answer = SERVER.post("/v1/chat/completions", with(json!({ "messages": ask(PORTUGAL), "temperature": 0 }), more)).json();
        (
            answer["choices"][0]["message"]["content"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned(),
            answer["choices"][0]["finish_reason"].clone(),
        )
    };
    assert_eq!(answer(json!({ "stop": [" Lisbon", "unheard"] })), ("The capital of Portugal is".to_owned(), json!("stop")));
    assert_eq!(answer(json!({ "stop": " of" })), ("The capital".to_owned(), json!("stop")));
    let (short, reason) = answer(json!({ "max_completion_tokens": 2 }));
    assert!(LISBON.starts_with(&short) && short.len() < LISBON.len() && reason == "length", "{short}");
    assert_eq!(answer(json!({ "max_tokens": 2 })).0, short);
}

#[test]
fn probabilities_of_tokens() {
    let request = json!({ "messages": ask(PORTUGAL), "temperature": 0, "logprobs": true, "top_logprobs": 3 });
    let answer = SERVER.post("/v1/chat/completions", request.clone()).json();
    let tokens = answer["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    for token in &tokens {
        let top = token["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 3);
        // Greedy takes the most probable.
        assert_eq!((&top[0]["token"], &top[0]["logprob"]), (&token["token"], &token["logprob"]));
        assert!(token["logprob"].as_f64().unwrap() <= 0.0 && top[0]["logprob"].as_f64() >= top[1]["logprob"].as_f64());
    }
    let bytes: Vec<u8> =
        tokens.iter().flat_map(|token| token["bytes"].as_array().unwrap()).map(|byte| byte.as_u64().unwrap() as u8).collect();
    assert!(String::from_utf8(bytes).unwrap().starts_with(LISBON));
    let frames = SERVER.stream("/v1/chat/completions", with(request, json!({ "stream": true })));
    let streamed: Vec<Value> =
        frames.iter().filter_map(|frame| frame["choices"][0]["logprobs"]["content"].as_array()).flatten().cloned().collect();
    assert_eq!(streamed, tokens);
}

#[test]
fn biases_and_penalties() {
    let first = |more: Value| {
        let request = with(json!({ "messages": ask(PORTUGAL), "temperature": 0, "max_tokens": 6, "logprobs": true }), more);
        let answer = SERVER.post("/v1/chat/completions", request).json();
        answer["choices"][0]["message"]["content"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned()
    };
    let tokens = SERVER.post("/v1/completions", json!({ "prompt": "The", "max_tokens": 0, "echo": true, "logprobs": 0 })).json();
    assert_eq!(tokens["choices"][0]["text"], "The");
    let (plain, penalised) = (first(json!({})), first(json!({ "presence_penalty": 2, "frequency_penalty": 2 })));
    assert!(LISBON.starts_with(&plain));
    // Banning an id changes the answer; every id may be named by its number.
    let banned: serde_json::Map<String, Value> = (0..400).map(|id| (id.to_string(), json!(-100))).collect();
    assert_ne!(first(json!({ "logit_bias": banned })), plain);
    assert!(!penalised.is_empty());
}

#[test]
fn texts_are_continued() {
    let answer = SERVER
        .post("/v1/completions", json!({ "prompt": ["Once", "The capital of Italy"], "n": 2, "max_tokens": 4, "temperature": 0 }))
        .json();
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.iter().map(|choice| choice["index"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert_eq!((&choices[0]["text"], &choices[2]["text"]), (&choices[1]["text"], &choices[3]["text"]));
    assert_ne!(choices[0]["text"], choices[2]["text"]);
    let echoed = SERVER.post("/v1/completions", json!({ "prompt": "Once", "max_tokens": 4, "echo": true, "temperature": 0 })).json();
    assert_eq!(echoed["choices"][0]["text"], format!("Once{}", choices[0]["text"].as_str().unwrap()));
    let frames = SERVER.stream(
        "/v1/completions",
        json!({ "prompt": "Once", "max_tokens": 4, "stream": true, "temperature": 0, "stream_options": { "include_usage": true } }),
    );
    let streamed: String = frames.iter().filter_map(|frame| frame["choices"][0]["text"].as_str()).collect();
    assert_eq!(streamed, choices[0]["text"].as_str().unwrap());
    assert_eq!(frames.last().unwrap()["usage"]["completion_tokens"], 4);
}

/// What lm-evaluation-harness asks: prompts as ids, with the probability of each of them.
#[test]
fn prompts_are_scored() {
    let model = qhx::Model::open("builtin").unwrap();
    let ids = model.tokenize("The capital of Portugal is Lisbon.").unwrap();
    let request = json!({ "prompt": [ids], "max_tokens": 1, "logprobs": 1, "echo": true, "temperature": 0 });
    let answer = SERVER.post("/v1/completions", request).json();
    let scored = &answer["choices"][0]["logprobs"];
    let expected = model.score(&ids, 1).unwrap();
    let log_probs = scored["token_logprobs"].as_array().unwrap();
    assert_eq!(log_probs.len(), ids.len() + 1, "one token was generated");
    assert!(log_probs[0].is_null() && scored["top_logprobs"][0].is_null());
    for (place, score) in expected.iter().enumerate() {
        let found = log_probs[place + 1].as_f64().unwrap();
        assert!((found - f64::from(score.log_prob)).abs() < 1e-6, "{place}: {found} {score:?}");
        let top = scored["top_logprobs"][place + 1].as_object().unwrap();
        let best = top.iter().max_by(|a, b| a.1.as_f64().partial_cmp(&b.1.as_f64()).unwrap()).unwrap();
        assert_eq!(best.1.as_f64().unwrap() as f32, score.top[0].1);
        // Clients compare the numbers to see whether the token was the most probable.
        assert_eq!(top[scored["tokens"][place + 1].as_str().unwrap()], log_probs[place + 1]);
        assert_eq!(*best.0 == scored["tokens"][place + 1], score.top[0].0 == score.id);
    }
    let texts: String = scored["tokens"].as_array().unwrap().iter().take(ids.len()).map(|token| token.as_str().unwrap()).collect();
    assert_eq!(texts, "The capital of Portugal is Lisbon.");
    let offsets: Vec<_> = scored["text_offset"].as_array().unwrap().iter().map(|offset| offset.as_u64().unwrap() as usize).collect();
    assert!(offsets.windows(2).all(|two| two[0] < two[1]) && offsets[0] == 0);
    // The prompt alone.
    let alone = SERVER.post("/v1/completions", json!({ "prompt": ids, "max_tokens": 0, "logprobs": 1, "echo": true })).json();
    assert_eq!(alone["choices"][0]["logprobs"]["tokens"].as_array().unwrap().len(), ids.len());
    assert_eq!(alone["usage"]["completion_tokens"], 0);
}

#[test]
fn what_is_not_done_is_named() {
    let chat = |more: Value| SERVER.post("/v1/chat/completions", with(json!({ "messages": ask("Hi") }), more));
    for (more, param) in [
        (json!({ "frobnicate": 1 }), "frobnicate"),
        (json!({ "web_search_options": {} }), "web_search_options"),
        (json!({ "n": 0 }), "n"),
        (json!({ "n": 1000 }), "n"),
        (json!({ "store": true }), "store"),
        (json!({ "modalities": ["audio"] }), "modalities"),
        (json!({ "top_logprobs": 3 }), "top_logprobs"),
        (json!({ "logprobs": true, "top_logprobs": 21 }), "top_logprobs"),
        (json!({ "logit_bias": { "x": 1 } }), "logit_bias"),
        (json!({ "logit_bias": { "1": 101 } }), "logit_bias"),
        (json!({ "presence_penalty": 3 }), "presence_penalty"),
        (json!({ "max_tokens": 0 }), "max_completion_tokens"),
        (json!({ "stream_options": {} }), "stream_options"),
        (json!({ "messages": [] }), "messages"),
        (json!({ "messages": [{ "content": "x" }] }), "messages"),
        (
            json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url", "image_url": { "url": "/etc/passwd" } }] }] }),
            "messages",
        ),
        (
            json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url", "image_url": { "url": "https://host/x.png" } }] }] }),
            "messages[0].content[0]",
        ),
    ] {
        let response = chat(more.clone());
        assert_eq!(response.status, 400, "{more}: {response:?}");
        let error = &response.json()["error"];
        assert_eq!(error["param"], param, "{more}: {error}");
        assert!(error["message"].as_str().unwrap().len() > 5 && error["type"] == "invalid_request_error", "{error}");
    }
    let error = chat(json!({ "temperature": -1 }));
    assert!(error.status == 400 && error.text().contains("temperature"), "{error:?}");
    for body in ["", "{", "[]", "{\"messages\": 1}"] {
        let response = SERVER.request("POST", "/v1/chat/completions", &[], body.as_bytes());
        assert_eq!(response.status, 400, "{body}: {response:?}");
    }
    let missing = SERVER.post("/v1/chat/completions", json!({ "model": "gpt-4", "messages": ask("Hi") }));
    assert!(missing.status == 404 && missing.json()["error"]["code"] == "model_not_found", "{missing:?}");
    assert_eq!(SERVER.get("/v1/nothing").status, 404);
    assert_eq!(SERVER.get("/v1/chat/completions").status, 405);
}

#[test]
fn a_prompt_beyond_the_context_is_refused_with_both_numbers() {
    let context = SERVER.get("/v1/models/builtin").json()["max_model_len"].as_u64().unwrap();
    let ids = vec![5; context as usize + 1];
    let response = SERVER.post("/v1/completions", json!({ "prompt": ids }));
    let error = response.json()["error"].clone();
    assert_eq!((response.status, &error["code"]), (400, &json!("context_length_exceeded")));
    let message = error["message"].as_str().unwrap();
    assert!(message.contains(&(context + 1).to_string()) && message.contains(&context.to_string()), "{message}");
}

#[test]
fn eight_streams_at_once_are_eight_answers() {
    let request = |number: usize| {
        let question = ["Tell me a story.", PORTUGAL, "What is 3 plus 4?", "What is the capital of Japan?"][number % 4];
        json!({ "messages": ask(question), "seed": number, "temperature": if number % 2 == 0 { 0.9 } else { 0.0 }, "max_tokens": 40, "stream": true })
    };
    let text = |number| -> String {
        let frames = SERVER.stream("/v1/chat/completions", request(number));
        frames.iter().filter_map(|frame| frame["choices"][0]["delta"]["content"].as_str()).collect()
    };
    let alone: Vec<String> = (0..8).map(text).collect();
    let together: Vec<String> = std::thread::scope(|scope| {
        let all: Vec<_> = (0..8).map(|number| scope.spawn(move || text(number))).collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    });
    assert_eq!(alone, together);
}

#[test]
fn models_are_listed() {
    let list = SERVER.get("/v1/models").json();
    assert_eq!((&list["object"], &list["data"][0]["id"]), (&json!("list"), &json!("builtin")));
    assert_eq!(SERVER.get("/v1/models/builtin").json()["object"], "model");
    assert_eq!(SERVER.get("/v1/models/other").status, 404);
}

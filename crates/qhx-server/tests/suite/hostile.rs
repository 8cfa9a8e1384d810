//! Requests that were made to stop a server, or to make others wait.

use crate::common::{TestServer, wait_until};
use serde_json::{Map, Value, json};
use std::{
    io::{Read, Write},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

/// The capital of Portugal, asked in passing: whatever else is asked must not delay it.
fn ask(server: &TestServer) -> (String, Duration) {
    let began = Instant::now();
    let answer =
        server.post("/v1/chat/completions", json!({ "messages": [{ "role": "user", "content": "What is the capital of Portugal?" }] }));
    (answer.json()["choices"][0]["message"]["content"].as_str().unwrap_or_default().to_owned(), began.elapsed())
}

fn schema_of(count: usize, of: fn(usize) -> Value) -> Value {
    (0..count).map(|n| (format!("p{n}"), of(n))).collect::<Map<String, Value>>().into()
}

/// Grammars that recursed once as deep as they are long, in every API that takes them.
#[test]
fn large_grammars_end_no_server() {
    let server = TestServer::new();
    let wide = json!({ "type": "object", "properties": schema_of(30_000, |_| json!({ "type": "null" })), "additionalProperties": false });
    let mut chain = schema_of(9_000, |n| json!({ "type": "array", "items": { "$ref": format!("#/$defs/p{}", n + 1) } }));
    chain["p9000"] = json!({ "type": "null" });
    let chain = json!({ "$ref": "#/$defs/p0", "$defs": chain });
    let rules: String = (0..20_000).map(|n| format!("r{n}: \"a\" r{}\n", n + 1)).collect();
    let lark = format!("start: r0\n{rules}r20000: \"b\"\n");
    let messages = json!([{ "role": "user", "content": "Hi" }]);
    let format = |schema: &Value| json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": schema } });
    let tool = |schema: &Value| json!([{ "name": "f", "input_schema": schema }]);
    for schema in [&wide, &chain] {
        for (path, body) in [
            ("/v1/chat/completions", json!({ "messages": messages, "response_format": format(schema) })),
            ("/v1/responses", json!({ "input": "Hi", "text": { "format": { "type": "json_schema", "name": "x", "schema": schema } } })),
            (
                "/v1/messages",
                json!({ "model": "builtin", "max_tokens": 5, "messages": messages, "tools": tool(schema), "tool_choice": { "type": "any" } }),
            ),
            ("/api/chat", json!({ "model": "builtin", "messages": messages, "format": schema, "stream": false })),
        ] {
            let answer = server.post(path, body);
            assert_eq!(answer.status, 400, "{path}: {answer:?}");
            // The last has its tools in the prompt, too.
            assert!(answer.text().contains("at most") || path == "/v1/messages", "{path}: {}", answer.text());
        }
    }
    let lark = server.post("/v1/chat/completions", json!({ "messages": messages, "response_format": { "type": "lark", "grammar": lark } }));
    assert_eq!(lark.status, 400, "{lark:?}");
    let nothing = json!({ "messages": messages, "response_format": { "type": "regex", "regex": "[^\\s\\S]" } });
    assert_eq!(server.post("/v1/chat/completions", nothing).status, 400);
    assert_eq!(ask(&server).0, "The capital of Portugal is Lisbon.");
}

/// Texts that must come delay nobody, however long, and end with the tokens that were asked for.
#[test]
fn forced_texts_delay_nobody() {
    let mut server = TestServer::new();
    let doublings: String = (1..30).map(|n| format!("r{n}: r{} r{}\n", n + 1, n + 1)).collect();
    let long = "zq9-".repeat(4000);
    let constraints = [
        json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "x", "schema": { "const": long } } } }),
        json!({ "response_format": { "type": "regex", "regex": "a{20000}" } }),
        json!({ "response_format": { "type": "lark", "grammar": format!("start: r1\n{doublings}r30: \"ab\"\n") } }),
    ];
    for constraint in constraints {
        let mut body = constraint;
        body["messages"] = json!([{ "role": "user", "content": "Hi" }]);
        body["max_tokens"] = 4.into();
        let began = Instant::now();
        let answer = server.post("/v1/chat/completions", body.clone()).json();
        assert_eq!(
            (&answer["choices"][0]["finish_reason"], &answer["usage"]["completion_tokens"]),
            (&"length".into(), &4.into()),
            "{answer}"
        );
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        // While another is under way.
        body["max_tokens"] = 500.into();
        let mut other = server.send("POST", "/v1/chat/completions", &[], body.to_string().as_bytes());
        server.wait_for("num_total_reqs", 1..=1);
        let (text, took) = ask(&server);
        assert_eq!(text, "The capital of Portugal is Lisbon.");
        assert!(took < Duration::from_secs(5), "{took:?}");
        let mut answer = String::new();
        other.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
    let began = Instant::now();
    server.end();
    assert!(began.elapsed() < Duration::from_secs(5));
}

/// Bodies that would take many times their size, or all the memory there is together.
#[test]
fn bodies_together_have_a_limit() {
    let server = TestServer::with(|options| options.body_bytes = 2 << 20);
    let post = |body: &str| server.request("POST", "/v1/chat/completions", &[], body.as_bytes());
    let trees = format!(r#"{{"messages": [], "chat_template_kwargs": {{"x": [{}0]}}}}"#, "[],".repeat(600_000));
    let answer = post(&trees);
    assert!(answer.status == 400 && answer.text().contains("more than 500000 values"), "{answer:?}");
    let twice = post(r#"{"messages": [{"role": "user", "content": "a", "content": "b"}]}"#);
    assert!(twice.status == 400 && twice.text().contains("`content` occurs twice"), "{twice:?}");
    // Whoever does not finish takes room, and gives it back.
    const SIZE: usize = 300 << 10;
    let large = json!({ "messages": [{ "role": "user", "content": "a ".repeat(SIZE / 2) }] }).to_string();
    let mut unfinished = Vec::new();
    while post(&large).status != 503 {
        assert!(unfinished.len() < 400, "there is always room");
        let mut stream = server.send_head("POST", "/v1/chat/completions", &[("Transfer-Encoding", "chunked")]);
        let _ = stream.write_all(format!("{SIZE:x}\r\n{}\r\n", " ".repeat(SIZE)).as_bytes());
        unfinished.push(stream);
    }
    // Small ones are answered all the same.
    assert_eq!(ask(&server).0, "The capital of Portugal is Lisbon.");
    drop(unfinished);
    let began = Instant::now();
    while post(&large).status == 503 {
        assert!(began.elapsed() < Duration::from_secs(20), "room is not given back");
    }
}

/// What is wrong with a request's own form is told as that.
#[test]
fn malformed_requests_are_bad_requests() {
    let server = TestServer::new();
    let coded = server.request("POST", "/v1/completions", &[("Content-Encoding", "gzip")], b"{}");
    assert_eq!(coded.status, 415, "{coded:?}");
    let coded = server.request("POST", "/v1/completions", &[("Content-Encoding", "identity"), ("Content-Encoding", "gzip")], b"{}");
    assert!(coded.status == 415 && coded.text().contains("`gzip`"), "{coded:?}");
    let field = "--edge\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nbuiltin\r\n";
    let twice = format!("{}--edge--", field.repeat(2));
    let kind = [("Content-Type", "multipart/form-data; boundary=edge")];
    let twice = server.request("POST", "/v1/audio/transcriptions", &kind, twice.as_bytes());
    assert!(twice.status == 400 && twice.text().contains("occurs twice"), "{twice:?}");
    // What only looks like a file is a text.
    let text = json!({ "prompt": "a".repeat(9 << 20) });
    let text = server.post("/v1/completions", text);
    assert!(text.status == 400 && text.text().contains("texts have more than"), "{text:?}");
    let penalty = json!({ "prompt": "Once", "repetition_penalty": 1e-45 });
    assert_eq!(server.post("/v1/completions", penalty).status, 400);
    for (name, value) in [("Host", "user@localhost"), ("Origin", "http://user@localhost"), ("Host", "l\u{f6}calhost")] {
        assert_eq!(server.request("GET", "/v1/models", &[(name, value)], b"").status, 400, "{name}: {value}");
    }
}

/// What takes long is done on other threads than those that answer: who asks whether the server lives waits little longer than on a machine that is as busy with something else.
#[test]
fn large_requests_do_not_hold_up_others() {
    const VALUES: usize = 400_000;
    const POLLS: usize = 20;
    const WORK: usize = 12;
    /// As many as there are threads that answer, and one more.
    const CLIENTS: usize = 3;
    let server = TestServer::with(|options| options.body_bytes = 64 << 20);
    let numbers = format!("[{}3]", "3,".repeat(VALUES));
    let user = r#""messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1"#;
    let requests = [
        ("/detokenize", format!(r#"{{"tokens": {numbers}}}"#)),
        ("/tokenize", format!(r#"{{"prompt": "{}", "return_token_strs": true}}"#, "a b ".repeat(50_000))),
        ("/v1/responses", format!(r#"{{"input": "Hi", "max_output_tokens": 1, "metadata": {{"x": {numbers}}}}}"#)),
        ("/v1/responses", format!(r#"{{"input": "Hi", "max_output_tokens": 1, "stream": true, "metadata": {{"x": {numbers}}}}}"#)),
        ("/v1/chat/completions", format!(r#"{{{user}, "chat_template_kwargs": {{"x": {numbers}}}}}"#)),
    ];
    // Looked at now and then, as long as it takes to do the work so many times. Nearly the slowest: a machine that is busy elsewhere delays some.
    let among = |work: &(dyn Fn() + Sync)| {
        let done = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..CLIENTS {
                scope.spawn(|| {
                    while done.load(Ordering::Relaxed) < WORK {
                        work();
                        done.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            let mut took = Vec::new();
            while done.load(Ordering::Relaxed) < WORK || took.len() < POLLS {
                let began = Instant::now();
                assert_eq!(server.get("/health").status, 200);
                took.push(began.elapsed());
                thread::sleep(Duration::from_millis(2));
            }
            took.sort();
            took[took.len() * 9 / 10]
        })
    };
    let busy = among(&|| _ = std::hint::black_box((0..100_000_000u64).fold(0, |sum, number| sum ^ number.wrapping_mul(sum | 1))));
    for (path, body) in &requests {
        let answer = server.request("POST", path, &[], body.as_bytes());
        assert_eq!(answer.status, 200, "{path}: {:.300}", answer.text());
        let took = among(&|| drop(server.request("POST", path, &[], body.as_bytes())));
        println!("{path}, {} bytes: {took:?}, {busy:?} on a busy machine", body.len());
        assert!(took < 3 * busy + Duration::from_millis(25), "{path}, {} bytes: {took:?}, {busy:?} on a busy machine", body.len());
    }
}

/// Requests of which none is large give memory back, too.
#[test]
fn freed_memory_is_given_back() {
    static TIMES: AtomicUsize = AtomicUsize::new(0);
    let server = TestServer::with(|options| {
        options.give_back = || {
            TIMES.fetch_add(1, Ordering::Relaxed);
        }
    });
    let wait_for = |times: usize| wait_until("memory is given back", || TIMES.load(Ordering::Relaxed) >= times);
    // A small one, once no more follows.
    ask(&server);
    wait_for(1);
    // Many that do not end.
    let before = TIMES.load(Ordering::Relaxed);
    let unfinished: Vec<_> = (0..20)
        .map(|_| {
            let mut stream = server.send_head("POST", "/v1/chat/completions", &[("Content-Length", "1000000")]);
            stream.write_all(&[b' '; 900_000]).unwrap();
            stream
        })
        .collect();
    drop(unfinished);
    wait_for(before + 1);
}

//! Who may ask, how much, and what happens when clients misbehave or the server stops.

use crate::common::TestServer;
use qhx::engine::EngineOptions;
use serde_json::{Value, json};
use std::{
    io::{ErrorKind, Read, Write},
    net::{Shutdown, TcpStream},
    thread,
    time::{Duration, Instant},
};

/// An answer that takes long.
fn long(stream: bool) -> Vec<u8> {
    let messages = json!([{ "role": "user", "content": "Tell me a story." }]);
    json!({ "messages": messages, "ignore_eos": true, "stream": stream, "temperature": 1, "max_tokens": 100_000 }).to_string().into_bytes()
}

#[test]
fn keys_are_needed_where_they_are_set() {
    let server = TestServer::with(|options| options.keys = vec!["secret-one".into(), "secret-two".into()]);
    let ask = |headers: &[(&str, &str)]| server.request("GET", "/v1/models", headers, b"").status;
    assert_eq!(ask(&[]), 401);
    for (name, value) in
        [("Authorization", "Bearer secret-on"), ("Authorization", "secret-one"), ("Authorization", "Bearer "), ("x-api-key", "nope")]
    {
        assert_eq!(ask(&[(name, value)]), 401, "{name}: {value}");
    }
    for (name, value) in [("Authorization", "Bearer secret-one"), ("x-api-key", "secret-two")] {
        assert_eq!(ask(&[(name, value)]), 200, "{name}: {value}");
    }
    assert_eq!(server.get("/health").status, 200);
    for path in ["/metrics", "/slots", "/server_info", "/nothing"] {
        assert_eq!(server.get(path).status, 401, "{path}");
    }
    let refused = server.request("POST", "/v1/messages", &[], b"{}");
    assert_eq!(refused.json()["error"]["type"], "authentication_error");
}

/// How long an answer takes tells whether the prompt was seen before: not to others.
#[test]
fn prefixes_are_not_shared_between_keys() {
    let question = "Tell me a story about a very long journey over the sea, with a storm, an island, and a treasure that nobody wanted.";
    let cached = |server: &TestServer, key: &str| {
        let body = json!({ "messages": [{ "role": "user", "content": question }], "max_tokens": 1 }).to_string();
        let answer = server.request("POST", "/v1/chat/completions", &[("x-api-key", key)], body.as_bytes()).json();
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or_else(|| panic!("{answer}"))
    };
    let keys = || vec!["one".to_owned(), "two".to_owned()];
    let apart = TestServer::with(|options| options.keys = keys());
    assert_eq!(cached(&apart, "one"), 0);
    assert!(cached(&apart, "one") > 0);
    assert_eq!(cached(&apart, "two"), 0, "the other key sees nothing of it");
    let shared = TestServer::with(|options| (options.keys, options.share_prefixes) = (keys(), true));
    cached(&shared, "one");
    assert!(cached(&shared, "two") > 0);
}

#[test]
fn pages_of_other_origins_are_refused() {
    let server = TestServer::new();
    let own = format!("http://{}", server.address);
    let status = |headers: &[(&str, &str)]| server.request("GET", "/v1/models", headers, b"").status;
    assert_eq!(status(&[("Origin", &own)]), 200);
    for origin in ["https://example.com", "null", "http://127.0.0.1:1"] {
        assert_eq!(status(&[("Origin", origin)]), 403, "{origin}");
    }
    // A name that somebody made point to this machine.
    assert_eq!(status(&[("Host", "rebound.example.com")]), 403);
    assert_eq!(status(&[("Host", "localhost:80")]), 200);
}

#[test]
fn bodies_are_limited() {
    let server = TestServer::with(|options| options.body_bytes = 1000);
    let body = vec![b' '; 1001];
    assert_eq!(server.request("POST", "/v1/completions", &[], &body).status, 413);
    // One that says it is small, and is not, in chunks.
    let chunk = |bytes: usize| format!("{bytes:x}\r\n{}\r\n", " ".repeat(bytes));
    let request = br#"{"prompt": "Once", "max_tokens": 1}"#;
    let small = format!("{:x}\r\n{}\r\n", request.len(), String::from_utf8_lossy(request));
    let room = 1000 - request.len();
    for (chunks, expected) in [
        (chunk(200).repeat(10), 413),
        (chunk(1001), 413),
        (format!("{small}{}", chunk(room + 1)), 413),
        (format!("{small}{}", chunk(1).repeat(room + 1)), 413),
        // As much as may be.
        (format!("{small}{}", chunk(room)), 200),
    ] {
        assert_eq!(status_in_chunks(&server, &format!("{chunks}0\r\n\r\n")), expected, "{chunks:.80}");
    }
}

/// The status that a body in chunks gets.
fn status_in_chunks(server: &TestServer, chunks: &str) -> u16 {
    let mut stream = server.send("POST", "/v1/completions", &[("Transfer-Encoding", "chunked")], chunks.as_bytes());
    let mut head = [0; 12];
    stream.read_exact(&mut head).unwrap();
    std::str::from_utf8(&head).unwrap().strip_prefix("HTTP/1.1 ").unwrap().parse().unwrap()
}

/// Chunks that are none are the client's mistake, and no matter of size.
#[test]
fn broken_chunks_are_told_from_large_ones() {
    let server = TestServer::with(|options| options.body_bytes = 1000);
    for chunks in ["xyz\r\n", "-1\r\n{}\r\n0\r\n\r\n", "2\r\n{}{}\r\n0\r\n\r\n", "10000000000000000\r\n", "2\r\n{}\r\n\r\n"] {
        assert_eq!(status_in_chunks(&server, chunks), 400, "{chunks:?}");
    }
    server.wait_until_idle();
}

/// Whoever comes when all connections are taken is answered once one of them has gone.
#[test]
fn connections_are_limited() {
    let server = TestServer::with(|options| options.connections = 2);
    // Two that have said nothing yet.
    let mut held: Vec<TcpStream> = (0..2).map(|_| TcpStream::connect(server.address).unwrap()).collect();
    let mut waiting = server.send("GET", "/health", &[], b"");
    waiting.set_nonblocking(true).unwrap();
    // It would have its turn while these are answered, one after the other.
    for number in 0..100 {
        assert!(health_of_kept(&mut held[number % 2]).starts_with("HTTP/1.1 200"));
        let answered = waiting.peek(&mut [0]);
        assert!(answered.as_ref().is_err_and(|e| e.kind() == ErrorKind::WouldBlock), "a third connection is answered: {answered:?}");
    }
    drop(held);
    waiting.set_nonblocking(false).unwrap();
    let mut head = [0; 12];
    waiting.read_exact(&mut head).unwrap();
    assert_eq!(&head, b"HTTP/1.1 200");
}

/// What `/health` answers on a connection that is kept.
fn health_of_kept(stream: &mut TcpStream) -> String {
    stream.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let (mut answer, mut length) = (Vec::new(), None);
    while length.is_none_or(|length| answer.len() < length) {
        let mut bytes = [0; 1024];
        let count = stream.read(&mut bytes).unwrap();
        assert_ne!(count, 0, "it is not kept");
        answer.extend_from_slice(&bytes[..count]);
        let text = String::from_utf8_lossy(&answer).into_owned();
        length = text.find("\r\n\r\n").map(|head| {
            let body = text.lines().find_map(|line| line.strip_prefix("content-length: "));
            head + 4 + body.map_or(0, |body| body.parse().unwrap())
        });
    }
    String::from_utf8(answer).unwrap()
}

#[test]
fn too_many_requests_are_told_to_come_again() {
    let server = TestServer::with(|options| {
        options.load.sessions = 1;
        let mut engine = EngineOptions::default();
        engine.queue = 1;
        options.engine = engine;
    });
    // All are sent before one is read: an answer's head comes when its turn does.
    let sent: Vec<_> = (0..20).map(|_| server.send("POST", "/v1/chat/completions", &[], &long(true))).collect();
    let refused = sent.into_iter().rev().find_map(|mut stream| {
        let mut head = [0; 12];
        stream.read_exact(&mut head).unwrap();
        let mut rest = String::new();
        (&head == b"HTTP/1.1 429").then(|| stream.read_to_string(&mut rest).map(|_| rest).unwrap())
    });
    let refused = refused.expect("one of them was refused");
    assert!(refused.contains("retry-after: 1") && refused.contains("queue_full"), "{refused}");
    server.wait_until_idle();
}

#[test]
fn a_client_that_goes_away_frees_its_place() {
    let server = TestServer::with(|options| options.load.context = Some(4096));
    let ids = vec![7u32; 3500];
    let prefill = json!({ "prompt": ids, "max_tokens": 500, "ignore_eos": true }).to_string().into_bytes();
    // The last is gone while its prompt is read.
    for (path, body) in [("/v1/chat/completions", long(true)), ("/v1/chat/completions", long(false)), ("/v1/completions", prefill)] {
        let stream = server.send("POST", path, &[], &body);
        server.wait_for("num_total_reqs", 1..=1);
        stream.shutdown(Shutdown::Both).unwrap();
        drop(stream);
        let took = server.wait_until_idle();
        assert!(took < Duration::from_secs(2), "{path}: {took:?}");
    }
    // What was given up is counted, and others are answered.
    assert!(server.get("/metrics").text().contains("finished_reason=\"abort\"} "));
    assert_eq!(server.post("/v1/completions", json!({ "prompt": "Once", "max_tokens": 2 })).status, 200);
}

/// A stream that has not begun has nothing to send, and its client's going shows all the same.
#[test]
fn clients_that_leave_the_queue_are_gone() {
    let server = TestServer::with(|options| (options.load.sessions, options.load.context) = (1, Some(4096)));
    let wait_for = |waiting| server.wait_for("num_waiting_reqs", waiting);
    // Far more answers than can be made meanwhile, one after the other.
    let mut many: Value = serde_json::from_slice(&long(true)).unwrap();
    many["n"] = json!(64);
    let running = server.send("POST", "/v1/chat/completions", &[], many.to_string().as_bytes());
    wait_for(50..=63);
    let queued: Vec<_> = (0..30).map(|_| server.send("POST", "/v1/chat/completions", &[], &long(true))).collect();
    wait_for(80..=93);
    drop(queued);
    wait_for(0..=63);
    drop(running);
    server.wait_until_idle();
}

/// Whoever goes away while a prompt is computed leaves most of it uncomputed: the step that runs is the last.
#[test]
fn prompts_of_clients_that_are_gone_are_not_computed() {
    const PROMPT: u64 = 3500;
    for stream in [true, false] {
        let server = TestServer::with(|options| (options.load.context, options.load.chunk) = (Some(4096), 4));
        let engine = || server.get("/server_info").json()["models"][0]["engine"].clone();
        let ids: Vec<u64> = (0..PROMPT).map(|place| 3 + place % 400).collect();
        let body = json!({ "prompt": ids, "max_tokens": 1, "stream": stream }).to_string();
        let client = server.send("POST", "/v1/completions", &[], body.as_bytes());
        let began = Instant::now();
        while engine()["rows"] == 0 {
            assert!(began.elapsed() < Duration::from_secs(20), "{}", engine());
        }
        drop(client);
        server.wait_until_idle();
        let rows = engine()["rows"].as_u64().unwrap();
        assert!(rows < PROMPT / 2, "{rows} rows of {PROMPT} were computed for nobody (stream: {stream})");
    }
}

#[test]
fn a_client_that_does_not_read_holds_nobody_up() {
    let server = TestServer::new();
    let slow: Vec<_> = (0..4).map(|_| server.send("POST", "/v1/chat/completions", &[], &long(true))).collect();
    server.wait_for("num_total_reqs", 4..=4);
    let began = Instant::now();
    let answer = server.post("/v1/completions", json!({ "prompt": "Once", "max_tokens": 8 }));
    assert!(answer.status == 200 && began.elapsed() < Duration::from_secs(10), "{answer:?}");
    drop(slow);
    server.wait_until_idle();
}

#[test]
fn hundreds_of_bad_clients_leave_nothing_behind() {
    let server = TestServer::with(|options| options.connections = 16);
    let draw = |number: u64, salt: u64| qhx::ir::random::uniform(number, salt);
    thread::scope(|scope| {
        for lane in 0..4u64 {
            let server = &server;
            scope.spawn(move || {
                for number in (0..60).map(|number| lane * 1000 + number) {
                    let kind = (draw(number, 1) * 5.0) as u64;
                    let patience = Duration::from_micros((draw(number, 2) * 20_000.0) as u64);
                    match kind {
                        0 => drop(server.request("POST", "/v1/chat/completions", &[], b"{\"messages\": [{]")),
                        1 => {
                            let stream = server.send("POST", "/v1/chat/completions", &[("Content-Length", "5000")], b"{");
                            thread::sleep(patience);
                            drop(stream);
                        }
                        2 => assert_eq!(server.post("/v1/completions", json!({ "prompt": "Once", "max_tokens": 3 })).status, 200),
                        stream => {
                            let mut stream = server.send("POST", "/v1/chat/completions", &[], &long(stream == 3));
                            thread::sleep(patience);
                            stream.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
                            let _ = stream.read(&mut [0; 64]);
                        }
                    }
                }
            });
        }
    });
    server.wait_until_idle();
    let metrics = server.get("/metrics").text();
    assert!(metrics.contains("vllm:num_requests_running{model_name=\"builtin\"} 0"), "{metrics}");
}

#[test]
fn stopping_finishes_what_runs() {
    let mut server = TestServer::new();
    let body = json!({ "prompt": "Once", "max_tokens": 300, "ignore_eos": true, "stream": true }).to_string();
    let mut stream = server.send("POST", "/v1/completions", &[], body.as_bytes());
    let mut first = [0; 300];
    stream.read_exact(&mut first).unwrap();
    let address = server.address;
    server.end();
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("\"finish_reason\":\"length\"") && rest.contains("data: [DONE]"), "{rest}");
    assert!(std::net::TcpStream::connect(address).is_err(), "nobody listens any more");
}

#[test]
fn who_comes_while_it_stops_is_turned_away() {
    let server = TestServer::with(|options| options.drain = Duration::from_secs(20));
    let mut running = server.send("POST", "/v1/chat/completions", &[], &long(true));
    running.read_exact(&mut [0; 300]).unwrap();
    server.stop.cancel();
    let began = Instant::now();
    let health = loop {
        let health = server.get("/health");
        if health.status != 200 {
            break health;
        }
        assert!(began.elapsed() < Duration::from_secs(20), "{health:?}");
    };
    assert!(health.status == 503 && health.text().contains("draining") && !health.header("retry-after").is_empty(), "{health:?}");
    assert_eq!(server.post("/v1/completions", json!({ "prompt": "Once" })).status, 503);
    // What runs goes on, until its client has enough.
    running.read_exact(&mut [0; 300]).unwrap();
    drop(running);
    let began = Instant::now();
    drop(server);
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

#[test]
fn stopping_does_not_wait_for_ever() {
    let mut server = TestServer::with(|options| options.drain = Duration::from_millis(100));
    let mut stream = server.send("POST", "/v1/chat/completions", &[], &long(true));
    let mut first = [0; 300];
    stream.read_exact(&mut first).unwrap();
    let began = Instant::now();
    server.end();
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    let mut rest = String::new();
    let _ = stream.read_to_string(&mut rest);
    assert!(!rest.contains("[DONE]"), "an answer that was cut off does not look complete");
}

//! Connections: headers, chunks and lengths that are wrong, requests one after another, and clients that leave in the middle.

use super::FILE;
use crate::{
    classes::Case,
    http::{post, request},
    mutate::mutate_bytes,
    random::Random,
    seeds::Seeds,
    server::Client,
};
use serde_json::json;

pub(super) fn make(_: &Seeds, random: &mut Random) -> Case {
    let (bytes, client) = match random.below(8) {
        0 => chunked(random),
        1 | 2 => headed(random),
        3 => pipelined(random),
        4 => (lengthy(random), Client::Ends),
        5 => {
            let mut bytes = good(random);
            mutate_bytes(&mut bytes, 300, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", random);
            (bytes, Client::Ends)
        }
        6 => {
            let mut bytes = good(random);
            bytes.truncate(random.below(bytes.len()));
            (bytes, if random.one_in(2) { Client::Ends } else { Client::Leaves })
        }
        _ => (good(random), Client::Leaves),
    };
    Case { client, ..Case::of(FILE, bytes) }
}

/// A request that is as it should be.
fn good(random: &mut Random) -> Vec<u8> {
    let tokens = random.below(20) + 1;
    let messages = json!([{ "role": "user", "content": "Hi" }]);
    let stream = random.one_in(2);
    match random.below(5) {
        0 => request("GET", random.word(&["/health", "/", "/v1/models", "/metrics", "/slots", "/openapi.json"]), "", b""),
        1 => post("/tokenize", &json!({ "prompt": "Once upon a time" })),
        2 => post("/v1/completions", &json!({ "prompt": "Once", "max_tokens": tokens, "stream": stream })),
        _ => post("/v1/chat/completions", &json!({ "messages": messages, "max_tokens": tokens, "stream": stream })),
    }
}

/// A body in chunks, of which some are not.
fn chunked(random: &mut Random) -> (Vec<u8>, Client) {
    let body = json!({ "prompt": "Once", "max_tokens": 1 }).to_string();
    let (one, other) = body.split_at(random.below(body.len()));
    let size = |text: &str| format!("{:x}", text.len());
    let first = match random.below(8) {
        0 => {
            random.word(&["-1", "zz", "0x3", "", " ", "ffffffffffffffff", "10000000000000000", "7fffffffffffffff", "1 1", "+5"]).to_owned()
        }
        1 => size(one) + &format!(";{}", "x".repeat(random.length(100_000))),
        2 => size(one) + ";a=\"b\"",
        3 => "0".repeat(random.length(100)) + &size(one),
        _ => size(one),
    };
    let ending = random.word(&["\r\n", "\r\n", "\r\n", "\n", "", "x"]);
    let last = random.word(&["0\r\n\r\n", "0\r\n\r\n", "0\r\nTrailer: x\r\n\r\n", "0\r\n", "", "0\r\nContent-Length: 5\r\n\r\n"]);
    let headers =
        random.word(&["", "", "Content-Length: 5\r\n", "Transfer-Encoding: identity\r\n", "Transfer-Encoding: gzip, chunked\r\n"]);
    let head =
        format!("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n{headers}\r\n");
    let empty = |text: &str, size: String| if text.is_empty() { String::new() } else { format!("{size}\r\n{text}{ending}") };
    ((head + &empty(one, first) + &empty(other, size(other)) + last).into_bytes(), Client::Ends)
}

/// Headers that name a server, an origin, a coding or a key in forms that are not all right.
fn headed(random: &mut Random) -> (Vec<u8>, Client) {
    let host =
        random.word(&["localhost", "127.0.0.1:1", "[::1]", "user@localhost", "evil.example", "", "a b", "localhost:x", "localhost, b"]);
    let name = random.word(&[
        "Origin",
        "Host",
        "Content-Encoding",
        "Authorization",
        "X-API-Key",
        "Expect",
        "Transfer-Encoding",
        "Upgrade",
        "Accept",
        "Cookie",
        "Content-Length",
        "Content-Type",
        "TE",
        "X-Forwarded-For",
        "Range",
    ]);
    let value = random.word(&[
        "http://localhost",
        "null",
        "http://user@localhost",
        "gzip",
        "identity",
        "br, gzip",
        "Bearer",
        "bearer x",
        "Basic \u{ff}",
        "100-continue",
        "websocket",
        "h2c",
        "chunked",
        "0",
        "-1",
        "18446744073709551616",
        "application/json; charset=utf-7",
        "bytes=0-",
        "",
        "\u{e9}",
    ]);
    let many = if random.one_in(8) { random.length(300) } else { 1 };
    let padding = if random.one_in(8) { "x".repeat(random.length(600_000)) } else { String::new() };
    let line = format!("{name}: {value}{padding}\r\n").repeat(many);
    let method = random.word(&["POST", "GET", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "BREW"]);
    let path = random.word(&[
        "/v1/completions",
        "/health",
        "/metrics",
        "//",
        "/v1/models/..%2f..%2fetc",
        "/%00",
        "*",
        "http://evil.example/health",
        "/\u{e9}",
        "/?a=b&a",
    ]);
    let (body, connection) =
        (json!({ "prompt": "Once", "max_tokens": 1 }).to_string(), random.word(&["close", "close", "keep-alive", "Upgrade"]));
    let head =
        format!("{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: {connection}\r\n{line}Content-Length: {}\r\n\r\n", body.len());
    ((head + &body).into_bytes(), if connection == "close" { Client::Waits } else { Client::Ends })
}

/// Requests sent at once, each of which is answered in its turn.
fn pipelined(random: &mut Random) -> (Vec<u8>, Client) {
    let count = random.length(60);
    let mut bytes = Vec::new();
    for number in 1..=count {
        let request = String::from_utf8_lossy(&good(random)).into_owned();
        let connection = if number == count { "close" } else { "keep-alive" };
        bytes.extend(request.replacen("Connection: close", &format!("Connection: {connection}"), 1).into_bytes());
    }
    (bytes, Client::WaitsFor(count))
}

/// A length that is not the body's.
fn lengthy(random: &mut Random) -> Vec<u8> {
    let length = random.word(&[
        "0",
        "1",
        "99",
        "9000000",
        "4294967296",
        "18446744073709551615",
        "18446744073709551616",
        "-1",
        "1e3",
        "0x10",
        "5, 5",
        "+5",
    ]);
    let more = random.word(&["", "", "Content-Length: 4\r\n", "Expect: 100-continue\r\n"]);
    let version = random.word(&["1.1", "1.1", "1.0", "2.0", "0.9"]);
    format!("POST /tokenize HTTP/{version}\r\nHost: localhost\r\nContent-Length: {length}\r\n{more}\r\n{{\"prompt\":\"Once\"}}")
        .into_bytes()
}

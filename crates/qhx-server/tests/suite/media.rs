//! Images and sounds in every protocol, with a tiny model that takes both.

use crate::common::{Response, TestServer};
use serde_json::{Value, json};
use std::{
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::PathBuf,
    sync::LazyLock,
    thread,
};

struct Place {
    server: TestServer,
    _cache: tempfile::TempDir,
}

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/gemma4").join(name)
}

/// A host of pictures: `/wide.png` is one, `/moved` leads there, `/endless` has no end.
static HOST: LazyLock<SocketAddr> = LazyLock::new(|| {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || listener.incoming().map_while(Result::ok).for_each(|client| drop(thread::spawn(move || host(client)))));
    address
});

fn host(mut client: TcpStream) {
    let mut asked = [0; 1024];
    let length = client.read(&mut asked).unwrap();
    let asked = String::from_utf8_lossy(&asked[..length]).into_owned();
    let wide = fs::read(fixture("media/wide.png")).unwrap();
    let head = |status: &str, length: usize| format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n");
    let (head, body) = match asked.split(' ').nth(1).unwrap() {
        "/wide.png" => (head("200 OK", wide.len()), wide),
        "/moved" => (head("302 Found", 0) + "Location: /wide.png\r\n", Vec::new()),
        "/endless" => (head("200 OK", 1 << 40), vec![0; 40 << 20]),
        _ => (head("404 Not Found", 0), Vec::new()),
    };
    // Who has seen enough goes away.
    let _ = client.write_all(format!("{head}\r\n").as_bytes()).and_then(|()| client.write_all(&body));
}

/// A server that may open files of one folder, and fetch from one host.
static PLACE: LazyLock<Place> = LazyLock::new(|| {
    let cache = tempfile::tempdir().unwrap();
    let server = TestServer::with(|options| {
        options.models = vec![fixture("").canonicalize().unwrap()];
        options.places = qhx::Places::none().with_cache(cache.path().join("cache"));
        options.media_folder = Some(fixture("media"));
        options.media_hosts = vec![HOST.to_string()];
    });
    Place { server, _cache: cache }
});

fn post(path: &str, body: Value) -> Response {
    PLACE.server.post(path, body)
}

fn file(name: &str) -> String {
    base64::encode(fs::read(fixture("media").join(name)).unwrap())
}

fn data_uri(name: &str) -> String {
    format!("data:image/png;base64,{}", file(name))
}

/// An answer about some parts of a message: its text and the tokens of its prompt.
fn about(parts: Value) -> (String, u64) {
    let request = json!({ "messages": [{ "role": "user", "content": parts }], "temperature": 0, "max_tokens": 12, "ignore_eos": true });
    let response = post("/v1/chat/completions", request);
    assert_eq!(response.status, 200, "{response:?}");
    let answer = response.json();
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    (text, answer["usage"]["prompt_tokens"].as_u64().unwrap())
}

fn image(url: &str) -> Value {
    json!({ "type": "image_url", "image_url": { "url": url } })
}

fn question() -> Value {
    json!({ "type": "text", "text": "What is shown in picture 0?" })
}

#[test]
fn images_are_seen_as_the_oracle_saw_them() {
    let oracle: Value = serde_json::from_slice(&fs::read(fixture("media.json")).unwrap()).unwrap();
    let expected = oracle["prompts"].as_array().unwrap().iter().find(|prompt| prompt["name"] == "image").unwrap();
    let (text, tokens) = about(json!([image(&data_uri("wide.png")), question()]));
    assert_eq!(tokens, expected["ids"].as_array().unwrap().len() as u64);
    // By a file of the folder that messages may name files of.
    assert_eq!(about(json!([image("wide.png"), question()])).0, text);
    assert_ne!(about(json!([image("tiny.png"), question()])).0, text, "another image, another answer");
}

#[test]
fn all_protocols_see_the_same_image() {
    let (text, tokens) = about(json!([image(&data_uri("wide.png")), question()]));
    let blocks = json!([
        { "type": "image", "source": { "type": "base64", "media_type": "image/png", "data": file("wide.png") } },
        question(),
    ]);
    let messages = json!([{ "role": "user", "content": blocks }]);
    let counted = post("/v1/messages/count_tokens", json!({ "model": "gemma4", "messages": messages })).json();
    assert_eq!(counted["input_tokens"], tokens, "{counted}");
    let asked = json!({ "model": "gemma4", "messages": messages, "max_tokens": 12, "temperature": 0 });
    let anthropic = post("/v1/messages", asked).json();
    let said = anthropic["content"][0]["text"].as_str().unwrap_or_else(|| panic!("{anthropic}"));
    assert!(!said.is_empty() && text.starts_with(said), "{said} {text}");
    let message = json!({ "role": "user", "content": "What is shown in picture 0?", "images": [file("wide.png")] });
    let options = json!({ "temperature": 0, "num_predict": 12 });
    let ollama = post("/api/chat", json!({ "model": "gemma4", "messages": [message], "stream": false, "options": options })).json();
    assert_eq!((&ollama["message"]["content"], &ollama["prompt_eval_count"]), (&json!(said), &json!(tokens)));
    let parts = json!([
        { "type": "input_image", "image_url": data_uri("wide.png"), "detail": "auto" },
        { "type": "input_text", "text": "What is shown in picture 0?" },
    ]);
    let input = json!([{ "role": "user", "content": parts }]);
    let responses = post("/v1/responses", json!({ "input": input, "temperature": 0, "max_output_tokens": 12 })).json();
    assert_eq!(
        (&responses["output"][0]["content"][0]["text"], &responses["usage"]["input_tokens"]),
        (&json!(said), &json!(tokens)),
        "{responses}"
    );
}

#[test]
fn sounds_are_heard() {
    let sound = |name: &str| json!({ "type": "input_audio", "input_audio": { "data": file(name), "format": "wav" } });
    let text = json!({ "type": "text", "text": "Transcribe this speech." });
    let (long, with_long) = about(json!([sound("phrase.wav"), text]));
    let (short, with_short) = about(json!([sound("word.wav"), text]));
    // The phrase has 22 rows, the word 7.
    assert_eq!(with_long - with_short, 15);
    assert_ne!(long, short);
    let form = |more: &str| {
        let mut body = format!("--edge\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\ngemma4\r\n{more}").into_bytes();
        body.extend_from_slice(b"--edge\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\n");
        body.extend_from_slice(&fs::read(fixture("media/phrase.wav")).unwrap());
        body.extend_from_slice(b"\r\n--edge--\r\n");
        let kind = [("Content-Type", "multipart/form-data; boundary=edge")];
        PLACE.server.request("POST", "/v1/audio/transcriptions", &kind, &body)
    };
    let heard = form("");
    let said = heard.json()["text"].as_str().unwrap_or_else(|| panic!("{heard:?}")).to_owned();
    assert!(said.trim().starts_with(long.trim()) || long.trim().starts_with(&said), "{said:?} {long:?}");
    let field = |name: &str, value: &str| format!("--edge\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n");
    assert_eq!(form(&field("response_format", "text")).text(), format!("{said}\n"));
    let in_words = form(&(field("language", "it") + &field("prompt", "Write it down.")));
    assert!(in_words.status == 200 && in_words.json()["text"] != said.as_str(), "{in_words:?}");
    assert_eq!(form(&field("response_format", "srt")).json()["error"]["param"], "response_format");
}

#[test]
fn images_are_fetched_from_hosts_that_are_allowed() {
    let at = |path: &str| format!("http://{}{path}", *HOST);
    let (text, _) = about(json!([image(&data_uri("wide.png")), question()]));
    assert_eq!(about(json!([image(&at("/wide.png")), question()])).0, text);
    let block = json!({ "type": "image", "source": { "type": "url", "url": at("/wide.png") } });
    let asked =
        json!({ "model": "gemma4", "messages": [{ "role": "user", "content": [block, question()] }], "max_tokens": 12, "temperature": 0 });
    let said = post("/v1/messages", asked).json()["content"][0]["text"].as_str().unwrap().to_owned();
    assert!(!said.is_empty() && text.starts_with(&said), "{said} {text}");
    for (url, expected) in [
        (at("/moved"), "status 302"),
        (at("/missing.png"), "status 404"),
        (at("/endless"), "larger than 32 MiB"),
        (format!("http://localhost:{}/wide.png", HOST.port()), "from these hosts only"),
    ] {
        let response = post("/v1/chat/completions", json!({ "messages": [{ "role": "user", "content": [question(), image(&url)] }] }));
        let error = &response.json()["error"];
        assert_eq!((response.status, error["param"].as_str()), (400, Some("messages[0].content[1]")), "{url}: {error}");
        assert!(error["message"].as_str().unwrap().contains(expected), "{url}: {error}");
    }
}

/// Images cost as much as the context holds, and no more: nobody looks at those behind.
#[test]
fn images_beyond_the_context_are_not_decoded() {
    let (tiny, broken) = (image(&data_uri("tiny.png")), image("data:image/png;base64,AAECAwQ="));
    let asked = |parts: Vec<Value>| post("/v1/chat/completions", json!({ "messages": [{ "role": "user", "content": parts }] }));
    let few = asked(vec![tiny.clone(), broken.clone()]);
    assert!(few.status == 400 && few.text().contains("content part 2"), "{few:?}");
    let mut parts = vec![tiny; 3000];
    parts.push(broken);
    let many = asked(parts);
    assert!(many.status == 400 && many.text().contains("shorten the prompt"), "{many:?}");
}

#[test]
fn nothing_else_is_opened() {
    for url in ["../config.json", "/etc/passwd", "file:///etc/passwd", "http://127.0.0.1:1/x.png", "missing.png", ".", "data:image/png,x"] {
        let response = post("/v1/chat/completions", json!({ "messages": [{ "role": "user", "content": [image(url)] }] }));
        assert!(
            response.status == 400 && response.json()["error"]["param"].as_str().unwrap().starts_with("messages"),
            "{url}: {response:?}"
        );
        assert!(!response.text().contains(fixture("media").to_str().unwrap()), "{response:?}");
    }
    let broken = image("data:image/png;base64,AAECAwQ=");
    let response = post("/v1/chat/completions", json!({ "messages": [{ "role": "user", "content": [broken] }] }));
    assert_eq!(response.status, 400, "{response:?}");
}

//! `qhx serve` as a process: who may listen where, and how it begins and ends.

use crate::common::wait_until;
use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::{Child, ChildStderr, Command, Output, Stdio},
    time::{Duration, Instant},
};

fn serve(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_qhx"));
    command.args(["serve", "--port", "0", "--threads", "1", "--context", "256"]).args(arguments);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Begins to serve; what it prints beside its address can be read.
fn listening(arguments: &[&str]) -> (Child, BufReader<ChildStderr>, String) {
    let mut server = serve(arguments).spawn().unwrap();
    let mut lines = BufReader::new(server.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("listening on http://") {
        line.clear();
        assert!(lines.read_line(&mut line).unwrap() > 0, "it ended before it listened");
    }
    let address = line.trim().rsplit_once("http://").unwrap().1.to_owned();
    (server, lines, address)
}

fn ask(address: &str, request: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(request.replace("HOST", address).as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[cfg(unix)]
#[test]
fn sigterm_ends_it_and_logs_have_no_prompts() {
    for (arguments, is_told) in [(&[][..], false), (&["--log-prompts"][..], true), (&["--isolate"], false)] {
        let (mut server, mut lines, address) = listening(arguments);
        let body = r#"{"prompt": "A secret word", "max_tokens": 1}"#;
        let head = format!("POST /v1/completions HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", body.len());
        assert!(ask(&address, &(head + body)).starts_with("HTTP/1.1 200"));
        let ended = Command::new("kill").args(["-TERM", &server.id().to_string()]).status().unwrap();
        assert!(ended.success() && server.wait().unwrap().success(), "it ends well");
        let mut log = String::new();
        // To the end: until no process of it is left.
        lines.read_to_string(&mut log).unwrap();
        assert!(log.contains("/v1/completions") && log.contains("status=200"), "{log}");
        assert_eq!(log.contains("secret"), is_told, "{log}");
    }
}

/// What a request with a body begins with.
fn head(path: &str, bytes: usize) -> String {
    format!("POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {bytes}\r\n\r\n")
}

/// Running answers get the time that they may take, and no text that must follow makes it longer.
#[cfg(unix)]
#[test]
fn sigterm_ends_it_while_forced_texts_are_followed() {
    let (mut server, _lines, address) = listening(&["--drain", "1"]);
    let messages = r#""messages": [{"role": "user", "content": "Hi"}], "n": 60"#;
    let forced = format!(r#"{{{messages}, "response_format": {{"type": "regex", "regex": "(zq9-){{20000}}"}}}}"#);
    let endless = format!(r#"{{{messages}, "ignore_eos": true, "stream": true}}"#);
    let mut open = Vec::new();
    for body in [&forced, &endless, &forced, &forced] {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.write_all((head("/v1/chat/completions", body.len()) + body).as_bytes()).unwrap();
        open.push(stream);
    }
    // One of them is under way.
    open[1].read_exact(&mut [0; 200]).unwrap();
    let began = Instant::now();
    assert!(Command::new("kill").args(["-TERM", &server.id().to_string()]).status().unwrap().success());
    assert!(server.wait().unwrap().success(), "it ends well");
    assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
}

/// MiB of memory that a process holds, or held at most since it was last asked to forget that.
#[cfg(target_os = "linux")]
fn memory(process: &Child, field: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", process.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024
}

/// Requests as large as may be, of small values or of one medium, in every API; and many that do not end.
#[cfg(target_os = "linux")]
#[test]
fn large_requests_take_little_and_leave_nothing() {
    const LARGE: usize = 26 << 20;
    const VALUES: usize = 480_000;
    /// MiB that one request may take, and that all of them may leave.
    const MOST: u64 = 400;
    const LEFT: u64 = 48;
    let (mut server, _lines, address) = listening(&["--prefix-cache", "8"]);
    let ask = |path: &str, body: &str| {
        let answer = ask(&address, &(head(path, body.len()) + body));
        assert!(answer.starts_with("HTTP/1.1 400") || answer.starts_with("HTTP/1.1 200"), "{path}, {body:.200}: {answer:.300}");
    };
    let list = |piece: &str, count: usize| format!("[{}{piece}]", format!("{piece},").repeat(count - 1));
    let user = r#""role": "user", "content": "Hi""#;
    let call = r#"{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}"#;
    let image = "A".repeat(LARGE);
    let url = format!("data:image/png;base64,{image}");
    let [trees, values, calls, fewer_calls] =
        [list("[]", LARGE / 3), list("0", VALUES), list(call, LARGE / (call.len() + 1)), list(call, VALUES / 12)];
    let with_calls = |calls: &str| {
        format!(r#"{{"messages": [{{"role": "assistant", "content": "", "tool_calls": {calls}}}, {{{user}}}], "max_tokens": 1}}"#)
    };
    let with_options =
        |values: &str| format!(r#"{{"messages": [{{{user}}}], "max_tokens": 1, "chat_template_kwargs": {{"x": {values}}}}}"#);
    let of_user = |part: String| format!(r#"{{"role": "user", "content": [{part}]}}"#);
    let source = format!(r#"{{"type": "image", "source": {{"type": "base64", "media_type": "image/png", "data": "{image}"}}}}"#);
    let requests = [
        ("/v1/chat/completions", with_options(&trees)),
        ("/v1/chat/completions", with_options(&values)),
        ("/v1/chat/completions", with_calls(&calls)),
        ("/v1/chat/completions", with_calls(&fewer_calls)),
        (
            "/v1/chat/completions",
            format!(r#"{{"messages": [{}]}}"#, of_user(format!(r#"{{"type": "image_url", "image_url": {{"url": "{url}"}}}}"#))),
        ),
        ("/v1/responses", format!(r#"{{"input": [{}]}}"#, of_user(format!(r#"{{"type": "input_image", "image_url": "{url}"}}"#)))),
        ("/v1/responses", format!(r#"{{"input": "Hi", "max_output_tokens": 1, "metadata": {{"x": {values}}}}}"#)),
        ("/v1/messages", format!(r#"{{"model": "builtin", "max_tokens": 1, "messages": [{}]}}"#, of_user(source))),
        ("/api/chat", format!(r#"{{"model": "builtin", "messages": [{{{user}, "images": ["{image}"]}}]}}"#)),
        ("/v1/completions", format!(r#"{{"prompt": {values}, "max_tokens": 1}}"#)),
        ("/detokenize", format!(r#"{{"tokens": {}}}"#, list("10", VALUES))),
    ];
    ask("/v1/chat/completions", &with_options("0"));
    let before = memory(&server, "VmRSS:");
    for (path, body) in &requests {
        fs::write(format!("/proc/{}/clear_refs", server.id()), "5").unwrap();
        ask(path, body);
        let peak = memory(&server, "VmHWM:").saturating_sub(before);
        println!("{path}, {} bytes, {:.60}: {peak} MiB", body.len(), &body[body.len().min(20)..]);
        assert!(peak < MOST, "{path}, {body:.100}: {peak} MiB");
    }
    fs::write(format!("/proc/{}/clear_refs", server.id()), "5").unwrap();
    let unfinished: Vec<TcpStream> = (0..60)
        .map(|_| {
            let mut stream = TcpStream::connect(&address).unwrap();
            let _ = stream.write_all((head("/v1/chat/completions", LARGE) + &" ".repeat(5 << 20)).as_bytes());
            stream
        })
        .collect();
    let peak = memory(&server, "VmHWM:").saturating_sub(before);
    println!("unfinished: {peak} MiB");
    assert!(peak < MOST, "60 unfinished requests: {peak} MiB");
    drop(unfinished);
    wait_until("the memory is given back", || memory(&server, "VmRSS:") <= before + LEFT);
    server.kill().unwrap();
    server.wait().unwrap();
}

/// Weights that are truncated while they are served end the server with a message that names the file.
#[cfg(target_os = "linux")]
#[test]
fn truncated_weights_are_named() {
    let folder = crate::common::scratch();
    let bundle = crate::common::bundle_copy("llama", folder.path());
    let (mut server, mut lines, address) = listening(&[bundle.to_str().unwrap()]);
    let weights = fs::read_dir(bundle.join("weights")).unwrap().next().unwrap().unwrap().path();
    fs::OpenOptions::new().write(true).open(&weights).unwrap().set_len(0).unwrap();
    let body = r#"{"prompt": [5, 6, 7], "max_tokens": 1}"#;
    let head = format!("POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", body.len());
    let mut stream = TcpStream::connect(&address).unwrap();
    stream.write_all((head + body).as_bytes()).unwrap();
    assert_eq!(server.wait().unwrap().code(), Some(1));
    let mut told = String::new();
    lines.read_to_string(&mut told).unwrap();
    assert!(told.contains(weights.file_name().unwrap().to_str().unwrap()) && told.contains("was truncated while it was in use"), "{told}");
}

/// With `--isolate`, the process that serves is gone when the one that watches over it is; what it says itself is said once.
#[cfg(unix)]
#[test]
fn two_processes_end_as_one() {
    let (mut server, mut lines, _) = listening(&["--isolate"]);
    server.kill().unwrap();
    server.wait().unwrap();
    lines.read_to_string(&mut String::new()).unwrap();
    let Output { status, stderr, .. } = serve(&["--isolate", "no-such-model"]).output().unwrap();
    let message = String::from_utf8(stderr).unwrap();
    assert!(status.code() == Some(1) && message.matches("error:").count() == 1 && message.contains("no-such-model"), "{message}");
}

#[test]
fn other_machines_need_a_key() {
    let refused = |arguments: &[&str]| {
        let Output { status, stderr, .. } = serve(arguments).output().unwrap();
        (status.code(), String::from_utf8(stderr).unwrap())
    };
    let (code, message) = refused(&["--host", "0.0.0.0"]);
    assert!(code == Some(2) && message.contains("--api-key-file") && message.contains("--insecure"), "{message}");
    assert_eq!(refused(&["--api-key", ""]).0, Some(2));
    let (code, message) = refused(&["--api-key", "good", "--api-key", "schl\u{fc}ssel"]);
    assert!(
        code.is_some_and(|code| code > 0) && message.contains("API key number 2 can never match") && !message.contains("schl"),
        "{message}"
    );
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys");
    fs::write(&keys, "\n \n").unwrap();
    assert!(refused(&["--api-key-file", keys.to_str().unwrap()]).1.contains("has no key in it"));
    assert_eq!(refused(&["no-such-model"]).0, Some(1));
    #[cfg(target_os = "linux")]
    assert!(refused(&["--api-key-file", "/dev/zero"]).0.is_some_and(|code| code > 0), "a file without an end");
    fs::write(&keys, "first\nsecond\n").unwrap();
    let (mut server, _lines, address) = listening(&["--host", "0.0.0.0", "--api-key-file", keys.to_str().unwrap()]);
    let address = address.replace("0.0.0.0", "127.0.0.1");
    let get = |key: &str| ask(&address, &format!("GET /v1/models HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\nx-api-key: {key}\r\n\r\n"));
    assert!(get("second").starts_with("HTTP/1.1 200") && get("third").starts_with("HTTP/1.1 401"));
    server.kill().unwrap();
    server.wait().unwrap();
}

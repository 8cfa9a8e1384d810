//! `qhx serve` as a process: who may listen where, and how it begins and ends.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::{Child, ChildStderr, Command, Output, Stdio},
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
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys");
    fs::write(&keys, "\n \n").unwrap();
    assert!(refused(&["--api-key-file", keys.to_str().unwrap()]).1.contains("has no key in it"));
    assert_eq!(refused(&["no-such-model"]).0, Some(1));
    fs::write(&keys, "first\nsecond\n").unwrap();
    let (mut server, _lines, address) = listening(&["--host", "0.0.0.0", "--api-key-file", keys.to_str().unwrap()]);
    let address = address.replace("0.0.0.0", "127.0.0.1");
    let get = |key: &str| ask(&address, &format!("GET /v1/models HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\nx-api-key: {key}\r\n\r\n"));
    assert!(get("second").starts_with("HTTP/1.1 200") && get("third").starts_with("HTTP/1.1 401"));
    server.kill().unwrap();
    server.wait().unwrap();
}

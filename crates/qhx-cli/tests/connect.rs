//! `qhx run --connect`: answers from a model that another process has loaded.

mod common;

use common::{failed, qhx, ran};
use serde_json::Value;
use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpListener,
    process::{Child, Command, Stdio},
    thread,
};

const QUESTION: &str = "What is the capital of Portugal?";

/// A server that is gone with the test.
struct Server(Child, String);

impl Server {
    fn start(arguments: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_qhx"));
        command.args(["serve", "--port", "0", "--threads", "1", "--context", "256"]).args(arguments);
        let mut server = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(server.stderr.take().unwrap());
        let mut line = String::new();
        while !line.contains("listening on http://") {
            line.clear();
            assert!(lines.read_line(&mut line).unwrap() > 0, "it ended before it listened");
        }
        thread::spawn(move || lines.read_to_end(&mut Vec::new()));
        let address = line.trim().rsplit_once("http://").unwrap().1.to_owned();
        Self(server, format!("http://{address}"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_answer_is_the_same_as_without_a_server() {
    let server = Server::start(&[]);
    let run = |flags: &[&str]| ran(qhx([&["run"], flags].concat()).output().unwrap());
    let alone = run(&[QUESTION]);
    let connected = run(&["--connect", &server.1, QUESTION]);
    assert!(connected.code == Some(0) && connected.stdout == alone.stdout, "{connected:?} {alone:?}");
    assert!(connected.stderr.contains("first token"), "{}", connected.stderr);
    // Sampled with the same seed, from several clients at once.
    let sampled = ["--temperature", "1", "--seed", "7", "--max-new", "12", QUESTION];
    let alone = run(&sampled).stdout;
    let clients: Vec<String> = thread::scope(|scope| {
        let ask = || run(&[&["--connect", &server.1], &sampled[..]].concat()).stdout;
        let clients: Vec<_> = (0..4).map(|_| scope.spawn(ask)).collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    assert!(clients.iter().all(|answer| *answer == alone), "{clients:?} {alone}");
    let json: Value = serde_json::from_str(&run(&["--connect", &server.1, "--json", "--max-new", "2", QUESTION]).stdout).unwrap();
    assert_eq!((json["finish_reason"].as_str(), json["usage"]["completion_tokens"].as_u64()), (Some("length"), Some(2)), "{json}");
    failed(run(&["--connect", &server.1, "no-such-model", QUESTION]), 1, &["refused the request (404)", "no-such-model"]);
}

#[test]
fn what_goes_wrong_is_told() {
    let run = |flags: &[&str]| ran(qhx([&["run"], flags].concat()).output().unwrap());
    failed(run(&["--connect", "http://127.0.0.1:1", QUESTION]), 1, &["cannot reach http://127.0.0.1:1", "qhx serve MODEL"]);
    failed(run(&["--connect", "127.0.0.1:8080", QUESTION]), 2, &["expected an address such as http://127.0.0.1:8080"]);
    failed(run(&["--connect", "https://127.0.0.1:1", QUESTION]), 1, &["cannot reach https://127.0.0.1:1"]);
    failed(run(&["--connect", "http://127.0.0.1:1", "--device", "cpu", QUESTION]), 2, &["--connect", "--device"]);
    let server = Server::start(&["--api-key", "open sesame"]);
    failed(run(&["--connect", &server.1, QUESTION]), 1, &["refused the request (401)", "QHX_API_KEY"]);
    let known = ran(qhx(["run", "--connect", &server.1, QUESTION]).env("QHX_API_KEY", "open sesame").output().unwrap());
    assert_eq!(known.code, Some(0), "{known:?}");
}

/// A server that dies, or talks nonsense, in the middle: never a complete answer.
#[test]
fn an_answer_that_breaks_off_is_no_answer() {
    let event = "data: {\"choices\": [{\"delta\": {\"content\": \"Lis\"}}]}\n\n";
    for (rest, told) in
        [("", "ended in the middle"), ("data: {\n\n", "not JSON"), ("data: {\"error\": {\"message\": \"lost\"}}\n\n", "lost")]
    {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let body = [event, rest].concat();
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            assert!(stream.read(&mut [0; 4096]).unwrap() > 0);
            write!(stream, "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n{body}").unwrap();
        });
        let done = ran(qhx(["run", "--connect", &address, QUESTION]).output().unwrap());
        server.join().unwrap();
        assert!(done.stdout.trim() == "Lis" && done.code == Some(1) && done.stderr.contains(told), "{told}: {done:?}");
    }
}

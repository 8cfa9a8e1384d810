//! `qhx run --connect`: answers from a model that another process has loaded.

use crate::common::{self, failed, qhx, ran};
use serde_json::Value;
use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    process::{Child, Command, Stdio},
    thread::{self, JoinHandle},
};

const QUESTION: &str = "What is the capital of Portugal?";

/// A server that is gone with the test.
struct Server(Child, String, Option<JoinHandle<String>>);

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
        let log = thread::spawn(move || {
            let mut log = String::new();
            lines.read_to_string(&mut log).unwrap();
            log
        });
        let address = line.trim().rsplit_once("http://").unwrap().1.to_owned();
        Self(server, format!("http://{address}"), Some(log))
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

const STREAM: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";
const BEGINNING: &str = "data: {\"choices\": [{\"delta\": {\"content\": \"Lis\"}}]}\n\n";

/// What a client makes of a server that gives these responses, one to each connection, and is then gone.
fn asked(responses: &[String]) -> common::Ran {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::scope(|scope| {
        let server = scope.spawn(move || {
            for response in responses {
                let (mut stream, _) = listener.accept().unwrap();
                read_request(&mut stream);
                let _ = stream.write_all(response.as_bytes());
            }
        });
        let done = ran(qhx(["run", "--connect", &format!("http://{address}"), QUESTION]).output().unwrap());
        // Responses that nobody asked for.
        while !server.is_finished() {
            drop(TcpStream::connect(address));
        }
        done
    })
}

/// To its end: a connection that is closed with something unread is reset.
fn read_request(stream: &mut TcpStream) {
    let mut request = BufReader::new(stream);
    let (mut length, mut line) = (0, String::new());
    while {
        line.clear();
        request.read_line(&mut line).unwrap()
    } > 2
    {
        if let Some(found) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = found.trim().parse().unwrap();
        }
    }
    request.read_exact(&mut vec![0; length]).unwrap();
}

/// A server that dies, or talks nonsense, in the middle: never a complete answer.
#[test]
fn an_answer_that_breaks_off_is_no_answer() {
    for (rest, told) in [
        ("", "ended in the middle"),
        ("data: {\"cho", "ended in the middle"),
        ("data: {\n\n", "not JSON"),
        ("data: {\"error\": {\"message\": \"lost\"}}\n\n", "lost"),
    ] {
        let done = asked(&[[STREAM, BEGINNING, rest].concat()]);
        assert!(done.stdout.trim() == "Lis" && done.code == Some(1) && done.stderr.contains(told), "{told}: {done:?}");
    }
}

/// Where there is a server again, it is asked again: what was printed is not printed twice, and an answer that differs from it is none.
#[test]
fn a_server_that_comes_back_is_asked_again() {
    let first = [STREAM, BEGINNING].concat();
    let second = |text: &str| format!("{first}data: {{\"choices\": [{{\"delta\": {{\"content\": \"{text}\"}}}}]}}\n\n");
    let whole = second("bon") + "data: [DONE]\n\n";
    let loading = "HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 0\r\n\r\n".to_owned();
    for responses in [
        // Before it said anything; while it loads its model; twice, the second time later.
        vec![String::new(), whole.clone()],
        vec![first.clone(), loading.clone(), loading.clone(), whole.clone()],
        vec![first.clone(), second("b"), whole.clone()],
    ] {
        let found = asked(&responses);
        assert_eq!((found.code, &*found.stdout), (Some(0), "Lisbon\n"), "{found:?}");
        assert!(found.stderr.contains("note: the server was lost in the middle of the answer"), "{found:?}");
    }
    let done = "data: [DONE]\n\n".to_owned();
    for (responses, printed, told) in [
        (vec![second("bon"), second("boa") + &done], "Lisbon", "answered differently"),
        (vec![second("bon"), first.clone() + &done], "Lisbon", "answered differently"),
        (vec![first.clone(), first.clone(), whole.clone()], "Lis", "ended in the middle"),
        (vec![second("b"), String::new(), whole.clone()], "Lisb", "ended in the middle"),
        (vec![first.clone(), loading], "Lis", "ended in the middle"),
    ] {
        let found = asked(&responses);
        assert!(found.code == Some(1) && found.stdout.trim() == printed && found.stderr.contains(told), "{told}: {found:?}");
        assert_eq!(found.stderr.matches("error:").count(), 1, "{found:?}");
    }
    // A server that is not ready when it is first asked says so itself.
    failed(asked(&["HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n".to_owned()]), 1, &["refused the request (503)"]);
}

/// The process of `qhx serve --isolate` is killed in the middle of answers: they go on as if nothing had been, until it has been killed too often.
#[cfg(target_os = "linux")]
#[test]
fn an_answer_outlives_the_process_of_its_server() {
    // The slowest device, so that there is a middle.
    let mut server = Server::start(&["--isolate", "--device", "reference"]);
    let address = server.1.clone();
    let ask = |flags: &[&str]| qhx([&["run", "--connect", &address, "--ignore-eos", "--max-new", "40"], flags, &[QUESTION]].concat());
    let mut dead = String::new();
    let mut kill = |server: &Child| {
        let process = loop {
            let process = common::child_of(server);
            if process != dead {
                break process;
            }
        };
        assert!(Command::new("kill").args(["-9", &process]).status().unwrap().success());
        dead = process;
    };
    let mut begin = |flags: &[&str], kills: usize| {
        let mut client = ask(flags).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (mut answer, mut output) = (vec![0; 4], client.stdout.take().unwrap());
        output.read_exact(&mut answer).unwrap();
        (0..kills).for_each(|_| kill(&server.0));
        output.read_to_end(&mut answer).unwrap();
        let found = ran(client.wait_with_output().unwrap());
        (found, String::from_utf8(answer).unwrap())
    };
    let sampled = ["--temperature", "1", "--seed", "7"];
    let expected = [&[][..], &sampled].map(|flags| ran(ask(flags).output().unwrap()).stdout);
    let (found, answer) = begin(&[], 1);
    assert_eq!((found.code, &answer), (Some(0), &expected[0]), "{found:?}");
    assert!(found.stderr.contains("note: the server was lost in the middle of the answer"), "{found:?}");
    let (found, answer) = begin(&sampled, 1);
    assert_eq!((found.code, &answer), (Some(0), &expected[1]), "{found:?}");
    // Again and again.
    let (found, answer) = begin(&[], 2);
    assert!(found.code == Some(1) && expected[0].starts_with(answer.trim_end()), "{found:?} {answer}");
    assert!(found.stderr.matches("error:").count() == 1 && found.stderr.contains("ended in the middle"), "{found:?}");
    assert_eq!(server.0.wait().unwrap().code(), Some(1), "three restarts are enough");
    let log = server.2.take().unwrap().join().unwrap();
    assert!((1..=3).all(|n| log.matches(&format!("is started again: restart {n} of 3")).count() == 1), "{log}");
    assert!(log.matches("error:").count() == 1 && log.contains("error: the server has crashed again (signal: 9"), "{log}");
}

//! A server with the demo model in this process, and as much of an HTTP client as the tests need.

use qhx::Cancel;
use qhx_server::{Server, ServerOptions};
use serde_json::Value;
use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    ops::RangeInclusive,
    sync::mpsc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Waits until something is so, and gives how long that took.
#[track_caller]
pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) -> Duration {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(30), "it is never so: {what}");
        thread::sleep(Duration::from_millis(2));
    }
    began.elapsed()
}

/// A server that runs until it is dropped.
pub(crate) struct TestServer {
    pub(crate) address: SocketAddr,
    pub(crate) stop: Cancel,
    thread: Option<JoinHandle<()>>,
}

impl TestServer {
    /// The demo model, with other options.
    pub(crate) fn with(change: impl FnOnce(&mut ServerOptions)) -> Self {
        let mut options = ServerOptions::default();
        options.models = vec!["builtin".into()];
        options.load.threads = Some(1);
        change(&mut options);
        let server = Server::bind("127.0.0.1:0", options).unwrap();
        let (address, stop) = (server.address(), Cancel::new());
        let (ready, is_ready) = mpsc::channel();
        let stopping = stop.clone();
        let thread = thread::spawn(move || server.run(stopping, || ready.send(()).unwrap()).unwrap());
        is_ready.recv_timeout(Duration::from_secs(60)).expect("the server is ready");
        Self { address, stop, thread: Some(thread) }
    }

    pub(crate) fn new() -> Self {
        Self::with(|_| {})
    }

    /// Asks it to stop, and waits until it has.
    pub(crate) fn end(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }

    pub(crate) fn get(&self, path: &str) -> Response {
        self.request("GET", path, &[], b"")
    }

    pub(crate) fn post(&self, path: &str, body: Value) -> Response {
        self.request("POST", path, &[], body.to_string().as_bytes())
    }

    pub(crate) fn request(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Response {
        let mut stream = self.send(method, path, headers, body);
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        Response::parse(&bytes)
    }

    /// Sends a request and leaves the rest to the caller.
    pub(crate) fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> TcpStream {
        let length = body.len().to_string();
        let mut headers = headers.to_vec();
        // A body in chunks has no length beforehand.
        if !headers.iter().any(|(name, _)| *name == "Transfer-Encoding") {
            headers.push(("Content-Length", &length));
        }
        let mut stream = self.send_head(method, path, &headers);
        // A server that refuses need not read it.
        let _ = stream.write_all(body);
        stream
    }

    /// Sends what stands before a body.
    pub(crate) fn send_head(&self, method: &str, path: &str, headers: &[(&str, &str)]) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut head = format!("{method} {path} HTTP/1.1\r\nConnection: close\r\n");
        if !headers.iter().any(|(name, _)| *name == "Host") {
            head += &format!("Host: {}\r\n", self.address);
        }
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        stream.write_all(format!("{head}\r\n").as_bytes()).unwrap();
        stream
    }

    /// The frames of a stream; the last one must be `[DONE]`.
    pub(crate) fn stream(&self, path: &str, body: Value) -> Vec<Value> {
        let response = self.post(path, body);
        assert_eq!(response.status, 200, "{response:?}");
        assert!(response.header("content-type").starts_with("text/event-stream"), "{response:?}");
        let text = response.text();
        let mut frames: Vec<&str> = text.split("\n\n").filter_map(|frame| frame.strip_prefix("data: ")).collect();
        assert_eq!(frames.pop(), Some("[DONE]"), "{text}");
        frames.iter().map(|frame| serde_json::from_str(frame).unwrap()).collect()
    }

    /// Waits until the engine has nothing to do.
    pub(crate) fn wait_until_idle(&self) -> Duration {
        self.wait_for("num_total_reqs", 0..=0)
    }

    /// Waits until a number of each model's load is one of these.
    pub(crate) fn wait_for(&self, number: &str, wanted: RangeInclusive<u64>) -> Duration {
        let is_wanted = |load: &Value| wanted.contains(&load[number].as_u64().unwrap());
        wait_until(&format!("{number} is in {wanted:?}"), || self.get("/loads").json()["loads"].as_array().unwrap().iter().all(is_wanted))
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Response {
    fn parse(bytes: &[u8]) -> Self {
        let end = bytes.windows(4).position(|four| four == b"\r\n\r\n").unwrap_or_else(|| panic!("{}", String::from_utf8_lossy(bytes)));
        let head = std::str::from_utf8(&bytes[..end]).unwrap();
        let mut lines = head.lines();
        let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let headers: Vec<(String, String)> =
            lines.map(|line| line.split_once(':').unwrap()).map(|(name, value)| (name.to_lowercase(), value.trim().to_owned())).collect();
        let mut body = bytes[end + 4..].to_vec();
        if headers.iter().any(|(name, value)| name == "transfer-encoding" && value == "chunked") {
            body = unchunked(&body);
        }
        Self { status, headers, body }
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.iter().find(|(known, _)| known == name).map_or("", |(_, value)| value)
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// A body that came in chunks; one that was cut off is given as far as it came.
fn unchunked(mut rest: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    while let Some(end) = rest.windows(2).position(|two| two == b"\r\n") {
        let size = usize::from_str_radix(std::str::from_utf8(&rest[..end]).unwrap(), 16).unwrap();
        rest = &rest[end + 2..];
        if size == 0 || rest.len() < size + 2 {
            break;
        }
        body.extend_from_slice(&rest[..size]);
        rest = &rest[size + 2..];
    }
    body
}

//! A `qhx serve` under attack: it must live, answer properly, stay quick for others and keep its memory small.

use crate::{
    files::empty_folder,
    http::{Answer, answers, request},
    limits::{FOLDERS, Watch, contained, wait},
};
use serde_json::{Value, json};
use std::{
    ffi::OsStr,
    fs::{self, File},
    io::{ErrorKind, Read, Write},
    net::{Shutdown, TcpStream},
    path::{Path, PathBuf},
    process::{Child, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

/// What a server says once it is ready, before its address.
const LISTENING: &str = "listening on http://";
/// How long `/health` may take while another request is answered.
const HEALTH: Duration = Duration::from_secs(1);
/// Memory that a server may keep between requests, in KiB.
const MEMORY_KIB: u64 = 1 << 20;
/// One case in so many is followed by a question whose answer is known.
const QUESTION: u64 = 16;
/// What a server may answer. 500 is not among it: nothing that a client sends is an error of the server.
const PROPER: [u16; 17] = [200, 400, 401, 403, 404, 405, 408, 411, 413, 414, 415, 417, 422, 426, 429, 431, 503];

/// How a client behaves once it has sent all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Client {
    /// It waits for one answer.
    #[default]
    Waits,
    /// It waits for so many.
    WaitsFor(usize),
    /// It says that nothing more will come, and takes what it gets.
    Ends,
    /// It leaves.
    Leaves,
}

/// A running server.
pub(crate) struct Server {
    process: Child,
    address: String,
    log: PathBuf,
    /// So much of the log has been looked at.
    seen: usize,
    /// Requests so far.
    asked: u64,
    question: Vec<u8>,
    /// What was answered to the question at first.
    known: Vec<u8>,
    limit: Duration,
}

impl Server {
    /// Starts a server with further arguments; `limit` is the CPU time that a request may take, `headers` are those of its own questions.
    pub(crate) fn start(qhx: &Path, scratch: &Path, arguments: &[&OsStr], headers: &str, limit: Duration) -> Result<Self, String> {
        let log = scratch.join("log");
        let mut process = (|| {
            FOLDERS.iter().try_for_each(|name| empty_folder(&scratch.join(name)))?;
            let mut command = contained(qhx, scratch);
            command.args(["serve", "--port", "0", "--threads", "1", "--parallel", "4", "--context", "512"]).args(arguments);
            command.args(["--prefix-cache", "16", "--max-body", "8", "--drain", "1"]).stdout(Stdio::null()).stderr(File::create(&log)?);
            command.spawn()
        })()
        .map_err(|error| format!("{} cannot be started: {error}", qhx.display()))?;
        let watch = Watch::new(process.id(), Duration::from_secs(20));
        let address = loop {
            let said = fs::read_to_string(&log).unwrap_or_default();
            if let Some((address, _)) = said.split_once(LISTENING).and_then(|(_, rest)| rest.split_once('\n')) {
                break address.trim().to_owned();
            }
            if watch.overdue().is_some() || !matches!(process.try_wait(), Ok(None)) {
                let _ = process.kill();
                let _ = process.wait();
                return Err(format!("a server does not start: {said}"));
            }
            thread::sleep(Duration::from_millis(2));
        };
        let message = json!([{ "role": "user", "content": "What is the capital of Portugal?" }]);
        let body = json!({ "messages": message, "temperature": 0, "max_tokens": 12 }).to_string();
        let question = request("POST", "/v1/chat/completions", headers, body.as_bytes());
        let mut server = Self { process, address, log, seen: 0, asked: 0, question, known: Vec::new(), limit };
        server.known = server.answer()?;
        Ok(server)
    }

    /// The process.
    pub(crate) fn id(&self) -> u32 {
        self.process.id()
    }

    /// Waits until the process has ended after a signal.
    pub(crate) fn ended(mut self, limit: Duration) -> Result<ExitStatus, String> {
        let watch = Watch::new(self.id(), limit);
        wait(&mut self.process, &watch)
    }

    /// Sends bytes on a connection of their own and gives the answers. An error is what is wrong with the server.
    pub(crate) fn ask(&mut self, bytes: &[u8], client: Client) -> Result<Vec<Answer>, String> {
        let connection = self.send(bytes, client)?;
        let health = self.health();
        let answers = match client {
            Client::Leaves => Ok(Vec::new()),
            // Whoever says that nothing more will come may be taken for gone.
            _ => self.read(connection).and_then(|bytes| answers(&bytes, client == Client::Ends)),
        };
        let checked = answers.and_then(|answers| health.and_then(|()| check(&answers, client)).map(|()| answers));
        let checked = checked.and_then(|answers| self.tells_no_place(bytes, &answers).map(|()| answers));
        let checked = checked.and_then(|answers| self.check().map(|()| answers));
        checked.map_err(|problem| format!("{problem}; its log: {}", self.last_words()))
    }

    /// Sends bytes, on a thread: a server may answer before it has read all.
    pub(crate) fn send(&self, bytes: &[u8], client: Client) -> Result<TcpStream, String> {
        let failed = |error: std::io::Error| format!("the server takes no connection: {error}");
        let connection = TcpStream::connect(&self.address).map_err(failed)?;
        let (mut writer, bytes) = (connection.try_clone().map_err(failed)?, bytes.to_vec());
        let sending = thread::spawn(move || {
            // What need not be read for the answer may not be.
            let _ = writer.write_all(&bytes);
            match client {
                Client::Ends => drop(writer.shutdown(Shutdown::Write)),
                Client::Leaves => drop(writer.shutdown(Shutdown::Both)),
                _ => {}
            }
        });
        if client == Client::Leaves {
            let _ = sending.join();
        }
        Ok(connection)
    }

    /// All that comes until the server ends the connection.
    fn read(&self, mut connection: TcpStream) -> Result<Vec<u8>, String> {
        let failed = |error: std::io::Error| format!("the connection broke: {error}");
        connection.set_read_timeout(Some(Duration::from_millis(100))).map_err(failed)?;
        let (watch, mut bytes) = (Watch::new(self.id(), self.limit), Vec::new());
        loop {
            match connection.read_to_end(&mut bytes) {
                Ok(_) => return Ok(bytes),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                // A server that has refused does not read the rest: what it said may be lost with it.
                Err(error) if error.kind() == ErrorKind::ConnectionReset && !bytes.is_empty() => return Ok(bytes),
                Err(error) => return Err(failed(error)),
            }
            if let Some(overdue) = watch.overdue() {
                return Err(format!("the answer {overdue}"));
            }
        }
    }

    /// Whether the server is quick for others.
    fn health(&self) -> Result<(), String> {
        let (watch, began) = (Watch::new(self.id(), HEALTH), Instant::now());
        let connection = self.send(&request("GET", "/health", "", b""), Client::Waits)?;
        let answers = answers(&self.read(connection)?, false)?;
        // On a busy machine it may take longer, but not because of the server.
        if began.elapsed() > HEALTH && watch.overdue().is_some() {
            return Err(format!("/health took {:.1} s", began.elapsed().as_secs_f64()));
        }
        match answers[..] {
            [Answer { status: 200, .. }] => Ok(()),
            _ => Err(format!("/health answered {answers:?}")),
        }
    }

    /// Whether answers keep to themselves where the server's files are.
    fn tells_no_place(&self, asked: &[u8], answers: &[Answer]) -> Result<(), String> {
        let place = self.log.parent().unwrap_or(Path::new("/")).to_string_lossy().into_owned();
        let tells = |bytes: &[u8]| String::from_utf8_lossy(bytes).contains(&place);
        match answers.iter().find(|answer| tells(&answer.body) && !tells(asked)) {
            Some(answer) => Err(format!("an answer tells where files are: {}", String::from_utf8_lossy(&answer.body))),
            None => Ok(()),
        }
    }

    /// Whether the process is as it should be after a case.
    fn check(&mut self) -> Result<(), String> {
        self.asked += 1;
        if let Ok(Some(status)) = self.process.try_wait() {
            return Err(format!("the server ended with {status}"));
        }
        let log = fs::read(&self.log).unwrap_or_default();
        let new = String::from_utf8_lossy(&log[self.seen.min(log.len())..]).into_owned();
        self.seen = log.len();
        if new.contains("panicked at") {
            return Err("the server panicked".into());
        }
        match resident_kib(self.id()) {
            Some(kib) if kib > MEMORY_KIB => return Err(format!("the server keeps {} MiB", kib >> 10)),
            _ => {}
        }
        if self.asked % QUESTION == 0 {
            let answer = self.answer()?;
            if answer != self.known {
                let shown = [&answer, &self.known].map(|text| String::from_utf8_lossy(text).into_owned());
                return Err(format!("a question was answered {:?}, at first {:?}", shown[0], shown[1]));
            }
        }
        Ok(())
    }

    /// What is answered to the question.
    fn answer(&self) -> Result<Vec<u8>, String> {
        let answers = answers(&self.read(self.send(&self.question, Client::Waits)?)?, false)?;
        let [Answer { status: 200, body }] = &answers[..] else { return Err(format!("a question was answered {answers:?}")) };
        let answer: Value = serde_json::from_slice(body).map_err(|error| error.to_string())?;
        Ok(answer["choices"][0]["message"]["content"].to_string().into_bytes())
    }

    fn last_words(&self) -> String {
        let said = fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(&said[said.len().saturating_sub(600)..]).escape_debug().to_string()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Whether answers are such as a client may get.
fn check(answers: &[Answer], client: Client) -> Result<(), String> {
    let expected = match client {
        Client::Waits => 1,
        Client::WaitsFor(count) => count,
        Client::Ends | Client::Leaves => answers.len(),
    };
    if answers.len() != expected {
        return Err(format!("{} answers came, not {expected}: {answers:?}", answers.len()));
    }
    for Answer { status, body } in answers {
        let body = String::from_utf8_lossy(body);
        // A stream that fails says so after its status.
        if !PROPER.contains(status) || body.contains(r#""type":"api_error""#) {
            return Err(format!("answered {status}: {}", body.chars().take(1000).collect::<String>()));
        }
    }
    Ok(())
}

/// Memory that a process has, where the system reports it.
fn resident_kib(process: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?.trim().strip_suffix(" kB")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{net::TcpListener, process::Command};

    #[test]
    fn improper_answers_are_noticed() {
        let answer = |status, body: &str| Answer { status, body: body.into() };
        assert_eq!(check(&[answer(400, "{}")], Client::Waits), Ok(()));
        assert_eq!(check(&[], Client::Ends), Ok(()));
        for (answers, client) in [
            (vec![answer(500, "{}")], Client::Ends),
            (vec![answer(200, r#"data: {"error":{"type":"api_error"}}"#)], Client::Waits),
            (vec![], Client::Waits),
            (vec![answer(200, "{}")], Client::WaitsFor(2)),
        ] {
            assert!(check(&answers, client).is_err(), "{answers:?}");
        }
    }

    /// A server that answers each request with what `answers` says of its path. None: it keeps the connection and says nothing.
    fn server(name: &str, answers: fn(&str) -> Option<String>) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        thread::spawn(move || {
            let mut kept = Vec::new();
            for mut client in listener.incoming().map_while(Result::ok) {
                let mut asked = [0; 4096];
                let length = client.read(&mut asked).unwrap();
                let asked = String::from_utf8_lossy(&asked[..length]).into_owned();
                match answers(asked.split(' ').nth(1).unwrap_or_default()) {
                    Some(answer) => client.write_all(answer.as_bytes()).unwrap(),
                    None => kept.push(client),
                }
            }
        });
        let process = Command::new("sleep").arg("60").spawn().unwrap();
        let log = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tmp").join(format!("attack-{name}-{}.log", std::process::id()));
        fs::create_dir_all(log.parent().unwrap()).unwrap();
        fs::write(&log, "").unwrap();
        let (question, limit) = (request("GET", "/question", "", b""), Duration::from_millis(100));
        Server { process, address, log, seen: 0, asked: 0, question, known: b"\"Lisbon\"".to_vec(), limit }
    }

    fn answer(status: u16, body: &str) -> Option<String> {
        Some(format!("HTTP/1.1 {status} x\r\nContent-Length: {}\r\n\r\n{body}", body.len()))
    }

    /// As a server should.
    fn well(path: &str) -> Option<String> {
        match path {
            "/question" => answer(200, r#"{"choices":[{"message":{"content":"Lisbon"}}]}"#),
            _ => answer(200, "{}"),
        }
    }

    #[test]
    fn servers_that_misbehave_are_noticed() {
        let ask = |server: &mut Server| server.ask(&request("GET", "/case", "", b""), Client::Waits).map(|_| ());
        let mut good = server("good", well);
        for _ in 0..2 * QUESTION {
            assert_eq!(ask(&mut good), Ok(()));
        }
        fs::write(&good.log, "thread 'x' panicked at src/x.rs").unwrap();
        assert!(ask(&mut good).unwrap_err().contains("panicked"));
        good.process.kill().unwrap();
        good.process.wait().unwrap();
        assert!(ask(&mut good).unwrap_err().contains("ended with"));
        let wrong = |name: &str, answers, expected: &str| {
            let mut server = server(name, answers);
            let problem = (0..QUESTION).find_map(|_| ask(&mut server).err()).unwrap_or_default();
            assert!(problem.contains(expected), "{name}: {problem}");
        };
        wrong("error", |path| if path == "/case" { answer(500, "{}") } else { well(path) }, "answered 500");
        wrong("dropped", |path| if path == "/case" { Some(String::new()) } else { well(path) }, "0 answers came");
        wrong("silent", |path| if path == "/case" { None } else { well(path) }, "did not end within");
        wrong("frozen", |path| if path == "/health" { None } else { well(path) }, "did not end within");
        wrong("sick", |path| if path == "/health" { answer(503, "{}") } else { well(path) }, "/health answered");
        wrong(
            "changed",
            |path| if path == "/question" { answer(200, r#"{"choices":[{"message":{"content":"Madrid"}}]}"#) } else { well(path) },
            "Madrid",
        );
    }
}

//! An answer from a model that another process has loaded: `qhx serve`, or any server with the chat API of OpenAI. Several clients share one model and one schedule.
//!
//! A server that is lost in the middle is asked again, if there is one: that of `qhx serve --isolate` is started again. Its answer is the same, and goes on where the first broke off.

use crate::{
    failure::Failure,
    interrupt::Interrupt,
    output::{self, Stream},
    units::{show_number, show_seconds, show_speed},
};
use qhx_runtime::MediaKind;
use qhx_server::tls;
use serde_json::{Value, json};
use std::{
    env,
    io::{self, BufRead, BufReader, Read},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

/// Has the key that a server may ask for.
const API_KEY: &str = "QHX_API_KEY";
/// A line of a stream, or a whole error, is not longer.
const MAX_LINE: u64 = 16 << 20;
/// The longest file that is sent.
const MAX_MEDIUM: u64 = 256 << 20;
/// How long a server may take to be reached.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a server that was lost may take to load its model again, and how often it is asked meanwhile.
const BACK_WITHIN: Duration = Duration::from_secs(300);
const ASKED_EVERY: Duration = Duration::from_millis(200);

/// What is asked.
pub(crate) struct Question<'a> {
    /// `http://127.0.0.1:8080`
    pub(crate) server: &'a str,
    /// The server's name for the model; absent: its first.
    pub(crate) model: Option<&'a str>,
    pub(crate) system: Option<&'a str>,
    pub(crate) prompt: &'a str,
    pub(crate) media: &'a [(MediaKind, PathBuf)],
    /// Sampling, limits, tools: as the API names them.
    pub(crate) fields: Value,
    pub(crate) json: bool,
}

impl Question<'_> {
    /// Asks, prints the answer as it comes, and what it cost.
    pub(crate) fn ask(&self, interrupt: &Interrupt) -> Result<(), Failure> {
        let started = Instant::now();
        let body = self.body()?;
        let cancelled = || Failure::work("cancelled: the answer is incomplete");
        let mut received = Received::default();
        let mut stream = Stream::new();
        let mut answer = Answer::default();
        let mut lost: Option<Loss> = None;
        loop {
            let done = self.events(&body, &mut |event| {
                if interrupt.is_set() {
                    return Err(cancelled());
                }
                let piece = answer.take(event);
                if !piece.is_empty() && answer.first.is_none() {
                    answer.first = Some(started.elapsed());
                }
                let new = received.add(&piece).ok_or_else(|| self.differs())?;
                if self.json || stream.push(new) { Ok(()) } else { Err(cancelled()) }
            });
            let Err(trouble) = done else { break };
            let len = answer.len();
            lost = match (trouble, lost) {
                // What ends a server twice at the same place would do so again.
                (Trouble::Lost(failure), before) if before.as_ref().is_none_or(|before| len > before.len) => {
                    Some(Loss { failure, len, at: Instant::now() })
                }
                (Trouble::NotReady(_), Some(loss)) if loss.at.elapsed() < BACK_WITHIN && !interrupt.is_set() => {
                    thread::sleep(ASKED_EVERY);
                    Some(loss)
                }
                // Nobody has started it again.
                (Trouble::NotReady(_) | Trouble::Unreachable(_), Some(loss)) => return Err(loss.failure),
                (Trouble::Lost(it) | Trouble::NotReady(it) | Trouble::Unreachable(it) | Trouble::Failed(it), _) => return Err(it),
            };
            answer = Answer { first: answer.first, ..Answer::default() };
            received.repeated = 0;
        }
        if received.repeated < received.text.len() {
            return Err(self.differs());
        }
        if self.json {
            output::print_json(&answer.json())?
        } else {
            stream.finish()?
        }
        if lost.is_some() {
            output::dim_note("note: the server was lost in the middle of the answer and asked again");
        }
        if self.json {
            return Ok(());
        }
        if answer.finish_reason.as_deref() == Some("length") {
            output::dim_note("note: the answer was cut off at its limit of tokens (--max-new)");
        }
        output::dim_note(&answer.cost(started.elapsed()));
        Ok(())
    }

    fn differs(&self) -> Failure {
        let message =
            format!("{} was lost in the middle of the answer, and then answered differently: what was printed is incomplete", self.server);
        Failure::work(message).hint("ask again")
    }

    fn body(&self) -> Result<Value, Failure> {
        let mut content: Vec<Value> = self.media.iter().map(|(kind, path)| medium(*kind, path)).collect::<Result<_, _>>()?;
        let system = self.system.map(|text| json!({ "role": "system", "content": text }));
        let said = match content.is_empty() {
            true => json!(self.prompt),
            false => {
                if !self.prompt.is_empty() {
                    content.push(json!({ "type": "text", "text": self.prompt }));
                }
                content.into()
            }
        };
        let messages: Vec<Value> = system.into_iter().chain([json!({ "role": "user", "content": said })]).collect();
        let mut body = self.fields.clone();
        body["messages"] = messages.into();
        (body["stream"], body["stream_options"]) = (json!(true), json!({ "include_usage": true }));
        if let Some(model) = self.model {
            body["model"] = json!(model);
        }
        Ok(body)
    }

    /// Sends the request and hands out the events of its stream. One that ends before it says so is an error.
    fn events(&self, body: &Value, take: &mut dyn FnMut(&Value) -> Result<(), Failure>) -> Result<(), Trouble> {
        let server = self.server.trim_end_matches('/');
        if !["http://", "https://"].iter().any(|scheme| server.starts_with(scheme)) {
            return Err(Failure::usage(format!("--connect {server}: expected an address such as http://127.0.0.1:8080")).into());
        }
        let url = format!("{}/v1/chat/completions", server.trim_end_matches("/v1"));
        let mut agent = ureq::Agent::config_builder().timeout_connect(Some(CONNECT_TIMEOUT)).http_status_as_error(false);
        if server.starts_with("https://") {
            agent = tls::enable(agent);
        }
        let agent: ureq::Agent = agent.build().into();
        let mut request = agent.post(&url).header("content-type", "application/json");
        if let Ok(key) = env::var(API_KEY) {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let died = |why: &str| Failure::work(format!("{server} ended in the middle of the answer{why}: what was printed is incomplete"));
        let not_sent = |error: ureq::Error| match error {
            ureq::Error::Io(error) if is_loss(&error) => Trouble::Lost(died(&format!(" ({error})"))),
            error => Trouble::Unreachable(
                Failure::work(format!("cannot reach {server}: {error}"))
                    .hint(tls::hint(&error).unwrap_or("`qhx serve MODEL` starts a server; it says where it listens")),
            ),
        };
        let mut response = request.send(body.to_string()).map_err(not_sent)?;
        let status = response.status();
        let reader = response.body_mut().as_reader();
        if !status.is_success() {
            let mut text = String::new();
            let _ = reader.take(MAX_LINE).read_to_string(&mut text);
            let refused = refused(server, status.as_u16(), &text);
            return Err(if status.as_u16() == NOT_READY { Trouble::NotReady(refused) } else { refused.into() });
        }
        let mut lines = BufReader::new(reader);
        loop {
            let mut line = Vec::new();
            let read = (&mut lines).take(MAX_LINE).read_until(b'\n', &mut line);
            let read = read.map_err(|error| Trouble::Lost(died(&format!(" ({error})"))))?;
            if !line.ends_with(b"\n") && (read as u64) < MAX_LINE {
                return Err(Trouble::Lost(died("")));
            }
            // Comments keep the connection alive.
            let line = String::from_utf8_lossy(&line);
            let Some(data) = line.trim_end().strip_prefix("data:").map(str::trim) else { continue };
            if data == "[DONE]" {
                return Ok(());
            }
            let event: Value = serde_json::from_str(data).map_err(|error| died(&format!(" (its event is not JSON: {error})")))?;
            if let Some(error) = event.get("error") {
                return Err(Failure::work(format!("{server}: {}", message(error))).into());
            }
            take(&event)?;
        }
    }
}

/// Why an answer did not come to its end.
enum Trouble {
    /// The connection ended.
    Lost(Failure),
    /// The server is starting or stopping.
    NotReady(Failure),
    /// There is no server.
    Unreachable(Failure),
    /// Anything that asking again does not change.
    Failed(Failure),
}

impl From<Failure> for Trouble {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

/// The status of a server that is starting or stopping.
const NOT_READY: u16 = 503;

/// Whether a connection that there was has ended.
fn is_loss(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof)
}

/// A server that was lost.
struct Loss {
    /// What is told if there is none again.
    failure: Failure,
    /// How much of the answer there was.
    len: usize,
    at: Instant,
}

/// The text that was printed, of which an answer that is asked for again repeats the beginning.
#[derive(Default)]
struct Received {
    text: String,
    /// So many bytes of it have come from the server that answers now.
    repeated: usize,
}

impl Received {
    /// What of a piece is new; none if it differs from what was received before.
    fn add<'a>(&mut self, piece: &'a str) -> Option<&'a str> {
        let known = &self.text.as_bytes()[self.repeated..];
        let both = known.len().min(piece.len());
        if known[..both] != piece.as_bytes()[..both] {
            return None;
        }
        let new = piece.get(both..)?;
        self.repeated += piece.len();
        self.text += new;
        Some(new)
    }
}

/// What came so far.
#[derive(Default)]
struct Answer {
    model: String,
    text: String,
    reasoning: String,
    finish_reason: Option<String>,
    usage: Value,
    tool_calls: Vec<Value>,
    /// When the first piece came.
    first: Option<Duration>,
}

impl Answer {
    /// Takes an event; returns the new text.
    fn take(&mut self, event: &Value) -> String {
        if let Some(model) = event["model"].as_str() {
            self.model = model.to_owned();
        }
        if event["usage"].is_object() {
            self.usage = event["usage"].clone();
        }
        let choice = &event["choices"][0];
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.finish_reason = Some(reason.to_owned());
        }
        let delta = &choice["delta"];
        self.tool_calls.extend(delta["tool_calls"].as_array().into_iter().flatten().cloned());
        self.reasoning += delta["reasoning_content"].as_str().unwrap_or_default();
        let piece = delta["content"].as_str().unwrap_or_default();
        self.text += piece;
        piece.to_owned()
    }

    /// How much there is, with what is not printed.
    fn len(&self) -> usize {
        self.text.len() + self.reasoning.len()
    }

    fn json(&self) -> Value {
        let mut json = json!({ "model": self.model, "text": self.text, "finish_reason": self.finish_reason, "usage": self.usage });
        if !self.reasoning.is_empty() {
            json["reasoning"] = json!(self.reasoning);
        }
        if !self.tool_calls.is_empty() {
            json["tool_calls"] = json!(self.tool_calls);
        }
        json
    }

    /// Tokens, and how fast they came.
    fn cost(&self, whole: Duration) -> String {
        let tokens = self.usage["completion_tokens"].as_u64().unwrap_or(0) as usize;
        let mut parts = Vec::new();
        if let Some(rest) = self.first.and_then(|first| whole.checked_sub(first)).filter(|rest| tokens > 1 && !rest.is_zero()) {
            parts.push(show_speed((tokens - 1) as f64 / rest.as_secs_f64()));
        }
        parts.push(show_number(tokens, "token"));
        parts.extend(self.first.map(|first| format!("{} first token", show_seconds(first.as_secs_f64()))));
        parts.join(" · ")
    }
}

/// A medium as a part of a message.
fn medium(kind: MediaKind, path: &Path) -> Result<Value, Failure> {
    let bytes = qhx_bundle::files::read_given(path, MAX_MEDIUM)?;
    let data = base64::encode(bytes);
    let ending = path.extension().map(|ending| ending.to_string_lossy().to_ascii_lowercase()).unwrap_or_default();
    Ok(match kind {
        MediaKind::Image => {
            let subtype = if ending == "jpg" { "jpeg" } else { &ending };
            json!({ "type": "image_url", "image_url": { "url": format!("data:image/{subtype};base64,{data}") } })
        }
        MediaKind::Audio => json!({ "type": "input_audio", "input_audio": { "data": data, "format": ending } }),
    })
}

/// Why a server refuses.
fn refused(server: &str, status: u16, text: &str) -> Failure {
    let said = serde_json::from_str::<Value>(text).map_or_else(|_| text.trim().chars().take(500).collect(), |json| message(&json["error"]));
    let failure = Failure::work(format!("{server} refused the request ({status}): {said}"));
    match status {
        401 | 403 => failure.hint(format!("{API_KEY} in the environment has the key that is sent")),
        429 | 503 => failure.hint("try again in a moment"),
        _ => failure,
    }
}

fn message(error: &Value) -> String {
    error["message"].as_str().map_or_else(|| error.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::Received;

    #[test]
    fn an_answer_that_is_asked_for_again_goes_on_behind_what_was_received() {
        let mut received = Received::default();
        assert_eq!((received.add("Lis"), received.add("bon é")), (Some("Lis"), Some("bon é")));
        received.repeated = 0;
        assert_eq!((received.add("Lisbo"), received.add("n "), received.add("é a")), (Some(""), Some(""), Some(" a")));
        assert_eq!((received.add(" capital"), &*received.text), (Some(" capital"), "Lisbon é a capital"));
        received.repeated = 0;
        assert_eq!((received.add("Lisbon"), received.add(" è")), (Some(""), None), "another letter that begins with the same byte");
    }
}

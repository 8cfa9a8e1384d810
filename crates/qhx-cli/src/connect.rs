//! An answer from a model that another process has loaded: `qhx serve`, or any server with the chat API of OpenAI. Several clients share one model and one schedule.

use crate::{
    failure::Failure,
    interrupt::Interrupt,
    output::{self, Stream},
    units::{show_number, show_seconds, show_speed},
};
use qhx_runtime::MediaKind;
use serde_json::{Value, json};
use std::{
    env,
    io::{BufRead, BufReader, Read},
    path::{Path, PathBuf},
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
        let mut answer = Answer::default();
        let mut stream = Stream::new();
        self.events(&self.body()?, &mut |event| {
            if interrupt.is_set() {
                return Err(Failure::work("cancelled: the answer is incomplete"));
            }
            let piece = answer.take(event)?;
            if !piece.is_empty() && answer.first.is_none() {
                answer.first = Some(started.elapsed());
            }
            match self.json || stream.push(&piece) {
                true => Ok(()),
                false => Err(Failure::work("cancelled: the answer is incomplete")),
            }
        })?;
        if self.json {
            return output::print_json(&answer.json());
        }
        stream.finish()?;
        if answer.finish_reason.as_deref() == Some("length") {
            output::dim_note("note: the answer was cut off at its limit of tokens (--max-new)");
        }
        output::dim_note(&answer.cost(started.elapsed()));
        Ok(())
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
    fn events(&self, body: &Value, take: &mut dyn FnMut(&Value) -> Result<(), Failure>) -> Result<(), Failure> {
        let server = self.server.trim_end_matches('/');
        if !["http://", "https://"].iter().any(|scheme| server.starts_with(scheme)) {
            return Err(Failure::usage(format!("--connect {server}: expected an address such as http://127.0.0.1:8080")));
        }
        let url = format!("{}/v1/chat/completions", server.trim_end_matches("/v1"));
        let agent: ureq::Agent =
            ureq::Agent::config_builder().timeout_connect(Some(CONNECT_TIMEOUT)).http_status_as_error(false).build().into();
        let mut request = agent.post(&url).header("content-type", "application/json");
        if let Ok(key) = env::var(API_KEY) {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let unreachable = |error: ureq::Error| {
            Failure::work(format!("cannot reach {server}: {error}")).hint("`qhx serve MODEL` starts a server; it says where it listens")
        };
        let mut response = request.send(body.to_string()).map_err(unreachable)?;
        let status = response.status();
        let reader = response.body_mut().as_reader();
        if !status.is_success() {
            let mut text = String::new();
            let _ = reader.take(MAX_LINE).read_to_string(&mut text);
            return Err(refused(server, status.as_u16(), &text));
        }
        let died = |why: &str| Failure::work(format!("{server} ended in the middle of the answer{why}: what was printed is incomplete"));
        let mut lines = BufReader::new(reader);
        loop {
            let mut line = Vec::new();
            let read = (&mut lines).take(MAX_LINE).read_until(b'\n', &mut line).map_err(|error| died(&format!(" ({error})")))?;
            if read == 0 {
                return Err(died(""));
            }
            // Comments keep the connection alive.
            let line = String::from_utf8_lossy(&line);
            let Some(data) = line.trim_end().strip_prefix("data:").map(str::trim) else { continue };
            if data == "[DONE]" {
                return Ok(());
            }
            let event: Value = serde_json::from_str(data).map_err(|error| died(&format!(" (its event is not JSON: {error})")))?;
            if let Some(error) = event.get("error") {
                return Err(Failure::work(format!("{server}: {}", message(error))));
            }
            take(&event)?;
        }
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
    fn take(&mut self, event: &Value) -> Result<String, Failure> {
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
        Ok(piece.to_owned())
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

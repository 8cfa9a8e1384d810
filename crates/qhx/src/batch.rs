//! Many prompts from a file, many at once: a line of JSON in, a line of JSON out, in the same order.
//!
//! A line is `{"id": …, "messages": […]}` (OpenAI messages), `{"id": …, "ids": […]}` or `{"id": …, "prompt": "…"}`, with optional `max_new`, `temperature`, `top_k`, `top_p`, `min_p`,
//! `repetition_penalty`, `seed` and `stop`. Its answer is `{"id": …, "ids": […], "text": …, "finish_reason": …}`, or `{"id": …, "error": {"message": …}}`: a bad line never stops
//! the others.

use crate::{
    json,
    messages::{self, FileAccess},
};
use qhx_bundle::Bundle;
use qhx_runtime::{
    Cancel, GenerateOptions, Model, Prompt,
    engine::{Answer, Engine, Request},
};
use serde::{Deserialize, de::IgnoredAny};
use serde_json::{Value, json};
use std::{
    collections::VecDeque,
    fs::{File, OpenOptions},
    io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write},
    path::Path,
};

/// The longest line that is read.
const MAX_LINE: u64 = 64 << 20;

/// Why a batch cannot go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BatchError {
    /// A file cannot be read or written.
    #[error("cannot {what} {place}: {source}")]
    File {
        /// `read` or `write`.
        what: &'static str,
        /// Which.
        place: String,
        /// What the system said.
        source: io::Error,
    },
    /// The answers that are there belong to something else.
    #[error("{place} line {line} answers {found}, but the input has {expected} there: these answers are of another input")]
    OtherInput {
        /// The answers.
        place: String,
        /// Counted from 1.
        line: usize,
        /// The id that stands there.
        found: Box<Value>,
        /// The id that should.
        expected: Box<Value>,
    },
    /// It was stopped; running it again goes on from there.
    #[error("stopped after {done} lines")]
    Cancelled {
        /// Lines that are answered.
        done: usize,
    },
}

/// What a batch has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct BatchReport {
    /// Lines of the input.
    pub lines: usize,
    /// Lines that were answered before.
    pub skipped: usize,
    /// Lines that were answered now.
    pub answered: usize,
    /// Lines whose answer is an error.
    pub errors: usize,
    /// Tokens of prompts.
    pub prompt_tokens: usize,
    /// Tokens chosen.
    pub generated_tokens: usize,
}

/// A batch of prompts.
#[non_exhaustive]
pub struct Batch<'a> {
    /// Answers them. It is good to have it loaded for as many sessions as should run at once.
    pub engine: &'a Engine,
    /// Where media of messages are described.
    pub bundle: &'a Bundle,
    /// What a line does not say.
    pub options: GenerateOptions,
    /// Stops all of it.
    pub cancel: Cancel,
}

/// A line of the input.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    /// Looked at before anything else: see [`id_of`].
    #[serde(rename = "id")]
    _id: Option<IgnoredAny>,
    messages: Option<Value>,
    ids: Option<Vec<u32>>,
    prompt: Option<String>,
    max_new: Option<usize>,
    temperature: Option<f32>,
    top_k: Option<usize>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    seed: Option<u64>,
    stop: Option<Vec<String>>,
}

/// A line on its way: its id, and its answer or what is wrong with it.
type Asked = (Value, Result<Answer, String>);

impl<'a> Batch<'a> {
    /// With the usual options.
    pub fn new(engine: &'a Engine, bundle: &'a Bundle) -> Self {
        Self { engine, bundle, options: GenerateOptions::default(), cancel: Cancel::new() }
    }

    /// Answers the lines of `input` that `output` does not answer yet. `done` is told of every answered line.
    pub fn run(&self, input: &Path, output: &Path, done: &mut dyn FnMut(&BatchReport)) -> Result<BatchReport, BatchError> {
        let (reading, writing) = (|source| failed("read", input, source), |source| failed("write", output, source));
        let mut lines = Lines::new(qhx_bundle::files::open(input).map_err(|e| reading(io::Error::other(e.reason())))?);
        let (mut file, answered) = resume(output)?;
        let mut report = BatchReport::default();
        for (number, found) in answered.iter().enumerate() {
            let Some(line) = lines.next_line().map_err(reading)? else { break };
            let (expected, line) = (id_of(&line, number + 1), number + 1);
            if expected != *found {
                let (place, found) = (output.display().to_string(), Box::new(found.clone()));
                return Err(BatchError::OtherInput { place, line, found, expected: Box::new(expected) });
            }
            report.skipped += 1;
        }
        report.lines = report.skipped;
        let window = 4 * self.engine.model().sessions();
        let mut asked: VecDeque<Asked> = VecDeque::new();
        loop {
            while asked.len() < window && !self.cancel.is_cancelled() {
                let Some(line) = lines.next_line().map_err(reading)? else { break };
                report.lines += 1;
                asked.push_back(self.ask(&line, report.lines));
            }
            let Some((id, answer)) = asked.pop_front() else { break };
            let answer = answer.and_then(|answer| answer.finish().map_err(|error| error.to_string()));
            if self.cancel.is_cancelled() {
                return Err(BatchError::Cancelled { done: report.skipped + report.answered });
            }
            let line = match answer {
                Ok(answer) => {
                    report.prompt_tokens += answer.prompt_ids.len();
                    report.generated_tokens += answer.ids.len();
                    json!({ "id": id, "ids": answer.ids, "text": answer.text, "finish_reason": answer.finish_reason })
                }
                Err(message) => {
                    report.errors += 1;
                    json!({ "id": id, "error": { "message": message } })
                }
            };
            // A line is written whole: who is killed in the middle of it finds a line without end.
            file.write_all(format!("{line}\n").as_bytes()).and_then(|()| file.flush()).map_err(writing)?;
            report.answered += 1;
            done(&report);
        }
        file.sync_all().map_err(writing)?;
        Ok(report)
    }

    fn ask(&self, line: &Result<String, String>, number: usize) -> Asked {
        let id = id_of(line, number);
        (id, self.request(line).and_then(|request| self.engine.submit(request).map_err(|error| error.to_string())))
    }

    fn request(&self, line: &Result<String, String>) -> Result<Request, String> {
        let text = line.as_ref()?;
        let line = json::check(text).and_then(|()| serde_json::from_str::<Line>(text));
        let line = line.map_err(|error| format!("the line is not a request: {error}"))?;
        let model = self.engine.model();
        let prompt = self.prompt(model, &line)?;
        let mut options = self.options.clone();
        let sampler = &mut options.sampler;
        set(&mut sampler.temperature, line.temperature);
        set(&mut sampler.top_k, line.top_k);
        set(&mut sampler.top_p, line.top_p);
        set(&mut sampler.min_p, line.min_p);
        set(&mut sampler.repetition_penalty, line.repetition_penalty);
        set(&mut sampler.seed, line.seed);
        set(&mut options.max_new, line.max_new);
        set(&mut options.stop, line.stop);
        let mut request = Request::new(prompt).with_options(options);
        request.cancel = self.cancel.clone();
        Ok(request)
    }

    fn prompt(&self, model: &Model, line: &Line) -> Result<Prompt, String> {
        let text = |error: qhx_runtime::Error| error.to_string();
        match (&line.messages, &line.ids, &line.prompt) {
            (Some(messages), None, None) => {
                let mut chat = messages::from_json(json!({ "messages": messages })).map_err(|error| error.to_string())?;
                messages::open_media(&mut chat, self.bundle, &FileAccess::All).map_err(|error| error.to_string())?;
                Prompt::chat(model, &chat).map_err(text)
            }
            (None, Some(ids), None) => Ok(Prompt::from_ids(ids.clone())),
            (None, None, Some(prompt)) => Prompt::completion(model, prompt).map_err(text),
            _ => Err("a line needs exactly one of `messages`, `ids` and `prompt`".into()),
        }
    }
}

fn set<T>(own: &mut T, said: Option<T>) {
    if let Some(said) = said {
        *own = said;
    }
}

/// A line's id; without one, its number.
fn id_of(line: &Result<String, String>, number: usize) -> Value {
    let value: Option<Value> = line.as_ref().ok().and_then(|line| serde_json::from_str(line).ok());
    value.and_then(|value| value.get("id").cloned()).unwrap_or_else(|| number.into())
}

/// Opens the answers to go on behind them: the ids that are answered, in order. What was not written to its end is cut off.
fn resume(path: &Path) -> Result<(File, Vec<Value>), BatchError> {
    let writing = |source| failed("write", path, source);
    if path.metadata().is_ok_and(|there| !there.is_file()) {
        return Err(writing(io::Error::other("it is no regular file, and a batch that is run again reads its answers back")));
    }
    let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).map_err(writing)?;
    let mut lines = Lines::new(file.try_clone().map_err(writing)?);
    let (mut answered, mut end) = (Vec::new(), 0);
    while let Some(line) = lines.next_line().map_err(|source| failed("read", path, source))? {
        let id = line.ok().and_then(|line| serde_json::from_str::<Value>(&line).ok()?.get("id").cloned());
        let Some(id) = id.filter(|_| lines.is_whole) else { break };
        answered.push(id);
        end = lines.read;
    }
    file.set_len(end).map_err(writing)?;
    file.seek(SeekFrom::Start(end)).map_err(writing)?;
    Ok((file, answered))
}

/// Lines of a file, empty ones left out, each of bounded length.
struct Lines {
    file: BufReader<File>,
    /// Bytes up to the end of the last line.
    read: u64,
    /// Whether the last line had an end.
    is_whole: bool,
}

impl Lines {
    fn new(file: File) -> Self {
        Self { file: BufReader::new(file), read: 0, is_whole: true }
    }

    /// The next line; the inner error is what is wrong with it.
    fn next_line(&mut self) -> io::Result<Option<Result<String, String>>> {
        loop {
            let mut bytes = Vec::new();
            let count = (&mut self.file).take(MAX_LINE + 1).read_until(b'\n', &mut bytes)?;
            if count == 0 {
                return Ok(None);
            }
            self.read += count as u64;
            self.is_whole = bytes.last() == Some(&b'\n');
            if count as u64 > MAX_LINE {
                self.read += self.file.skip_until(b'\n')? as u64;
                return Ok(Some(Err(format!("the line is longer than {} MiB", MAX_LINE >> 20))));
            }
            let line = String::from_utf8(bytes).map_err(|_| "the line is not valid UTF-8".to_owned());
            if !line.as_ref().is_ok_and(|line| line.trim().is_empty()) {
                return Ok(Some(line));
            }
        }
    }
}

fn failed(what: &'static str, path: &Path, source: io::Error) -> BatchError {
    BatchError::File { what, place: path.display().to_string(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is answered of these answers, and what is left of the file once another line is written.
    fn resumed(text: &[u8]) -> (Vec<Value>, String) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("answers.jsonl");
        std::fs::write(&path, text).unwrap();
        let (mut file, answered) = resume(&path).unwrap();
        file.write_all(b"next\n").unwrap();
        (answered, std::fs::read_to_string(&path).unwrap())
    }

    #[test]
    fn whole_answers_are_kept() {
        assert_eq!(resumed(b""), (vec![], "next\n".into()));
        let whole = "{\"id\":1}\n\n{\"id\":\"b\"}\n";
        assert_eq!(resumed(whole.as_bytes()), (vec![json!(1), json!("b")], format!("{whole}next\n")));
    }

    /// A line counts once its end is written: until then more of it may be missing than can be seen.
    #[test]
    fn a_torn_answer_is_given_again_even_if_it_is_valid_json() {
        let torn = [&br#"{"id":2}"#[..], br#"{"id":2,"text":"a"} "#, br#"{"id":2,"te"#, br#"{"text":"a"}"#, b"2", b"\xc3"];
        for torn in torn {
            let text = [b"{\"id\":1}\n", torn].concat();
            assert_eq!(resumed(&text), (vec![json!(1)], "{\"id\":1}\nnext\n".into()), "{}", String::from_utf8_lossy(torn));
        }
    }

    /// Nothing behind a damaged line is an answer: the order would be lost.
    #[test]
    fn answers_behind_a_damaged_one_are_given_again() {
        for damaged in ["{\"id\":2\n", "{}\n", "\0\0\n"] {
            let text = format!("{{\"id\":1}}\n{damaged}{{\"id\":3}}\n");
            assert_eq!(resumed(text.as_bytes()), (vec![json!(1)], "{\"id\":1}\nnext\n".into()), "{damaged}");
        }
    }
}

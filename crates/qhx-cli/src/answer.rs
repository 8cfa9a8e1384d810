//! One answer: made, streamed to stdout as it comes, and its cost told on stderr.

use crate::{
    draft::DraftChoice,
    failure::Failure,
    input::Input,
    interrupt::Interrupt,
    load::load_model,
    media::MediaFlags,
    open::open_model,
    output::{self, Stream},
    sessions::SessionFlags,
    units::{show_number, show_seconds, show_speed},
    windows::{self, Windows},
};
use qhx_bundle::Bundle;
use qhx_runtime::text::reply::{ReplyFormat, ReplyParser, ReplyPart, Tools};
use qhx_runtime::{
    Error, FinishReason, GenerateOptions, Generation, LoadOptions, Model, Piece, generate,
    timing::{Timing, milliseconds},
};
use serde_json::{Value, json};
use std::{
    path::Path,
    time::{Duration, Instant},
};

/// What decides an answer, but for its input.
pub(crate) struct Request<'a> {
    /// The built-in model where absent.
    pub(crate) model: Option<&'a Path>,
    pub(crate) load: LoadOptions,
    pub(crate) options: GenerateOptions,
    pub(crate) draft: &'a DraftChoice,
    pub(crate) media: &'a MediaFlags,
    pub(crate) sessions: Option<&'a SessionFlags>,
    pub(crate) tools: Option<Value>,
    /// Whether one JSON object is printed, and not the text as it comes.
    pub(crate) json: bool,
}

/// An answer and the model that gave it.
pub(crate) struct Answered {
    pub(crate) generation: Generation,
    pub(crate) model: Model,
    /// The tools that could be called.
    tools: Option<Tools>,
    load_time: Duration,
    json: bool,
}

impl Request<'_> {
    /// Opens the model, loads it and lets it answer the input that `input` makes for it.
    pub(crate) fn answer(
        mut self,
        input: impl FnOnce(&Bundle) -> Result<Input, Failure>,
        interrupt: &Interrupt,
    ) -> Result<Answered, Failure> {
        let opened = open_model(self.model, self.load.device, interrupt)?;
        let bundle = &opened.bundle;
        let mut input = input(bundle)?;
        let started = Instant::now();
        let windows = Windows::open(&mut input, self.media, bundle)?;
        self.load.media = windows.media(&input);
        let read_time = started.elapsed();
        let model = load_model(bundle, &self.load)?;
        self.options.draft = self.draft.source(&model, &self.load, interrupt)?;
        let load_time = opened.time + started.elapsed() - read_time;
        let mut session = match self.sessions {
            Some(sessions) => sessions.begin(&model, &mut input)?,
            None => model.session()?,
        };
        let tools = self.tools.as_ref().map(Tools::from_json).transpose()?;
        if let Some(json) = self.tools {
            input.set_tools(json, &model)?;
            self.options.shown_special = model.special_marks();
            self.options.structure.tools = tools.clone();
        }
        let options = &self.options;
        let mut generation = match &windows {
            Windows::Several(windows) => windows::answer(windows, &mut input, &mut session, options, interrupt, !self.json)?,
            Windows::None => {
                let prompt = input.prompt(&model)?;
                let mut answer =
                    |on_piece: &mut dyn FnMut(Piece<'_>)| generate(&mut session, &prompt, options, interrupt.cancel(), on_piece);
                if self.json { answer(&mut |_| {})? } else { stream_answer(&model, interrupt, answer)? }
            }
        };
        generation.timing.load_ms = milliseconds(load_time);
        generation.timing.add_encode_time(read_time);
        if let Some(sessions) = self.sessions.filter(|_| generation.finish_reason != FinishReason::Cancelled) {
            sessions.end(&session, &input, &generation)?;
        }
        Ok(Answered { generation, model, tools, load_time, json: self.json })
    }
}

impl Answered {
    /// Prints the JSON object or, behind the text that was streamed, what the answer cost.
    pub(crate) fn finish(&self) -> Result<(), Failure> {
        match self.json {
            true => output::print_json(&self.json()?)?,
            false => tell_cost(&self.generation, Some(self.load_time)),
        }
        check_complete(&self.generation)
    }

    /// The answer, with the tools that it calls where there were any to call.
    fn json(&self) -> Result<Value, Failure> {
        let mut json = serde_json::to_value(&self.generation)?;
        if let Some(tools) = &self.tools {
            let mut format = self.model.reply_format().clone();
            format.calls.get_or_insert_with(ReplyFormat::by_prompt);
            let reasoning = format.reasoning_at(&self.model.end_of_prompt(&self.generation.prompt_ids));
            let mut parser = ReplyParser::new(&format, Some(tools), reasoning);
            let parts = [parser.push(&self.generation.text), parser.finish()].concat();
            let calls = parts.into_iter().filter_map(|part| match part {
                ReplyPart::Call(call) => Some(json!({ "name": call.name, "arguments": call.arguments })),
                _ => None,
            });
            json["tool_calls"] = calls.collect();
        }
        Ok(json)
    }
}

/// Streams the answer that `work` makes with `model`: its text (for a model without tokenizer: the ids). A closed stdout stops it.
pub(crate) fn stream_answer(
    model: &Model,
    interrupt: &Interrupt,
    work: impl FnOnce(&mut dyn FnMut(Piece<'_>)) -> Result<Generation, Error>,
) -> Result<Generation, Failure> {
    let has_text = model.tokenizer().is_some();
    let mut stream = Stream::new();
    let mut first = true;
    let generation = work(&mut |piece: Piece<'_>| {
        let printed = match piece.id {
            Some(id) if !has_text => stream.push(&format!("{}{id}", if first { "" } else { "," })),
            _ => stream.push(piece.text),
        };
        first = false;
        if !printed {
            interrupt.stop();
        }
    });
    stream.finish()?;
    Ok(generation?)
}

/// What a person should know after an answer: why it is shorter than expected, and what it cost.
pub(crate) fn tell_cost(generation: &Generation, load_time: Option<Duration>) {
    if let Some(note) = &generation.note {
        output::note(&format!("note: {note}"));
    } else if generation.finish_reason == FinishReason::Length {
        output::dim_note("note: the answer was cut off at its limit of tokens (--max-new)");
    }
    output::dim_note(&timing_line(&generation.timing, load_time, generation.media > 0));
}

/// An answer that was stopped is no success.
pub(crate) fn check_complete(generation: &Generation) -> Result<(), Failure> {
    match generation.finish_reason {
        FinishReason::Cancelled => Err(Failure::work("cancelled: the answer is incomplete")),
        _ => Ok(()),
    }
}

/// `12.3 tok/s · 34 tokens · 0.21 s first token · 1.20 s load`; with media also what encoding and prefill took.
fn timing_line(timing: &Timing, load_time: Option<Duration>, has_media: bool) -> String {
    let mut parts = Vec::new();
    if timing.decode_tokens_per_second > 0.0 {
        parts.push(show_speed(timing.decode_tokens_per_second));
    }
    parts.push(show_number(timing.generated_tokens, "token"));
    if timing.drafted > 0 {
        parts.push(format!("{} of {} drafted tokens right", timing.accepted, timing.drafted));
    }
    if has_media {
        parts.push(format!("{} encode", show_seconds(timing.encode_ms / 1e3)));
        parts.push(format!("{} prefill", show_seconds(timing.prefill_ms / 1e3)));
    }
    if timing.generated_tokens > 0 {
        parts.push(format!("{} first token", show_seconds(timing.ttft_ms / 1e3)));
    }
    parts.extend(load_time.map(|time| format!("{} load", show_seconds(time.as_secs_f64()))));
    parts.join(" · ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_timing_line() {
        let timing = Timing { decode_tokens_per_second: 12.345, generated_tokens: 34, ttft_ms: 214.0, ..Timing::default() };
        let load = Some(Duration::from_millis(1200));
        assert_eq!(timing_line(&timing, load, false), "12.3 tok/s · 34 tokens · 0.21 s first token · 1.20 s load");
        assert_eq!(timing_line(&Timing::default(), None, false), "0 tokens");
        let seen = Timing { encode_ms: 130.0, prefill_ms: 80.0, ..timing };
        assert_eq!(
            timing_line(&seen, load, true),
            "12.3 tok/s · 34 tokens · 0.13 s encode · 80 ms prefill · 0.21 s first token · 1.20 s load"
        );
    }
}

//! `/v1/responses` with `stream: true`: events with numbers, each item with its beginning, its parts and its end.

use super::{State, Whole, call_item, message_item, reasoning_item, text_part};
use crate::{
    app::App,
    error::Protocol,
    generate::{Replies, Told},
    stream::{self, Gone, Kind, Sink},
};
use axum::response::Response;
use qhx::{ReplyEvent, text::reply::ReplyPart};
use serde_json::{Value, json};
use std::sync::Arc;

pub(super) fn respond(app: Arc<App>, whole: Whole, replies: Replies) -> Response {
    stream::respond(Kind::Events, move |sink| write(app, whole, replies, sink))
}

/// The item that is being written.
struct Open {
    id: String,
    text: String,
    is_reasoning: bool,
}

struct Writer {
    app: Arc<App>,
    sink: Sink,
    /// Events so far.
    events: usize,
    open: Option<Open>,
    /// Items that have ended.
    output: Vec<Value>,
}

impl Writer {
    async fn event(&mut self, kind: &str, mut value: Value) -> Result<(), Gone> {
        (value["type"], value["sequence_number"]) = (kind.into(), self.events.into());
        self.events += 1;
        self.sink.event(kind, &value).await
    }

    /// An event with the whole response.
    async fn state(&mut self, kind: &str, whole: &Whole, state: &State) -> Result<(), Gone> {
        let [fixed, state] = whole.with(state).map_err(|_| Gone)?;
        let start = format!("{{\"type\":\"{kind}\",\"sequence_number\":{},\"response\":", self.events);
        self.events += 1;
        self.sink.event_in_parts(kind, [start.into(), fixed, state, "}".into()]).await
    }

    async fn text(&mut self, is_reasoning: bool, text: String) -> Result<(), Gone> {
        let place = self.output.len();
        if self.open.as_ref().is_none_or(|open| open.is_reasoning != is_reasoning) {
            self.close().await?;
            let place = self.output.len();
            let id = self.app.id(if is_reasoning { "rs_" } else { "msg_" });
            let (mut item, part) = match is_reasoning {
                true => (reasoning_item(&id, ""), json!({ "type": "reasoning_text", "text": "" })),
                false => (message_item(&id, "", "in_progress"), text_part("")),
            };
            item["content"] = json!([]);
            self.event("response.output_item.added", json!({ "output_index": place, "item": item })).await?;
            let added = json!({ "item_id": id, "output_index": place, "content_index": 0, "part": part });
            self.event("response.content_part.added", added).await?;
            self.open = Some(Open { id, text: String::new(), is_reasoning });
            return Box::pin(self.text(is_reasoning, text)).await;
        }
        let Some(open) = &mut self.open else { return Ok(()) };
        open.text.push_str(&text);
        let mut delta = json!({ "item_id": open.id, "output_index": place, "content_index": 0, "delta": text });
        if !is_reasoning {
            delta["logprobs"] = json!([]);
        }
        self.event(if is_reasoning { "response.reasoning_text.delta" } else { "response.output_text.delta" }, delta).await
    }

    async fn close(&mut self) -> Result<(), Gone> {
        let Some(Open { id, text, is_reasoning }) = self.open.take() else { return Ok(()) };
        let place = self.output.len();
        let at = || json!({ "item_id": id, "output_index": place, "content_index": 0 });
        let (mut done, mut part_done) = (at(), at());
        done["text"] = text.as_str().into();
        let item = match is_reasoning {
            true => {
                self.event("response.reasoning_text.done", done).await?;
                part_done["part"] = json!({ "type": "reasoning_text", "text": text });
                reasoning_item(&id, &text)
            }
            false => {
                done["logprobs"] = json!([]);
                self.event("response.output_text.done", done).await?;
                part_done["part"] = text_part(&text);
                message_item(&id, &text, "completed")
            }
        };
        self.event("response.content_part.done", part_done).await?;
        self.event("response.output_item.done", json!({ "output_index": place, "item": item })).await?;
        self.output.push(item);
        Ok(())
    }
}

async fn write(app: Arc<App>, whole: Whole, mut replies: Replies, sink: Sink) -> Result<(), Gone> {
    let mut writer = Writer { app: app.clone(), sink, events: 0, open: None, output: Vec::new() };
    writer.state("response.created", &whole, &State::begun()).await?;
    writer.state("response.in_progress", &whole, &State::begun()).await?;
    while let Some(told) = writer.sink.wait_for(replies.next()).await? {
        match told {
            Ok(Told::Event(_, ReplyEvent::Part(ReplyPart::Reasoning(text)))) => writer.text(true, text).await?,
            Ok(Told::Event(_, ReplyEvent::Part(ReplyPart::Content(text)))) => writer.text(false, text).await?,
            Ok(Told::Event(_, ReplyEvent::Part(ReplyPart::Call(call)))) => {
                writer.close().await?;
                let place = writer.output.len();
                let (id, call_id) = (app.id("fc_"), app.id("call_"));
                let item = call_item(&id, &call_id, &call);
                let mut begun = item.clone();
                (begun["arguments"], begun["status"]) = ("".into(), "in_progress".into());
                writer.event("response.output_item.added", json!({ "output_index": place, "item": begun })).await?;
                let delta = json!({ "item_id": id, "output_index": place, "delta": call.arguments });
                writer.event("response.function_call_arguments.delta", delta).await?;
                let done = json!({ "item_id": id, "output_index": place, "name": call.name, "arguments": call.arguments });
                writer.event("response.function_call_arguments.done", done).await?;
                writer.event("response.output_item.done", json!({ "output_index": place, "item": item })).await?;
                writer.output.push(item);
            }
            Ok(Told::Event(_, ReplyEvent::Token(_))) => {}
            Ok(Told::End(_, end)) => {
                if writer.open.is_none() && writer.output.is_empty() {
                    writer.text(false, String::new()).await?;
                }
                writer.close().await?;
                let state = State::ended(std::mem::take(&mut writer.output), &end);
                writer.state(&format!("response.{}", state.status), &whole, &state).await?;
            }
            Err(error) => {
                let error = &error.body(Protocol::OpenAi)["error"];
                return writer.event("error", json!({ "message": error["message"], "code": error["code"], "param": error["param"] })).await;
            }
        }
    }
    Ok(())
}

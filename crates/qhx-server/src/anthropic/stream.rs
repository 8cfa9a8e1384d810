//! `/v1/messages` with `stream: true`: a message of blocks, each with a start, deltas and a stop.

use super::{stop_reason, types::Usage};
use crate::{
    app::App,
    error::Protocol,
    generate::{Replies, Told},
    models::InUse,
    stream::{self, Gone, Kind, Sink},
};
use axum::response::Response;
use qhx::{ReplyEvent, text::reply::ReplyPart};
use serde_json::{Value, json};
use std::sync::Arc;

pub(super) fn respond(app: Arc<App>, in_use: InUse, replies: Replies) -> Response {
    stream::respond(Kind::Events, move |sink| write(app, in_use, replies, sink))
}

/// The block that is open.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Block {
    Thinking,
    Text,
}

struct Writer {
    sink: Sink,
    open: Option<Block>,
    /// Blocks that have begun.
    blocks: usize,
}

impl Writer {
    async fn event(&self, value: Value) -> Result<(), Gone> {
        let name = value["type"].as_str().unwrap_or_default().to_owned();
        self.sink.event(&name, &value).await
    }

    async fn close(&mut self) -> Result<(), Gone> {
        if let Some(block) = self.open.take() {
            if block == Block::Thinking {
                self.delta(json!({ "type": "signature_delta", "signature": "" })).await?;
            }
            self.event(json!({ "type": "content_block_stop", "index": self.blocks - 1 })).await?;
        }
        Ok(())
    }

    async fn start(&mut self, block: Value) -> Result<(), Gone> {
        self.blocks += 1;
        self.event(json!({ "type": "content_block_start", "index": self.blocks - 1, "content_block": block })).await
    }

    async fn delta(&self, delta: Value) -> Result<(), Gone> {
        self.event(json!({ "type": "content_block_delta", "index": self.blocks - 1, "delta": delta })).await
    }

    async fn text(&mut self, block: Block, text: String) -> Result<(), Gone> {
        if self.open != Some(block) {
            self.close().await?;
            self.open = Some(block);
            self.start(match block {
                Block::Thinking => json!({ "type": "thinking", "thinking": "", "signature": "" }),
                Block::Text => json!({ "type": "text", "text": "" }),
            })
            .await?;
        }
        self.delta(match block {
            Block::Thinking => json!({ "type": "thinking_delta", "thinking": text }),
            Block::Text => json!({ "type": "text_delta", "text": text }),
        })
        .await
    }
}

async fn write(app: Arc<App>, in_use: InUse, mut replies: Replies, sink: Sink) -> Result<(), Gone> {
    let mut writer = Writer { sink, open: None, blocks: 0 };
    let usage =
        Usage { input_tokens: replies.prompt_tokens(), cache_creation_input_tokens: 0, cache_read_input_tokens: 0, output_tokens: 0 };
    let message = json!({
        "id": app.id("msg_"), "type": "message", "role": "assistant", "model": in_use.entry.name, "content": [],
        "stop_reason": null, "stop_sequence": null, "usage": usage,
    });
    writer.event(json!({ "type": "message_start", "message": message })).await?;
    let mut has_calls = false;
    while let Some(told) = writer.sink.wait_for(replies.next()).await? {
        match told {
            Ok(Told::Event(_, ReplyEvent::Part(ReplyPart::Reasoning(text)))) => writer.text(Block::Thinking, text).await?,
            Ok(Told::Event(_, ReplyEvent::Part(ReplyPart::Content(text)))) => writer.text(Block::Text, text).await?,
            Ok(Told::Event(_, ReplyEvent::Part(ReplyPart::Call(call)))) => {
                has_calls = true;
                writer.close().await?;
                writer.start(json!({ "type": "tool_use", "id": app.id("toolu_"), "name": call.name, "input": {} })).await?;
                writer.delta(json!({ "type": "input_json_delta", "partial_json": call.arguments })).await?;
                writer.event(json!({ "type": "content_block_stop", "index": writer.blocks - 1 })).await?;
            }
            Ok(Told::Event(_, ReplyEvent::Token(_))) => {}
            Ok(Told::End(_, end)) => {
                if writer.blocks == 0 {
                    writer.text(Block::Text, String::new()).await?;
                }
                writer.close().await?;
                let (reason, sequence) = stop_reason(&end, has_calls);
                let delta = json!({ "stop_reason": reason, "stop_sequence": sequence });
                writer.event(json!({ "type": "message_delta", "delta": delta, "usage": Usage::of(&end) })).await?;
            }
            Err(error) => return writer.event(error.body(Protocol::Anthropic)).await,
        }
    }
    writer.event(json!({ "type": "message_stop" })).await
}

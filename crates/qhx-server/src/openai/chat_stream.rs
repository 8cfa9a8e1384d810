//! `/v1/chat/completions` with `stream: true`: the role first, one id throughout, a chunk that says why the answer ended, a chunk with usage and no choices, `[DONE]`.

use super::{
    chat::{Frame, call_json, details as details_of, finish_reason},
    log_probs::chat_token,
    types::{ChatChoice, ChatLogProbs, ChatResponse, MessageJson, PromptProgress, StreamOptions, TokenJson, Usage},
};
use crate::{
    app::App,
    error::Protocol,
    generate::{Replies, Told},
    stream::{self, Gone, Kind, Sink},
};
use axum::response::Response;
use qhx::{ReplyEvent, text::reply::ReplyPart};
use std::{sync::Arc, time::Duration};
use tokio::time::timeout;

pub(crate) fn respond(app: Arc<App>, frame: Frame, replies: Replies, options: StreamOptions, details: bool) -> Response {
    stream::respond(Kind::Events, move |sink| write(app, frame, replies, options, details, sink))
}

/// One of the answers, as far as it was told.
#[derive(Default)]
struct Choice {
    calls: usize,
    /// Tokens that go with the next chunk.
    tokens: Vec<TokenJson>,
}

async fn write(app: Arc<App>, frame: Frame, mut replies: Replies, options: StreamOptions, details: bool, sink: Sink) -> Result<(), Gone> {
    let writer = Writer { frame, with_usage: options.include_usage, sink };
    let mut choices: Vec<Choice> = (0..replies.len()).map(|_| Choice::default()).collect();
    for index in 0..choices.len() {
        let role = MessageJson { role: Some("assistant"), content: Some(Some(String::new())), ..MessageJson::default() };
        writer.delta(index, role, Vec::new()).await?;
    }
    let mut usage = Usage::default();
    if details {
        tell_progress(&writer, &mut replies).await?;
    }
    while let Some(told) = writer.sink.wait_for(replies.next()).await? {
        match told {
            Ok(Told::Event(index, ReplyEvent::Token(token))) => choices[index].tokens.push(chat_token(writer.frame.model(), &token)),
            Ok(Told::Event(index, ReplyEvent::Part(part))) => {
                let choice = &mut choices[index];
                let delta = match part {
                    ReplyPart::Reasoning(text) => MessageJson { reasoning_content: Some(text), ..MessageJson::default() },
                    ReplyPart::Content(text) => MessageJson { content: Some(Some(text)), ..MessageJson::default() },
                    ReplyPart::Call(call) => {
                        choice.calls += 1;
                        MessageJson { tool_calls: vec![call_json(&app, call, Some(choice.calls - 1))], ..MessageJson::default() }
                    }
                };
                let tokens = std::mem::take(&mut choice.tokens);
                writer.delta(index, delta, tokens).await?;
            }
            Ok(Told::End(index, end)) => {
                if index == 0 {
                    usage.add_prompt(&end.generation);
                }
                usage.add(&end.generation, end.reasoning_tokens);
                let choice = &mut choices[index];
                let reason = finish_reason(&end.generation, choice.calls > 0);
                let mut chunk = writer.chunk(index, MessageJson::default(), std::mem::take(&mut choice.tokens), Some(reason));
                chunk.details = details.then(|| details_of(&end.generation));
                writer.sink.send(&chunk).await?;
            }
            Err(error) => {
                tracing::warn!(error = error.message, "an answer ended early");
                return writer.sink.send(&error.body(Protocol::OpenAi)).await;
            }
        }
    }
    if writer.with_usage {
        let mut last = writer.frame.response(OBJECT, Vec::new());
        last.usage = Some(Some(usage));
        writer.sink.send(&last).await?;
    }
    writer.sink.done().await
}

/// How often it is told how far the prompt is.
const PROGRESS: Duration = Duration::from_millis(250);

/// Tells how far the prompt is, until something else is to be told.
async fn tell_progress(writer: &Writer, replies: &mut Replies) -> Result<(), Gone> {
    let total = replies.prompt_tokens();
    while timeout(PROGRESS, writer.sink.wait_for(replies.has_more())).await.is_err() {
        let mut chunk = writer.frame.response(OBJECT, Vec::new());
        chunk.prompt_progress = Some(PromptProgress { processed: replies.prompt_tokens_done(), total });
        writer.sink.send(&chunk).await?;
    }
    Ok(())
}

const OBJECT: &str = "chat.completion.chunk";

struct Writer {
    frame: Frame,
    with_usage: bool,
    sink: Sink,
}

impl Writer {
    async fn delta(&self, index: usize, delta: MessageJson, tokens: Vec<TokenJson>) -> Result<(), Gone> {
        self.sink.send(&self.chunk(index, delta, tokens, None)).await
    }

    fn chunk(&self, index: usize, delta: MessageJson, tokens: Vec<TokenJson>, finish_reason: Option<&'static str>) -> ChatResponse {
        let logprobs = (!tokens.is_empty()).then_some(ChatLogProbs { content: tokens, refusal: None });
        let choice = ChatChoice { index, message: None, delta: Some(delta), logprobs, finish_reason };
        let mut chunk = self.frame.response(OBJECT, vec![choice]);
        // Where usage comes at the end, all chunks before have none.
        chunk.usage = self.with_usage.then_some(None);
        chunk
    }
}

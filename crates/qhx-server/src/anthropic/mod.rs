//! The Anthropic API: `/v1/messages` and `/v1/messages/count_tokens`.

mod convert;
mod stream;
pub(crate) mod types;

use crate::{
    access::Caller,
    app::App,
    body::Json,
    error::ApiError,
    generate::{self, Collected, End},
};
use axum::{
    Extension,
    extract::State,
    response::{IntoResponse, Response},
};
use qhx::FinishReason;
use serde_json::{Value, json};
use std::sync::Arc;
use types::{CountRequest, MessagesRequest, TokenCount, Usage};

pub(crate) async fn answer(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Json(request): Json<MessagesRequest>,
) -> Result<Response, ApiError> {
    let in_use = app.models.get(Some(&request.model))?;
    let stream = request.stream.unwrap_or(false);
    let job = generate::prepared(&app, &in_use, move |model| convert::job(request, model)).await?;
    let replies = generate::reply(&app, &in_use, caller, job).await?;
    if stream {
        return Ok(stream::respond(app, in_use, replies));
    }
    let Some(answer) = replies.collect().await?.pop() else { return Err(qhx::runtime::Error::EngineStopped.into()) };
    let Collected { reasoning, content, calls, end, .. } = answer;
    let Some(end) = end else { return Err(qhx::runtime::Error::EngineStopped.into()) };
    let mut blocks = Vec::new();
    if !reasoning.is_empty() {
        blocks.push(json!({ "type": "thinking", "thinking": reasoning, "signature": "" }));
    }
    if !content.is_empty() || calls.is_empty() {
        blocks.push(json!({ "type": "text", "text": content }));
    }
    let has_calls = !calls.is_empty();
    for call in calls {
        let input: Value = serde_json::from_str(&call.arguments).unwrap_or_default();
        blocks.push(json!({ "type": "tool_use", "id": app.id("toolu_"), "name": call.name, "input": input }));
    }
    let (stop_reason, stop_sequence) = stop_reason(&end, has_calls);
    Ok(Json(json!({
        "id": app.id("msg_"),
        "type": "message",
        "role": "assistant",
        "model": in_use.entry.name,
        "content": blocks,
        "stop_reason": stop_reason,
        "stop_sequence": stop_sequence,
        "usage": Usage::of(&end),
    }))
    .into_response())
}

/// Why an answer ended, and the stop sequence that ended it.
fn stop_reason(end: &End, has_calls: bool) -> (&'static str, Option<String>) {
    let stop_string = end.generation.stop_string.clone();
    let reason = match end.generation.finish_reason {
        FinishReason::Length => "max_tokens",
        _ if has_calls => "tool_use",
        _ if stop_string.is_some() => "stop_sequence",
        _ => "end_turn",
    };
    (reason, stop_string)
}

impl Usage {
    fn of(end: &End) -> Self {
        let generation = &end.generation;
        Self {
            input_tokens: generation.prompt_ids.len() - generation.kept_rows,
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: generation.kept_rows,
            output_tokens: generation.ids.len(),
        }
    }
}

/// How many tokens a request has.
pub(crate) async fn count(State(app): State<Arc<App>>, Json(request): Json<CountRequest>) -> Result<Json<TokenCount>, ApiError> {
    let in_use = app.models.get(Some(&request.model))?;
    let job = generate::prepared(&app, &in_use, move |model| convert::job(request.into(), model)).await?;
    Ok(Json(TokenCount { input_tokens: generate::count(&app, &in_use, job).await? }))
}

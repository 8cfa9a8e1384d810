//! `/v1/responses`: the same answers in another form. Nothing is stored: every request brings the whole conversation.

mod convert;
mod stream;
pub(crate) mod types;

use crate::{
    access::Caller,
    app::{App, now},
    body::Json,
    error::ApiError,
    generate::{self, Collected, End},
    models::InUse,
};
use axum::{
    Extension,
    extract::State,
    response::{IntoResponse, Response},
};
use qhx::{FinishReason, text::reply::ToolCall};
use serde_json::{Value, json};
use std::sync::Arc;
use types::ResponsesRequest;

pub(crate) async fn answer(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Json(request): Json<ResponsesRequest>,
) -> Result<Response, ApiError> {
    let in_use = app.models.get(request.model.as_deref())?;
    let stream = request.stream.unwrap_or(false);
    let whole = Whole::new(&app, &in_use, &request);
    let job = generate::prepared(&app, &in_use, move |model| convert::job(request, model)).await?;
    let replies = generate::reply(&app, &in_use, caller, job).await?;
    if stream {
        return Ok(stream::respond(app, whole, replies));
    }
    let Some(Collected { reasoning, content, calls, end: Some(end), .. }) = replies.collect().await?.pop() else {
        return Err(qhx::runtime::Error::EngineStopped.into());
    };
    let mut output = Vec::new();
    if !reasoning.is_empty() {
        output.push(reasoning_item(&app.id("rs_"), &reasoning));
    }
    if !content.is_empty() || calls.is_empty() {
        output.push(message_item(&app.id("msg_"), &content, "completed"));
    }
    output.extend(calls.iter().map(|call| call_item(&app.id("fc_"), &app.id("call_"), call)));
    Ok(Json(whole.ended(output, &end)).into_response())
}

fn reasoning_item(id: &str, text: &str) -> Value {
    json!({ "type": "reasoning", "id": id, "summary": [], "content": [{ "type": "reasoning_text", "text": text }] })
}

fn message_item(id: &str, text: &str, status: &str) -> Value {
    json!({ "type": "message", "id": id, "status": status, "role": "assistant", "content": [text_part(text)] })
}

fn text_part(text: &str) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": [] })
}

fn call_item(id: &str, call_id: &str, call: &ToolCall) -> Value {
    json!({ "type": "function_call", "id": id, "call_id": call_id, "name": call.name, "arguments": call.arguments, "status": "completed" })
}

/// The object that a response is.
struct Whole(Value);

impl Whole {
    fn new(app: &App, in_use: &InUse, request: &ResponsesRequest) -> Self {
        Self(json!({
            "id": app.id("resp_"),
            "object": "response",
            "created_at": now(),
            "status": "in_progress",
            "background": false,
            "error": null,
            "incomplete_details": null,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata.clone().unwrap_or_default(),
            "model": in_use.entry.name,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls.unwrap_or(true),
            "previous_response_id": null,
            "reasoning": { "effort": request.reasoning.as_ref().and_then(|reasoning| reasoning.effort), "summary": null },
            "store": false,
            "temperature": request.temperature,
            "text": { "format": request.text_format() },
            "tool_choice": request.tool_choice.clone().unwrap_or_else(|| "auto".into()),
            "tools": request.tools.clone().unwrap_or_default(),
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": null,
        }))
    }

    /// The response with all its output.
    fn ended(mut self, output: Vec<Value>, end: &End) -> Value {
        let generation = &end.generation;
        let complete = generation.finish_reason != FinishReason::Length;
        self.0["status"] = if complete { "completed" } else { "incomplete" }.into();
        if !complete {
            self.0["incomplete_details"] = json!({ "reason": "max_output_tokens" });
        }
        self.0["output"] = output.into();
        let (input, made) = (generation.prompt_ids.len(), generation.ids.len());
        self.0["usage"] = json!({
            "input_tokens": input,
            "input_tokens_details": { "cached_tokens": generation.kept_rows },
            "output_tokens": made,
            "output_tokens_details": { "reasoning_tokens": end.reasoning_tokens },
            "total_tokens": input + made,
        });
        self.0
    }
}

//! `/v1/responses`: the same answers in another form. Nothing is stored: every request brings the whole conversation.

mod convert;
mod stream;
pub(crate) mod types;

use crate::{
    access::Caller,
    app::{App, now},
    body::{self, Json},
    error::ApiError,
    generate::{self, Collected, End},
};
use axum::{Extension, body::Bytes, extract, response::Response};
use qhx::{FinishReason, Model, text::reply::ToolCall};
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use types::ResponsesRequest;

pub(crate) async fn answer(
    extract::State(app): extract::State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Json(request): Json<ResponsesRequest>,
) -> Result<Response, ApiError> {
    let in_use = app.models.get(request.model.as_deref())?;
    let stream = request.stream.unwrap_or(false);
    let (id, name) = (app.id("resp_"), in_use.entry.name.clone());
    let prepare = move |model: &Model| Ok((Whole::new(&id, &name, &request)?, convert::job(request, model)?));
    let (whole, job) = generate::prepared(&app, &in_use, prepare).await?;
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
    let parts = whole.with(&State::ended(output, &end)).map_err(|error| ApiError::bad_request(error.to_string()))?;
    Ok(body::json(parts.concat()))
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

/// The object that a response is, less what changes: written once, because it gives the request's tools back, which may be many.
struct Whole(Bytes);

#[derive(Serialize)]
struct Fixed<'a> {
    id: &'a str,
    object: &'static str,
    created_at: u64,
    background: bool,
    error: Option<Value>,
    instructions: Option<&'a str>,
    max_output_tokens: Option<usize>,
    metadata: &'a Map<String, Value>,
    model: &'a str,
    parallel_tool_calls: bool,
    previous_response_id: Option<&'a str>,
    reasoning: Value,
    store: bool,
    temperature: Option<f32>,
    text: TextFormat<'a>,
    tool_choice: &'a Value,
    tools: &'a [Value],
    top_p: Option<f32>,
    truncation: &'static str,
}

#[derive(Serialize)]
struct TextFormat<'a> {
    format: &'a Value,
}

impl Whole {
    fn new(id: &str, model: &str, request: &ResponsesRequest) -> Result<Self, ApiError> {
        let (none, text, auto) = (Map::new(), json!({ "type": "text" }), "auto".into());
        let fixed = Fixed {
            id,
            object: "response",
            created_at: now(),
            background: false,
            error: None,
            instructions: request.instructions.as_deref(),
            max_output_tokens: request.max_output_tokens,
            metadata: request.metadata.as_ref().unwrap_or(&none),
            model,
            parallel_tool_calls: request.parallel_tool_calls.unwrap_or(true),
            previous_response_id: None,
            reasoning: json!({ "effort": request.reasoning.as_ref().and_then(|reasoning| reasoning.effort), "summary": null }),
            store: false,
            temperature: request.temperature,
            text: TextFormat { format: request.text.as_ref().and_then(|text| text.format.as_ref()).unwrap_or(&text) },
            tool_choice: request.tool_choice.as_ref().unwrap_or(&auto),
            tools: request.tools.as_deref().unwrap_or_default(),
            top_p: request.top_p,
            truncation: "disabled",
        };
        let mut written = serde_json::to_vec(&fixed).map_err(|error| ApiError::bad_request(error.to_string()))?;
        // What changes goes before the end of the object.
        written.pop();
        Ok(Self(written.into()))
    }

    /// The object, in two parts, with what is so at the moment.
    fn with(&self, state: &State) -> Result<[Bytes; 2], serde_json::Error> {
        let mut state = serde_json::to_vec(state)?;
        state[0] = b',';
        Ok([self.0.clone(), state.into()])
    }
}

/// What changes of it.
#[derive(Serialize)]
struct State {
    status: &'static str,
    incomplete_details: Value,
    output: Vec<Value>,
    usage: Value,
}

impl State {
    fn begun() -> Self {
        Self { status: "in_progress", incomplete_details: Value::Null, output: Vec::new(), usage: Value::Null }
    }

    fn ended(output: Vec<Value>, end: &End) -> Self {
        let generation = &end.generation;
        let (status, incomplete_details) = match generation.finish_reason {
            FinishReason::Length => ("incomplete", json!({ "reason": "max_output_tokens" })),
            _ => ("completed", Value::Null),
        };
        let (input, made) = (generation.prompt_ids.len(), generation.ids.len());
        let usage = json!({
            "input_tokens": input,
            "input_tokens_details": { "cached_tokens": generation.kept_rows },
            "output_tokens": made,
            "output_tokens_details": { "reasoning_tokens": end.reasoning_tokens },
            "total_tokens": input + made,
        });
        Self { status, incomplete_details, output, usage }
    }
}

//! `/api/chat` and `/api/generate`. Both stream, unless they are asked not to.

use super::{
    time,
    types::{ChatRequest, GenerateRequest, Message, Options},
};
use crate::{
    access::Caller,
    app::App,
    body::Json,
    error::{ApiError, Protocol},
    generate::{self, ChatJob, Collected, End, Replies, Sampling, Told},
    messages::{image_part, object},
    models::InUse,
    openai::{completions, requests::penalty, structure::limit_reasoning, types::Effort},
    stream::{self, Gone, Kind, Sink},
};
use axum::{
    Extension,
    extract::State,
    response::{IntoResponse, Response},
};
use qhx::{
    Constraint, FinishReason, Generation, Model, ReplyEvent, Structure,
    text::reply::{ReplyPart, ToolCall},
};
use serde_json::{Map, Value, json};
use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

/// What an answer looks like.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// With a `message`.
    Chat,
    /// With a `response`.
    Generate,
}

pub(crate) async fn chat(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Json(request): Json<ChatRequest>,
) -> Result<Response, ApiError> {
    let in_use = app.models.get(Some(&request.model))?;
    let keep_alive = keep_alive(request.keep_alive.as_ref())?;
    if request.messages.is_empty() {
        return Ok(loaded(&in_use, Form::Chat, keep_alive));
    }
    let stream = request.stream;
    let prepare = move |model: &Model| {
        let messages = request.messages.into_iter().map(openai_message).collect::<Result<_, _>>()?;
        let tools = request.tools.filter(|tools| !tools.is_empty()).map(Value::from);
        job(messages, tools, request.format, request.options, request.think, model)
    };
    let job = generate::prepared(&app, &in_use, prepare).await?;
    respond(app, in_use, caller, job, Form::Chat, stream, keep_alive).await
}

pub(crate) async fn generate(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Json(request): Json<GenerateRequest>,
) -> Result<Response, ApiError> {
    let in_use = app.models.get(Some(&request.model))?;
    let keep_alive = keep_alive(request.keep_alive.as_ref())?;
    if request.prompt.is_empty() {
        return Ok(loaded(&in_use, Form::Generate, keep_alive));
    }
    if request.raw.unwrap_or(false) || in_use.model.runtime().template().is_err() {
        return raw(app, in_use, caller, request, keep_alive).await;
    }
    let stream = request.stream;
    let prepare = move |model: &Model| {
        let mut messages = Vec::new();
        if let Some(system) = request.system {
            messages.push(json!({ "role": "system", "content": system }));
        }
        messages.push(object([("role", "user".into()), ("content", with_images(request.prompt, request.images))]));
        job(messages, None, request.format, request.options, request.think, model)
    };
    let job = generate::prepared(&app, &in_use, prepare).await?;
    respond(app, in_use, caller, job, Form::Generate, stream, keep_alive).await
}

/// A prompt as it is, without a template.
async fn raw(
    app: Arc<App>,
    in_use: InUse,
    caller: Caller,
    request: GenerateRequest,
    keep_alive: Option<Option<Duration>>,
) -> Result<Response, ApiError> {
    if request.system.is_some() || request.images.is_some() || request.think.is_some() {
        return Err(ApiError::field("raw", "takes a prompt and nothing else"));
    }
    let mut sampling = sampling(request.options.unwrap_or_default(), &in_use.model)?;
    sampling.structure.constraint = constraint(request.format)?;
    let mut texts = completions::begin(&app, &in_use, caller, request.prompt, sampling).await?;
    if let Some(after) = keep_alive {
        in_use.entry.keep_alive(after);
    }
    let name = in_use.entry.name.clone();
    if !request.stream.unwrap_or(true) {
        let mut text = String::new();
        while let Some(told) = texts.next().await {
            match told? {
                completions::Told::Piece(_, piece) => text.push_str(&piece.text),
                completions::Told::End(_, end) => {
                    return Ok(Json(last(&name, json!({ "response": text }), &end)).into_response());
                }
            }
        }
        return Err(qhx::runtime::Error::EngineStopped.into());
    }
    Ok(stream::respond(Kind::Lines, move |sink| async move {
        while let Some(told) = sink.wait_for(texts.next()).await? {
            match told {
                Ok(completions::Told::Piece(_, piece)) if piece.text.is_empty() => {}
                Ok(completions::Told::Piece(_, piece)) => sink.send(&part(&name, json!({ "response": piece.text }))).await?,
                Ok(completions::Told::End(_, end)) => sink.send(&last(&name, json!({ "response": "" }), &end)).await?,
                Err(error) => return sink.send(&error.body(Protocol::Ollama)).await,
            }
        }
        Ok(())
    }))
}

/// An empty request only loads the model.
fn loaded(in_use: &InUse, form: Form, keep_alive: Option<Option<Duration>>) -> Response {
    if let Some(after) = keep_alive {
        in_use.entry.keep_alive(after);
    }
    let mut answer = part(&in_use.entry.name, empty(form));
    (answer["done"], answer["done_reason"]) =
        (true.into(), if keep_alive == Some(Some(Duration::ZERO)) { "unload" } else { "load" }.into());
    Json(answer).into_response()
}

async fn respond(
    app: Arc<App>,
    in_use: InUse,
    caller: Caller,
    job: ChatJob,
    form: Form,
    stream: Option<bool>,
    keep_alive: Option<Option<Duration>>,
) -> Result<Response, ApiError> {
    let replies = generate::reply(&app, &in_use, caller, job).await?;
    if let Some(after) = keep_alive {
        in_use.entry.keep_alive(after);
    }
    if stream.unwrap_or(true) {
        return Ok(stream::respond(Kind::Lines, move |sink| write(in_use, replies, form, sink)));
    }
    let Some(Collected { reasoning, content, calls, end: Some(end), .. }) = replies.collect().await?.pop() else {
        return Err(qhx::runtime::Error::EngineStopped.into());
    };
    let parts = told(form, content, reasoning, calls);
    Ok(Json(last(&in_use.entry.name, parts, &end.generation)).into_response())
}

async fn write(in_use: InUse, mut replies: Replies, form: Form, sink: Sink) -> Result<(), Gone> {
    let name = &in_use.entry.name;
    while let Some(next) = sink.wait_for(replies.next()).await? {
        match next {
            Ok(Told::Event(_, ReplyEvent::Part(ReplyPart::Reasoning(text)))) => {
                sink.send(&part(name, told(form, String::new(), text, Vec::new()))).await?;
            }
            Ok(Told::Event(_, ReplyEvent::Part(ReplyPart::Content(text)))) => {
                sink.send(&part(name, told(form, text, String::new(), Vec::new()))).await?;
            }
            Ok(Told::Event(_, ReplyEvent::Part(ReplyPart::Call(call)))) => {
                sink.send(&part(name, told(form, String::new(), String::new(), vec![call]))).await?;
            }
            Ok(Told::Event(_, ReplyEvent::Token(_))) => {}
            Ok(Told::End(_, end)) => {
                let End { generation, .. } = *end;
                sink.send(&last(name, empty(form), &generation)).await?;
            }
            Err(error) => return sink.send(&error.body(Protocol::Ollama)).await,
        }
    }
    Ok(())
}

fn empty(form: Form) -> Value {
    told(form, String::new(), String::new(), Vec::new())
}

/// What is said, in the form of the answer.
fn told(form: Form, content: String, thinking: String, calls: Vec<ToolCall>) -> Value {
    let mut said = match form {
        Form::Chat => json!({ "role": "assistant", "content": content }),
        Form::Generate => json!({ "response": content }),
    };
    if !thinking.is_empty() {
        said["thinking"] = thinking.into();
    }
    let call = |call: ToolCall| {
        let arguments: Value = serde_json::from_str(&call.arguments).unwrap_or_default();
        json!({ "function": { "name": call.name, "arguments": arguments } })
    };
    if !calls.is_empty() {
        said["tool_calls"] = calls.into_iter().map(call).collect();
    }
    match form {
        Form::Chat => json!({ "message": said }),
        Form::Generate => said,
    }
}

/// A line of an answer.
fn part(model: &str, parts: Value) -> Value {
    let mut line = json!({ "model": model, "created_at": time::written(SystemTime::now()) });
    if let Value::Object(parts) = parts {
        parts.into_iter().for_each(|(name, value)| line[name] = value);
    }
    line["done"] = false.into();
    line
}

/// The last line, with how long everything took.
fn last(model: &str, parts: Value, generation: &Generation) -> Value {
    let mut line = part(model, parts);
    let timing = &generation.timing;
    let nanoseconds = |milliseconds: f64| (milliseconds * 1e6) as u64;
    line["done"] = true.into();
    line["done_reason"] = if generation.finish_reason == FinishReason::Length { "length" } else { "stop" }.into();
    line["total_duration"] = nanoseconds(timing.ttft_ms + timing.decode_ms).into();
    line["load_duration"] = 0.into();
    line["prompt_eval_count"] = generation.prompt_ids.len().into();
    line["prompt_eval_duration"] = nanoseconds(timing.prefill_ms).into();
    line["eval_count"] = generation.ids.len().into();
    line["eval_duration"] = nanoseconds(timing.decode_ms).into();
    line
}

fn with_images(text: String, images: Option<Vec<String>>) -> Value {
    let images = images.unwrap_or_default();
    if images.is_empty() {
        return text.into();
    }
    // What kind of file it is shows in its bytes.
    let mut parts: Vec<Value> = images.into_iter().map(|data| image_part(format!("data:image/*;base64,{data}").into())).collect();
    parts.push(object([("type", "text".into()), ("text", text.into())]));
    parts.into()
}

fn openai_message(message: Message) -> Result<Value, ApiError> {
    let content = with_images(message.content.unwrap_or_default(), message.images);
    let mut said = object([("role", message.role.into()), ("content", content)]);
    if let Some(thinking) = message.thinking {
        said["reasoning_content"] = thinking.into();
    }
    if let Some(calls) = message.tool_calls {
        said["tool_calls"] = calls.into();
    }
    if let Some(name) = message.tool_name {
        said["name"] = name.into();
    }
    if let Some(id) = message.tool_call_id {
        said["tool_call_id"] = id.into();
    }
    Ok(said)
}

fn job(
    messages: Vec<Value>,
    tools: Option<Value>,
    format: Option<Value>,
    options: Option<Options>,
    think: Option<Value>,
    model: &Model,
) -> Result<ChatJob, ApiError> {
    let mut sampling = sampling(options.unwrap_or_default(), model)?;
    sampling.structure.constraint = constraint(format)?;
    let mut template_options = Map::new();
    let effort = match think {
        None | Some(Value::Null) => None,
        Some(Value::Bool(false)) => Some(Effort::None),
        Some(Value::Bool(true)) => Some(Effort::High),
        Some(Value::String(effort)) if effort == "low" => Some(Effort::Low),
        Some(Value::String(effort)) if effort == "medium" => Some(Effort::Medium),
        Some(Value::String(effort)) if effort == "high" => Some(Effort::High),
        Some(_) => return Err(ApiError::field("think", "must be true or false, `low`, `medium` or `high`")),
    };
    limit_reasoning(&mut sampling.structure, &mut template_options, model, effort, None).map_err(|error| ApiError {
        param: Some("think".to_owned()),
        message: error.message.replace("reasoning_effort", "think"),
        ..error
    })?;
    Ok(ChatJob { messages, tools, template_options, sampling, choices: 1 })
}

fn constraint(format: Option<Value>) -> Result<Option<Constraint>, ApiError> {
    Ok(match format {
        None | Some(Value::Null) => None,
        Some(Value::String(text)) if text.is_empty() => None,
        Some(Value::String(text)) if text == "json" => Some(Constraint::JsonObject),
        Some(schema @ Value::Object(_)) => Some(Constraint::JsonSchema(schema)),
        Some(_) => return Err(ApiError::field("format", "must be `json` or a JSON schema")),
    })
}

fn sampling(options: Options, model: &Model) -> Result<Sampling, ApiError> {
    if let Some(asked) = options.num_ctx.filter(|asked| *asked > model.context()) {
        let problem = format!("is {asked}, and the model was loaded for {}: start the server with a larger --context", model.context());
        return Err(ApiError::field("options.num_ctx", problem));
    }
    if options.num_predict == Some(0) {
        return Err(ApiError::field("options.num_predict", "is 0, expected at least 1, or a negative number for no limit"));
    }
    Ok(Sampling {
        temperature: options.temperature,
        top_p: options.top_p,
        top_k: options.top_k,
        min_p: options.min_p,
        repetition_penalty: options.repeat_penalty,
        presence_penalty: penalty("options.presence_penalty", options.presence_penalty)?,
        frequency_penalty: penalty("options.frequency_penalty", options.frequency_penalty)?,
        seed: options.seed.map(|seed| seed as u64),
        stop: options.stop.unwrap_or_default(),
        max_tokens: options.num_predict.and_then(|tokens| usize::try_from(tokens).ok()),
        structure: Structure::default(),
        ..Sampling::default()
    })
}

/// How long a model stays: seconds, or `5m`; negative is for ever. None where nothing is said.
fn keep_alive(value: Option<&Value>) -> Result<Option<Option<Duration>>, ApiError> {
    let wrong = || ApiError::field("keep_alive", "must be seconds, or a text such as `5m`");
    let seconds = match value {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::Number(number)) => number.as_f64().ok_or_else(wrong)?,
        Some(Value::String(text)) => {
            let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
            let number: f64 = digits.parse().map_err(|_| wrong())?;
            let unit = match &text[digits.len()..] {
                "" | "s" => 1.0,
                "ms" => 0.001,
                "m" => 60.0,
                "h" => 3600.0,
                _ => return Err(wrong()),
            };
            number * unit
        }
        Some(_) => return Err(wrong()),
    };
    if seconds < 0.0 {
        return Ok(Some(None));
    }
    Duration::try_from_secs_f64(seconds).map(|after| Some(Some(after))).map_err(|_| wrong())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read() {
        let read = |value: Value| keep_alive(Some(&value)).map_err(|error| error.message);
        assert_eq!(read(json!(90)), Ok(Some(Some(Duration::from_secs(90)))));
        assert_eq!(read(json!("5m")), Ok(Some(Some(Duration::from_secs(300)))));
        assert_eq!(read(json!("0")), Ok(Some(Some(Duration::ZERO))));
        assert_eq!(read(json!(-1)), Ok(Some(None)));
        assert_eq!(read(json!("-1m")), Ok(Some(None)));
        for wrong in [json!("soon"), json!("5d"), json!([]), json!(1e300)] {
            assert!(read(wrong.clone()).is_err(), "{wrong}");
        }
    }
}

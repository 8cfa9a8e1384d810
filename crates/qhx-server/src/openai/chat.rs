//! `/v1/chat/completions`

use super::{
    chat_stream,
    log_probs::chat_token,
    requests::{ChatRequest, at_least_one, check_top},
    structure,
    types::{CallJson, ChatChoice, ChatLogProbs, ChatResponse, FunctionJson, MessageJson, Usage},
};
use crate::{
    access::Caller,
    app::{App, now},
    body::{Json, large_json},
    error::ApiError,
    generate::{self, ChatJob, Collected},
    models::InUse,
};
use axum::{Extension, extract::State, response::Response};
use qhx::{FinishReason, Generation, Model, text::reply::ToolCall};
use serde_json::{Value, json};
use std::sync::Arc;

/// What all parts of a response have in common.
#[derive(Clone)]
pub(crate) struct Frame {
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) in_use: InUse,
}

impl Frame {
    pub(crate) fn new(app: &App, prefix: &str, in_use: InUse) -> Self {
        Self { id: app.id(prefix), created: now(), in_use }
    }

    pub(crate) fn model(&self) -> &Model {
        &self.in_use.model
    }

    pub(crate) fn response(&self, object: &'static str, choices: Vec<ChatChoice>) -> ChatResponse {
        ChatResponse {
            id: self.id.clone(),
            object,
            created: self.created,
            model: self.in_use.entry.name.clone(),
            system_fingerprint: fingerprint(self.model()),
            choices,
            usage: None,
            details: None,
            prompt_progress: None,
        }
    }
}

/// Changes when answers may: with the program, the weights' form or the device.
pub(crate) fn fingerprint(model: &Model) -> String {
    let fingerprint = model.runtime().fingerprint();
    format!("fp_{}", fingerprint.get(..12).unwrap_or(fingerprint))
}

pub(crate) async fn answer(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Json(mut request): Json<ChatRequest>,
) -> Result<Response, ApiError> {
    let in_use = app.models.get(request.model.as_deref())?;
    let (streamed, details) = (request.streamed()?, request.details.unwrap_or(false));
    let job = generate::prepared(&app, &in_use, move |model| job(request, model)).await?;
    let frame = Frame::new(&app, "chatcmpl-", in_use);
    let replies = generate::reply(&app, &frame.in_use, caller, job).await?;
    if let Some(options) = streamed {
        return Ok(chat_stream::respond(app, frame, replies, options, details));
    }
    let answers = replies.collect().await?;
    // With the probabilities of every token it may be long.
    let response = move || {
        let mut usage = Usage::default();
        let choices = answers.into_iter().enumerate().map(|(index, answer)| choice(&app, &frame, index, answer, &mut usage)).collect();
        let mut response = frame.response("chat.completion", choices);
        response.usage = Some(Some(usage));
        response
    };
    large_json(response).await
}

/// What a request asks for; an error names what cannot be done.
fn job(mut request: ChatRequest, model: &Model) -> Result<ChatJob, ApiError> {
    let refused = |field: &str, problem: &str| Err(ApiError::field(field, problem));
    if request.modalities.iter().flatten().any(|modality| modality != "text") {
        return refused("modalities", "can only be [\"text\"]");
    }
    if request.service_tier.as_deref().is_some_and(|tier| !["auto", "default"].contains(&tier)) {
        return refused("service_tier", "can only be `auto` or `default`");
    }
    if request.store == Some(true) {
        return refused("store", "cannot be true: nothing is stored");
    }
    let choices = request.choices()?;
    let log_probs = match (request.logprobs.unwrap_or(false), request.top_logprobs) {
        (false, None | Some(0)) => None,
        (false, Some(_)) => return refused("top_logprobs", "needs `logprobs: true`"),
        (true, top) => Some(top.unwrap_or(0)),
    };
    check_top("top_logprobs", log_probs)?;
    let mut sampling = request.sampling(model)?;
    sampling.log_probs = log_probs;
    sampling.max_tokens = at_least_one("max_completion_tokens", request.max_completion_tokens.or(request.max_tokens))?;
    let structure = &mut sampling.structure;
    let tools = request.tools.filter(|tools| !tools.is_empty()).map(Value::from);
    let mut template_options = request.chat_template_kwargs.unwrap_or_default();
    structure::choose_tools(structure, tools.as_ref(), request.tool_choice, request.parallel_tool_calls.unwrap_or(true))?;
    structure::limit_reasoning(structure, &mut template_options, model, request.reasoning_effort, request.reasoning_budget)?;
    // Reasoning alone may be limited.
    if structure.constraint.is_some() || tools.is_some() {
        generate::check_structure(structure, sampling.ignore_eos)?;
    }
    Ok(ChatJob { messages: request.messages, tools, template_options, sampling, choices })
}

fn choice(app: &App, frame: &Frame, index: usize, answer: Collected, usage: &mut Usage) -> ChatChoice {
    let has_calls = !answer.calls.is_empty();
    let tool_calls: Vec<CallJson> = answer.calls.into_iter().map(|call| call_json(app, call, None)).collect();
    let content = (!answer.content.is_empty() || !has_calls).then_some(answer.content);
    let message = MessageJson {
        role: Some("assistant"),
        content: Some(content),
        reasoning_content: Some(answer.reasoning).filter(|text| !text.is_empty()),
        tool_calls,
        refusal: Some(None),
    };
    let asked = answer.end.as_ref().is_some_and(|end| !end.generation.log_probs.is_empty());
    let content = answer.tokens.iter().map(|token| chat_token(frame.model(), token)).collect();
    let logprobs = asked.then_some(ChatLogProbs { content, refusal: None });
    let mut reason = None;
    if let Some(end) = &answer.end {
        if index == 0 {
            usage.add_prompt(&end.generation);
        }
        usage.add(&end.generation, end.reasoning_tokens);
        reason = Some(finish_reason(&end.generation, has_calls));
    }
    ChatChoice { index, message: Some(message), delta: None, logprobs, finish_reason: reason }
}

pub(crate) fn call_json(app: &App, call: ToolCall, index: Option<usize>) -> CallJson {
    CallJson { index, id: app.id("call_"), kind: "function", function: FunctionJson { name: call.name, arguments: call.arguments } }
}

pub(crate) fn finish_reason(generation: &Generation, has_calls: bool) -> &'static str {
    match generation.finish_reason {
        FinishReason::Length => "length",
        _ if has_calls => "tool_calls",
        _ => "stop",
    }
}

/// Where an answer was computed, and how long that took.
pub(crate) fn details(generation: &Generation) -> Value {
    json!({
        "timing": generation.timing,
        "prefill_path": generation.prefill_path,
        "cached_tokens": generation.kept_rows,
        "stages": generation.stages,
        "fallbacks": generation.fallbacks,
        "note": generation.note,
    })
}

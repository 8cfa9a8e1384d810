//! `/tokenize`, `/detokenize`, `/tokenizer_info`: what vLLM has under these names.

use crate::{
    app::App,
    body::{Json, large_json},
    error::ApiError,
    generate::{ChatJob, Sampling, blocking, blocking_until},
    models::InUse,
    openai::log_probs::token_text,
};
use axum::{extract::State, response::Response};
use qhx::{
    Cancel, Model,
    runtime::{Error as RunError, Prompt},
    text::{SpecialTokens, Tokenizer},
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// `POST /tokenize`: of a `prompt`, or of `messages` as the chat template writes them.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct TokenizeRequest {
    pub(crate) model: Option<String>,
    pub(crate) prompt: Option<String>,
    pub(crate) messages: Option<Vec<Value>>,
    pub(crate) tools: Option<Vec<Value>>,
    pub(crate) chat_template_kwargs: Option<Map<String, Value>>,
    /// The tokens that the tokenizer adds by itself.
    pub(crate) add_special_tokens: Option<bool>,
    pub(crate) add_generation_prompt: Option<bool>,
    /// The text of each token, too.
    pub(crate) return_token_strs: Option<bool>,
}

/// Ids of tokens.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub(crate) struct Tokens {
    pub(crate) count: usize,
    pub(crate) max_model_len: usize,
    pub(crate) tokens: Vec<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) token_strs: Option<Vec<String>>,
}

/// `POST /detokenize`
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct DetokenizeRequest {
    pub(crate) model: Option<String>,
    pub(crate) tokens: Vec<u32>,
}

/// The text of tokens.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub(crate) struct Text {
    pub(crate) prompt: String,
}

fn tokenizer(model: &Model) -> Result<&Tokenizer, ApiError> {
    Ok(model.runtime().tokenizer().ok_or(RunError::NoTokenizer { what: "a text" })?)
}

pub(crate) async fn tokenize(State(app): State<Arc<App>>, Json(request): Json<TokenizeRequest>) -> Result<Response, ApiError> {
    let InUse { model, .. } = app.models.get(request.model.as_deref())?;
    let access = app.media_access();
    let work = move |cancel: Cancel| {
        let ids = match (&request.prompt, request.messages) {
            (Some(text), None) => {
                let add = request.add_special_tokens.unwrap_or(true);
                Prompt::of_text(model.runtime(), text, add)?.ids().to_vec()
            }
            (None, Some(messages)) => {
                let tools = request.tools.map(Value::from);
                let template_options = request.chat_template_kwargs.unwrap_or_default();
                let job = ChatJob { messages, tools, template_options, sampling: Sampling::default(), choices: 1 };
                let (mut chat, _) = job.chat(&model, &access, &cancel)?;
                chat.add_generation_prompt = request.add_generation_prompt.unwrap_or(true);
                Prompt::chat_until(model.runtime(), &chat, &cancel)?.ids().to_vec()
            }
            _ => return Err(ApiError::field("prompt", "or `messages` must be given, and not both")),
        };
        let texts = || ids.iter().map(|id| token_text(&model, *id)).collect();
        let token_strs = request.return_token_strs.unwrap_or(false).then(texts);
        Ok(Tokens { count: ids.len(), max_model_len: model.context(), tokens: ids, token_strs })
    };
    let tokens = blocking_until(&app, work).await?;
    large_json(|| tokens).await
}

pub(crate) async fn detokenize(State(app): State<Arc<App>>, Json(request): Json<DetokenizeRequest>) -> Result<Response, ApiError> {
    let InUse { model, .. } = app.models.get(request.model.as_deref())?;
    let work = move || Ok(tokenizer(&model)?.decode(&request.tokens, false).map_err(RunError::from)?);
    let prompt = blocking(&app, work).await?;
    large_json(|| Text { prompt }).await
}

pub(crate) async fn tokenizer_info(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let in_use = app.models.get(None)?;
    let (model, tokenizer) = (&in_use.model, tokenizer(&in_use.model)?);
    let eos = model.runtime().eos().first().and_then(|id| tokenizer.id_to_token(*id));
    let empty = tokenizer.encode("", true, SpecialTokens::AsText).map_err(RunError::from)?;
    let bos = empty.first().and_then(|id| tokenizer.id_to_token(*id));
    Ok(Json(json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.context(),
        "vocab_size": tokenizer.vocab_size(),
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": eos,
        "add_bos_token": bos.is_some(),
        "chat_template": model.runtime().template().ok().map(|chat| chat.template.source()),
    })))
}

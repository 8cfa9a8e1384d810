//! What requests look like. A field that is not here is refused by its name.

use crate::openai::types::Effort;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value};

/// `POST /v1/responses`
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ResponsesRequest {
    /// One that `/v1/models` lists; absent: the first.
    pub(crate) model: Option<String>,
    pub(crate) input: Input,
    /// The system message.
    pub(crate) instructions: Option<String>,
    pub(crate) max_output_tokens: Option<usize>,
    pub(crate) temperature: Option<f32>,
    pub(crate) top_p: Option<f32>,
    pub(crate) stream: Option<bool>,
    pub(crate) tools: Option<Vec<Value>>,
    /// `auto`, `required`, `none`, or a function by its name.
    pub(crate) tool_choice: Option<Value>,
    pub(crate) parallel_tool_calls: Option<bool>,
    pub(crate) text: Option<TextSettings>,
    pub(crate) reasoning: Option<Reasoning>,
    pub(crate) metadata: Option<Map<String, Value>>,
    /// Only `false`: nothing is stored.
    pub(crate) store: Option<bool>,
    /// Only null: nothing is stored.
    pub(crate) previous_response_id: Option<String>,
    /// Only `false`.
    pub(crate) background: Option<bool>,
    /// Only `disabled`: a prompt beyond the context is an error.
    pub(crate) truncation: Option<String>,
    /// Only `auto` and `default`.
    pub(crate) service_tier: Option<String>,
    /// Only nothing.
    pub(crate) include: Option<Vec<String>>,
    /// Of no consequence.
    #[serde(rename = "user")]
    pub(crate) _user: Option<String>,
    /// Of no consequence.
    #[serde(rename = "safety_identifier")]
    pub(crate) _safety_identifier: Option<String>,
    /// Of no consequence.
    #[serde(rename = "prompt_cache_key")]
    pub(crate) _prompt_cache_key: Option<String>,
}

/// A question, or the items of a conversation.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "expected a text or a list of items")]
pub(crate) enum Input {
    Text(String),
    Items(Vec<Value>),
}

/// What the content follows.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct TextSettings {
    /// `text`, `json_object`, or `json_schema` with `name` and `schema`.
    pub(crate) format: Option<Value>,
}

/// How much reasoning.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Reasoning {
    pub(crate) effort: Option<Effort>,
    /// Of no consequence: the reasoning itself is given.
    #[serde(rename = "summary")]
    pub(crate) _summary: Option<String>,
}

//! What requests of ollama's API look like. A field that is not here is refused by its name.

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;

/// How tokens are chosen.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Options {
    pub(crate) temperature: Option<f32>,
    pub(crate) top_k: Option<usize>,
    pub(crate) top_p: Option<f32>,
    pub(crate) min_p: Option<f32>,
    pub(crate) seed: Option<i64>,
    /// The most tokens; negative: as many as the context holds.
    pub(crate) num_predict: Option<i64>,
    /// Only up to the context that the model was loaded for.
    pub(crate) num_ctx: Option<usize>,
    pub(crate) stop: Option<Vec<String>>,
    pub(crate) repeat_penalty: Option<f32>,
    pub(crate) presence_penalty: Option<f32>,
    pub(crate) frequency_penalty: Option<f32>,
    /// Of no consequence: threads are chosen when the server is started.
    #[serde(rename = "num_thread")]
    pub(crate) _num_thread: Option<i64>,
}

/// `POST /api/chat`
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ChatRequest {
    pub(crate) model: String,
    #[serde(default)]
    pub(crate) messages: Vec<Message>,
    pub(crate) tools: Option<Vec<Value>>,
    /// `json`, or a JSON schema.
    pub(crate) format: Option<Value>,
    pub(crate) options: Option<Options>,
    pub(crate) stream: Option<bool>,
    /// Whether to reason.
    pub(crate) think: Option<Value>,
    pub(crate) keep_alive: Option<Value>,
}

/// One message.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Message {
    pub(crate) role: String,
    pub(crate) content: Option<String>,
    pub(crate) thinking: Option<String>,
    /// Image files in base64.
    pub(crate) images: Option<Vec<String>>,
    pub(crate) tool_calls: Option<Vec<Value>>,
    pub(crate) tool_name: Option<String>,
    pub(crate) tool_call_id: Option<String>,
}

/// `POST /api/generate`
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct GenerateRequest {
    pub(crate) model: String,
    #[serde(default)]
    pub(crate) prompt: String,
    pub(crate) system: Option<String>,
    pub(crate) images: Option<Vec<String>>,
    pub(crate) format: Option<Value>,
    pub(crate) options: Option<Options>,
    pub(crate) stream: Option<bool>,
    /// Continue the prompt as it is, without a template.
    pub(crate) raw: Option<bool>,
    pub(crate) think: Option<Value>,
    pub(crate) keep_alive: Option<Value>,
}

/// `POST /api/show`
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ShowRequest {
    pub(crate) model: Option<String>,
    pub(crate) name: Option<String>,
    /// Of no consequence.
    #[serde(rename = "verbose")]
    pub(crate) _verbose: Option<bool>,
}

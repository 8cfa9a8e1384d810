//! What requests and responses of the Anthropic API look like. A field that is not here is refused by its name.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// `POST /v1/messages`
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct MessagesRequest {
    pub(crate) model: String,
    pub(crate) max_tokens: usize,
    pub(crate) messages: Vec<MessageParam>,
    pub(crate) system: Option<Content>,
    pub(crate) stop_sequences: Option<Vec<String>>,
    pub(crate) stream: Option<bool>,
    pub(crate) temperature: Option<f32>,
    pub(crate) top_p: Option<f32>,
    pub(crate) top_k: Option<usize>,
    pub(crate) tools: Option<Vec<Tool>>,
    pub(crate) tool_choice: Option<ToolChoice>,
    pub(crate) thinking: Option<Thinking>,
    pub(crate) output_config: Option<OutputConfig>,
    /// Only `auto` and `standard_only`.
    pub(crate) service_tier: Option<String>,
    /// Of no consequence.
    #[serde(rename = "metadata")]
    pub(crate) _metadata: Option<Map<String, Value>>,
    /// Of no consequence: equal beginnings are found without it.
    #[serde(rename = "cache_control")]
    pub(crate) _cache_control: Option<Value>,
}

/// `POST /v1/messages/count_tokens`
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CountRequest {
    pub(crate) model: String,
    pub(crate) messages: Vec<MessageParam>,
    pub(crate) system: Option<Content>,
    pub(crate) tools: Option<Vec<Tool>>,
    pub(crate) tool_choice: Option<ToolChoice>,
    pub(crate) thinking: Option<Thinking>,
    pub(crate) output_config: Option<OutputConfig>,
    #[serde(rename = "cache_control")]
    pub(crate) _cache_control: Option<Value>,
}

impl From<CountRequest> for MessagesRequest {
    fn from(request: CountRequest) -> Self {
        Self {
            model: request.model,
            max_tokens: 1,
            messages: request.messages,
            system: request.system,
            stop_sequences: None,
            stream: None,
            temperature: None,
            top_p: None,
            top_k: None,
            tools: request.tools,
            tool_choice: request.tool_choice,
            thinking: request.thinking,
            output_config: request.output_config,
            service_tier: None,
            _metadata: None,
            _cache_control: None,
        }
    }
}

/// One message.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct MessageParam {
    pub(crate) role: Role,
    pub(crate) content: Content,
}

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Role {
    User,
    Assistant,
}

/// A text, or blocks.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "expected a text or a list of blocks")]
pub(crate) enum Content {
    Text(String),
    Blocks(Vec<Value>),
}

/// A function that may be called.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Tool {
    pub(crate) name: String,
    pub(crate) description: Option<String>,
    pub(crate) input_schema: Option<Value>,
    /// Only `custom`.
    #[serde(rename = "type")]
    pub(crate) kind: Option<String>,
    /// Of no consequence: calls always follow the schema.
    #[serde(rename = "strict")]
    pub(crate) _strict: Option<bool>,
    #[serde(rename = "cache_control")]
    pub(crate) _cache_control: Option<Value>,
}

/// Which tools are called.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ToolChoice {
    #[serde(rename = "type")]
    pub(crate) kind: ToolChoiceKind,
    pub(crate) name: Option<String>,
    pub(crate) disable_parallel_tool_use: Option<bool>,
}

/// As the model likes, at least one, this one, none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ToolChoiceKind {
    Auto,
    Any,
    Tool,
    None,
}

/// Whether the model reasons, and how much.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Thinking {
    #[serde(rename = "type")]
    pub(crate) kind: ThinkingKind,
    pub(crate) budget_tokens: Option<usize>,
}

/// On, off, or as the model likes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ThinkingKind {
    Enabled,
    Disabled,
    Adaptive,
}

/// What the content follows.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct OutputConfig {
    pub(crate) format: Option<OutputFormat>,
}

/// A JSON schema.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum OutputFormat {
    JsonSchema { schema: Value },
}

/// How many tokens there were.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub(crate) struct Usage {
    /// Of the prompt, those that had to be computed.
    pub(crate) input_tokens: usize,
    pub(crate) cache_creation_input_tokens: usize,
    /// Of the prompt, those that had not.
    pub(crate) cache_read_input_tokens: usize,
    pub(crate) output_tokens: usize,
}

/// How many tokens a request has.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub(crate) struct TokenCount {
    pub(crate) input_tokens: usize,
}

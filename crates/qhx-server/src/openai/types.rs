//! What requests and responses of the OpenAI API look like. A field that is not here is refused by its name.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// A text or several.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "expected a text or a list of texts")]
pub(crate) enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl OneOrMany {
    pub(crate) fn into_vec(self) -> Vec<String> {
        match self {
            Self::One(text) => vec![text],
            Self::Many(texts) => texts,
        }
    }
}

/// What else a stream tells.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct StreamOptions {
    /// A last chunk with the numbers of tokens.
    #[serde(default)]
    pub(crate) include_usage: bool,
    /// Chunks are never padded.
    #[serde(default)]
    pub(crate) include_obfuscation: bool,
}

/// `POST /v1/chat/completions`
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ChatRequest {
    /// One that `/v1/models` lists; absent: the first.
    pub(crate) model: Option<String>,
    /// What was said.
    pub(crate) messages: Vec<Value>,
    pub(crate) temperature: Option<f32>,
    pub(crate) top_p: Option<f32>,
    pub(crate) top_k: Option<usize>,
    pub(crate) min_p: Option<f32>,
    pub(crate) repetition_penalty: Option<f32>,
    pub(crate) presence_penalty: Option<f32>,
    pub(crate) frequency_penalty: Option<f32>,
    /// How many answers.
    pub(crate) n: Option<usize>,
    pub(crate) seed: Option<i64>,
    pub(crate) stop: Option<OneOrMany>,
    /// What is added to the logits of tokens, by their ids.
    pub(crate) logit_bias: Option<Map<String, Value>>,
    pub(crate) logprobs: Option<bool>,
    pub(crate) top_logprobs: Option<usize>,
    pub(crate) max_tokens: Option<usize>,
    pub(crate) max_completion_tokens: Option<usize>,
    pub(crate) stream: Option<bool>,
    pub(crate) stream_options: Option<StreamOptions>,
    pub(crate) tools: Option<Vec<Value>>,
    pub(crate) tool_choice: Option<ToolChoiceJson>,
    /// Whether a reply may call several tools.
    pub(crate) parallel_tool_calls: Option<bool>,
    pub(crate) response_format: Option<ResponseFormat>,
    /// How much a model that reasons may do so: `none` switches it off.
    pub(crate) reasoning_effort: Option<Effort>,
    /// The most tokens of reasoning.
    pub(crate) reasoning_budget: Option<usize>,
    /// Variables of the chat template, such as `enable_thinking`.
    pub(crate) chat_template_kwargs: Option<Map<String, Value>>,
    pub(crate) ignore_eos: Option<bool>,
    /// With the last chunk, say where each stage ran and how long it took.
    pub(crate) details: Option<bool>,
    /// Only `text`.
    pub(crate) modalities: Option<Vec<String>>,
    /// Only `auto` and `default`.
    pub(crate) service_tier: Option<String>,
    /// Only `false`: nothing is stored.
    pub(crate) store: Option<bool>,
    /// Of no consequence.
    #[serde(rename = "user")]
    pub(crate) _user: Option<String>,
    /// Of no consequence.
    #[serde(rename = "safety_identifier")]
    pub(crate) _safety_identifier: Option<String>,
    /// Of no consequence: equal beginnings are found without it.
    #[serde(rename = "prompt_cache_key")]
    pub(crate) _prompt_cache_key: Option<String>,
    /// Of no consequence.
    #[serde(rename = "metadata")]
    pub(crate) _metadata: Option<Map<String, Value>>,
}

/// Which tools are called.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "expected `auto`, `required`, `none` or a function by its name")]
pub(crate) enum ToolChoiceJson {
    /// As the model likes, at least one, or none.
    Word(ToolChoiceWord),
    /// This one.
    Function {
        #[serde(rename = "type")]
        _kind: FunctionWord,
        function: NamedFunction,
    },
}

/// As the model likes, at least one, or none.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ToolChoiceWord {
    Auto,
    Required,
    None,
}

/// The only kind of tools.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum FunctionWord {
    Function,
}

/// A function by its name.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NamedFunction {
    pub(crate) name: String,
}

/// What the content follows.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum ResponseFormat {
    /// Nothing.
    Text,
    /// Any JSON object.
    JsonObject,
    /// A JSON schema.
    JsonSchema { json_schema: NamedSchema },
    /// A regular expression.
    Regex { regex: String },
    /// A grammar in Lark's syntax.
    Lark { grammar: String },
}

/// A JSON schema with a name.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NamedSchema {
    /// Of no consequence.
    #[serde(rename = "name")]
    pub(crate) _name: Option<String>,
    /// Of no consequence.
    #[serde(rename = "description")]
    pub(crate) _description: Option<String>,
    pub(crate) schema: Option<Value>,
    /// Of no consequence: schemas are always followed.
    #[serde(rename = "strict")]
    pub(crate) _strict: Option<bool>,
}

/// How much reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Effort {
    None,
    Minimal,
    Low,
    Medium,
    High,
}

/// A prompt: texts or ids of tokens, one or several.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "expected a text, ids of tokens, or a list of either")]
pub(crate) enum Prompts {
    Text(String),
    Texts(Vec<String>),
    Ids(Vec<u32>),
    ManyIds(Vec<Vec<u32>>),
}

/// `POST /v1/completions`
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CompletionRequest {
    /// One that `/v1/models` lists; absent: the first.
    pub(crate) model: Option<String>,
    pub(crate) prompt: Prompts,
    pub(crate) temperature: Option<f32>,
    pub(crate) top_p: Option<f32>,
    pub(crate) top_k: Option<usize>,
    pub(crate) min_p: Option<f32>,
    pub(crate) repetition_penalty: Option<f32>,
    pub(crate) presence_penalty: Option<f32>,
    pub(crate) frequency_penalty: Option<f32>,
    /// How many answers to each prompt.
    pub(crate) n: Option<usize>,
    /// Only as many as `n`.
    pub(crate) best_of: Option<usize>,
    pub(crate) seed: Option<i64>,
    pub(crate) stop: Option<OneOrMany>,
    pub(crate) logit_bias: Option<Map<String, Value>>,
    /// How many of the most probable tokens are told at each place.
    pub(crate) logprobs: Option<usize>,
    /// Give the prompt back before the answer.
    pub(crate) echo: Option<bool>,
    pub(crate) max_tokens: Option<usize>,
    pub(crate) stream: Option<bool>,
    pub(crate) stream_options: Option<StreamOptions>,
    pub(crate) response_format: Option<ResponseFormat>,
    /// Only null: models continue a text, they do not fill gaps.
    pub(crate) suffix: Option<String>,
    pub(crate) ignore_eos: Option<bool>,
    /// Of no consequence.
    #[serde(rename = "user")]
    pub(crate) _user: Option<String>,
}

/// How many tokens there were.
#[derive(Clone, Copy, Debug, Default, Serialize, JsonSchema)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: usize,
    pub(crate) completion_tokens: usize,
    pub(crate) total_tokens: usize,
    pub(crate) prompt_tokens_details: PromptTokens,
    pub(crate) completion_tokens_details: CompletionTokens,
}

/// Of the tokens of the prompt …
#[derive(Clone, Copy, Debug, Default, Serialize, JsonSchema)]
pub(crate) struct PromptTokens {
    /// … those that were not computed again.
    pub(crate) cached_tokens: usize,
}

/// Of the tokens of the answer …
#[derive(Clone, Copy, Debug, Default, Serialize, JsonSchema)]
pub(crate) struct CompletionTokens {
    /// … those of reasoning.
    pub(crate) reasoning_tokens: usize,
}

impl Usage {
    /// Counts one more answer to a prompt.
    pub(crate) fn add(&mut self, generation: &qhx::Generation, reasoning_tokens: usize) {
        self.completion_tokens += generation.ids.len();
        self.completion_tokens_details.reasoning_tokens += reasoning_tokens;
        self.total_tokens = self.prompt_tokens + self.completion_tokens;
    }

    /// Counts a prompt, once for all answers to it.
    pub(crate) fn add_prompt(&mut self, generation: &qhx::Generation) {
        self.prompt_tokens += generation.prompt_ids.len();
        self.prompt_tokens_details.cached_tokens += generation.kept_rows;
        self.total_tokens = self.prompt_tokens + self.completion_tokens;
    }
}

/// A function that the model wants to have called.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub(crate) struct CallJson {
    /// The number of the call, in streams.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) index: Option<usize>,
    pub(crate) id: String,
    #[serde(rename = "type")]
    pub(crate) kind: &'static str,
    pub(crate) function: FunctionJson,
}

/// Its name and arguments.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub(crate) struct FunctionJson {
    pub(crate) name: String,
    /// A JSON object, written out.
    pub(crate) arguments: String,
}

/// An answer, or in streams a part of it.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub(crate) struct MessageJson {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) content: Option<Option<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) tool_calls: Vec<CallJson>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) refusal: Option<Option<String>>,
}

/// How probable the tokens of an answer were.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub(crate) struct ChatLogProbs {
    pub(crate) content: Vec<TokenJson>,
    pub(crate) refusal: Option<Vec<TokenJson>>,
}

/// How probable a token was.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub(crate) struct TokenJson {
    pub(crate) token: String,
    pub(crate) logprob: f32,
    pub(crate) bytes: Vec<u8>,
    pub(crate) top_logprobs: Vec<TopTokenJson>,
}

/// One of the most probable.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub(crate) struct TopTokenJson {
    pub(crate) token: String,
    pub(crate) logprob: f32,
    pub(crate) bytes: Vec<u8>,
}

/// One of the answers.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub(crate) struct ChatChoice {
    pub(crate) index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) message: Option<MessageJson>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) delta: Option<MessageJson>,
    pub(crate) logprobs: Option<ChatLogProbs>,
    pub(crate) finish_reason: Option<&'static str>,
}

/// The response, or in streams a part of it.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub(crate) struct ChatResponse {
    pub(crate) id: String,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) system_fingerprint: String,
    pub(crate) choices: Vec<ChatChoice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) usage: Option<Option<Usage>>,
    /// Where the answer was computed, where that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) details: Option<Value>,
    /// How far the prompt is, where details were asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_progress: Option<PromptProgress>,
}

/// How much of a prompt has been computed.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub(crate) struct PromptProgress {
    pub(crate) processed: usize,
    pub(crate) total: usize,
}

/// How probable the tokens of a completion were.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub(crate) struct CompletionLogProbs {
    pub(crate) tokens: Vec<String>,
    /// The same numbers as among the most probable: clients compare them.
    pub(crate) token_logprobs: Vec<Option<f64>>,
    pub(crate) top_logprobs: Vec<Option<Map<String, Value>>>,
    pub(crate) text_offset: Vec<usize>,
}

/// One of the completions, or in streams a part of it.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub(crate) struct CompletionChoice {
    pub(crate) index: usize,
    pub(crate) text: String,
    pub(crate) logprobs: Option<CompletionLogProbs>,
    pub(crate) finish_reason: Option<&'static str>,
}

/// The response, or in streams a part of it.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub(crate) struct CompletionResponse {
    pub(crate) id: String,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) system_fingerprint: String,
    pub(crate) choices: Vec<CompletionChoice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) usage: Option<Option<Usage>>,
}

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

impl Prompts {
    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        match self {
            Self::Text(_) | Self::Ids(_) => 1,
            Self::Texts(texts) => texts.len(),
            Self::ManyIds(prompts) => prompts.len(),
        }
    }
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
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
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

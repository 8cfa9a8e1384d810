//! What is asked of `/v1/chat/completions` and `/v1/completions`: fields of their own, and those that they have in common, which say how tokens are chosen. A field that is not here is refused by
//! its name.

use super::{
    structure,
    types::{Effort, OneOrMany, Prompts, ResponseFormat, StreamOptions, ToolChoiceJson},
};
use crate::{
    error::ApiError,
    generate::{self, MAX_CHOICES, MAX_TOP, Sampling},
};
use qhx::{Model, Structure};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value};

/// Declares requests with the fields of sampling among their own, and how those are read. A macro, because `serde(flatten)` would let unknown fields pass.
macro_rules! sampled_requests {
    ($($(#[$about:meta])* struct $name:ident { $($(#[$note:meta])* $field:ident: $kind:ty,)* })*) => { $(
        $(#[$about])*
        #[derive(Clone, Debug, Deserialize, JsonSchema)]
        #[serde(deny_unknown_fields)]
        pub(crate) struct $name {
            /// One that `/v1/models` lists; absent: the first.
            pub(crate) model: Option<String>,
            $($(#[$note])* pub(crate) $field: $kind,)*
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
            pub(crate) max_tokens: Option<usize>,
            pub(crate) ignore_eos: Option<bool>,
            /// What the content follows.
            pub(crate) response_format: Option<ResponseFormat>,
            pub(crate) stream: Option<bool>,
            pub(crate) stream_options: Option<StreamOptions>,
            /// Of no consequence.
            #[serde(rename = "user")]
            pub(crate) _user: Option<String>,
        }

        impl $name {
            /// How tokens are chosen; how many of them, and how much is told of them, is the request's own.
            pub(crate) fn sampling(&mut self, model: &Model) -> Result<Sampling, ApiError> {
                let mut structure = Structure::default();
                structure.constraint = self.response_format.take().map(structure::constraint).transpose()?.flatten();
                Ok(Sampling {
                    temperature: self.temperature,
                    top_p: self.top_p,
                    top_k: self.top_k,
                    min_p: self.min_p,
                    repetition_penalty: self.repetition_penalty,
                    presence_penalty: penalty("presence_penalty", self.presence_penalty)?,
                    frequency_penalty: penalty("frequency_penalty", self.frequency_penalty)?,
                    seed: self.seed.map(|seed| seed as u64),
                    logit_bias: self.logit_bias.as_ref().map(|bias| generate::logit_bias(bias, model)).transpose()?.unwrap_or_default(),
                    stop: self.stop.take().map(OneOrMany::into_vec).unwrap_or_default(),
                    ignore_eos: self.ignore_eos.unwrap_or(false),
                    structure,
                    ..Sampling::default()
                })
            }

            /// How many answers are asked for.
            pub(crate) fn choices(&self) -> Result<usize, ApiError> {
                choices(self.n)
            }

            /// What a stream tells beside the answer; none: there is to be no stream.
            pub(crate) fn streamed(&mut self) -> Result<Option<StreamOptions>, ApiError> {
                streamed(self.stream, self.stream_options.take())
            }
        }
    )* };
}

sampled_requests! {
    /// `POST /v1/chat/completions`
    struct ChatRequest {
        /// What was said.
        messages: Vec<Value>,
        logprobs: Option<bool>,
        top_logprobs: Option<usize>,
        max_completion_tokens: Option<usize>,
        tools: Option<Vec<Value>>,
        tool_choice: Option<ToolChoiceJson>,
        /// Whether a reply may call several tools.
        parallel_tool_calls: Option<bool>,
        /// How much a model that reasons may do so: `none` switches it off.
        reasoning_effort: Option<Effort>,
        /// The most tokens of reasoning.
        reasoning_budget: Option<usize>,
        /// Variables of the chat template, such as `enable_thinking`.
        chat_template_kwargs: Option<Map<String, Value>>,
        /// With the last chunk, say where each stage ran and how long it took.
        details: Option<bool>,
        /// Only `text`.
        modalities: Option<Vec<String>>,
        /// Only `auto` and `default`.
        service_tier: Option<String>,
        /// Only `false`: nothing is stored.
        store: Option<bool>,
        /// Of no consequence.
        #[serde(rename = "safety_identifier")]
        _safety_identifier: Option<String>,
        /// Of no consequence: equal beginnings are found without it.
        #[serde(rename = "prompt_cache_key")]
        _prompt_cache_key: Option<String>,
        /// Of no consequence.
        #[serde(rename = "metadata")]
        _metadata: Option<Map<String, Value>>,
    }

    /// `POST /v1/completions`
    struct CompletionRequest {
        prompt: Prompts,
        /// Only as many as `n`.
        best_of: Option<usize>,
        /// How many of the most probable tokens are told at each place.
        logprobs: Option<usize>,
        /// Give the prompt back before the answer.
        echo: Option<bool>,
        /// Only null: models continue a text, they do not fill gaps.
        suffix: Option<String>,
    }
}

/// How many answers `n` asks for.
fn choices(n: Option<usize>) -> Result<usize, ApiError> {
    let choices = n.unwrap_or(1);
    match (1..=MAX_CHOICES).contains(&choices) {
        true => Ok(choices),
        false => Err(ApiError::field("n", format!("is {choices}, expected 1 to {MAX_CHOICES}"))),
    }
}

/// What a stream tells beside the answer; none: there is to be no stream.
fn streamed(stream: Option<bool>, options: Option<StreamOptions>) -> Result<Option<StreamOptions>, ApiError> {
    match (stream.unwrap_or(false), options) {
        (false, Some(_)) => Err(ApiError::field("stream_options", "needs `stream: true`")),
        (true, Some(options)) if options.include_obfuscation => {
            Err(ApiError::field("stream_options.include_obfuscation", "cannot be true"))
        }
        (stream, options) => Ok(stream.then(|| options.unwrap_or_default())),
    }
}

pub(crate) fn check_top(field: &str, top: Option<usize>) -> Result<(), ApiError> {
    match top {
        Some(top) if top > MAX_TOP => Err(ApiError::field(field, format!("is {top}, at most {MAX_TOP} are told"))),
        _ => Ok(()),
    }
}

pub(crate) fn penalty(field: &str, value: Option<f32>) -> Result<f32, ApiError> {
    let value = value.unwrap_or(0.0);
    if (-2.0..=2.0).contains(&value) { Ok(value) } else { Err(ApiError::field(field, format!("is {value}, expected -2 to 2"))) }
}

pub(crate) fn at_least_one(field: &str, value: Option<usize>) -> Result<Option<usize>, ApiError> {
    if value == Some(0) { Err(ApiError::field(field, "is 0, expected at least 1")) } else { Ok(value) }
}

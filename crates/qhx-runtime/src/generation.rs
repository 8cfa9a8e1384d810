//! What is asked for and what comes back: the settings of an answer, its pieces and the whole of it.

use crate::{
    Prompt, Structure, TokenLogProbs,
    draft::DraftSource,
    placement::Fallback,
    sample::SamplerConfig,
    timing::{PrefillPath, Timing},
};
use serde::Serialize;

/// How an answer is to be made.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateOptions {
    /// The most tokens to choose.
    pub max_new: usize,
    /// Treat end-of-answer ids as any other.
    pub ignore_eos: bool,
    /// Texts that end the answer; they are not part of it.
    pub stop: Vec<String>,
    /// How tokens are chosen.
    pub sampler: SamplerConfig,
    /// Keep the logits from which each token was chosen.
    pub keep_logits: bool,
    /// Tell how probable each token was, with so many of the most probable at its place.
    pub log_probs: Option<usize>,
    /// What the answer has to look like.
    pub structure: Structure,
    /// Special tokens that are part of the text all the same: marks around reasoning and tool calls.
    pub shown_special: Vec<u32>,
    /// Where guesses at the next tokens come from, which are computed together where that is faster. They never change an answer.
    pub draft: DraftSource,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self {
            max_new: 256,
            ignore_eos: false,
            stop: Vec::new(),
            sampler: SamplerConfig::default(),
            keep_logits: false,
            log_probs: None,
            structure: Structure::default(),
            shown_special: Vec::new(),
            draft: DraftSource::default(),
        }
    }
}

/// A part of an answer as it comes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Piece<'a> {
    /// The token that was chosen; absent for text that was held back until the end.
    pub id: Option<u32>,
    /// The text that is now certain: never half a character, never part of a stop string, often empty.
    pub text: &'a str,
    /// How probable the token was, where that was asked for.
    pub log_probs: Option<&'a TokenLogProbs>,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FinishReason {
    /// As many tokens as were asked for, or as the context holds.
    Length,
    /// An end-of-answer id or a stop string.
    Stop,
    /// Somebody asked to stop.
    Cancelled,
}

/// An answer. Its JSON is what `--json` prints.
#[derive(Clone, Debug, Serialize)]
pub struct Generation {
    /// The prompt.
    pub prompt_ids: Vec<u32>,
    /// The tokens chosen; a token that ended the answer is the last of them.
    pub ids: Vec<u32>,
    /// Their text, without special tokens and without a stop string; empty for a model without tokenizer.
    pub text: String,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Where the time went.
    pub timing: Timing,
    /// How the prompt was read.
    pub prefill_path: PrefillPath,
    /// Where each stage ran, and how often.
    pub stages: Vec<StageRuns>,
    /// Stages that ran elsewhere than was preferred.
    pub fallbacks: Vec<Fallback>,
    /// Something a person should know about how it ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// The stop string that ended it.
    #[serde(skip)]
    pub stop_string: Option<String>,
    /// How probable each token was, where that was asked for.
    #[serde(skip)]
    pub log_probs: Vec<TokenLogProbs>,
    /// Media in the prompt.
    #[serde(skip)]
    pub media: usize,
    /// Rows of the prompt that the session already had.
    #[serde(skip)]
    pub kept_rows: usize,
    /// The logits from which each token was chosen, `[generated, vocabulary]`, where they were asked for.
    #[serde(skip)]
    pub step_logits: Vec<f32>,
}

impl Generation {
    /// An answer of no tokens to a prompt.
    pub fn empty(prompt: &Prompt) -> Self {
        Self { finish_reason: FinishReason::Length, ..Self::cancelled(prompt, Timing::default()) }
    }

    /// An answer that was cancelled before it began.
    pub(crate) fn cancelled(prompt: &Prompt, timing: Timing) -> Self {
        Self {
            prompt_ids: prompt.ids().to_vec(),
            ids: Vec::new(),
            text: String::new(),
            finish_reason: FinishReason::Cancelled,
            timing,
            prefill_path: PrefillPath::Batched,
            stages: Vec::new(),
            fallbacks: Vec::new(),
            note: None,
            stop_string: None,
            log_probs: Vec::new(),
            media: prompt.media().len(),
            kept_rows: 0,
            step_logits: Vec::new(),
        }
    }
}

/// Where a stage ran, and how often.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StageRuns {
    /// The stage's name.
    pub stage: String,
    /// The device's name.
    pub device: String,
    /// Calls.
    pub runs: usize,
}

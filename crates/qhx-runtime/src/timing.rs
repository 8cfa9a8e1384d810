//! What an answer cost, in the form that `--json` prints.

use crate::{Model, Prompt, memory::peak_rss_bytes};
use qhx_ir::ExpertCache;
use serde::{Serialize, Serializer};
use std::time::{Duration, Instant};

/// Where the time of an answer went.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Timing {
    /// Opening the bundle and getting the program ready.
    #[serde(serialize_with = "rounded")]
    pub load_ms: f64,
    /// Turning text and media into rows: tokenizer, front ends, towers.
    #[serde(serialize_with = "rounded")]
    pub encode_ms: f64,
    /// Reading the prompt.
    #[serde(serialize_with = "rounded")]
    pub prefill_ms: f64,
    /// From the request to the first token: encoding, reading the prompt, choosing.
    #[serde(serialize_with = "rounded")]
    pub ttft_ms: f64,
    /// From the first token to the last.
    #[serde(serialize_with = "rounded")]
    pub decode_ms: f64,
    /// The part of decoding spent in the stage `lm_head`; 0 where the device does not tell.
    #[serde(serialize_with = "rounded")]
    pub lm_head_ms: f64,
    /// Tokens of the prompt, those that the session already had included.
    pub prompt_tokens: usize,
    /// Tokens chosen, a final end-of-answer token included.
    pub generated_tokens: usize,
    /// Tokens after the first, by the time from the first to the last; 0 where there is only one.
    #[serde(serialize_with = "rounded")]
    pub decode_tokens_per_second: f64,
    /// Guesses at tokens that were computed beside others.
    pub drafted: usize,
    /// Those of them that were right.
    pub accepted: usize,
    /// About the time that they have saved; negative where they have cost more.
    #[serde(serialize_with = "rounded")]
    pub saved_ms: f64,
    /// The part of decoding spent on what may be chosen: a grammar, for one. Not written where it is 0.
    #[serde(serialize_with = "rounded", skip_serializing_if = "is_zero")]
    pub mask_ms: f64,
    /// Tokens about which a structure left no choice, so that they were not computed one by one. Not written where there are none.
    #[serde(skip_serializing_if = "is_none")]
    pub forced_tokens: usize,
    /// What became of chosen experts, where only some of them lie on the device with the rest of the model. Not written elsewhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expert_cache: Option<ExpertCacheUse>,
    /// The most memory that this process has held; 0 where the system does not tell.
    pub peak_rss_bytes: u64,
}

/// What became of chosen experts; a choice is a row and one of its experts in one layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct ExpertCacheUse {
    /// The share of choices whose expert lay on the accelerator.
    #[serde(serialize_with = "rounded")]
    pub hit_rate: f64,
    /// How many choices, and how many experts were transferred.
    #[serde(flatten)]
    pub counts: ExpertCache,
}

impl ExpertCacheUse {
    /// None where there were no such choices.
    pub(crate) fn of(counts: ExpertCache) -> Option<Self> {
        (counts != ExpertCache::default()).then(|| Self { hit_rate: counts.hit_rate(), counts })
    }
}

impl Timing {
    /// What is known before a prompt is computed.
    pub(crate) fn of_prompt(model: &Model, prompt: &Prompt) -> Self {
        Self {
            load_ms: milliseconds(model.load_time()),
            encode_ms: milliseconds(prompt.encode_time()),
            prompt_tokens: prompt.ids().len(),
            ..Self::default()
        }
    }

    /// An answer of so many tokens, begun at `started`, has just ended.
    pub(crate) fn end(&mut self, prompt: &Prompt, started: Instant, first_token: Option<Instant>, tokens: usize) {
        if let Some(first) = first_token {
            let decode = first.elapsed();
            self.ttft_ms = milliseconds(prompt.encode_time() + (first - started));
            self.decode_ms = milliseconds(decode);
            if tokens > 1 {
                self.decode_tokens_per_second = (tokens - 1) as f64 / decode.as_secs_f64();
            }
        }
        self.generated_tokens = tokens;
        self.peak_rss_bytes = peak_rss_bytes();
    }

    /// What may be chosen took so long to find out, and forced so many tokens.
    pub(crate) fn shaped(&mut self, mask_time: Duration, forced_tokens: usize) {
        (self.mask_ms, self.forced_tokens) = (milliseconds(mask_time), forced_tokens);
    }

    /// Counts time that making rows took before the request was made: reading and scaling media.
    pub fn add_encode_time(&mut self, time: Duration) {
        self.encode_ms += milliseconds(time);
        if self.generated_tokens > 0 {
            self.ttft_ms += milliseconds(time);
        }
    }

    /// Counts an answer that came after this one as part of it.
    pub fn add(&mut self, next: &Self) {
        let decoded = |timing: &Self| timing.decode_tokens_per_second * timing.decode_ms;
        let (tokens, time) = (decoded(self) + decoded(next), self.decode_ms + next.decode_ms);
        self.encode_ms += next.encode_ms;
        self.prefill_ms += next.prefill_ms;
        self.decode_ms = time;
        self.lm_head_ms += next.lm_head_ms;
        self.mask_ms += next.mask_ms;
        self.forced_tokens += next.forced_tokens;
        self.prompt_tokens += next.prompt_tokens;
        self.generated_tokens += next.generated_tokens;
        self.drafted += next.drafted;
        self.accepted += next.accepted;
        self.saved_ms += next.saved_ms;
        let [own, other] = [self.expert_cache, next.expert_cache].map(|cache| cache.map(|cache| cache.counts).unwrap_or_default());
        self.expert_cache = ExpertCacheUse::of(own + other);
        self.decode_tokens_per_second = if time > 0.0 { tokens / time } else { 0.0 };
        self.peak_rss_bytes = self.peak_rss_bytes.max(next.peak_rss_bytes);
    }
}

/// How the prompt was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PrefillPath {
    /// In one call.
    Batched,
    /// In several calls of many rows.
    Chunked,
    /// Row by row.
    DecodeOverPrompt,
}

impl PrefillPath {
    /// The path of a prompt of which `rows` rows were read in `calls` calls.
    pub fn of(rows: usize, calls: usize) -> Self {
        match calls {
            0 | 1 => Self::Batched,
            calls if calls == rows => Self::DecodeOverPrompt,
            _ => Self::Chunked,
        }
    }
}

/// A duration in milliseconds.
pub fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Microseconds are enough for people and keep the output readable.
fn rounded<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64((value * 1e3).round() / 1e3)
}

fn is_zero(milliseconds: &f64) -> bool {
    *milliseconds == 0.0
}

fn is_none(count: &usize) -> bool {
    *count == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_as_the_interface_has_them() {
        let timing = Timing { load_ms: 1.23456, prompt_tokens: 7, ..Timing::default() };
        let value = serde_json::to_value(timing).unwrap();
        let fields: Vec<&str> = value.as_object().unwrap().keys().map(String::as_str).collect();
        let expected = "load_ms encode_ms prefill_ms ttft_ms decode_ms lm_head_ms prompt_tokens generated_tokens decode_tokens_per_second \
                        drafted accepted saved_ms peak_rss_bytes";
        assert_eq!(fields.join(" "), expected);
        assert_eq!(value["load_ms"], 1.235);
        let one = Timing { decode_ms: 500.0, decode_tokens_per_second: 10.0, generated_tokens: 6, ttft_ms: 3.0, ..Timing::default() };
        let mut two = one.clone();
        two.add(&Timing { decode_tokens_per_second: 30.0, ..one });
        assert_eq!((two.decode_tokens_per_second, two.generated_tokens, two.ttft_ms), (20.0, 12, 3.0));
        two.add_encode_time(Duration::from_millis(7));
        assert_eq!((two.encode_ms, two.ttft_ms), (7.0, 10.0));
        let names = [PrefillPath::of(9, 1), PrefillPath::of(9, 2), PrefillPath::of(9, 9), PrefillPath::of(1, 1)];
        assert_eq!(serde_json::to_value(names).unwrap(), serde_json::json!(["batched", "chunked", "decode_over_prompt", "batched"]));
    }
}

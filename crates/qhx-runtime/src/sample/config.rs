//! The sampling settings and their limits.

use serde::{Deserialize, Serialize};

/// How tokens are chosen. The default is greedy: the most probable token, exactly.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SamplerConfig {
    /// 0 is greedy; above it, larger is more random.
    pub temperature: f32,
    /// Keep only this many of the most probable tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the smallest set of most probable tokens that together reach this probability; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens at least this fraction as probable as the most probable one; 0 keeps all.
    pub min_p: f32,
    /// Above 1 makes tokens that were already used less likely; 1 is off.
    pub repetition_penalty: f32,
    /// How many of the latest tokens the repetition penalty looks at; absent means all, prompt included.
    pub repetition_window: Option<usize>,
    /// Starting point of the random numbers: the same seed repeats the same text.
    pub seed: u64,
}

/// A sampling setting outside its limits.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("sampling: {field} must be {expected}, found {found}")]
pub struct SamplerConfigError {
    /// The setting, spelled as in [`SamplerConfig`].
    pub field: &'static str,
    /// What it may be.
    pub expected: &'static str,
    /// What it was.
    pub found: f32,
}

impl Default for SamplerConfig {
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0, repetition_window: None, seed: 0 }
    }
}

impl SamplerConfig {
    /// Whether the largest logit decides alone, as it is.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0 && self.repetition_penalty == 1.0
    }

    /// How many of the largest logits decide, where not all do.
    pub fn candidates(&self) -> Option<usize> {
        match (self.repetition_penalty == 1.0, self.temperature == 0.0, self.top_k) {
            (true, true, _) => Some(1),
            (true, false, 1..) => Some(self.top_k),
            _ => None,
        }
    }

    /// Checks each setting against its limits; the error names the first that is wrong.
    pub fn validate(&self) -> Result<(), SamplerConfigError> {
        let limits = [
            ("temperature", self.temperature, "a number from 0 up", self.temperature >= 0.0),
            ("top_p", self.top_p, "above 0 and at most 1", self.top_p > 0.0 && self.top_p <= 1.0),
            ("min_p", self.min_p, "from 0 to 1", (0.0..=1.0).contains(&self.min_p)),
            // Beyond these, logits would be no numbers.
            ("repetition_penalty", self.repetition_penalty, "from 1e-6 to 1e6", (1e-6..=1e6).contains(&self.repetition_penalty)),
        ];
        for (field, found, expected, within) in limits {
            if !within || !found.is_finite() {
                return Err(SamplerConfigError { field, expected, found });
            }
        }
        Ok(())
    }
}

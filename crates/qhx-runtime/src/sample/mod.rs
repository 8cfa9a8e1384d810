//! Choosing the next token from a row of logits.
//!
//! Owns the sampling settings, the filters and the random numbers. Knows nothing of tokens as text, sessions or devices.
//!
//! What happens to a row, in this order:
//!
//! 1. **Repetition penalty**: each distinct id among the last `repetition_window` ids of the history has its logit divided by the
//!    penalty where it is positive and multiplied where it is negative.
//! 2. `temperature` 0 stops here: the largest logit wins, the lowest id among equals. This is exact.
//! 3. **Temperature** divides the logits, before the filters, as in transformers and vLLM.
//! 4. **Top-k** keeps the `k` largest, exactly `k`: lower ids win ties.
//! 5. **Top-p** keeps the smallest set of the largest whose probability, among what top-k left, reaches `p`.
//! 6. **Min-p** keeps what is at least `min_p` times as probable as the most probable.
//! 7. One draw decides.
//!
//! The draw is a function of the seed and the token's position alone, so it does not matter how often a sampler was asked before, with whom a sequence shares its calls,
//! or whether drafts were tried. The same logits, history, settings, seed and position give the same token on every platform: exponentials and random numbers are computed
//! here with plain IEEE operations ([`random`]), never by the platform's mathematics library.

mod config;
mod filter;
pub mod random;

pub use config::{SamplerConfig, SamplerConfigError};

use filter::Filter;

/// Picks tokens by the settings it was made with. One sampler serves one stream of tokens.
///
/// After the first call on a row size, sampling allocates nothing.
///
/// ```
/// use qhx_runtime::sample::{Sampler, SamplerConfig};
/// let mut greedy = Sampler::new(SamplerConfig::default())?;
/// assert_eq!(greedy.sample(&[0.5, 2.0, 2.0], &[], 0)?, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Sampler {
    config: SamplerConfig,
    penalised: Vec<f32>,
    penalty_round: Vec<u32>,
    round: u32,
    filter: Filter,
}

/// Why no token could be chosen.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SampleError {
    /// The row of logits is empty.
    #[error("cannot choose a token: the row of logits is empty")]
    NoLogits,
    /// A logit is NaN or +infinity: the model computed nonsense.
    #[error(
        "cannot choose a token: the logit of id {id} is {value}, expected a number; the model's weights or its computation are damaged"
    )]
    NotANumber {
        /// The first offending id.
        id: usize,
        /// What stood there.
        value: f32,
    },
    /// Every logit is −infinity.
    #[error("cannot choose a token: all {rows} logits are -inf, so every id is forbidden")]
    AllForbidden {
        /// How many logits the row has.
        rows: usize,
    },
}

impl Sampler {
    /// Checks the settings and makes a sampler.
    pub fn new(config: SamplerConfig) -> Result<Self, SamplerConfigError> {
        config.validate()?;
        Ok(Self { config, penalised: Vec::new(), penalty_round: Vec::new(), round: 0, filter: Filter::default() })
    }

    /// The settings this sampler was made with.
    pub fn config(&self) -> &SamplerConfig {
        &self.config
    }

    /// Chooses the id at `position` of a sequence from `logits`. `history` is everything that stands before it, oldest first; it matters only
    /// with a repetition penalty, and ids in it that lie beyond the row are ignored.
    pub fn sample(&mut self, logits: &[f32], history: &[u32], position: usize) -> Result<u32, SampleError> {
        let penalised = self.config.repetition_penalty != 1.0 && !history.is_empty();
        if penalised {
            self.penalise(logits, history);
        }
        let row = if penalised { &self.penalised[..] } else { logits };
        let best = argmax(row)?;
        if self.config.temperature == 0.0 {
            return Ok(best as u32);
        }
        let draw = random::uniform(self.config.seed, position as u64);
        Ok(self.filter.choose(row, best, &self.config, draw))
    }

    /// The same from the [`SamplerConfig::candidates`] largest logits alone, the largest first. There is no repetition penalty.
    pub fn sample_top(&mut self, top: &[(u32, f32)], position: usize) -> Result<u32, SampleError> {
        match top.first() {
            None => Err(SampleError::NoLogits),
            Some(&(_, f32::NEG_INFINITY)) => Err(SampleError::AllForbidden { rows: top.len() }),
            Some(&(id, value)) if !value.is_finite() => Err(SampleError::NotANumber { id: id as usize, value }),
            Some(&(id, _)) if self.config.temperature == 0.0 => Ok(id),
            Some(_) => Ok(self.filter.choose_of_top(top, &self.config, random::uniform(self.config.seed, position as u64))),
        }
    }

    fn penalise(&mut self, logits: &[f32], history: &[u32]) {
        self.penalised.clear();
        self.penalised.extend_from_slice(logits);
        if self.penalty_round.len() < logits.len() {
            self.penalty_round.resize(logits.len(), 0);
        }
        // An id is penalised once however often it occurs: `penalty_round` remembers the round in which it was.
        self.round = self.round.wrapping_add(1);
        if self.round == 0 {
            self.penalty_round.fill(0);
            self.round = 1;
        }
        let penalty = self.config.repetition_penalty;
        let window = self.config.repetition_window.unwrap_or(usize::MAX).min(history.len());
        for &id in &history[history.len() - window..] {
            let Some(logit) = self.penalised.get_mut(id as usize) else { continue };
            if std::mem::replace(&mut self.penalty_round[id as usize], self.round) != self.round {
                *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
            }
        }
    }
}

/// The index of the largest logit, the lowest among equals.
pub fn argmax(logits: &[f32]) -> Result<usize, SampleError> {
    let mut best = 0;
    let mut largest = f32::NEG_INFINITY;
    for (id, &value) in logits.iter().enumerate() {
        if value.is_nan() || value == f32::INFINITY {
            return Err(SampleError::NotANumber { id, value });
        }
        if value > largest {
            largest = value;
            best = id;
        }
    }
    match largest {
        f32::NEG_INFINITY if logits.is_empty() => Err(SampleError::NoLogits),
        f32::NEG_INFINITY => Err(SampleError::AllForbidden { rows: logits.len() }),
        _ => Ok(best),
    }
}

#[cfg(test)]
mod tests;

//! What may change or forbid tokens before one is chosen: grammars, biases, functions of the caller.

use crate::Error;
use qhx_ir::IdMask;

/// Changes the logits from which the next token of one sequence is chosen, before penalties and filters. One processor serves one sequence.
///
/// ```
/// use qhx_runtime::LogitProcessor;
///
/// /// Never says the same token twice in a row.
/// struct NoEcho;
///
/// impl LogitProcessor for NoEcho {
///     fn process(&mut self, ids: &[u32], logits: &mut [f32]) {
///         if let Some(logit) = ids.last().and_then(|&id| logits.get_mut(id as usize)) {
///             *logit = f32::NEG_INFINITY;
///         }
///     }
/// }
/// ```
pub trait LogitProcessor: Send {
    /// Changes `logits`; minus infinity forbids an id. `ids` is everything before the token: the prompt, then what was chosen.
    fn process(&mut self, ids: &[u32], logits: &mut [f32]);

    /// The ids that are allowed next, for a processor that does nothing but forbid: greedy decoding then needs no row of logits on the host, and this may be computed while
    /// the device works. A processor that gives a mask is not asked to [`LogitProcessor::process`] then.
    fn mask(&mut self, _ids: &[u32]) -> Option<IdMask> {
        None
    }

    /// The tokens that must follow `chosen`, which was chosen after `ids`, because this processor allows nothing else at their places. They are taken without asking the model, and
    /// computed together. At most `most` of them are of use.
    fn forced(&mut self, _ids: &[u32], _chosen: u32, _most: usize) -> Vec<u32> {
        Vec::new()
    }

    /// Why it allows no token, where it does not know how to go on: the answer then ends with this error.
    fn problem(&self) -> Option<Error> {
        None
    }
}

/// Adds to the logits of some ids.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LogitBias(pub Vec<(u32, f32)>);

impl LogitProcessor for LogitBias {
    fn process(&mut self, _: &[u32], logits: &mut [f32]) {
        for &(id, bias) in &self.0 {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit += bias;
            }
        }
    }
}

/// Makes tokens less probable that the answer already has, as `presence_penalty` and `frequency_penalty` of the OpenAI API do.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OccurrencePenalty {
    presence: f32,
    frequency: f32,
    /// Ids of the prompt, which do not count: as many as there are before the first token.
    prompt: Option<usize>,
}

impl OccurrencePenalty {
    /// `presence` is taken from the logit of every token that has occurred, `frequency` for each time that it has.
    pub fn new(presence: f32, frequency: f32) -> Self {
        Self { presence, frequency, prompt: None }
    }
}

impl LogitProcessor for OccurrencePenalty {
    fn process(&mut self, ids: &[u32], logits: &mut [f32]) {
        let prompt = *self.prompt.get_or_insert(ids.len());
        let mut answer = ids.get(prompt..).unwrap_or_default().to_vec();
        answer.sort_unstable();
        for same in answer.chunk_by(|a, b| a == b) {
            if let Some(logit) = logits.get_mut(same[0] as usize) {
                *logit -= self.presence + self.frequency * same.len() as f32;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_answered_is_penalised() {
        let mut penalty = OccurrencePenalty::new(1.0, 0.5);
        let mut logits = [0.0; 5];
        penalty.process(&[4, 4], &mut logits);
        assert_eq!(logits, [0.0; 5]);
        penalty.process(&[4, 4, 1, 2, 1, 9], &mut logits);
        assert_eq!(logits, [0.0, -2.0, -1.5, 0.0, 0.0]);
    }
}

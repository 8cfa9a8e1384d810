//! What may change or forbid tokens before one is chosen: grammars, biases, functions of the caller.

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

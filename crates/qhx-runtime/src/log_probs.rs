//! How probable tokens were.

use qhx_ir::{RowResult, Want};

/// How probable a token was, by the model's own logits: before penalties, biases, grammars, temperature and filters.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct TokenLogProbs {
    /// The token.
    pub id: u32,
    /// The natural logarithm of its probability.
    pub log_prob: f32,
    /// The most probable tokens with theirs, the most probable first.
    pub top: Vec<(u32, f32)>,
}

impl TokenLogProbs {
    /// Of token `id` by a row of logits, with as many of the most probable.
    pub(crate) fn of(logits: &[f32], id: u32, top: usize) -> Self {
        let want = Want::LogProbs { target: id, top: top.min(logits.len()) };
        match want.of(logits) {
            Some(Ok(RowResult::LogProbs { target, top })) if (id as usize) < logits.len() => Self { id, log_prob: target, top },
            _ => Self { id, log_prob: f32::NEG_INFINITY, top: Vec::new() },
        }
    }
}

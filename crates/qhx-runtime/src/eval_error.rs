//! What can be wrong with a text that a model is evaluated on.

/// Why a text cannot be used to evaluate a model.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EvalError {
    /// There is nothing to score.
    #[error("the text has {tokens} token{s}, but at least 2 are needed: the first one is only read, the others are scored", s = if *tokens == 1 { "" } else { "s" })]
    TooShort {
        /// What the tokenizer made of it.
        tokens: usize,
    },
    /// A window that the model has no room for, or in which nothing is scored.
    #[error("a window of {window} tokens cannot be used: expected 2 to {most} for this model")]
    Window {
        /// What was asked for.
        window: usize,
        /// The model's context.
        most: usize,
    },
    /// The two models read the text as different tokens.
    #[error(
        "`{model}` and `{reference}` read this text as different tokens (the first difference is at token {at}), so their predictions cannot be compared"
    )]
    OtherTokens {
        /// The model that is evaluated.
        model: String,
        /// The one it is compared with.
        reference: String,
        /// Where they begin to differ.
        at: usize,
    },
    /// The two models choose from different numbers of tokens.
    #[error("`{model}` has {found} logits for each token, `{reference}` has {expected}: their predictions cannot be compared")]
    OtherVocabulary {
        /// The model that is evaluated.
        model: String,
        /// The one it is compared with.
        reference: String,
        /// Logits of the first.
        found: usize,
        /// Logits of the second.
        expected: usize,
    },
}

//! What the host writes into a graph before each execution and reads from it afterwards.

use qhx_ir::{Mask, Name};

/// What an input of a graph holds. All of them are f16.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Feed {
    /// Rows of a value that the call brings or another part made.
    Value(Name),
    /// Rows that are to be added to some rows of the call, zeros elsewhere.
    Scattered {
        /// The rows.
        rows: Name,
        /// The call's row of each.
        at: Name,
    },
    /// 0 where a query sees a key, [`MASKED`] where it does not: `[rows, keys]`.
    Mask {
        /// Who sees whom.
        mask: Mask,
        /// Which keys there are.
        keys: Keys,
        /// Rows of the slot's buffer; 0 without one.
        past: usize,
    },
    /// Factors on the numbers of a head, `[rows, 1, dim]`: cosines, 1 for numbers that do not turn.
    Cosine(Turn),
    /// Factors on the numbers that stand at their partners' places: sines, with the sign of the turn; 0 for numbers that do not turn.
    Sine(Turn),
    /// A KV slot's keys, head by head: `[kv_heads, context, dim]`.
    PastKeys(Name),
    /// A KV slot's values, head by head: `[kv_heads, context, dim]`.
    PastValues(Name),
    /// The last inputs of a convolution: `[kernel − 1, channels]`.
    Fifo(Name),
    /// A delta rule's state: `[heads, key_dim, value_dim]`.
    Delta(Name),
    /// 1 for valid rows, 0 for padding: `[rows, 1]`, one row for so many rows of the call.
    Valid(usize),
    /// What the mean of a group of rows, counted with padding as zeros, must be multiplied by: `[groups, 1]`.
    Pooled {
        /// Rows of the call in one row.
        per_row: usize,
        /// Rows in one group.
        size: usize,
    },
}

/// The keys that a mask speaks of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Keys {
    /// The slot's rows from before this execution, then the rows of this execution.
    PastAndNew,
    /// The slot's rows, those of this execution among them.
    Past,
    /// The rows of this execution alone, each standing for so many rows of the call.
    Rows(usize),
}

/// A rotary embedding at the call's positions.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Turn {
    /// The rotary.
    pub rotary: Name,
    /// The value with the positions.
    pub positions: Name,
    /// Numbers in a head.
    pub dim: usize,
}

/// What an output of a graph holds. All of them are f16.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Drain {
    /// Rows of a value.
    Value(Name),
    /// The new keys of a KV slot, `[rows, kv_heads, dim]`.
    Keys(Name),
    /// The new values of a KV slot, `[rows, kv_heads, dim]`.
    Values(Name),
    /// The inputs of a convolution, `[rows, channels]`.
    Fifo(Name),
    /// What the rows add to a delta rule's state after its decay, `[heads, key_dim, value_dim]`.
    Delta(Name),
    /// The logarithm of each row's decay, `[rows, heads]`: the host applies it to the state, which it keeps in f32.
    Decay(Name),
}

/// What is added to the score of a key that a query does not see: far below any score, and in f16 still no infinity when a score is added.
pub const MASKED: f32 = -30000.0;

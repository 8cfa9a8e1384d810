//! What the host writes to a graph's inputs before each execution and reads from its outputs afterwards.

use qhx_ir::{Mask, Name};

/// The content of a graph input. All inputs are f16.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Feed {
    /// Rows of a value that is an input of the call or the result of another part.
    Value(Name),
    /// Rows to be added to some rows of the call; zeros elsewhere.
    Scattered {
        /// The rows.
        rows: Name,
        /// The row of the call for each.
        at: Name,
    },
    /// 0 where a query sees a key, [`MASKED`] where it does not: `[rows, keys]`.
    Mask {
        /// The kind of mask.
        mask: Mask,
        /// The keys that it covers.
        keys: Keys,
        /// Rows of the slot's buffer; 0 without a slot.
        past: usize,
    },
    /// Factors on the values of a head, `[rows, 1, dim]`: cosines; 1 for values that are not rotated.
    Cosine(Turn),
    /// Factors on the partner of each value: sines, with the sign of the rotation; 0 for values that are not rotated.
    Sine(Turn),
    /// A KV slot's keys, head by head: `[kv_heads, context, dim]`.
    PastKeys(Name),
    /// A KV slot's values, head by head: `[kv_heads, context, dim]`.
    PastValues(Name),
    /// The last inputs of a convolution: `[kernel − 1, channels]`.
    Fifo(Name),
    /// A delta rule's state: `[heads, key_dim, value_dim]`.
    Delta(Name),
    /// 1 for valid rows, 0 for padding: `[rows, 1]`, one row per this many rows of the call.
    Valid(usize),
    /// The factor that corrects the mean of a group of rows in which padding counts as zeros: `[groups, 1]`.
    Pooled {
        /// Rows of the call in one row.
        per_row: usize,
        /// Rows in one group.
        size: usize,
    },
}

/// The keys that a mask covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Keys {
    /// The slot's rows from before this execution, then the rows of this execution.
    PastAndNew,
    /// The slot's rows, including those of this execution.
    Past,
    /// Only the rows of this execution, each for this many rows of the call.
    Rows(usize),
}

/// A rotary embedding at the call's positions.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Turn {
    /// The rotary.
    pub rotary: Name,
    /// The value with the positions.
    pub positions: Name,
    /// Head dimension.
    pub dim: usize,
}

/// The content of a graph output. All outputs are f16.
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
    /// What the rows add to the state of a delta rule after its decay, `[heads, key_dim, value_dim]`.
    Delta(Name),
    /// The logarithm of each row's decay, `[rows, heads]`: the host applies it to the state, which it keeps in f32.
    Decay(Name),
}

/// Added to the score of a masked key: far below any score, but still finite in f16 when a score is added.
pub const MASKED: f32 = -30000.0;

//! The operations, at the level of a whiteboard diagram.
//!
//! An op specifies *what* is computed, including numerics; *how* (fused, chunked, recurrent, with which instructions) is the device's choice.
//! Notation: `x[.., n]` has any leading dimensions. "Rows" are the first dimension. All values are f32 or i32; a norm, softmax or
//! activation is computed in f32.

use crate::Name;
use serde::{Deserialize, Serialize};
use std::fmt;

/// One step of a program. Its results are named after its path: see [`Op::outputs`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Op {
    /// Dotted path, unique in the program: `layers.7.ffn.down_proj`.
    pub path: Name,
    /// What it computes.
    pub op: OpKind,
}

/// What an op computes. A field that is a [`Name`] names a value, unless its doc says weight, slot or rotary.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum OpKind {
    /// Table rows: `y[t] = table[ids[t]] · scale`; `ids [S]` (i32), `y [S, width]`.
    Embed {
        /// Row indexes.
        ids: Name,
        /// Weight `[rows, width]`.
        table: Name,
        /// Factor on every element.
        #[serde(default = "one", skip_serializing_if = "is_one")]
        scale: f32,
    },
    /// Weighted table rows: `y[t] = Σ_j factor[t, j] · table[index[t, j]]`, for interpolated position tables.
    Interpolate {
        /// Row indexes `[S, taps]` (i32).
        index: Name,
        /// Factors `[S, taps]`.
        factor: Name,
        /// Weight `[rows, width]`.
        table: Name,
    },
    /// `y = clip_out(clip_in(x) · Wᵀ + b)`: `x [.., in]`, weight `[out, in]`, `y [.., out]`.
    Linear {
        /// Input.
        x: Name,
        /// Weight `[out, in]`.
        weight: Name,
        /// Weight `[out]`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bias: Option<Name>,
        /// How `x` enters the product.
        #[serde(default, skip_serializing_if = "ActivationForm::is_f32")]
        activation: ActivationForm,
        /// Bounds on input and output.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        clip: Option<Clip>,
    },
    /// `y = x / sqrt(mean(x²) + eps) · weight` over the last dimension.
    RmsNorm {
        /// Input.
        x: Name,
        /// Weight `[n]`; absent: 1.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        weight: Option<Name>,
        /// Added under the root.
        eps: f32,
    },
    /// `y = (x − mean) / sqrt(var + eps) · weight + bias` over the last dimension.
    LayerNorm {
        /// Input.
        x: Name,
        /// Weight `[n]`.
        weight: Name,
        /// Weight `[n]`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bias: Option<Name>,
        /// Added under the root.
        eps: f32,
    },
    /// Rotary embedding of `x [S, heads, dim]`; what is rotated and how is data: see [`crate::Rotary`].
    Rope {
        /// Input.
        x: Name,
        /// `[streams, S]` (i32).
        positions: Name,
        /// The rotary's name in the program.
        rotary: Name,
    },
    /// Softmax attention: `softmax(mask(cap(q·kᵀ · scale + q·relᵀ))) · v`; query head `h` uses key head `h / (heads / kv_heads)`.
    /// Never looks across segments; causal order is the row's index in its slot (or segment), never `positions`.
    Attend {
        /// Queries `[S, heads, dim]`.
        q: Name,
        /// New keys and values; absent where the slot is only read (shared by another op that wrote it earlier in this call).
        #[serde(default, skip_serializing_if = "Option::is_none")]
        kv: Option<KeyValue>,
        /// KV slot; absent: keys are those of this segment alone.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        slot: Option<Name>,
        /// Which keys each query sees.
        mask: Mask,
        /// Factor on `q·k`.
        scale: f32,
        /// `s → cap · tanh(s / cap)` before the mask.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        softcap: Option<f32>,
        /// Weight `[distances, heads, dim]`: adds `q_i · rel[i − j]` to the (scaled) score; distances beyond the table add nothing.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        relative_keys: Option<Name>,
    },
    /// Causal depthwise convolution over rows: `y[t, c] = act(bias[c] + Σ_j weight[c, j] · x[t − K + 1 + j, c])`; rows before the segment
    /// come from the slot, or are zero.
    ShortConv {
        /// Input `[S, channels]`.
        x: Name,
        /// Weight `[channels, K]`; the last tap is the current row.
        weight: Name,
        /// Weight `[channels]`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bias: Option<Name>,
        /// FIFO slot with the last `K − 1` inputs.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        slot: Option<Name>,
        /// Applied to the sum.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        activation: Option<Activation>,
    },
    /// Gated delta rule, per value head `h` with key head `h / (value_heads / key_heads)`:
    /// `q, k ← l2(q)·scale, l2(k)`; `S ← exp(−exp(a_log)·softplus(a + dt_bias))·S`; `S ← S + k (sigmoid(b)·(v − Sᵀk))ᵀ`; `y = Sᵀq`.
    GatedDelta {
        /// Queries `[S, key_heads, key_dim]`, not yet normalised.
        q: Name,
        /// Keys `[S, key_heads, key_dim]`, not yet normalised.
        k: Name,
        /// Values `[S, value_heads, value_dim]`.
        v: Name,
        /// Decay input `[S, value_heads]`.
        a: Name,
        /// Step input `[S, value_heads]`.
        b: Name,
        /// Weight `[value_heads]`.
        a_log: Name,
        /// Weight `[value_heads]`.
        dt_bias: Name,
        /// Delta slot.
        slot: Name,
        /// Factor on the normalised queries.
        scale: f32,
        /// Added to the sum of squares in the l2 norms.
        eps: f32,
    },
    /// Chooses experts from router scores `[S, experts]`. Produces `PATH.experts` (i32 `[S, k]`) and `PATH.weights` (f32 `[S, k]`).
    Route {
        /// Router scores.
        scores: Name,
        /// How experts are chosen and weighted.
        method: Routing,
    },
    /// Sum over chosen experts of `weight · down(act(gate(x)) · up(x))`, per row; the products of gate and up may have biases.
    Experts {
        /// Input `[S, hidden]`.
        x: Name,
        /// Chosen experts `[S, k]` (i32).
        experts: Name,
        /// Their weights `[S, k]`.
        weights: Name,
        /// Weight `[experts, ffn, hidden]`.
        gate: Name,
        /// Weight `[experts, ffn, hidden]`.
        up: Name,
        /// Weight `[experts, hidden, ffn]`.
        down: Name,
        /// The gate's activation function.
        activation: Activation,
        /// How rows enter the three products.
        #[serde(default, skip_serializing_if = "ActivationForm::is_f32")]
        form: ActivationForm,
        /// Added to the products of gate and up.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bias: Option<ExpertBias>,
        /// Where each expert's matrices are in the weights (i32 `[n]`), of as many experts as may be chosen; below 0: they are not there, and choices of this expert count
        /// nothing. Absent: each expert is where its number says.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        held: Option<Name>,
    },
    /// `y = act(gate) · up`, elementwise.
    GateAct {
        /// Gate.
        gate: Name,
        /// What is gated; same shape.
        up: Name,
        /// The gate's activation function.
        activation: Activation,
    },
    /// `y = act(x)`, elementwise.
    Activate {
        /// Input.
        x: Name,
        /// The function.
        activation: Activation,
    },
    /// `y = a + b`, same shape.
    Add {
        /// Left.
        a: Name,
        /// Right.
        b: Name,
    },
    /// `y = a · b`, same shape.
    Mul {
        /// Left.
        a: Name,
        /// Right.
        b: Name,
    },
    /// `y = x · factor · weight`, the weight along the last dimension.
    Scale {
        /// Input.
        x: Name,
        /// The constant factor.
        #[serde(default = "one", skip_serializing_if = "is_one")]
        factor: f32,
        /// Weight `[n]` (n the last dimension) or `[1]`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        weight: Option<Name>,
    },
    /// `y = x · H` over the last dimension, with the symmetric orthogonal matrix `H` of [`crate::hadamard`]: its own inverse. The largest odd factor of the last
    /// dimension is at most [`crate::hadamard::LARGEST_ODD`].
    Hadamard {
        /// Input.
        x: Name,
    },
    /// `y = cap · tanh(x / cap)`.
    Softcap {
        /// Input.
        x: Name,
        /// The bound.
        cap: f32,
    },
    /// `y = min(max(x, low), high)`.
    Clamp {
        /// Input.
        x: Name,
        /// Lower bound.
        low: f32,
        /// Upper bound.
        high: f32,
    },
    /// Concatenates values along the last dimension; all other dimensions are equal.
    Concat {
        /// At least one.
        xs: Vec<Name>,
    },
    /// `length` entries of dimension `axis` from `start`; `axis` must not be the rows.
    Slice {
        /// Input.
        x: Name,
        /// 1 or more.
        axis: usize,
        /// First entry.
        start: usize,
        /// Number of entries.
        length: usize,
    },
    /// The same elements in another shape of equal volume.
    Reshape {
        /// Input.
        x: Name,
        /// Shape of the result.
        shape: crate::Shape,
    },
    /// Gathers rows: `y[i] = x[rows[i]]`.
    Gather {
        /// Input `[T, ..]`.
        x: Name,
        /// Row indexes `[N]` (i32).
        rows: Name,
    },
    /// `x` with `x[at[r]]` replaced by `rows[r]`. R = 0 is allowed.
    ScatterRows {
        /// Input `[T, n]`.
        x: Name,
        /// New rows `[R, n]`.
        rows: Name,
        /// Their row indexes `[R]` (i32), all different.
        at: Name,
    },
    /// `x` with `rows[r]` added to `x[at[r]]`. R = 0 is allowed.
    ScatterAddRows {
        /// Input `[T, n]`.
        x: Name,
        /// Rows to add `[R, n]`.
        rows: Name,
        /// Their row indexes `[R]` (i32), all different.
        at: Name,
    },
    /// 2-D convolution of `x [S, width, in]` (rows are one axis) with weight `[out, kernel, kernel, in]`, zeros around each segment:
    /// `y [ceil(S/stride), ceil(width/stride), out]`, `padding = (kernel − 1) / 2`, kernel odd.
    Conv2d {
        /// Input.
        x: Name,
        /// Weight `[out, kernel_rows, kernel_width, in]`.
        weight: Name,
        /// Weight `[out]`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bias: Option<Name>,
        /// Step along both axes.
        stride: usize,
    },
    /// Mean of each `size` consecutive rows: `[S, n] → [S/size, n]` (front ends emit rows in pool-block order). For a segment's last, partial
    /// group it is the mean of the valid rows.
    Pool {
        /// Input.
        x: Name,
        /// Rows per result.
        size: usize,
    },
}

/// The new keys and values of an [`OpKind::Attend`], both `[S, kv_heads, dim]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyValue {
    /// Keys.
    pub k: Name,
    /// Values.
    pub v: Name,
}

/// The biases of an [`OpKind::Experts`], weights `[experts, ffn]` both.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertBias {
    /// Of the gate, before its activation function.
    pub gate: Name,
    /// Of what is gated.
    pub up: Name,
}

/// Bounds of a clipped linear.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Clip {
    /// Low and high on the input.
    pub input: [f32; 2],
    /// Low and high on the output (bias included).
    pub output: [f32; 2],
}

/// How the rows of an activation enter a product with a weight.
///
/// Integer forms: `amax` = largest magnitude of the group (a row, or 32 neighbours in it), `scale = amax / 127`,
/// `q = round_half_even(x · (127 / amax))` (0 where amax is 0, or so small that `127 / amax` overflows), both divisions in f32. Integer products
/// are summed exactly; scales are applied in f32. No scale spans rows, so splitting a prompt into chunks changes nothing. Integer forms need
/// integer weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ActivationForm {
    /// Unchanged.
    #[default]
    F32,
    /// Rounded to f16 first.
    F16,
    /// int8, one scale per row.
    I8Row,
    /// int8, one scale per 32 values of a row.
    I8Block32,
}

impl fmt::Display for ActivationForm {
    /// As programs write it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::I8Row => "i8_row",
            Self::I8Block32 => "i8_block32",
        })
    }
}

impl ActivationForm {
    /// Whether this is the plain form.
    pub fn is_f32(&self) -> bool {
        *self == Self::F32
    }

    /// Whether rows are quantised to integers.
    pub fn is_integer(self) -> bool {
        matches!(self, Self::I8Row | Self::I8Block32)
    }
}

/// Elementwise functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `x · sigmoid(x)`.
    Silu,
    /// `0.5x(1 + tanh(√(2/π)(x + 0.044715x³)))`.
    GeluTanh,
    /// `0.5x(1 + erf(x/√2))`.
    GeluErf,
    /// `1 / (1 + exp(−x))`.
    Sigmoid,
    /// `max(x, 0)`.
    Relu,
}

/// Which keys a query sees; `i` and `j` are indexes in the slot (or, without slot, in the segment).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mask {
    /// All keys of the segment.
    Full,
    /// `j ≤ i`.
    Causal,
    /// `j ≤ i` and `i − j < window`.
    Window(usize),
}

/// How experts are chosen from scores `r`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Routing {
    /// Two winners (lowest index at a tie), each weighted by a softmax over the experts within a relative band of it, not renormalised:
    /// `e1 = argmax r`, dropped where `(r[e1] − r[e]) / max(|r[e]|, r[e1]) > 2·jitter` in f32 (0/0 drops nothing); then the same without `e1`,
    /// gaps measured on the original `r`.
    SparseMixer {
        /// Half the band.
        jitter: f32,
    },
    /// The `top_k` largest of `softmax(r)`, in descending order (lowest index at a tie).
    Softmax {
        /// Number of experts per row.
        top_k: usize,
        /// Whether the chosen weights are divided by their sum.
        renormalise: bool,
    },
}

impl Routing {
    /// Experts per row.
    pub fn experts_per_row(&self) -> usize {
        match *self {
            Self::SparseMixer { .. } => 2,
            Self::Softmax { top_k, .. } => top_k,
        }
    }
}

impl Op {
    /// The names of the op's results: its path, or for `route` `PATH.experts` and `PATH.weights`.
    pub fn outputs(&self) -> Vec<Name> {
        match self.op {
            OpKind::Route { .. } => vec![format!("{}.experts", self.path).into(), format!("{}.weights", self.path).into()],
            _ => vec![self.path.clone()],
        }
    }
}

impl OpKind {
    /// The op's name as programs write it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Embed { .. } => "embed",
            Self::Interpolate { .. } => "interpolate",
            Self::Linear { .. } => "linear",
            Self::RmsNorm { .. } => "rms_norm",
            Self::LayerNorm { .. } => "layer_norm",
            Self::Rope { .. } => "rope",
            Self::Attend { .. } => "attend",
            Self::ShortConv { .. } => "short_conv",
            Self::GatedDelta { .. } => "gated_delta",
            Self::Route { .. } => "route",
            Self::Experts { .. } => "experts",
            Self::GateAct { .. } => "gate_act",
            Self::Activate { .. } => "activate",
            Self::Add { .. } => "add",
            Self::Mul { .. } => "mul",
            Self::Scale { .. } => "scale",
            Self::Hadamard { .. } => "hadamard",
            Self::Softcap { .. } => "softcap",
            Self::Clamp { .. } => "clamp",
            Self::Concat { .. } => "concat",
            Self::Slice { .. } => "slice",
            Self::Reshape { .. } => "reshape",
            Self::Gather { .. } => "gather",
            Self::ScatterRows { .. } => "scatter_rows",
            Self::ScatterAddRows { .. } => "scatter_add_rows",
            Self::Conv2d { .. } => "conv2d",
            Self::Pool { .. } => "pool",
        }
    }

    /// The values it reads, in the order of its fields.
    pub fn inputs(&self) -> Vec<&Name> {
        match self {
            Self::Embed { ids, .. } => vec![ids],
            Self::Interpolate { index, factor, .. } => vec![index, factor],
            Self::Linear { x, .. }
            | Self::RmsNorm { x, .. }
            | Self::LayerNorm { x, .. }
            | Self::ShortConv { x, .. }
            | Self::Activate { x, .. }
            | Self::Scale { x, .. }
            | Self::Hadamard { x }
            | Self::Softcap { x, .. }
            | Self::Clamp { x, .. }
            | Self::Slice { x, .. }
            | Self::Reshape { x, .. }
            | Self::Conv2d { x, .. }
            | Self::Pool { x, .. } => vec![x],
            Self::Rope { x, positions, .. } => vec![x, positions],
            Self::Attend { q, kv, .. } => std::iter::once(q).chain(kv.iter().flat_map(|kv| [&kv.k, &kv.v])).collect(),
            Self::GatedDelta { q, k, v, a, b, .. } => vec![q, k, v, a, b],
            Self::Route { scores, .. } => vec![scores],
            Self::Experts { x, experts, weights, held, .. } => [x, experts, weights].into_iter().chain(held).collect(),
            Self::GateAct { gate, up, .. } => vec![gate, up],
            Self::Add { a, b } | Self::Mul { a, b } => vec![a, b],
            Self::Concat { xs } => xs.iter().collect(),
            Self::Gather { x, rows } => vec![x, rows],
            Self::ScatterRows { x, rows, at } | Self::ScatterAddRows { x, rows, at } => vec![x, rows, at],
        }
    }

    /// The weights it reads.
    pub fn weights(&self) -> Vec<&Name> {
        match self {
            Self::Embed { table, .. } | Self::Interpolate { table, .. } => vec![table],
            Self::Linear { weight, bias, .. }
            | Self::LayerNorm { weight, bias, .. }
            | Self::ShortConv { weight, bias, .. }
            | Self::Conv2d { weight, bias, .. } => std::iter::once(weight).chain(bias).collect(),
            Self::RmsNorm { weight, .. } | Self::Scale { weight, .. } => weight.iter().collect(),
            Self::Attend { relative_keys, .. } => relative_keys.iter().collect(),
            Self::GatedDelta { a_log, dt_bias, .. } => vec![a_log, dt_bias],
            Self::Experts { gate, up, down, bias, .. } => {
                [gate, up, down].into_iter().chain(bias.iter().flat_map(|bias| [&bias.gate, &bias.up])).collect()
            }
            _ => vec![],
        }
    }

    /// Those of its weights whose rows are multiplied with or looked up, before the others in [`OpKind::weights`]: they alone may be stored as integers.
    pub fn matrices(&self) -> Vec<&Name> {
        match self {
            Self::Embed { table, .. } | Self::Interpolate { table, .. } => vec![table],
            Self::Linear { weight, .. } => vec![weight],
            Self::Experts { gate, up, down, .. } => vec![gate, up, down],
            _ => vec![],
        }
    }

    /// The slot it uses.
    pub fn slot(&self) -> Option<&Name> {
        match self {
            Self::Attend { slot, .. } | Self::ShortConv { slot, .. } => slot.as_ref(),
            Self::GatedDelta { slot, .. } => Some(slot),
            _ => None,
        }
    }

    /// Whether rows of the result depend on other rows; only for these ops do segments matter.
    pub fn mixes_rows(&self) -> bool {
        matches!(self, Self::Attend { .. } | Self::ShortConv { .. } | Self::GatedDelta { .. } | Self::Conv2d { .. } | Self::Pool { .. })
    }
}

fn one() -> f32 {
    1.0
}

fn is_one(x: &f32) -> bool {
    *x == 1.0
}

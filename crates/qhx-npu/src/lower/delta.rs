//! The gated delta rule, in chunks of rows. Per value head, with `G_t` the sum of log-decays up to row t and `S` the state before the chunk:
//!
//! `δ_t = β_t (v_t − e^{G_t} Sᵀk_t − Σ_{s<t} e^{G_t−G_s} (k_t·k_s) δ_s)`, `y_t = e^{G_t} Sᵀq_t + Σ_{s≤t} e^{G_t−G_s} (q_t·k_s) δ_s`,
//! and after it `S ← e^{G_c} S + Σ_s e^{G_c−G_s} k_s δ_sᵀ`.
//!
//! The first equation is `(I + A) δ = rhs` with a strictly lower triangular A. f16 suffices if nothing grows: decays appear only as exponentials of non-positive
//! sums, each summed directly (never as a difference of long sums); the inverse of I + A is assembled from the inverses of ever larger diagonal blocks,
//! whose entries stay small where powers of A would overflow; the state itself is kept by the host in f32: a graph reads it and returns what is to be
//! added.

use super::{Drain, Feed, Lowering};
use crate::graph::TensorId;
use qhx_ir::{DeviceError, Name, OpKind};

/// Rows per chunk: beyond this, pairs of rows cost more than an update of the state.
const CHUNK: usize = 32;

/// The inputs of a chunk, per value head.
struct Chunk {
    /// `[heads, rows, key_dim]`, normalised.
    q: TensorId,
    /// `[heads, rows, key_dim]`, normalised.
    k: TensorId,
    /// `[heads, rows, value_dim]`.
    v: TensorId,
    /// Log-decays `[heads, rows]`.
    decay: TensorId,
    /// `[heads, rows, 1]`.
    step: TensorId,
    heads: usize,
    rows: usize,
}

impl Lowering<'_> {
    pub(super) fn gated_delta(&mut self, op: &OpKind) -> Result<TensorId, DeviceError> {
        let OpKind::GatedDelta { q, k, v, a, b, a_log, dt_bias, slot, scale, eps } = op else { unreachable!("called for gated_delta") };
        let (queries, keys, values) = (self.value(q)?, self.value(k)?, self.value(v)?);
        let [rows, heads, value_dim] = self.builder.dims(values)[..] else { unreachable!("checked: [rows, heads, dim]") };
        let key_dim = self.builder.width(queries);
        let q = self.unit_heads(queries, heads, *scale, *eps);
        let k = self.unit_heads(keys, heads, 1.0, *eps);
        let v = self.builder.transpose("values", values, &[1, 0, 2]);
        let decay = self.log_decay(a, a_log, dt_bias)?;
        self.drain(decay, Drain::Decay(slot.clone()));
        let step = self.value(b)?;
        let step = self.sigmoid(step);
        // A row of padding neither decays the state nor adds to it.
        let (decay, step) = (self.of_valid_rows(decay), self.of_valid_rows(step));
        let decay = self.builder.transpose("decay_by_head", decay, &[1, 0]);
        let step = self.builder.transpose("step_by_head", step, &[1, 0]);
        let step = self.builder.reshape("step_column", step, &[heads, rows, 1]);
        let before = self.feed(Feed::Delta(slot.clone()), &[heads, key_dim, value_dim]);
        let (mut state, mut added): (TensorId, Option<TensorId>) = (before, None);
        let mut results = Vec::new();
        for start in (0..rows).step_by(CHUNK) {
            let length = CHUNK.min(rows - start);
            let cut = |lowering: &mut Self, x| lowering.builder.slice("chunk", x, 1, start, length);
            let chunk = Chunk {
                q: cut(self, q),
                k: cut(self, k),
                v: cut(self, v),
                decay: cut(self, decay),
                step: cut(self, step),
                heads,
                rows: length,
            };
            let (y, new, whole) = self.delta_chunk(&chunk, state);
            results.push(y);
            let total = match added {
                None => new,
                Some(added) => {
                    let kept = self.builder.multiply("kept", added, whole);
                    self.builder.add("added", kept, new)
                }
            };
            added = Some(total);
            if start + length < rows {
                let kept = self.builder.multiply("state_kept", state, whole);
                state = self.builder.add("state", kept, new);
            }
        }
        if let Some(added) = added {
            self.drain(added, Drain::Delta(slot.clone()));
        }
        let y = self.builder.concat("all", &results, 1);
        Ok(self.builder.transpose("by_row", y, &[1, 0, 2]))
    }

    /// `x / sqrt(Σx² + eps) · scale` per key head, then a copy for each value head of the group: `[heads, rows, dim]`.
    fn unit_heads(&mut self, x: TensorId, heads: usize, scale: f32, eps: f32) -> TensorId {
        let [rows, key_heads, dim] = self.builder.dims(x)[..] else { unreachable!("checked: [rows, heads, dim]") };
        // The root of a mean is the root of a sum, up to a factor.
        let gain = scale / (dim as f32).sqrt();
        let gamma = self.builder.shared(&format!("gain.{dim}.{gain}"), &[dim], || vec![gain; dim]);
        let unit = self.root_mean_square(x, gamma, eps / dim as f32);
        let unit = self.builder.reshape("by_key_head", unit, &[rows, key_heads, 1, dim]);
        let copies = vec![unit; heads / key_heads];
        let all = self.builder.concat("for_group", &copies, 2);
        let all = self.builder.reshape("unit", all, &[rows, heads, dim]);
        self.builder.transpose("unit_by_head", all, &[1, 0, 2])
    }

    /// `−exp(a_log) · softplus(a + dt_bias)`, accurate to f16's last digits even where it is small: `[rows, heads]`.
    fn log_decay(&mut self, a: &Name, a_log: &Name, dt_bias: &Name) -> Result<TensorId, DeviceError> {
        let heads = self.program.weights[a_log].shape.clone();
        let rate = self.derived(&format!("{a_log}.rate"), &[a_log], &heads, |w| w.concat().iter().map(|x| -x.exp()).collect())?;
        let shift = self.plain_weight(dt_bias)?;
        let a = self.value(a)?;
        let x = self.builder.add("shifted", a, shift);
        // softplus(x) = max(x, 0) + ln(1 + e), e = exp(−|x|); ln(1 + e) = 2 artanh(u), u = e / (2 + e) ≤ ⅓, whose series keeps small values exact.
        let positive = self.builder.unary("Relu", "positive", x);
        let size = self.builder.unary("ElementWiseAbs", "size", x);
        let minus = self.builder.unary("ElementWiseNeg", "minus", size);
        let e = self.exponential(minus);
        let b = &mut self.builder;
        let two = b.number(2.0);
        let below = b.add("below", e, two);
        let u = b.binary("ElementWiseDivide", "ratio", e, below);
        let square = b.multiply("square", u, u);
        let mut sum = b.number(2.0 / 7.0);
        for c in [2.0 / 5.0, 2.0 / 3.0, 2.0] {
            let product = b.multiply("term", sum, square);
            let c = b.number(c);
            sum = b.add("terms", product, c);
        }
        let log = b.multiply("log", sum, u);
        let softplus = b.add("softplus", positive, log);
        Ok(b.multiply("log_decay", softplus, rate))
    }

    fn of_valid_rows(&mut self, x: TensorId) -> TensorId {
        let rows = self.builder.dims(x)[0];
        if rows == 1 {
            return x;
        }
        let valid = self.feed(Feed::Valid(1), &[rows, 1]);
        self.builder.multiply("of_valid", x, valid)
    }

    /// The chunk's results `[heads, rows, value_dim]`, what it adds to the state, and the decay of the state over it `[heads, 1, 1]`.
    fn delta_chunk(&mut self, c: &Chunk, state: TensorId) -> (TensorId, TensorId, TensorId) {
        let between = self.decays_between(c);
        let since = self.decays_since(c);
        let read = self.builder.matmul("read", c.k, state, false);
        let read = self.builder.multiply("read_decayed", read, since);
        let error = self.builder.subtract("error", c.v, read);
        let mut delta = self.builder.multiply("delta", error, c.step);
        if c.rows > 1 {
            let inverse = self.inverse(c, between);
            delta = self.builder.matmul("solved", inverse, delta, false);
        }
        let from_state = self.builder.matmul("from_state", c.q, state, false);
        let from_state = self.builder.multiply("from_state_decayed", from_state, since);
        let pairs = self.builder.matmul("pairs", c.q, c.k, true);
        let pairs = self.builder.multiply("pairs_decayed", pairs, between);
        let from_chunk = self.builder.matmul("from_chunk", pairs, delta, false);
        let y = self.builder.add("read_out", from_state, from_chunk);
        // The decay of each row up to the end is the last row of the decays between rows.
        let left = self.builder.slice("left", between, 1, c.rows - 1, 1);
        let left = self.builder.reshape("left_column", left, &[c.heads, c.rows, 1]);
        let kept = self.builder.multiply("kept_deltas", delta, left);
        let keys = self.builder.transpose("keys_turned", c.k, &[0, 2, 1]);
        let added = self.builder.matmul("outer", keys, kept, false);
        (y, added, self.builder.slice("whole", since, 1, c.rows - 1, 1))
    }

    /// `e^{G_t − G_s}` for s ≤ t, 0 for s > t: `[heads, rows, rows]`. Each sum of decays is a product with ones, so that it is rounded once.
    fn decays_between(&mut self, c: &Chunk) -> TensorId {
        let n = c.rows;
        let at = |from: fn(usize, usize, usize) -> bool| {
            let places = (0..n).flat_map(move |t| (0..n).flat_map(move |s| (0..n).map(move |i| (t, s, i))));
            places.map(|(t, s, i)| if from(t, s, i) { 1.0 } else { 0.0 }).collect()
        };
        let ones = self.builder.shared(&format!("between.{n}"), &[n * n, n], || at(|t, s, i| s < i && i <= t));
        let sums = self.builder.fully_connected("sums_between", c.decay, ones, None);
        let sums = self.builder.reshape("sums_by_pair", sums, &[c.heads, n, n]);
        let decays = self.exponential(sums);
        if n == 1 {
            return decays;
        }
        let lower = self.triangle("lower", n, |t, s| s <= t);
        self.builder.multiply("decays_between", decays, lower)
    }

    /// `e^{G_t}`: `[heads, rows, 1]`.
    fn decays_since(&mut self, c: &Chunk) -> TensorId {
        let n = c.rows;
        let ones = self
            .builder
            .shared(&format!("since.{n}"), &[n, n], || (0..n).flat_map(|t| (0..n).map(move |i| if i <= t { 1.0 } else { 0.0 })).collect());
        let sums = self.builder.fully_connected("sums_since", c.decay, ones, None);
        let decays = self.exponential(sums);
        self.builder.reshape("decays_since", decays, &[c.heads, n, 1])
    }

    /// `(I + A)⁻¹`. With B the inverse of the blocks of size n on the diagonal, and C the part of A just below them, `B − B·C·B` is that of the
    /// blocks of size 2n.
    fn inverse(&mut self, c: &Chunk, between: TensorId) -> TensorId {
        let n = c.rows;
        let pairs = self.builder.matmul("key_pairs", c.k, c.k, true);
        let decayed = self.builder.multiply("key_pairs_decayed", pairs, between);
        let a = self.builder.multiply("coupling", decayed, c.step);
        let identity = self.triangle("identity", n, |t, s| t == s);
        let mut inverse = None;
        let mut size = 1;
        while size < n {
            let below = self.triangle(&format!("below.{size}"), n, |t, s| t / (2 * size) == s / (2 * size) && t / size > s / size);
            let part = self.builder.multiply("block", a, below);
            inverse = Some(match inverse {
                None => self.builder.subtract("inverse", identity, part),
                Some(inverse) => {
                    let right = self.builder.matmul("block_right", part, inverse, false);
                    let both = self.builder.matmul("block_both", inverse, right, false);
                    self.builder.subtract("inverse", inverse, both)
                }
            });
            size *= 2;
        }
        inverse.unwrap_or(identity)
    }

    /// A constant `[1, n, n]` of ones where `is` holds.
    fn triangle(&mut self, name: &str, n: usize, is: impl Fn(usize, usize) -> bool) -> TensorId {
        self.builder
            .shared(&format!("{name}.{n}"), &[1, n, n], || (0..n * n).map(|at| if is(at / n, at % n) { 1.0 } else { 0.0 }).collect())
    }
}

//! Ops with a running state: the short causal convolution and the gated delta rule.

use super::{
    elementwise::{activate, sigmoid, softplus},
    frame::Frame,
    state::Content,
};
use crate::{Activation, Name, OpKind};

pub(super) fn short_conv(
    frame: &mut Frame<'_>,
    x: &Name,
    weight: &Name,
    bias: Option<&Name>,
    slot: Option<&Name>,
    activation: Option<Activation>,
) -> Vec<f32> {
    let [rows, channels] = *frame.shape(x) else { unreachable!("checked: [rows, channels]") };
    let kernel = frame.weight(weight).columns();
    let taps = frame.plain_weight(weight);
    let bias = bias.map_or(vec![0.0; channels], |b| frame.plain_weight(b));
    let mut y = vec![0.0; rows * channels];
    for number in 0..frame.spans.len() {
        let valid = frame.spans[number].rows(frame.rows_per_row(x));
        // The K − 1 rows from before, then the segment's own.
        let mut history = slot.map_or(vec![0.0; (kernel - 1) * channels], |slot| committed(frame, number, slot));
        history.extend_from_slice(&frame.f32s(x)[valid.start * channels..valid.end * channels]);
        for (t, row) in valid.enumerate() {
            for c in 0..channels {
                let sum: f64 = (0..kernel).map(|j| taps[c * kernel + j] as f64 * history[(t + j) * channels + c] as f64).sum();
                let sum = sum + bias[c] as f64;
                y[row * channels + c] = activation.map_or(sum, |a| activate(sum, a)) as f32;
            }
        }
        if let Some(slot) = slot {
            let after = |rows: usize| history[rows * channels..][..(kernel - 1) * channels].to_vec();
            let (rows, span) = (history.len() / channels + 1 - kernel, &mut frame.spans[number]);
            if span.partial && rows > 1 {
                span.pending.steps.insert(slot.clone(), (1..rows).map(after).collect());
            }
            span.pending.slots.insert(slot.clone(), Content::Recurrent(after(rows)));
        }
    }
    y
}

pub(super) fn gated_delta(frame: &mut Frame<'_>, op: &OpKind) -> Vec<f32> {
    let OpKind::GatedDelta { q, k, v, a, b, a_log, dt_bias, slot, scale, eps } = op else { unreachable!("called for gated_delta") };
    let [rows, heads, value_dim] = *frame.shape(v) else { unreachable!("checked: [rows, heads, dim]") };
    let [_, key_heads, key_dim] = *frame.shape(q) else { unreachable!("checked: [rows, heads, dim]") };
    let (a_log, dt_bias) = (frame.plain_weight(a_log), frame.plain_weight(dt_bias));
    let mut y = vec![0.0; rows * heads * value_dim];
    for number in 0..frame.spans.len() {
        let mut state = committed(frame, number, slot);
        let (rows, mut steps) = (frame.spans[number].rows(frame.rows_per_row(q)), Vec::new());
        for row in rows.clone() {
            if frame.spans[number].partial && row > rows.start {
                steps.push(state.clone());
            }
            for head in 0..heads {
                let key_at = (row * key_heads + head / (heads / key_heads)) * key_dim;
                let query = unit(&frame.f32s(q)[key_at..][..key_dim], *eps, *scale as f64);
                let key = unit(&frame.f32s(k)[key_at..][..key_dim], *eps, 1.0);
                let value = &frame.f32s(v)[(row * heads + head) * value_dim..][..value_dim];
                let step = sigmoid(frame.f32s(b)[row * heads + head] as f64);
                let input = frame.f32s(a)[row * heads + head] as f64 + dt_bias[head] as f64;
                let decay = (-(a_log[head] as f64).exp() * softplus(input)).exp();
                // S is [key_dim, value_dim]; it is rounded to f32 after each row, so that chunks of any length give the same result.
                let s = &mut state[head * key_dim * value_dim..][..key_dim * value_dim];
                for j in 0..value_dim {
                    let decayed: Vec<f64> = (0..key_dim).map(|i| s[i * value_dim + j] as f64 * decay).collect();
                    let read: f64 = decayed.iter().zip(&key).map(|(s, k)| s * k).sum();
                    let delta = step * (value[j] as f64 - read);
                    let mut out = 0.0;
                    for i in 0..key_dim {
                        let new = decayed[i] + key[i] * delta;
                        out += new * query[i];
                        s[i * value_dim + j] = new as f32;
                    }
                    y[(row * heads + head) * value_dim + j] = out as f32;
                }
            }
        }
        let pending = &mut frame.spans[number].pending;
        if !steps.is_empty() {
            pending.steps.insert(slot.clone(), steps);
        }
        pending.slots.insert(slot.clone(), Content::Recurrent(state));
    }
    y
}

/// `x / sqrt(Σx² + eps) · scale`.
fn unit(x: &[f32], eps: f32, scale: f64) -> Vec<f64> {
    let square: f64 = x.iter().map(|&x| x as f64 * x as f64).sum();
    let factor = scale / (square + eps as f64).sqrt();
    x.iter().map(|&x| x as f64 * factor).collect()
}

/// The content of a recurrent slot before this call.
fn committed(frame: &Frame<'_>, span: usize, slot: &Name) -> Vec<f32> {
    let state = frame.spans[span].state.expect("checked: a program with slots has states");
    match state.content(slot) {
        Content::Recurrent(numbers) => numbers.clone(),
        Content::Kv { .. } => unreachable!("checked: a recurrent slot"),
    }
}

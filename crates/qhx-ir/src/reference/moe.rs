//! Mixture of experts: routing and computation.

use super::{
    elementwise::activate,
    frame::Frame,
    linear::{dot, in_form, weight_row},
};
use crate::{Name, OpKind, Routing, WeightTensor};
use std::collections::HashMap;

/// Chosen experts and their weights, row by row.
pub(super) fn route(frame: &Frame<'_>, scores: &Name, method: &Routing) -> (Vec<i32>, Vec<f32>) {
    let chosen = frame.f32s(scores).chunks_exact(frame.width(scores)).flat_map(|row| match *method {
        Routing::SparseMixer { jitter } => sparse_mixer(row, jitter).to_vec(),
        Routing::Softmax { top_k, renormalise } => softmax_top(row, top_k, renormalise),
    });
    chosen.map(|(expert, weight)| (expert as i32, weight as f32)).unzip()
}

/// Two winners, each weighted by a softmax over the experts in its band. The band test is in f32: it is a decision, so it must be the same on all devices.
pub(super) fn sparse_mixer(r: &[f32], jitter: f32) -> [(usize, f64); 2] {
    let winner = |skip: Option<usize>| {
        let others = (0..r.len()).filter(|&e| Some(e) != skip);
        let best = others.clone().reduce(|best, e| if r[e] > r[best] { e } else { best }).expect("checked: at least two experts");
        // Where all are 0 the ratio is 0/0, which drops nothing.
        let dropped = |e: usize| (r[best] - r[e]) / r[e].abs().max(r[best]) > 2.0 * jitter;
        let sum: f64 = others.filter(|&e| !dropped(e)).map(|e| (r[e] as f64 - r[best] as f64).exp()).sum();
        (best, 1.0 / sum)
    };
    let first = winner(None);
    [first, winner(Some(first.0))]
}

fn softmax_top(r: &[f32], top_k: usize, renormalise: bool) -> Vec<(usize, f64)> {
    let mut order: Vec<usize> = (0..r.len()).collect();
    order.sort_by(|&a, &b| r[b].total_cmp(&r[a])); // stable: the lowest index first at a tie
    let weight = |e: usize| (r[e] as f64 - r[order[0]] as f64).exp();
    let chosen = &order[..top_k];
    let counted = if renormalise { chosen } else { &order };
    let sum: f64 = counted.iter().map(|&e| weight(e)).sum();
    chosen.iter().map(|&e| (e, weight(e) / sum)).collect()
}

pub(super) fn experts(frame: &Frame<'_>, op: &OpKind) -> Vec<f32> {
    let OpKind::Experts { x, experts, weights, gate, up, down, activation, form, bias, held } = op else {
        unreachable!("called for experts")
    };
    let [rows, hidden] = *frame.shape(x) else { unreachable!("checked: [rows, hidden]") };
    let k = frame.width(experts);
    let ffn = frame.weight(down).columns();
    let biases = bias.as_ref().map(|bias| [&bias.gate, &bias.up].map(|name| frame.plain_weight(name)));
    let mut sums = vec![0.0f64; rows * hidden];
    let mut decoded = HashMap::new();
    for row in 0..rows {
        let input = in_form(&frame.f32s(x)[row * hidden..][..hidden], *form);
        for choice in row * k..(row + 1) * k {
            let (expert, weight) = (frame.i32s(experts)[choice] as usize, frame.f32s(weights)[choice] as f64);
            let place = held.as_ref().map_or(expert as i32, |held| frame.i32s(held)[expert]);
            let Ok(expert) = usize::try_from(place) else { continue };
            let [gate, up, down] = decoded.entry(expert).or_insert_with(|| {
                let matrix =
                    |w: &WeightTensor, outputs| (0..outputs).map(|o| weight_row(w, expert * outputs + o, *form)).collect::<Vec<_>>();
                [matrix(frame.weight(gate), ffn), matrix(frame.weight(up), ffn), matrix(frame.weight(down), hidden)]
            });
            let [gate_bias, up_bias] = [0, 1].map(|which| {
                let numbers = biases.as_ref().map(|biases| &biases[which][expert * ffn..]);
                move |f: usize| numbers.map_or(0.0, |numbers| numbers[f] as f64)
            });
            let inner = |f: usize| {
                let (gate, up) = (dot(&input, &gate[f]) + gate_bias(f), dot(&input, &up[f]) + up_bias(f));
                (activate(gate, *activation) * up) as f32
            };
            let inner: Vec<f32> = (0..ffn).map(inner).collect();
            let inner = in_form(&inner, *form);
            for o in 0..hidden {
                sums[row * hidden + o] += weight * dot(&inner, &down[o]);
            }
        }
    }
    sums.iter().map(|&s| s as f32).collect()
}

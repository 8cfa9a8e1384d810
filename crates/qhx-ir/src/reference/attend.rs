//! Softmax attention, with or without a KV slot.

use super::{
    elementwise::softcap as cap_score,
    frame::{Frame, dot},
    state::{Content, round_to},
};
use crate::{KeyValue, Mask, Name, OpKind, Slot};
use std::ops::Range;

pub(super) fn attend(frame: &mut Frame<'_>, op: &OpKind) -> Vec<f32> {
    let OpKind::Attend { q, kv, slot, mask, scale, softcap, relative_keys } = op else { unreachable!("called for attend") };
    let [rows, heads, dim] = *frame.shape(q) else { unreachable!("checked: [rows, heads, dim]") };
    if let (Some(kv), Some(slot)) = (kv, slot) {
        write(frame, kv, slot);
    }
    let relative = relative_keys.as_ref().map(|table| frame.plain_weight(table));
    let queries = frame.f32s(q);
    let mut y = vec![0.0; rows * heads * dim];
    for (number, span) in frame.spans.iter().enumerate() {
        let Seen { keys, values, before } = seen(frame, number, q, kv.as_ref(), slot.as_ref());
        let kv_width = match (kv, slot.as_ref().map(|s| &frame.program.slots[s])) {
            (Some(kv), _) => frame.shape(&kv.k)[1] * dim,
            (None, Some(Slot::Kv { kv_heads, .. })) => kv_heads * dim,
            _ => unreachable!("checked: keys come from the op or from a KV slot"),
        };
        let heads_per_key = heads / (kv_width / dim);
        let total = keys.len() / kv_width;
        for (t, row) in span.rows(frame.rows_per_row(q)).enumerate() {
            let index = before + t;
            let visible = visible(*mask, index, total);
            for head in 0..heads {
                let at = (row * heads + head) * dim;
                let query = &queries[at..][..dim];
                let kv_at = |j: usize| j * kv_width + head / heads_per_key * dim;
                let score = |j: usize| {
                    let mut score = dot(query, &keys[kv_at(j)..][..dim]) * *scale as f64;
                    if let (Some(table), Some(distance)) = (&relative, index.checked_sub(j))
                        && let Some(key) = table.get((distance * heads + head) * dim..(distance * heads + head + 1) * dim)
                    {
                        score += dot(query, key);
                    }
                    softcap.map_or(score, |cap| cap_score(score, cap as f64))
                };
                let scores: Vec<f64> = visible.clone().map(score).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
                let sum: f64 = weights.iter().sum();
                for d in 0..dim {
                    let mixed: f64 = visible.clone().zip(&weights).map(|(j, w)| w * values[kv_at(j) + d] as f64).sum();
                    y[at + d] = (mixed / sum) as f32;
                }
            }
        }
    }
    y
}

/// The keys that the query at `index` sees, of `total`.
fn visible(mask: Mask, index: usize, total: usize) -> Range<usize> {
    match mask {
        Mask::Full => 0..total,
        Mask::Causal => 0..index + 1,
        Mask::Window(window) => (index + 1).saturating_sub(window)..index + 1,
    }
}

/// The keys and values that a segment's queries can see, and how many of them precede its first row.
struct Seen {
    keys: Vec<f32>,
    values: Vec<f32>,
    before: usize,
}

fn seen(frame: &Frame<'_>, span: usize, q: &Name, kv: Option<&KeyValue>, slot: Option<&Name>) -> Seen {
    let span = &frame.spans[span];
    let Some(slot) = slot else {
        let KeyValue { k, v } = kv.expect("checked: without slot there are keys");
        let rows = span.rows(frame.rows_per_row(q));
        return Seen { keys: rows_of(frame, k, rows.clone()), values: rows_of(frame, v, rows), before: 0 };
    };
    let state = span.state.expect("checked: a program with slots has states");
    let (Content::Kv { keys, values }, Some(Content::Kv { keys: new_keys, values: new_values })) =
        (state.content(slot), span.pending.slots.get(slot))
    else {
        unreachable!("checked: a KV slot, written earlier in this call")
    };
    Seen { keys: [keys.as_slice(), new_keys].concat(), values: [values.as_slice(), new_values].concat(), before: crate::State::len(state) }
}

/// Adds the segments' new rows to the slot, provisionally.
fn write(frame: &mut Frame<'_>, kv: &KeyValue, slot: &Name) {
    let Slot::Kv { dtype, .. } = frame.program.slots[slot] else { unreachable!("checked: a KV slot") };
    for number in 0..frame.spans.len() {
        let rows = frame.spans[number].rows(frame.rows_per_row(&kv.k));
        let kept = |name| rows_of(frame, name, rows.clone()).into_iter().map(|x| round_to(x, dtype)).collect();
        let content = Content::Kv { keys: kept(&kv.k), values: kept(&kv.v) };
        frame.spans[number].pending.slots.insert(slot.clone(), content);
    }
}

fn rows_of(frame: &Frame<'_>, name: &Name, rows: Range<usize>) -> Vec<f32> {
    let width: usize = frame.shape(name)[1..].iter().product();
    frame.f32s(name)[rows.start * width..rows.end * width].to_vec()
}

//! Softmax attention. Keys and values keep their `kv_heads` heads: the queries of a group become further rows of one product.

use super::{Drain, Feed, Keys, Lowering};
use crate::graph::{Parameter, TensorId};
use qhx_ir::{DeviceError, Name, OpKind, Slot};

/// Sizes of one attention.
#[derive(Clone, Copy)]
struct Heads {
    rows: usize,
    kv_heads: usize,
    /// Query heads for each key head.
    group: usize,
    dim: usize,
}

/// Keys and values from one source, `[kv_heads, rows, dim]`.
type KeyValue = (TensorId, TensorId);

impl Lowering<'_> {
    pub(super) fn attend(&mut self, op: &OpKind) -> Result<TensorId, DeviceError> {
        let OpKind::Attend { q, kv, slot, mask, scale, softcap, relative_keys } = op else { unreachable!("called for attend") };
        let per_row = self.per_row(q);
        let new = kv.as_ref().map(|kv| Ok::<_, DeviceError>((self.value(&kv.k)?, self.value(&kv.v)?))).transpose()?;
        let queries = self.value(q)?;
        let [rows, heads, dim] = self.builder.dims(queries)[..] else { unreachable!("checked: [rows, heads, dim]") };
        let kv_heads = match (new, slot.as_ref().map(|slot| &self.program.slots[slot])) {
            (Some((k, _)), _) => self.builder.dims(k)[1],
            (None, Some(Slot::Kv { kv_heads, .. })) => *kv_heads,
            _ => unreachable!("checked: keys come from the op or from a KV slot"),
        };
        let heads = Heads { rows, kv_heads, group: heads / kv_heads, dim };
        let sources = self.sources(new, slot.as_ref(), heads);
        let keys = match (slot, sources.len()) {
            (None, _) => Keys::Rows(per_row),
            (Some(_), 2) => Keys::PastAndNew,
            (Some(_), _) => Keys::Past,
        };
        let scaled = self.builder.scale("scaled", queries, *scale);
        let scaled = self.grouped(scaled, heads);
        let scores: Vec<TensorId> = sources.iter().map(|s| self.builder.matmul("scores", scaled, s.0, true)).collect();
        let mut scores = self.builder.concat("all_scores", &scores, 2);
        if let Some(table) = relative_keys {
            let relative = self.relative_scores(queries, table, heads)?;
            scores = self.builder.add("with_relative", scores, relative);
        }
        if let Some(cap) = softcap {
            scores = self.softcap(scores, *cap);
        }
        let past = slot.as_ref().map_or(0, |slot| self.sizes.slot_rows(&self.program.slots[slot]));
        let weights = self.masked_softmax(scores, Feed::Mask { mask: *mask, keys, past }, heads);
        Ok(self.mixed(weights, &sources, heads))
    }

    /// Where keys and values come from: the slot's earlier rows, the new ones, or both.
    fn sources(&mut self, new: Option<KeyValue>, slot: Option<&Name>, heads: Heads) -> Vec<KeyValue> {
        let by_head = new.map(|(k, v)| {
            let k = self.builder.transpose("keys", k, &[1, 0, 2]);
            (k, self.builder.transpose("values", v, &[1, 0, 2]))
        });
        let Some(slot) = slot else { return by_head.into_iter().collect() };
        if let (Some((k, v)), Some(by_head)) = (new, by_head) {
            self.drain(k, Drain::Keys(slot.clone()));
            self.drain(v, Drain::Values(slot.clone()));
            self.fresh.insert(slot.clone(), by_head);
        }
        let dims = [heads.kv_heads, self.sizes.slot_rows(&self.program.slots[slot]), heads.dim];
        let keys = self.feed(Feed::PastKeys(slot.clone()), &dims);
        let values = self.feed(Feed::PastValues(slot.clone()), &dims);
        // Where another graph wrote the slot, it already contains the new rows.
        std::iter::once((keys, values)).chain(self.fresh.get(slot).copied()).collect()
    }

    /// `[rows, heads, dim]` as `[kv_heads, group · rows, dim]`.
    fn grouped(&mut self, q: TensorId, h: Heads) -> TensorId {
        let q = self.builder.reshape("split_heads", q, &[h.rows, h.kv_heads, h.group, h.dim]);
        let q = self.builder.transpose("by_head", q, &[1, 2, 0, 3]);
        self.builder.reshape("grouped", q, &[h.kv_heads, h.group * h.rows, h.dim])
    }

    fn masked_softmax(&mut self, scores: TensorId, mask: Feed, h: Heads) -> TensorId {
        let count = self.builder.width(scores);
        let mask = self.feed(mask, &[h.rows, count]);
        let scores = self.builder.reshape("by_query", scores, &[h.kv_heads, h.group, h.rows, count]);
        let mask = self.builder.reshape("mask", mask, &[1, 1, h.rows, count]);
        let masked = self.builder.add("masked", scores, mask);
        let weights = self.builder.softmax("softmax", masked);
        self.builder.reshape("weights", weights, &[h.kv_heads, h.group * h.rows, count])
    }

    /// The weighted values of all sources, `[rows, heads, dim]`.
    fn mixed(&mut self, weights: TensorId, sources: &[KeyValue], h: Heads) -> TensorId {
        let mut start = 0;
        let mut sum = None;
        for &(_, values) in sources {
            let count = self.builder.dims(values)[1];
            let own = self.builder.slice("own_weights", weights, 2, start, count);
            let mixed = self.builder.matmul("mixed", own, values, false);
            sum = Some(sum.map_or(mixed, |sum| self.builder.add("all_mixed", sum, mixed)));
            start += count;
        }
        let y = sum.unwrap_or(weights);
        let y = self.builder.reshape("split_rows", y, &[h.kv_heads, h.group, h.rows, h.dim]);
        let y = self.builder.transpose("by_row", y, &[2, 0, 1, 3]);
        self.builder.reshape("heads", y, &[h.rows, h.kv_heads * h.group, h.dim])
    }

    /// `q_i · table[i − j]` for every pair of rows, `[kv_heads, group · rows, rows]`. Scores by distance, the largest first, are
    /// moved to their keys by one reshape: with one more column than rows, each row starts one position later.
    fn relative_scores(&mut self, q: TensorId, table: &Name, h: Heads) -> Result<TensorId, DeviceError> {
        let (rows, heads) = (h.rows, h.kv_heads * h.group);
        let distances = self.program.weights[table].shape[0];
        let key = format!("{table}.by_distance.{rows}");
        let by_distance = self.derived(&key, &[table], &[heads, rows, h.dim], |w| {
            let table = w.concat();
            let entry = |head: usize, distance: usize, d: usize| match distance < distances {
                true => table[(distance * heads + head) * h.dim + d],
                false => 0.0,
            };
            let places = (0..heads).flat_map(|head| (0..rows).flat_map(move |c| (0..h.dim).map(move |d| (head, rows - 1 - c, d))));
            places.map(|(head, distance, d)| entry(head, distance, d)).collect()
        })?;
        let b = &mut self.builder;
        let q = b.transpose("relative_queries", q, &[1, 0, 2]);
        let scores = b.matmul("relative", q, by_distance, true);
        let pad = Parameter::U32s { dims: vec![3, 2], values: vec![0, 0, 0, 0, 1, 0] };
        let parameters = vec![("scheme", Parameter::U32(0)), ("pad_amount", pad), ("pad_constant_value", Parameter::F32(0.0))];
        let wide = b.node("Pad", "relative_wide", &[scores], &[heads, rows, rows + 1], parameters);
        let moved = b.reshape("relative_moved", wide, &[heads, rows + 1, rows]);
        let placed = b.slice("relative_placed", moved, 1, 1, rows);
        Ok(b.reshape("relative_grouped", placed, &[h.kv_heads, h.group * rows, rows]))
    }
}

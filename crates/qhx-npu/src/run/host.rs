//! The host's work: table look-ups, gathering and scattering rows, choosing experts.

use super::{
    meter::Meter,
    values::{Data, Values},
};
use qhx_ir::{DeviceError, Name, Op, OpKind, Routing, WeightTensor};
use std::collections::HashMap;

/// Tables that the host reads.
pub(super) type Tables = HashMap<Name, WeightTensor>;

/// Runs an op on the host.
pub(super) fn run(values: &mut Values<'_>, tables: &Tables, op: &Op, meter: &mut Meter) -> Result<(), DeviceError> {
    match &op.op {
        OpKind::Embed { ids, table, .. } => meter.read_rows(&tables[table], values.i32s(ids).len()),
        OpKind::Interpolate { index, table, .. } => meter.read_rows(&tables[table], values.i32s(index).len()),
        _ => {}
    }
    let results = match &op.op {
        OpKind::Embed { ids, table, scale } => vec![Data::F32(embed(values.i32s(ids), &tables[table], *scale))],
        OpKind::Interpolate { index, factor, table } => {
            vec![Data::F32(interpolate(values.i32s(index), values.f32s(factor), values.width(index), &tables[table]))]
        }
        OpKind::Gather { x, rows } => {
            let width = values.width(x);
            let picked = values.i32s(rows).iter().flat_map(|&row| &values.f32s(x)[row as usize * width..][..width]);
            vec![Data::F32(picked.copied().collect())]
        }
        OpKind::ScatterRows { x, rows, at } => {
            let width = values.width(x);
            let mut y = values.f32s(x).to_vec();
            for (&at, new) in values.i32s(at).iter().zip(values.f32s(rows).chunks_exact(width.max(1))) {
                y[at as usize * width..][..width].copy_from_slice(new);
            }
            vec![Data::F32(y)]
        }
        OpKind::Route { scores, method } => {
            let (experts, weights) = route(values.f32s(scores), values.width(scores), method);
            vec![Data::I32(experts), Data::F32(weights)]
        }
        other => unreachable!("{} does not run on the host", other.name()),
    };
    op.outputs().iter().zip(results).try_for_each(|(name, data)| values.insert(name, data))
}

fn embed(ids: &[i32], table: &WeightTensor, scale: f32) -> Vec<f32> {
    let width = table.columns();
    let mut y = vec![0.0; ids.len() * width];
    for (&id, row) in ids.iter().zip(y.chunks_exact_mut(width)) {
        table.decode_row(id as usize, row);
        row.iter_mut().for_each(|x| *x *= scale);
    }
    y
}

fn interpolate(index: &[i32], factor: &[f32], taps: usize, table: &WeightTensor) -> Vec<f32> {
    let mut row = vec![0.0; table.columns()];
    let mut y = vec![0.0; index.len() / taps.max(1) * row.len()];
    let each = index.chunks_exact(taps.max(1)).zip(factor.chunks_exact(taps.max(1)));
    for ((index, factor), y) in each.zip(y.chunks_exact_mut(row.len())) {
        for (&index, &factor) in index.iter().zip(factor) {
            table.decode_row(index as usize, &mut row);
            y.iter_mut().zip(&row).for_each(|(y, &x)| *y += factor * x);
        }
    }
    y
}

/// Chosen experts and their weights, row by row.
fn route(scores: &[f32], experts: usize, method: &Routing) -> (Vec<i32>, Vec<f32>) {
    let chosen = scores.chunks_exact(experts).flat_map(|row| match *method {
        Routing::SparseMixer { jitter } => sparse_mixer(row, jitter).to_vec(),
        Routing::Softmax { top_k, renormalise } => softmax_top(row, top_k, renormalise),
    });
    chosen.map(|(expert, weight)| (expert as i32, weight)).unzip()
}

/// Two winners, each weighted by a softmax over the experts in its band.
fn sparse_mixer(r: &[f32], jitter: f32) -> [(usize, f32); 2] {
    let winner = |skip: Option<usize>| {
        let others = (0..r.len()).filter(|&e| Some(e) != skip);
        let best = others.clone().reduce(|best, e| if r[e] > r[best] { e } else { best }).unwrap_or(0);
        // Where all are 0 the ratio is 0/0, which drops nothing.
        let dropped = |e: usize| (r[best] - r[e]) / r[e].abs().max(r[best]) > 2.0 * jitter;
        let sum: f32 = others.filter(|&e| !dropped(e)).map(|e| (r[e] - r[best]).exp()).sum();
        (best, 1.0 / sum)
    };
    let first = winner(None);
    [first, winner(Some(first.0))]
}

fn softmax_top(r: &[f32], top_k: usize, renormalise: bool) -> Vec<(usize, f32)> {
    let mut order: Vec<usize> = (0..r.len()).collect();
    order.sort_by(|&a, &b| r[b].total_cmp(&r[a])); // stable: the lowest index first at a tie
    let weight = |e: usize| (r[e] - r[order[0]]).exp();
    let chosen = &order[..top_k];
    let counted = if renormalise { chosen } else { &order };
    let sum: f32 = counted.iter().map(|&e| weight(e)).sum();
    chosen.iter().map(|&e| (e, weight(e) / sum)).collect()
}

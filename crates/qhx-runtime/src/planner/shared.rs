//! How long an op takes whose experts lie on the accelerator in part.

use super::{
    facts::{DeviceFacts, Facts},
    ways::{ACCELERATOR, Names, Way, runs},
    work::{Shape, Work, value_bytes},
};
use crate::{
    memory::experts_per_row,
    placement::Phase,
    split::{AllExperts, HotExperts, all_experts},
};
use qhx_ir::{Checked, Op, OpKind};

/// The experts of a way, and the facts that decide where they are computed.
pub(super) struct Shared {
    facts: Facts,
    /// The share of choices whose expert lies on the accelerator. Routers choose some more often than others, which is not known here: this is the least.
    hits: f64,
    transfer_from: Option<usize>,
}

impl Shared {
    /// Of a way with hot experts, which is told from how many rows on a transfer beats the processor.
    pub(super) fn of(program: &Checked, facts: &Facts, way: &mut Way, names: Names<'_>, chunk: usize) -> Option<Self> {
        let (hot, all) = (way.rules.hot_experts.as_mut()?, all_experts(program)?);
        hot.transfer_from = transfer_from(facts, all, chunk);
        let HotExperts { count, transfer_from } = *hot;
        // Those of whole layers are there without being counted.
        let on_processor = runs(program, names, way, Phase::Decode).into_iter().filter(|run| run.device != ACCELERATOR);
        let of: usize = on_processor.flat_map(|run| run.ops).filter_map(|op| experts_of(program, &program.ops[op])).sum();
        Some(Self { facts: *facts, hits: (count as f64 / of.max(1) as f64).min(1.0), transfer_from })
    }

    /// Of an op in a call of this shape.
    pub(super) fn seconds(&self, part: &Checked, op: &Op, shape: Shape) -> f64 {
        let Self { facts: Facts { accelerator, processor, together }, hits, transfer_from } = *self;
        let OpKind::Experts { x, experts, gate, .. } = &op.op else { return processor.op(Work::of(part, op, shape)) };
        let of = part.weights.get(gate).map_or(1.0, |gate| gate.shape[0].max(1) as f64);
        let choices = shape.rows as f64 * experts_per_row(part, experts) as f64;
        let work = Work::of(part, op, shape);
        let share = |device: &DeviceFacts, share: f64| device.op(Work { bytes: share * work.bytes, products: share * work.products });
        // The rows cross, and what the processor makes of them.
        let crossing = 2.0 * value_bytes(part, x, shape) / accelerator.copied_bytes_per_second;
        if transfer_from.is_some_and(|rows| choices / of >= rows as f64) {
            let transfers = (1.0 - hits) * work.bytes / accelerator.copied_bytes_per_second;
            return accelerator.pause_seconds + crossing + share(&accelerator, 1.0) + transfers;
        }
        let (there, here) = (accelerator.pause_seconds + share(&accelerator, hits), processor.call_seconds + share(&processor, 1.0 - hits));
        crossing + there.max(here) + (together - 1.0).min(1.0) * there.min(here)
    }
}

/// How many experts an op has, if it has any.
fn experts_of(program: &Checked, op: &Op) -> Option<usize> {
    let OpKind::Experts { gate, .. } = &op.op else { return None };
    program.weights.get(gate)?.shape.first().copied()
}

/// The number of rows of a call from which on it takes less time to transfer an expert and compute it on the accelerator than to compute it on the processor.
fn transfer_from(facts: &Facts, all: AllExperts, chunk: usize) -> Option<usize> {
    let seconds = |device: &DeviceFacts, rows: usize| {
        (all.bytes / device.read_bytes_per_second).max(rows as f64 * all.products / device.products_per_second)
    };
    let transfer = all.bytes / facts.accelerator.copied_bytes_per_second;
    (1..=chunk).find(|&rows| transfer + seconds(&facts.accelerator, rows) < seconds(&facts.processor, rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_pay_where_rows_are_many() {
        let device = |read, products, copied| DeviceFacts {
            call_seconds: 0.0,
            pause_seconds: 0.0,
            op_seconds: 0.0,
            read_bytes_per_second: read,
            products_per_second: products,
            copied_bytes_per_second: copied,
        };
        let all = AllExperts { count: 8, bytes: 1000.0, products: 1000.0 };
        let from = |copied| {
            let facts = Facts { accelerator: device(1e6, 1e6, copied), processor: device(1e4, 1e4, 1e9), together: 1.0 };
            transfer_from(&facts, all, 64)
        };
        assert_eq!(from(1e5), Some(1), "a transfer takes a tenth of what the processor needs for one row");
        assert_eq!(from(1e4 / 3.0), Some(4), "as long as three rows");
        assert_eq!(from(10.0), None);
    }
}

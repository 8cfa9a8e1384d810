//! What ops read and compute: the part of a prediction that depends on the program alone.

use crate::memory::{experts_per_row, tensor_bytes};
use qhx_ir::{Bindings, Checked, Name, Op, OpKind, Slot, dim};

/// What one call does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Shape {
    /// Rows of the call.
    pub(super) rows: usize,
    /// Rows that are in the cache before it.
    pub(super) depth: usize,
    /// Rows of which something is wanted.
    pub(super) wanted: usize,
}

impl Shape {
    fn bindings(self) -> Bindings {
        Bindings { rows: self.rows, soft_rows: 0, wanted: self.wanted }
    }
}

/// What an op reads and computes in a call.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Work {
    /// Bytes of weights and of the cache.
    pub(super) bytes: f64,
    /// Multiplications, each with an addition.
    pub(super) products: f64,
}

impl Work {
    /// Of an op in a call of this shape.
    pub(super) fn of(program: &Checked, op: &Op, shape: Shape) -> Self {
        let weights = op.op.weights();
        let whole = |name: &Name| program.weights.get(name).map_or(0.0, |weight| tensor_bytes(weight.encoding, &weight.shape) as f64);
        let numbers = |name: &Name| program.weights.get(name).map_or(0.0, |weight| weight.shape.iter().map(|&n| n as f64).product());
        let first = |name: &Name| program.weights.get(name).and_then(|weight| weight.shape.first()).map_or(1.0, |&n| n.max(1) as f64);
        let all = |of: &dyn Fn(&Name) -> f64| weights.iter().map(|name| of(name)).sum::<f64>();
        let rows = shape.rows as f64;
        match &op.op {
            OpKind::Embed { table, .. } => Self { bytes: rows * whole(table) / first(table), products: 0.0 },
            OpKind::Interpolate { table, .. } => Self { bytes: 4.0 * rows * whole(table) / first(table), products: 0.0 },
            OpKind::Experts { experts, gate, .. } => {
                let (of, chosen) = (first(gate), experts_per_row(program, experts) as f64);
                let chosen = chosen.min(of);
                // As many of them as independent rows choose on average.
                let used = of * (1.0 - (1.0 - chosen / of).powf(rows));
                Self { bytes: all(&whole) * used / of, products: rows * chosen * all(&numbers) / of }
            }
            OpKind::Attend { q, slot, .. } => {
                let keys = (shape.depth + shape.rows) as f64;
                let cached = slot.as_ref().and_then(|slot| program.slots.get(slot)).map_or(0.0, |slot| match slot {
                    Slot::Kv { window: Some(window), .. } => slot.bytes(1) as f64 * keys.min(*window as f64),
                    _ => slot.bytes(1) as f64 * keys,
                });
                Self { bytes: cached + all(&whole), products: 2.0 * keys * value_numbers(program, q, shape) }
            }
            OpKind::GatedDelta { slot, .. } => {
                let state = program.slots.get(slot).map_or(0.0, |slot| slot.bytes(1) as f64);
                Self { bytes: state, products: rows * state }
            }
            OpKind::Linear { x, weight, .. } => {
                let columns = program.weights.get(weight).and_then(|weight| weight.shape.last()).map_or(1.0, |&n| n.max(1) as f64);
                Self { bytes: all(&whole), products: value_numbers(program, x, shape) / columns * numbers(weight) }
            }
            _ => Self { bytes: all(&whole), products: rows * all(&numbers) },
        }
    }
}

/// Bytes of a value in a call, as it crosses between devices.
pub(super) fn value_bytes(program: &Checked, value: &str, shape: Shape) -> f64 {
    4.0 * value_numbers(program, value, shape)
}

fn value_numbers(program: &Checked, value: &str, shape: Shape) -> f64 {
    let bound = dim::bind_shape(&program.value_type(value).shape, &shape.bindings()).unwrap_or_default();
    bound.iter().map(|&n| n as f64).product()
}

//! Which ops the processor does not support, and why.

use super::{Work, parts::work_of};
use qhx_ir::{Checked, DType, Dim, Name, Op, OpKind, dim::show_shape};

/// Why an op cannot run on the NPU; `None` where it can.
pub fn refusal(program: &Checked, op: &Op) -> Option<String> {
    if let OpKind::Attend { relative_keys: Some(_), slot: Some(_), .. } = &op.op {
        return Some(
            "relative keys over the rows of a slot: their distances change with every call, but a graph's shapes are static".into(),
        );
    }
    if let OpKind::Experts { held: Some(_), .. } = &op.op {
        return Some("experts of which only some are there".into());
    }
    if work_of(program, op) == Work::Host {
        return None;
    }
    // Calls are split and padded by rows, so inputs and outputs of an execution are rows of each value.
    let outputs = op.outputs();
    let mut values = op.op.inputs().into_iter().chain(&outputs);
    values.find(|name| !is_of_rows(program, name)).map(|name| {
        let shape = show_shape(&program.value_type(name).shape);
        format!("`{name}` {shape}: its first dimension, and only that one, must be rows of the call")
    })
}

/// Whether a float value consists of rows; the host reads integers in any shape.
fn is_of_rows(program: &Checked, name: &Name) -> bool {
    let value = program.value_type(name);
    let is_fixed = |dim: &Dim| matches!(dim, Dim::Fixed(_));
    let is_rows = |dim: &Dim| matches!(dim, Dim::Symbol(_)) || dim.rows_per_row().is_some();
    value.dtype == DType::I32 || value.shape.split_first().is_some_and(|(rows, others)| is_rows(rows) && others.iter().all(is_fixed))
}

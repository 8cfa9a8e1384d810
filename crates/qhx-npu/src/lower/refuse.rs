//! What the processor does not take, and why.

use qhx_ir::{Checked, Op, OpKind};

/// Why an op cannot run on the NPU; `None` where it can.
pub fn refusal(_program: &Checked, op: &Op) -> Option<String> {
    match &op.op {
        OpKind::Attend { relative_keys: Some(_), slot: Some(_), .. } => {
            Some("relative keys over the rows of a slot: their distances change with every call, a graph's shapes do not".into())
        }
        _ => None,
    }
}

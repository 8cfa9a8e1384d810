//! The inputs of products that no folded rotation reaches: behind a gate, `down(act(gate) · up)`, where the elementwise product commutes with no rotation, and behind the norms of a stream that cannot be
//! rotated. They are transformed at run time, and the matrices have the transform folded into their columns.

use super::{Rewrite, is_hidden, is_plain_product, uses, width};
use crate::{ForgeError, pen::Written};
use qhx_ir::{Checked, Name, OpKind, hadamard};

/// Rotates what `is_wanted` and only products read, none of them rotated on that side yet.
pub(super) fn rotate(written: &mut Written, is_wanted: impl Fn(&Checked, &Name) -> bool) -> Result<(), ForgeError> {
    let uses = uses([&*written]);
    let program = written.program.clone();
    let recipes = written.recipes.clone();
    let mut rewrite = Rewrite::new(written);
    for value in program.ops.iter().flat_map(|op| op.outputs()).filter(|value| is_wanted(&program, value) && is_hidden(&program, value)) {
        let readers = program.readers(&value);
        let is_open = |&reader: &usize| {
            let op = &program.ops[reader].op;
            is_plain_product(op, &uses) && !op.weights().first().is_some_and(|weight| recipes[*weight].has_rotated_inputs())
        };
        let block = width(&program, &value).filter(|&width| hadamard::exists(width));
        if let (Some(block), false, true) = (block, readers.is_empty(), readers.iter().all(is_open)) {
            readers.iter().for_each(|&reader| rewrite.rotate_input(&program.ops[reader].op, block, None));
            rewrite.transform(&value);
        }
    }
    rewrite.finish()
}

/// Whether a value is an elementwise product with a gate, perhaps in another shape.
pub(super) fn is_gated(program: &Checked, value: &Name) -> bool {
    match program.maker(value).map(|maker| &program.ops[maker].op) {
        Some(OpKind::GateAct { .. }) => true,
        Some(OpKind::Reshape { x, .. }) => is_gated(program, x),
        _ => false,
    }
}

/// Whether a norm makes a value.
pub(super) fn is_normed(program: &Checked, value: &Name) -> bool {
    let maker = program.maker(value).map(|maker| &program.ops[maker].op);
    matches!(maker, Some(OpKind::RmsNorm { .. } | OpKind::LayerNorm { .. }))
}

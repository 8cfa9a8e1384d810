//! Weights that a drafting program has in common with the text: stored once, as the text wants them.

use super::Rewrite;
use crate::{ForgeError, pen::Written};
use qhx_ir::OpKind;

/// Lets a program that is not rotated use the text's rotated weights: turns rows that it looks up in them, and rows that they are multiplied with.
pub(super) fn follow(written: &mut Written, text: &Written) -> Result<(), ForgeError> {
    let program = written.program.clone();
    for (name, recipe) in &mut written.recipes {
        if let Some(own) = text.recipes.get(name) {
            recipe.clone_from(own);
        }
    }
    let is_rotated = |weight: &_| text.recipes.get(weight).is_some_and(|recipe| recipe.has_rotated_inputs());
    let mut rewrite = Rewrite::new(written);
    for op in &program.ops {
        match &op.op {
            OpKind::Embed { table, .. } if is_rotated(table) => rewrite.transform(&op.path),
            OpKind::Linear { x, weight, .. } if is_rotated(weight) => rewrite.transform(x),
            _ => {}
        }
    }
    rewrite.finish()
}

//! The values of an attention: a weighted sum of rows commutes with a rotation of each head. It is folded into the rows of the matrix that makes the values and into the columns of the one that reads
//! the result. A gate or a norm with weights in between forbids it.

use super::{Rewrite, is_plain_product, only_reader, uses, width};
use crate::{ForgeError, pen::Written};
use qhx_ir::{Checked, Name, Op, OpKind, hadamard};
use std::collections::{BTreeSet, HashMap};

/// Rotates all but what others read: the slots in `kept`.
pub(super) fn rotate(written: &mut Written, kept: &BTreeSet<Name>) -> Result<(), ForgeError> {
    let uses = uses([&*written]);
    let program = written.program.clone();
    let mut rewrite = Rewrite::new(written);
    let is_kept = |op: &&Op| op.op.slot().is_some_and(|slot| kept.contains(slot));
    for attends in sharing(&program).into_iter().filter(|attends| !attends.iter().any(is_kept)) {
        let found: Option<Vec<Pair<'_>>> = attends.into_iter().map(|attend| Pair::of(&program, attend, &uses)).collect();
        for Pair { block, writer, reader } in found.into_iter().flatten() {
            writer.iter().for_each(|writer| rewrite.rotate_output(writer, block));
            rewrite.rotate_input(reader, block, None);
        }
    }
    rewrite.finish()
}

/// Attention ops, those together that use the same slot: all of them or none can read rotated values.
fn sharing(program: &Checked) -> Vec<Vec<&Op>> {
    let mut groups: Vec<Vec<&Op>> = Vec::new();
    let mut of_slot: HashMap<&Name, usize> = HashMap::new();
    for op in program.ops.iter().filter(|op| matches!(op.op, OpKind::Attend { .. })) {
        match op.op.slot().and_then(|slot| of_slot.get(slot)) {
            Some(&group) => groups[group].push(op),
            None => {
                of_slot.extend(op.op.slot().map(|slot| (slot, groups.len())));
                groups.push(vec![op]);
            }
        }
    }
    groups
}

/// The products before and after an attention.
struct Pair<'p> {
    /// Numbers of a head.
    block: usize,
    /// What makes the values; absent where the slot is only read.
    writer: Option<&'p OpKind>,
    reader: &'p OpKind,
}

impl<'p> Pair<'p> {
    fn of(program: &'p Checked, attend: &Op, uses: &HashMap<Name, usize>) -> Option<Self> {
        let OpKind::Attend { kv, .. } = &attend.op else { return None };
        let block = width(program, &attend.path).filter(|&width| hadamard::exists(width))?;
        let is_product = |op: &&OpKind| matches!(op, OpKind::Linear { .. }) && is_plain_product(op, uses);
        let writer = match kv {
            Some(kv) if kv.k == kv.v => return None,
            Some(kv) => Some(writer(program, &kv.v).filter(is_product)?),
            None => None,
        };
        let flat = match &program.ops[only_reader(program, &attend.path)?] {
            Op { path, op: OpKind::Reshape { shape, .. } } if has_same_rows(program, &attend.path, path) && shape.len() == 2 => path,
            _ => return None,
        };
        let reader = Some(&program.ops[only_reader(program, flat)?].op).filter(is_product)?;
        Some(Self { block, writer, reader })
    }
}

/// The op that makes values, seen through their shape and through norms without weights, which no rotation changes.
fn writer<'p>(program: &'p Checked, value: &Name) -> Option<&'p OpKind> {
    only_reader(program, value)?;
    match &program.ops[program.maker(value)?].op {
        OpKind::RmsNorm { x, weight: None, .. } => writer(program, x),
        OpKind::Reshape { x, .. } if has_same_rows(program, x, value) && program.value_type(x).shape.len() == 2 => {
            only_reader(program, x)?;
            program.maker(x).map(|maker| &program.ops[maker].op)
        }
        _ => None,
    }
}

fn has_same_rows(program: &Checked, a: &Name, b: &Name) -> bool {
    program.value_type(a).shape.first() == program.value_type(b).shape.first()
}

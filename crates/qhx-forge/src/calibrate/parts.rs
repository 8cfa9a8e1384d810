//! A program in parts, each of which begins with the products whose weights are rounded together.

use qhx_ir::{Checked, Clip, Dim, Name, OpKind, Program};
use std::collections::{HashMap, HashSet};

/// Consecutive ops of which no product that is rounded reads what another one of them makes.
#[derive(Default)]
pub(super) struct Part {
    /// Their places.
    pub(super) ops: Vec<usize>,
    /// What is rounded before they are run.
    pub(super) products: Vec<Product>,
    /// Whether nobody reads what they make: it is not computed.
    pub(super) is_last: bool,
}

/// Weights to be rounded, and the rows that they meet.
pub(super) enum Product {
    /// Matrices that the same rows are multiplied with.
    Linear {
        x: Name,
        /// What happens to the rows before.
        clip: Option<Clip>,
        weights: Vec<Name>,
    },
    /// An [`OpKind::Experts`].
    Experts(OpKind),
}

/// The parts of a program; `is_rounded` says which weights are.
pub(super) fn parts(program: &Checked, is_rounded: &dyn Fn(&Name) -> bool) -> Vec<Part> {
    // What comes from outside (patches of images, frames of sounds) is not among the values that are kept.
    let inputs: HashSet<&Name> = program.inputs.iter().map(|input| &input.name).collect();
    // A table that is also the output head is looked up in: errors that cancel each other in products would not do so there.
    let mut taken: HashSet<&Name> = program.ops.iter().filter_map(|op| table(&op.op)).collect();
    let mut parts = Vec::new();
    let mut part = Part::default();
    let mut made: HashSet<Name> = HashSet::new();
    for (place, op) in program.ops.iter().enumerate() {
        let weights: Vec<&Name> = match &op.op {
            OpKind::Linear { x, .. } if inputs.contains(x) => Vec::new(),
            OpKind::Linear { .. } | OpKind::Experts { .. } => op.op.matrices(),
            _ => Vec::new(),
        };
        let is_product = !weights.is_empty() && weights.iter().all(|name| is_rounded(name) && !taken.contains(name));
        if is_product && op.op.inputs().into_iter().any(|input| made.contains(input)) {
            parts.push(std::mem::take(&mut part));
            made.clear();
        }
        made.extend(op.outputs());
        part.ops.push(place);
        if is_product {
            taken.extend(weights);
            part.add(&op.op);
        }
    }
    part.is_last = ends_in_logits(program);
    parts.push(part);
    parts
}

impl Part {
    fn add(&mut self, op: &OpKind) {
        let OpKind::Linear { x, weight, clip, .. } = op else { return self.products.push(Product::Experts(op.clone())) };
        let same = self.products.iter_mut().find_map(|product| match product {
            Product::Linear { x: other, clip: other_clip, weights } if other == x && other_clip == clip => Some(weights),
            _ => None,
        });
        match same {
            Some(weights) => weights.push(weight.clone()),
            None => self.products.push(Product::Linear { x: x.clone(), clip: *clip, weights: vec![weight.clone()] }),
        }
    }
}

/// Numbers that are kept for each row between two parts, at most: what earlier parts made and later ones read.
pub(super) fn kept_numbers(program: &Checked, parts: &[Part]) -> usize {
    let mut made_in = HashMap::new();
    let mut kept = vec![0; parts.len()];
    let mut counted = HashMap::new();
    for (place, part) in parts.iter().enumerate() {
        for &op in &part.ops {
            for input in program.ops[op].op.inputs() {
                let Some(&maker) = made_in.get(input) else { continue };
                let from = counted.insert(input.clone(), place).unwrap_or(maker);
                kept[from.min(place)..place].iter_mut().for_each(|kept| *kept += width(program, input));
            }
            made_in.extend(program.ops[op].outputs().into_iter().map(|name| (name, place)));
        }
    }
    kept.into_iter().max().unwrap_or(0)
}

/// Numbers of a value in each row of a call.
fn width(program: &Checked, value: &Name) -> usize {
    let fixed = program.value_type(value).shape.iter().map(|dim| if let Dim::Fixed(n) = dim { *n } else { 1 });
    fixed.product()
}

/// Whether nothing but logits comes out of a program: nobody reads them here.
fn ends_in_logits(program: &Program) -> bool {
    program.outputs.iter().all(|output| *output.name == *"logits")
}

fn table(op: &OpKind) -> Option<&Name> {
    match op {
        OpKind::Embed { table, .. } | OpKind::Interpolate { table, .. } => Some(table),
        _ => None,
    }
}

//! Products that read the same rows in the same form become one step, and the rows are put into that form once.

use super::{Compiler, too_large};
use crate::{
    kernels::sketch::Shape,
    memory::{OUTPUTS, View},
    ops::{
        Step,
        linear::{Linear, Prepare, Product, prepared_width, rows_collide},
        shortlist::Shortlist,
    },
};
use qhx_ir::{ActivationForm, Checked, DeviceError, Dim, Name, Op, OpKind};

/// How far ahead a product is looked for that can be done together with an earlier one.
const AHEAD: usize = 24;

/// The order in which ops are done: the program's, but products move up to the first that reads the same rows in the same form.
pub(super) fn order(program: &Checked) -> Vec<Vec<usize>> {
    let ops = &program.ops;
    let tapped = |op: &Op| !program.stages_shown_by(&op.path).is_empty();
    let mut done = vec![false; ops.len()];
    let mut order = Vec::new();
    for first in 0..ops.len() {
        if done[first] {
            continue;
        }
        let mut group = vec![first];
        if let Some(key) = key(&ops[first]) {
            // Taps keep the program's order, so products that are tapped stay where they are.
            let same = |&other: &usize| !done[other] && self::key(&ops[other]) == Some(key) && !tapped(&ops[other]);
            group.extend((first + 1..ops.len().min(first + AHEAD)).filter(same).take(OUTPUTS - 1));
        }
        group.iter().for_each(|&op| done[op] = true);
        order.push(group);
    }
    order
}

/// What two products must share to be done together: rows, form, and bounds on the input.
fn key(op: &Op) -> Option<(&Name, ActivationForm, Option<[u32; 2]>)> {
    match &op.op {
        OpKind::Linear { x, activation, clip, .. } => Some((x, *activation, clip.map(|clip| clip.input.map(f32::to_bits)))),
        _ => None,
    }
}

/// Whether a value is an output and nothing else, perhaps after a softcap, whose cap it gives.
fn ending(program: &Checked, value: &Name) -> Option<Option<f32>> {
    let ends_as_output = |value: &Name| program.readers(value).is_empty() && program.is_output(value);
    match program.readers(value) {
        [] => program.is_output(value).then_some(None),
        [only] if !program.is_output(value) => match &program.ops[*only] {
            Op { op: OpKind::Softcap { cap, .. }, path } if ends_as_output(path) => Some(Some(*cap)),
            _ => None,
        },
        _ => None,
    }
}

impl Compiler<'_> {
    pub(super) fn products(&mut self, group: &[usize]) -> Result<(), DeviceError> {
        let program = self.program;
        let ops: Vec<&Op> = group.iter().map(|&op| &program.ops[op]).collect();
        self.products_of(&ops)
    }

    pub(super) fn products_of(&mut self, ops: &[&Op]) -> Result<(), DeviceError> {
        let OpKind::Linear { x, activation: form, clip, .. } = &ops[0].op else { unreachable!("called for products") };
        let columns = self.last(x);
        let (rows, x_width) = self.prepared_rows(x, columns, *form, clip.map(|clip| clip.input))?;
        let mut products = Vec::new();
        let mut views = vec![rows];
        for op in ops {
            let OpKind::Linear { weight, bias, clip, .. } = &op.op else { unreachable!("called for products") };
            let out = self.result(&op.path)?;
            views.push(out);
            products.push(Product {
                weight: self.matrix(weight)?,
                bias: bias.as_ref().map(|bias| self.plain(bias)).transpose()?,
                clip: clip.map(|clip| clip.output),
                out,
            });
        }
        let shortlist = match (&products[..], ops) {
            ([product], [op]) if product.bias.is_none() && product.clip.is_none() => {
                let large = product.weight.rows.saturating_mul(product.weight.bytes_per_row()) >= self.shortlist_from;
                ending(self.program, &op.path).filter(|_| large && columns <= Shape::MOST_COLUMNS).map(|cap| Box::new(Shortlist::new(cap)))
            }
            _ => None,
        };
        self.push(Step::Linear(Linear { x: rows, x_width, columns, form: *form, products, shortlist }), &views);
        for (op, view) in ops.iter().zip(&views[1..]) {
            self.define(&op.path, *view);
        }
        Ok(())
    }

    /// The rows of `x` in the stated form, and the numbers that each takes.
    fn prepared_rows(
        &mut self,
        x: &Name,
        columns: usize,
        form: ActivationForm,
        clip: Option<[f32; 2]>,
    ) -> Result<(View, usize), DeviceError> {
        let view = self.view(x);
        let apart = view.stride.is_some() && view.width(&self.max) != columns;
        if form == ActivationForm::F32 && clip.is_none() && !apart && !rows_collide(columns) {
            return Ok((view, columns));
        }
        let width = prepared_width(form, columns);
        let key = (x.clone(), form, clip.map(|clip| clip.map(f32::to_bits)));
        if let Some(prepared) = self.prepared.get(&key) {
            return Ok((*prepared, width));
        }
        let mut shape = vec![view.first];
        shape.extend(view.symbolic);
        shape.push(Dim::Fixed((view.fixed / columns).checked_mul(width).ok_or_else(too_large)?));
        let out = self.buffer(&shape)?;
        self.push(Step::Prepare(Prepare { x: view, columns, form, clip, out }), &[view, out]);
        self.prepared.insert(key, out);
        Ok((out, width))
    }
}

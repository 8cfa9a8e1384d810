//! Names to places: who needs a value for how long, which results can go over operands, which ops are mere views.

use super::{Compiler, Tapped, largest, too_large};
use crate::{
    matrix::{Matrix, Plain},
    memory::{Place, View},
    ops::{
        Step,
        rows::{Copy, Part},
    },
    plan::Buffer,
};
use qhx_ir::{Checked, DType, DeviceError, Dim, Name, OpKind};
use std::collections::HashMap;

/// The last op, in the order of execution, that reads each value or a view of it.
pub(super) struct Uses {
    /// The value that a view is a view of, for all values.
    roots: HashMap<Name, Name>,
    last: HashMap<Name, usize>,
}

impl Uses {
    pub(super) fn of(program: &Checked, order: &[Vec<usize>]) -> Self {
        let mut uses = Self { roots: HashMap::new(), last: HashMap::new() };
        for (position, &op) in order.iter().enumerate().flat_map(|(position, group)| group.iter().map(move |op| (position, op))) {
            let op = &program.ops[op];
            if let OpKind::Reshape { x, .. } | OpKind::Slice { x, .. } = &op.op {
                let root = uses.root(x);
                uses.roots.insert(op.path.clone(), root);
            }
            for name in op.op.inputs() {
                uses.last.insert(uses.root(name), position);
            }
        }
        for output in &program.outputs {
            uses.last.insert(uses.root(&output.value), usize::MAX);
        }
        uses
    }

    fn root(&self, name: &Name) -> Name {
        self.roots.get(name).unwrap_or(name).clone()
    }

    /// Whether nobody reads the value, or a view of it, after `position`.
    fn ends(&self, name: &Name, position: usize) -> bool {
        self.last.get(&self.root(name)).is_none_or(|&last| last <= position)
    }
}

impl Compiler<'_> {
    pub(super) fn view(&self, name: &Name) -> View {
        self.values[name]
    }

    /// Names a value, and delivers it to the stages whose tap it is.
    pub(super) fn define(&mut self, name: &Name, view: View) {
        self.values.insert(name.clone(), view);
        let value_type = self.program.value_type(name);
        for &stage in self.program.stages_shown_by(name) {
            let (after, integers) = (self.steps.len(), value_type.dtype == DType::I32);
            self.taps.push(Tapped { after, stage, view, shape: value_type.shape.clone(), integers });
            self.needed(&[view], self.steps.len().saturating_sub(1));
        }
    }

    /// A fresh buffer of a shape.
    pub(super) fn buffer(&mut self, shape: &[Dim]) -> Result<View, DeviceError> {
        let numbers = shape.iter().try_fold(1usize, |n, &dim| n.checked_mul(largest(dim, &self.max)));
        // More than any machine has: what is computed from sizes further on then cannot overflow either.
        let numbers = numbers.filter(|&n| n < 1 << 40).ok_or_else(too_large)?;
        self.buffers.push(Buffer { numbers, first: usize::MAX, last: 0 });
        Ok(View::dense(Place::Buffer(self.buffers.len() - 1), shape))
    }

    /// A fresh buffer for a value.
    pub(super) fn result(&mut self, name: &Name) -> Result<View, DeviceError> {
        let shape = self.program.value_type(name).shape.clone();
        self.buffer(&shape)
    }

    /// The place of an operand of the same size that is not needed any more, or a fresh buffer.
    pub(super) fn result_over(&mut self, name: &Name, operands: &[&Name]) -> Result<View, DeviceError> {
        for operand in operands {
            let view = self.view(operand);
            let others = operands.iter().filter(|other| self.view(other).place == view.place).count();
            let whole = matches!(view.place, Place::Buffer(_)) && view.stride.is_none() && view.offset == 0;
            if whole && others == 1 && self.uses.ends(operand, self.position) {
                return Ok(view);
            }
        }
        self.result(name)
    }

    /// Adds a step that reads and writes `views`.
    pub(super) fn push(&mut self, step: Step, views: &[View]) {
        self.steps.push(step);
        if !views.iter().any(|view| view.first == Dim::L) {
            self.wanted_from = self.steps.len();
        }
        self.needed(views, self.steps.len() - 1);
    }

    fn needed(&mut self, views: &[View], step: usize) {
        for view in views {
            if let Place::Buffer(buffer) = view.place {
                let buffer = &mut self.buffers[buffer];
                (buffer.first, buffer.last) = (buffer.first.min(step), buffer.last.max(step));
            }
        }
    }

    pub(super) fn matrix(&self, name: &Name) -> Result<Matrix, DeviceError> {
        Ok(Matrix::new(self.weights.declared(self.program, name)?))
    }

    pub(super) fn plain(&self, name: &Name) -> Result<Plain, DeviceError> {
        Ok(Plain::new(self.weights.declared(self.program, name)?))
    }

    /// A slot's place in the states.
    pub(super) fn slot(&self, name: &Name) -> usize {
        self.slots.get(name).copied().unwrap_or_else(|| unreachable!("checked: the slot is declared"))
    }

    /// The last dimension, a number wherever an op asks for it.
    pub(super) fn last(&self, name: &Name) -> usize {
        let dim = self.program.value_type(name).shape.last().copied();
        dim.map_or(1, |dim| largest(dim, &self.max))
    }

    pub(super) fn rows_per_row(&self, name: &Name) -> usize {
        let dim = self.program.value_type(name).shape.first();
        dim.and_then(|dim| dim.rows_per_row()).unwrap_or_else(|| unreachable!("checked: `{name}` has rows of the call"))
    }

    /// A slice of entries of each row is a view; of other dimensions it is copied.
    pub(super) fn slice(&mut self, path: &Name, x: &Name, axis: usize, start: usize, length: usize) -> Result<(), DeviceError> {
        let shape = self.program.value_type(x).shape.clone();
        let inner: usize = shape[axis + 1..].iter().map(|&dim| largest(dim, &self.max)).product();
        let fixed = shape[1..].iter().all(|dim| matches!(dim, Dim::Fixed(_)));
        if axis == 1 && fixed {
            let view = self.view(x);
            let stride = Some(view.stride.unwrap_or(view.fixed));
            self.define(path, View { offset: view.offset + start * inner, stride, fixed: length * inner, ..view });
            return Ok(());
        }
        let part = self.part(x, Some((largest(shape[axis], &self.max), inner, start, length)));
        self.copy(path, vec![part])
    }

    /// The same numbers in another shape: a view, unless rows that are apart would have to grow together.
    pub(super) fn reshape(&mut self, path: &Name, x: &Name, shape: &[Dim]) -> Result<(), DeviceError> {
        let view = self.view(x);
        let reshaped = View::dense(view.place, shape);
        if view.stride.is_none() {
            self.define(path, View { offset: view.offset, ..reshaped });
        } else if view.first == reshaped.first && view.fixed == reshaped.fixed {
            self.define(path, view);
        } else {
            let dense = self.dense_copy(x)?;
            self.define(path, View { place: dense.place, ..reshaped });
        }
        Ok(())
    }

    /// A part of a [`struct@Copy`]: the rows of the last dimension, or `length` entries from `start` of a dimension of `size` entries of `inner` numbers.
    pub(super) fn part(&self, x: &Name, cut: Option<(usize, usize, usize, usize)>) -> Part {
        let integers = self.program.value_type(x).dtype == DType::I32;
        let (width, start, length) = match cut {
            None => (self.last(x), 0, self.last(x)),
            Some((size, inner, start, length)) => (size * inner, start * inner, length * inner),
        };
        Part { x: self.view(x), width, start, length, integers }
    }

    /// Joins parts into a value.
    pub(super) fn copy(&mut self, path: &Name, parts: Vec<Part>) -> Result<(), DeviceError> {
        let out = self.result(path)?;
        self.push_copy(parts, out);
        self.define(path, out);
        Ok(())
    }

    /// A dense f32 copy of a value.
    pub(super) fn dense_copy(&mut self, x: &Name) -> Result<View, DeviceError> {
        let part = self.part(x, None);
        let out = self.result(x)?;
        // A value whose last dimension is not a number is dense, and is copied number by number.
        let fixed = matches!(self.program.value_type(x).shape.last(), Some(Dim::Fixed(_)));
        self.push_copy(vec![if fixed { part } else { Part { width: 1, length: 1, ..part } }], out);
        Ok(out)
    }

    fn push_copy(&mut self, parts: Vec<Part>, out: View) {
        let width = parts.iter().map(|part| part.length).sum();
        let mut views: Vec<View> = parts.iter().map(|part| part.x).collect();
        views.push(out);
        self.push(Step::Copy(Copy { parts, width, out }), &views);
    }
}

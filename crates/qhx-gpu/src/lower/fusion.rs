//! Ops that are done together with their neighbours: fewer passes over memory, fewer barriers.

use super::{
    Lowering, Prepared, View, buffers,
    simple::function,
    single::{Product, Row, is_one_row},
};
use crate::{
    kernels,
    recorder::{Recorder, Resource},
};
use qhx_ir::{ActivationForm, Clip, DeviceError, Dim, Name, OpKind};

/// What is done with a row before it is stored.
pub(super) struct RowWork {
    /// The gate's function, where `x` is gated by another value.
    pub(super) gate: Option<(u32, usize)>,
    /// 1: by the root of the mean square, 2: layer norm.
    pub(super) norm: u32,
    pub(super) weight: u64,
    pub(super) bias: u64,
    pub(super) eps: f32,
    /// What is done with it then.
    pub(super) sum: Option<Sum>,
    /// Where the row itself goes.
    pub(super) result: Option<usize>,
    /// In which form it goes to products.
    pub(super) form: Option<(ActivationForm, [f32; 2])>,
    /// Where the call has one row: the product whose result the row is.
    pub(super) product: Option<Product>,
}

/// Another value that is added to a row, and by what both are scaled.
#[derive(Clone, Copy)]
pub(super) struct Sum {
    added: usize,
    /// A weight of one number, or 0.
    factor: u64,
    scale: f32,
}

impl Sum {
    /// As shaders take them.
    pub(super) fn addresses(sum: Option<Self>, r: &Recorder<'_>) -> [u64; 2] {
        sum.map_or([0; 2], |sum| [r.address(sum.added), sum.factor])
    }

    pub(super) fn scale(sum: Option<Self>) -> u32 {
        sum.map_or(1.0, |sum| sum.scale).to_bits()
    }
}

/// Heads as products take them, in int8 by blocks.
#[derive(Clone, Copy)]
pub(super) struct FormedHeads {
    /// The heads in f32.
    from: usize,
    numbers: usize,
    scales: usize,
    rows: Dim,
    /// Of all heads of a row.
    width: usize,
}

impl FormedHeads {
    pub(super) fn writes(formed: Option<Self>) -> impl Iterator<Item = Resource> {
        formed.into_iter().flat_map(|formed| buffers([formed.numbers, formed.scales]))
    }

    /// As the shaders of attention take them: whether there are any, and where they go.
    pub(super) fn arguments(formed: Option<Self>, r: &Recorder<'_>) -> (u32, [u64; 2]) {
        formed.map_or((0, [0; 2]), |formed| (1, [r.address(formed.numbers), r.address(formed.scales)]))
    }

    /// Makes them of what attention has stored, where it did not.
    pub(super) fn dispatch(self, r: &mut Recorder<'_>) -> Result<(), DeviceError> {
        let (rows, runs) = (r.bind(self.rows), self.width / 4);
        let group = runs.next_power_of_two().clamp(32, 256);
        let constants = [group, runs.div_ceil(group), 0, 0, 0, 4].map(|n| n as u32);
        let addresses = [r.address(self.from), 0, 0, 0, 0, 0, 0, r.address(self.numbers), r.address(self.scales)];
        let [low, high] = [f32::NEG_INFINITY, f32::INFINITY].map(f32::to_bits);
        r.inner_barrier();
        r.flat(kernels::ROW, &constants, rows, 1, &addresses, &[rows as u32, self.width as u32, 0, low, high, 1f32.to_bits()])
    }
}

impl RowWork {
    /// The row as it is.
    pub(super) fn plain() -> Self {
        Self { gate: None, norm: 0, weight: 0, bias: 0, eps: 0.0, sum: None, result: None, form: None, product: None }
    }
}

impl Lowering<'_> {
    /// Adds a step that works on whole rows of `x`; returns them as products take them, where that was asked for.
    pub(super) fn row_step(&mut self, x: &View, work: RowWork) -> Option<Prepared> {
        let (width, outer) = (x.width(), x.outer().to_vec());
        let (blocks, rows) = (width.div_ceil(32), self.bytes(&outer) / 4);
        let prepared = work.form.map(|(form, _)| self.form_buffers(form, width, rows));
        let form = match work.form.map(|(form, _)| form) {
            None => 0,
            Some(ActivationForm::F32) => 1,
            Some(ActivationForm::F16) => 2,
            Some(ActivationForm::I8Row) => 3,
            Some(ActivationForm::I8Block32) => 4,
        };
        // Each invocation holds runs of four numbers.
        let runs = (blocks * 8).max(1);
        let group = runs.next_power_of_two().clamp(32, 256);
        let (gated, act) = work.gate.map_or((0, 0), |(function, _)| (1, function));
        let constants = [group as u32, runs.div_ceil(group) as u32, gated, act, work.norm, form];
        let [low, high] = work.form.map_or([f32::NEG_INFINITY, f32::INFINITY], |(_, clip)| clip);
        let (from, up, result) = (x.buffer, work.gate.map(|(_, up)| up), work.result);
        let (weight, bias, eps) = (work.weight, work.bias, work.eps);
        let (row, product, sum) = (Row::of(from, &work), work.product, work.sum);
        let reads = [from]
            .into_iter()
            .chain(up)
            .chain(sum.map(|sum| sum.added))
            .map(Resource::Buffer)
            .chain(product.iter().flat_map(Product::reads))
            .collect();
        let made = prepared.map(|p| [Some(p.numbers), p.scales]).into_iter().flatten().flatten().chain(product.map(|product| product.to));
        let writes = result.into_iter().chain(made).map(Resource::Buffer).collect();
        // Products of one row bring it into its form themselves.
        let alone = result.filter(|_| prepared.is_none() || is_one_row(&outer));
        if alone.is_some() {
            self.single.row(width);
        }
        self.step(reads, writes, move |r| {
            let rows = r.volume(&outer);
            if let (Some(product), true) = (product, r.is_single()) {
                r.instruct(product.instruction(r));
                return Ok(());
            }
            if let (Some(result), true) = (alone, r.is_single()) {
                r.instruct(row.instruction(r, rows, width, sum, result));
                return Ok(());
            }
            let place = |buffer: Option<usize>| buffer.map_or(0, |buffer| r.address(buffer));
            let (numbers, scales) = (place(prepared.map(|p| p.numbers)), place(prepared.and_then(|p| p.scales)));
            let [added, factor] = Sum::addresses(sum, r);
            let addresses = [r.address(from), place(up), weight, bias, added, factor, place(result), numbers, scales];
            let arguments = [rows as u32, width as u32, eps.to_bits(), low.to_bits(), high.to_bits(), Sum::scale(sum)];
            r.flat(kernels::ROW, &constants, rows, 1, &addresses, &arguments)
        });
        if let (Some(prepared), Some((form, clip)), Some(result)) = (prepared, work.form, result) {
            self.prepared.insert((result, width, form, clip.map(f32::to_bits)), prepared);
        }
        prepared
    }

    /// Memory for so many rows in a form.
    fn form_buffers(&mut self, form: ActivationForm, width: usize, rows: u64) -> Prepared {
        let blocks = width.div_ceil(32);
        let (bytes, scales) = match form {
            ActivationForm::F32 | ActivationForm::F16 => (4, 0),
            ActivationForm::I8Row => (1, 1),
            ActivationForm::I8Block32 => (1, blocks),
        };
        // Products of small matrices read whole tiles of rows.
        let numbers = self.buffer(rows.next_multiple_of(64) * 32 * (blocks * bytes) as u64);
        let scales = (scales > 0).then(|| self.buffer(4 * rows * scales as u64));
        Prepared { numbers, scales, stride: blocks * 32 }
    }

    /// Heads that attention is about to make, in int8 by blocks: where products read all heads of a row so, attention stores them.
    pub(super) fn formed_heads(&mut self, name: &Name, y: &View) -> Option<FormedHeads> {
        let (heads, dim) = (Self::fixed(y.shape[1]), y.width());
        let width = heads * dim;
        let wanted = |&reader: &usize| match &self.program.ops[reader].op {
            OpKind::Reshape { shape, .. } => {
                shape.last() == Some(&Dim::Fixed(width))
                    && self.wanted_form(&self.program.ops[reader].path, width).is_some_and(|(form, _)| form == ActivationForm::I8Block32)
            }
            _ => false,
        };
        if dim % 32 != 0 || !self.program.readers(name).iter().any(wanted) {
            return None;
        }
        let rows = self.bytes(&y.shape[..1]) / 4;
        let prepared = self.form_buffers(ActivationForm::I8Block32, width, rows);
        let bounds = [f32::NEG_INFINITY, f32::INFINITY].map(f32::to_bits);
        self.prepared.insert((y.buffer, width, ActivationForm::I8Block32, bounds), prepared);
        Some(FormedHeads { from: y.buffer, numbers: prepared.numbers, scales: prepared.scales?, rows: y.shape[0], width })
    }

    /// The form in which products read a value that is about to be made, and whether anything else reads it. None where they read it in several forms, or as it is.
    pub(super) fn wanted_form(&self, name: &Name, width: usize) -> Option<(ActivationForm, bool)> {
        let (mut form, mut others) = (None, self.is_kept(name) || !self.program.stages_shown_by(name).is_empty());
        for &reader in self.program.readers(name) {
            let read = match &self.program.ops[reader].op {
                OpKind::Linear { activation, clip: None, .. } => *activation,
                OpKind::Experts { x, form, .. } if x == name => *form,
                // The same rows under another name.
                OpKind::Reshape { shape, .. } => match (shape.last(), self.wanted_form(&self.program.ops[reader].path, width)) {
                    (Some(&Dim::Fixed(own)), Some((form, false))) if own == width => form,
                    _ => {
                        others = true;
                        continue;
                    }
                },
                _ => {
                    others = true;
                    continue;
                }
            };
            match form {
                _ if read == ActivationForm::F32 => others = true,
                None => form = Some(read),
                Some(known) if known == read => {}
                Some(_) => others = true,
            }
        }
        form.map(|form| (form, others))
    }

    /// A gate whose result only products read: gated, rounded and stored in one pass.
    pub(super) fn gated(&mut self, path: &Name, op: &OpKind) -> bool {
        let OpKind::GateAct { gate, up, activation } = op else { return false };
        let (x, up) = (self.view(gate), self.view(up));
        let Some(&Dim::Fixed(width)) = x.shape.last() else { return false };
        let Some((form, others)) = self.wanted_form(path, width) else { return false };
        let y = self.result(path);
        let result = Some(y.buffer).filter(|_| others);
        let act = function(*activation);
        let OpKind::GateAct { gate, up: up_name, .. } = op else { return false };
        let product = self.pair(gate, up_name, act, y.buffer);
        let form = (form, [f32::NEG_INFINITY, f32::INFINITY]);
        let work = RowWork { gate: Some((act, up.buffer)), result, form: Some(form), product, ..RowWork::plain() };
        let row = Row::of(x.buffer, &work);
        let prepared = self.row_step(&x, work);
        let step = self.steps.len() - 1;
        self.remember(&y, form.0, prepared);
        // Without products of their own, gates are done by those that read them.
        if product.is_none() {
            self.steps[step].left_out = self.note_row(path, &y, row);
        }
        self.define(path, y);
        true
    }

    /// Products that read a value in this form take it from there.
    pub(super) fn remember(&mut self, view: &View, form: ActivationForm, prepared: Option<Prepared>) {
        let bounds = [f32::NEG_INFINITY, f32::INFINITY].map(f32::to_bits);
        if let Some(prepared) = prepared {
            self.prepared.insert((view.buffer, view.width(), form, bounds), prepared);
        }
    }

    /// The sum that alone reads a product, where its other side is known already: the product adds it.
    pub(super) fn added(&mut self, product: &Name) -> Option<(Name, View)> {
        if self.is_kept(product) || !self.program.stages_shown_by(product).is_empty() {
            return None;
        }
        let [reader] = *self.program.readers(product) else { return None };
        let op = &self.program.ops[reader];
        let OpKind::Add { a, b } = &op.op else { return None };
        let other = if a == product { b } else { a };
        let view = self.values.get(other).filter(|_| a != b)?.clone();
        self.done.insert(reader);
        Some((op.path.clone(), view))
    }

    /// The sum that alone reads a row, and the scaling by one number that alone reads that: both are done with the row. Also the name of what comes out.
    pub(super) fn sum(&mut self, row: &Name) -> Option<(Name, Sum)> {
        let (name, other) = self.added(row)?;
        let mut sum = Sum { added: other.buffer, factor: 0, scale: 1.0 };
        if self.is_kept(&name) || !self.program.stages_shown_by(&name).is_empty() {
            return Some((name, sum));
        }
        let [reader] = *self.program.readers(&name) else { return Some((name, sum)) };
        let op = &self.program.ops[reader];
        let OpKind::Scale { factor, weight, .. } = &op.op else { return Some((name, sum)) };
        if weight.as_ref().is_some_and(|weight| self.program.weights[weight].shape.iter().product::<usize>() != 1) {
            return Some((name, sum));
        }
        (sum.factor, sum.scale) = (self.plain(weight.as_ref()), *factor);
        self.done.insert(reader);
        Some((op.path.clone(), sum))
    }

    /// Rows as they enter a product: as they are where that will do, else made once for all products that read them so.
    pub(super) fn prepared(&mut self, x: &View, form: ActivationForm, clip: Option<&Clip>) -> Prepared {
        let bounds = clip.map_or([f32::NEG_INFINITY, f32::INFINITY], |clip| clip.input);
        if form == ActivationForm::F32 && x.width() % 32 == 0 && bounds == [f32::NEG_INFINITY, f32::INFINITY] {
            return Prepared { numbers: x.buffer, scales: None, stride: x.width() };
        }
        let key = (x.buffer, x.width(), form, bounds.map(f32::to_bits));
        if let Some(&prepared) = self.prepared.get(&key) {
            return prepared;
        }
        let prepared = self.row_step(x, RowWork { form: Some((form, bounds)), ..RowWork::plain() });
        let prepared = prepared.unwrap_or_else(|| unreachable!("a form was asked for"));
        self.prepared.insert(key, prepared);
        prepared
    }

    /// A norm of heads that only a rotary embedding reads.
    pub(super) fn norm_before_rope(&mut self, path: &Name, op: &OpKind) -> bool {
        let OpKind::RmsNorm { x, weight, eps } = op else { return false };
        let [reader] = *self.program.readers(path) else { return false };
        let next = &self.program.ops[reader];
        let OpKind::Rope { positions, rotary, .. } = &next.op else { return false };
        if self.is_kept(path) || !self.program.stages_shown_by(path).is_empty() || !self.values.contains_key(positions) {
            return false;
        }
        let (x, weight) = (self.view(x), self.plain(weight.as_ref()));
        self.done.insert(reader);
        self.turned(&next.path, &x, positions, rotary, Some((weight, *eps)));
        true
    }
}

/// Buffers of a product's rows.
pub(super) fn reads_of(p: Prepared) -> Vec<Resource> {
    let mut reads = buffers([p.numbers]);
    reads.extend(p.scales.map(Resource::Buffer));
    reads
}

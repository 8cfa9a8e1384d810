//! From a checked program to steps: names become places, views cost nothing, results go over operands that nobody needs any more, and products that read the same
//! rows become one step.

mod products;
mod resolve;

use crate::{
    kernels::{
        hadamard::Hadamard,
        map::{Binary, Unary},
    },
    matrix::Plain,
    memory::{Place, View, count},
    ops::{Step, attend, conv, elementwise, experts, gated_delta, hadamard, linear, norm, rope, route, rows, short_conv},
    plan::{self, Buffer},
};
use qhx_ir::{ActivationForm, Bindings, Checked, DType, DeviceError, Dim, Mask, Name, Op, OpKind, Slot, Weights};
use resolve::Uses;
use std::{collections::HashMap, sync::Arc};

/// A program ready to run.
pub(crate) struct Compiled {
    pub(crate) steps: Vec<Step>,
    /// From this step on, all work on wanted rows only: it can be done for some of them after the others.
    pub(crate) wanted_from: usize,
    /// In the order in which they are delivered.
    pub(crate) taps: Vec<Tapped>,
    /// In the program's order.
    pub(crate) outputs: Vec<View>,
    /// First number of each buffer in the arena.
    pub(crate) offsets: Vec<usize>,
    /// Numbers of the arena.
    pub(crate) arena: usize,
    /// Scratch numbers of each thread.
    pub(crate) scratch: usize,
    /// All dimensions that a call must make whole.
    pub(crate) quotients: Vec<Dim>,
    /// The number of experts of each step that has some.
    pub(crate) expert_counts: Vec<usize>,
}

/// A stage's tap.
pub(crate) struct Tapped {
    /// Delivered when so many steps are done.
    pub(crate) after: usize,
    /// The stage's place.
    pub(crate) stage: usize,
    pub(crate) view: View,
    pub(crate) shape: Vec<Dim>,
    pub(crate) integers: bool,
}

/// Compiles `program` for calls up to `max`.
///
/// Products that are outputs get a shortlist where their matrix has at least `shortlist_from` bytes.
pub(crate) fn compile(
    program: &Checked,
    weights: &Arc<dyn Weights>,
    max: Bindings,
    shortlist_from: usize,
) -> Result<Compiled, DeviceError> {
    let order = products::order(program);
    let mut compiler = Compiler {
        program,
        weights,
        max,
        uses: Uses::of(program, &order),
        position: 0,
        slots: program.slots.keys().enumerate().map(|(place, name)| (name, place)).collect(),
        values: HashMap::new(),
        buffers: Vec::new(),
        steps: Vec::new(),
        wanted_from: 0,
        taps: Vec::new(),
        prepared: HashMap::new(),
        tables: HashMap::new(),
        expert_counts: Vec::new(),
        shortlist_from,
    };
    for (place, input) in program.inputs.iter().enumerate() {
        compiler.define(&input.name, View::dense(Place::Input(place), &input.shape));
    }
    for (position, group) in order.iter().enumerate() {
        compiler.position = position;
        match group[..] {
            [op] => compiler.op(&program.ops[op])?,
            _ => compiler.products(group)?,
        }
    }
    compiler.finish()
}

struct Compiler<'a> {
    program: &'a Checked,
    weights: &'a Arc<dyn Weights>,
    max: Bindings,
    uses: Uses,
    /// Of the op that is compiled now, in the order of execution.
    position: usize,
    /// Places of slots in the states.
    slots: HashMap<&'a Name, usize>,
    values: HashMap<Name, View>,
    buffers: Vec<Buffer>,
    steps: Vec<Step>,
    wanted_from: usize,
    taps: Vec<Tapped>,
    /// Prepared rows by value, form and clip.
    prepared: HashMap<(Name, ActivationForm, Option<[u32; 2]>), View>,
    /// Rotary tables by positions and rotary.
    tables: HashMap<(Name, Name), View>,
    expert_counts: Vec<usize>,
    shortlist_from: usize,
}

impl Compiler<'_> {
    fn op(&mut self, op: &Op) -> Result<(), DeviceError> {
        let path = &op.path;
        match &op.op {
            OpKind::Embed { ids, table, scale } => {
                let (ids, out) = (self.view(ids), self.result(path)?);
                let step = rows::Embed { ids, table: self.matrix(table)?, scale: *scale, out };
                self.push(Step::Embed(step), &[ids, out]);
                self.define(path, out);
            }
            OpKind::Interpolate { index, factor, table } => {
                let (index, factor, out) = (self.view(index), self.view(factor), self.result(path)?);
                let taps = index.width(&self.max);
                let step = rows::Interpolate { index, factor, taps, table: self.matrix(table)?, out };
                self.push(Step::Interpolate(step), &[index, factor, out]);
                self.define(path, out);
            }
            OpKind::Linear { .. } => self.products_of(&[op])?,
            OpKind::RmsNorm { x, weight, eps } => {
                let weight = weight.as_ref().map(|w| self.plain(w)).transpose()?;
                self.norm(path, x, false, weight, None, *eps)?;
            }
            OpKind::LayerNorm { x, weight, bias, eps } => {
                let weight = self.plain(weight)?;
                let bias = bias.as_ref().map(|b| self.plain(b)).transpose()?;
                self.norm(path, x, true, Some(weight), bias, *eps)?;
            }
            OpKind::Rope { x, positions, rotary } => self.rope(path, x, positions, rotary)?,
            OpKind::Attend { .. } => self.attend(op)?,
            OpKind::ShortConv { x, weight, bias, slot, activation } => {
                let per_row = self.rows_per_row(x);
                let (x, out) = (self.view(x), self.result(path)?);
                let channels = x.width(&self.max);
                let step = short_conv::ShortConv {
                    x,
                    taps: transposed(self.plain(weight)?.numbers(), channels),
                    channels,
                    bias: bias.as_ref().map(|b| self.plain(b)).transpose()?,
                    slot: slot.as_ref().map(|slot| self.slot(slot)),
                    activation: *activation,
                    per_row,
                    out,
                };
                self.push(Step::ShortConv(Box::new(step)), &[x, out]);
                self.define(path, out);
            }
            OpKind::GatedDelta { q, k, v, a, b, a_log, dt_bias, slot, scale, eps } => {
                let per_row = self.rows_per_row(q);
                let Slot::Delta { heads, key_dim, value_dim } = self.program.slots[slot] else { unreachable!("checked: a delta slot") };
                let [q, k, v, a, b] = [q, k, v, a, b].map(|name| self.view(name));
                let out = self.result(path)?;
                let step = gated_delta::GatedDelta {
                    q,
                    k,
                    v,
                    a,
                    b,
                    a_log: self.plain(a_log)?,
                    dt_bias: self.plain(dt_bias)?,
                    slot: self.slot(slot),
                    scale: *scale,
                    eps: *eps,
                    key_heads: q.fixed / key_dim,
                    heads,
                    key_dim,
                    value_dim,
                    per_row,
                    out,
                };
                self.push(Step::GatedDelta(Box::new(step)), &[q, k, v, a, b, out]);
                self.define(path, out);
            }
            OpKind::Route { scores, method } => {
                let scores = self.view(scores);
                let [experts, weights] = [0, 1].map(|i| op.outputs()[i].clone());
                let (chosen, weight_view) = (self.result(&experts)?, self.result(&weights)?);
                let step = route::Route { scores, experts: scores.width(&self.max), method: *method, chosen, weights: weight_view };
                self.push(Step::Route(step), &[scores, chosen, weight_view]);
                self.define(&experts, chosen);
                self.define(&weights, weight_view);
            }
            OpKind::Experts { .. } => self.experts(op)?,
            OpKind::GateAct { gate, up, activation } => self.binary(path, Binary::Gate(*activation), gate, up)?,
            OpKind::Add { a, b } => self.binary(path, Binary::Add, a, b)?,
            OpKind::Mul { a, b } => self.binary(path, Binary::Mul, a, b)?,
            OpKind::Activate { x, activation } => self.unary(path, Unary::Activate(*activation), x)?,
            OpKind::Hadamard { x } => {
                let transform = Hadamard::new(self.last(x));
                let (x, out) = (self.view(x), self.result_over(path, &[x])?);
                self.push(Step::Hadamard(hadamard::HadamardRows { transform, x, out }), &[x, out]);
                self.define(path, out);
            }
            OpKind::Softcap { x, cap } => self.unary(path, Unary::Softcap(*cap), x)?,
            OpKind::Clamp { x, low, high } => self.unary(path, Unary::Clamp(*low, *high), x)?,
            OpKind::Scale { x, factor, weight: None } => self.unary(path, Unary::Scale(*factor), x)?,
            OpKind::Scale { x, factor, weight: Some(weight) } => {
                let weight = self.plain(weight)?;
                if let [one] = weight.numbers() {
                    return self.unary(path, Unary::Scale(factor * one), x);
                }
                let (x, out) = (self.view(x), self.result_over(path, &[x])?);
                self.push(Step::ScaleBy(elementwise::ScaleBy { factor: *factor, weight, x, out }), &[x, out]);
                self.define(path, out);
            }
            OpKind::Concat { xs } => {
                let parts = xs.iter().map(|name| self.part(name, None)).collect::<Vec<_>>();
                self.copy(path, parts)?;
            }
            OpKind::Slice { x, axis, start, length } => self.slice(path, x, *axis, *start, *length)?,
            OpKind::Reshape { x, shape } => self.reshape(path, x, shape)?,
            OpKind::Gather { x, rows } => {
                let (x, rows, out) = (self.view(x), self.view(rows), self.result(path)?);
                self.push(Step::Gather(rows::Gather { x, rows, out }), &[x, rows, out]);
                self.define(path, out);
            }
            OpKind::ScatterRows { x, rows, at } => self.scatter(path, x, rows, at, false)?,
            OpKind::ScatterAddRows { x, rows, at } => self.scatter(path, x, rows, at, true)?,
            OpKind::Conv2d { x, weight, bias, stride } => {
                let per_row = self.rows_per_row(x);
                let [outputs, kernel, _, channels] = self.program.weights[weight].shape[..] else {
                    unreachable!("checked: [out, kernel, kernel, in]")
                };
                let (x, out) = (self.view(x), self.result(path)?);
                let step = conv::Conv2d {
                    x,
                    width: x.width(&self.max) / channels,
                    channels,
                    kernel,
                    stride: *stride,
                    taps: transposed(self.plain(weight)?.numbers(), outputs),
                    outputs,
                    bias: bias.as_ref().map(|b| self.plain(b)).transpose()?,
                    per_row,
                    out,
                };
                self.push(Step::Conv2d(Box::new(step)), &[x, out]);
                self.define(path, out);
            }
            OpKind::Pool { x, size } => {
                let per_row = self.rows_per_row(x);
                let (x, out) = (self.view(x), self.result(path)?);
                self.push(Step::Pool(conv::Pool { x, size: *size, per_row, out }), &[x, out]);
                self.define(path, out);
            }
        }
        Ok(())
    }

    fn unary(&mut self, path: &Name, op: Unary, x: &Name) -> Result<(), DeviceError> {
        let (x, out) = (self.view(x), self.result_over(path, &[x])?);
        self.push(Step::Unary(elementwise::UnaryStep { op, x, out }), &[x, out]);
        self.define(path, out);
        Ok(())
    }

    fn binary(&mut self, path: &Name, op: Binary, a: &Name, b: &Name) -> Result<(), DeviceError> {
        let out = self.result_over(path, &[a, b])?;
        let (a, b) = (self.view(a), self.view(b));
        self.push(Step::Binary(elementwise::BinaryStep { op, a, b, out }), &[a, b, out]);
        self.define(path, out);
        Ok(())
    }

    fn norm(
        &mut self,
        path: &Name,
        x: &Name,
        centred: bool,
        weight: Option<Plain>,
        bias: Option<Plain>,
        eps: f32,
    ) -> Result<(), DeviceError> {
        let width = self.last(x);
        let (x, out) = (self.view(x), self.result_over(path, &[x])?);
        self.push(Step::Norm(norm::NormRows { centred, weight, bias, eps, width, x, out }), &[x, out]);
        self.define(path, out);
        Ok(())
    }

    fn scatter(&mut self, path: &Name, x: &Name, new: &Name, at: &Name, add: bool) -> Result<(), DeviceError> {
        let out = self.result_over(path, &[x])?;
        let (x, rows, at) = (self.view(x), self.view(new), self.view(at));
        // A value scattered into itself needs a copy.
        let out = if rows.place == out.place { self.result(path)? } else { out };
        self.push(Step::Scatter(rows::Scatter { x, rows, at, add, out }), &[x, rows, at, out]);
        self.define(path, out);
        Ok(())
    }

    fn rope(&mut self, path: &Name, x: &Name, positions: &Name, rotary: &Name) -> Result<(), DeviceError> {
        let data = Arc::new(self.program.rotaries[rotary].clone());
        let (frequencies, dim) = (data.variant(0).inv_freq.len(), self.last(x));
        if frequencies == 0 {
            return self.unary(path, Unary::Scale(1.0), x);
        }
        let key = (positions.clone(), rotary.clone());
        let table = match self.tables.get(&key) {
            Some(table) => *table,
            None => {
                let first = self.view(x).first;
                let (positions, out) = (self.view(positions), self.buffer(&[first, Dim::Fixed(2 * frequencies)])?);
                self.push(Step::RopeTable(rope::Table { rotary: data.clone(), positions, out }), &[positions, out]);
                self.tables.insert(key, out);
                out
            }
        };
        let (x, out) = (self.view(x), self.result_over(path, &[x])?);
        self.push(Step::Rope(rope::Rope { rotary: data, table, dim, x, out }), &[x, table, out]);
        self.define(path, out);
        Ok(())
    }

    fn attend(&mut self, op: &Op) -> Result<(), DeviceError> {
        let OpKind::Attend { q, kv, slot, mask, scale, softcap, relative_keys } = &op.op else { unreachable!("called for attend") };
        let [_, Dim::Fixed(heads), Dim::Fixed(dim)] = self.program.value_type(q).shape[..] else {
            unreachable!("checked: [rows, heads, dim]")
        };
        let kv_views = kv.as_ref().map(|kv| (self.view(&kv.k), self.view(&kv.v)));
        let (kv_heads, source) = match (slot, kv_views) {
            (Some(name), views) => {
                let Slot::Kv { kv_heads, .. } = self.program.slots[name] else { unreachable!("checked: a KV slot") };
                let slot = self.slot(name);
                if let Some((keys, values)) = views {
                    self.push(Step::StoreKv(attend::Store { keys, values, slot }), &[keys, values]);
                }
                (kv_heads, attend::Source::Slot(slot))
            }
            (None, Some((keys, values))) => (keys.fixed / dim, attend::Source::Own { keys, values }),
            (None, None) => unreachable!("checked: keys come from the op or from a slot"),
        };
        let per_row = self.rows_per_row(q);
        let (q, out) = (self.view(q), self.result(&op.path)?);
        let partial = self.buffer(&[Dim::Fixed(1), Dim::Fixed(attend::Attend::partial_numbers(heads, kv_heads, dim))])?;
        let relative_keys = relative_keys.as_ref().map(|table| self.plain(table)).transpose()?;
        let (mask, scale, softcap) = (*mask, *scale, *softcap);
        debug_assert!(mask != Mask::Window(0));
        let step = attend::Attend { q, heads, kv_heads, dim, source, mask, scale, softcap, relative_keys, per_row, partial, out };
        let mut views = vec![q, partial, out];
        if let attend::Source::Own { keys, values } = source {
            views.extend([keys, values]);
        }
        self.push(Step::Attend(Box::new(step)), &views);
        self.define(&op.path, out);
        Ok(())
    }

    fn experts(&mut self, op: &Op) -> Result<(), DeviceError> {
        let OpKind::Experts { x, experts: chosen, weights, gate, up, down, activation, form, bias, held } = &op.op else {
            unreachable!("called for experts")
        };
        let [x, chosen, weights] = [x, chosen, weights].map(|name| self.view(name));
        let held = held.as_ref().map(|name| self.view(name));
        let (gate, up, down) = (self.matrix(gate)?, self.matrix(up)?, self.matrix(down)?);
        let bias = bias.as_ref().map(|bias| Ok::<_, DeviceError>([self.plain(&bias.gate)?, self.plain(&bias.up)?])).transpose()?;
        let (hidden, ffn, k) = (gate.columns, down.columns, chosen.width(&self.max));
        let experts = down.rows / hidden;
        let out = self.result(&op.path)?;
        let choices = x.rows(&self.max).checked_mul(k).ok_or_else(too_large)?;
        let order = self.buffer(&[Dim::Fixed(1), Dim::Fixed(experts::order_numbers(experts, choices))])?;
        let mut room = |width: usize| self.buffer(&[x.first, Dim::Fixed(k), Dim::Fixed(width)]);
        let inputs = room(linear::prepared_width(*form, hidden))?;
        let (gated, upped) = (room(ffn)?, room(ffn)?);
        let inner = room(linear::prepared_width(*form, ffn))?;
        let results = room(hidden)?;
        let views = [x, chosen, weights, order, inputs, gated, upped, inner, results, out];
        let step = experts::Experts {
            x,
            chosen,
            weights,
            held,
            k,
            experts,
            number: self.expert_counts.len(),
            gate,
            up,
            down,
            bias,
            activation: *activation,
            form: *form,
            order,
            inputs,
            gated,
            upped,
            inner,
            results,
            out,
        };
        self.expert_counts.push(experts);
        self.push(Step::Experts(Box::new(step)), &views);
        self.define(&op.path, out);
        Ok(())
    }

    /// Outputs are dense f32 buffers that live to the end; then everything has its place.
    fn finish(mut self) -> Result<Compiled, DeviceError> {
        self.position = usize::MAX;
        let mut outputs = Vec::new();
        for output in &self.program.outputs {
            let view = self.view(&output.value);
            let integers = self.program.value_type(&output.value).dtype == DType::I32;
            let plain = matches!(view.place, Place::Buffer(_)) && view.stride.is_none() && view.offset == 0 && !integers;
            let view = if plain { view } else { self.dense_copy(&output.value)? };
            if let Place::Buffer(buffer) = view.place {
                self.buffers[buffer].last = usize::MAX;
            }
            outputs.push(view);
        }
        let (offsets, arena) = plan::plan(&self.buffers).ok_or_else(too_large)?;
        let dims = self.program.ops.iter().flat_map(|op| op.outputs()).chain(self.program.inputs.iter().map(|i| i.name.clone()));
        let mut quotients: Vec<Dim> = dims.flat_map(|name| self.program.value_type(&name).shape.clone()).collect();
        quotients.retain(|dim| matches!(dim, Dim::Exact(..)));
        quotients.sort_unstable();
        quotients.dedup();
        let scratch = self.steps.iter().map(Step::scratch).max().unwrap_or(0).next_multiple_of(32);
        let Self { steps, wanted_from, taps, expert_counts, .. } = self;
        Ok(Compiled { steps, wanted_from, taps, outputs, offsets, arena, scratch, quotients, expert_counts })
    }
}

/// Rows become columns: from `[rows, n]` to `[n, rows]`.
fn transposed(numbers: &[f32], rows: usize) -> Vec<f32> {
    let columns = numbers.len() / rows;
    (0..numbers.len()).map(|i| numbers[i % rows * columns + i / rows]).collect()
}

fn too_large() -> DeviceError {
    DeviceError::Resources("the program's intermediate values are too large for this machine: load it for fewer rows per call".into())
}

/// A dimension's number in the largest call.
fn largest(dim: Dim, max: &Bindings) -> usize {
    count(dim, max)
}

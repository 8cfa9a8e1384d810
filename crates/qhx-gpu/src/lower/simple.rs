//! Ops that work on one row at a time, or move rows.

use super::{
    Lowering, View, buffers,
    fusion::RowWork,
    single::{Product, Row, Transform, Turned},
};
use crate::{
    kernels,
    recorder::{Recorder, Resource, fold},
    stream::{Instruction, Needs, Operation},
};
use qhx_ir::{Activation, Checked, DeviceError, Dim, Name, OpKind, Routing, Symbol, hadamard};
use std::collections::BTreeMap;

/// The number of a function in `common.glsl`.
pub(super) fn function(activation: Activation) -> u32 {
    match activation {
        Activation::Silu => 0,
        Activation::GeluTanh => 1,
        Activation::GeluErf => 2,
        Activation::Sigmoid => 3,
        Activation::Relu => 4,
    }
}

/// Tables of numbers that ops need beside weights, by their use.
pub(crate) fn tables(program: &Checked) -> BTreeMap<String, Vec<u8>> {
    let mut tables = BTreeMap::new();
    for op in &program.ops {
        match &op.op {
            OpKind::Hadamard { x } => {
                let width = View::of(program, x).width();
                let (_, odd) = hadamard::factors(width);
                if odd > 1 {
                    let numbers: Vec<f32> = hadamard::hartley(odd).into_iter().map(|x| x as f32).collect();
                    tables.insert(format!("hartley {odd}"), bytemuck::cast_slice(&numbers).to_vec());
                }
            }
            OpKind::Rope { x, rotary, .. } => {
                let dim = View::of(program, x).width();
                let own = &program.rotaries[rotary];
                let variants = own.variants.iter().flat_map(|v| v.inv_freq.iter().copied().chain([v.amplitude]));
                tables.insert(format!("frequencies {rotary}"), variants.flat_map(f32::to_le_bytes).collect());
                let frequencies = own.variants.first().map_or(0, |v| v.inv_freq.len());
                let streams = (0..frequencies).flat_map(|f| (own.stream(f) as u32).to_le_bytes());
                tables.insert(format!("streams {rotary}"), streams.collect());
                // Of each number of a head: its partner, its frequency, and whether it is the second of the pair.
                let mut roles = vec![[u32::MAX, 0, 0]; dim];
                let mut frequency = 0;
                for &(start, length) in &own.blocks {
                    for i in 0..length / 2 {
                        let (a, b) = (start + i, start + i + length / 2);
                        roles[a] = [b as u32, frequency, 0];
                        roles[b] = [a as u32, frequency, 1];
                        frequency += 1;
                    }
                }
                tables.insert(format!("roles {rotary} {dim}"), roles.iter().flatten().flat_map(|n| n.to_le_bytes()).collect());
            }
            _ => {}
        }
    }
    tables
}

impl View {
    /// The shape of a value, before it has a place.
    fn of(program: &Checked, name: &Name) -> Self {
        let kind = program.value_type(name);
        Self { buffer: 0, shape: kind.shape.clone(), dtype: kind.dtype }
    }
}

/// What `map.comp` calls an activation of one value times another.
pub(super) const GATED: u32 = 2;

/// Heads that are turned, and normed before where there is a norm: its weight and the number under the root.
#[derive(Clone)]
pub(super) struct Turning {
    /// That does it.
    pub(super) step: usize,
    pub(super) from: usize,
    outer: Vec<Dim>,
    heads: usize,
    dim: usize,
    norm: Option<(u64, f32)>,
    pub(super) turns: usize,
    roles: u64,
    frequencies: u32,
}

impl Turning {
    /// Adds the dispatch. `kept`: keys go to pages of this kind; `kept_by` are then the call, the values and where the slot begins in a page.
    pub(super) fn dispatch(&self, r: &mut Recorder<'_>, kept: u32, to: u64, kept_by: [u64; 3]) -> Result<(), DeviceError> {
        let (count, (weight, eps)) = (r.volume(&self.outer), self.norm.unwrap_or((0, 0.0)));
        let constants = [self.dim as u32, self.norm.is_some() as u32, kept];
        let addresses = [&[r.address(self.from), weight, r.address(self.turns), self.roles, to], &kept_by[..]].concat();
        let numbers = [count as u32, self.heads as u32, self.frequencies, eps.to_bits()];
        r.flat(kernels::ROPE, &constants, count, 1, &addresses, &numbers)
    }
}

impl Lowering<'_> {
    pub(super) fn map(&mut self, path: &Name, op: &OpKind) -> Result<(), DeviceError> {
        let (a, b, operation, activation, weight, low, high) = match op {
            OpKind::Add { a, b } => (a, Some(b), 0, None, None, 0.0, 0.0),
            OpKind::Mul { a, b } => (a, Some(b), 1, None, None, 0.0, 0.0),
            OpKind::GateAct { gate, up, activation } => (gate, Some(up), 2, Some(*activation), None, 0.0, 0.0),
            OpKind::Activate { x, activation } => (x, None, 3, Some(*activation), None, 0.0, 0.0),
            OpKind::Scale { x, factor, weight: Some(weight) } => (x, None, 4, None, Some(weight), *factor, 0.0),
            OpKind::Scale { x, factor, weight: None } => (x, None, 5, None, None, *factor, 0.0),
            OpKind::Softcap { x, cap } => (x, None, 6, None, None, *cap, 0.0),
            OpKind::Clamp { x, low, high } => (x, None, 7, None, None, *low, *high),
            _ => unreachable!("an elementwise op"),
        };
        let (a, b, y) = (self.view(a), b.map(|b| self.view(b)), self.result(path));
        let numbers = weight.map_or(1, |name| self.program.weights[name].shape.iter().product::<usize>());
        let weight = self.plain(weight);
        let constants = [operation, activation.map_or(0, function)];
        let (from, to, shape) = (a.buffer, y.buffer, y.shape.clone());
        let other = b.map(|b| b.buffer);
        let product = match op {
            OpKind::GateAct { gate, up, activation } => self.pair(gate, up, function(*activation), to),
            _ => None,
        };
        let reads = [from].into_iter().chain(other).map(Resource::Buffer).chain(product.iter().flat_map(Product::reads)).collect();
        let group = self.single.group();
        self.step(reads, buffers([to]), move |r| {
            if let (Some(product), true) = (product, r.is_single()) {
                r.instruct(product.instruction(r));
                return Ok(());
            }
            let count = r.volume(&shape);
            let second = other.map_or(weight, |b| r.address(b));
            let arguments = [count as u32, numbers as u32, low.to_bits(), high.to_bits()];
            if r.is_single() {
                let (addresses, numbers) = ([r.address(from), second, r.address(to)], [&arguments[..], &constants].concat());
                let needs = activation.map_or(Needs::default(), |activation| Needs::function(function(activation)));
                r.instruct(Instruction::new(Operation::Map, count.div_ceil(group), &addresses, &numbers).needing(needs));
                return Ok(());
            }
            r.flat(kernels::MAP, &constants, count, 256, &[r.address(from), second, r.address(to)], &arguments)
        });
        // Without products of their own, gates are done by those that read them.
        if let (OpKind::GateAct { activation, .. }, Some(up), None) = (op, other, product) {
            let row = Row { gate: Some((function(*activation), up)), ..Row::plain(from) };
            let step = self.steps.len() - 1;
            self.steps[step].left_out = self.note_row(path, &y, row);
        }
        self.define(path, y);
        Ok(())
    }

    pub(super) fn norm(&mut self, path: &Name, op: &OpKind) -> Result<(), DeviceError> {
        let (x, weight, bias, eps, norm) = match op {
            OpKind::RmsNorm { x, weight, eps } => (x, weight.as_ref(), None, *eps, 1),
            OpKind::LayerNorm { x, weight, bias, eps } => (x, Some(weight), bias.as_ref(), *eps, 2),
            _ => unreachable!("a norm"),
        };
        if self.norm_before_rope(path, op) {
            return Ok(());
        }
        let x = self.view(x);
        let sum = self.sum(path);
        let path = sum.as_ref().map_or(path, |(name, _)| name);
        let (y, sum) = (self.result(path), sum.as_ref().map(|(_, sum)| *sum));
        let wanted = self.wanted_form(path, x.width());
        let result = Some(y.buffer).filter(|_| sum.is_some() || wanted.is_none_or(|(_, others)| others));
        let form = wanted.map(|(form, _)| (form, [f32::NEG_INFINITY, f32::INFINITY]));
        let (weight, bias) = (self.plain(weight), self.plain(bias));
        let work = RowWork { norm, weight, bias, eps, sum, result, form, ..RowWork::plain() };
        let row = Row::of(x.buffer, &work);
        let prepared = self.row_step(&x, work);
        let step = self.steps.len() - 1;
        self.steps[step].left_out = sum.is_none() && self.note_row(path, &y, row);
        if let Some((form, _)) = wanted {
            self.remember(&y, form, prepared);
        }
        self.define(path, y);
        Ok(())
    }

    pub(super) fn rope(&mut self, path: &Name, x: &Name, positions: &Name, rotary: &Name) -> Result<(), DeviceError> {
        let x = self.view(x);
        self.turned(path, &x, positions, rotary, None);
        Ok(())
    }

    /// Heads, normed where `norm` gives a weight and the number under the root, then turned.
    pub(super) fn turned(&mut self, path: &Name, x: &View, positions: &Name, rotary: &Name, norm: Option<(u64, f32)>) {
        let turns = self.turns(positions, rotary);
        let y = self.result(path);
        let (heads, dim) = (Self::fixed(x.shape[1]), x.width());
        let roles = self.table(&format!("roles {rotary} {dim}"));
        let frequencies = self.program.rotaries[rotary].variants[0].inv_freq.len() as u32;
        let (from, to, outer) = (x.buffer, y.buffer, y.outer().to_vec());
        let step = self.steps.len();
        self.note_turned(to, Turned { step, from, norm, turns, roles });
        let turning = Turning { step, from, outer, heads, dim, norm, turns, roles, frequencies };
        let own = turning.clone();
        self.step(buffers([from, turns]), buffers([to]), move |r| own.dispatch(r, 0, r.address(to), [0; 3]));
        self.turnings.insert(path.clone(), turning);
        self.define(path, y);
    }

    /// The cosines and sines of a rotary for all rows, made once.
    fn turns(&mut self, positions: &Name, rotary: &Name) -> usize {
        let key = (positions.clone(), rotary.clone());
        if let Some(&buffer) = self.turns.get(&key) {
            return buffer;
        }
        let view = self.view(positions);
        let own = &self.program.rotaries[rotary];
        let (variants, frequencies) = (own.variants.len(), own.variants[0].inv_freq.len());
        let rows = view.shape[1];
        let bytes = self.bytes(&[rows, (2 * frequencies).into()]);
        let (to, from) = (self.buffer(bytes), view.buffer);
        let (table, streams) = (self.table(&format!("frequencies {rotary}")), self.table(&format!("streams {rotary}")));
        let per_row = rows.rows_per_row().unwrap_or(1) as u32;
        self.step(buffers([from]), buffers([to]), move |r| {
            let rows = r.bind(rows);
            let addresses = [r.call(), r.address(from), table, streams, r.address(to)];
            let numbers = [rows as u32, frequencies as u32, variants as u32, per_row];
            r.flat(kernels::ROTARY, &[], rows * frequencies, 64, &addresses, &numbers)
        });
        self.turns.insert(key, to);
        to
    }

    pub(super) fn route(&mut self, path: &Name, scores: &Name, method: &Routing) -> Result<(), DeviceError> {
        let names = [format!("{path}.experts").into(), format!("{path}.weights").into()];
        let (x, [chosen, weights]) = (self.view(scores), names.each_ref().map(|name| self.result(name)));
        let experts = x.width() as u32;
        let (mixer, top, renormalise, band) = match *method {
            Routing::SparseMixer { jitter } => (1, 2, 0, 2.0 * jitter),
            Routing::Softmax { top_k, renormalise } => (0, top_k as u32, renormalise as u32, 0.0),
        };
        let (from, a, b, outer) = (x.buffer, chosen.buffer, weights.buffer, x.outer().to_vec());
        self.single.room(4 * x.width());
        self.step(buffers([from]), buffers([a, b]), move |r| {
            let rows = r.volume(&outer);
            let addresses = [r.address(from), r.address(a), r.address(b)];
            if r.is_single() && rows == 1 {
                let numbers = [experts, mixer, top, renormalise, band.to_bits()];
                r.instruct(Instruction::new(Operation::Route, 1, &addresses, &numbers));
                return Ok(());
            }
            r.flat(kernels::ROUTE, &[mixer], rows, 64, &addresses, &[rows as u32, experts, top, renormalise, band.to_bits()])
        });
        let [first, second] = names;
        self.define(&first, chosen);
        self.define(&second, weights);
        Ok(())
    }

    pub(super) fn hadamard(&mut self, path: &Name, x: &Name) -> Result<(), DeviceError> {
        let (x, y) = (self.view(x), self.result(path));
        let (width, bytes) = (x.width(), self.bytes(&x.shape));
        let (_, odd) = hadamard::factors(width);
        let table = self.table(&format!("hartley {odd}"));
        let (from, to, room, outer) = (x.buffer, y.buffer, self.buffer(bytes), x.outer().to_vec());
        let factor = (1.0 / (width as f64).sqrt()) as f32;
        let row = self.transformed(&x, Transform { hartley: table, odd: odd as u32, factor });
        let reads = [Resource::Buffer(from)].into_iter().chain(row.iter().flat_map(Row::reads)).collect();
        self.step(reads, buffers([to, room]), move |r| {
            let rows = r.volume(&outer);
            if let (Some(row), true) = (row, r.is_single()) {
                r.instruct(row.instruction(r, rows, width, None, to));
                return Ok(());
            }
            let [a, b] = fold(rows);
            let addresses = [r.address(from), table, r.address(room), r.address(to)];
            let numbers = [rows as u32, width as u32, odd as u32, factor.to_bits()];
            r.dispatch(kernels::HADAMARD, &[], [a, b, 1], &addresses, &numbers)
        });
        if let Some(row) = row {
            let step = self.steps.len() - 1;
            self.steps[step].left_out = self.note_row(path, &y, row);
        }
        self.define(path, y);
        Ok(())
    }

    pub(super) fn moved(&mut self, path: &Name, op: &OpKind) -> Result<(), DeviceError> {
        let y = self.result(path);
        match op {
            OpKind::Concat { xs } => {
                let (to, total, mut at, mut parts) = (y.buffer, y.width(), 0, Vec::new());
                for x in xs {
                    let x = self.view(x);
                    parts.push((x.buffer, x.width(), at));
                    at += x.width();
                }
                let (reads, outer) = (parts.iter().map(|part| Resource::Buffer(part.0)).collect(), y.outer().to_vec());
                self.step(reads, buffers([to]), move |r| {
                    let rows = r.volume(&outer);
                    for &(from, width, at) in &parts {
                        let numbers = [rows, width, width, 0, total, at].map(|n| n as u32);
                        r.flat(kernels::ROWS, &[0], rows * width, 256, &[r.address(from), 0, r.address(to)], &numbers)?;
                    }
                    Ok(())
                });
            }
            OpKind::Slice { x, axis, start, length } => {
                let x = self.view(x);
                let (outer, inner) = (x.shape[..*axis].to_vec(), x.shape[axis + 1..].to_vec());
                let (from, to, along, start, length) = (x.buffer, y.buffer, x.shape[*axis], *start, *length);
                let fixed = |dims: &[Dim]| {
                    let one = |dim: &Dim| matches!(dim, Dim::Symbol(Symbol::T | Symbol::L)).then_some(1);
                    dims.iter().map(|dim| if let Dim::Fixed(n) = dim { Some(*n) } else { one(dim) }).product::<Option<usize>>()
                };
                let (alone, first) = (fixed(&outer) == Some(1), fixed(&inner).map(|inner| 4 * start * inner));
                let group = self.single.group();
                self.step(buffers([from]), buffers([to]), move |r| {
                    let (rows, inner) = (r.volume(&outer), r.volume(&inner));
                    let width = length * inner;
                    let numbers = [rows, width, r.bind(along) * inner, start * inner, width, 0].map(|n| n as u32);
                    if r.is_single() {
                        let addresses = [r.address(from), r.address(to)];
                        r.instruct(Instruction::new(Operation::Part, (rows * width).div_ceil(group), &addresses, &numbers));
                        return Ok(());
                    }
                    r.flat(kernels::ROWS, &[0], rows * width, 256, &[r.address(from), 0, r.address(to)], &numbers)
                });
                if let (true, Some(first)) = (alone, first) {
                    self.alias(to, from, first as u64);
                }
            }
            OpKind::Gather { x, rows } => {
                let (x, index) = (self.view(x), self.view(rows));
                let (from, at, to) = (x.buffer, index.buffer, y.buffer);
                let (rows, inner) = (index.shape[0], x.shape[1..].to_vec());
                self.step(buffers([from, at]), buffers([to]), move |r| {
                    let (rows, width) = (r.bind(rows), r.volume(&inner));
                    let numbers = [rows, width, width, 0, width, 0].map(|n| n as u32);
                    let addresses = [r.address(from), r.address(at), r.address(to)];
                    r.flat(kernels::ROWS, &[1], rows * width, 256, &addresses, &numbers)
                });
                // One wanted row of one row.
                if [x.shape[0], rows] == [Dim::Symbol(Symbol::T), Dim::Symbol(Symbol::L)] {
                    self.alias(to, from, 0);
                }
            }
            _ => unreachable!("an op that moves rows"),
        }
        self.define(path, y);
        Ok(())
    }

    pub(super) fn scatter(&mut self, path: &Name, x: &Name, rows: &Name, at: &Name, add: bool) -> Result<(), DeviceError> {
        let (x, rows, at, y) = (self.view(x), self.view(rows), self.view(at), self.result(path));
        let (from, new, index, to) = (x.buffer, rows.buffer, at.buffer, y.buffer);
        let (shape, count, inner) = (x.shape.clone(), rows.shape[0], x.shape[1..].to_vec());
        self.step(buffers([from, new, index]), buffers([to]), move |r| {
            let (all, width) = (r.volume(&shape), r.volume(&inner));
            let numbers = [1, all, all, 0, all, 0].map(|n| n as u32);
            r.flat(kernels::ROWS, &[0], all, 256, &[r.address(from), 0, r.address(to)], &numbers)?;
            let rows = r.bind(count);
            if rows > 0 {
                r.inner_barrier();
            }
            let numbers = [rows, width, width, 0, width, 0].map(|n| n as u32);
            let addresses = [r.address(new), r.address(index), r.address(to)];
            r.flat(kernels::ROWS, &[if add { 3 } else { 2 }], rows * width, 256, &addresses, &numbers)
        });
        // A call of one row has no soft rows, see `executable.rs`.
        if count == Dim::Symbol(Symbol::R) {
            self.alias(to, from, 0);
        }
        self.define(path, y);
        Ok(())
    }
}

//! The step of one row: ops become instructions of `step.comp`, most of them together with their neighbours.
//!
//! A norm or gate is done by the products that read it, the products of gate and up are one, a rotary embedding and the keeping of keys and values are parts of
//! attention, and slices are views. Steps whose work is done so are left out where a call has one row.

use super::{
    Lowering, View,
    fusion::{RowWork, Sum},
    products::form_constant,
};
use crate::{
    recorder::{Aliases, Recorder, Resource},
    stream::{Instruction, Needs, Operation, StreamPlan},
    weights::Matrix,
};
use qhx_ir::{ActivationForm, Dim, Name, OpKind, Symbol};
use std::collections::HashMap;

/// What is known of values, by their buffers.
pub(super) struct Single {
    plan: Option<StreamPlan>,
    pub(super) aliases: Aliases,
    /// Rows that products can make for themselves.
    rows: HashMap<usize, Row>,
    turned: HashMap<usize, Turned>,
    products: HashMap<usize, (usize, Product)>,
    /// Rows in a form: the same number, the same content.
    sources: HashMap<SourceKey, u32>,
}

/// The row's buffer, its width, the number of the weights' kind and the bounds.
type SourceKey = (usize, usize, usize, [u32; 2]);

/// A row before a product takes it.
#[derive(Clone, Copy)]
pub(super) struct Row {
    pub(super) x: usize,
    pub(super) gate: Option<(u32, usize)>,
    pub(super) norm: u32,
    pub(super) weight: u64,
    pub(super) bias: u64,
    pub(super) eps: f32,
    /// What is done with it then.
    pub(super) transform: Option<Transform>,
}

/// A Hadamard transform of a row.
#[derive(Clone, Copy)]
pub(super) struct Transform {
    /// The address of the dense block, or 0 where it is 1.
    pub(super) hartley: u64,
    pub(super) odd: u32,
    pub(super) factor: f32,
}

/// A head that is turned, and normed where `norm` says so.
#[derive(Clone, Copy)]
pub(super) struct Turned {
    pub(super) step: usize,
    pub(super) from: usize,
    pub(super) norm: Option<(u64, f32)>,
    pub(super) turns: usize,
    pub(super) roles: u64,
}

/// A product as an instruction.
#[derive(Clone, Copy)]
pub(super) struct Product {
    pub(super) kind: usize,
    pub(super) teams: usize,
    pub(super) source: u32,
    pub(super) row: Row,
    pub(super) width: usize,
    pub(super) half: bool,
    pub(super) bounds: [f32; 2],
    pub(super) matrices: [Matrix; 2],
    pub(super) outputs: usize,
    /// The addresses, or 0: of the product, or of gate and up.
    pub(super) biases: [u64; 2],
    pub(super) clip: [f32; 2],
    pub(super) added: Option<usize>,
    /// The function between gate and up.
    pub(super) pair: Option<u32>,
    pub(super) experts: Option<Experts>,
    pub(super) to: usize,
}

/// Whose weights a product takes.
#[derive(Clone, Copy)]
pub(super) struct Experts {
    pub(super) count: usize,
    pub(super) choices: usize,
    pub(super) chosen: usize,
    /// The table of places, where not all experts are there.
    pub(super) places: Option<usize>,
    /// With factors: the sum of the choices' products.
    pub(super) factors: Option<usize>,
}

const NONE: u32 = u32::MAX;
/// With so few outputs, lanes take halves of weight rows, so that all of the GPU is busy.
const FEW_OUTPUTS: usize = 4096;
/// With so few, workgroups take them.
const VERY_FEW_OUTPUTS: usize = 64;

impl Row {
    /// The row as it is.
    pub(super) fn plain(x: usize) -> Self {
        Self { x, gate: None, norm: 0, weight: 0, bias: 0, eps: 0.0, transform: None }
    }

    pub(super) fn of(x: usize, work: &RowWork) -> Self {
        Self { x, gate: work.gate, norm: work.norm, weight: work.weight, bias: work.bias, eps: work.eps, transform: None }
    }

    /// As `row.glsl` takes it.
    fn flags(&self) -> u32 {
        self.gate.is_some() as u32 | self.norm << 1 | self.gate.map_or(0, |(function, _)| function) << 4
    }

    /// Buffers that it is made of.
    pub(super) fn reads(&self) -> impl Iterator<Item = Resource> + use<> {
        [Some(self.x), self.gate.map(|(_, up)| up)].into_iter().flatten().map(Resource::Buffer)
    }

    fn addresses(&self, r: &Recorder<'_>) -> [u64; 4] {
        [r.address(self.x), self.gate.map_or(0, |(_, up)| r.address(up)), self.weight, self.bias]
    }

    /// As `step_hadamard.glsl` takes the transform; no odd factor: there is none.
    fn transform_words(&self) -> [u32; 4] {
        self.transform.map_or([0; 4], |own| [own.hartley as u32, (own.hartley >> 32) as u32, own.odd, own.factor.to_bits()])
    }

    /// Rows of `width` numbers.
    pub(super) fn instruction(&self, r: &Recorder<'_>, rows: usize, width: usize, sum: Option<Sum>, to: usize) -> Instruction {
        let addresses = [&self.addresses(r)[..], &Sum::addresses(sum, r), &[r.address(to)]].concat();
        let numbers = [&[width as u32, self.eps.to_bits(), self.flags(), Sum::scale(sum)], &self.transform_words()[..]].concat();
        Instruction::new(Operation::Row, rows, &addresses, &numbers).needing(self.needs(width))
    }

    fn needs(&self, width: usize) -> Needs {
        let transform = self.transform.map_or(Needs::default(), |_| Needs::transform(width));
        Needs::row(width, self.gate.map(|(function, _)| function), self.norm, self.bias != 0).and(transform)
    }
}

impl Product {
    pub(super) fn instruction(&self, r: &Recorder<'_>) -> Instruction {
        let place = |buffer: Option<usize>| buffer.map_or(0, |buffer| r.address(buffer));
        let [a, b] = self.matrices;
        let experts = self.experts;
        let choice = [experts.map(|e| e.chosen), experts.and_then(|e| e.factors), experts.and_then(|e| e.places)].map(place);
        // Nothing is added to what gate and up make.
        let added = self.added.map_or(self.biases[1], |added| r.address(added));
        let own = [a.data, b.data, a.scales, b.scales, a.minima, b.minima, self.biases[0], added, r.address(self.to)];
        let addresses = [&self.row.addresses(r)[..], &own, &choice].concat();
        let mode = experts.map_or(0, |experts| if experts.factors.is_some() { 2 } else { 1 });
        let choices = experts.map_or(1, |experts| experts.choices);
        let chunks = self.width.div_ceil(a.chunk_columns());
        let halves = self.pair.is_none() && self.outputs <= FEW_OUTPUTS && chunks > 1;
        let wide = halves && mode == 0 && self.outputs <= VERY_FEW_OUTPUTS;
        let task_rows = if self.pair.is_some() || halves { 1 } else { 2 };
        let each = if wide { self.outputs } else { self.outputs.div_ceil(self.teams * task_rows) };
        let [low, high, in_low, in_high] = [self.clip[0], self.clip[1], self.bounds[0], self.bounds[1]].map(f32::to_bits);
        let numbers = [
            self.width as u32,
            self.outputs as u32,
            a.data_bytes,
            a.scale_bytes,
            a.min_bytes,
            low,
            high,
            in_low,
            in_high,
            self.row.eps.to_bits(),
            self.row.flags() | (self.half as u32) << 8,
            self.pair.unwrap_or(NONE),
            self.source,
            choices as u32,
            experts.map_or(1, |experts| experts.count) as u32,
            mode,
            chunks as u32,
            if halves { chunks.div_ceil(2) as u32 } else { 0 },
            if wide { 0 } else { task_rows as u32 },
            each as u32,
        ];
        let numbers = [&numbers[..], &self.row.transform_words()].concat();
        let groups = if mode == 1 { each * choices } else { each };
        let between = self.pair.map_or(Needs::default(), Needs::function);
        Instruction::new(Operation::Product(self.kind), groups, &addresses, &numbers).needing(self.row.needs(self.width)).needing(between)
    }

    pub(super) fn reads(&self) -> Vec<Resource> {
        let experts = self.experts.iter().flat_map(|e| [Some(e.chosen), e.factors, e.places]);
        let others = experts.chain([self.added]).flatten().map(Resource::Buffer);
        self.row.reads().chain(others).collect()
    }
}

impl Single {
    pub(super) fn new(plan: Option<StreamPlan>) -> Self {
        let (rows, turned, products, sources) = Default::default();
        Self { plan, aliases: Aliases::new(), rows, turned, products, sources }
    }

    /// The plan, unless a value that is delivered has no place of its own.
    pub(super) fn finish(self, mut outputs: impl Iterator<Item = usize>) -> (Option<StreamPlan>, Aliases) {
        let aliased = outputs.any(|buffer| self.aliases.contains_key(&buffer));
        (self.plan.filter(|_| !aliased).and_then(StreamPlan::complete), self.aliases)
    }

    /// Elements that the invocations of a workgroup take at once.
    pub(super) fn group(&self) -> usize {
        self.plan.as_ref().map_or(1, |plan| plan.group)
    }

    /// A row instruction of this width will be needed.
    pub(super) fn row(&mut self, width: usize) {
        if let Some(plan) = &mut self.plan {
            plan.row(width);
        }
    }

    /// Whether rows of this width can be transformed by instructions.
    pub(super) fn transforms(&self, width: usize) -> bool {
        self.plan.as_ref().is_some_and(|plan| plan.transforms(width))
    }

    /// An instruction will need so many bytes of a workgroup's room.
    pub(super) fn room(&mut self, bytes: usize) {
        if let Some(plan) = &mut self.plan {
            plan.take_room(bytes);
        }
    }

    /// The number of a kind of heads.
    pub(super) fn attention(&mut self, slot: u32, dim: usize, share: usize) -> usize {
        self.plan.as_mut().map_or(0, |plan| plan.attention(slot, dim, share))
    }
}

/// Whether a value of this shape, without the last dimension, is one row where the call has one.
pub(super) fn is_one_row(outer: &[Dim]) -> bool {
    outer.iter().all(|dim| matches!(dim, Dim::Fixed(1) | Dim::Symbol(Symbol::T | Symbol::L)))
}

impl Lowering<'_> {
    /// Notes how the rows of a value are made. True where only products and transforms of single rows read them, which make them for themselves.
    pub(super) fn note_row(&mut self, path: &Name, y: &View, row: Row) -> bool {
        // A row is transformed once.
        let may_be_transformed = row.transform.is_none() && self.single.transforms(y.width());
        if self.single.plan.is_none() || !is_one_row(y.outer()) || !self.only_products_read(path, y.width(), may_be_transformed) {
            return false;
        }
        self.single.rows.insert(y.buffer, row);
        true
    }

    fn only_products_read(&self, name: &Name, width: usize, or_transforms: bool) -> bool {
        let reads = |&reader: &usize| {
            let op = &self.program.ops[reader];
            match &op.op {
                OpKind::Linear { .. } => true,
                OpKind::Experts { x, experts, weights, .. } => x == name && experts != name && weights != name,
                OpKind::Hadamard { .. } => or_transforms,
                OpKind::Reshape { shape, .. } => {
                    shape.last() == Some(&Dim::Fixed(width))
                        && is_one_row(&shape[..shape.len() - 1])
                        && self.only_products_read(&op.path, width, or_transforms)
                }
                _ => false,
            }
        };
        let readers = self.program.readers(name);
        !self.is_kept(name) && !readers.is_empty() && readers.iter().all(reads)
    }

    /// How rows of `x` are made and transformed, where instructions can do that.
    pub(super) fn transformed(&mut self, x: &View, transform: Transform) -> Option<Row> {
        let width = x.width();
        let plan = self.single.plan.as_mut().filter(|plan| plan.transforms(width))?;
        plan.transformed(width);
        let row = self.single.rows.get(&x.buffer).copied().unwrap_or(Row::plain(x.buffer));
        Some(Row { transform: Some(transform), ..row })
    }

    /// The product of a row of `x` with a weight, as an instruction. None where there is more than one row.
    pub(super) fn single_product(
        &mut self,
        x: &View,
        matrix: Matrix,
        activation: ActivationForm,
        bounds: [f32; 2],
        rows: usize,
        to: usize,
    ) -> Option<Product> {
        let (width, form, half) = (x.width(), form_constant(activation), activation == ActivationForm::F16);
        let row = self.single.rows.get(&x.buffer).copied().unwrap_or(Row::plain(x.buffer));
        let plan = self.single.plan.as_mut().filter(|_| rows > 1 || is_one_row(&x.shape[..x.shape.len() - 1]))?;
        let kind = plan.product(matrix.constants(), form, rows, width);
        let teams = plan.teams();
        let sources = &mut self.single.sources;
        // F16 and F32 weights of one kind may take rows in different forms.
        let key = (x.buffer, width, kind << 1 | half as usize, bounds.map(f32::to_bits));
        let next = sources.len() as u32;
        let source = *sources.entry(key).or_insert(next);
        Some(Product {
            kind,
            teams,
            source,
            row,
            width,
            half,
            bounds,
            matrices: [matrix; 2],
            outputs: matrix.rows,
            biases: [0; 2],
            clip: [f32::NEG_INFINITY, f32::INFINITY],
            added: None,
            pair: None,
            experts: None,
            to,
        })
    }

    /// Notes a product by the buffer of its result; it is the step that comes next.
    pub(super) fn note_product(&mut self, product: &Product) {
        self.single.products.insert(product.to, (self.steps.len(), *product));
    }

    /// The products of gate and up as one, where nothing else reads them; their steps are left out.
    pub(super) fn pair(&mut self, gate: &Name, up: &Name, function: u32, to: usize) -> Option<Product> {
        let alone = |name: &Name| self.program.readers(name).len() == 1 && !self.is_kept(name);
        let found = [gate, up].map(|name| self.single.products.get(&self.values[name].buffer).copied().filter(|_| alone(name)));
        let [Some((first, a)), Some((second, b))] = found else { return None };
        let unbounded = |p: &Product| p.biases == [0; 2] && p.clip == [f32::NEG_INFINITY, f32::INFINITY] && p.added.is_none();
        let same = a.source == b.source && a.kind == b.kind && a.outputs == b.outputs && unbounded(&a) && unbounded(&b);
        if !same || first == second {
            return None;
        }
        (self.steps[first].left_out, self.steps[second].left_out) = (true, true);
        Some(Product { matrices: [a.matrices[0], b.matrices[0]], pair: Some(function), to, ..a })
    }

    /// Notes that heads are turned by the step that comes next.
    pub(super) fn note_turned(&mut self, to: usize, turned: Turned) {
        self.single.turned.insert(to, turned);
    }

    /// How heads that only this attention reads are turned; their step is left out.
    pub(super) fn take_turned(&mut self, name: &Name) -> Option<Turned> {
        if self.single.plan.is_none() || self.program.readers(name).len() != 1 || self.is_kept(name) {
            return None;
        }
        let turned = self.single.turned.get(&self.values[name].buffer).copied()?;
        self.steps[turned.step].left_out = true;
        Some(turned)
    }

    /// The last step is left out where a call has one row: `y` is then what stands in `x` from a byte on.
    pub(super) fn alias(&mut self, y: usize, x: usize, offset: u64) {
        // Shaders read vectors of 16 bytes.
        if self.single.plan.is_none() || offset % 16 != 0 {
            return;
        }
        let (base, first) = self.single.aliases.get(&x).copied().unwrap_or((x, 0));
        self.single.aliases.insert(y, (base, first + offset));
        if let Some(step) = self.steps.last_mut() {
            step.left_out = true;
        }
    }
}

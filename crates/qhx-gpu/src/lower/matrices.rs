//! Products of several rows with weights, and with the weights of chosen experts, by products of small matrices.

use super::{Lowering, Prepared, buffers, fusion::reads_of, simple::GATED};
use crate::{
    kernels::{self, Kernel},
    recorder::{Recorder, Resource, bind},
    vulkan::{Adapter, Kind, SmallMatrices},
    weights::Matrix,
};
use qhx_ir::{ActivationForm, DeviceError, Dim, Encoding};

/// How a weight meets rows in small matrices.
#[derive(Clone, Copy)]
pub(super) struct Small {
    matrices: SmallMatrices,
    /// In f16; else in int8.
    half: bool,
    /// Rows come as `linear_matrix.comp` names it.
    form: u32,
}

/// Rows whose numbers are two f16 each.
const SPLIT: u32 = 3;

impl Small {
    /// For a weight and rows in a form, where such products say exactly what the program says.
    pub(super) fn new(matrices: Option<SmallMatrices>, m: &Matrix, form: ActivationForm) -> Option<Self> {
        let matrices = matrices?;
        let [_, block, ..] = m.constants();
        let half = match (m.encoding, form) {
            (Encoding::F16, ActivationForm::F16 | ActivationForm::F32) => true,
            (Encoding::I8Row | Encoding::Block(_), ActivationForm::F16) => true,
            // A small matrix may not reach beyond a block, for blocks have scales.
            (Encoding::I8Row | Encoding::Block(_), ActivationForm::I8Row | ActivationForm::I8Block32) => block % matrices.byte_depth != 0,
            _ => return None,
        };
        let form = match form {
            ActivationForm::F32 => SPLIT,
            ActivationForm::F16 => 0,
            ActivationForm::I8Row => 1,
            ActivationForm::I8Block32 => 2,
        };
        Some(Self { matrices, half, form })
    }

    /// Whether rows have to be split: see [`Lowering::split`].
    pub(super) fn is_split(self) -> bool {
        self.form == SPLIT
    }

    /// Whether calls of so many rows take it.
    fn takes(self, rows: usize) -> bool {
        rows >= self.matrices.from_rows || self.is_few(rows)
    }

    /// Whether the call that is recorded takes it, with so many rows.
    pub(super) fn is_taken(self, r: &Recorder<'_>, rows: usize) -> bool {
        !r.is_alike() && self.takes(rows)
    }

    /// Whether any call of at most so many rows takes it.
    pub(super) fn takes_up_to(self, rows: usize) -> bool {
        rows >= self.matrices.from_rows.min(self.matrices.few_rows[0])
    }

    fn is_few(self, rows: usize) -> bool {
        let [from, to] = self.matrices.few_rows;
        (from..=to).contains(&rows)
    }

    /// How the work is divided where so many rows meet so many weight rows.
    fn shape(self, rows: usize, outputs: usize, adapter: &Adapter) -> Shape {
        let size = self.matrices.size as usize;
        if !self.is_few(rows) {
            let step = if self.half { 4 * size } else { 8 * size };
            return Shape { outputs: 4 * size, rows: 4 * size, own_outputs: 2 * size, own_rows: 2 * size, step, parts: 1 };
        }
        // Time goes into reading weights: many of them are on their way at once, and there are enough workgroups for all processors.
        let (outputs, parts, step) = match adapter.kind {
            // It compiles what is unrolled for long.
            Kind::Software => (size, 2, 128),
            _ if outputs <= FEW_OUTPUTS => (size, 8, 1024),
            _ => (2 * size, 8, 512),
        };
        let parts = parts.min(LARGEST_GROUP / adapter.subgroup_size as usize);
        let step = if self.half { step / 2 } else { step };
        let rows = self.tile(rows);
        let mut shape = Shape { outputs, rows, own_outputs: outputs, own_rows: rows, step, parts };
        while shape.step > 32 * parts && shape.bytes(self) > adapter.shared_memory as usize {
            shape.step /= 2;
        }
        shape
    }

    /// Rows of a tile in a call of so many.
    fn tile(self, rows: usize) -> usize {
        let size = self.matrices.size as usize;
        match (self.is_few(rows), rows <= size) {
            (true, true) => size,
            (true, false) => 2 * size,
            (false, _) => 4 * size,
        }
    }

    /// Adds the dispatch of a product.
    pub(super) fn product(self, r: &mut Recorder<'_>, m: Matrix, o: Operands) -> Result<(), DeviceError> {
        let SmallMatrices { size, byte_depth, half_depth, .. } = self.matrices;
        let (kernel, depth): (&Kernel, _) = match self.half {
            true => (kernels::LINEAR_MATRIX_HALF, half_depth),
            false => (kernels::LINEAR_MATRIX, byte_depth),
        };
        let shape = self.shape(o.call_rows, o.outputs, r.adapter());
        let grouped = o.groups.is_some() as u32;
        let lanes = shape.subgroups() as u32 * r.adapter().subgroup_size;
        let [tile_outputs, tile_rows, own_outputs, own_rows, step, parts] =
            [shape.outputs, shape.rows, shape.own_outputs, shape.own_rows, shape.step, shape.parts].map(|n| n as u32);
        let constants = [self.form, lanes, size, depth, tile_outputs, tile_rows, own_outputs, own_rows, step, 1, grouped, parts];
        let constants = [&m.constants()[..], &constants].concat();
        let place = |buffer: Option<usize>| buffer.map_or(0, |buffer| r.address(buffer));
        let groups = o.groups.map(|groups| groups.buffer);
        let p = o.x;
        let y = r.address(o.y);
        let addresses = [r.address(p.numbers), place(p.scales), m.data, m.scales, m.minima, o.bias, place(o.added), y, place(groups)];
        let numbers = [o.rows, m.columns, p.stride, o.outputs].map(|n| n as u32);
        let [low, high] = o.clip.map(f32::to_bits);
        let share = o.groups.map_or(1, |groups| groups.share) as u32;
        let numbers = [&numbers[..], &[m.data_bytes, m.scale_bytes, m.min_bytes, low, high, share]].concat();
        let tiles = o.groups.map_or(o.rows.div_ceil(shape.rows), |groups| groups.tiles);
        r.dispatch(kernel, &constants, [o.outputs.div_ceil(shape.outputs), tiles, 1], &addresses, &numbers)
    }
}

/// Invocations of a workgroup, at most.
const LARGEST_GROUP: usize = 256;
/// Weight rows with which few rows of a call have few workgroups.
const FEW_OUTPUTS: usize = 4096;

/// How `linear_matrix.comp` divides its work.
#[derive(Clone, Copy)]
struct Shape {
    /// Weight rows and rows of a workgroup.
    outputs: usize,
    rows: usize,
    /// Those of a subgroup.
    own_outputs: usize,
    own_rows: usize,
    /// Columns that wait in shared memory.
    step: usize,
    /// Parts of these, each for subgroups of its own.
    parts: usize,
}

impl Shape {
    fn subgroups(self) -> usize {
        self.outputs / self.own_outputs * (self.rows / self.own_rows) * self.parts
    }

    /// Shared memory that it takes, at most.
    fn bytes(self, small: Small) -> usize {
        let rows = self.outputs + if small.is_split() { 2 * self.rows } else { self.rows };
        let columns = if small.half || small.matrices.byte_depth < 16 { 8 } else { 16 };
        let staged = (16 * rows * (self.step / columns + 1)).max(4 * self.outputs * self.rows * self.parts);
        // Blocks have 16 columns, or more.
        staged + self.step / 16 * 4 * (rows + self.outputs) + 64
    }
}

/// What a product reads and writes, beside the weight.
pub(super) struct Operands {
    pub(super) x: Prepared,
    /// Of the call; and of the product, where each has several.
    pub(super) call_rows: usize,
    pub(super) rows: usize,
    pub(super) outputs: usize,
    /// The address, or 0. Where rows are grouped, each expert has its own.
    pub(super) bias: u64,
    pub(super) added: Option<usize>,
    pub(super) clip: [f32; 2],
    pub(super) y: usize,
    pub(super) groups: Option<Groups>,
}

/// Rows that are grouped by experts.
#[derive(Clone, Copy)]
pub(super) struct Groups {
    /// What `group.comp` writes.
    buffer: usize,
    /// At most.
    tiles: usize,
    /// Results of a row.
    share: usize,
}

/// The experts of an op, with its rows.
#[derive(Clone, Copy)]
pub(super) struct Mixture {
    pub(super) gate: Matrix,
    pub(super) up: Matrix,
    pub(super) down: Matrix,
    /// The addresses of those of gate and up, or 0.
    pub(super) biases: [u64; 2],
    pub(super) form: ActivationForm,
    /// The gate's function.
    pub(super) function: u32,
    pub(super) rows: Dim,
    pub(super) choices: usize,
    pub(super) count: usize,
    pub(super) chosen: usize,
    /// The table of places, where not all experts are there.
    pub(super) places: Option<usize>,
}

impl Mixture {
    /// Who chose which expert, and where it is: the buffers.
    fn choice(&self) -> Vec<Resource> {
        [self.chosen].into_iter().chain(self.places).map(Resource::Buffer).collect()
    }

    /// Their addresses; 0: each expert is where its number says.
    fn choice_addresses(&self, r: &Recorder<'_>) -> [u64; 2] {
        [r.address(self.chosen), self.places.map_or(0, |places| r.address(places))]
    }
}

/// The workgroup that groups rows counts those of so many experts in its shared memory.
const MOST_GROUPED: usize = 1024;

/// Where a call has many rows: they are grouped by experts, so that each weight is read once for all that chose it. The steps stand beside those of a few rows.
#[derive(Clone, Copy)]
pub(super) struct Grouped {
    mixture: Mixture,
    small: [Small; 3],
    groups: usize,
}

impl Grouped {
    /// Whether a call's rows are grouped.
    pub(super) fn takes(&self, r: &Recorder<'_>) -> bool {
        self.small[0].is_taken(r, r.bind(self.mixture.rows))
    }

    fn tile(&self, rows: usize) -> usize {
        self.small[0].tile(rows)
    }

    fn most_tiles(&self, rows: usize) -> usize {
        let pairs = rows * self.mixture.choices;
        pairs / self.tile(rows) + self.mixture.count.min(pairs)
    }

    /// Words of what `group.comp` writes.
    fn words(&self, rows: usize) -> usize {
        let tiles = self.most_tiles(rows);
        2 + tiles + tiles * self.tile(rows)
    }

    fn pairs(&self, r: &Recorder<'_>) -> usize {
        r.bind(self.mixture.rows) * self.mixture.choices
    }

    /// The product of all pairs with one of the weights.
    fn product(&self, r: &mut Recorder<'_>, place: usize, x: Prepared, share: usize, y: usize) -> Result<(), DeviceError> {
        let m = [self.mixture.gate, self.mixture.up, self.mixture.down][place];
        let bias = self.mixture.biases.get(place).copied().unwrap_or(0);
        let groups = Some(Groups { buffer: self.groups, tiles: self.most_tiles(r.bind(self.mixture.rows)), share });
        let (rows, outputs, clip) = (self.pairs(r), m.rows / self.mixture.count, [f32::NEG_INFINITY, f32::INFINITY]);
        let call_rows = r.bind(self.mixture.rows);
        self.small[place].product(r, m, Operands { x, call_rows, rows, outputs, bias, added: None, clip, y, groups })
    }
}

impl Lowering<'_> {
    /// Adds the steps up to the gated rows `inner`, if the device can.
    pub(super) fn group(&mut self, mixture: Mixture, x: Prepared, inner: usize) -> Option<Grouped> {
        let Mixture { gate, up, down, form, function, rows, choices, count, .. } = mixture;
        let [Some(a), Some(b), Some(c)] = [gate, up, down].map(|m| Small::new(self.matrices, &m, form)) else { return None };
        let most = bind(rows, &self.max);
        if !a.takes(most) || a.is_split() || count > MOST_GROUPED {
            return None;
        }
        let mut grouped = Grouped { mixture, small: [a, b, c], groups: 0 };
        // Fewer rows may have more tiles.
        let words = (1..=most).map(|rows| grouped.words(rows)).max().unwrap_or(0);
        grouped.groups = self.buffer(4 * words as u64);
        let inner_bytes = 4 * (most * choices * down.columns) as u64;
        let results = [self.buffer(inner_bytes), self.buffer(inner_bytes)];
        self.many_rows(mixture.choice(), grouped.groups, move |r| {
            if !grouped.takes(r) {
                return Ok(());
            }
            let numbers = [grouped.pairs(r), grouped.most_tiles(r.bind(rows))].map(|n| n as u32);
            let [chosen, places] = mixture.choice_addresses(r);
            let addresses = [chosen, r.address(grouped.groups), places];
            r.dispatch(kernels::GROUP, &[count as u32, grouped.tile(r.bind(rows)) as u32], [1; 3], &addresses, &numbers)
        });
        for (place, result) in results.into_iter().enumerate() {
            let reads = reads_of(x).into_iter().chain([Resource::Buffer(grouped.groups)]).collect();
            self.many_rows(reads, result, move |r| if grouped.takes(r) { grouped.product(r, place, x, choices, result) } else { Ok(()) });
        }
        let [gates, ups] = results;
        self.many_rows(buffers([gates, ups]), inner, move |r| {
            if !grouped.takes(r) {
                return Ok(());
            }
            let count = grouped.pairs(r) * down.columns;
            let addresses = [r.address(gates), r.address(ups), r.address(inner)];
            r.flat(kernels::MAP, &[GATED, function], count, 256, &addresses, &[count as u32, 1, 0, 0])
        });
        Some(grouped)
    }

    /// Adds the steps from the gated rows on.
    pub(super) fn ungroup(&mut self, grouped: Grouped, x: Prepared, factors: usize, added: Option<usize>, y: usize) {
        let mixture @ Mixture { down, rows, choices, .. } = grouped.mixture;
        let width = down.rows / grouped.mixture.count;
        let pairs = bind(rows, &self.max) * choices;
        let result = self.buffer(4 * (pairs * width) as u64);
        let reads = reads_of(x).into_iter().chain([Resource::Buffer(grouped.groups)]).collect();
        self.many_rows(reads, result, move |r| if grouped.takes(r) { grouped.product(r, 2, x, 1, result) } else { Ok(()) });
        let reads = [result, factors].into_iter().chain(added).map(Resource::Buffer).chain(mixture.choice()).collect();
        self.many_rows(reads, y, move |r| {
            if !grouped.takes(r) {
                return Ok(());
            }
            let count = r.bind(rows) * width;
            let [chosen, places] = mixture.choice_addresses(r);
            let added = added.map_or(0, |added| r.address(added));
            let addresses = [r.address(result), r.address(factors), added, chosen, places, r.address(y)];
            r.flat(kernels::COMBINE, &[], count, 256, &addresses, &[count, width, choices].map(|n| n as u32))
        });
    }

    /// Rows of floats, each number as two f16, where a call's products take them so.
    pub(super) fn split(&mut self, x: Prepared, outer: &[Dim], small: Small) -> Prepared {
        if let Some(&split) = self.splits.get(&x.numbers) {
            return split;
        }
        let (width, rows, outer) = (x.stride, self.bytes(outer) / 4, outer.to_vec());
        let bytes = rows.next_multiple_of(64) * 4 * width as u64;
        let (numbers, scales) = (self.buffer(bytes), self.buffer(4 * rows));
        let group = (width / 4).next_power_of_two().clamp(32, 256);
        let constants = [group, (width / 4).div_ceil(group), 0, 0, 0, 5].map(|n| n as u32);
        self.step(reads_of(x), buffers([numbers, scales]), move |r| {
            let rows = r.volume(&outer);
            if !small.is_taken(r, rows) {
                return Ok(());
            }
            let addresses = [r.address(x.numbers), 0, 0, 0, 0, 0, 0, r.address(numbers), r.address(scales)];
            let [low, high] = [f32::NEG_INFINITY, f32::INFINITY].map(f32::to_bits);
            r.flat(kernels::ROW, &constants, rows, 1, &addresses, &[rows as u32, width as u32, 0, low, high, 1f32.to_bits()])
        });
        self.left_out_of_one();
        let split = Prepared { numbers, scales: Some(scales), stride: width };
        self.splits.insert(x.numbers, split);
        split
    }

    /// Adds a step that a call of one row does without.
    fn many_rows(
        &mut self,
        reads: Vec<Resource>,
        result: usize,
        work: impl Fn(&mut Recorder<'_>) -> Result<(), DeviceError> + Send + 'static,
    ) {
        self.step(reads, buffers([result]), work);
        self.left_out_of_one();
    }

    /// A call of one row does without the last step.
    fn left_out_of_one(&mut self) {
        if let Some(step) = self.steps.last_mut() {
            step.left_out = true;
        }
    }
}

//! Products of many rows with weights, and with the weights of chosen experts, by products of small matrices.

use super::{Lowering, Prepared, buffers, fusion::reads_of, simple::GATED};
use crate::{
    kernels::{self, Kernel},
    recorder::{Recorder, Resource, bind},
    vulkan::SmallMatrices,
    weights::Matrix,
};
use qhx_ir::{ActivationForm, DeviceError, Dim, Encoding};

/// How a weight meets rows in small matrices.
#[derive(Clone, Copy)]
pub(super) struct Small {
    matrices: SmallMatrices,
    /// In f16; else in int8.
    half: bool,
    form: ActivationForm,
}

impl Small {
    /// For a weight and rows in a form, where such products say exactly what the program says.
    pub(super) fn new(matrices: Option<SmallMatrices>, m: &Matrix, form: ActivationForm) -> Option<Self> {
        let matrices = matrices?;
        let [_, block, ..] = m.constants();
        let half = match (m.encoding, form) {
            (Encoding::F16, ActivationForm::F16) => true,
            (Encoding::I8Row | Encoding::Block(_), ActivationForm::F16) => true,
            // A small matrix may not reach beyond a block, for blocks have scales.
            (Encoding::I8Row | Encoding::Block(_), ActivationForm::I8Row | ActivationForm::I8Block32) => block % matrices.byte_depth != 0,
            _ => return None,
        };
        Some(Self { matrices, half, form })
    }

    /// Whether calls of so many rows take it.
    pub(super) fn takes(self, rows: usize) -> bool {
        rows >= self.matrices.from_rows
    }

    /// Outputs and rows of a workgroup.
    fn tile(self) -> usize {
        4 * self.matrices.size as usize
    }

    /// Adds the dispatch of a product.
    pub(super) fn product(self, r: &mut Recorder<'_>, m: Matrix, o: Operands) -> Result<(), DeviceError> {
        let SmallMatrices { size, byte_depth, half_depth, .. } = self.matrices;
        // Columns of a row that wait in shared memory.
        let (kernel, depth, step): (&Kernel, _, _) = match self.half {
            true => (kernels::LINEAR_MATRIX_HALF, half_depth, 4 * size),
            false => (kernels::LINEAR_MATRIX, byte_depth, 8 * size),
        };
        let form = match self.form {
            ActivationForm::F32 | ActivationForm::F16 => 0,
            ActivationForm::I8Row => 1,
            ActivationForm::I8Block32 => 2,
        };
        let (tile, own) = (4 * size, 2 * size);
        let grouped = o.groups.is_some() as u32;
        let constants = [form, 4 * r.adapter().subgroup_size, size, depth, tile, tile, own, own, step, 1, grouped];
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
        let tiles = o.groups.map_or(o.rows.div_ceil(self.tile()), |groups| groups.tiles);
        r.dispatch(kernel, &constants, [o.outputs.div_ceil(self.tile()), tiles, 1], &addresses, &numbers)
    }
}

/// What a product reads and writes, beside the weight.
pub(super) struct Operands {
    pub(super) x: Prepared,
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
        self.small[0].takes(r.bind(self.mixture.rows))
    }

    fn most_tiles(&self, rows: usize) -> usize {
        let pairs = rows * self.mixture.choices;
        pairs / self.small[0].tile() + self.mixture.count.min(pairs)
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
        self.small[place].product(r, m, Operands { x, rows, outputs, bias, added: None, clip, y, groups })
    }
}

impl Lowering<'_> {
    /// Adds the steps up to the gated rows `inner`, if the device can.
    pub(super) fn group(&mut self, mixture: Mixture, x: Prepared, inner: usize) -> Option<Grouped> {
        let Mixture { gate, up, down, form, function, rows, choices, count, chosen, .. } = mixture;
        let [Some(a), Some(b), Some(c)] = [gate, up, down].map(|m| Small::new(self.matrices, &m, form)) else { return None };
        let most = bind(rows, &self.max);
        if !a.takes(most) || count > MOST_GROUPED {
            return None;
        }
        let mut grouped = Grouped { mixture, small: [a, b, c], groups: 0 };
        let tiles = grouped.most_tiles(most);
        grouped.groups = self.buffer(4 * (2 + tiles + tiles * a.tile()) as u64);
        let inner_bytes = 4 * (most * choices * down.columns) as u64;
        let results = [self.buffer(inner_bytes), self.buffer(inner_bytes)];
        self.many_rows(buffers([chosen]), grouped.groups, move |r| {
            if !grouped.takes(r) {
                return Ok(());
            }
            let numbers = [grouped.pairs(r), grouped.most_tiles(r.bind(rows))].map(|n| n as u32);
            let addresses = [r.address(chosen), r.address(grouped.groups)];
            r.dispatch(kernels::GROUP, &[count as u32, a.tile() as u32], [1; 3], &addresses, &numbers)
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
        let Mixture { down, rows, choices, .. } = grouped.mixture;
        let width = down.rows / grouped.mixture.count;
        let pairs = bind(rows, &self.max) * choices;
        let result = self.buffer(4 * (pairs * width) as u64);
        let reads = reads_of(x).into_iter().chain([Resource::Buffer(grouped.groups)]).collect();
        self.many_rows(reads, result, move |r| if grouped.takes(r) { grouped.product(r, 2, x, 1, result) } else { Ok(()) });
        let reads = [result, factors].into_iter().chain(added).map(Resource::Buffer).collect();
        self.many_rows(reads, y, move |r| {
            if !grouped.takes(r) {
                return Ok(());
            }
            let count = r.bind(rows) * width;
            let addresses = [r.address(result), r.address(factors), added.map_or(0, |added| r.address(added)), r.address(y)];
            r.flat(kernels::COMBINE, &[], count, 256, &addresses, &[count, width, choices].map(|n| n as u32))
        });
    }

    /// Adds a step that a call of one row does without.
    fn many_rows(
        &mut self,
        reads: Vec<Resource>,
        result: usize,
        work: impl Fn(&mut Recorder<'_>) -> Result<(), DeviceError> + Send + 'static,
    ) {
        self.step(reads, buffers([result]), work);
        if let Some(step) = self.steps.last_mut() {
            step.left_out = true;
        }
    }
}

//! Products of quantised weights with quantised rows: integer sums block by block, scales in f32.
//!
//! Two shapes: [`products`] streams stored rows past a few activation rows (decode), [`matrix_products`] packs a panel of stored rows and multiplies it with many
//! activation rows (prefill). Both give the same bits: integer sums are exact, and each result adds up its blocks in f32 from first to last, with the same fused
//! operations. Where a row has one scale on both sides, there is one integer sum and one scale at its end.

pub(crate) mod activation;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

use super::{InstructionSet, Instructions, quants::Stored};
use crate::work::Tile;
use activation::{Layout, Row};
use half::f16;
use qhx_ir::SCALES_AT_ONCE;

/// Rows of a quantised matrix where they are stored.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weights<'a> {
    pub(crate) stored: Stored,
    /// Quants, row after row.
    pub(crate) data: &'a [u8],
    /// Bytes from one row of them to the next.
    pub(crate) stride: usize,
    pub(crate) scales: Scales<'a>,
    pub(crate) offsets: Offsets<'a>,
    /// Rows.
    pub(crate) rows: usize,
    /// Blocks in a row.
    pub(crate) blocks: usize,
}

/// Scales or minima, a stride of numbers from row to row.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Scales<'a> {
    /// One for the whole row.
    Row(&'a [f32]),
    /// One for each block.
    F16(&'a [f16], usize),
    /// One for each block.
    F32(&'a [f32], usize),
}

/// What a block adds to `stored quant · scale`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Offsets<'a> {
    /// Nothing.
    None,
    /// −8 · scale: stored quants 0..=15 mean −8..=7. Where that is free, kernels take the 8 off the quants or their integer sums instead.
    MinusEight,
    /// A stored minimum.
    Min(Scales<'a>),
}

/// Several quantised activation rows, `stride` numbers apart.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
pub(crate) struct ActivationRows<'a> {
    pub(crate) layout: Layout,
    pub(crate) numbers: &'a [f32],
    pub(crate) stride: usize,
    /// Whether each row has one scale for all its blocks.
    pub(crate) by_row: bool,
    /// All rows once more, where [`pack_rows`] packed them.
    pub(crate) packed: Option<&'a [f32]>,
}

impl<'a> ActivationRows<'a> {
    pub(crate) fn row(&self, row: usize) -> Row<'a> {
        self.layout.row(&self.numbers[row * self.stride..])
    }

    /// Several rows from `first` on.
    fn rows<const M: usize>(&self, first: usize) -> [Row<'a>; M] {
        std::array::from_fn(|m| self.row(first + m))
    }
}

/// Row `i` of `tile` becomes the products of activation row `first + i` with all rows of `w`, which are read once.
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
pub(crate) fn products(
    instructions: Instructions,
    w: &Weights<'_>,
    x: &ActivationRows<'_>,
    first: usize,
    tile: &mut Tile<'_, f32>,
    scratch: &mut [f32],
) {
    if !check(w, x, first, tile) {
        return;
    }
    match instructions.set() {
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2 => x86::dots::products_avx2(instructions, w, x, first, tile),
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512Vnni => x86::dots::products_vnni(instructions, w, x, first, tile),
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512Amx => x86::amx_few::products(instructions, w, x, first, tile, scratch),
        #[cfg(target_arch = "aarch64")]
        InstructionSet::Neon | InstructionSet::NeonDotprod | InstructionSet::NeonI8mm => neon::products(instructions, w, x, first, tile),
        InstructionSet::Portable => portable::products(w, x, first, tile),
        other => unreachable!("{other} is not available on this CPU"),
    }
}

/// Up to how many rows [`products`] is faster than [`matrix_products`]: measured.
pub(crate) fn few_rows(instructions: Instructions, w: &Weights<'_>, by_row: bool) -> usize {
    let whole = whole_rows(w, by_row);
    match instructions.set() {
        // Both are one.
        InstructionSet::Portable => usize::MAX,
        InstructionSet::Avx512Amx if w.stored != Stored::I8Block16 => 16,
        InstructionSet::Avx512Vnni if whole => 24,
        InstructionSet::Avx512Vnni | InstructionSet::Avx512Amx => 9,
        InstructionSet::Avx2 if whole => 16,
        InstructionSet::Avx2 => 7,
        InstructionSet::Neon | InstructionSet::NeonDotprod | InstructionSet::NeonI8mm => 12,
    }
}

/// Numbers of room that [`pack_rows`] needs for `rows` rows of `columns` numbers; nothing where packing them gains nothing.
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
pub(crate) fn packed_rows(instructions: Instructions, rows: usize, columns: usize) -> Option<usize> {
    match instructions.set() {
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512Amx if (x86::amx_few::LEAST..=x86::amx_few::MOST).contains(&rows) => Some(x86::amx_few::room(columns)),
        _ => None,
    }
}

/// The most that [`packed_rows`] gives for rows of `columns` numbers.
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
pub(crate) fn most_packed(columns: usize) -> usize {
    #[cfg(target_arch = "x86_64")]
    return x86::amx_few::room(columns);
    #[cfg(not(target_arch = "x86_64"))]
    0
}

/// Packs the first `count` rows of `x` into room of the size that [`packed_rows`] gives: done once, it serves all products with them.
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
pub(crate) fn pack_rows(instructions: Instructions, x: &ActivationRows<'_>, count: usize, room: &mut [f32]) {
    match instructions.set() {
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512Amx => x86::amx_few::pack(instructions, x, 0, count, room),
        other => unreachable!("{other} takes rows as they are"),
    }
}

/// The same as [`products`], by way of packed panels.
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(unused_variables))]
pub(crate) fn matrix_products(
    instructions: Instructions,
    w: &Weights<'_>,
    x: &ActivationRows<'_>,
    first: usize,
    tile: &mut Tile<'_, f32>,
    scratch: &mut [f32],
) {
    if !check(w, x, first, tile) {
        return;
    }
    match instructions.set() {
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2 => x86::avx2::matrix_products(instructions, w, x, first, tile, scratch),
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512Vnni => x86::vnni::matrix_products(instructions, w, x, first, tile, scratch),
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512Amx => x86::amx::matrix_products(instructions, w, x, first, tile, scratch),
        #[cfg(target_arch = "aarch64")]
        InstructionSet::Neon | InstructionSet::NeonDotprod | InstructionSet::NeonI8mm => {
            neon::matrix_products(instructions, w, x, first, tile, scratch)
        }
        InstructionSet::Portable => portable::products(w, x, first, tile),
        other => unreachable!("{other} is not available on this CPU"),
    }
}

/// Checks all lengths on which kernels rely, and says whether there is anything to do.
fn check(w: &Weights<'_>, x: &ActivationRows<'_>, first: usize, tile: &Tile<'_, f32>) -> bool {
    w.check();
    assert_eq!(tile.columns, w.rows, "one column for each row");
    if tile.rows == 0 || w.rows == 0 {
        return false;
    }
    x.row(first + tile.rows - 1).check(w);
    true
}

/// Weight rows that one unit of a matrix product should have: as many as stay at hand when packed.
pub(crate) fn unit_rows(instructions: Instructions, columns: usize) -> usize {
    match instructions.set() {
        // Tiles are multiplied faster than long activation rows come from memory: more weight rows meet each.
        InstructionSet::Avx512Amx if columns > 2048 => 64,
        InstructionSet::Avx512Amx => 32,
        _ if columns > 4096 => 16,
        _ => 32,
    }
}

/// The most that [`unit_rows`] gives.
pub(crate) fn most_unit_rows(columns: usize) -> usize {
    if columns > 2048 { 64 } else { 32 }
}

/// Scratch numbers that [`matrix_products`] needs for `rows` weight rows of `columns` numbers.
pub(crate) fn panel_scratch(rows: usize, columns: usize) -> usize {
    // Quants as bytes or 16-bit numbers, a scale and an offset for each 16 numbers; rows and numbers rounded up.
    let blocks = columns.div_ceil(32);
    rows.next_multiple_of(16) * (blocks * 16 + 2 * 2 * blocks)
}

/// Whether integer sums can run over whole rows: one scale for all blocks on both sides, and sums that fit 32 bits.
fn whole_rows(w: &Weights<'_>, by_row: bool) -> bool {
    by_row && matches!(w.scales, Scales::Row(_)) && matches!(w.offsets, Offsets::None) && w.blocks * w.stored.block() <= 1 << 15
}

impl Scales<'_> {
    /// The scale of a block of a row.
    fn get(&self, row: usize, block: usize) -> f32 {
        match *self {
            Self::Row(scales) => scales[row],
            Self::F16(scales, stride) => scales[row * stride + block].to_f32(),
            Self::F32(scales, stride) => scales[row * stride + block],
        }
    }

    fn holds(&self, rows: usize, blocks: usize) -> bool {
        let (length, stride) = match *self {
            Self::Row(scales) => return scales.len() >= rows,
            Self::F16(scales, stride) => (scales.len(), stride),
            Self::F32(scales, stride) => (scales.len(), stride),
        };
        // Kernels read scales by whole vectors, which the layout pads each row to.
        blocks <= stride && stride % SCALES_AT_ONCE == 0 && length >= rows * stride
    }
}

impl Weights<'_> {
    /// Whether blocks have a stored minimum.
    #[cfg(target_arch = "x86_64")]
    fn has_minima(&self) -> bool {
        matches!(self.offsets, Offsets::Min(_))
    }

    fn check(&self) {
        // Each row is padded to whole cache lines, which kernels rely on.
        assert!(self.stride % 64 == 0 && self.stride >= self.stored.bytes(self.blocks) && self.data.len() >= self.rows * self.stride);
        assert!(self.scales.holds(self.rows, self.blocks), "scales are too short");
        if let Offsets::Min(mins) = &self.offsets {
            assert!(mins.holds(self.rows, self.blocks), "minima are too short");
        }
    }

    /// What the block adds, per unit of the activations' sum.
    fn offset(&self, row: usize, block: usize) -> f32 {
        match &self.offsets {
            Offsets::None => 0.0,
            Offsets::MinusEight => -8.0 * self.scales.get(row, block),
            Offsets::Min(mins) => mins.get(row, block),
        }
    }
}

impl Row<'_> {
    /// Whether the row is as long as the weights', padding included.
    fn check(&self, w: &Weights<'_>) {
        let numbers = w.blocks * w.stored.block();
        assert!(self.quants.len() >= numbers.next_multiple_of(128), "the activation row is too short");
        assert!(self.scales.len() >= numbers.div_ceil(32).next_multiple_of(16), "the activation row has too few scales");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        matrix::{
            Matrix,
            tests::{Noise, random_tensor},
        },
        pool::Pool,
        work::{Tiles, for_each},
    };
    use qhx_ir::{Encoding, WeightTensor};

    /// The product as it is stated: exact integer sums, scales in f64. Also the size of what is summed: kernels take an int4's 8 off after the sum.
    fn stated(w: &WeightTensor, row: usize, x: &Row<'_>) -> (f64, f64) {
        let terms = (0..w.columns()).map(|c| {
            let scale = w.scale_at(row, c) as f64;
            let weight = w.quant(row, c) as f64 * scale + w.min_at(row, c) as f64;
            let x = x.quants[c] as f64 * x.scales[c / 32] as f64;
            (weight * x, (weight.abs() + 8.0 * scale.abs()) * x.abs())
        });
        terms.fold((0.0, 0.0), |(sum, size), (term, largest)| (sum + term, size + largest))
    }

    #[test]
    fn all_encodings_shapes_and_instructions() {
        let mut noise = Noise::new(3);
        let pool = Pool::new(1).unwrap();
        // An emulated CPU is slow.
        let step = if std::env::var_os("QHX_EMULATED").is_some() { 4 } else { 1 };
        for encoding in Encoding::all().into_iter().filter(|e| !e.is_float()) {
            for (rows, columns) in [(1, 1), (3, 33), (17, 64), (5, 96), (20, 576), (9, 1000), (33, 130)] {
                let tensor = random_tensor(encoding, &[rows, columns], &mut noise);
                let matrix = Matrix::new(tensor.clone());
                for by_row in [false, true] {
                    let (count, layout) = (15, Layout::new(columns));
                    let mut numbers = vec![0.0; count * layout.width()];
                    for out in numbers.chunks_mut(layout.width()) {
                        layout.quantise(Instructions::best(), by_row, &noise.floats(columns), out);
                    }
                    let x = ActivationRows { layout, numbers: &numbers, stride: layout.width(), by_row, packed: None };
                    let w = matrix.integer_rows(0..rows).unwrap();
                    for instructions in Instructions::all() {
                        let mut panels = vec![f32::NAN; count * rows];
                        let mut scratch = vec![f32::NAN; panel_scratch(rows, columns)];
                        for_each(&pool, Tiles::new(&mut panels, rows, count, rows), &mut scratch, |_, mut tile, scratch| {
                            matrix_products(instructions, &w, &x, 0, &mut tile, scratch);
                        });
                        // Row by row, and several at a time.
                        let mut few = |together: usize| {
                            let mut out = vec![f32::NAN; count * rows];
                            for_each(&pool, Tiles::new(&mut out, rows, together, rows), &mut scratch, |_, mut tile, scratch| {
                                products(instructions, &w, &x, tile.first_row, &mut tile, scratch);
                            });
                            out
                        };
                        let single = few(1);
                        let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                        let at = format!("{encoding} {rows}x{columns} {instructions:?}");
                        assert!(bits(&single) == bits(&panels), "{at}: one row and many give other bits");
                        for together in (2..=count).step_by(step) {
                            assert!(bits(&single) == bits(&few(together)), "{at}: one row and {together} give other bits");
                        }
                        for (t, out) in single.chunks(rows).enumerate() {
                            for (r, &found) in out.iter().enumerate() {
                                let (wanted, size) = stated(&tensor, r, &x.row(t));
                                let close = (found as f64 - wanted).abs() <= 1e-6 * size.max(1e-3);
                                assert!(close, "{at} row {r}: {found}, not {wanted}");
                            }
                        }
                    }
                }
            }
        }
    }
}

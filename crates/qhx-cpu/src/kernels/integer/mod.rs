//! Products of quantised weights with quantised rows: integer sums block by block, scales in f32.
//!
//! Two shapes: [`products`] streams stored rows past one activation row (decode), [`matrix_products`] packs a panel of stored rows and multiplies it with many
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
    /// −8 · scale: stored quants 0..=15 mean −8..=7.
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
}

impl<'a> ActivationRows<'a> {
    pub(crate) fn row(&self, row: usize) -> Row<'a> {
        self.layout.row(&self.numbers[row * self.stride..])
    }
}

/// `out[r] = w_r · x` for all rows of `w`, with activation row `row`.
pub(crate) fn products(instructions: Instructions, w: &Weights<'_>, x: &ActivationRows<'_>, row: usize, out: &mut [f32]) {
    w.check();
    assert_eq!(out.len(), w.rows, "one number for each row");
    let (x, whole) = (&x.row(row), whole_rows(w, x.by_row));
    x.check(w);
    match instructions.set() {
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2 => x86::dots::products_avx2(instructions, w, x, whole, out),
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512Vnni | InstructionSet::Avx512Amx => x86::dots::products_vnni(instructions, w, x, whole, out),
        #[cfg(target_arch = "aarch64")]
        InstructionSet::Neon | InstructionSet::NeonDotprod | InstructionSet::NeonI8mm => neon::products(instructions, w, x, whole, out),
        InstructionSet::Portable => portable::products(w, x, out),
        other => unreachable!("{other} is not available on this CPU"),
    }
}

/// Row `i` of `tile` becomes the products of activation row `first + i` with all rows of `w`.
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(unused_variables))]
pub(crate) fn matrix_products(
    instructions: Instructions,
    w: &Weights<'_>,
    x: &ActivationRows<'_>,
    first: usize,
    tile: &mut Tile<'_, f32>,
    scratch: &mut [f32],
) {
    w.check();
    assert_eq!(tile.columns, w.rows, "one column for each row");
    if tile.rows == 0 || w.rows == 0 {
        return;
    }
    x.row(first + tile.rows - 1).check(w);
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
        InstructionSet::Portable => (0..tile.rows).for_each(|row| portable::products(w, &x.row(first + row), tile.row(row))),
        other => unreachable!("{other} is not available on this CPU"),
    }
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
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
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
                    let x = ActivationRows { layout, numbers: &numbers, stride: layout.width(), by_row };
                    let w = matrix.integer_rows(0..rows).unwrap();
                    for instructions in Instructions::all() {
                        let mut out = vec![f32::NAN; rows];
                        let mut tiled = vec![f32::NAN; count * rows];
                        let mut scratch = vec![f32::NAN; panel_scratch(rows, columns)];
                        for_each(&pool, Tiles::new(&mut tiled, rows, count, rows), &mut scratch, |_, mut tile, scratch| {
                            matrix_products(instructions, &w, &x, 0, &mut tile, scratch);
                        });
                        for t in 0..count {
                            products(instructions, &w, &x, t, &mut out);
                            for (r, &found) in out.iter().enumerate() {
                                let (wanted, size) = stated(&tensor, r, &x.row(t));
                                let close = (found as f64 - wanted).abs() <= 1e-6 * size.max(1e-3);
                                assert!(close, "{encoding} {rows}x{columns} {instructions:?} row {r}: {found}, not {wanted}");
                            }
                            let same = out.iter().zip(&tiled[t * rows..]).all(|(one, many)| one.to_bits() == many.to_bits());
                            assert!(same, "{encoding} {rows}x{columns} {instructions:?}: one row and many give other bits");
                        }
                    }
                }
            }
        }
    }
}

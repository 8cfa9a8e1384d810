//! Products of quantised weights with quantised rows: integer sums block by block, scales in f32.

mod portable;

use super::{Instructions, quants::Stored};
use half::f16;

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

/// One quantised row of activations, padded with zeros to whole blocks of 32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row<'a> {
    /// Quants.
    pub(crate) quants: &'a [i8],
    /// One scale for each 32.
    pub(crate) scales: &'a [f32],
    /// scale · Σ quants for each 32.
    pub(crate) sums32: &'a [f32],
    /// scale · Σ quants for each 16.
    pub(crate) sums16: &'a [f32],
}

/// `out[r] = w_r · x` for all rows of `w`.
pub(crate) fn products(_instructions: Instructions, w: &Weights<'_>, x: &Row<'_>, out: &mut [f32]) {
    w.check();
    assert_eq!(out.len(), w.rows, "one number for each row");
    let numbers = w.blocks * w.stored.block();
    assert!(x.quants.len() >= numbers.next_multiple_of(32), "x is too short");
    assert!(x.scales.len() >= numbers.div_ceil(32) && x.sums32.len() >= x.scales.len() && x.sums16.len() >= 2 * x.scales.len());
    portable::products(w, x, out);
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
        // Kernels read scales by whole vectors: the layout pads each row to whole cache lines.
        blocks <= stride && stride * if matches!(self, Self::F16(..)) { 2 } else { 4 } % 64 == 0 && length >= rows * stride
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
}

//! Integer products without special instructions: loops of fixed length that compilers turn into whatever the target has.

use super::{ActivationRows, Offsets, Weights, activation::Row};
use crate::{
    kernels::quants::{I6_BYTES, Stored, sixes},
    work::Tile,
};

pub(super) fn products(w: &Weights<'_>, x: &ActivationRows<'_>, first: usize, tile: &mut Tile<'_, f32>) {
    for row in 0..w.rows {
        let data = &w.data[row * w.stride..][..w.stride];
        for t in 0..tile.rows {
            let x = &x.row(first + t);
            tile.row(t)[row] = match w.stored {
                Stored::I4Block32 => sum_blocks::<16, 32>(w, x, row, data, nibbles),
                Stored::I6Block32 => sum_blocks::<I6_BYTES, 32>(w, x, row, data, |block, x| {
                    sixes(block).iter().zip(x).map(|(&w, &x)| w as i32 * x as i32).sum()
                }),
                Stored::I8Block32 => sum_blocks::<32, 32>(w, x, row, data, bytes),
                Stored::I8Block16 => sum_blocks::<16, 16>(w, x, row, data, bytes),
            };
        }
    }
}

/// One row: blocks of `BYTES` bytes that hold `NUMBERS` quants.
#[inline(always)]
fn sum_blocks<const BYTES: usize, const NUMBERS: usize>(
    w: &Weights<'_>,
    x: &Row<'_>,
    row: usize,
    data: &[u8],
    total: impl Fn(&[u8; BYTES], &[i16; NUMBERS]) -> i32,
) -> f32 {
    let (blocks, _) = data.as_chunks::<BYTES>();
    let (quants, _) = x.wide.as_chunks::<NUMBERS>();
    let x_sums = if NUMBERS == 16 { x.sums16 } else { x.sums32 };
    let mut sum = 0.0;
    for (b, (block, quants)) in blocks.iter().zip(quants).enumerate().take(w.blocks) {
        sum += total(block, quants) as f32 * (w.scales.get(row, b) * x.scales[b * NUMBERS / 32]);
        if !matches!(w.offsets, Offsets::None) {
            sum += w.offset(row, b) * x_sums[b];
        }
    }
    sum
}

#[inline(always)]
fn bytes<const N: usize>(block: &[u8; N], x: &[i16; N]) -> i32 {
    (0..N).map(|i| block[i] as i8 as i32 * x[i] as i32).sum()
}

#[inline(always)]
fn nibbles(block: &[u8; 16], x: &[i16; 32]) -> i32 {
    (0..16).map(|i| (block[i] & 15) as i32 * x[i] as i32 + (block[i] >> 4) as i32 * x[i + 16] as i32).sum()
}

//! A few activation rows against stored rows: what decoding is made of.
//!
//! As many stored rows as a vector has lanes go side by side: the integer sums of a block are added up within each row, then stand one row to a lane, and from there
//! on everything happens as in the products of many rows ([`super::avx2`], [`super::vnni`]), in the same order and so with the same bits. What is read and unpacked
//! of stored rows meets several activation rows in registers, and the others while it is in the nearest cache.

pub(super) mod avx2;
mod vnni;

use super::{super::activation::Row, needs};
use crate::{
    kernels::{
        InstructionSet, Instructions,
        integer::{ActivationRows, Offsets, Scales, Weights, whole_rows},
        quants::{I6_BYTES, Stored},
    },
    work::Tile,
};
use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};

/// See [`crate::kernels::integer::products`], which checked the lengths.
pub(in super::super) fn products_avx2(
    instructions: Instructions,
    w: &Weights<'_>,
    x: &ActivationRows<'_>,
    first: usize,
    tile: &mut Tile<'_, f32>,
) {
    needs(instructions, InstructionSet::Avx2);
    // SAFETY: the CPU has AVX2, FMA and F16C; `products` checked lengths and padding.
    unsafe { avx2::all(w, x, first, tile) }
}

/// See [`crate::kernels::integer::products`], which checked the lengths.
pub(in super::super) fn products_vnni(
    instructions: Instructions,
    w: &Weights<'_>,
    x: &ActivationRows<'_>,
    first: usize,
    tile: &mut Tile<'_, f32>,
) {
    needs(instructions, InstructionSet::Avx512Vnni);
    // SAFETY: the CPU has AVX-512 with VNNI; `products` checked lengths and padding.
    unsafe { vnni::all(w, x, first, tile) }
}

// SAFETY of all blocks in the modules below: the callers above. A row of quants fills whole cache lines, scales come in sixteens, activations are padded to 128
// quants and 16 blocks, so a vector that starts within a row ends within its padding. What padding holds is kept out of sums: quants meet zeros, and blocks
// beyond the last are not added.

/// [`Stored`] as a constant of kernels.
const I4_BLOCK32: usize = 0;
const I8_BLOCK32: usize = 1;
const I8_BLOCK16: usize = 2;
const I6_BLOCK32: usize = 3;

/// Bytes of a block.
const fn block_bytes(stored: usize) -> usize {
    match stored {
        I8_BLOCK32 => 32,
        I6_BLOCK32 => I6_BYTES,
        _ => 16,
    }
}

/// Numbers of a block.
const fn block_numbers(stored: usize) -> usize {
    if stored == I8_BLOCK16 { 16 } else { 32 }
}

/// `R` stored rows that are multiplied together.
pub(super) struct Group<'a, const R: usize> {
    pub(super) w: &'a Weights<'a>,
    /// Their numbers. A row beyond the last is the last one again: its result is not written.
    pub(super) rows: [usize; R],
    /// Where their quants begin.
    pub(super) quants: [*const u8; R],
    /// Where the quants of the next group begin.
    next: *const u8,
}

impl<'a, const R: usize> Group<'a, R> {
    /// The rows from `first` on. Also asks for the scales and minima of the next group.
    #[inline(always)]
    pub(super) fn new(w: &'a Weights<'a>, first: usize) -> Self {
        let rows = std::array::from_fn(|r| (first + r).min(w.rows - 1));
        let quants = rows.map(|row| w.data.as_ptr().wrapping_add(row * w.stride));
        let next = first + R;
        let scales = |scales: &Scales<'_>| match *scales {
            Scales::Row(_) => {}
            Scales::F16(numbers, stride) => fetch_lines(numbers.as_ptr().cast(), next * stride * 2, R * stride * 2),
            Scales::F32(numbers, stride) => fetch_lines(numbers.as_ptr().cast(), next * stride * 4, R * stride * 4),
        };
        scales(&w.scales);
        if let Offsets::Min(mins) = &w.offsets {
            scales(mins);
        }
        Self { w, rows, quants, next: w.data.as_ptr().wrapping_add(next * w.stride) }
    }

    /// Asks for a line of the next group's quants, which lie one after the other: to be called with 0, 1 and so on, as often as this group has lines. A CPU reads memory
    /// fastest from front to back; it foresees less of several rows that are read side by side. The next group may be another unit's, which the same thread has next.
    #[inline(always)]
    pub(super) fn fetch(&self, line: usize) {
        fetch(self.next.wrapping_add(64 * line));
    }

    /// The same for as many lines as are read where all rows are read at byte `at`.
    #[inline(always)]
    pub(super) fn fetch_beside(&self, at: usize) {
        (0..R).for_each(|r| self.fetch(at / 64 * R + r));
    }
}

#[inline(always)]
fn fetch_lines(start: *const u8, at: usize, bytes: usize) {
    (0..bytes).step_by(64).for_each(|line| fetch(start.wrapping_add(at + line)));
}

/// Into L2: in L1, rows whose length is a power of two share a few sets and would evict each other.
#[inline(always)]
fn fetch(address: *const u8) {
    // SAFETY: a prefetch reads nothing that the program could see and never faults, whatever the address.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) };
}

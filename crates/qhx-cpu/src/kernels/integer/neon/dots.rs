//! One activation row against stored rows, four of them at a time: what decoding is made of.
//!
//! The integer sums of a block are added up within each row, then stand one row to a lane, and from there on everything happens as in the products of many rows
//! ([`super::panels`]), in the same order and so with the same bits.
//!
//! SAFETY of all blocks: the caller of [`all`]. A row of quants fills whole cache lines, scales come in sixteens, activations are padded to 128 quants and 16 blocks.
#![allow(clippy::undocumented_unsafe_blocks, clippy::needless_range_loop)]

use super::multiply::Dot;
use crate::kernels::{
    integer::{Offsets, Scales, Weights, activation::Row},
    quants::Stored,
    vector::neon::{four_by_four, widen_low},
};
use std::arch::aarch64::*;

const I4_BLOCK32: usize = 0;
const I8_BLOCK32: usize = 1;
const I8_BLOCK16: usize = 2;

/// Rows that are multiplied together.
const ROWS: usize = 4;
/// Blocks whose scales are put side by side at once.
const CHUNK: usize = 4;

/// `out[r] = w_r · x`, with one integer sum for each row where it is `whole`.
///
/// # Safety
/// The CPU has the instructions of `D`; `w` and `x` passed their checks, and `out` has a number for each row.
#[inline(always)]
pub(super) unsafe fn all<D: Dot>(w: &Weights<'_>, x: &Row<'_>, whole: bool, out: &mut [f32]) {
    for (group, out) in out.chunks_mut(ROWS).enumerate() {
        // A row beyond the last is the last one again: its result is not written.
        let rows = std::array::from_fn(|r| (group * ROWS + r).min(w.rows - 1));
        let results = unsafe {
            match w.stored {
                Stored::I4Block32 => blocks::<D, I4_BLOCK32>(w, x, rows),
                Stored::I8Block32 if whole => whole_rows::<D>(w, x, rows),
                Stored::I8Block32 => blocks::<D, I8_BLOCK32>(w, x, rows),
                Stored::I8Block16 => blocks::<D, I8_BLOCK16>(w, x, rows),
            }
        };
        let mut numbers = [0.0; ROWS];
        unsafe { vst1q_f32(numbers.as_mut_ptr(), results) };
        out.copy_from_slice(&numbers[..out.len()]);
    }
}

/// A sum for each block.
#[inline(always)]
unsafe fn blocks<D: Dot, const STORED: usize>(w: &Weights<'_>, x: &Row<'_>, rows: [usize; ROWS]) -> float32x4_t {
    unsafe {
        let x_sums = if STORED == I8_BLOCK16 { x.sums16.as_ptr() } else { x.sums32.as_ptr() };
        let mut results = vdupq_n_f32(0.0);
        for first in (0..w.blocks).step_by(CHUNK) {
            let scales = side_by_side(&w.scales, rows, first);
            let offsets = match &w.offsets {
                Offsets::None => None,
                Offsets::MinusEight => Some(scales.map(|scales| vmulq_n_f32(scales, -8.0))),
                Offsets::Min(mins) => Some(side_by_side(mins, rows, first)),
            };
            for i in 0..CHUNK {
                let b = first + i;
                if b >= w.blocks {
                    break;
                }
                let scale = *x.scales.as_ptr().add(if STORED == I8_BLOCK16 { b / 2 } else { b });
                results = vfmaq_f32(results, vcvtq_f32_s32(totals::<D, STORED>(w, x, rows, b)), vmulq_n_f32(scales[i], scale));
                if let Some(offsets) = &offsets {
                    results = vfmaq_n_f32(results, offsets[i], *x_sums.add(b));
                }
            }
        }
        results
    }
}

/// One sum over each row.
#[inline(always)]
unsafe fn whole_rows<D: Dot>(w: &Weights<'_>, x: &Row<'_>, rows: [usize; ROWS]) -> float32x4_t {
    unsafe {
        let mut totals = [vdupq_n_s32(0); ROWS];
        for at in (0..w.blocks * 32).step_by(16) {
            let x = vld1q_s8(x.quants.as_ptr().add(at));
            for r in 0..ROWS {
                totals[r] = D::dot(totals[r], vld1q_s8(w.data.as_ptr().add(rows[r] * w.stride + at).cast()), x);
            }
        }
        let scales = rows.map(|row| w.scales.get(row, 0));
        let scale = vmulq_n_f32(vld1q_f32(scales.as_ptr()), x.scales[0]);
        vmulq_f32(vcvtq_f32_s32(four_rows(totals)), scale)
    }
}

/// The sums of the rows over block `b`.
#[inline(always)]
unsafe fn totals<D: Dot, const STORED: usize>(w: &Weights<'_>, x: &Row<'_>, rows: [usize; ROWS], b: usize) -> int32x4_t {
    unsafe {
        let zero = vdupq_n_s32(0);
        let bytes = if STORED == I8_BLOCK32 { 32 } else { 16 };
        let quants = x.quants.as_ptr().add(b * if STORED == I8_BLOCK16 { 16 } else { 32 });
        let low = vld1q_s8(quants);
        let high = if STORED == I8_BLOCK16 { low } else { vld1q_s8(quants.add(16)) };
        let mut totals = [zero; ROWS];
        for r in 0..ROWS {
            let data = w.data.as_ptr().add(rows[r] * w.stride + b * bytes);
            totals[r] = match STORED {
                I4_BLOCK32 => {
                    let both = vld1q_u8(data);
                    let w_low = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
                    let w_high = vreinterpretq_s8_u8(vshrq_n_u8::<4>(both));
                    D::dot(D::dot(zero, w_low, low), w_high, high)
                }
                I8_BLOCK32 => D::dot(D::dot(zero, vld1q_s8(data.cast()), low), vld1q_s8(data.add(16).cast()), high),
                _ => D::dot(zero, vld1q_s8(data.cast()), low),
            };
        }
        four_rows(totals)
    }
}

/// The sums over each vector, side by side.
#[inline(always)]
unsafe fn four_rows(totals: [int32x4_t; ROWS]) -> int32x4_t {
    unsafe { vpaddq_s32(vpaddq_s32(totals[0], totals[1]), vpaddq_s32(totals[2], totals[3])) }
}

/// The scales of four blocks from `b` on: each block's for all rows.
#[inline(always)]
unsafe fn side_by_side(scales: &Scales<'_>, rows: [usize; ROWS], b: usize) -> [float32x4_t; CHUNK] {
    unsafe {
        let mut square = [vdupq_n_f32(0.0); ROWS];
        for r in 0..ROWS {
            square[r] = match *scales {
                Scales::Row(scales) => vdupq_n_f32(scales[rows[r]]),
                Scales::F16(scales, stride) => {
                    let halves = vld1_u16(scales.as_ptr().add(rows[r] * stride + b).cast());
                    widen_low(vcombine_u16(halves, halves))
                }
                Scales::F32(scales, stride) => vld1q_f32(scales.as_ptr().add(rows[r] * stride + b)),
            };
        }
        four_by_four(square)
    }
}

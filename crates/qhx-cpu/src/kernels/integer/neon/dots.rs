//! A few activation rows against stored rows, four of them at a time: what decoding is made of.
//!
//! The integer sums of a block are added up within each row, then stand one row to a lane, and from there on everything happens as in the products of many rows
//! ([`super::panels`]), in the same order and so with the same bits. What is read and unpacked of stored rows meets several activation rows in registers, and the
//! others while it is in the nearest cache.
//!
//! SAFETY of all blocks: the caller of [`all`]. A row of quants fills whole cache lines, scales come in sixteens, activations are padded to 128 quants and 16 blocks.
#![allow(clippy::undocumented_unsafe_blocks, clippy::needless_range_loop)]

use super::multiply::Dot;
use crate::{
    kernels::{
        integer::{ActivationRows, Offsets, Scales, Weights, activation::Row, whole_rows},
        quants::{I6_BYTES, Stored},
        vector::neon::{four_by_four, widen_low},
    },
    work::Tile,
};
use std::arch::aarch64::*;

const I4_BLOCK32: usize = 0;
const I8_BLOCK32: usize = 1;
const I8_BLOCK16: usize = 2;
const I6_BLOCK32: usize = 3;

/// Rows that are multiplied together.
const ROWS: usize = 4;
/// Blocks whose scales are put side by side at once.
const CHUNK: usize = 4;

/// See [`crate::kernels::integer::products`].
///
/// # Safety
/// The CPU has the instructions of `D`; `w`, `x` and `tile` passed their checks.
#[inline(always)]
pub(super) unsafe fn all<D: Dot>(w: &Weights<'_>, x: &ActivationRows<'_>, first: usize, tile: &mut Tile<'_, f32>) {
    let whole = whole_rows(w, x.by_row);
    for start in (0..w.rows).step_by(ROWS) {
        // A row beyond the last is the last one again: its result is not written.
        let rows = std::array::from_fn(|r| (start + r).min(w.rows - 1));
        let mut out = tile.columns_from(start, (w.rows - start).min(ROWS));
        let mut t = 0;
        while t < out.rows {
            t += unsafe {
                match out.rows - t {
                    4.. => some::<D, 4>(w, &x.rows(first + t), whole, rows, t, &mut out),
                    2.. => some::<D, 2>(w, &x.rows(first + t), whole, rows, t, &mut out),
                    _ => some::<D, 1>(w, &x.rows(first + t), whole, rows, t, &mut out),
                }
            };
        }
    }
}

/// `M` activation rows, whose results are those of `out` from `t` on. Gives `M`.
#[inline(always)]
unsafe fn some<D: Dot, const M: usize>(
    w: &Weights<'_>,
    x: &[Row<'_>; M],
    whole: bool,
    rows: [usize; ROWS],
    t: usize,
    out: &mut Tile<'_, f32>,
) -> usize {
    let results = unsafe {
        match w.stored {
            Stored::I4Block32 => blocks::<D, I4_BLOCK32, M>(w, x, rows),
            Stored::I6Block32 => blocks::<D, I6_BLOCK32, M>(w, x, rows),
            Stored::I8Block32 if whole => whole_sums::<D, M>(w, x, rows),
            Stored::I8Block32 => blocks::<D, I8_BLOCK32, M>(w, x, rows),
            Stored::I8Block16 => blocks::<D, I8_BLOCK16, M>(w, x, rows),
        }
    };
    for m in 0..M {
        let mut numbers = [0.0; ROWS];
        unsafe { vst1q_f32(numbers.as_mut_ptr(), results[m]) };
        let out = out.row(t + m);
        out.copy_from_slice(&numbers[..out.len()]);
    }
    M
}

/// A sum for each block.
#[inline(always)]
unsafe fn blocks<D: Dot, const STORED: usize, const M: usize>(w: &Weights<'_>, x: &[Row<'_>; M], rows: [usize; ROWS]) -> [float32x4_t; M] {
    unsafe {
        let mut results = [vdupq_n_f32(0.0); M];
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
                let totals = totals::<D, STORED, M>(w, x, rows, b);
                for m in 0..M {
                    let scale = *x[m].scales.as_ptr().add(if STORED == I8_BLOCK16 { b / 2 } else { b });
                    results[m] = vfmaq_f32(results[m], vcvtq_f32_s32(totals[m]), vmulq_n_f32(scales[i], scale));
                    if let Some(offsets) = &offsets {
                        let sums = if STORED == I8_BLOCK16 { x[m].sums16 } else { x[m].sums32 };
                        results[m] = vfmaq_n_f32(results[m], offsets[i], *sums.as_ptr().add(b));
                    }
                }
            }
        }
        results
    }
}

/// One sum over each row.
#[inline(always)]
unsafe fn whole_sums<D: Dot, const M: usize>(w: &Weights<'_>, x: &[Row<'_>; M], rows: [usize; ROWS]) -> [float32x4_t; M] {
    unsafe {
        let mut totals = [[vdupq_n_s32(0); ROWS]; M];
        for at in (0..w.blocks * 32).step_by(16) {
            for r in 0..ROWS {
                let quants = vld1q_s8(w.data.as_ptr().add(rows[r] * w.stride + at).cast());
                for m in 0..M {
                    totals[m][r] = D::dot(totals[m][r], quants, vld1q_s8(x[m].quants.as_ptr().add(at)));
                }
            }
        }
        let scales = rows.map(|row| w.scales.get(row, 0));
        let mut results = [vdupq_n_f32(0.0); M];
        for m in 0..M {
            let scale = vmulq_n_f32(vld1q_f32(scales.as_ptr()), x[m].scales[0]);
            results[m] = vmulq_f32(vcvtq_f32_s32(four_rows(totals[m])), scale);
        }
        results
    }
}

/// For each activation row, the sums of the stored rows over block `b`.
#[inline(always)]
unsafe fn totals<D: Dot, const STORED: usize, const M: usize>(
    w: &Weights<'_>,
    x: &[Row<'_>; M],
    rows: [usize; ROWS],
    b: usize,
) -> [int32x4_t; M] {
    unsafe {
        let zero = vdupq_n_s32(0);
        let bytes = match STORED {
            I8_BLOCK32 => 32,
            I6_BLOCK32 => I6_BYTES,
            _ => 16,
        };
        let (mut low, mut high) = ([vdupq_n_s8(0); M], [vdupq_n_s8(0); M]);
        for m in 0..M {
            let quants = x[m].quants.as_ptr().add(b * if STORED == I8_BLOCK16 { 16 } else { 32 });
            low[m] = vld1q_s8(quants);
            if STORED != I8_BLOCK16 {
                high[m] = vld1q_s8(quants.add(16));
            }
        }
        let mut sums = [[zero; ROWS]; M];
        for r in 0..ROWS {
            let data = w.data.as_ptr().add(rows[r] * w.stride + b * bytes);
            let (w_low, w_high) = match STORED {
                I4_BLOCK32 => {
                    let both = vld1q_u8(data);
                    (vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15))), vreinterpretq_s8_u8(vshrq_n_u8::<4>(both)))
                }
                I6_BLOCK32 => sixes(data),
                I8_BLOCK32 => (vld1q_s8(data.cast()), vld1q_s8(data.add(16).cast())),
                _ => (vld1q_s8(data.cast()), vdupq_n_s8(0)),
            };
            for m in 0..M {
                sums[m][r] = D::dot(zero, w_low, low[m]);
                if STORED != I8_BLOCK16 {
                    sums[m][r] = D::dot(sums[m][r], w_high, high[m]);
                }
            }
        }
        let mut totals = [zero; M];
        for m in 0..M {
            totals[m] = four_rows(sums[m]);
        }
        totals
    }
}

/// The first and the second sixteen numbers of an int6 block.
#[inline(always)]
unsafe fn sixes(block: *const u8) -> (int8x16_t, int8x16_t) {
    unsafe {
        // Top bits twice: the pairs of bits of eight numbers, and of the eight after them. A shift to the left by less than nothing is one to the right.
        let (low, top) = (vld1q_u8(block), vreinterpretq_u8_u64(vld1q_dup_u64(block.add(16).cast())));
        let shifts = |first, second| vcombine_s8(vdup_n_s8(first), vdup_n_s8(second));
        let joined = |low, shifts| {
            let top = vandq_u8(vshlq_u8(top, shifts), vdupq_n_u8(0x30));
            vsubq_s8(vreinterpretq_s8_u8(vorrq_u8(low, top)), vdupq_n_s8(32))
        };
        (joined(vandq_u8(low, vdupq_n_u8(15)), shifts(4, 2)), joined(vshrq_n_u8::<4>(low), shifts(0, -2)))
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

//! One activation row against stored rows, four of them at a time: what decoding is made of.
//!
//! SAFETY of all blocks: the caller of [`all`]. A row of quants fills whole cache lines and activations are padded to 128 quants, but no block is read that is not
//! there: scales are taken four at a time as long as there are four, then one by one.
#![allow(clippy::undocumented_unsafe_blocks, clippy::needless_range_loop)]

use super::multiply::Dot;
use crate::kernels::{
    integer::{Offsets, Scales, Weights, activation::Row},
    quants::Stored,
    vector::neon::widen_low,
};
use std::arch::aarch64::*;

const I4_BLOCK32: usize = 0;
const I8_BLOCK32: usize = 1;
const I8_BLOCK16: usize = 2;

/// `out[r] = w_r · x`.
///
/// # Safety
/// The CPU has the instructions of `D`; `w` and `x` passed their checks, and `out` has a number for each row.
#[inline(always)]
pub(super) unsafe fn all<D: Dot>(w: &Weights<'_>, x: &Row<'_>, out: &mut [f32]) {
    unsafe {
        match w.stored {
            Stored::I4Block32 => by_rows::<D, I4_BLOCK32>(w, x, out),
            Stored::I8Block32 => by_rows::<D, I8_BLOCK32>(w, x, out),
            Stored::I8Block16 => by_rows::<D, I8_BLOCK16>(w, x, out),
        }
    }
}

#[inline(always)]
unsafe fn by_rows<D: Dot, const STORED: usize>(w: &Weights<'_>, x: &Row<'_>, out: &mut [f32]) {
    let mut row = 0;
    unsafe {
        while row + 4 <= w.rows {
            rows::<D, STORED, 4>(w, x, row, out);
            row += 4;
        }
        while row < w.rows {
            rows::<D, STORED, 1>(w, x, row, out);
            row += 1;
        }
    }
}

#[inline(always)]
unsafe fn rows<D: Dot, const STORED: usize, const R: usize>(w: &Weights<'_>, x: &Row<'_>, first: usize, out: &mut [f32]) {
    unsafe {
        let mut sums = [vdupq_n_f32(0.0); R];
        let x_sums = if STORED == I8_BLOCK16 { x.sums16 } else { x.sums32 };
        let mut b = 0;
        while b + 4 <= w.blocks {
            let x_scales = match STORED {
                I8_BLOCK16 => {
                    let two = vld1_f32(x.scales.as_ptr().add(b / 2));
                    vcombine_f32(vdup_lane_f32::<0>(two), vdup_lane_f32::<1>(two))
                }
                _ => vld1q_f32(x.scales.as_ptr().add(b)),
            };
            let mut factors = [vdupq_n_f32(0.0); R];
            for r in 0..R {
                let scales = load(&w.scales, first + r, b);
                factors[r] = vmulq_f32(scales, x_scales);
                let offsets = match &w.offsets {
                    Offsets::None => continue,
                    Offsets::MinusEight => vmulq_n_f32(scales, -8.0),
                    Offsets::Min(mins) => load(mins, first + r, b),
                };
                sums[r] = vfmaq_f32(sums[r], offsets, vld1q_f32(x_sums.as_ptr().add(b)));
            }
            let totals = totals::<D, STORED, R>(w, x, first, b);
            (0..R).for_each(|r| sums[r] = vfmaq_laneq_f32::<0>(sums[r], totals[r], factors[r]));
            let totals = self::totals::<D, STORED, R>(w, x, first, b + 1);
            (0..R).for_each(|r| sums[r] = vfmaq_laneq_f32::<1>(sums[r], totals[r], factors[r]));
            let totals = self::totals::<D, STORED, R>(w, x, first, b + 2);
            (0..R).for_each(|r| sums[r] = vfmaq_laneq_f32::<2>(sums[r], totals[r], factors[r]));
            let totals = self::totals::<D, STORED, R>(w, x, first, b + 3);
            (0..R).for_each(|r| sums[r] = vfmaq_laneq_f32::<3>(sums[r], totals[r], factors[r]));
            b += 4;
        }
        while b < w.blocks {
            let totals = totals::<D, STORED, R>(w, x, first, b);
            let scale = x.scales[if STORED == I8_BLOCK16 { b / 2 } else { b }];
            for r in 0..R {
                sums[r] = vfmaq_n_f32(sums[r], totals[r], w.scales.get(first + r, b) * scale);
                if !matches!(w.offsets, Offsets::None) {
                    let offset = w.offset(first + r, b) * x_sums[b];
                    sums[r] = vaddq_f32(sums[r], vsetq_lane_f32::<0>(offset, vdupq_n_f32(0.0)));
                }
            }
            b += 1;
        }
        for r in 0..R {
            *out.get_unchecked_mut(first + r) = vaddvq_f32(sums[r]);
        }
    }
}

/// The sums over block `b` of `R` rows, each in four parts.
#[inline(always)]
unsafe fn totals<D: Dot, const STORED: usize, const R: usize>(w: &Weights<'_>, x: &Row<'_>, first: usize, b: usize) -> [float32x4_t; R] {
    unsafe {
        let mut totals = [vdupq_n_f32(0.0); R];
        let zero = vdupq_n_s32(0);
        let bytes = if STORED == I8_BLOCK32 { 32 } else { 16 };
        let data = w.data.as_ptr().add(first * w.stride + b * bytes);
        let quants = x.quants.as_ptr().add(b * if STORED == I8_BLOCK16 { 16 } else { 32 });
        let low = vld1q_s8(quants);
        let high = if STORED == I8_BLOCK16 { low } else { vld1q_s8(quants.add(16)) };
        for r in 0..R {
            let data = data.add(r * w.stride);
            let total = match STORED {
                I4_BLOCK32 => {
                    let both = vld1q_u8(data);
                    let w_low = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
                    let w_high = vreinterpretq_s8_u8(vshrq_n_u8::<4>(both));
                    D::dot(D::dot(zero, w_low, low), w_high, high)
                }
                I8_BLOCK32 => D::dot(D::dot(zero, vld1q_s8(data.cast()), low), vld1q_s8(data.add(16).cast()), high),
                _ => D::dot(zero, vld1q_s8(data.cast()), low),
            };
            totals[r] = vcvtq_f32_s32(total);
        }
        totals
    }
}

/// Four scales of a row.
#[inline(always)]
unsafe fn load(scales: &Scales<'_>, row: usize, b: usize) -> float32x4_t {
    unsafe {
        match *scales {
            Scales::Row(scales) => vdupq_n_f32(*scales.as_ptr().add(row)),
            Scales::F16(scales, stride) => {
                let halves = vld1_u16(scales.as_ptr().add(row * stride + b).cast());
                widen_low(vcombine_u16(halves, halves))
            }
            Scales::F32(scales, stride) => vld1q_f32(scales.as_ptr().add(row * stride + b)),
        }
    }
}

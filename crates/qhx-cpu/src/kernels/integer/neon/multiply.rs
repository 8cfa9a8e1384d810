//! The few products of bytes from which the kernels are written once for all levels of NEON.
//!
//! `sdot` and `smmla` are written as instructions: the intrinsics for them are not stable.
//!
//! SAFETY of all blocks: the CPU has the level's instructions (each function's caller promises it), and instructions touch nothing but the registers that they name.
#![allow(clippy::undocumented_unsafe_blocks, clippy::missing_safety_doc)]

use std::arch::{aarch64::*, asm};

/// NEON alone.
pub(super) struct Plain;
/// With dot products of four bytes.
pub(super) struct Dotprod;
/// With products of 2 x 8 and 8 x 2 bytes.
pub(super) struct I8mm;

/// Dot products of four bytes.
pub(super) trait Dot {
    /// Adds to lane `i` the four products of the bytes from `4i` on. Activations are −127 at least.
    unsafe fn dot(total: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t;

    /// The same with four activations for all lanes, those in lane `LANE` of `x`.
    unsafe fn dot_lane<const LANE: i32>(total: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t;
}

impl Dot for Plain {
    #[inline(always)]
    unsafe fn dot(total: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
        unsafe {
            let (low, high) = (vmull_s8(vget_low_s8(w), vget_low_s8(x)), vmull_high_s8(w, x));
            // Two products of 128 and 127 fit 16 bits.
            vpadalq_s16(total, vpaddq_s16(low, high))
        }
    }

    #[inline(always)]
    unsafe fn dot_lane<const LANE: i32>(total: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
        unsafe { Self::dot(total, w, vreinterpretq_s8_s32(vdupq_laneq_s32::<LANE>(vreinterpretq_s32_s8(x)))) }
    }
}

impl Dot for Dotprod {
    #[inline(always)]
    unsafe fn dot(mut total: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
        unsafe {
            asm!(
                "sdot {total:v}.4s, {w:v}.16b, {x:v}.16b",
                total = inout(vreg) total, w = in(vreg) w, x = in(vreg) x,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        total
    }

    #[inline(always)]
    unsafe fn dot_lane<const LANE: i32>(mut total: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
        unsafe {
            asm!(
                "sdot {total:v}.4s, {w:v}.16b, {x:v}.4b[{lane}]",
                total = inout(vreg) total, w = in(vreg) w, x = in(vreg) x, lane = const LANE,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        total
    }
}

/// Products of `M` activation rows with the eight weight rows of a panel: `totals[m][v]` has the rows `4v ..` of the panel in its lanes, once they are [in order](Self::in_order).
pub(super) trait Multiply {
    /// Adds sixteen columns. In the panel, some quants of the first row stand before as many of the second and so on: four, or eight for [`I8mm`].
    unsafe fn sixteen<const M: usize>(panel: *const i8, x: &[int8x16_t; M], totals: &mut [[int32x4_t; 2]; M]);

    /// Puts totals into the order in which scales are.
    #[inline(always)]
    unsafe fn in_order<const M: usize>(totals: [[int32x4_t; 2]; M]) -> [[int32x4_t; 2]; M] {
        totals
    }
}

impl<D: Dot> Multiply for D {
    #[inline(always)]
    unsafe fn sixteen<const M: usize>(panel: *const i8, x: &[int8x16_t; M], totals: &mut [[int32x4_t; 2]; M]) {
        unsafe {
            four::<D, 0, M>(panel, x, totals);
            four::<D, 1, M>(panel, x, totals);
            four::<D, 2, M>(panel, x, totals);
            four::<D, 3, M>(panel, x, totals);
        }
    }
}

/// Columns `4 · LANE ..` of sixteen.
#[inline(always)]
unsafe fn four<D: Dot, const LANE: i32, const M: usize>(panel: *const i8, x: &[int8x16_t; M], totals: &mut [[int32x4_t; 2]; M]) {
    unsafe {
        let panel = panel.add(LANE as usize * 32);
        let (low, high) = (vld1q_s8(panel), vld1q_s8(panel.add(16)));
        for m in 0..M {
            totals[m][0] = D::dot_lane::<LANE>(totals[m][0], low, x[m]);
            totals[m][1] = D::dot_lane::<LANE>(totals[m][1], high, x[m]);
        }
    }
}

impl Multiply for I8mm {
    /// Two activation rows meet two weight rows at a time: the four totals of rows `m` and `m + 1` are those of the four pairs of weight rows.
    #[inline(always)]
    unsafe fn sixteen<const M: usize>(panel: *const i8, x: &[int8x16_t; M], totals: &mut [[int32x4_t; 2]; M]) {
        unsafe {
            for half in 0..2 {
                let panel = panel.add(half * 64);
                let pairs = [vld1q_s8(panel), vld1q_s8(panel.add(16)), vld1q_s8(panel.add(32)), vld1q_s8(panel.add(48))];
                for m in (0..M).step_by(2) {
                    let (one, two) = (vreinterpretq_s64_s8(x[m]), vreinterpretq_s64_s8(x[m + 1]));
                    let both = vreinterpretq_s8_s64(if half == 0 { vzip1q_s64(one, two) } else { vzip2q_s64(one, two) });
                    totals[m][0] = matrix(totals[m][0], both, pairs[0]);
                    totals[m][1] = matrix(totals[m][1], both, pairs[1]);
                    totals[m + 1][0] = matrix(totals[m + 1][0], both, pairs[2]);
                    totals[m + 1][1] = matrix(totals[m + 1][1], both, pairs[3]);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn in_order<const M: usize>(mut totals: [[int32x4_t; 2]; M]) -> [[int32x4_t; 2]; M] {
        unsafe {
            for m in (0..M).step_by(2) {
                let ([a, b], [c, d]) = (totals[m], totals[m + 1]);
                totals[m] = [first_halves(a, b), first_halves(c, d)];
                totals[m + 1] = [second_halves(a, b), second_halves(c, d)];
            }
            totals
        }
    }
}

/// Adds the products of two rows of eight bytes with two others: first with first, first with second, second with first, second with second.
#[inline(always)]
unsafe fn matrix(mut total: int32x4_t, x: int8x16_t, w: int8x16_t) -> int32x4_t {
    unsafe {
        asm!(
            "smmla {total:v}.4s, {x:v}.16b, {w:v}.16b",
            total = inout(vreg) total, x = in(vreg) x, w = in(vreg) w,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    total
}

#[inline(always)]
unsafe fn first_halves(a: int32x4_t, b: int32x4_t) -> int32x4_t {
    unsafe { vreinterpretq_s32_s64(vzip1q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b))) }
}

#[inline(always)]
unsafe fn second_halves(a: int32x4_t, b: int32x4_t) -> int32x4_t {
    unsafe { vreinterpretq_s32_s64(vzip2q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b))) }
}

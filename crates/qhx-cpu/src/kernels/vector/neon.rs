//! NEON vectors: two registers side by side, so that the tiles of kernels fill the 32 that there are.

use super::{Kernel, MOST_LANES, Vector};
use std::arch::{aarch64::*, asm};

/// Runs a kernel with NEON vectors.
///
/// # Safety
/// The CPU has NEON.
#[target_feature(enable = "neon")]
pub(crate) unsafe fn with_neon<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the caller's promise.
    unsafe { kernel.run::<Neon>() }
}

/// Eight lanes.
#[derive(Clone, Copy)]
pub(crate) struct Neon(float32x4_t, float32x4_t);

// The conversions of halves are in all of NEON, their intrinsics newer than the oldest compiler that this crate takes.

/// Four halves, the low ones of eight, as f32.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
pub(in crate::kernels) unsafe fn widen_low(halves: uint16x8_t) -> float32x4_t {
    let wide: float32x4_t;
    // SAFETY: the caller's promise; the instruction touches nothing but these registers.
    unsafe {
        asm!("fcvtl {0:v}.4s, {1:v}.4h", lateout(vreg) wide, in(vreg) halves, options(pure, nomem, nostack, preserves_flags));
    }
    wide
}

/// The high ones of eight halves.
#[inline(always)]
unsafe fn widen_high(halves: uint16x8_t) -> float32x4_t {
    let wide: float32x4_t;
    // SAFETY: as above.
    unsafe {
        asm!("fcvtl2 {0:v}.4s, {1:v}.8h", lateout(vreg) wide, in(vreg) halves, options(pure, nomem, nostack, preserves_flags));
    }
    wide
}

/// Four halves, rounded to nearest even (the mode in which Rust programs run).
#[inline(always)]
unsafe fn narrow(wide: float32x4_t) -> uint16x4_t {
    let halves: uint16x4_t;
    // SAFETY: as above.
    unsafe {
        asm!("fcvtn {0:v}.4h, {1:v}.4s", lateout(vreg) halves, in(vreg) wide, options(pure, nomem, nostack, preserves_flags));
    }
    halves
}

// SAFETY of every block below: the promises that `Vector` asks of its callers (CPU features, enough elements behind pointers).
#[allow(clippy::undocumented_unsafe_blocks)]
impl Neon {
    #[inline(always)]
    unsafe fn from_u32(low: uint32x4_t, high: uint32x4_t) -> Self {
        unsafe { Self(vcvtq_f32_u32(low), vcvtq_f32_u32(high)) }
    }

    /// Fewer than four numbers, then zeros.
    #[inline(always)]
    unsafe fn load_few(from: *const f32, n: usize) -> float32x4_t {
        unsafe {
            let mut lanes = vdupq_n_f32(0.0);
            if n > 0 {
                lanes = vld1q_lane_f32::<0>(from, lanes);
            }
            if n > 1 {
                lanes = vld1q_lane_f32::<1>(from.add(1), lanes);
            }
            if n > 2 {
                lanes = vld1q_lane_f32::<2>(from.add(2), lanes);
            }
            lanes
        }
    }

    /// The first of four numbers.
    #[inline(always)]
    unsafe fn store_few(lanes: float32x4_t, to: *mut f32, n: usize) {
        unsafe {
            if n > 0 {
                vst1q_lane_f32::<0>(to, lanes);
            }
            if n > 1 {
                vst1q_lane_f32::<1>(to.add(1), lanes);
            }
            if n > 2 {
                vst1q_lane_f32::<2>(to.add(2), lanes);
            }
        }
    }
}

#[allow(clippy::undocumented_unsafe_blocks)]
impl Vector for Neon {
    const LANES: usize = 8;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        unsafe { Self(vdupq_n_f32(x), vdupq_n_f32(x)) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        unsafe { Self(vld1q_f32(from), vld1q_f32(from.add(4))) }
    }
    #[inline(always)]
    unsafe fn load_part(from: *const f32, n: usize) -> Self {
        unsafe {
            match n {
                0..4 => Self(Self::load_few(from, n), vdupq_n_f32(0.0)),
                _ => Self(vld1q_f32(from), Self::load_few(from.add(4), n - 4)),
            }
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        unsafe {
            let halves = vld1q_u16(from);
            Self(widen_low(halves), widen_high(halves))
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        unsafe {
            let brains = vld1q_u16(from);
            let (low, high) = (vmovl_u16(vget_low_u16(brains)), vmovl_high_u16(brains));
            Self(vreinterpretq_f32_u32(vshlq_n_u32::<16>(low)), vreinterpretq_f32_u32(vshlq_n_u32::<16>(high)))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        unsafe {
            let wide = vmovl_s8(vld1_s8(from));
            Self(vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), vcvtq_f32_s32(vmovl_high_s16(wide)))
        }
    }
    #[inline(always)]
    unsafe fn load_nibbles(from: *const u8) -> (Self, Self) {
        unsafe {
            let bytes = vld1_u8(from);
            let (low, high) = (vmovl_u8(vand_u8(bytes, vdup_n_u8(15))), vmovl_u8(vshr_n_u8::<4>(bytes)));
            (
                Self::from_u32(vmovl_u16(vget_low_u16(low)), vmovl_high_u16(low)),
                Self::from_u32(vmovl_u16(vget_low_u16(high)), vmovl_high_u16(high)),
            )
        }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe {
            vst1q_f32(to, self.0);
            vst1q_f32(to.add(4), self.1);
        }
    }
    #[inline(always)]
    unsafe fn store_part(self, to: *mut f32, n: usize) {
        unsafe {
            match n {
                0..4 => Self::store_few(self.0, to, n),
                _ => {
                    vst1q_f32(to, self.0);
                    Self::store_few(self.1, to.add(4), n - 4);
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16) {
        unsafe { vst1q_u16(to, vcombine_u16(narrow(self.0), narrow(self.1))) }
    }
    #[inline(always)]
    unsafe fn store_i8(self, to: *mut i8) {
        unsafe {
            let halves = vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(self.0)), vqmovn_s32(vcvtnq_s32_f32(self.1)));
            vst1_s8(to, vqmovn_s16(halves));
        }
    }
    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        unsafe { Self(vaddq_f32(self.0, b.0), vaddq_f32(self.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        unsafe { Self(vsubq_f32(self.0, b.0), vsubq_f32(self.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        unsafe { Self(vmulq_f32(self.0, b.0), vmulq_f32(self.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn div(self, b: Self) -> Self {
        unsafe { Self(vdivq_f32(self.0, b.0), vdivq_f32(self.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        unsafe { Self(vfmaq_f32(c.0, self.0, b.0), vfmaq_f32(c.1, self.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn max(self, b: Self) -> Self {
        // Not the instruction of this name, which gives what is not a number where either is none.
        unsafe { self.less(b, b, self) }
    }
    #[inline(always)]
    unsafe fn min(self, b: Self) -> Self {
        unsafe { b.less(self, b, self) }
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        unsafe { Self(vabsq_f32(self.0), vabsq_f32(self.1)) }
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        unsafe { Self(vrndnq_f32(self.0), vrndnq_f32(self.1)) }
    }
    #[inline(always)]
    unsafe fn exp2_whole(self) -> Self {
        unsafe {
            let power = |x| vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(vcvtnq_s32_f32(x), vdupq_n_s32(127))));
            Self(power(self.0), power(self.1))
        }
    }
    #[inline(always)]
    unsafe fn less(self, than: Self, yes: Self, no: Self) -> Self {
        unsafe { Self(vbslq_f32(vcltq_f32(self.0, than.0), yes.0, no.0), vbslq_f32(vcltq_f32(self.1, than.1), yes.1, no.1)) }
    }
    #[inline(always)]
    unsafe fn transpose(square: &mut [Self; MOST_LANES]) {
        unsafe {
            // Four squares of 4 x 4; those beside the diagonal change places.
            for i in 0..4 {
                let (low, high) = (square[i], square[4 + i]);
                (square[i].1, square[4 + i].0) = (high.0, low.1);
            }
            for half in square[..8].chunks_exact_mut(4) {
                let (a, b) = (
                    four_by_four([half[0].0, half[1].0, half[2].0, half[3].0]),
                    four_by_four([half[0].1, half[1].1, half[2].1, half[3].1]),
                );
                for i in 0..4 {
                    half[i] = Self(a[i], b[i]);
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        unsafe { Self::sums([self; 4])[0] }
    }
    #[inline(always)]
    unsafe fn sums(four: [Self; 4]) -> [f32; 4] {
        unsafe {
            let [a, b, c, d] = four.map(|lanes| vaddq_f32(lanes.0, lanes.1));
            let halves = |a: float32x4_t, b: float32x4_t| {
                let (a, b) = (vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b));
                vaddq_f32(vreinterpretq_f32_f64(vzip1q_f64(a, b)), vreinterpretq_f32_f64(vzip2q_f64(a, b)))
            };
            let mut sums = [0.0; 4];
            vst1q_f32(sums.as_mut_ptr(), vpaddq_f32(halves(a, b), halves(c, d)));
            sums
        }
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        unsafe { vmaxnmvq_f32(vmaxnmq_f32(self.0, self.1)) }
    }
}

/// The columns of four rows.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
pub(in crate::kernels) unsafe fn four_by_four(rows: [float32x4_t; 4]) -> [float32x4_t; 4] {
    // SAFETY: the caller has NEON.
    unsafe {
        let pairs =
            [vtrn1q_f32(rows[0], rows[1]), vtrn2q_f32(rows[0], rows[1]), vtrn1q_f32(rows[2], rows[3]), vtrn2q_f32(rows[2], rows[3])];
        let pairs = pairs.map(|pair| vreinterpretq_f64_f32(pair));
        [vtrn1q_f64(pairs[0], pairs[2]), vtrn1q_f64(pairs[1], pairs[3]), vtrn2q_f64(pairs[0], pairs[2]), vtrn2q_f64(pairs[1], pairs[3])]
            .map(|row| vreinterpretq_f32_f64(row))
    }
}

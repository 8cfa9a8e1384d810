//! Vectors without special instructions: arrays that the compiler turns into whatever the target has.

use super::{MOST_LANES, Vector};
use half::{bf16, f16};

const LANES: usize = 8;

/// Eight lanes in an array.
#[derive(Clone, Copy)]
pub(crate) struct Portable([f32; LANES]);

impl Portable {
    #[inline(always)]
    fn zip(self, b: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], b.0[i])))
    }

    #[inline(always)]
    fn map(self, f: impl Fn(f32) -> f32) -> Self {
        Self(self.0.map(f))
    }
}

impl Vector for Portable {
    const LANES: usize = LANES;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self([x; LANES])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { from.cast::<[f32; LANES]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn load_part(from: *const f32, n: usize) -> Self {
        let mut lanes = [0.0; LANES];
        // SAFETY: the caller's promise.
        (0..n).for_each(|i| lanes[i] = unsafe { *from.add(i) });
        Self(lanes)
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: the caller's promise.
        Self(std::array::from_fn(|i| f16::from_bits(unsafe { *from.add(i) }).to_f32()))
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: the caller's promise.
        Self(std::array::from_fn(|i| bf16::from_bits(unsafe { *from.add(i) }).to_f32()))
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        // SAFETY: the caller's promise.
        Self(std::array::from_fn(|i| unsafe { *from.add(i) } as f32))
    }
    #[inline(always)]
    unsafe fn load_nibbles(from: *const u8) -> (Self, Self) {
        // SAFETY: the caller's promise.
        let bytes = unsafe { from.cast::<[u8; LANES]>().read_unaligned() };
        (Self(bytes.map(|b| (b & 15) as f32)), Self(bytes.map(|b| (b >> 4) as f32)))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn store_part(self, to: *mut f32, n: usize) {
        // SAFETY: the caller's promise.
        (0..n).for_each(|i| unsafe { *to.add(i) = self.0[i] });
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16) {
        // SAFETY: the caller's promise.
        (0..LANES).for_each(|i| unsafe { *to.add(i) = f16::from_f32(self.0[i]).to_bits() });
    }
    #[inline(always)]
    unsafe fn store_i8(self, to: *mut i8) {
        // SAFETY: the caller's promise.
        (0..LANES).for_each(|i| unsafe { *to.add(i) = self.round().0[i] as i8 });
    }
    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        self.zip(b, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        self.zip(b, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        self.zip(b, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn div(self, b: Self) -> Self {
        self.zip(b, |a, b| a / b)
    }
    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        // Not fused: without the instruction that would be a function call for each lane.
        Self(std::array::from_fn(|i| self.0[i] * b.0[i] + c.0[i]))
    }
    #[inline(always)]
    unsafe fn max(self, b: Self) -> Self {
        self.zip(b, |a, b| if b > a { b } else { a })
    }
    #[inline(always)]
    unsafe fn min(self, b: Self) -> Self {
        self.zip(b, |a, b| if b < a { b } else { a })
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        self.map(f32::abs)
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        // Beyond 2²³ there are no fractions: the sum rounds, halves to even.
        const SHIFT: f32 = 12582912.0;
        self.map(|x| (x + SHIFT) - SHIFT)
    }
    #[inline(always)]
    unsafe fn exp2_whole(self) -> Self {
        self.map(|x| f32::from_bits(((x as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    unsafe fn less(self, than: Self, yes: Self, no: Self) -> Self {
        Self(std::array::from_fn(|i| if self.0[i] < than.0[i] { yes.0[i] } else { no.0[i] }))
    }
    #[inline(always)]
    unsafe fn transpose(square: &mut [Self; MOST_LANES]) {
        let rows = *square;
        for (i, row) in square[..LANES].iter_mut().enumerate() {
            *row = Self(std::array::from_fn(|j| rows[j].0[i]));
        }
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let [a, b, c, d, e, f, g, h] = self.0;
        ((a + e) + (c + g)) + ((b + f) + (d + h))
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        self.0.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
}

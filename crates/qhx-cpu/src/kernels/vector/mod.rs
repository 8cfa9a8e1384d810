//! Vectors of f32 lanes: the few operations from which kernels are written once for all instruction sets.
#![allow(unsafe_code)] // Raw loads and stores.
#![allow(clippy::missing_safety_doc)] // Said once, on the trait.

#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
mod portable;
#[cfg(target_arch = "x86_64")]
pub(crate) mod x86;

pub(crate) use portable::Portable;

/// A computation that is generic over the vectors it uses. See [`super::run`].
pub(crate) trait Kernel {
    /// What it gives.
    type Output;

    /// Runs it; must be `#[inline(always)]`, so that the body is compiled for the caller's instruction set.
    ///
    /// # Safety
    /// The CPU has the instructions of `V`.
    unsafe fn run<V: Vector>(self) -> Self::Output;
}

/// Lanes of the widest vector.
pub(crate) const MOST_LANES: usize = 16;

/// `LANES` numbers.
///
/// # Safety
/// All functions need a CPU with the vector's instructions; those with pointers need as many readable or writable elements there as they say
/// (`LANES`, or `n < LANES` for the `_part` forms, whose missing lanes are 0).
pub(crate) trait Vector: Copy {
    /// Number of lanes.
    const LANES: usize;

    /// Asks for the cache line of an address, which need not be one of the program's.
    #[inline(always)]
    unsafe fn fetch(_: *const u8) {}
    /// The same for what is needed later, so that it does not displace what is needed now: into the second cache.
    #[inline(always)]
    unsafe fn fetch_early(address: *const u8) {
        // SAFETY: passed on.
        unsafe { Self::fetch(address) }
    }
    /// All lanes `x`.
    unsafe fn splat(x: f32) -> Self;
    /// Reads `LANES` numbers.
    unsafe fn load(from: *const f32) -> Self;
    /// Reads `n` numbers.
    unsafe fn load_part(from: *const f32, n: usize) -> Self;
    /// Reads `LANES` IEEE halves.
    unsafe fn load_f16(from: *const u16) -> Self;
    /// Reads `LANES` brain floats.
    unsafe fn load_bf16(from: *const u16) -> Self;
    /// Reads `LANES` signed bytes.
    unsafe fn load_i8(from: *const i8) -> Self;
    /// Reads `LANES` unsigned bytes; gives their low and their high halves.
    unsafe fn load_nibbles(from: *const u8) -> (Self, Self);
    /// Writes `LANES` numbers.
    unsafe fn store(self, to: *mut f32);
    /// Writes `LANES` numbers that nobody reads soon, where `to` is a multiple of the vector's size: past the caches where the CPU can. [`Self::streamed`] comes after
    /// the last of them.
    #[inline(always)]
    unsafe fn stream(self, to: *mut f32) {
        // SAFETY: passed on.
        unsafe { self.store(to) }
    }
    /// Makes what was [streamed](Self::stream) visible before what this thread writes next.
    #[inline(always)]
    unsafe fn streamed() {}
    /// Writes `n` numbers.
    unsafe fn store_part(self, to: *mut f32, n: usize);
    /// Writes `LANES` IEEE halves, rounded to nearest even.
    unsafe fn store_f16(self, to: *mut u16);
    /// Writes `LANES` signed bytes, rounded to nearest even (numbers within −127.5 .. 127.5).
    unsafe fn store_i8(self, to: *mut i8);
    /// `self + b`.
    unsafe fn add(self, b: Self) -> Self;
    /// `self − b`.
    unsafe fn sub(self, b: Self) -> Self;
    /// `self · b`.
    unsafe fn mul(self, b: Self) -> Self;
    /// `self / b`.
    unsafe fn div(self, b: Self) -> Self;
    /// `self · b + c`.
    unsafe fn mul_add(self, b: Self, c: Self) -> Self;
    /// The larger; where either is not a number, `self`.
    unsafe fn max(self, b: Self) -> Self;
    /// The smaller; where either is not a number, `self`.
    unsafe fn min(self, b: Self) -> Self;
    /// Magnitude.
    unsafe fn abs(self) -> Self;
    /// To the nearest whole number, halves to even (magnitudes below 2²²).
    unsafe fn round(self) -> Self;
    /// `2^self` for whole numbers from −126 to 127.
    unsafe fn exp2_whole(self) -> Self;
    /// Lanes of `yes` where `self < than`, else of `no`.
    unsafe fn less(self, than: Self, yes: Self, no: Self) -> Self;
    /// The first `LANES` vectors are the rows of a square: makes them its columns.
    unsafe fn transpose(square: &mut [Self; MOST_LANES]);
    /// Sum of all lanes: the upper half is added to the lower one, until one lane is left.
    unsafe fn sum(self) -> f32;
    /// [`Self::sum`] of each of four vectors, to the last bit.
    #[inline(always)]
    unsafe fn sums(four: [Self; 4]) -> [f32; 4] {
        // SAFETY: the caller has the vector's instructions.
        four.map(|lanes| unsafe { lanes.sum() })
    }
    /// Largest lane.
    unsafe fn largest(self) -> f32;
}

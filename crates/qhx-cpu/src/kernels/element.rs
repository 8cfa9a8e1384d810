//! The float types in which weights and cached rows are stored, and how vectors read and write them.
#![allow(unsafe_code)] // Raw loads and stores.
#![allow(clippy::undocumented_unsafe_blocks)] // SAFETY throughout: the promises of `Vector`, passed on.

use super::vector::{MOST_LANES, Vector};
use half::{bf16, f16};

/// A stored float. Loads and stores have the promises of [`Vector`]'s.
pub(crate) trait Element: Copy + Send + Sync + 'static {
    /// Reads `V::LANES` numbers.
    unsafe fn load<V: Vector>(from: *const Self) -> V;
    /// Reads `n < V::LANES` numbers, the other lanes are 0.
    unsafe fn load_part<V: Vector>(from: *const Self, n: usize) -> V;
}

/// A type that rows can be kept in.
pub(crate) trait Store: Element {
    /// Writes `V::LANES` numbers.
    unsafe fn store<V: Vector>(lanes: V, to: *mut Self);
    /// Writes `n < V::LANES` numbers.
    unsafe fn store_part<V: Vector>(lanes: V, to: *mut Self, n: usize);
}

macro_rules! element {
    ($type:ty, $bits:ty, $load:ident) => {
        impl Element for $type {
            #[inline(always)]
            unsafe fn load<V: Vector>(from: *const Self) -> V {
                unsafe { V::$load(from.cast()) }
            }
            #[inline(always)]
            unsafe fn load_part<V: Vector>(from: *const Self, n: usize) -> V {
                let mut lanes = [0 as $bits; MOST_LANES];
                unsafe {
                    std::ptr::copy_nonoverlapping(from.cast::<$bits>(), lanes.as_mut_ptr(), n);
                    V::$load(lanes.as_ptr())
                }
            }
        }
    };
}
element!(f16, u16, load_f16);
element!(bf16, u16, load_bf16);

impl Element for f32 {
    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const Self) -> V {
        unsafe { V::load(from) }
    }
    #[inline(always)]
    unsafe fn load_part<V: Vector>(from: *const Self, n: usize) -> V {
        unsafe { V::load_part(from, n) }
    }
}

impl Store for f32 {
    #[inline(always)]
    unsafe fn store<V: Vector>(lanes: V, to: *mut Self) {
        unsafe { lanes.store(to) }
    }
    #[inline(always)]
    unsafe fn store_part<V: Vector>(lanes: V, to: *mut Self, n: usize) {
        unsafe { lanes.store_part(to, n) }
    }
}

impl Store for f16 {
    #[inline(always)]
    unsafe fn store<V: Vector>(lanes: V, to: *mut Self) {
        unsafe { lanes.store_f16(to.cast()) }
    }
    #[inline(always)]
    unsafe fn store_part<V: Vector>(lanes: V, to: *mut Self, n: usize) {
        let mut bits = [0u16; MOST_LANES];
        unsafe {
            lanes.store_f16(bits.as_mut_ptr());
            std::ptr::copy_nonoverlapping(bits.as_ptr(), to.cast(), n);
        }
    }
}

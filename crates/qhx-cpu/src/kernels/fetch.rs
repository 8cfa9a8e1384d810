//! Asking for memory ahead of its use.
#![allow(unsafe_code)] // Addresses of what is asked for.

use super::{
    Instructions, run,
    vector::{Kernel, Vector},
};

/// Bytes of a cache line.
const LINE: usize = 64;

/// Asks for the first `numbers` numbers of `count` rows, `stride` apart.
pub(crate) fn rows<E>(instructions: Instructions, rows: &[E], stride: usize, count: usize, numbers: usize) {
    run(instructions, Rows { start: rows.as_ptr(), stride, count, numbers });
}

struct Rows<E> {
    start: *const E,
    stride: usize,
    count: usize,
    numbers: usize,
}

impl<E> Kernel for Rows<E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        for row in 0..self.count {
            let start = self.start.wrapping_add(row * self.stride).cast::<u8>();
            for line in (0..self.numbers * size_of::<E>()).step_by(LINE) {
                // SAFETY: the caller's promise; any address may be asked for.
                unsafe { V::fetch(start.wrapping_add(line)) };
            }
        }
    }
}

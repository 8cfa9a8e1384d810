//! Integer products with AVX2 and with AVX-512 VNNI.
#![allow(unsafe_code)] // Intrinsics and raw loads.

pub(super) mod avx2;
pub(super) mod dots;
pub(super) mod vnni;

use crate::kernels::{InstructionSet, Instructions};

/// Kernels of a set are called only where the CPU has it.
fn needs(instructions: Instructions, set: InstructionSet) {
    assert_eq!(instructions.set(), set, "kernel of another instruction set");
}

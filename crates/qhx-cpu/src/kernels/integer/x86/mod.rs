//! Integer products with AVX2, with AVX-512 VNNI and with AMX.
#![allow(unsafe_code)] // Intrinsics and raw loads.

pub(super) mod amx;
pub(super) mod amx_few;
pub(super) mod avx2;
pub(super) mod dots;
mod panels;
mod tiles;
pub(super) mod vnni;

use crate::kernels::{InstructionSet, Instructions};

/// Kernels of a set are called only where the CPU has it.
fn needs(instructions: Instructions, set: InstructionSet) {
    assert!(instructions.set().includes(set), "kernel of another instruction set");
}

//! Integer products with AVX2 and with AVX-512 VNNI.
#![allow(unsafe_code)] // Intrinsics and raw loads.

pub(super) mod avx2;
pub(super) mod dots;
pub(super) mod vnni;

use super::{Offsets, Weights};
use crate::kernels::{InstructionSet, Instructions};

/// Kernels of a set are called only where the CPU has it.
fn needs(instructions: Instructions, set: InstructionSet) {
    assert_eq!(instructions.set(), set, "kernel of another instruction set");
}

/// Whether integer sums can run over whole rows: one scale for all blocks on both sides, and sums that fit 32 bits.
fn whole_rows(w: &Weights<'_>, by_row: bool) -> bool {
    by_row && matches!(w.scales, super::Scales::Row(_)) && matches!(w.offsets, Offsets::None) && w.blocks * w.stored.block() <= 1 << 15
}

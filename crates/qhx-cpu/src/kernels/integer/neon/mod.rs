//! Integer products with NEON: plain, with dot products, and with products of small matrices (i8mm).
#![allow(unsafe_code)] // Intrinsics, instructions and raw loads.

mod dots;
mod multiply;
mod panels;

use super::{ActivationRows, Weights};
use crate::{
    kernels::{InstructionSet, Instructions},
    work::Tile,
};
use multiply::{Dotprod, I8mm, Plain};
use panels::Product;

/// See [`super::products`], which checked the lengths.
pub(super) fn products(instructions: Instructions, w: &Weights<'_>, x: &ActivationRows<'_>, first: usize, tile: &mut Tile<'_, f32>) {
    // SAFETY of all calls: an `Instructions` exists only where the CPU has the set; the caller checked lengths and padding.
    match instructions.set() {
        // SAFETY: as above.
        InstructionSet::Neon => unsafe { dots::all::<Plain>(w, x, first, tile) },
        // SAFETY: as above. Products of matrices need their rows packed: dot products serve both.
        InstructionSet::NeonDotprod | InstructionSet::NeonI8mm => unsafe { products_dotprod(w, x, first, tile) },
        other => unreachable!("{other} is not NEON"),
    }
}

/// See [`super::matrix_products`], which checked the lengths.
pub(super) fn matrix_products(
    instructions: Instructions,
    w: &Weights<'_>,
    x: &ActivationRows<'_>,
    first: usize,
    tile: &mut Tile<'_, f32>,
    scratch: &mut [f32],
) {
    let product = match instructions.set() {
        InstructionSet::NeonI8mm => Product::pack::<8>(w, x, first, tile, scratch),
        _ => Product::pack::<4>(w, x, first, tile, scratch),
    };
    match instructions.set() {
        // SAFETY: the CPU has the set; the panels are packed in its form, for all their blocks; activation rows and tile were checked.
        InstructionSet::Neon => unsafe { product.run::<Plain>() },
        // SAFETY: as above.
        InstructionSet::NeonDotprod => unsafe { run_dotprod(&product) },
        // SAFETY: as above.
        InstructionSet::NeonI8mm => unsafe { run_i8mm(&product) },
        other => unreachable!("{other} is not NEON"),
    }
}

#[target_feature(enable = "neon,dotprod")]
unsafe fn products_dotprod(w: &Weights<'_>, x: &ActivationRows<'_>, first: usize, tile: &mut Tile<'_, f32>) {
    // SAFETY: the caller's promise.
    unsafe { dots::all::<Dotprod>(w, x, first, tile) }
}

#[target_feature(enable = "neon,dotprod")]
unsafe fn run_dotprod(product: &Product<'_>) {
    // SAFETY: the caller's promise.
    unsafe { product.run::<Dotprod>() }
}

#[target_feature(enable = "neon,dotprod,i8mm")]
unsafe fn run_i8mm(product: &Product<'_>) {
    // SAFETY: the caller's promise.
    unsafe { product.run::<I8mm>() }
}

//! Decodes runs of quantised numbers to f32.
#![allow(unsafe_code)] // Vector loads and stores.

use super::{
    Instructions, run,
    vector::{Kernel, Vector},
};

/// How quants are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stored {
    /// Signed bytes, with one scale for each 16.
    I8Block16,
    /// Signed bytes, with one scale for each 32.
    I8Block32,
    /// Halves of bytes from 0 to 15, with one scale for each 32.
    I4Block32,
}

impl Stored {
    /// Numbers per scale.
    pub(crate) fn block(self) -> usize {
        if self == Self::I8Block16 { 16 } else { 32 }
    }

    /// Bytes of `blocks` blocks.
    pub(crate) fn bytes(self, blocks: usize) -> usize {
        blocks * if self == Self::I8Block32 { 32 } else { 16 }
    }
}

/// `out[i] = quant_i · scale + min`, block by block from the start of `quants`; the last block may be cut short by `out`.
pub(crate) fn decode(instructions: Instructions, stored: Stored, quants: &[u8], scales: &[f32], mins: &[f32], out: &mut [f32]) {
    let block = stored.block();
    let blocks = out.len().div_ceil(block);
    assert!(scales.len() >= blocks && mins.len() >= blocks && quants.len() >= stored.bytes(blocks), "quants are too short");
    let whole = out.len() / block;
    let (body, rest) = out.split_at_mut(whole * block);
    run(instructions, Decode { stored, quants: quants.as_ptr(), scales, mins, out: body.as_mut_ptr(), blocks: whole });
    if !rest.is_empty() {
        let mut last = [0.0; 32];
        let quants = quants[stored.bytes(whole)..].as_ptr();
        let (scales, mins) = (&scales[whole..], &mins[whole..]);
        run(instructions, Decode { stored, quants, scales, mins, out: last.as_mut_ptr(), blocks: 1 });
        rest.copy_from_slice(&last[..rest.len()]);
    }
}

struct Decode<'a> {
    stored: Stored,
    quants: *const u8,
    scales: &'a [f32],
    mins: &'a [f32],
    out: *mut f32,
    blocks: usize,
}

impl Kernel for Decode<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let block = self.stored.block();
        for b in 0..self.blocks {
            // SAFETY: `decode` checked that quants, scales and room for all blocks are there; LANES divides 16.
            unsafe {
                let (scale, min) = (V::splat(*self.scales.get_unchecked(b)), V::splat(*self.mins.get_unchecked(b)));
                let out = self.out.add(b * block);
                let mut i = 0;
                if self.stored == Stored::I4Block32 {
                    while i < 16 {
                        let (low, high) = V::load_nibbles(self.quants.add(b * 16 + i));
                        low.mul(scale).add(min).store(out.add(i));
                        high.mul(scale).add(min).store(out.add(i + 16));
                        i += V::LANES;
                    }
                } else {
                    while i < block {
                        V::load_i8(self.quants.add(b * block + i).cast()).mul(scale).add(min).store(out.add(i));
                        i += V::LANES;
                    }
                }
            }
        }
    }
}

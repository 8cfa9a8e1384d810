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
    /// Six bits from 0 to 63 that mean −32 to 31, with one scale for each 32.
    I6Block32,
}

/// Bytes of an int6 block.
pub(crate) const I6_BYTES: usize = 24;

impl Stored {
    /// Numbers per scale.
    pub(crate) fn block(self) -> usize {
        if self == Self::I8Block16 { 16 } else { 32 }
    }

    /// Bytes of `blocks` blocks.
    pub(crate) fn bytes(self, blocks: usize) -> usize {
        blocks
            * match self {
                Self::I8Block32 => 32,
                Self::I6Block32 => I6_BYTES,
                Self::I8Block16 | Self::I4Block32 => 16,
            }
    }
}

/// The numbers of an int6 block, −32 to 31. Eight numbers at a time, each a loop that compilers turn into vectors.
#[inline(always)]
pub(crate) fn sixes(block: &[u8; I6_BYTES]) -> [i8; 32] {
    let mut out = [0; 32];
    for i in 0..8 {
        let (first, second, top) = (block[i], block[8 + i], block[16 + i]);
        out[i] = (first & 15 | (top & 3) << 4) as i8 - 32;
        out[8 + i] = (second & 15 | (top >> 2 & 3) << 4) as i8 - 32;
        out[16 + i] = (first >> 4 | (top >> 4 & 3) << 4) as i8 - 32;
        out[24 + i] = (second >> 4 | top >> 6 << 4) as i8 - 32;
    }
    out
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
                match self.stored {
                    Stored::I4Block32 => {
                        for i in (0..16).step_by(V::LANES) {
                            let (low, high) = V::load_nibbles(self.quants.add(b * 16 + i));
                            low.mul(scale).add(min).store(out.add(i));
                            high.mul(scale).add(min).store(out.add(i + 16));
                        }
                    }
                    Stored::I6Block32 => {
                        let numbers = sixes(&*self.quants.add(b * I6_BYTES).cast());
                        decode_bytes::<V>(numbers.as_ptr(), 32, scale, min, out);
                    }
                    Stored::I8Block16 | Stored::I8Block32 => decode_bytes::<V>(self.quants.add(b * block).cast(), block, scale, min, out),
                }
            }
        }
    }
}

/// `count` signed bytes, a multiple of 16.
#[inline(always)]
unsafe fn decode_bytes<V: Vector>(from: *const i8, count: usize, scale: V, min: V, out: *mut f32) {
    for i in (0..count).step_by(V::LANES) {
        // SAFETY: the caller's promise.
        unsafe { V::load_i8(from.add(i)).mul(scale).add(min).store(out.add(i)) };
    }
}

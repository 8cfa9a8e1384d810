//! Dot products of codes and bytes with AVX2 and with AVX-512 VNNI, four rows at a time.

use super::{BLOCK, Shape};
use crate::kernels::{InstructionSet, Instructions};
use std::arch::x86_64::*;

/// `out[r]` becomes the bits of `Σ code · x`, for each row of `planes`.
pub(super) fn dots_avx2(instructions: Instructions, shape: Shape, planes: &[u8], x: &[i8], out: &mut [f32]) {
    assert!(instructions.set().includes(InstructionSet::Avx2), "kernel of another instruction set");
    check(shape, planes, x, out);
    // SAFETY: the CPU has AVX2; lengths are checked.
    unsafe { avx2::all(shape, planes.as_ptr(), x.as_ptr(), out) }
}

/// `out[r]` becomes the bits of `Σ code · x`, for each row of `planes`.
pub(super) fn dots_vnni(instructions: Instructions, shape: Shape, planes: &[u8], x: &[i8], out: &mut [f32]) {
    assert!(instructions.set().includes(InstructionSet::Avx512Vnni), "kernel of another instruction set");
    check(shape, planes, x, out);
    // SAFETY: the CPU has AVX-512 with VNNI; lengths are checked.
    unsafe { vnni::all(shape, planes.as_ptr(), x.as_ptr(), out) }
}

fn check(shape: Shape, planes: &[u8], x: &[i8], out: &[f32]) {
    assert!(planes.len() >= out.len() * shape.stride() && x.len() >= shape.padded() && shape.extra <= 1, "planes or bytes are too short");
}

/// How many rows ahead of their use rows are asked for; none where they would lie beyond the last.
#[inline(always)]
fn ahead(shape: Shape, row: usize, rows: usize) -> usize {
    let ahead = 2048usize.div_ceil(shape.stride()).next_multiple_of(4);
    if row + ahead + 4 <= rows { ahead * shape.stride() } else { 0 }
}

/// Asks for what a row has of a block: its upper bits, and with the first blocks the lines of its fifth.
#[inline(always)]
fn fetch<const FIFTH: bool>(shape: Shape, row: *const u8, block: usize) {
    // SAFETY: a prefetch reads nothing that the program could see and never faults, whatever the address.
    unsafe {
        _mm_prefetch::<_MM_HINT_T0>(row.wrapping_add(block * 64).cast());
        if FIFTH && block * 4 < shape.blocks() {
            _mm_prefetch::<_MM_HINT_T0>(row.wrapping_add((shape.blocks() + block) * 64).cast());
        }
    }
}

// SAFETY of all blocks below: `check`. Each row has `blocks` blocks in every plane, and x as many numbers.

#[allow(clippy::undocumented_unsafe_blocks, clippy::needless_range_loop)]
mod avx2 {
    use super::*;

    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn all(shape: Shape, planes: *const u8, x: *const i8, out: &mut [f32]) {
        unsafe {
            match shape.extra {
                0 => by_rows::<false>(shape, planes, x, out),
                _ => by_rows::<true>(shape, planes, x, out),
            }
        }
    }

    #[inline(always)]
    unsafe fn by_rows<const FIFTH: bool>(shape: Shape, planes: *const u8, x: *const i8, out: &mut [f32]) {
        let mut row = 0;
        unsafe {
            while row + 4 <= out.len() {
                rows::<FIFTH, 4>(shape, planes.add(row * shape.stride()), ahead(shape, row, out.len()), x, &mut out[row..]);
                row += 4;
            }
            while row < out.len() {
                rows::<FIFTH, 1>(shape, planes.add(row * shape.stride()), 0, x, &mut out[row..]);
                row += 1;
            }
        }
    }

    #[inline(always)]
    unsafe fn rows<const FIFTH: bool, const R: usize>(shape: Shape, planes: *const u8, ahead: usize, x: *const i8, out: &mut [f32]) {
        unsafe {
            let (low, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi16(1));
            let mut sums = [_mm256_setzero_si256(); R];
            for half in 0..2 * shape.blocks() {
                // 32 bytes: numbers `at ..` and `at + 64 ..`.
                let at = half / 2 * BLOCK + half % 2 * 32;
                let (x_low, x_high) = (_mm256_loadu_si256(x.add(at).cast()), _mm256_loadu_si256(x.add(at + 64).cast()));
                for r in 0..R {
                    let row = planes.add(r * shape.stride());
                    if half % 2 == 0 {
                        fetch::<FIFTH>(shape, row.wrapping_add(ahead), half / 2);
                    }
                    let both = _mm256_loadu_si256(row.add(half * 32).cast());
                    let mut codes = [_mm256_and_si256(both, low), _mm256_and_si256(_mm256_srli_epi16::<4>(both), low)];
                    let bits = row.add(shape.blocks() * BLOCK / 2);
                    if FIFTH {
                        for (i, code) in codes.iter_mut().enumerate() {
                            let bits = bits.add((at + 64 * i) / 8).cast::<i32>().read_unaligned();
                            // Twice the code, less −1 where the bit is set.
                            *code = _mm256_sub_epi8(_mm256_add_epi8(*code, *code), spread(bits));
                        }
                    }
                    // Four products of 31 and 127 fit 16 bits.
                    let halves = _mm256_add_epi16(_mm256_maddubs_epi16(codes[0], x_low), _mm256_maddubs_epi16(codes[1], x_high));
                    sums[r] = _mm256_add_epi32(sums[r], _mm256_madd_epi16(halves, ones));
                }
            }
            for r in 0..R {
                let four = _mm_add_epi32(_mm256_castsi256_si128(sums[r]), _mm256_extracti128_si256::<1>(sums[r]));
                let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b10_11_10_11>(four));
                let one = _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<0b01>(two)));
                *out.get_unchecked_mut(r) = f32::from_bits(one.cast_unsigned());
            }
        }
    }

    /// −1 in the bytes whose bit is set.
    #[inline(always)]
    unsafe fn spread(bits: i32) -> __m256i {
        unsafe {
            let each = _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
            let one = _mm256_set1_epi64x(0x8040_2010_0804_0201u64.cast_signed());
            _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(bits), each), one), one)
        }
    }
}

#[allow(clippy::undocumented_unsafe_blocks, clippy::needless_range_loop)]
mod vnni {
    use super::*;

    #[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    pub(super) unsafe fn all(shape: Shape, planes: *const u8, x: *const i8, out: &mut [f32]) {
        unsafe {
            match shape.extra {
                0 => by_rows::<false>(shape, planes, x, out),
                _ => by_rows::<true>(shape, planes, x, out),
            }
        }
    }

    #[inline(always)]
    unsafe fn by_rows<const FIFTH: bool>(shape: Shape, planes: *const u8, x: *const i8, out: &mut [f32]) {
        let mut row = 0;
        unsafe {
            while row + 4 <= out.len() {
                rows::<FIFTH, 4>(shape, planes.add(row * shape.stride()), ahead(shape, row, out.len()), x, &mut out[row..]);
                row += 4;
            }
            while row < out.len() {
                rows::<FIFTH, 1>(shape, planes.add(row * shape.stride()), 0, x, &mut out[row..]);
                row += 1;
            }
        }
    }

    #[inline(always)]
    unsafe fn rows<const FIFTH: bool, const R: usize>(shape: Shape, planes: *const u8, ahead: usize, x: *const i8, out: &mut [f32]) {
        unsafe {
            let (low, one) = (_mm512_set1_epi8(15), _mm512_set1_epi8(1));
            let mut sums = [_mm512_setzero_si512(); R];
            for block in 0..shape.blocks() {
                let x = x.add(block * BLOCK);
                let (x_low, x_high) = (_mm512_loadu_si512(x.cast()), _mm512_loadu_si512(x.add(64).cast()));
                for r in 0..R {
                    let row = planes.add(r * shape.stride());
                    fetch::<FIFTH>(shape, row.wrapping_add(ahead), block);
                    let both = _mm512_loadu_si512(row.add(block * 64).cast());
                    let mut codes = [_mm512_and_si512(both, low), _mm512_and_si512(_mm512_srli_epi16::<4>(both), low)];
                    let bits = row.add(shape.blocks() * BLOCK / 2);
                    if FIFTH {
                        for (i, code) in codes.iter_mut().enumerate() {
                            let bits = bits.add(block * BLOCK / 8 + 8 * i).cast::<u64>().read_unaligned();
                            let twice = _mm512_add_epi8(*code, *code);
                            *code = _mm512_mask_add_epi8(twice, bits, twice, one);
                        }
                    }
                    sums[r] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(sums[r], codes[0], x_low), codes[1], x_high);
                }
            }
            for r in 0..R {
                *out.get_unchecked_mut(r) = f32::from_bits(_mm512_reduce_add_epi32(sums[r]).cast_unsigned());
            }
        }
    }
}

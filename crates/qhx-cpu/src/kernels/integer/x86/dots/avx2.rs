//! Eight stored rows at a time, with AVX2.
#![allow(clippy::undocumented_unsafe_blocks, clippy::needless_range_loop)] // SAFETY: see the module above.

use super::*;
use crate::kernels::vector::{MOST_LANES, Vector, x86::Avx2};
use std::arch::x86_64::*;

/// Rows of a group.
const ROWS: usize = 8;
/// Blocks whose scales are put side by side at once.
const CHUNK: usize = 8;

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn all(w: &Weights<'_>, x: &Row<'_>, whole: bool, out: &mut [f32]) {
    unsafe {
        match (w.stored, &w.offsets) {
            (Stored::I4Block32, _) => by_rows::<I4_BLOCK32, true>(w, x, out),
            (Stored::I8Block32, _) if whole => whole_rows(w, x, out),
            (Stored::I8Block32, Offsets::None) => by_rows::<I8_BLOCK32, false>(w, x, out),
            (Stored::I8Block32, _) => by_rows::<I8_BLOCK32, true>(w, x, out),
            (Stored::I8Block16, Offsets::None) => by_rows::<I8_BLOCK16, false>(w, x, out),
            (Stored::I8Block16, _) => by_rows::<I8_BLOCK16, true>(w, x, out),
        }
    }
}

#[inline(always)]
unsafe fn by_rows<const STORED: usize, const OFFSETS: bool>(w: &Weights<'_>, x: &Row<'_>, out: &mut [f32]) {
    for (group, out) in out.chunks_mut(ROWS).enumerate() {
        let rows = Group::new(w, group * ROWS);
        let results = match out.len() {
            ..=4 => unsafe { blocks::<STORED, OFFSETS, 1>(&rows, x) },
            _ => unsafe { blocks::<STORED, OFFSETS, 2>(&rows, x) },
        };
        unsafe { store(results, out) };
    }
}

/// The first `4 · FOURS` rows of a group, a sum for each block.
#[inline(always)]
unsafe fn blocks<const STORED: usize, const OFFSETS: bool, const FOURS: usize>(rows: &Group<'_, ROWS>, x: &Row<'_>) -> __m256 {
    unsafe {
        let w = rows.w;
        // In 32 bytes.
        let per_step = if STORED == I8_BLOCK32 { 1 } else { 2 };
        let x_sums = if STORED == I8_BLOCK16 { x.sums16.as_ptr() } else { x.sums32.as_ptr() };
        let minus_eight = matches!(w.offsets, Offsets::MinusEight);
        let mut results = _mm256_setzero_ps();
        let (mut scales, mut offsets) = ([0.0f32; CHUNK * ROWS], [0.0f32; CHUNK * ROWS]);
        for chunk in 0..w.blocks.div_ceil(CHUNK) {
            side_by_side(rows, &w.scales, chunk * CHUNK, &mut scales);
            if let Offsets::Min(mins) = &w.offsets {
                side_by_side(rows, mins, chunk * CHUNK, &mut offsets);
            }
            let end = w.blocks.min((chunk + 1) * CHUNK);
            for first in (chunk * CHUNK..end).step_by(per_step) {
                let totals = step::<STORED, FOURS>(rows, x, first / per_step * 32);
                for i in 0..per_step {
                    let b = first + i;
                    if b >= end {
                        break;
                    }
                    let total = if STORED == I8_BLOCK32 { _mm256_add_epi32(totals[0], totals[1]) } else { totals[i] };
                    let at = (b - chunk * CHUNK) * ROWS;
                    let w_scales = _mm256_loadu_ps(scales.as_ptr().add(at));
                    let x_scale = _mm256_broadcast_ss(&*x.scales.as_ptr().add(if STORED == I8_BLOCK16 { b / 2 } else { b }));
                    results = _mm256_fmadd_ps(_mm256_cvtepi32_ps(total), _mm256_mul_ps(w_scales, x_scale), results);
                    if OFFSETS {
                        let offsets = match minus_eight {
                            true => _mm256_mul_ps(w_scales, _mm256_set1_ps(-8.0)),
                            false => _mm256_loadu_ps(offsets.as_ptr().add(at)),
                        };
                        results = _mm256_fmadd_ps(offsets, _mm256_broadcast_ss(&*x_sums.add(b)), results);
                    }
                }
            }
        }
        results
    }
}

/// The scales of eight blocks from `b` on: those of one block for all rows, then those of the next.
#[inline(always)]
unsafe fn side_by_side(rows: &Group<'_, ROWS>, scales: &Scales<'_>, b: usize, out: &mut [f32; CHUNK * ROWS]) {
    unsafe {
        let mut square = [Avx2::splat(0.0); MOST_LANES];
        for r in 0..ROWS {
            square[r] = match *scales {
                Scales::Row(scales) => Avx2::splat(scales[rows.rows[r]]),
                Scales::F16(scales, stride) => Avx2::load_f16(scales.as_ptr().add(rows.rows[r] * stride + b).cast()),
                Scales::F32(scales, stride) => Avx2::load(scales.as_ptr().add(rows.rows[r] * stride + b)),
            };
        }
        Avx2::transpose(&mut square);
        for (column, out) in square.into_iter().zip(out.chunks_exact_mut(ROWS)) {
            column.store(out.as_mut_ptr());
        }
    }
}

/// The sums over each half of the 32 bytes from byte `at` of the rows on.
#[inline(always)]
unsafe fn step<const STORED: usize, const FOURS: usize>(rows: &Group<'_, ROWS>, x: &Row<'_>, at: usize) -> [__m256i; 2] {
    unsafe {
        let (x_low, x_high) = match STORED {
            // Two blocks: their low and high halves meet the first and second sixteens of the activations.
            I4_BLOCK32 => {
                let quants = x.quants.as_ptr().add(2 * at).cast::<__m256i>();
                let (one, two) = (_mm256_loadu_si256(quants), _mm256_loadu_si256(quants.add(1)));
                (_mm256_permute2x128_si256::<0x20>(one, two), _mm256_permute2x128_si256::<0x31>(one, two))
            }
            _ => {
                let quants = _mm256_loadu_si256(x.quants.as_ptr().add(at).cast());
                (quants, quants)
            }
        };
        let (low, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi16(1));
        let ahead = rows.ahead(at);
        let mut fours = [_mm256_setzero_si256(); 2];
        for f in 0..FOURS {
            let mut totals = [_mm256_setzero_si256(); 4];
            for r in 0..4 {
                let from = rows.quants[4 * f + r].add(at);
                if at % 64 == 0 {
                    fetch(from.wrapping_add(ahead));
                }
                let quants = _mm256_loadu_si256(from.cast());
                totals[r] = match STORED {
                    I4_BLOCK32 => {
                        let w_high = _mm256_and_si256(_mm256_srli_epi16::<4>(quants), low);
                        let first = _mm256_maddubs_epi16(_mm256_and_si256(quants, low), x_low);
                        _mm256_add_epi16(first, _mm256_maddubs_epi16(w_high, x_high))
                    }
                    _ => bytes(quants, x_low, ones),
                };
            }
            fours[f] = match STORED {
                // Sixteen products of 15 and 127 fit 16 bits.
                I4_BLOCK32 => {
                    let pairs = _mm256_hadd_epi16(_mm256_hadd_epi16(totals[0], totals[1]), _mm256_hadd_epi16(totals[2], totals[3]));
                    _mm256_madd_epi16(pairs, ones)
                }
                _ => four_rows(totals),
            };
        }
        [_mm256_permute2x128_si256::<0x20>(fours[0], fours[1]), _mm256_permute2x128_si256::<0x31>(fours[0], fours[1])]
    }
}

/// Sums of four products of signed bytes.
#[inline(always)]
unsafe fn bytes(weights: __m256i, x: __m256i, ones: __m256i) -> __m256i {
    // |w| as unsigned bytes (128 at most) times x with the sign of w: two products of 128 and 127 fit 16 bits.
    unsafe { _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights)), ones) }
}

#[inline(always)]
unsafe fn whole_rows(w: &Weights<'_>, x: &Row<'_>, out: &mut [f32]) {
    for (group, out) in out.chunks_mut(ROWS).enumerate() {
        let rows = Group::new(w, group * ROWS);
        unsafe {
            let fours = match out.len() {
                ..=4 => whole::<1>(&rows, x),
                _ => whole::<2>(&rows, x),
            };
            let low = _mm256_permute2x128_si256::<0x20>(fours[0], fours[1]);
            let total = _mm256_add_epi32(low, _mm256_permute2x128_si256::<0x31>(fours[0], fours[1]));
            let scales = rows.rows.map(|row| w.scales.get(row, 0));
            let scale = _mm256_mul_ps(_mm256_loadu_ps(scales.as_ptr()), _mm256_set1_ps(x.scales[0]));
            store(_mm256_mul_ps(_mm256_cvtepi32_ps(total), scale), out);
        }
    }
}

/// The first `4 · FOURS` rows of a group, one sum over each row.
#[inline(always)]
unsafe fn whole<const FOURS: usize>(rows: &Group<'_, ROWS>, x: &Row<'_>) -> [__m256i; 2] {
    unsafe {
        let mut totals = [[_mm256_setzero_si256(); 4]; FOURS];
        let ones = _mm256_set1_epi16(1);
        for at in (0..rows.w.blocks * 32).step_by(32) {
            let (ahead, x) = (rows.ahead(at), _mm256_loadu_si256(x.quants.as_ptr().add(at).cast()));
            for f in 0..FOURS {
                for r in 0..4 {
                    let from = rows.quants[4 * f + r].add(at);
                    if at % 64 == 0 {
                        fetch(from.wrapping_add(ahead));
                    }
                    totals[f][r] = _mm256_add_epi32(totals[f][r], bytes(_mm256_loadu_si256(from.cast()), x, ones));
                }
            }
        }
        let mut fours = [_mm256_setzero_si256(); 2];
        for f in 0..FOURS {
            fours[f] = four_rows(totals[f]);
        }
        fours
    }
}

/// The sums of four rows over each half of a vector, side by side in that half.
#[inline(always)]
unsafe fn four_rows(totals: [__m256i; 4]) -> __m256i {
    unsafe { _mm256_hadd_epi32(_mm256_hadd_epi32(totals[0], totals[1]), _mm256_hadd_epi32(totals[2], totals[3])) }
}

/// Writes the results of as many rows as `out` has places for.
#[inline(always)]
unsafe fn store(results: __m256, out: &mut [f32]) {
    unsafe {
        let results = std::mem::transmute::<__m256, [f32; ROWS]>(results);
        out.copy_from_slice(&results[..out.len()]);
    }
}

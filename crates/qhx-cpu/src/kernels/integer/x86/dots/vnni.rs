//! Sixteen stored rows at a time, with AVX-512 VNNI.
#![allow(clippy::undocumented_unsafe_blocks, clippy::needless_range_loop)] // SAFETY: see the module above.

use super::{
    super::panels::{ROWS, scales_of, side_by_side},
    *,
};
use std::arch::x86_64::*;

/// Blocks whose scales are put side by side at once.
const CHUNK: usize = 16;

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
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
            _ => unsafe { blocks::<STORED, OFFSETS, 4>(&rows, x) },
        };
        unsafe { store(results, out) };
    }
}

/// The first `4 · FOURS` rows of a group, a sum for each block.
#[inline(always)]
unsafe fn blocks<const STORED: usize, const OFFSETS: bool, const FOURS: usize>(rows: &Group<'_, ROWS>, x: &Row<'_>) -> __m512 {
    unsafe {
        let w = rows.w;
        // In 64 bytes.
        let per_step = if STORED == I8_BLOCK32 { 2 } else { 4 };
        let (x_sums, x_shifts) = match STORED {
            I8_BLOCK16 => (x.sums16.as_ptr(), x.shifts16.as_ptr()),
            _ => (x.sums32.as_ptr(), x.shifts32.as_ptr()),
        };
        let minus_eight = matches!(w.offsets, Offsets::MinusEight);
        let mut results = _mm512_setzero_ps();
        let (mut scales, mut offsets) = ([0.0f32; CHUNK * ROWS], [0.0f32; CHUNK * ROWS]);
        for chunk in 0..w.blocks.div_ceil(CHUNK) {
            side_by_side(&mut scales, |r, _| scales_of(&w.scales, rows.rows[r], chunk));
            if let Offsets::Min(mins) = &w.offsets {
                side_by_side(&mut offsets, |r, _| scales_of(mins, rows.rows[r], chunk));
            }
            let end = w.blocks.min((chunk + 1) * CHUNK);
            for first in (chunk * CHUNK..end).step_by(per_step) {
                let totals = step::<STORED, FOURS>(rows, x, first / per_step * 64);
                for i in 0..per_step {
                    let b = first + i;
                    if b >= end {
                        break;
                    }
                    let total = match STORED {
                        I4_BLOCK32 => totals[i],
                        I8_BLOCK32 => {
                            _mm512_add_epi32(_mm512_add_epi32(totals[2 * i], totals[2 * i + 1]), _mm512_set1_epi32(*x_shifts.add(b)))
                        }
                        _ => _mm512_add_epi32(totals[i], _mm512_set1_epi32(*x_shifts.add(b))),
                    };
                    let at = (b - chunk * CHUNK) * ROWS;
                    let w_scales = _mm512_loadu_ps(scales.as_ptr().add(at));
                    let x_scale = _mm512_set1_ps(*x.scales.as_ptr().add(if STORED == I8_BLOCK16 { b / 2 } else { b }));
                    results = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), _mm512_mul_ps(w_scales, x_scale), results);
                    if OFFSETS {
                        let offsets = match minus_eight {
                            true => _mm512_mul_ps(w_scales, _mm512_set1_ps(-8.0)),
                            false => _mm512_loadu_ps(offsets.as_ptr().add(at)),
                        };
                        results = _mm512_fmadd_ps(offsets, _mm512_set1_ps(*x_sums.add(b)), results);
                    }
                }
            }
        }
        results
    }
}

/// The sums over each quarter of the 64 bytes from byte `at` of the rows on. Bytes count as unsigned ones: an int8 has 128 too much.
#[inline(always)]
unsafe fn step<const STORED: usize, const FOURS: usize>(rows: &Group<'_, ROWS>, x: &Row<'_>, at: usize) -> [__m512i; 4] {
    unsafe {
        let (x_low, x_high) = match STORED {
            // Four blocks: their low and high halves meet the first and second sixteens of the activations.
            I4_BLOCK32 => {
                let quants = x.quants.as_ptr().add(2 * at);
                let (one, two) = (_mm512_loadu_si512(quants.cast()), _mm512_loadu_si512(quants.add(64).cast()));
                (_mm512_shuffle_i64x2::<0b10_00_10_00>(one, two), _mm512_shuffle_i64x2::<0b11_01_11_01>(one, two))
            }
            _ => {
                let quants = _mm512_loadu_si512(x.quants.as_ptr().add(at).cast());
                (quants, quants)
            }
        };
        let (low, shift) = (_mm512_set1_epi8(15), _mm512_set1_epi8(-128));
        let ahead = rows.ahead(at);
        let mut fours = [_mm512_setzero_si512(); 4];
        for f in 0..FOURS {
            let mut totals = [_mm512_setzero_si512(); 4];
            for r in 0..4 {
                let from = rows.quants[4 * f + r].add(at);
                fetch(from.wrapping_add(ahead));
                let quants = _mm512_loadu_si512(from.cast());
                totals[r] = match STORED {
                    I4_BLOCK32 => {
                        let high = _mm512_and_si512(_mm512_srli_epi16::<4>(quants), low);
                        _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(totals[r], _mm512_and_si512(quants, low), x_low), high, x_high)
                    }
                    _ => _mm512_dpbusd_epi32(totals[r], _mm512_xor_si512(quants, shift), x_low),
                };
            }
            fours[f] = four_rows(totals);
        }
        by_quarter(fours)
    }
}

#[inline(always)]
unsafe fn whole_rows(w: &Weights<'_>, x: &Row<'_>, out: &mut [f32]) {
    // What bytes that count as unsigned ones have too much.
    let shift = x.shifts32[..w.blocks].iter().sum();
    for (group, out) in out.chunks_mut(ROWS).enumerate() {
        let rows = Group::new(w, group * ROWS);
        unsafe {
            let totals = match out.len() {
                ..=4 => whole::<1>(&rows, x),
                _ => whole::<4>(&rows, x),
            };
            let [a, b, c, d] = by_quarter(totals);
            let total = _mm512_add_epi32(_mm512_add_epi32(a, b), _mm512_add_epi32(c, d));
            let total = _mm512_cvtepi32_ps(_mm512_add_epi32(total, _mm512_set1_epi32(shift)));
            let scales = rows.rows.map(|row| w.scales.get(row, 0));
            let scale = _mm512_mul_ps(_mm512_loadu_ps(scales.as_ptr()), _mm512_set1_ps(x.scales[0]));
            store(_mm512_mul_ps(total, scale), out);
        }
    }
}

/// The first `4 · FOURS` rows of a group, one sum over each row.
#[inline(always)]
unsafe fn whole<const FOURS: usize>(rows: &Group<'_, ROWS>, x: &Row<'_>) -> [__m512i; 4] {
    unsafe {
        let mut totals = [[_mm512_setzero_si512(); 4]; FOURS];
        let shift = _mm512_set1_epi8(-128);
        for at in (0..rows.w.blocks * 32).step_by(64) {
            let (ahead, x) = (rows.ahead(at), _mm512_loadu_si512(x.quants.as_ptr().add(at).cast()));
            for f in 0..FOURS {
                for r in 0..4 {
                    let from = rows.quants[4 * f + r].add(at);
                    fetch(from.wrapping_add(ahead));
                    totals[f][r] = _mm512_dpbusd_epi32(totals[f][r], _mm512_xor_si512(_mm512_loadu_si512(from.cast()), shift), x);
                }
            }
        }
        let mut fours = [_mm512_setzero_si512(); 4];
        for f in 0..FOURS {
            fours[f] = four_rows(totals[f]);
        }
        fours
    }
}

/// The sums of four rows over each quarter of a vector, side by side in that quarter.
#[inline(always)]
unsafe fn four_rows(totals: [__m512i; 4]) -> __m512i {
    unsafe {
        let pair = |a, b| _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let (first, second) = (pair(totals[0], totals[1]), pair(totals[2], totals[3]));
        _mm512_add_epi32(_mm512_unpacklo_epi64(first, second), _mm512_unpackhi_epi64(first, second))
    }
}

/// From four times four rows with a quarter for each: all sixteen rows, for each quarter.
#[inline(always)]
unsafe fn by_quarter([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    unsafe {
        let (first, more_first) = (_mm512_shuffle_i32x4::<0x44>(a, b), _mm512_shuffle_i32x4::<0x44>(c, d));
        let (last, more_last) = (_mm512_shuffle_i32x4::<0xee>(a, b), _mm512_shuffle_i32x4::<0xee>(c, d));
        [
            _mm512_shuffle_i32x4::<0x88>(first, more_first),
            _mm512_shuffle_i32x4::<0xdd>(first, more_first),
            _mm512_shuffle_i32x4::<0x88>(last, more_last),
            _mm512_shuffle_i32x4::<0xdd>(last, more_last),
        ]
    }
}

/// Writes the results of as many rows as `out` has places for.
#[inline(always)]
unsafe fn store(results: __m512, out: &mut [f32]) {
    let lanes = ((1u32 << out.len()) - 1) as __mmask16;
    unsafe { _mm512_mask_storeu_ps(out.as_mut_ptr(), lanes, results) };
}

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
pub(super) unsafe fn all(w: &Weights<'_>, x: &ActivationRows<'_>, first: usize, tile: &mut Tile<'_, f32>) {
    unsafe {
        match (w.stored, &w.offsets) {
            (Stored::I4Block32, Offsets::Min(_)) => by_blocks::<I4_BLOCK32, true>(w, x, first, tile),
            (Stored::I4Block32, _) => by_blocks::<I4_BLOCK32, false>(w, x, first, tile),
            (Stored::I6Block32, _) => by_blocks::<I6_BLOCK32, false>(w, x, first, tile),
            (Stored::I8Block32, _) if whole_rows(w, x.by_row) => by_rows(w, x, first, tile),
            (Stored::I8Block32, Offsets::None) => by_blocks::<I8_BLOCK32, false>(w, x, first, tile),
            (Stored::I8Block32, _) => by_blocks::<I8_BLOCK32, true>(w, x, first, tile),
            (Stored::I8Block16, Offsets::None) => by_blocks::<I8_BLOCK16, false>(w, x, first, tile),
            (Stored::I8Block16, _) => by_blocks::<I8_BLOCK16, true>(w, x, first, tile),
        }
    }
}

/// A sum for each block.
#[inline(always)]
unsafe fn by_blocks<const STORED: usize, const OFFSETS: bool>(
    w: &Weights<'_>,
    x: &ActivationRows<'_>,
    first: usize,
    tile: &mut Tile<'_, f32>,
) {
    for start in (0..w.rows).step_by(ROWS) {
        let rows = Group::new(w, start);
        let mut out = tile.columns_from(start, (w.rows - start).min(ROWS));
        let mut t = 0;
        while t < out.rows {
            let at = first + t;
            t += unsafe {
                match (out.rows - t, out.columns) {
                    (4.., _) => store(blocks::<STORED, OFFSETS, 4, 4>(&rows, &x.rows(at)), t, &mut out),
                    (3, _) => store(blocks::<STORED, OFFSETS, 4, 3>(&rows, &x.rows(at)), t, &mut out),
                    (2, _) => store(blocks::<STORED, OFFSETS, 4, 2>(&rows, &x.rows(at)), t, &mut out),
                    (_, 5..) => store(blocks::<STORED, OFFSETS, 4, 1>(&rows, &x.rows(at)), t, &mut out),
                    _ => store(blocks::<STORED, OFFSETS, 1, 1>(&rows, &x.rows(at)), t, &mut out),
                }
            };
        }
    }
}

/// The first `4 · FOURS` rows of a group with `M` activation rows.
#[inline(always)]
unsafe fn blocks<const STORED: usize, const OFFSETS: bool, const FOURS: usize, const M: usize>(
    rows: &Group<'_, ROWS>,
    x: &[Row<'_>; M],
) -> [__m512; M] {
    unsafe {
        let w = rows.w;
        // Blocks that a step takes.
        let per_step = if STORED == I8_BLOCK32 { 2 } else { 4 };
        let mut results = [_mm512_setzero_ps(); M];
        let (mut scales, mut offsets) = ([0.0f32; CHUNK * ROWS], [0.0f32; CHUNK * ROWS]);
        for chunk in 0..w.blocks.div_ceil(CHUNK) {
            side_by_side(&mut scales, |r, _| scales_of(&w.scales, rows.rows[r], chunk));
            if let Offsets::Min(mins) = &w.offsets {
                side_by_side(&mut offsets, |r, _| scales_of(mins, rows.rows[r], chunk));
            }
            let end = w.blocks.min((chunk + 1) * CHUNK);
            for first in (chunk * CHUNK..end).step_by(per_step) {
                let totals = step::<STORED, OFFSETS, FOURS, M>(rows, x, first);
                for i in 0..per_step {
                    let b = first + i;
                    if b >= end {
                        break;
                    }
                    let at = (b - chunk * CHUNK) * ROWS;
                    let w_scales = _mm512_loadu_ps(scales.as_ptr().add(at));
                    for m in 0..M {
                        let (x, totals) = (&x[m], &totals[m]);
                        let total = match STORED {
                            I4_BLOCK32 | I6_BLOCK32 => totals[i],
                            I8_BLOCK32 => {
                                let shift = _mm512_set1_epi32(*x.shifts32.as_ptr().add(b));
                                _mm512_add_epi32(_mm512_add_epi32(totals[2 * i], totals[2 * i + 1]), shift)
                            }
                            _ => _mm512_add_epi32(totals[i], _mm512_set1_epi32(*x.shifts16.as_ptr().add(b))),
                        };
                        let x_scale = _mm512_set1_ps(*x.scales.as_ptr().add(if STORED == I8_BLOCK16 { b / 2 } else { b }));
                        results[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), _mm512_mul_ps(w_scales, x_scale), results[m]);
                    }
                    if OFFSETS {
                        let offsets = _mm512_loadu_ps(offsets.as_ptr().add(at));
                        for m in 0..M {
                            let x_sums = if STORED == I8_BLOCK16 { x[m].sums16 } else { x[m].sums32 };
                            results[m] = _mm512_fmadd_ps(offsets, _mm512_set1_ps(*x_sums.as_ptr().add(b)), results[m]);
                        }
                    }
                }
            }
        }
        results
    }
}

/// For each activation row, the sums of the stored rows over each of four blocks from `first` on, or over each half of two blocks of int8. Quants count as unsigned
/// ones: an int8 has 128 too much, an int6 32.
#[inline(always)]
unsafe fn step<const STORED: usize, const OFFSETS: bool, const FOURS: usize, const M: usize>(
    rows: &Group<'_, ROWS>,
    x: &[Row<'_>; M],
    first: usize,
) -> [[__m512i; 4]; M] {
    unsafe {
        let at = first * block_bytes(STORED);
        let zero = _mm512_setzero_si512();
        let (mut x_low, mut x_high) = ([zero; M], [zero; M]);
        for m in 0..M {
            let quants = x[m].quants.as_ptr().add(first * block_numbers(STORED));
            (x_low[m], x_high[m]) = match STORED {
                // Four blocks: their low and high halves meet the first and second sixteens of the activations.
                I4_BLOCK32 | I6_BLOCK32 => {
                    let (one, two) = (_mm512_loadu_si512(quants.cast()), _mm512_loadu_si512(quants.add(64).cast()));
                    (_mm512_shuffle_i64x2::<0b10_00_10_00>(one, two), _mm512_shuffle_i64x2::<0b11_01_11_01>(one, two))
                }
                _ => (_mm512_loadu_si512(quants.cast()), zero),
            };
        }
        // What int4 without a minimum has too much, 8 of each number, or int6, 32 of each, is taken off in four equal parts.
        let mut start = [zero; M];
        if STORED == I4_BLOCK32 && !OFFSETS || STORED == I6_BLOCK32 {
            for m in 0..M {
                let four = _mm512_castsi128_si512(_mm_loadu_si128(x[m].shifts32.as_ptr().add(first).cast()));
                let each = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), four);
                start[m] = if STORED == I4_BLOCK32 { _mm512_srai_epi32::<6>(each) } else { _mm512_srai_epi32::<4>(each) };
            }
        }
        let shift = _mm512_set1_epi8(-128);
        // Of int6, which has no line to itself: the words of 64 bits that are left of the row.
        let words = (1u32 << (3 * (rows.w.blocks - first).min(4))) - 1;
        // Of four rows; a step of int6 is a line and a half.
        let (line, lines) = (at * ROWS / 64, if STORED == I6_BLOCK32 { 6 } else { 4 });
        let mut fours = [[zero; 4]; M];
        for f in 0..FOURS {
            let mut totals = [[zero; 4]; M];
            for r in 0..4 {
                let from = rows.quants[4 * f + r].add(at);
                (r * lines / 4..(r + 1) * lines / 4).for_each(|l| rows.fetch(line + lines * f + l));
                if STORED == I4_BLOCK32 || STORED == I6_BLOCK32 {
                    let (w_low, w_high) = match STORED {
                        I6_BLOCK32 => sixes(from, words),
                        _ => nibbles(_mm512_loadu_si512(from.cast())),
                    };
                    for m in 0..M {
                        totals[m][r] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(start[m], w_low, x_low[m]), w_high, x_high[m]);
                    }
                } else {
                    let quants = _mm512_xor_si512(_mm512_loadu_si512(from.cast()), shift);
                    for m in 0..M {
                        totals[m][r] = _mm512_dpbusd_epi32(zero, quants, x_low[m]);
                    }
                }
            }
            for m in 0..M {
                fours[m][f] = four_rows(totals[m]);
            }
        }
        // Not `map`: what a closure calls is not compiled for these instructions.
        for m in 0..M {
            fours[m] = by_quarter(fours[m]);
        }
        fours
    }
}

/// The low and the high halves of bytes.
#[inline(always)]
unsafe fn nibbles(both: __m512i) -> (__m512i, __m512i) {
    unsafe {
        let low = _mm512_set1_epi8(15);
        (_mm512_and_si512(both, low), _mm512_and_si512(_mm512_srli_epi16::<4>(both), low))
    }
}

/// The first and the second sixteen numbers of each of four int6 blocks, 0 to 63; of the twelve words that they take, those of the mask are read.
#[inline(always)]
unsafe fn sixes(from: *const u8, words: u32) -> (__m512i, __m512i) {
    unsafe {
        let (front, back) =
            (_mm512_maskz_loadu_epi64(words as u8, from.cast()), _mm512_maskz_loadu_epi64((words >> 8) as u8, from.add(64).cast()));
        let (low, high) = nibbles(_mm512_permutex2var_epi64(front, _mm512_setr_epi64(0, 1, 3, 4, 6, 7, 9, 10), back));
        // Each word of top bits twice: the pairs of bits of eight numbers, and of the eight after them.
        let top = _mm512_permutex2var_epi64(front, _mm512_setr_epi64(2, 2, 5, 5, 8, 8, 11, 11), back);
        let (low_top, high_top) = (
            _mm512_sllv_epi64(top, _mm512_setr_epi64(4, 2, 4, 2, 4, 2, 4, 2)),
            _mm512_srlv_epi64(top, _mm512_setr_epi64(0, 2, 0, 2, 0, 2, 0, 2)),
        );
        // a | (b & c)
        const OR_AND: i32 = 0xf8;
        let mask = _mm512_set1_epi8(0x30);
        (_mm512_ternarylogic_epi64::<OR_AND>(low, low_top, mask), _mm512_ternarylogic_epi64::<OR_AND>(high, high_top, mask))
    }
}

/// One sum over each row.
#[inline(always)]
unsafe fn by_rows(w: &Weights<'_>, x: &ActivationRows<'_>, first: usize, tile: &mut Tile<'_, f32>) {
    for start in (0..w.rows).step_by(ROWS) {
        let rows = Group::new(w, start);
        let mut out = tile.columns_from(start, (w.rows - start).min(ROWS));
        let scales = rows.rows.map(|row| w.scales.get(row, 0));
        let scales = unsafe { _mm512_loadu_ps(scales.as_ptr()) };
        let mut t = 0;
        while t < out.rows {
            let at = first + t;
            t += unsafe {
                match (out.rows - t, out.columns) {
                    (8.., _) => store(whole::<4, 2, 8>(&rows, &x.rows(at), scales), t, &mut out),
                    (6.., _) => store(whole::<4, 2, 6>(&rows, &x.rows(at), scales), t, &mut out),
                    (4.., _) => store(whole::<4, 4, 4>(&rows, &x.rows(at), scales), t, &mut out),
                    (3, _) => store(whole::<4, 4, 3>(&rows, &x.rows(at), scales), t, &mut out),
                    (2, _) => store(whole::<4, 4, 2>(&rows, &x.rows(at), scales), t, &mut out),
                    (_, 5..) => store(whole::<4, 1, 1>(&rows, &x.rows(at), scales), t, &mut out),
                    _ => store(whole::<1, 4, 1>(&rows, &x.rows(at), scales), t, &mut out),
                }
            };
        }
    }
}

/// The first `4 · FOURS` rows of a group with `M` activation rows, `TOGETHER` stored rows at a time: sums stay in registers.
#[inline(always)]
unsafe fn whole<const FOURS: usize, const TOGETHER: usize, const M: usize>(
    rows: &Group<'_, ROWS>,
    x: &[Row<'_>; M],
    w_scales: __m512,
) -> [__m512; M] {
    unsafe {
        let zero = _mm512_setzero_si512();
        let shift = _mm512_set1_epi8(-128);
        let mut sums = [[zero; ROWS]; M];
        for first in (0..4 * FOURS).step_by(TOGETHER) {
            let mut totals = [[zero; TOGETHER]; M];
            for at in (0..rows.w.blocks * 32).step_by(64) {
                let line = (first * rows.w.stride + at * TOGETHER) / 64;
                let mut quants = [zero; M];
                for m in 0..M {
                    quants[m] = _mm512_loadu_si512(x[m].quants.as_ptr().add(at).cast());
                }
                for r in 0..TOGETHER {
                    let from = rows.quants[first + r].add(at);
                    rows.fetch(line + r);
                    let w = _mm512_xor_si512(_mm512_loadu_si512(from.cast()), shift);
                    for m in 0..M {
                        totals[m][r] = _mm512_dpbusd_epi32(totals[m][r], w, quants[m]);
                    }
                }
            }
            for m in 0..M {
                sums[m][first..first + TOGETHER].copy_from_slice(&totals[m]);
            }
        }
        let mut results = [_mm512_setzero_ps(); M];
        for m in 0..M {
            let (fours, _) = sums[m].as_chunks::<4>();
            let [a, b, c, d] = by_quarter([four_rows(fours[0]), four_rows(fours[1]), four_rows(fours[2]), four_rows(fours[3])]);
            let total = _mm512_add_epi32(_mm512_add_epi32(a, b), _mm512_add_epi32(c, d));
            // What bytes that count as unsigned ones have too much.
            let excess = x[m].shifts32[..rows.w.blocks].iter().sum();
            let total = _mm512_cvtepi32_ps(_mm512_add_epi32(total, _mm512_set1_epi32(excess)));
            results[m] = _mm512_mul_ps(total, _mm512_mul_ps(w_scales, _mm512_set1_ps(x[m].scales[0])));
        }
        results
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

/// Writes results to the rows of `out` from `t` on, as many columns as it has; gives the number of rows.
#[inline(always)]
unsafe fn store<const M: usize>(results: [__m512; M], t: usize, out: &mut Tile<'_, f32>) -> usize {
    let lanes = ((1u32 << out.columns) - 1) as __mmask16;
    for (m, results) in results.into_iter().enumerate() {
        unsafe { _mm512_mask_storeu_ps(out.row(t + m).as_mut_ptr(), lanes, results) };
    }
    M
}

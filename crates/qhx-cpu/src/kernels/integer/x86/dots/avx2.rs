//! Eight stored rows at a time, with AVX2.
#![allow(clippy::undocumented_unsafe_blocks, clippy::needless_range_loop)] // SAFETY: see the module above.

use super::*;
use crate::kernels::vector::{MOST_LANES, Vector, x86::Avx2};
use std::arch::x86_64::*;

/// Rows of a group.
pub(in super::super) const ROWS: usize = 8;
/// Blocks whose scales are put side by side at once.
pub(in super::super) const CHUNK: usize = 8;

#[target_feature(enable = "avx2,fma,f16c")]
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
                    (2.., _) => store(blocks::<STORED, OFFSETS, 2, 2>(&rows, &x.rows(at)), t, &mut out),
                    (_, 5..) => store(blocks::<STORED, OFFSETS, 2, 1>(&rows, &x.rows(at)), t, &mut out),
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
) -> [__m256; M] {
    unsafe {
        let w = rows.w;
        // Blocks that a step takes.
        let per_step = if STORED == I8_BLOCK32 { 1 } else { 2 };
        let mut results = [_mm256_setzero_ps(); M];
        let (mut scales, mut offsets) = ([0.0f32; CHUNK * ROWS], [0.0f32; CHUNK * ROWS]);
        for chunk in 0..w.blocks.div_ceil(CHUNK) {
            side_by_side(rows, &w.scales, chunk * CHUNK, &mut scales);
            if let Offsets::Min(mins) = &w.offsets {
                side_by_side(rows, mins, chunk * CHUNK, &mut offsets);
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
                    let w_scales = _mm256_loadu_ps(scales.as_ptr().add(at));
                    for m in 0..M {
                        let total = match STORED {
                            I8_BLOCK32 => _mm256_add_epi32(totals[m][0], totals[m][1]),
                            // 32 too much of each number; shifts are for 128.
                            I6_BLOCK32 => _mm256_add_epi32(totals[m][i], _mm256_set1_epi32(*x[m].shifts32.as_ptr().add(b) / 4)),
                            _ => totals[m][i],
                        };
                        let x_scale = _mm256_broadcast_ss(&*x[m].scales.as_ptr().add(if STORED == I8_BLOCK16 { b / 2 } else { b }));
                        results[m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(total), _mm256_mul_ps(w_scales, x_scale), results[m]);
                    }
                    if OFFSETS {
                        let offsets = _mm256_loadu_ps(offsets.as_ptr().add(at));
                        for m in 0..M {
                            let x_sums = if STORED == I8_BLOCK16 { x[m].sums16 } else { x[m].sums32 };
                            results[m] = _mm256_fmadd_ps(offsets, _mm256_broadcast_ss(&*x_sums.as_ptr().add(b)), results[m]);
                        }
                    }
                }
            }
        }
        results
    }
}

/// The scales of eight blocks from `b` on: those of one block for all rows, then those of the next.
#[inline(always)]
pub(in super::super) unsafe fn side_by_side(rows: &Group<'_, ROWS>, scales: &Scales<'_>, b: usize, out: &mut [f32; CHUNK * ROWS]) {
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

/// For each activation row, the sums of the stored rows over each of two blocks from `first` on, or over each half of a block of int8. An int6 counts as unsigned.
#[inline(always)]
unsafe fn step<const STORED: usize, const OFFSETS: bool, const FOURS: usize, const M: usize>(
    rows: &Group<'_, ROWS>,
    x: &[Row<'_>; M],
    first: usize,
) -> [[__m256i; 2]; M] {
    unsafe {
        let at = first * block_bytes(STORED);
        let zero = _mm256_setzero_si256();
        let (mut x_low, mut x_high) = ([zero; M], [zero; M]);
        for m in 0..M {
            let quants = x[m].quants.as_ptr().add(first * block_numbers(STORED)).cast::<__m256i>();
            (x_low[m], x_high[m]) = match STORED {
                // Two blocks: their low and high halves meet the first and second sixteens of the activations.
                I4_BLOCK32 | I6_BLOCK32 => {
                    let (one, two) = (_mm256_loadu_si256(quants), _mm256_loadu_si256(quants.add(1)));
                    (_mm256_permute2x128_si256::<0x20>(one, two), _mm256_permute2x128_si256::<0x31>(one, two))
                }
                _ => (_mm256_loadu_si256(quants), zero),
            };
        }
        let mut excess = [zero; M];
        if STORED == I4_BLOCK32 && !OFFSETS {
            for m in 0..M {
                let two = _mm256_castsi128_si256(_mm_loadl_epi64(x[m].fours32.as_ptr().add(first).cast()));
                excess[m] = _mm256_permutevar8x32_epi32(two, _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
            }
        }
        let ones = _mm256_set1_epi16(1);
        // The last int6 block may be alone, and its row end before another would: it is read twice.
        let next = if first + 1 < rows.w.blocks { I6_BYTES } else { 0 };
        // Of int4 and int8 every other step begins a line, of int6 (48 bytes) three steps out of four end one.
        let (line, lines) = match STORED {
            I6_BLOCK32 => (at * ROWS / 64, ROWS * 3 / 4),
            _ => (at * ROWS / 64, if at % 64 == 0 { ROWS } else { 0 }),
        };
        let mut fours = [[zero; 2]; M];
        for f in 0..FOURS {
            let mut totals = [[zero; 4]; M];
            for r in 0..4 {
                let from = rows.quants[4 * f + r].add(at);
                if 4 * f + r < lines {
                    rows.fetch(line + 4 * f + r);
                }
                if STORED == I4_BLOCK32 || STORED == I6_BLOCK32 {
                    let (w_low, w_high) = match STORED {
                        I6_BLOCK32 => sixes(from, next),
                        _ => nibbles(_mm256_loadu_si256(from.cast())),
                    };
                    for m in 0..M {
                        let first = _mm256_maddubs_epi16(w_low, x_low[m]);
                        totals[m][r] = _mm256_add_epi16(first, _mm256_maddubs_epi16(w_high, x_high[m]));
                    }
                } else {
                    let quants = _mm256_loadu_si256(from.cast());
                    for m in 0..M {
                        totals[m][r] = bytes(quants, x_low[m], ones);
                    }
                }
            }
            for m in 0..M {
                let mut totals = totals[m];
                if STORED == I6_BLOCK32 {
                    // Four products of 63 and 127 fit 16 bits.
                    for r in 0..4 {
                        totals[r] = _mm256_madd_epi16(totals[r], ones);
                    }
                }
                fours[m][f] = match STORED {
                    // Sixteen products of 15 and 127 fit 16 bits. Without a minimum, 8 too much is taken off as in products of many rows.
                    I4_BLOCK32 => {
                        let pairs = _mm256_hadd_epi16(_mm256_hadd_epi16(totals[0], totals[1]), _mm256_hadd_epi16(totals[2], totals[3]));
                        let pairs = if OFFSETS { pairs } else { _mm256_add_epi16(pairs, excess[m]) };
                        _mm256_madd_epi16(pairs, ones)
                    }
                    _ => four_rows(totals),
                };
            }
        }
        // Not `map`: what a closure calls is not compiled for these instructions.
        for m in 0..M {
            let [a, b] = fours[m];
            fours[m] = [_mm256_permute2x128_si256::<0x20>(a, b), _mm256_permute2x128_si256::<0x31>(a, b)];
        }
        fours
    }
}

/// The low and the high halves of bytes.
#[inline(always)]
unsafe fn nibbles(both: __m256i) -> (__m256i, __m256i) {
    unsafe {
        let low = _mm256_set1_epi8(15);
        (_mm256_and_si256(both, low), _mm256_and_si256(_mm256_srli_epi16::<4>(both), low))
    }
}

/// The first and the second sixteen numbers, 0 to 63, of an int6 block and of the one `next` bytes later.
#[inline(always)]
unsafe fn sixes(from: *const u8, next: usize) -> (__m256i, __m256i) {
    unsafe {
        let pair = |first, second| _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(first), second);
        let (low, high) = nibbles(pair(_mm_loadu_si128(from.cast()), _mm_loadu_si128(from.add(next).cast())));
        // Top bits twice: the pairs of bits of eight numbers, and of the eight after them.
        let word = |at: usize| _mm_set1_epi64x(from.add(at + 16).cast::<i64>().read_unaligned());
        let top = pair(word(0), word(next));
        let (low_top, high_top) =
            (_mm256_sllv_epi64(top, _mm256_setr_epi64x(4, 2, 4, 2)), _mm256_srlv_epi64(top, _mm256_setr_epi64x(0, 2, 0, 2)));
        let mask = _mm256_set1_epi8(0x30);
        (_mm256_or_si256(low, _mm256_and_si256(low_top, mask)), _mm256_or_si256(high, _mm256_and_si256(high_top, mask)))
    }
}

/// Sums of four products of signed bytes.
#[inline(always)]
unsafe fn bytes(weights: __m256i, x: __m256i, ones: __m256i) -> __m256i {
    // |w| as unsigned bytes (128 at most) times x with the sign of w: two products of 128 and 127 fit 16 bits.
    unsafe { _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights)), ones) }
}

/// One sum over each row.
#[inline(always)]
unsafe fn by_rows(w: &Weights<'_>, x: &ActivationRows<'_>, first: usize, tile: &mut Tile<'_, f32>) {
    for start in (0..w.rows).step_by(ROWS) {
        let rows = Group::new(w, start);
        let mut out = tile.columns_from(start, (w.rows - start).min(ROWS));
        let scales = rows.rows.map(|row| w.scales.get(row, 0));
        let scales = unsafe { _mm256_loadu_ps(scales.as_ptr()) };
        let mut t = 0;
        while t < out.rows {
            let at = first + t;
            t += unsafe {
                match (out.rows - t, out.columns) {
                    (4.., _) => store(whole::<2, 2, 4>(&rows, &x.rows(at), scales), t, &mut out),
                    (3, _) => store(whole::<2, 2, 3>(&rows, &x.rows(at), scales), t, &mut out),
                    (2, _) => store(whole::<2, 4, 2>(&rows, &x.rows(at), scales), t, &mut out),
                    (_, 5..) => store(whole::<2, 1, 1>(&rows, &x.rows(at), scales), t, &mut out),
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
    w_scales: __m256,
) -> [__m256; M] {
    unsafe {
        let (zero, ones) = (_mm256_setzero_si256(), _mm256_set1_epi16(1));
        let mut sums = [[zero; ROWS]; M];
        for first in (0..4 * FOURS).step_by(TOGETHER) {
            let mut totals = [[zero; TOGETHER]; M];
            for at in (0..rows.w.blocks * 32).step_by(32) {
                let line = (first * rows.w.stride + at * TOGETHER) / 64;
                let mut quants = [zero; M];
                for m in 0..M {
                    quants[m] = _mm256_loadu_si256(x[m].quants.as_ptr().add(at).cast());
                }
                for r in 0..TOGETHER {
                    let from = rows.quants[first + r].add(at);
                    if at % 64 == 0 {
                        rows.fetch(line + r);
                    }
                    let w = _mm256_loadu_si256(from.cast());
                    for m in 0..M {
                        totals[m][r] = _mm256_add_epi32(totals[m][r], bytes(w, quants[m], ones));
                    }
                }
            }
            for m in 0..M {
                sums[m][first..first + TOGETHER].copy_from_slice(&totals[m]);
            }
        }
        let mut results = [_mm256_setzero_ps(); M];
        for m in 0..M {
            let (fours, _) = sums[m].as_chunks::<4>();
            let (a, b) = (four_rows(fours[0]), four_rows(fours[1]));
            let total = _mm256_add_epi32(_mm256_permute2x128_si256::<0x20>(a, b), _mm256_permute2x128_si256::<0x31>(a, b));
            results[m] = _mm256_mul_ps(_mm256_cvtepi32_ps(total), _mm256_mul_ps(w_scales, _mm256_set1_ps(x[m].scales[0])));
        }
        results
    }
}

/// The sums of four rows over each half of a vector, side by side in that half.
#[inline(always)]
unsafe fn four_rows(totals: [__m256i; 4]) -> __m256i {
    unsafe { _mm256_hadd_epi32(_mm256_hadd_epi32(totals[0], totals[1]), _mm256_hadd_epi32(totals[2], totals[3])) }
}

/// Writes results to the rows of `out` from `t` on, as many columns as it has; gives the number of rows.
#[inline(always)]
unsafe fn store<const M: usize>(results: [__m256; M], t: usize, out: &mut Tile<'_, f32>) -> usize {
    for (m, results) in results.into_iter().enumerate() {
        let results = unsafe { std::mem::transmute::<__m256, [f32; ROWS]>(results) };
        let out = out.row(t + m);
        out.copy_from_slice(&results[..out.len()]);
    }
    M
}

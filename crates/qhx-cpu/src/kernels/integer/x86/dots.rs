//! One activation row against stored rows, four of them at a time: what decoding is made of.

use super::{super::activation::Row, needs};
use crate::kernels::{
    InstructionSet, Instructions,
    integer::{Offsets, Scales, Weights},
    quants::Stored,
};
use std::arch::x86_64::*;

/// `out[r] = w_r · x`; lengths are checked by the caller.
pub(in super::super) fn products_avx2(instructions: Instructions, w: &Weights<'_>, x: &Row<'_>, out: &mut [f32]) {
    needs(instructions, InstructionSet::Avx2);
    // SAFETY: the CPU has AVX2, FMA and F16C; `products` checked lengths and padding.
    unsafe { avx2::all(w, x, out) }
}

/// `out[r] = w_r · x`; lengths are checked by the caller.
pub(in super::super) fn products_vnni(instructions: Instructions, w: &Weights<'_>, x: &Row<'_>, out: &mut [f32]) {
    needs(instructions, InstructionSet::Avx512Vnni);
    // SAFETY: the CPU has AVX-512 with VNNI; `products` checked lengths and padding.
    unsafe { vnni::all(w, x, out) }
}

// SAFETY of all blocks below: the callers above. A row of quants fills whole cache lines, scales come in sixteens, activations are padded to 128 quants and
// 16 blocks, so a vector that starts within a row ends within its padding. What padding holds is kept out of sums: quants meet zeros, and scales are masked.

/// Bytes of quants that are asked for ahead of their use, at least: quants, scales and minima lie apart, and a row ends where a page does, which is
/// more than a CPU foresees by itself.
const AHEAD: usize = 2048;

/// Asks for the scales and minima of the rows `ahead` of those from `first` on, and says how many bytes ahead their quants lie: kernels ask for
/// these line by line as they go, so that memory is busy all the time. Beyond the last row nothing is asked for: others read what lies there.
#[inline(always)]
fn fetch_ahead(w: &Weights<'_>, first: usize, count: usize) -> usize {
    let ahead = AHEAD.div_ceil(w.stride).next_multiple_of(4);
    let row = first + ahead;
    if row + count > w.rows {
        return 0;
    }
    let scales = |scales: &Scales<'_>| match *scales {
        Scales::Row(_) => {}
        Scales::F16(numbers, stride) => fetch_lines(numbers.as_ptr().cast(), row * stride * 2, count * stride * 2),
        Scales::F32(numbers, stride) => fetch_lines(numbers.as_ptr().cast(), row * stride * 4, count * stride * 4),
    };
    scales(&w.scales);
    if let Offsets::Min(mins) = &w.offsets {
        scales(mins);
    }
    ahead * w.stride
}

#[inline(always)]
fn fetch_lines(start: *const u8, at: usize, bytes: usize) {
    (0..bytes).step_by(64).for_each(|line| fetch(start.wrapping_add(at + line)));
}

#[inline(always)]
fn fetch(address: *const u8) {
    // SAFETY: a prefetch reads nothing that the program could see and never faults, whatever the address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
}

#[allow(clippy::undocumented_unsafe_blocks, clippy::needless_range_loop)]
mod avx2 {
    use super::*;

    /// Blocks of 32 that are done at once.
    const CHUNK: usize = 8;

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn all(w: &Weights<'_>, x: &Row<'_>, out: &mut [f32]) {
        unsafe {
            match w.stored {
                Stored::I4Block32 => by_rows::<0>(w, x, out),
                Stored::I8Block32 => by_rows::<1>(w, x, out),
                Stored::I8Block16 => by_rows::<2>(w, x, out),
            }
        }
    }

    #[inline(always)]
    unsafe fn by_rows<const STORED: usize>(w: &Weights<'_>, x: &Row<'_>, out: &mut [f32]) {
        let mut row = 0;
        unsafe {
            while row + 4 <= w.rows {
                rows::<STORED, 4>(w, x, row, out);
                row += 4;
            }
            while row < w.rows {
                rows::<STORED, 1>(w, x, row, out);
                row += 1;
            }
        }
    }

    #[inline(always)]
    unsafe fn rows<const STORED: usize, const R: usize>(w: &Weights<'_>, x: &Row<'_>, first: usize, out: &mut [f32]) {
        unsafe {
            let mut sums = [_mm256_setzero_ps(); R];
            let data = w.data.as_ptr().add(first * w.stride);
            let ahead = fetch_ahead(w, first, R);
            let blocks = if STORED == 2 { w.blocks.div_ceil(2) } else { w.blocks };
            let mut b = 0;
            while b < blocks {
                let n = (blocks - b).min(CHUNK);
                match STORED {
                    0 => nibbles(w, x, first, (data.add(b * 16), ahead), b, n, &mut sums),
                    1 => bytes::<false, R>(w, x, first, (data.add(b * 32), ahead), b, n, &mut sums),
                    _ => bytes::<true, R>(w, x, first, (data.add(b * 32), ahead), b, n, &mut sums),
                }
                b += CHUNK;
            }
            for r in 0..R {
                *out.get_unchecked_mut(first + r) = sum(sums[r]);
            }
        }
    }

    /// int4: two blocks in 32 bytes, their low and high halves against the first and second sixteens of the activations.
    #[inline(always)]
    unsafe fn nibbles<const R: usize>(
        w: &Weights<'_>,
        x: &Row<'_>,
        first: usize,
        (data, ahead): (*const u8, usize),
        b: usize,
        n: usize,
        sums: &mut [__m256; R],
    ) {
        unsafe {
            let mut factors = [_mm256_setzero_ps(); R];
            let x_scales = _mm256_loadu_ps(x.scales.as_ptr().add(b));
            for r in 0..R {
                factors[r] = prepare(w, first + r, b, n, x_scales, x.sums32, &mut sums[r]);
            }
            let (low, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi16(1));
            let mut spread = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
            for pair in 0..n.div_ceil(2) {
                let quants = x.quants.as_ptr().add((b + 2 * pair) * 32).cast::<__m256i>();
                let (one, two) = (_mm256_loadu_si256(quants), _mm256_loadu_si256(quants.add(1)));
                let (x_low, x_high) = (_mm256_permute2x128_si256::<0x20>(one, two), _mm256_permute2x128_si256::<0x31>(one, two));
                for r in 0..R {
                    let at = data.add(r * w.stride + pair * 32);
                    if pair % 2 == 0 {
                        fetch(at.wrapping_add(ahead));
                    }
                    let both = _mm256_loadu_si256(at.cast());
                    let w_low = _mm256_and_si256(both, low);
                    let w_high = _mm256_and_si256(_mm256_srli_epi16::<4>(both), low);
                    // Four products of 15 and 127 fit 16 bits.
                    let halves = _mm256_add_epi16(_mm256_maddubs_epi16(w_low, x_low), _mm256_maddubs_epi16(w_high, x_high));
                    let total = _mm256_cvtepi32_ps(_mm256_madd_epi16(halves, ones));
                    sums[r] = _mm256_fmadd_ps(total, _mm256_permutevar8x32_ps(factors[r], spread), sums[r]);
                }
                spread = _mm256_add_epi32(spread, _mm256_set1_epi32(2));
            }
        }
    }

    /// int8: one block of 32 or two of 16 in 32 bytes.
    #[inline(always)]
    unsafe fn bytes<const SIXTEEN: bool, const R: usize>(
        w: &Weights<'_>,
        x: &Row<'_>,
        first: usize,
        (data, ahead): (*const u8, usize),
        b: usize,
        n: usize,
        sums: &mut [__m256; R],
    ) {
        unsafe {
            let mut factors = [_mm256_setzero_ps(); R];
            let mut more = [_mm256_setzero_ps(); R];
            for r in 0..R {
                if SIXTEEN {
                    // Sixteen scales, each activation scale twice.
                    let blocks = w.blocks - 2 * b;
                    factors[r] = prepare(w, first + r, 2 * b, blocks.min(8), twice(x, b), x.sums16, &mut sums[r]);
                    if blocks > 8 {
                        more[r] = prepare(w, first + r, 2 * b + 8, (blocks - 8).min(8), twice(x, b + 4), x.sums16, &mut sums[r]);
                    }
                } else {
                    factors[r] = prepare(w, first + r, b, n, _mm256_loadu_ps(x.scales.as_ptr().add(b)), x.sums32, &mut sums[r]);
                }
            }
            let ones = _mm256_set1_epi16(1);
            for block in 0..n {
                let quants = _mm256_loadu_si256(x.quants.as_ptr().add((b + block) * 32).cast());
                let spread = match SIXTEEN {
                    true => _mm256_add_epi32(_mm256_set1_epi32((2 * block % 8) as i32), _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1)),
                    false => _mm256_set1_epi32(block as i32),
                };
                for r in 0..R {
                    let at = data.add(r * w.stride + block * 32);
                    if block % 2 == 0 {
                        fetch(at.wrapping_add(ahead));
                    }
                    let weights = _mm256_loadu_si256(at.cast());
                    // |w| as unsigned bytes (128 at most) times x with the sign of w: two products of 128 and 127 fit 16 bits.
                    let halves = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(quants, weights));
                    let total = _mm256_cvtepi32_ps(_mm256_madd_epi16(halves, ones));
                    let factors = if SIXTEEN && block >= 4 { more[r] } else { factors[r] };
                    sums[r] = _mm256_fmadd_ps(total, _mm256_permutevar8x32_ps(factors, spread), sums[r]);
                }
            }
        }
    }

    /// Four activation scales from block `b` on, each twice.
    #[inline(always)]
    unsafe fn twice(x: &Row<'_>, b: usize) -> __m256 {
        unsafe {
            let four = _mm256_castps128_ps256(_mm_loadu_ps(x.scales.as_ptr().add(b)));
            _mm256_permutevar8x32_ps(four, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3))
        }
    }

    /// The factors of eight blocks from `b` on (those beyond `n` are 0); what the blocks add besides goes into `sum`.
    #[inline(always)]
    unsafe fn prepare(w: &Weights<'_>, row: usize, b: usize, n: usize, x_scales: __m256, x_sums: &[f32], sum: &mut __m256) -> __m256 {
        unsafe {
            let mut scales = load(&w.scales, row, b);
            let lanes = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)));
            if n < CHUNK {
                scales = _mm256_and_ps(scales, lanes);
            }
            match &w.offsets {
                Offsets::None => {}
                Offsets::MinusEight => {
                    let sums = _mm256_mul_ps(_mm256_loadu_ps(x_sums.as_ptr().add(b)), _mm256_set1_ps(-8.0));
                    *sum = _mm256_fmadd_ps(scales, sums, *sum);
                }
                Offsets::Min(mins) => {
                    let mut mins = load(mins, row, b);
                    if n < CHUNK {
                        mins = _mm256_and_ps(mins, lanes);
                    }
                    *sum = _mm256_fmadd_ps(mins, _mm256_loadu_ps(x_sums.as_ptr().add(b)), *sum);
                }
            }
            _mm256_mul_ps(scales, x_scales)
        }
    }

    #[inline(always)]
    unsafe fn load(scales: &Scales<'_>, row: usize, b: usize) -> __m256 {
        unsafe {
            match *scales {
                Scales::Row(scales) => _mm256_set1_ps(*scales.as_ptr().add(row)),
                Scales::F16(scales, stride) => _mm256_cvtph_ps(_mm_loadu_si128(scales.as_ptr().add(row * stride + b).cast())),
                Scales::F32(scales, stride) => _mm256_loadu_ps(scales.as_ptr().add(row * stride + b)),
            }
        }
    }

    #[inline(always)]
    unsafe fn sum(lanes: __m256) -> f32 {
        unsafe {
            let half = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps::<1>(lanes));
            let quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
            _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)))
        }
    }
}

#[allow(clippy::undocumented_unsafe_blocks, clippy::needless_range_loop)]
mod vnni {
    use super::*;

    /// Blocks of 32 that are done at once.
    const CHUNK: usize = 16;

    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    pub(super) unsafe fn all(w: &Weights<'_>, x: &Row<'_>, out: &mut [f32]) {
        unsafe {
            match w.stored {
                Stored::I4Block32 => by_rows::<0>(w, x, out),
                Stored::I8Block32 => by_rows::<1>(w, x, out),
                Stored::I8Block16 => by_rows::<2>(w, x, out),
            }
        }
    }

    #[inline(always)]
    unsafe fn by_rows<const STORED: usize>(w: &Weights<'_>, x: &Row<'_>, out: &mut [f32]) {
        let mut row = 0;
        unsafe {
            while row + 4 <= w.rows {
                rows::<STORED, 4>(w, x, row, out);
                row += 4;
            }
            while row < w.rows {
                rows::<STORED, 1>(w, x, row, out);
                row += 1;
            }
        }
    }

    #[inline(always)]
    unsafe fn rows<const STORED: usize, const R: usize>(w: &Weights<'_>, x: &Row<'_>, first: usize, out: &mut [f32]) {
        unsafe {
            let mut sums = [_mm512_setzero_ps(); R];
            let data = w.data.as_ptr().add(first * w.stride);
            let ahead = fetch_ahead(w, first, R);
            let blocks = if STORED == 2 { w.blocks.div_ceil(2) } else { w.blocks };
            let mut b = 0;
            while b < blocks {
                let n = (blocks - b).min(CHUNK);
                match STORED {
                    0 => nibbles(w, x, first, (data.add(b * 16), ahead), b, n, &mut sums),
                    1 => bytes(w, x, first, (data.add(b * 32), ahead), b, n, &mut sums),
                    _ => small_bytes(w, x, first, (data.add(b * 32), ahead), b, n, &mut sums),
                }
                b += CHUNK;
            }
            for r in 0..R {
                *out.get_unchecked_mut(first + r) = _mm512_reduce_add_ps(sums[r]);
            }
        }
    }

    /// int4: four blocks in 64 bytes, their low and high halves against the first and second sixteens of the activations.
    #[inline(always)]
    unsafe fn nibbles<const R: usize>(
        w: &Weights<'_>,
        x: &Row<'_>,
        first: usize,
        (data, ahead): (*const u8, usize),
        b: usize,
        n: usize,
        sums: &mut [__m512; R],
    ) {
        unsafe {
            let mut factors = [_mm512_setzero_ps(); R];
            let x_scales = _mm512_loadu_ps(x.scales.as_ptr().add(b));
            for r in 0..R {
                factors[r] = prepare(w, first + r, b, n, x_scales, x.sums32, &mut sums[r]);
            }
            let low = _mm512_set1_epi8(15);
            let mut spread = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
            for four in 0..n.div_ceil(4) {
                let quants = x.quants.as_ptr().add((b + 4 * four) * 32);
                let (one, two) = (_mm512_loadu_si512(quants.cast()), _mm512_loadu_si512(quants.add(64).cast()));
                let x_low = _mm512_shuffle_i64x2::<0b10_00_10_00>(one, two);
                let x_high = _mm512_shuffle_i64x2::<0b11_01_11_01>(one, two);
                for r in 0..R {
                    let at = data.add(r * w.stride + four * 64);
                    fetch(at.wrapping_add(ahead));
                    let both = _mm512_loadu_si512(at.cast());
                    let w_low = _mm512_and_si512(both, low);
                    let w_high = _mm512_and_si512(_mm512_srli_epi16::<4>(both), low);
                    let total = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), w_low, x_low), w_high, x_high);
                    sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), _mm512_permutexvar_ps(spread, factors[r]), sums[r]);
                }
                spread = _mm512_add_epi32(spread, _mm512_set1_epi32(4));
            }
        }
    }

    /// int8, two blocks of 32 in 64 bytes.
    #[inline(always)]
    unsafe fn bytes<const R: usize>(
        w: &Weights<'_>,
        x: &Row<'_>,
        first: usize,
        (data, ahead): (*const u8, usize),
        b: usize,
        n: usize,
        sums: &mut [__m512; R],
    ) {
        unsafe {
            let mut factors = [_mm512_setzero_ps(); R];
            let x_scales = _mm512_loadu_ps(x.scales.as_ptr().add(b));
            for r in 0..R {
                factors[r] = prepare(w, first + r, b, n, x_scales, x.sums32, &mut sums[r]);
            }
            let mut spread = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
            for two in 0..n.div_ceil(2) {
                let quants = _mm512_loadu_si512(x.quants.as_ptr().add((b + 2 * two) * 32).cast());
                byte_rows(w.stride, (data.add(two * 64), ahead), quants, spread, &factors, sums);
                spread = _mm512_add_epi32(spread, _mm512_set1_epi32(2));
            }
        }
    }

    /// int8, four blocks of 16 in 64 bytes.
    #[inline(always)]
    unsafe fn small_bytes<const R: usize>(
        w: &Weights<'_>,
        x: &Row<'_>,
        first: usize,
        (data, ahead): (*const u8, usize),
        b: usize,
        n: usize,
        sums: &mut [__m512; R],
    ) {
        unsafe {
            let x_scales = _mm512_loadu_ps(x.scales.as_ptr().add(b));
            let twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
            for half in 0..n.div_ceil(8) {
                let at = 2 * b + 16 * half;
                let x_scales = _mm512_permutexvar_ps(_mm512_add_epi32(twice, _mm512_set1_epi32(8 * half as i32)), x_scales);
                let blocks = (w.blocks - at).min(16);
                let mut factors = [_mm512_setzero_ps(); R];
                for r in 0..R {
                    factors[r] = prepare(w, first + r, at, blocks, x_scales, x.sums16, &mut sums[r]);
                }
                let mut spread = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
                for four in 0..blocks.div_ceil(4) {
                    let quants = _mm512_loadu_si512(x.quants.as_ptr().add((b + 8 * half + 2 * four) * 32).cast());
                    byte_rows(w.stride, (data.add(half * 256 + four * 64), ahead), quants, spread, &factors, sums);
                    spread = _mm512_add_epi32(spread, _mm512_set1_epi32(4));
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn byte_rows<const R: usize>(
        stride: usize,
        (data, ahead): (*const u8, usize),
        quants: __m512i,
        spread: __m512i,
        factors: &[__m512; R],
        sums: &mut [__m512; R],
    ) {
        unsafe {
            // The instruction takes unsigned weights: w + 128, and the sum starts at −128 · Σx.
            let shift = _mm512_set1_epi8(-128);
            let start = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_dpbusd_epi32(_mm512_setzero_si512(), shift, quants));
            for r in 0..R {
                let at = data.add(r * stride);
                fetch(at.wrapping_add(ahead));
                let weights = _mm512_xor_si512(_mm512_loadu_si512(at.cast()), shift);
                let total = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(start, weights, quants));
                sums[r] = _mm512_fmadd_ps(total, _mm512_permutexvar_ps(spread, factors[r]), sums[r]);
            }
        }
    }

    /// The factors of sixteen blocks from `b` on (those beyond `n` are 0); what the blocks add besides goes into `sum`.
    #[inline(always)]
    unsafe fn prepare(w: &Weights<'_>, row: usize, b: usize, n: usize, x_scales: __m512, x_sums: &[f32], sum: &mut __m512) -> __m512 {
        unsafe {
            let lanes = ((1u32 << n.min(16)) - 1) as __mmask16;
            let scales = _mm512_maskz_mov_ps(lanes, load(&w.scales, row, b));
            match &w.offsets {
                Offsets::None => {}
                Offsets::MinusEight => {
                    let sums = _mm512_mul_ps(_mm512_loadu_ps(x_sums.as_ptr().add(b)), _mm512_set1_ps(-8.0));
                    *sum = _mm512_fmadd_ps(scales, sums, *sum);
                }
                Offsets::Min(mins) => {
                    let mins = _mm512_maskz_mov_ps(lanes, load(mins, row, b));
                    *sum = _mm512_fmadd_ps(mins, _mm512_loadu_ps(x_sums.as_ptr().add(b)), *sum);
                }
            }
            _mm512_mul_ps(scales, x_scales)
        }
    }

    #[inline(always)]
    unsafe fn load(scales: &Scales<'_>, row: usize, b: usize) -> __m512 {
        unsafe {
            match *scales {
                Scales::Row(scales) => _mm512_set1_ps(*scales.as_ptr().add(row)),
                Scales::F16(scales, stride) => _mm512_cvtph_ps(_mm256_loadu_si256(scales.as_ptr().add(row * stride + b).cast())),
                Scales::F32(scales, stride) => _mm512_loadu_ps(scales.as_ptr().add(row * stride + b)),
            }
        }
    }
}

//! Many activation rows against panels of eight stored rows, with AVX2.
//!
//! int4 and int6 panels hold four quants of each row next to each other as unsigned bytes, whose products with activation bytes can be summed in 16 bits: those of
//! int4 over a block, those of int6 over eight. int8 panels hold two quants of each row as 16-bit numbers: their products are exact without care for signs.
//!
//! A tile of activation rows and panels has its sums in registers. It is as large as they allow, since loading what is multiplied takes as long as multiplying it.

use super::{
    dots::{
        Group,
        avx2::{CHUNK, ROWS, side_by_side},
    },
    needs,
};
use crate::{
    kernels::{
        InstructionSet, Instructions,
        integer::{ActivationRows, Offsets, Scales, Weights, whole_rows},
        quants::{I6_BYTES, Stored},
        vector::{MOST_LANES, Vector, x86::Avx2},
    },
    work::Tile,
};
use std::arch::x86_64::*;

/// See [`crate::kernels::integer::matrix_products`], which checked the lengths.
pub(in super::super) fn matrix_products(
    instructions: Instructions,
    w: &Weights<'_>,
    x: &ActivationRows<'_>,
    first: usize,
    tile: &mut Tile<'_, f32>,
    scratch: &mut [f32],
) {
    needs(instructions, InstructionSet::Avx2);
    // 32-bit words of one row in a panel: four quants each (int4, int6) or two (int8).
    let bytes = matches!(w.stored, Stored::I4Block32 | Stored::I6Block32);
    let words = w.blocks * w.stored.block() / if bytes { 4 } else { 2 };
    let size = words * ROWS + 2 * w.blocks * ROWS;
    let panels = w.rows.div_ceil(ROWS);
    for (panel, room) in scratch[..panels * size].chunks_mut(size).enumerate() {
        let (quants, rest) = room.split_at_mut(words * ROWS);
        let (scales, offsets) = rest.split_at_mut(w.blocks * ROWS);
        // SAFETY: the CPU has AVX2, FMA and F16C; the caller checked the weights.
        unsafe { pack(w, panel * ROWS, quants, scales, offsets) };
    }
    let sample = x.row(first);
    let (out, out_stride) = tile.as_mut_ptr();
    let product = Product {
        panels: scratch.as_ptr(),
        size,
        scales: words * ROWS,
        offsets: words * ROWS + w.blocks * ROWS,
        rows: w.rows,
        // Pointers into the first activation row; others are a stride apart, and the caller checked the last one.
        x: if bytes { sample.quants.as_ptr().cast() } else { sample.wide.as_ptr().cast() },
        x_scales: sample.scales.as_ptr(),
        x_shifts: if w.stored == Stored::I4Block32 { sample.fours32.as_ptr() } else { sample.shifts32.as_ptr() },
        x_sums: if w.stored == Stored::I8Block16 { sample.sums16.as_ptr() } else { sample.sums32.as_ptr() },
        x_stride: x.stride,
        blocks: w.blocks,
        out,
        out_stride,
        count: tile.rows,
    };
    // SAFETY: the CPU has AVX2 and FMA; the panels are packed for all their blocks, activation rows and tile were checked.
    unsafe { product.run(w.stored, w.has_minima(), whole_rows(w, x.by_row)) }
}

/// Puts eight rows side by side; those beyond the last are the last one again: their results are not written.
#[target_feature(enable = "avx2,fma,f16c")]
#[allow(clippy::undocumented_unsafe_blocks)] // SAFETY: the caller checked the weights; rows of quants and of scales are padded to whole vectors.
unsafe fn pack(w: &Weights<'_>, first: usize, quants: &mut [f32], scales: &mut [f32], offsets: &mut [f32]) {
    unsafe {
        let rows = Group::<ROWS>::new(w, first);
        let low = _mm256_set1_epi32(0x0f0f_0f0f);
        match w.stored {
            // 32 bytes of a row are two blocks: their words, low halves before high ones.
            Stored::I4Block32 => {
                for (step, out) in quants.chunks_mut(16 * ROWS).enumerate() {
                    let words = words_of(&rows, |row| _mm256_loadu_si256(row.add(step * 32).cast()));
                    for (word, &words) in words.iter().enumerate() {
                        let place = word / 4 * 8 + word % 4;
                        // The last block may be alone.
                        if place * ROWS < out.len() {
                            store(&mut out[place * ROWS..], _mm256_and_si256(words, low));
                            store(&mut out[(place + 4) * ROWS..], _mm256_and_si256(_mm256_srli_epi32::<4>(words), low));
                        }
                    }
                }
            }
            // A block of a row is eight words.
            Stored::I6Block32 => {
                for (b, out) in quants.chunks_exact_mut(8 * ROWS).enumerate() {
                    store_words(out, words_of(&rows, |row| sixes(row.add(b * I6_BYTES))));
                }
            }
            // Sixteen quants of a row become eight words of two numbers.
            Stored::I8Block16 | Stored::I8Block32 => {
                for (step, out) in quants.chunks_exact_mut(8 * ROWS).enumerate() {
                    store_words(out, words_of(&rows, |row| _mm256_cvtepi8_epi16(_mm_loadu_si128(row.add(step * 16).cast()))));
                }
            }
        }
        put_scales(&rows, &w.scales, scales);
        if let Offsets::Min(mins) = &w.offsets {
            put_scales(&rows, mins, offsets);
        }
    }
}

/// Words of eight rows, turned: each word of all rows.
#[inline(always)]
#[allow(clippy::undocumented_unsafe_blocks, clippy::needless_range_loop)] // SAFETY: as above.
unsafe fn words_of(rows: &Group<'_, ROWS>, get: impl Fn(*const u8) -> __m256i) -> [__m256i; ROWS] {
    unsafe {
        let mut square = [Avx2::splat(0.0); MOST_LANES];
        for r in 0..ROWS {
            square[r] = Avx2(_mm256_castsi256_ps(get(rows.quants[r])));
        }
        Avx2::transpose(&mut square);
        let mut words = [_mm256_setzero_si256(); ROWS];
        for r in 0..ROWS {
            words[r] = _mm256_castps_si256(square[r].0);
        }
        words
    }
}

/// The numbers of an int6 block as bytes from 0 to 63.
#[inline(always)]
#[allow(clippy::undocumented_unsafe_blocks)] // SAFETY: as above.
unsafe fn sixes(block: *const u8) -> __m256i {
    unsafe {
        let low = _mm256_broadcastsi128_si256(_mm_loadu_si128(block.cast()));
        let low = _mm256_srlv_epi64(low, _mm256_setr_epi64x(0, 0, 4, 4));
        // Eight pairs of bits stand at the ends of as many bytes, the next eight above them and so on.
        let top = _mm256_set1_epi64x(block.add(16).cast::<i64>().read_unaligned());
        let top = _mm256_slli_epi64::<4>(_mm256_srlv_epi64(top, _mm256_setr_epi64x(0, 2, 4, 6)));
        _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi8(15)), _mm256_and_si256(top, _mm256_set1_epi8(0x30)))
    }
}

/// Eight words of eight rows.
#[inline(always)]
#[allow(clippy::undocumented_unsafe_blocks)] // SAFETY: as above.
unsafe fn store_words(out: &mut [f32], words: [__m256i; 8]) {
    for (out, words) in out.chunks_exact_mut(ROWS).zip(words) {
        unsafe { store(out, words) };
    }
}

#[inline(always)]
#[allow(clippy::undocumented_unsafe_blocks)] // SAFETY: as above.
unsafe fn store(out: &mut [f32], words: __m256i) {
    unsafe { _mm256_storeu_si256(out[..ROWS].as_mut_ptr().cast(), words) }
}

/// Scales of all blocks, each block's for all rows.
#[inline(always)]
#[allow(clippy::undocumented_unsafe_blocks)] // SAFETY: as above.
unsafe fn put_scales(rows: &Group<'_, ROWS>, scales: &Scales<'_>, out: &mut [f32]) {
    for (chunk, out) in out.chunks_mut(CHUNK * ROWS).enumerate() {
        let mut eight = [0.0; CHUNK * ROWS];
        unsafe { side_by_side(rows, scales, chunk * CHUNK, &mut eight) };
        out.copy_from_slice(&eight[..out.len()]);
    }
}

/// Packed panels, the first activation row, and where results go.
struct Product {
    panels: *const f32,
    /// Numbers of a panel: quants, then scales, then offsets.
    size: usize,
    /// Where its scales begin.
    scales: usize,
    /// Where its offsets begin.
    offsets: usize,
    /// Weight rows in all panels.
    rows: usize,
    /// Quants of the activation rows, as bytes or 16-bit numbers.
    x: *const u8,
    x_scales: *const f32,
    /// What takes an excess off the sums of int4 and int6.
    x_shifts: *const i32,
    x_sums: *const f32,
    /// f32 numbers from one activation row to the next.
    x_stride: usize,
    blocks: usize,
    out: *mut f32,
    out_stride: usize,
    count: usize,
}

/// What the words of a panel are, as a constant of functions: two 16-bit numbers, or four bytes of int4 or int6.
const PAIRS: usize = 0;
const NIBBLES: usize = 1;
const SIXES: usize = 2;

#[allow(clippy::undocumented_unsafe_blocks, clippy::needless_range_loop)] // SAFETY: see the call above.
impl Product {
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn run(&self, stored: Stored, minima: bool, whole: bool) {
        unsafe {
            match (stored, minima) {
                (Stored::I4Block32, false) => self.rows::<3, 2, NIBBLES, 8, false, false>(),
                (Stored::I4Block32, true) => self.rows::<3, 2, NIBBLES, 8, true, false>(),
                (Stored::I6Block32, _) => self.rows::<4, 1, SIXES, 8, false, false>(),
                (_, false) if whole => self.rows::<6, 2, PAIRS, 16, false, true>(),
                (Stored::I8Block32, false) => self.rows::<3, 2, PAIRS, 16, false, false>(),
                (Stored::I8Block32, true) => self.rows::<3, 2, PAIRS, 16, true, false>(),
                (Stored::I8Block16, false) => self.rows::<3, 2, PAIRS, 8, false, false>(),
                (Stored::I8Block16, true) => self.rows::<3, 2, PAIRS, 8, true, false>(),
            }
        }
    }

    /// All activation rows against all panels, in tiles of `M` rows and `N` panels.
    #[inline(always)]
    unsafe fn rows<const M: usize, const N: usize, const KIND: usize, const WORDS: usize, const OFFSETS: bool, const WHOLE: bool>(&self) {
        let mut t = 0;
        unsafe {
            while t < self.count {
                t += match self.count - t {
                    left if left >= M => self.panels::<M, N, KIND, WORDS, OFFSETS, WHOLE>(t),
                    2.. => self.panels::<2, N, KIND, WORDS, OFFSETS, WHOLE>(t),
                    _ => self.panels::<1, N, KIND, WORDS, OFFSETS, WHOLE>(t),
                };
            }
        }
    }

    /// `M` activation rows, which stay in the nearest cache, against all panels.
    #[inline(always)]
    unsafe fn panels<const M: usize, const N: usize, const KIND: usize, const WORDS: usize, const OFFSETS: bool, const WHOLE: bool>(
        &self,
        t: usize,
    ) -> usize {
        let (mut panel, panels) = (0, self.rows.div_ceil(ROWS));
        while panel < panels {
            panel += unsafe {
                match panels - panel {
                    left if left >= N => self.tile::<M, N, KIND, WORDS, OFFSETS, WHOLE>(t, panel),
                    _ => self.tile::<M, 1, KIND, WORDS, OFFSETS, WHOLE>(t, panel),
                }
            };
        }
        M
    }

    /// `M` activation rows and `N` panels; `WORDS` words of quants share a scale, unless all of a row do (`WHOLE`).
    #[inline(always)]
    unsafe fn tile<const M: usize, const N: usize, const KIND: usize, const WORDS: usize, const OFFSETS: bool, const WHOLE: bool>(
        &self,
        t: usize,
        panel: usize,
    ) -> usize {
        unsafe {
            let weights = self.panels.add(panel * self.size);
            let x = self.x.add(t * self.x_stride * 4);
            let (scales, sums) = (self.x_scales.add(t * self.x_stride), self.x_sums.add(t * self.x_stride));
            let shifts = self.x_shifts.add(t * self.x_stride);
            // An int8 block of 16 or 32 and an int4 block of 32 have one activation scale for 32 numbers.
            let per_scale = if KIND == PAIRS && WORDS == 8 { 2 } else { 1 };
            let zero = _mm256_setzero_si256();
            let mut results = [[_mm256_setzero_ps(); N]; M];
            let mut totals = [[zero; N]; M];
            for b in 0..self.blocks {
                if !WHOLE {
                    for m in 0..M {
                        totals[m] = match KIND {
                            // 8 too much of each number: two sums of 16 bits have half of it each.
                            NIBBLES if !OFFSETS => [_mm256_set1_epi32(*shifts.add(m * self.x_stride + b)); N],
                            // 32 too much; shifts are for 128.
                            SIXES => [_mm256_srai_epi32::<2>(_mm256_set1_epi32(*shifts.add(m * self.x_stride + b))); N],
                            _ => [zero; N],
                        };
                    }
                }
                self.multiply::<M, N, KIND, WORDS>(weights, x, b, &mut totals);
                if WHOLE {
                    continue;
                }
                for n in 0..N {
                    let w_scales = _mm256_loadu_ps(weights.add(n * self.size + self.scales + b * ROWS));
                    for m in 0..M {
                        let total = if KIND == NIBBLES { _mm256_madd_epi16(totals[m][n], _mm256_set1_epi16(1)) } else { totals[m][n] };
                        let scale = _mm256_broadcast_ss(&*scales.add(m * self.x_stride + b / per_scale));
                        results[m][n] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(total), _mm256_mul_ps(w_scales, scale), results[m][n]);
                    }
                    if OFFSETS {
                        let offsets = _mm256_loadu_ps(weights.add(n * self.size + self.offsets + b * ROWS));
                        for m in 0..M {
                            let sum = _mm256_broadcast_ss(&*sums.add(m * self.x_stride + b));
                            results[m][n] = _mm256_fmadd_ps(offsets, sum, results[m][n]);
                        }
                    }
                }
            }
            for n in 0..N {
                for m in 0..M {
                    if WHOLE {
                        let w_scales = _mm256_loadu_ps(weights.add(n * self.size + self.scales));
                        let scale = _mm256_mul_ps(w_scales, _mm256_broadcast_ss(&*scales.add(m * self.x_stride)));
                        results[m][n] = _mm256_mul_ps(_mm256_cvtepi32_ps(totals[m][n]), scale);
                    }
                    self.store(t + m, panel + n, results[m][n]);
                }
            }
        }
        N
    }

    /// Adds the products of block `b` to the totals. Those of int4 are sums in 16 bits.
    #[inline(always)]
    unsafe fn multiply<const M: usize, const N: usize, const KIND: usize, const WORDS: usize>(
        &self,
        weights: *const f32,
        x: *const u8,
        b: usize,
        totals: &mut [[__m256i; N]; M],
    ) {
        unsafe {
            let quants = |n: usize, word: usize| _mm256_loadu_si256(weights.add(n * self.size + word * ROWS).cast());
            let four_bytes =
                |m: usize, word: usize| _mm256_set1_epi32(x.add(m * self.x_stride * 4 + word * 4).cast::<i32>().read_unaligned());
            if KIND == SIXES {
                let ones = _mm256_set1_epi16(1);
                for word in (b * WORDS..(b + 1) * WORDS).step_by(2) {
                    for n in 0..N {
                        let (first, second) = (quants(n, word), quants(n, word + 1));
                        for m in 0..M {
                            // Four products of 63 and 127 fit 16 bits.
                            let (one, two) =
                                (_mm256_maddubs_epi16(first, four_bytes(m, word)), _mm256_maddubs_epi16(second, four_bytes(m, word + 1)));
                            totals[m][n] = _mm256_add_epi32(totals[m][n], _mm256_madd_epi16(_mm256_add_epi16(one, two), ones));
                        }
                    }
                }
                return;
            }
            for word in b * WORDS..(b + 1) * WORDS {
                let mut w = [_mm256_setzero_si256(); N];
                for n in 0..N {
                    w[n] = quants(n, word);
                }
                for m in 0..M {
                    let x = four_bytes(m, word);
                    for n in 0..N {
                        // int4: sixteen products of 15 and 127 fit 16 bits, and those of −8 and 127 with four times the difference of the two sums.
                        totals[m][n] = match KIND {
                            NIBBLES => _mm256_add_epi16(totals[m][n], _mm256_maddubs_epi16(w[n], x)),
                            _ => _mm256_add_epi32(totals[m][n], _mm256_madd_epi16(w[n], x)),
                        };
                    }
                }
            }
        }
    }

    /// Writes the results of a panel with activation row `t`.
    #[inline(always)]
    unsafe fn store(&self, t: usize, panel: usize, results: __m256) {
        unsafe {
            let to = self.out.add(t * self.out_stride + panel * ROWS);
            match self.rows - panel * ROWS {
                ROWS.. => _mm256_storeu_ps(to, results),
                rows => {
                    let first = _mm256_cmpgt_epi32(_mm256_set1_epi32(rows as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
                    _mm256_maskstore_ps(to, first, results);
                }
            }
        }
    }
}

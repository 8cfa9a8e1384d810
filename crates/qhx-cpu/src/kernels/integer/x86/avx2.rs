//! Many activation rows against panels of eight stored rows, with AVX2.
//!
//! int4 panels hold four quants of each row next to each other as bytes, whose products with activation bytes can be summed over a block in 16 bits.
//! int6 and int8 panels hold two quants of each row as 16-bit numbers: their products are exact without care for signs.

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
    // 32-bit words of one row in a panel: four quants each (int4) or two (int8).
    let words = match w.stored {
        Stored::I4Block32 => w.blocks * 8,
        _ => w.blocks * w.stored.block() / 2,
    };
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
        x: match w.stored {
            Stored::I4Block32 => sample.quants.as_ptr().cast(),
            _ => sample.wide.as_ptr().cast(),
        },
        x_scales: sample.scales.as_ptr(),
        x_sums: if w.stored == Stored::I8Block16 { sample.sums16.as_ptr() } else { sample.sums32.as_ptr() },
        x_stride: x.stride,
        blocks: w.blocks,
        out,
        out_stride,
        count: tile.rows,
    };
    // SAFETY: the CPU has AVX2 and FMA; the panels are packed for all their blocks, activation rows and tile were checked.
    unsafe { product.run(w.stored, !matches!(w.offsets, Offsets::None), whole_rows(w, x.by_row)) }
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
            // Sixteen quants of a row become eight words of two numbers.
            Stored::I6Block32 | Stored::I8Block16 | Stored::I8Block32 => {
                for (step, out) in quants.chunks_exact_mut(8 * ROWS).enumerate() {
                    let words = words_of(&rows, |row| {
                        _mm256_cvtepi8_epi16(match w.stored {
                            Stored::I6Block32 => sixes(row.add(step / 2 * I6_BYTES), step % 2),
                            _ => _mm_loadu_si128(row.add(step * 16).cast()),
                        })
                    });
                    for (out, &words) in out.chunks_exact_mut(ROWS).zip(&words) {
                        store(out, words);
                    }
                }
            }
        }
        put_scales(&rows, &w.scales, scales);
        match &w.offsets {
            Offsets::None => offsets.fill(0.0),
            Offsets::MinusEight => offsets.iter_mut().zip(scales).for_each(|(offset, scale)| *offset = -8.0 * *scale),
            Offsets::Min(mins) => put_scales(&rows, mins, offsets),
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

/// The sixteen numbers of a half of an int6 block as signed bytes.
#[inline(always)]
#[allow(clippy::undocumented_unsafe_blocks)] // SAFETY: as above.
unsafe fn sixes(block: *const u8, half: usize) -> __m128i {
    unsafe {
        let low = _mm_srl_epi16(_mm_loadu_si128(block.cast()), _mm_cvtsi64_si128(4 * half as i64));
        let top = _mm_set1_epi64x(block.add(16).cast::<i64>().read_unaligned());
        let top = _mm_srlv_epi64(top, _mm_set_epi64x(4 * half as i64 + 2, 4 * half as i64));
        let top = _mm_and_si128(_mm_slli_epi64::<4>(top), _mm_set1_epi8(0x30));
        _mm_sub_epi8(_mm_or_si128(_mm_and_si128(low, _mm_set1_epi8(15)), top), _mm_set1_epi8(32))
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
    x_sums: *const f32,
    /// f32 numbers from one activation row to the next.
    x_stride: usize,
    blocks: usize,
    out: *mut f32,
    out_stride: usize,
    count: usize,
}

#[allow(clippy::undocumented_unsafe_blocks, clippy::needless_range_loop)] // SAFETY: see the call above.
impl Product {
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn run(&self, stored: Stored, offsets: bool, whole: bool) {
        unsafe {
            match (stored, offsets) {
                (Stored::I4Block32, _) => self.rows::<true, 8, true, false>(),
                (_, false) if whole => self.rows::<false, 16, false, true>(),
                (Stored::I8Block32 | Stored::I6Block32, false) => self.rows::<false, 16, false, false>(),
                (Stored::I8Block32 | Stored::I6Block32, true) => self.rows::<false, 16, true, false>(),
                (Stored::I8Block16, false) => self.rows::<false, 8, false, false>(),
                (Stored::I8Block16, true) => self.rows::<false, 8, true, false>(),
            }
        }
    }

    #[inline(always)]
    unsafe fn rows<const NIBBLES: bool, const WORDS: usize, const OFFSETS: bool, const WHOLE: bool>(&self) {
        let mut t = 0;
        unsafe {
            while t < self.count {
                t += match self.count - t {
                    4.. => self.panels::<4, NIBBLES, WORDS, OFFSETS, WHOLE>(t),
                    2.. => self.panels::<2, NIBBLES, WORDS, OFFSETS, WHOLE>(t),
                    _ => self.panels::<1, NIBBLES, WORDS, OFFSETS, WHOLE>(t),
                };
            }
        }
    }

    /// `M` activation rows, which stay in the nearest cache, against all panels.
    #[inline(always)]
    unsafe fn panels<const M: usize, const NIBBLES: bool, const WORDS: usize, const OFFSETS: bool, const WHOLE: bool>(
        &self,
        t: usize,
    ) -> usize {
        for panel in 0..self.rows.div_ceil(ROWS) {
            unsafe { self.tile::<M, NIBBLES, WORDS, OFFSETS, WHOLE>(t, panel) };
        }
        M
    }

    /// `M` activation rows; `WORDS` words of quants share a scale, unless all of a row do (`WHOLE`).
    #[inline(always)]
    unsafe fn tile<const M: usize, const NIBBLES: bool, const WORDS: usize, const OFFSETS: bool, const WHOLE: bool>(
        &self,
        t: usize,
        panel: usize,
    ) {
        unsafe {
            let w_quants = self.panels.add(panel * self.size);
            let (w_scales, w_offsets) = (w_quants.add(self.scales), w_quants.add(self.offsets));
            let lanes = (self.rows - panel * ROWS).min(ROWS);
            let out = self.out.add(t * self.out_stride + panel * ROWS);
            let bytes = self.x_stride * 4;
            let quants = self.x.add(t * bytes);
            let (scales, sums) = (self.x_scales.add(t * self.x_stride), self.x_sums.add(t * self.x_stride));
            // An int8 block of 16 or 32 and an int4 block of 32 have one activation scale for 32 numbers.
            let per_scale = if !NIBBLES && WORDS == 8 { 2 } else { 1 };
            let mut results = [_mm256_setzero_ps(); M];
            let mut totals = [_mm256_setzero_si256(); M];
            let ones = _mm256_set1_epi16(1);
            for b in 0..self.blocks {
                if !WHOLE {
                    totals = [_mm256_setzero_si256(); M];
                }
                for word in b * WORDS..(b + 1) * WORDS {
                    let weights = _mm256_loadu_si256(w_quants.cast::<u8>().add(word * 32).cast());
                    for m in 0..M {
                        let x = _mm256_set1_epi32(quants.add(m * bytes + word * 4).cast::<i32>().read_unaligned());
                        // int4: sixteen products of 15 and 127 fit 16 bits.
                        totals[m] = match NIBBLES {
                            true => _mm256_add_epi16(totals[m], _mm256_maddubs_epi16(weights, x)),
                            false => _mm256_add_epi32(totals[m], _mm256_madd_epi16(weights, x)),
                        };
                    }
                }
                if WHOLE {
                    continue;
                }
                let w_scales = _mm256_loadu_ps(w_scales.add(b * ROWS));
                for m in 0..M {
                    let total = if NIBBLES { _mm256_madd_epi16(totals[m], ones) } else { totals[m] };
                    let scale = _mm256_broadcast_ss(&*scales.add(m * self.x_stride + b / per_scale));
                    results[m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(total), _mm256_mul_ps(w_scales, scale), results[m]);
                }
                if OFFSETS {
                    let offsets = _mm256_loadu_ps(w_offsets.add(b * ROWS));
                    for m in 0..M {
                        let sum = _mm256_broadcast_ss(&*sums.add(m * self.x_stride + b));
                        results[m] = _mm256_fmadd_ps(offsets, sum, results[m]);
                    }
                }
            }
            for m in 0..M {
                if WHOLE {
                    let scale = _mm256_mul_ps(_mm256_loadu_ps(w_scales), _mm256_broadcast_ss(&*scales.add(m * self.x_stride)));
                    results[m] = _mm256_mul_ps(_mm256_cvtepi32_ps(totals[m]), scale);
                }
                let to = out.add(m * self.out_stride);
                match lanes {
                    ROWS => _mm256_storeu_ps(to, results[m]),
                    _ => {
                        let first = _mm256_cmpgt_epi32(_mm256_set1_epi32(lanes as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
                        _mm256_maskstore_ps(to, first, results[m]);
                    }
                }
            }
        }
    }
}

//! Many activation rows against panels of eight stored rows, with AVX2.
//!
//! int4 panels hold four quants of each row next to each other as bytes, whose products with activation bytes can be summed over a block in 16 bits.
//! int8 panels hold two quants of each row as 16-bit numbers: their products are exact without care for signs.

use super::needs;
use crate::{
    kernels::{
        InstructionSet, Instructions,
        integer::{ActivationRows, Offsets, Weights, whole_rows},
        quants::Stored,
    },
    work::Tile,
};
use std::arch::x86_64::*;

/// Rows of a panel.
const ROWS: usize = 8;

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
        pack(w, panel * ROWS, (w.rows - panel * ROWS).min(ROWS), bytemuck::cast_slice_mut(quants), scales, offsets);
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

/// Puts rows side by side. Rows beyond `rows` keep what they are: their results are not written.
fn pack(w: &Weights<'_>, first: usize, rows: usize, quants: &mut [u32], scales: &mut [f32], offsets: &mut [f32]) {
    for r in 0..rows {
        let data = &w.data[(first + r) * w.stride..][..w.stride];
        match w.stored {
            Stored::I4Block32 => {
                for b in 0..w.blocks {
                    let words: &[u32] = bytemuck::cast_slice(&data[b * 16..][..16]);
                    for (i, word) in words.iter().enumerate() {
                        quants[(b * 8 + i) * ROWS + r] = word & 0x0f0f_0f0f;
                        quants[(b * 8 + 4 + i) * ROWS + r] = word >> 4 & 0x0f0f_0f0f;
                    }
                }
            }
            Stored::I8Block16 | Stored::I8Block32 => {
                for (i, pair) in data.chunks_exact(2).take(quants.len() / ROWS).enumerate() {
                    let [low, high] = [pair[0] as i8 as i16 as u16, pair[1] as i8 as i16 as u16];
                    quants[i * ROWS + r] = (high as u32) << 16 | low as u32;
                }
            }
        }
        for b in 0..w.blocks {
            scales[b * ROWS + r] = w.scales.get(first + r, b);
            offsets[b * ROWS + r] = w.offset(first + r, b);
        }
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
                (Stored::I8Block32, false) => self.rows::<false, 16, false, false>(),
                (Stored::I8Block32, true) => self.rows::<false, 16, true, false>(),
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

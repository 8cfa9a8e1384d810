//! Many activation rows against panels of sixteen stored rows, with AVX-512 VNNI.
//!
//! A panel holds its rows side by side, four quants of each row next to each other: one instruction multiplies four quants of all sixteen rows with
//! the same four of one activation row.

use super::{needs, whole_rows};
use crate::{
    kernels::{
        InstructionSet, Instructions,
        integer::{ActivationRows, Offsets, Weights},
        quants::Stored,
    },
    work::Tile,
};
use std::arch::x86_64::*;

/// Rows of a panel.
const ROWS: usize = 16;

/// See [`crate::kernels::integer::matrix_products`], which checked the lengths.
pub(in super::super) fn matrix_products(
    instructions: Instructions,
    w: &Weights<'_>,
    x: &ActivationRows<'_>,
    first: usize,
    tile: &mut Tile<'_, f32>,
    scratch: &mut [f32],
) {
    needs(instructions, InstructionSet::Avx512Vnni);
    let numbers = w.blocks * w.stored.block();
    let groups = numbers.div_ceil(4).next_multiple_of(8);
    let (quants, rest) = scratch.split_at_mut(groups * ROWS);
    let (scales, rest) = rest.split_at_mut(w.blocks * ROWS);
    let offsets = &mut rest[..w.blocks * ROWS];
    let sample = x.row(first);
    let whole = whole_rows(w, x.by_row);
    for column in (0..w.rows).step_by(ROWS) {
        let rows = (w.rows - column).min(ROWS);
        pack(w, column, rows, bytemuck::cast_slice_mut(quants), scales, offsets);
        let (out, out_stride) = tile.as_mut_ptr();
        let panel = Panel {
            quants: quants.as_ptr().cast(),
            scales: scales.as_ptr(),
            offsets: offsets.as_ptr(),
            // Pointers into the first activation row; others are a stride apart, and the caller checked the last one.
            x: sample.quants.as_ptr(),
            x_scales: sample.scales.as_ptr(),
            x_sums: if w.stored == Stored::I8Block16 { sample.sums16.as_ptr() } else { sample.sums32.as_ptr() },
            x_shifts: if w.stored == Stored::I8Block16 { sample.shifts16.as_ptr() } else { sample.shifts32.as_ptr() },
            x_stride: x.stride,
            blocks: w.blocks,
            // SAFETY: the column is in the tile.
            out: unsafe { out.add(column) },
            out_stride,
            lanes: ((1u32 << rows) - 1) as __mmask16,
            count: tile.rows,
        };
        // SAFETY: the CPU has AVX-512 with VNNI; the panel is packed for all its blocks, activation rows and tile were checked.
        unsafe { panel.run(w.stored, !matches!(w.offsets, Offsets::None), whole) }
    }
}

/// Puts rows side by side: int4 as bytes from 0 to 15, int8 as bytes plus 128. Rows beyond `rows` keep what they are: their results are not written.
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
                let words: &[u32] = bytemuck::cast_slice(data);
                for (i, word) in words[..quants.len() / ROWS].iter().enumerate() {
                    quants[i * ROWS + r] = word ^ 0x8080_8080;
                }
            }
        }
        for b in 0..w.blocks {
            scales[b * ROWS + r] = w.scales.get(first + r, b);
            offsets[b * ROWS + r] = w.offset(first + r, b);
        }
    }
}

/// A packed panel, the first activation row, and where results go.
struct Panel {
    quants: *const u8,
    scales: *const f32,
    offsets: *const f32,
    x: *const i8,
    x_scales: *const f32,
    x_sums: *const f32,
    x_shifts: *const i32,
    /// f32 numbers from one activation row to the next.
    x_stride: usize,
    blocks: usize,
    out: *mut f32,
    out_stride: usize,
    lanes: __mmask16,
    count: usize,
}

#[allow(clippy::undocumented_unsafe_blocks, clippy::needless_range_loop)] // SAFETY: see the call above.
impl Panel {
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    unsafe fn run(&self, stored: Stored, offsets: bool, whole: bool) {
        unsafe {
            match (stored, offsets) {
                (Stored::I4Block32, _) => self.rows::<8, true, false, false>(),
                (_, false) if whole => self.rows::<8, false, true, true>(),
                (Stored::I8Block32, false) => self.rows::<8, false, true, false>(),
                (Stored::I8Block32, true) => self.rows::<8, true, true, false>(),
                (Stored::I8Block16, false) => self.rows::<4, false, true, false>(),
                (Stored::I8Block16, true) => self.rows::<4, true, true, false>(),
            }
        }
    }

    #[inline(always)]
    unsafe fn rows<const GROUPS: usize, const OFFSETS: bool, const SHIFTED: bool, const WHOLE: bool>(&self) {
        let mut t = 0;
        unsafe {
            while t < self.count {
                t += match self.count - t {
                    12.. => self.tile::<12, GROUPS, OFFSETS, SHIFTED, WHOLE>(t),
                    8.. => self.tile::<8, GROUPS, OFFSETS, SHIFTED, WHOLE>(t),
                    4.. => self.tile::<4, GROUPS, OFFSETS, SHIFTED, WHOLE>(t),
                    2.. => self.tile::<2, GROUPS, OFFSETS, SHIFTED, WHOLE>(t),
                    _ => self.tile::<1, GROUPS, OFFSETS, SHIFTED, WHOLE>(t),
                };
            }
        }
    }

    /// `M` activation rows; `GROUPS` fours of quants share a scale, unless all of a row do (`WHOLE`).
    #[inline(always)]
    unsafe fn tile<const M: usize, const GROUPS: usize, const OFFSETS: bool, const SHIFTED: bool, const WHOLE: bool>(
        &self,
        t: usize,
    ) -> usize {
        unsafe {
            let quants = self.x.add(t * self.x_stride * 4);
            let (scales, sums) = (self.x_scales.add(t * self.x_stride), self.x_sums.add(t * self.x_stride));
            let shifts = self.x_shifts.add(t * self.x_stride);
            let mut results = [_mm512_setzero_ps(); M];
            let mut totals = [_mm512_setzero_si512(); M];
            for b in 0..self.blocks {
                for m in 0..M {
                    if SHIFTED {
                        let shift = _mm512_set1_epi32(*shifts.add(m * self.x_stride + b));
                        totals[m] = if WHOLE { _mm512_add_epi32(totals[m], shift) } else { shift };
                    } else if !WHOLE {
                        totals[m] = _mm512_setzero_si512();
                    }
                }
                for group in b * GROUPS..(b + 1) * GROUPS {
                    let weights = _mm512_loadu_si512(self.quants.add(group * 64).cast());
                    for m in 0..M {
                        let four = quants.add(m * self.x_stride * 4 + group * 4).cast::<i32>().read_unaligned();
                        totals[m] = _mm512_dpbusd_epi32(totals[m], weights, _mm512_set1_epi32(four));
                    }
                }
                if WHOLE {
                    continue;
                }
                let w_scales = _mm512_loadu_ps(self.scales.add(b * ROWS));
                for m in 0..M {
                    let scale = _mm512_set1_ps(*scales.add(m * self.x_stride + b * GROUPS / 8));
                    results[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(totals[m]), _mm512_mul_ps(w_scales, scale), results[m]);
                }
                if OFFSETS {
                    let offsets = _mm512_loadu_ps(self.offsets.add(b * ROWS));
                    for m in 0..M {
                        let sum = _mm512_set1_ps(*sums.add(m * self.x_stride + b));
                        results[m] = _mm512_fmadd_ps(offsets, sum, results[m]);
                    }
                }
            }
            for m in 0..M {
                if WHOLE {
                    let scale = _mm512_mul_ps(_mm512_loadu_ps(self.scales), _mm512_set1_ps(*scales.add(m * self.x_stride)));
                    results[m] = _mm512_mul_ps(_mm512_cvtepi32_ps(totals[m]), scale);
                }
                _mm512_mask_storeu_ps(self.out.add((t + m) * self.out_stride), self.lanes, results[m]);
            }
            M
        }
    }
}

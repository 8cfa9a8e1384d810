//! Many activation rows against panels of sixteen stored rows, with AVX-512 VNNI.
//!
//! One instruction multiplies four quants of all sixteen rows of a panel with the same four of one activation row.

use super::{
    needs,
    panels::{Bytes, Panels, ROWS},
};
use crate::{
    kernels::{
        InstructionSet, Instructions,
        integer::{ActivationRows, Weights, whole_rows},
        quants::Stored,
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
    needs(instructions, InstructionSet::Avx512Vnni);
    let whole = whole_rows(w, x.by_row);
    // SAFETY: the CPU has AVX-512; the caller checked the weights.
    let (panels, _) = unsafe { Panels::pack(w, Bytes::Shifted, whole, scratch) };
    let sample = x.row(first);
    let sixteen = w.stored == Stored::I8Block16;
    let (out, out_stride) = tile.as_mut_ptr();
    let product = Product {
        panels,
        // Pointers into the first activation row; others are a stride apart, and the caller checked the last one.
        x: sample.quants.as_ptr(),
        x_scales: sample.scales.as_ptr(),
        x_sums: if sixteen { sample.sums16.as_ptr() } else { sample.sums32.as_ptr() },
        x_shifts: if sixteen { sample.shifts16.as_ptr() } else { sample.shifts32.as_ptr() },
        x_stride: x.stride,
        blocks: w.blocks,
        out,
        out_stride,
        count: tile.rows,
    };
    // SAFETY: the CPU has AVX-512 with VNNI; the panels are packed for all their blocks, activation rows and tile were checked.
    unsafe { product.run(w.stored, w.has_minima(), whole) }
}

/// Packed panels, the first activation row, and where results go.
struct Product {
    panels: Panels,
    x: *const i8,
    x_scales: *const f32,
    x_sums: *const f32,
    x_shifts: *const i32,
    /// f32 numbers from one activation row to the next.
    x_stride: usize,
    blocks: usize,
    out: *mut f32,
    out_stride: usize,
    count: usize,
}

#[allow(clippy::undocumented_unsafe_blocks, clippy::needless_range_loop)] // SAFETY: see the call above.
impl Product {
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    unsafe fn run(&self, stored: Stored, minima: bool, whole: bool) {
        unsafe {
            match (stored, minima) {
                (Stored::I4Block32, false) => self.rows::<8, false, 8, false>(),
                (Stored::I4Block32, true) => self.rows::<8, true, 0, false>(),
                (_, false) if whole => self.rows::<8, false, 128, true>(),
                (Stored::I8Block32 | Stored::I6Block32, false) => self.rows::<8, false, 128, false>(),
                (Stored::I8Block32 | Stored::I6Block32, true) => self.rows::<8, true, 128, false>(),
                (Stored::I8Block16, false) => self.rows::<4, false, 128, false>(),
                (Stored::I8Block16, true) => self.rows::<4, true, 128, false>(),
            }
        }
    }

    #[inline(always)]
    unsafe fn rows<const GROUPS: usize, const OFFSETS: bool, const EXCESS: u8, const WHOLE: bool>(&self) {
        let mut t = 0;
        unsafe {
            while t < self.count {
                t += match self.count - t {
                    8.. => self.panels::<8, GROUPS, OFFSETS, EXCESS, WHOLE>(t),
                    4.. => self.panels::<4, GROUPS, OFFSETS, EXCESS, WHOLE>(t),
                    2.. => self.panels::<2, GROUPS, OFFSETS, EXCESS, WHOLE>(t),
                    _ => self.panels::<1, GROUPS, OFFSETS, EXCESS, WHOLE>(t),
                };
            }
        }
    }

    /// `M` activation rows, which stay in the nearest cache, against all panels.
    #[inline(always)]
    unsafe fn panels<const M: usize, const GROUPS: usize, const OFFSETS: bool, const EXCESS: u8, const WHOLE: bool>(
        &self,
        t: usize,
    ) -> usize {
        for panel in 0..self.panels.count() {
            unsafe { self.tile::<M, GROUPS, OFFSETS, EXCESS, WHOLE>(t, panel) };
        }
        M
    }

    /// `M` activation rows; `GROUPS` fours of quants share a scale, unless all of a row do (`WHOLE`), and are packed with `EXCESS` too much.
    #[inline(always)]
    unsafe fn tile<const M: usize, const GROUPS: usize, const OFFSETS: bool, const EXCESS: u8, const WHOLE: bool>(
        &self,
        t: usize,
        panel: usize,
    ) {
        unsafe {
            let (quants, w_scales, w_offsets) = self.panels.get(panel);
            let lanes = self.panels.lanes(panel);
            let out = self.out.add(t * self.out_stride + panel * ROWS);
            let x = Threes::new(self.x.add(t * self.x_stride * 4).cast::<i32>(), self.x_stride);
            let scales = Threes::new(self.x_scales.add(t * self.x_stride), self.x_stride);
            let sums = Threes::new(self.x_sums.add(t * self.x_stride), self.x_stride);
            let shifts = Threes::new(self.x_shifts.add(t * self.x_stride), self.x_stride);
            let mut results = [_mm512_setzero_ps(); M];
            let mut totals = [_mm512_setzero_si512(); M];
            for b in 0..self.blocks {
                for m in 0..M {
                    // What the quants of a panel have too much.
                    let shift = match EXCESS {
                        0 => _mm512_setzero_si512(),
                        8 => _mm512_srai_epi32::<4>(_mm512_set1_epi32(shifts.get(m, b))),
                        _ => _mm512_set1_epi32(shifts.get(m, b)),
                    };
                    totals[m] = if WHOLE { _mm512_add_epi32(totals[m], shift) } else { shift };
                }
                // Written out, so that every address is a register, a multiple of the stride and a constant.
                let weights = quants.add(b * GROUPS * 64);
                let group = b * GROUPS;
                multiply(weights, &x, group, &mut totals);
                multiply(weights.add(64), &x, group + 1, &mut totals);
                multiply(weights.add(128), &x, group + 2, &mut totals);
                multiply(weights.add(192), &x, group + 3, &mut totals);
                if GROUPS == 8 {
                    multiply(weights.add(256), &x, group + 4, &mut totals);
                    multiply(weights.add(320), &x, group + 5, &mut totals);
                    multiply(weights.add(384), &x, group + 6, &mut totals);
                    multiply(weights.add(448), &x, group + 7, &mut totals);
                }
                if WHOLE {
                    continue;
                }
                let w_scales = _mm512_loadu_ps(w_scales.add(b * ROWS));
                for m in 0..M {
                    let scale = _mm512_set1_ps(scales.get(m, b * GROUPS / 8));
                    results[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(totals[m]), _mm512_mul_ps(w_scales, scale), results[m]);
                }
                if OFFSETS {
                    let offsets = _mm512_loadu_ps(w_offsets.add(b * ROWS));
                    for m in 0..M {
                        results[m] = _mm512_fmadd_ps(offsets, _mm512_set1_ps(sums.get(m, b)), results[m]);
                    }
                }
            }
            for m in 0..M {
                if WHOLE {
                    let scale = _mm512_mul_ps(_mm512_loadu_ps(w_scales), _mm512_set1_ps(scales.get(m, 0)));
                    results[m] = _mm512_mul_ps(_mm512_cvtepi32_ps(totals[m]), scale);
                }
                _mm512_mask_storeu_ps(out.add(m * self.out_stride), lanes, results[m]);
            }
        }
    }
}

/// Adds the products of one group: four quants of each of sixteen weight rows with the same four of `M` activation rows.
#[inline(always)]
#[allow(clippy::undocumented_unsafe_blocks)] // SAFETY: see the call above.
unsafe fn multiply<const M: usize>(weights: *const u8, x: &Threes<i32>, group: usize, totals: &mut [__m512i; M]) {
    unsafe {
        let weights = _mm512_loadu_si512(weights.cast());
        for (m, total) in totals.iter_mut().enumerate() {
            *total = _mm512_dpbusd_epi32(*total, weights, _mm512_set1_epi32(x.get(m, group)));
        }
    }
}

/// Up to twelve rows that are a stride apart, by pointers to every third: the two rows after each are reached without arithmetic.
struct Threes<T> {
    starts: [*const T; 4],
    stride: usize,
}

#[allow(clippy::undocumented_unsafe_blocks)] // SAFETY: see the call above.
impl<T: Copy> Threes<T> {
    #[inline(always)]
    fn new(start: *const T, stride: usize) -> Self {
        Self { starts: std::array::from_fn(|i| start.wrapping_add(3 * i * stride)), stride }
    }

    #[inline(always)]
    unsafe fn get(&self, row: usize, at: usize) -> T {
        unsafe { *self.starts[row / 3].add(row % 3 * self.stride + at) }
    }
}

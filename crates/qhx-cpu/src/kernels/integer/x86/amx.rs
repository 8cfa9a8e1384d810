//! Many activation rows against panels of sixteen stored rows, with AMX: one instruction multiplies sixteen rows of 64 quants with a panel's.
//!
//! Sums, scales and the order of f32 sums are those of AVX-512 VNNI, so the results are the same to the last bit.

use super::{
    needs,
    panels::{Bytes, Panels, ROWS, side_by_side},
    tiles::{Four, ROW, Registers, Shape, Tiles, multiply_four},
    vnni,
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
    needs(instructions, InstructionSet::Avx512Amx);
    if w.stored == Stored::I8Block16 {
        // With a scale for each 16 quants three quarters of a tile would be empty.
        return vnni::matrix_products(instructions, w, x, first, tile, scratch);
    }
    // SAFETY: the CPU has AVX-512 and AMX; lengths were checked.
    unsafe { Product::new(w, x, first, tile, scratch).run(&mut Registers) }
}

/// Packed panels, the first activation row, and where results go.
struct Product<'a> {
    panels: Panels,
    /// One sum over each row, not one for each block.
    whole: bool,
    minima: bool,
    blocks: usize,
    x: *const u8,
    x_scales: *const f32,
    x_sums: *const f32,
    /// f32 numbers from one activation row to the next.
    x_stride: usize,
    /// Room for the scales and sums of sixteen activation rows side by side.
    turned: &'a mut [f32],
    out: *mut f32,
    out_stride: usize,
    /// Activation rows.
    count: usize,
}

/// Four tiles of sums that are being made, and four that are being scaled.
#[repr(align(64))]
struct Sums([Four; 2]);

#[allow(clippy::undocumented_unsafe_blocks)] // SAFETY: see the call above.
impl<'a> Product<'a> {
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn new(w: &Weights<'_>, x: &ActivationRows<'_>, first: usize, tile: &mut Tile<'_, f32>, scratch: &'a mut [f32]) -> Self {
        let whole = whole_rows(w, x.by_row);
        let (panels, rest) = unsafe { Panels::pack(w, Bytes::Signed, whole, scratch) };
        let sample = x.row(first);
        let (out, out_stride) = tile.as_mut_ptr();
        Self {
            panels,
            whole,
            minima: w.has_minima(),
            blocks: w.blocks,
            // Pointers into the first activation row; others are a stride apart, and the caller checked the last one.
            x: sample.quants.as_ptr().cast(),
            x_scales: sample.scales.as_ptr(),
            x_sums: sample.sums32.as_ptr(),
            x_stride: x.stride,
            turned: if whole { &mut [] } else { &mut rest[..2 * w.blocks * ROWS] },
            out,
            out_stride,
            count: tile.rows,
        }
    }

    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn run<T: Tiles>(mut self, tiles: &mut T) {
        let mut sums = Sums([[[[0; ROWS]; 16]; 4]; 2]);
        unsafe {
            tiles.shape(&Shape::new(self.rows(), ROWS, if self.whole { ROW } else { 32 }));
            for t in (0..self.count).step_by(if self.whole { 32 } else { 16 }) {
                match (self.whole, self.minima) {
                    (true, _) if self.count - t > 16 => self.whole::<T, 2>(tiles, t, &mut sums),
                    (true, _) => self.whole::<T, 1>(tiles, t, &mut sums),
                    (false, true) => self.blocks::<T, true>(tiles, t, &mut sums),
                    (false, false) => self.blocks::<T, false>(tiles, t, &mut sums),
                }
            }
            tiles.release();
        }
    }

    /// Activation rows of a tile.
    fn rows(&self) -> usize {
        self.count.min(16)
    }

    /// The first row of the tile that has row `t`: the last tile may take some rows again.
    fn at(&self, t: usize) -> usize {
        t.min(self.count - self.rows())
    }

    /// The quants of activation row `t`.
    #[inline(always)]
    fn quants(&self, t: usize) -> *const u8 {
        self.x.wrapping_add(t * self.x_stride * 4)
    }

    /// `M` tiles of activation rows against all panels, two at a time, with one sum over each row.
    #[inline(always)]
    unsafe fn whole<T: Tiles, const M: usize>(&self, tiles: &mut T, t: usize, sums: &mut Sums) {
        let (at, sums) = ([self.at(t), self.at(t + 16)], &mut sums.0[0]);
        let (x, stride) = (at.map(|t| self.quants(t)), self.x_stride * 4);
        for panel in (0..self.panels.count()).step_by(2) {
            let pair = [panel, (panel + 1).min(self.panels.count() - 1)];
            let weights = pair.map(|panel| self.panels.get(panel).0);
            unsafe {
                tiles.zero::<0>();
                tiles.zero::<1>();
                tiles.zero::<2>();
                tiles.zero::<3>();
                for step in 0..(self.blocks * 32).div_ceil(ROW) {
                    tiles.load::<6>(weights[0].add(step * 16 * ROW), ROW);
                    tiles.load::<4>(x[0].add(step * ROW), stride);
                    tiles.multiply::<0, 4, 6>();
                    tiles.load::<7>(weights[1].add(step * 16 * ROW), ROW);
                    tiles.multiply::<1, 4, 7>();
                    if M == 2 {
                        tiles.load::<5>(x[1].add(step * ROW), stride);
                        tiles.multiply::<2, 5, 6>();
                        tiles.multiply::<3, 5, 7>();
                    }
                }
                tiles.store::<0>(sums[0].as_mut_ptr().cast());
                tiles.store::<1>(sums[1].as_mut_ptr().cast());
                tiles.store::<2>(sums[2].as_mut_ptr().cast());
                tiles.store::<3>(sums[3].as_mut_ptr().cast());
                for (number, sums) in sums[..2 * M].iter().enumerate() {
                    self.scaled(at[number / 2], pair[number % 2], sums);
                }
            }
        }
    }

    /// Writes the results of sums over whole rows.
    #[inline(always)]
    unsafe fn scaled(&self, t: usize, panel: usize, sums: &[[i32; ROWS]; 16]) {
        unsafe {
            let w_scales = _mm512_loadu_ps(self.panels.get(panel).1);
            let lanes = self.panels.lanes(panel);
            for (m, sums) in sums[..self.rows()].iter().enumerate() {
                let scale = _mm512_mul_ps(w_scales, _mm512_set1_ps(*self.x_scales.add((t + m) * self.x_stride)));
                let result = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_loadu_si512(sums.as_ptr().cast())), scale);
                _mm512_mask_storeu_ps(self.out.add((t + m) * self.out_stride + panel * ROWS), lanes, result);
            }
        }
    }

    /// One tile of activation rows against all panels, with a sum for each block.
    #[inline(always)]
    unsafe fn blocks<T: Tiles, const OFFSETS: bool>(&mut self, tiles: &mut T, t: usize, sums: &mut Sums) {
        unsafe {
            let t = self.at(t);
            let (rows, stride) = (self.rows(), self.x_stride);
            let (scales, x_sums) = (self.x_scales.add(t * stride), self.x_sums.add(t * stride));
            // Rows beyond the last are the last one again.
            let of = |start: *const f32, r: usize, step: usize| _mm512_loadu_si512(start.add(r.min(rows - 1) * stride + step * 16).cast());
            let (turned_scales, turned_sums) = self.turned.split_at_mut(self.blocks * ROWS);
            side_by_side(turned_scales, |r, step| of(scales, r, step));
            if OFFSETS {
                side_by_side(turned_sums, |r, step| of(x_sums, r, step));
            }
            for panel in 0..self.panels.count() {
                let mut results = [_mm512_setzero_ps(); 16];
                // What tiles have stored cannot be read at once, so the next sums are made before those at hand are scaled.
                self.multiply_four(tiles, t, panel, 0, &mut sums.0[0]);
                for first in (0..self.blocks).step_by(4) {
                    if first + 4 < self.blocks {
                        self.multiply_four(tiles, t, panel, first + 4, &mut sums.0[(first / 4 + 1) % 2]);
                    }
                    self.add_four::<OFFSETS>(panel, first, &sums.0[first / 4 % 2], &mut results);
                }
                let lanes = self.panels.lanes(panel);
                for (m, &result) in results[..rows].iter().enumerate() {
                    _mm512_mask_storeu_ps(self.out.add((t + m) * self.out_stride + panel * ROWS), lanes, result);
                }
            }
        }
    }

    /// The sums of four blocks, or of those that are left.
    #[inline(always)]
    unsafe fn multiply_four<T: Tiles>(&self, tiles: &mut T, t: usize, panel: usize, first: usize, sums: &mut Four) {
        unsafe {
            let left = self.blocks - first;
            let x = self.quants(t).add(first * 32);
            let weights = self.panels.get(panel).0.add(first * 8 * ROW);
            let stride = self.x_stride * 4;
            multiply_four(tiles, left, (x, stride), weights, sums);
        }
    }

    /// Adds what they are worth to the results.
    #[inline(always)]
    unsafe fn add_four<const OFFSETS: bool>(&self, panel: usize, first: usize, sums: &Four, results: &mut [__m512; 16]) {
        unsafe {
            let (_, w_scales, w_offsets) = self.panels.get(panel);
            let (turned_scales, turned_sums) = (self.turned.as_ptr(), self.turned.as_ptr().add(self.blocks * ROWS));
            for (b, sums) in (first..self.blocks).zip(sums) {
                let w_scales = _mm512_loadu_ps(w_scales.add(b * ROWS));
                for (m, result) in results.iter_mut().enumerate() {
                    let scale = _mm512_mul_ps(w_scales, _mm512_set1_ps(*turned_scales.add(b * ROWS + m)));
                    *result = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_loadu_si512(sums[m].as_ptr().cast())), scale, *result);
                }
                if OFFSETS {
                    let offsets = _mm512_loadu_ps(w_offsets.add(b * ROWS));
                    for (m, result) in results.iter_mut().enumerate() {
                        *result = _mm512_fmadd_ps(offsets, _mm512_set1_ps(*turned_sums.add(b * ROWS + m)), *result);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tiles::Model, *};
    use crate::{
        kernels::integer::{self, activation::Layout, panel_scratch},
        matrix::{
            Matrix,
            tests::{Noise, random_tensor},
        },
        pool::Pool,
        work::{Tiles, for_each},
    };
    use qhx_ir::Encoding;

    /// What [`matrix_products`] does, with a model of the tiles where the CPU has none, gives the very bits of AVX-512 VNNI.
    #[test]
    fn same_bits_as_vnni() {
        let Some(vnni) = Instructions::new(InstructionSet::Avx512Vnni) else {
            return println!("this CPU has no AVX-512: not run");
        };
        let (mut noise, pool) = (Noise::new(7), Pool::new(1).unwrap());
        for encoding in Encoding::all().into_iter().filter(|e| !e.is_float()) {
            for (rows, columns) in [(1, 1), (16, 64), (17, 33), (32, 192), (33, 130), (50, 576)] {
                let matrix = Matrix::new(random_tensor(encoding, &[rows, columns], &mut noise));
                for (count, by_row) in [(1, true), (9, false), (16, true), (17, true), (31, false), (33, true), (48, false), (70, true)] {
                    let layout = Layout::new(columns);
                    let mut numbers = vec![0.0; count * layout.width()];
                    for out in numbers.chunks_mut(layout.width()) {
                        layout.quantise(vnni, by_row, &noise.floats(columns), out);
                    }
                    let x = ActivationRows { layout, numbers: &numbers, stride: layout.width(), by_row, packed: None };
                    let w = matrix.integer_rows(0..rows).unwrap();
                    let mut scratch = vec![f32::NAN; panel_scratch(rows, columns)];
                    let mut tiled = |body: &(dyn Fn(&mut Tile<'_, f32>, &mut [f32]) + Sync)| {
                        let mut out = vec![f32::NAN; count * rows];
                        for_each(&pool, Tiles::new(&mut out, rows, count, rows), &mut scratch, |_, mut tile, scratch| {
                            body(&mut tile, scratch);
                        });
                        out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                    };
                    let wanted = tiled(&|tile, scratch| integer::matrix_products(vnni, &w, &x, 0, tile, scratch));
                    let found = tiled(&|tile, scratch| match Instructions::new(InstructionSet::Avx512Amx) {
                        Some(amx) => integer::matrix_products(amx, &w, &x, 0, tile, scratch),
                        None if w.stored == Stored::I8Block16 => integer::matrix_products(vnni, &w, &x, 0, tile, scratch),
                        // SAFETY: the CPU has AVX-512, and the model needs no more; weights and rows were made to measure.
                        None => unsafe { Product::new(&w, &x, 0, tile, scratch).run(&mut Model::new()) },
                    });
                    assert!(found == wanted, "{encoding} {rows}x{columns}, {count} rows, {by_row}");
                }
            }
        }
    }
}

//! A few activation rows against stored rows, with AMX: sixteen stored rows are the left side of a product just as they lie in memory (int4 and int6 quants are unpacked
//! first), and the activation rows, sixteen at most, are its right side, packed once for the whole matrix.
//!
//! Sums, scales and the order of f32 sums are those of AVX-512 VNNI, so the results are the same to the last bit.

use super::{
    dots::{Group, products_vnni},
    needs,
    panels::{ROWS, scales_of, side_by_side, sixes, transposed},
    tiles::{ROW, Registers, Shape, Sums, Tiles, multiply_four},
};
use crate::{
    kernels::{
        InstructionSet, Instructions,
        integer::{ActivationRows, Offsets, Weights, whole_rows},
        quants::{I6_BYTES, Stored},
    },
    work::Tile,
};
use std::arch::x86_64::*;

/// The least and the most activation rows for which tiles are used.
pub(in super::super) const LEAST: usize = WORTH_TILES;
pub(in super::super) const MOST: usize = 16;

/// Numbers of room for packed rows of `columns`.
pub(in super::super) fn room(columns: usize) -> usize {
    let blocks = columns.div_ceil(32);
    // Quants, then scales and sums of blocks.
    blocks.next_multiple_of(2) * 8 * ROWS + 2 * blocks * ROWS
}

/// Packs `count` activation rows from `first` on: four quants of each row next to each other, then the next four of each; then, in the same way, their scales and
/// the sums of their blocks. The row beyond the last is the last one again.
pub(in super::super) fn pack(instructions: Instructions, x: &ActivationRows<'_>, first: usize, count: usize, room: &mut [f32]) {
    needs(instructions, InstructionSet::Avx512Amx);
    assert!((1..=MOST).contains(&count) && room.len() == self::room(x.layout.columns()), "room for other rows");
    // Checks that the last one is there.
    let _ = x.row(first + count - 1);
    // SAFETY: the CPU has AVX-512; all rows are there, padded to whole vectors.
    unsafe { pack_rows(x, first, count, room) }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn pack_rows(x: &ActivationRows<'_>, first: usize, count: usize, room: &mut [f32]) {
    let blocks = x.layout.columns().div_ceil(32);
    let (sample, stride) = (x.row(first), x.stride);
    let (quants, rest) = room.split_at_mut(blocks.next_multiple_of(2) * 8 * ROWS);
    let (scales, sums) = rest.split_at_mut(blocks * ROWS);
    // SAFETY: the caller's promise.
    unsafe {
        let of = |start: *const f32, r: usize, step: usize| _mm512_loadu_si512(start.add(r.min(count - 1) * stride + step * 16).cast());
        side_by_side(quants, |r, step| of(sample.quants.as_ptr().cast(), r, step));
        side_by_side(scales, |r, step| of(sample.scales.as_ptr(), r, step));
        side_by_side(sums, |r, step| of(sample.sums32.as_ptr(), r, step));
    }
}

/// From so many rows on, tiles are faster than vectors: with one sum over each row, and with one for each block.
const WORTH_TILES: usize = 4;
const WORTH_TILES_BY_BLOCK: usize = 6;

/// See [`crate::kernels::integer::products`], which checked the lengths.
pub(in super::super) fn products(
    instructions: Instructions,
    w: &Weights<'_>,
    x: &ActivationRows<'_>,
    first: usize,
    tile: &mut Tile<'_, f32>,
    scratch: &mut [f32],
) {
    needs(instructions, InstructionSet::Avx512Amx);
    let least = if whole_rows(w, x.by_row) { WORTH_TILES } else { WORTH_TILES_BY_BLOCK };
    let packed = match x.packed {
        // With a scale for each 16 quants three quarters of a tile would be empty.
        _ if w.stored == Stored::I8Block16 || !(least..=MOST).contains(&tile.rows) => None,
        Some(packed) if first == 0 => Some(packed),
        _ => {
            let room = &mut scratch[..room(x.layout.columns())];
            pack(instructions, x, first, tile.rows, room);
            Some(&*room)
        }
    };
    let Some(packed) = packed else { return products_vnni(instructions, w, x, first, tile) };
    assert!(packed.len() == room(w.blocks * 32), "rows that are packed for other weights");
    // SAFETY: the CPU has AVX-512 and AMX; lengths were checked.
    unsafe { Product::new(w, x.by_row, packed, tile).run(&mut Registers) }
}

struct Product<'a> {
    w: &'a Weights<'a>,
    /// One sum over each row, not one for each block.
    whole: bool,
    quants: *const u8,
    scales: *const f32,
    sums: *const f32,
    out: *mut f32,
    out_stride: usize,
    /// Activation rows.
    count: usize,
}

/// Room for four blocks of sixteen stored rows, unpacked, and for their sums.
#[repr(align(64))]
struct Room {
    unpacked: [[[u8; 2 * ROW]; ROWS]; 2],
    sums: [[Sums; 4]; 2],
}

/// How blocks are stored, as a constant of functions: int8 as tiles take it, int4 and int6 to be unpacked.
const BYTES: usize = 0;
const NIBBLES: usize = 1;
const SIXES: usize = 2;

/// Blocks that are multiplied before their sums are scaled.
const FOUR: usize = 4;
/// Blocks whose scales are put side by side at once.
const CHUNK: usize = 16;

#[allow(clippy::undocumented_unsafe_blocks, clippy::needless_range_loop)] // SAFETY: see the call above.
impl<'a> Product<'a> {
    fn new(w: &'a Weights<'a>, by_row: bool, packed: &'a [f32], tile: &'a mut Tile<'_, f32>) -> Self {
        let (quants, rest) = packed.split_at(w.blocks.next_multiple_of(2) * 8 * ROWS);
        let (scales, sums) = rest.split_at(w.blocks * ROWS);
        let (out, out_stride) = tile.as_mut_ptr();
        Self {
            w,
            whole: whole_rows(w, by_row),
            quants: quants.as_ptr().cast(),
            scales: scales.as_ptr(),
            sums: sums.as_ptr(),
            out,
            out_stride,
            count: tile.rows,
        }
    }

    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn run<T: Tiles>(&self, tiles: &mut T) {
        let mut room = Room { unpacked: [[[0; 2 * ROW]; ROWS]; 2], sums: [[[[0; ROWS]; ROWS]; 4]; 2] };
        // Stored rows of a tile. The last group may take some rows again.
        let height = self.w.rows.min(ROWS);
        unsafe {
            tiles.shape(&Shape::new(height, self.count, if self.whole { ROW } else { ROW / 2 }));
            for start in (0..self.w.rows).step_by(ROWS) {
                let rows = Group::new(self.w, start.min(self.w.rows - height));
                let results = match (self.whole, self.w.stored, &self.w.offsets) {
                    (true, ..) => self.whole(tiles, &rows, &mut room.sums[0]),
                    (_, Stored::I4Block32, Offsets::Min(_)) => self.blocks::<T, NIBBLES, true>(tiles, &rows, &mut room),
                    (_, Stored::I4Block32, _) => self.blocks::<T, NIBBLES, false>(tiles, &rows, &mut room),
                    (_, Stored::I6Block32, _) => self.blocks::<T, SIXES, false>(tiles, &rows, &mut room),
                    (_, _, Offsets::None) => self.blocks::<T, BYTES, false>(tiles, &rows, &mut room),
                    _ => self.blocks::<T, BYTES, true>(tiles, &rows, &mut room),
                };
                let lanes = ((1u32 << height) - 1) as __mmask16;
                for (t, result) in results.into_iter().enumerate().take(self.count) {
                    _mm512_mask_storeu_ps(self.out.add(t * self.out_stride + rows.rows[0]), lanes, _mm512_castsi512_ps(result));
                }
            }
            tiles.release();
        }
    }

    /// The results of a group, a vector for each activation row, with one sum over each stored row.
    #[inline(always)]
    unsafe fn whole<T: Tiles>(&self, tiles: &mut T, rows: &Group<'_, ROWS>, sums: &mut [Sums; 4]) -> [__m512i; ROWS] {
        let (w, stride) = (rows.quants[0], self.w.stride);
        unsafe {
            // Two sums at a time: one product does not wait for the one before it.
            tiles.zero::<0>();
            tiles.zero::<1>();
            let steps = (self.w.blocks * 32).div_ceil(ROW);
            for step in 0..steps {
                rows.fetch_beside(step * ROW);
                if step % 2 == 0 {
                    tiles.load::<4>(w.add(step * ROW), stride);
                    tiles.load::<6>(self.quants.add(step * 16 * ROW), ROW);
                    tiles.multiply::<0, 4, 6>();
                } else {
                    tiles.load::<5>(w.add(step * ROW), stride);
                    tiles.load::<7>(self.quants.add(step * 16 * ROW), ROW);
                    tiles.multiply::<1, 5, 7>();
                }
            }
            tiles.store::<0>(sums[0].as_mut_ptr().cast());
            tiles.store::<1>(sums[1].as_mut_ptr().cast());
            let mut totals = [_mm512_setzero_si512(); ROWS];
            for r in 0..ROWS {
                totals[r] = _mm512_add_epi32(load(&sums[0][r]), load(&sums[1][r]));
            }
            let scales = rows.rows.map(|row| self.w.scales.get(row, 0));
            let w_scales = _mm512_loadu_ps(scales.as_ptr());
            let mut results = transposed(totals);
            for t in 0..self.count {
                let scale = _mm512_mul_ps(w_scales, _mm512_set1_ps(*self.scales.add(t)));
                results[t] = _mm512_castps_si512(_mm512_mul_ps(_mm512_cvtepi32_ps(results[t]), scale));
            }
            results
        }
    }

    /// The results of a group, a vector for each activation row, with a sum for each block.
    #[inline(always)]
    unsafe fn blocks<T: Tiles, const STORED: usize, const OFFSETS: bool>(
        &self,
        tiles: &mut T,
        rows: &Group<'_, ROWS>,
        room: &mut Room,
    ) -> [__m512i; ROWS] {
        let blocks = self.w.blocks;
        unsafe {
            let mut results = [_mm512_setzero_ps(); ROWS];
            let (mut scales, mut offsets) = ([0.0f32; CHUNK * ROWS], [0.0f32; CHUNK * ROWS]);
            // What was just stored cannot be read at once, so each four blocks are unpacked, multiplied and scaled in turns with those before and after them.
            if STORED != BYTES {
                unpack::<STORED>(rows, 0, &mut room.unpacked[0]);
                unpack::<STORED>(rows, FOUR.min(blocks - 1) / FOUR * FOUR, &mut room.unpacked[1]);
            }
            self.multiply::<T, STORED>(tiles, rows, 0, &room.unpacked[0], &mut room.sums[0]);
            for first in (0..blocks).step_by(FOUR) {
                let (this, other) = (first / FOUR % 2, (first / FOUR + 1) % 2);
                if STORED != BYTES && first + 2 * FOUR < blocks {
                    unpack::<STORED>(rows, first + 2 * FOUR, &mut room.unpacked[this]);
                }
                if first + FOUR < blocks {
                    self.multiply::<T, STORED>(tiles, rows, first + FOUR, &room.unpacked[other], &mut room.sums[other]);
                }
                if first % CHUNK == 0 {
                    side_by_side(&mut scales, |r, _| scales_of(&self.w.scales, rows.rows[r], first / CHUNK));
                    if let Offsets::Min(mins) = &self.w.offsets {
                        side_by_side(&mut offsets, |r, _| scales_of(mins, rows.rows[r], first / CHUNK));
                    }
                }
                for (b, sums) in (first..blocks).zip(&room.sums[this]) {
                    let at = b % CHUNK * ROWS;
                    let x_scales = _mm512_loadu_ps(self.scales.add(b * ROWS));
                    for r in 0..ROWS {
                        let scale = _mm512_mul_ps(_mm512_set1_ps(scales[at + r]), x_scales);
                        results[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(load(&sums[r])), scale, results[r]);
                    }
                    if OFFSETS {
                        let x_sums = _mm512_loadu_ps(self.sums.add(b * ROWS));
                        for r in 0..ROWS {
                            results[r] = _mm512_fmadd_ps(_mm512_set1_ps(offsets[at + r]), x_sums, results[r]);
                        }
                    }
                }
            }
            let mut words = [_mm512_setzero_si512(); ROWS];
            for r in 0..ROWS {
                words[r] = _mm512_castps_si512(results[r]);
            }
            transposed(words)
        }
    }

    /// The sums of four blocks from `first` on, or of those that are left.
    #[inline(always)]
    unsafe fn multiply<T: Tiles, const STORED: usize>(
        &self,
        tiles: &mut T,
        rows: &Group<'_, ROWS>,
        first: usize,
        unpacked: &[[u8; 2 * ROW]; ROWS],
        sums: &mut [Sums; 4],
    ) {
        unsafe {
            let left = self.w.blocks - first;
            let (w, stride) = match STORED {
                NIBBLES | SIXES => (unpacked.as_ptr().cast::<u8>(), 2 * ROW),
                _ => (rows.quants[0].add(first * 32), self.w.stride),
            };
            if STORED == BYTES {
                rows.fetch_beside(first * 32);
                rows.fetch_beside(first * 32 + ROW);
            }
            let x = self.quants.add(first * 8 * ROW);
            multiply_four(tiles, left, (w, stride), x, sums);
        }
    }
}

/// Four blocks of each row in order, as signed bytes: int4 with a minimum from 0 to 15.
#[inline(always)]
#[allow(clippy::undocumented_unsafe_blocks)] // SAFETY: see the call above.
unsafe fn unpack<const STORED: usize>(rows: &Group<'_, ROWS>, first: usize, out: &mut [[u8; 2 * ROW]; ROWS]) {
    unsafe {
        if STORED == SIXES {
            let (at, blocks) = (first * I6_BYTES, rows.w.blocks - first);
            rows.fetch_beside(at);
            rows.fetch_beside(at + ROW);
            for (r, out) in out.iter_mut().enumerate() {
                let from = rows.quants[r].add(at);
                _mm512_storeu_si512(out.as_mut_ptr().cast(), sixes(from, blocks));
                _mm512_storeu_si512(out.as_mut_ptr().add(ROW).cast(), sixes(from.add(2 * I6_BYTES), blocks.saturating_sub(2)));
            }
            return;
        }
        rows.fetch_beside(first * 16);
        let (low, excess) = (_mm512_set1_epi8(15), _mm512_set1_epi8(if rows.w.has_minima() { 0 } else { 8 }));
        // The sixteen low halves of each block stand before its high ones.
        let (front, back) = (_mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15));
        for (r, out) in out.iter_mut().enumerate() {
            let both = _mm512_loadu_si512(rows.quants[r].add(first * 16).cast());
            let (lows, highs) = (_mm512_and_si512(both, low), _mm512_and_si512(_mm512_srli_epi16::<4>(both), low));
            let (lows, highs) = (_mm512_sub_epi8(lows, excess), _mm512_sub_epi8(highs, excess));
            _mm512_storeu_si512(out.as_mut_ptr().cast(), _mm512_permutex2var_epi64(lows, front, highs));
            _mm512_storeu_si512(out.as_mut_ptr().add(ROW).cast(), _mm512_permutex2var_epi64(lows, back, highs));
        }
    }
}

#[inline(always)]
#[allow(clippy::undocumented_unsafe_blocks)] // SAFETY: a whole vector.
unsafe fn load(words: &[i32; ROWS]) -> __m512i {
    unsafe { _mm512_loadu_si512(words.as_ptr().cast()) }
}

#[cfg(test)]
mod tests {
    use super::{super::tiles::Model, *};
    use crate::{
        kernels::integer::{self, activation::Layout},
        matrix::{
            Matrix,
            tests::{Noise, random_tensor},
        },
        pool::Pool,
        work::{Tiles, for_each},
    };
    use qhx_ir::Encoding;

    /// The kernel, with a model of the tiles where the CPU has none, gives the very bits of AVX-512 VNNI.
    #[test]
    fn same_bits_as_vnni() {
        let Some(vnni) = Instructions::new(InstructionSet::Avx512Vnni) else {
            return println!("this CPU has no AVX-512: not run");
        };
        let (mut noise, pool) = (Noise::new(9), Pool::new(1).unwrap());
        let encodings = Encoding::all().into_iter().filter(|e| !e.is_float());
        for encoding in encodings {
            for (rows, columns) in [(1, 1), (16, 64), (17, 33), (9, 192), (33, 130), (50, 576)] {
                let matrix = Matrix::new(random_tensor(encoding, &[rows, columns], &mut noise));
                let w = matrix.integer_rows(0..rows).unwrap();
                if w.stored == Stored::I8Block16 {
                    continue;
                }
                for (count, by_row) in [(1, true), (4, false), (7, true), (8, false), (15, true), (16, false), (16, true)] {
                    let layout = Layout::new(columns);
                    let mut numbers = vec![0.0; count * layout.width()];
                    for out in numbers.chunks_mut(layout.width()) {
                        layout.quantise(vnni, by_row, &noise.floats(columns), out);
                    }
                    let x = ActivationRows { layout, numbers: &numbers, stride: layout.width(), by_row, packed: None };
                    let mut packed = vec![f32::NAN; room(columns)];
                    // SAFETY: the CPU has AVX-512; there are so many rows.
                    unsafe { pack_rows(&x, 0, count, &mut packed) };
                    let tiled = |body: &(dyn Fn(&mut Tile<'_, f32>) + Sync)| {
                        let mut out = vec![f32::NAN; count * rows];
                        for_each(&pool, Tiles::new(&mut out, rows, count, rows), &mut [], |_, mut tile, _| body(&mut tile));
                        out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                    };
                    let wanted = tiled(&|tile| integer::products(vnni, &w, &x, 0, tile, &mut []));
                    // SAFETY: the CPU has AVX-512, and the model needs no more; weights and rows were made to measure.
                    let modelled = tiled(&|tile| unsafe { Product::new(&w, by_row, &packed, tile).run(&mut Model::new()) });
                    assert!(modelled == wanted, "{encoding} {rows}x{columns}, {count} rows, {by_row}, modelled");
                    if Instructions::new(InstructionSet::Avx512Amx).is_none() {
                        continue;
                    }
                    // SAFETY: as above, and the CPU has tiles.
                    let found = tiled(&|tile| unsafe { Product::new(&w, by_row, &packed, tile).run(&mut Registers) });
                    assert!(found == wanted, "{encoding} {rows}x{columns}, {count} rows, {by_row}");
                }
            }
        }
    }
}

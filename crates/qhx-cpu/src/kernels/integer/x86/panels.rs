//! Panels of sixteen stored rows side by side, as AVX-512 VNNI and AMX take them.
//!
//! Four quants of each row stand next to each other, then the next four of each: sixteen words of 32 bits make a vector, sixteen vectors a tile. Scales and
//! offsets follow in the same way, sixteen for each block.

use crate::kernels::{
    integer::{Offsets, Scales, Weights},
    quants::{I6_BYTES, Stored},
};
use std::arch::x86_64::*;

/// Rows of a panel.
pub(super) const ROWS: usize = 16;

/// Packed panels, all for the same blocks.
pub(super) struct Panels {
    start: *const f32,
    /// Numbers of a panel: quants, then scales, then offsets.
    size: usize,
    scales: usize,
    offsets: usize,
    /// Weight rows in all panels.
    rows: usize,
}

/// What sums are made of.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Bytes {
    /// As they are; int4 with a minimum from 0 to 15.
    Signed,
    /// int6 and int8 plus 128, int4 from 0 to 15.
    Shifted,
}

impl Panels {
    /// Packs all rows of `w` into `scratch` and gives what of it is left. For sums over `whole` rows one scale of each is enough.
    ///
    /// # Safety
    /// The CPU has AVX-512 F and F16C; `w` was checked.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
    pub(super) unsafe fn pack<'a>(w: &Weights<'_>, bytes: Bytes, whole: bool, scratch: &'a mut [f32]) -> (Self, &'a mut [f32]) {
        // Int4 quants and those of blocks of 16 end within a tile where blocks are odd in number.
        let scales = ROWS * (w.blocks * w.stored.block() / 4).next_multiple_of(16);
        let offsets = scales + w.blocks * ROWS;
        let size = offsets + w.blocks * ROWS;
        let panels = w.rows.div_ceil(ROWS);
        let (room, rest) = scratch.split_at_mut(panels * size);
        for (panel, room) in room.chunks_exact_mut(size).enumerate() {
            let (quants, room) = room.split_at_mut(scales);
            let (scales, offsets) = room.split_at_mut(w.blocks * ROWS);
            // A row beyond the last is the last one again: its results are not written.
            let row = |r: usize| (panel * ROWS + r).min(w.rows - 1);
            // SAFETY: rows are padded to whole cache lines, rows of scales to sixteens.
            unsafe {
                side_by_side(quants, |r, step| sixty_four(w, row(r), step, bytes));
                if whole {
                    side_by_side(&mut scales[..ROWS], |r, step| scales_of(&w.scales, row(r), step));
                    continue;
                }
                side_by_side(scales, |r, step| scales_of(&w.scales, row(r), step));
                if let Offsets::Min(mins) = &w.offsets {
                    side_by_side(offsets, |r, step| scales_of(mins, row(r), step));
                }
            }
        }
        (Self { start: room.as_ptr(), size, scales, offsets, rows: w.rows }, rest)
    }

    /// Panels.
    pub(super) fn count(&self) -> usize {
        self.rows.div_ceil(ROWS)
    }

    /// Quants, scales and offsets of a panel.
    #[inline(always)]
    pub(super) fn get(&self, panel: usize) -> (*const u8, *const f32, *const f32) {
        let start = self.start.wrapping_add(panel * self.size);
        (start.cast(), start.wrapping_add(self.scales), start.wrapping_add(self.offsets))
    }

    /// The rows of a panel that are there.
    #[inline(always)]
    pub(super) fn lanes(&self, panel: usize) -> __mmask16 {
        ((1u32 << (self.rows - panel * ROWS).min(ROWS)) - 1) as __mmask16
    }
}

// SAFETY of all blocks below: the callers promise AVX-512 and that what is asked for may be read.

/// Fills `out` with sixteens of words: the first word of each of sixteen rows, then the second of each and so on. `get` gives the words from `16 · step` on of a row.
#[inline(always)]
#[allow(clippy::undocumented_unsafe_blocks)]
pub(super) unsafe fn side_by_side(out: &mut [f32], get: impl Fn(usize, usize) -> __m512i) {
    for (step, out) in out.chunks_mut(ROWS * 16).enumerate() {
        unsafe {
            let mut rows = [_mm512_setzero_si512(); ROWS];
            for (r, row) in rows.iter_mut().enumerate() {
                *row = get(r, step);
            }
            for (column, out) in transposed(rows).into_iter().zip(out.chunks_exact_mut(ROWS)) {
                _mm512_storeu_si512(out.as_mut_ptr().cast(), column);
            }
        }
    }
}

/// Sixteen rows of sixteen words become sixteen columns.
#[inline(always)]
#[allow(clippy::undocumented_unsafe_blocks)]
pub(super) unsafe fn transposed(rows: [__m512i; 16]) -> [__m512i; 16] {
    unsafe {
        // Four rows: in each quarter of a vector, column `c` of the quarter's four, of all four rows.
        let mut fours = [[_mm512_setzero_si512(); 4]; 4];
        for (four, rows) in fours.iter_mut().zip(rows.as_chunks::<4>().0) {
            let (low, high) = (_mm512_unpacklo_epi32(rows[0], rows[1]), _mm512_unpackhi_epi32(rows[0], rows[1]));
            let (low2, high2) = (_mm512_unpacklo_epi32(rows[2], rows[3]), _mm512_unpackhi_epi32(rows[2], rows[3]));
            four[0] = _mm512_unpacklo_epi64(low, low2);
            four[1] = _mm512_unpackhi_epi64(low, low2);
            four[2] = _mm512_unpacklo_epi64(high, high2);
            four[3] = _mm512_unpackhi_epi64(high, high2);
        }
        let mut columns = rows;
        for c in 0..4 {
            let [a, b, d, e] = [fours[0][c], fours[1][c], fours[2][c], fours[3][c]];
            let (first, second) = (_mm512_shuffle_i32x4::<0x44>(a, b), _mm512_shuffle_i32x4::<0x44>(d, e));
            let (third, fourth) = (_mm512_shuffle_i32x4::<0xee>(a, b), _mm512_shuffle_i32x4::<0xee>(d, e));
            columns[c] = _mm512_shuffle_i32x4::<0x88>(first, second);
            columns[4 + c] = _mm512_shuffle_i32x4::<0xdd>(first, second);
            columns[8 + c] = _mm512_shuffle_i32x4::<0x88>(third, fourth);
            columns[12 + c] = _mm512_shuffle_i32x4::<0xdd>(third, fourth);
        }
        columns
    }
}

/// Quants `64 · step ..` of a row.
#[inline(always)]
#[allow(clippy::undocumented_unsafe_blocks)]
unsafe fn sixty_four(w: &Weights<'_>, row: usize, step: usize, bytes: Bytes) -> __m512i {
    unsafe {
        let data = w.data.as_ptr().add(row * w.stride);
        if w.stored == Stored::I4Block32 {
            // Two blocks: the sixteen low halves of each stand before its high ones.
            let both = _mm512_castsi256_si512(_mm256_loadu_si256(data.add(step * 32).cast()));
            let twice = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3), both);
            let halves = _mm512_srlv_epi64(twice, _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4));
            let nibbles = _mm512_and_si512(halves, _mm512_set1_epi8(15));
            return match bytes {
                Bytes::Signed if !w.has_minima() => _mm512_sub_epi8(nibbles, _mm512_set1_epi8(8)),
                _ => nibbles,
            };
        }
        let quants = match w.stored {
            Stored::I6Block32 => sixes(data.add(step * 2 * I6_BYTES), w.blocks - 2 * step),
            _ => _mm512_loadu_si512(data.add(step * 64).cast()),
        };
        match bytes {
            Bytes::Signed => quants,
            Bytes::Shifted => _mm512_xor_si512(quants, _mm512_set1_epi8(-128)),
        }
    }
}

/// Two int6 blocks as signed bytes, in order. Only the first `blocks` of them are read; others are anything.
#[inline(always)]
#[allow(clippy::undocumented_unsafe_blocks)]
pub(super) unsafe fn sixes(from: *const u8, blocks: usize) -> __m512i {
    unsafe {
        // A block is three words of 64 bits: two of low bits and one of top bits.
        let stored = _mm512_maskz_loadu_epi64(((1u32 << (3 * blocks.min(2))) - 1) as __mmask8, from.cast());
        let low = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 0, 1, 3, 4, 3, 4), stored);
        let low = _mm512_srlv_epi64(low, _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4));
        let top = _mm512_permutexvar_epi64(_mm512_setr_epi64(2, 2, 2, 2, 5, 5, 5, 5), stored);
        // The pairs of bits of eight numbers, of the eight after them and so on, each to where the low bits end.
        let top = _mm512_rolv_epi64(top, _mm512_setr_epi64(4, 2, 0, 62, 4, 2, 0, 62));
        let low = _mm512_and_si512(low, _mm512_set1_epi8(15));
        _mm512_sub_epi8(_mm512_or_si512(low, _mm512_and_si512(top, _mm512_set1_epi8(0x30))), _mm512_set1_epi8(32))
    }
}

/// Scales of the blocks `16 · step ..` of a row.
#[inline(always)]
#[allow(clippy::undocumented_unsafe_blocks)]
pub(super) unsafe fn scales_of(scales: &Scales<'_>, row: usize, step: usize) -> __m512i {
    unsafe {
        _mm512_castps_si512(match *scales {
            Scales::Row(scales) => _mm512_set1_ps(scales[row]),
            Scales::F16(scales, stride) => _mm512_cvtph_ps(_mm256_loadu_si256(scales.as_ptr().add(row * stride + step * 16).cast())),
            Scales::F32(scales, stride) => _mm512_loadu_ps(scales.as_ptr().add(row * stride + step * 16)),
        })
    }
}

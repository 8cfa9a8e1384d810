//! Many activation rows against panels of eight stored rows.
//!
//! A panel holds its rows side by side as signed bytes, some quants of each row next to each other, as the [level](super::multiply::Multiply) wants them.

use super::multiply::Multiply;
use crate::{
    kernels::{
        integer::{ActivationRows, Offsets, Weights, whole_rows},
        quants::{I6_BYTES, Stored, sixes},
    },
    work::Tile,
};
use std::{arch::aarch64::*, marker::PhantomData};

/// Rows of a panel.
const ROWS: usize = 8;

/// Packed panels, activation rows, and where results go.
pub(super) struct Product<'a> {
    panels: *const f32,
    /// Numbers of a panel: quants, then scales, then offsets.
    size: usize,
    /// Where its scales begin.
    scales: usize,
    /// Where its offsets begin.
    offsets: usize,
    /// Weight rows in all panels.
    rows: usize,
    blocks: usize,
    stored: Stored,
    has_offsets: bool,
    /// Whether sums run over whole rows.
    whole: bool,
    /// The first activation row; the others are a stride of f32 numbers apart.
    x: *const i8,
    x_scales: *const f32,
    x_sums: *const f32,
    x_stride: usize,
    out: *mut f32,
    out_stride: usize,
    /// Activation rows.
    count: usize,
    borrowed: PhantomData<&'a [f32]>,
}

impl<'a> Product<'a> {
    /// Packs all rows of `w` into `scratch`, with `GROUP` quants (four or eight) of a row next to each other.
    pub(super) fn pack<const GROUP: usize>(
        w: &Weights<'_>,
        x: &'a ActivationRows<'_>,
        first: usize,
        tile: &'a mut Tile<'_, f32>,
        scratch: &'a mut [f32],
    ) -> Self {
        // A byte for each quant of eight rows.
        let scales = w.blocks * w.stored.block() * ROWS / 4;
        let offsets = scales + w.blocks * ROWS;
        let size = offsets + w.blocks * ROWS;
        let panels = w.rows.div_ceil(ROWS);
        for (panel, room) in scratch[..panels * size].chunks_mut(size).enumerate() {
            pack_panel::<GROUP>(w, panel * ROWS, (w.rows - panel * ROWS).min(ROWS), room);
        }
        let sample = x.row(first);
        let (out, out_stride) = tile.as_mut_ptr();
        Self {
            panels: scratch.as_ptr(),
            size,
            scales,
            offsets,
            rows: w.rows,
            blocks: w.blocks,
            stored: w.stored,
            has_offsets: !matches!(w.offsets, Offsets::None),
            whole: whole_rows(w, x.by_row),
            x: sample.quants.as_ptr(),
            x_scales: sample.scales.as_ptr(),
            x_sums: if w.stored == Stored::I8Block16 { sample.sums16.as_ptr() } else { sample.sums32.as_ptr() },
            x_stride: x.stride,
            out,
            out_stride,
            count: tile.rows,
            borrowed: PhantomData,
        }
    }
}

/// Puts rows side by side, then their scales and offsets. Rows beyond `rows` keep what they are: their results are not written.
fn pack_panel<const GROUP: usize>(w: &Weights<'_>, first: usize, rows: usize, room: &mut [f32]) {
    let (quants, rest) = room.split_at_mut(w.blocks * w.stored.block() * ROWS / 4);
    let (scales, offsets) = rest.split_at_mut(w.blocks * ROWS);
    let quants: &mut [u8] = bytemuck::cast_slice_mut(quants);
    let (eights, _) = quants.as_chunks_mut::<{ 8 * ROWS }>();
    for r in 0..rows {
        let data = &w.data[(first + r) * w.stride..][..w.stored.bytes(w.blocks)];
        // Eight quants of this row.
        let mut put = |eight: usize, quants: u64| {
            let (to, bytes) = (&mut eights[eight], quants.to_le_bytes());
            if GROUP == 8 {
                to[r * 8..][..8].copy_from_slice(&bytes);
            } else {
                to[r * 4..][..4].copy_from_slice(&bytes[..4]);
                to[(ROWS + r) * 4..][..4].copy_from_slice(&bytes[4..]);
            }
        };
        let words = data.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).enumerate();
        match w.stored {
            // The sixteen low halves of a block stand before its high ones.
            Stored::I4Block32 => words.for_each(|(i, word)| {
                const LOW: u64 = 0x0f0f_0f0f_0f0f_0f0f;
                let at = i / 2 * 4 + i % 2;
                put(at, word & LOW);
                put(at + 2, word >> 4 & LOW);
            }),
            Stored::I6Block32 => {
                let blocks = data.as_chunks::<I6_BYTES>().0.iter();
                let words = blocks.flat_map(|block| bytemuck::cast::<_, [[u8; 8]; 4]>(sixes(block)));
                words.enumerate().for_each(|(i, word)| put(i, u64::from_le_bytes(word)));
            }
            Stored::I8Block16 | Stored::I8Block32 => words.for_each(|(i, word)| put(i, word)),
        }
        for b in 0..w.blocks {
            scales[b * ROWS + r] = w.scales.get(first + r, b);
            offsets[b * ROWS + r] = w.offset(first + r, b);
        }
    }
}

#[allow(clippy::undocumented_unsafe_blocks, clippy::needless_range_loop)] // SAFETY: what `run` asks.
impl Product<'_> {
    /// Computes the tile.
    ///
    /// # Safety
    /// The CPU has the instructions of `L`, and panels are packed as it wants them.
    #[inline(always)]
    pub(super) unsafe fn run<L: Multiply>(&self) {
        unsafe {
            match (self.stored, self.has_offsets) {
                (Stored::I4Block32, _) => self.all_rows::<L, 2, true, false>(),
                (Stored::I8Block32, false) if self.whole => self.all_rows::<L, 2, false, true>(),
                (Stored::I8Block32 | Stored::I6Block32, false) => self.all_rows::<L, 2, false, false>(),
                (Stored::I8Block32 | Stored::I6Block32, true) => self.all_rows::<L, 2, true, false>(),
                (Stored::I8Block16, false) => self.all_rows::<L, 1, false, false>(),
                (Stored::I8Block16, true) => self.all_rows::<L, 1, true, false>(),
            }
        }
    }

    #[inline(always)]
    unsafe fn all_rows<L: Multiply, const STEPS: usize, const OFFSETS: bool, const WHOLE: bool>(&self) {
        let mut t = 0;
        unsafe {
            while t < self.count {
                t += match self.count - t {
                    // Without sums beside the totals there are registers for more rows.
                    7.. if WHOLE => self.all_panels::<L, 8, STEPS, OFFSETS, WHOLE>(t),
                    3.. => self.all_panels::<L, 4, STEPS, OFFSETS, WHOLE>(t),
                    _ => self.all_panels::<L, 2, STEPS, OFFSETS, WHOLE>(t),
                };
            }
        }
    }

    /// `M` activation rows, which stay in the nearest cache, against all panels.
    #[inline(always)]
    unsafe fn all_panels<L: Multiply, const M: usize, const STEPS: usize, const OFFSETS: bool, const WHOLE: bool>(
        &self,
        t: usize,
    ) -> usize {
        for panel in 0..self.rows.div_ceil(ROWS) {
            unsafe { self.tile::<L, M, STEPS, OFFSETS, WHOLE>(t, panel) };
        }
        M
    }

    /// `M` activation rows (the last one again for those beyond the end); `STEPS` sixteens of quants share a scale, unless all of a row do (`WHOLE`).
    #[inline(always)]
    unsafe fn tile<L: Multiply, const M: usize, const STEPS: usize, const OFFSETS: bool, const WHOLE: bool>(&self, t: usize, panel: usize) {
        unsafe {
            let w_quants = self.panels.add(panel * self.size);
            let (w_scales, w_offsets) = (w_quants.add(self.scales), w_quants.add(self.offsets));
            let mut at = [0; M];
            for m in 0..M {
                at[m] = (t + m).min(self.count - 1);
            }
            let mut results = [[vdupq_n_f32(0.0); 2]; M];
            let mut totals = [[vdupq_n_s32(0); 2]; M];
            for b in 0..self.blocks {
                if !WHOLE {
                    totals = [[vdupq_n_s32(0); 2]; M];
                }
                for step in b * STEPS..(b + 1) * STEPS {
                    let mut x = [vdupq_n_s8(0); M];
                    for m in 0..M {
                        x[m] = vld1q_s8(self.x.add(at[m] * self.x_stride * 4 + step * 16));
                    }
                    L::sixteen(w_quants.cast::<i8>().add(step * 16 * ROWS), &x, &mut totals);
                }
                if WHOLE {
                    continue;
                }
                let totals = L::in_order(totals);
                let w_scales = pair(w_scales.add(b * ROWS));
                for m in 0..M {
                    let scale = *self.x_scales.add(at[m] * self.x_stride + b * STEPS / 2);
                    for v in 0..2 {
                        results[m][v] = vfmaq_f32(results[m][v], vcvtq_f32_s32(totals[m][v]), vmulq_n_f32(w_scales[v], scale));
                    }
                }
                if OFFSETS {
                    let offsets = pair(w_offsets.add(b * ROWS));
                    for m in 0..M {
                        let sum = *self.x_sums.add(at[m] * self.x_stride + b);
                        for v in 0..2 {
                            results[m][v] = vfmaq_n_f32(results[m][v], offsets[v], sum);
                        }
                    }
                }
            }
            if WHOLE {
                let totals = L::in_order(totals);
                let w_scales = pair(w_scales);
                for m in 0..M {
                    let scale = *self.x_scales.add(at[m] * self.x_stride);
                    for v in 0..2 {
                        results[m][v] = vmulq_f32(vcvtq_f32_s32(totals[m][v]), vmulq_n_f32(w_scales[v], scale));
                    }
                }
            }
            let lanes = (self.rows - panel * ROWS).min(ROWS);
            for m in 0..M {
                let to = self.out.add(at[m] * self.out_stride + panel * ROWS);
                if lanes == ROWS {
                    vst1q_f32(to, results[m][0]);
                    vst1q_f32(to.add(4), results[m][1]);
                } else {
                    let mut all = [0.0f32; ROWS];
                    vst1q_f32(all.as_mut_ptr(), results[m][0]);
                    vst1q_f32(all.as_mut_ptr().add(4), results[m][1]);
                    to.copy_from_nonoverlapping(all.as_ptr(), lanes);
                }
            }
        }
    }
}

/// One number for each row of a panel.
#[inline(always)]
unsafe fn pair(numbers: *const f32) -> [float32x4_t; 2] {
    // SAFETY: the caller's promise.
    unsafe { [vld1q_f32(numbers), vld1q_f32(numbers.add(4))] }
}

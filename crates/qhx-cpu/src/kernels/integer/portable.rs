//! Integer products without special instructions.

use super::{Offsets, Weights, activation::Row};
use crate::kernels::quants::Stored;

pub(super) fn products(w: &Weights<'_>, x: &Row<'_>, out: &mut [f32]) {
    let block = w.stored.block();
    for (row, out) in out.iter_mut().enumerate() {
        let data = &w.data[row * w.stride..][..w.stride];
        let mut sum = 0.0;
        for b in 0..w.blocks {
            let quants = &x.quants[b * block..][..block];
            let total: i32 = match w.stored {
                Stored::I4Block32 => {
                    let bytes = &data[b * 16..][..16];
                    let (low, high) = quants.split_at(16);
                    (0..16).map(|i| (bytes[i] & 15) as i32 * low[i] as i32 + (bytes[i] >> 4) as i32 * high[i] as i32).sum()
                }
                Stored::I8Block16 | Stored::I8Block32 => {
                    data[b * block..][..block].iter().zip(quants).map(|(&w, &x)| w as i8 as i32 * x as i32).sum()
                }
            };
            let scale = w.scales.get(row, b);
            sum += total as f32 * (scale * x.scales[b * block / 32]);
            let x_sum = if block == 16 { x.sums16[b] } else { x.sums32[b] };
            if !matches!(w.offsets, Offsets::None) {
                sum += w.offset(row, b) * x_sum;
            }
        }
        *out = sum;
    }
}

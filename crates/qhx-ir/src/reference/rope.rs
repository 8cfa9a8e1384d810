//! Rotary embedding.

use super::frame::Frame;
use crate::Name;

pub(super) fn rope(frame: &Frame<'_>, x: &Name, positions: &Name, rotary: &Name) -> Vec<f32> {
    let rotary = &frame.program.rotaries[rotary];
    let [rows, heads, dim] = *frame.shape(x) else { unreachable!("checked: [rows, heads, dim]") };
    let positions = frame.i32s(positions);
    let mut y = frame.f32s(x).to_vec();
    for row in 0..rows {
        let (variant, mut f) = (rotary.variant(frame.epoch(row)), 0);
        for &(start, length) in &rotary.blocks {
            for i in 0..length / 2 {
                // The angle is rounded to f32, as in every implementation of these models: large positions depend on it.
                let angle = positions[rotary.stream(f) * rows + row] as f32 * variant.inv_freq[f];
                let cos = (angle as f64).cos() as f32 * variant.amplitude;
                let sin = (angle as f64).sin() as f32 * variant.amplitude;
                for head in 0..heads {
                    let base = (row * heads + head) * dim + start + i;
                    let (a, b) = (y[base], y[base + length / 2]);
                    y[base] = (a as f64 * cos as f64 - b as f64 * sin as f64) as f32;
                    y[base + length / 2] = (b as f64 * cos as f64 + a as f64 * sin as f64) as f32;
                }
                f += 1;
            }
        }
    }
    y
}

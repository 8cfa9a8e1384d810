//! Norms over the last dimension.

use super::frame::Frame;
use crate::Name;

pub(super) fn rms_norm(frame: &Frame<'_>, x: &Name, weight: Option<&Name>, eps: f32) -> Vec<f32> {
    let n = frame.width(x);
    let weight = weight.map_or(vec![1.0; n], |w| frame.plain_weight(w));
    let normed = frame.f32s(x).chunks_exact(n).flat_map(|row| {
        let mean_square = row.iter().map(|&x| x as f64 * x as f64).sum::<f64>() / n as f64;
        let factor = 1.0 / (mean_square + eps as f64).sqrt();
        row.iter().zip(&weight).map(move |(&x, &w)| (x as f64 * factor * w as f64) as f32)
    });
    normed.collect()
}

pub(super) fn layer_norm(frame: &Frame<'_>, x: &Name, weight: &Name, bias: Option<&Name>, eps: f32) -> Vec<f32> {
    let n = frame.width(x);
    let weight = frame.plain_weight(weight);
    let bias = bias.map_or(vec![0.0; n], |b| frame.plain_weight(b));
    let normed = frame.f32s(x).chunks_exact(n).flat_map(|row| {
        let mean = row.iter().map(|&x| x as f64).sum::<f64>() / n as f64;
        let variance = row.iter().map(|&x| (x as f64 - mean).powi(2)).sum::<f64>() / n as f64;
        let factor = 1.0 / (variance + eps as f64).sqrt();
        row.iter().zip(weight.iter().zip(&bias)).map(move |(&x, (&w, &b))| ((x as f64 - mean) * factor * w as f64 + b as f64) as f32)
    });
    normed.collect()
}

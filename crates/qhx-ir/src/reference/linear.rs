//! Table look-ups and products with weights.

use super::frame::Frame;
use crate::{ActivationForm, Clip, Name, WeightTensor};
use half::f16;

pub(super) fn embed(frame: &Frame<'_>, ids: &Name, table: &Name, scale: f32) -> Vec<f32> {
    let table = frame.weight(table);
    let mut row = vec![0.0; table.columns()];
    let mut y = Vec::new();
    for &id in frame.i32s(ids) {
        table.decode_row(id as usize, &mut row);
        y.extend(row.iter().map(|x| x * scale));
    }
    y
}

pub(super) fn interpolate(frame: &Frame<'_>, index: &Name, factor: &Name, table: &Name) -> Vec<f32> {
    let taps = frame.width(index);
    let table = frame.weight(table);
    let mut row = vec![0.0; table.columns()];
    let mut y = Vec::new();
    for (index, factor) in frame.i32s(index).chunks(taps.max(1)).zip(frame.f32s(factor).chunks(taps.max(1))) {
        let mut sum = vec![0.0; row.len()];
        for (&index, &factor) in index.iter().zip(factor) {
            table.decode_row(index as usize, &mut row);
            sum.iter_mut().zip(&row).for_each(|(s, &x)| *s += factor as f64 * x as f64);
        }
        y.extend(sum.iter().map(|&s| s as f32));
    }
    y
}

#[allow(clippy::too_many_arguments)] // the op's own fields, apart
pub(super) fn linear(
    frame: &Frame<'_>,
    x: &Name,
    weight: &Name,
    bias: Option<&Name>,
    form: ActivationForm,
    clip: Option<&Clip>,
    dot: Dot,
) -> Vec<f32> {
    let weight = frame.weight(weight);
    let (inputs, outputs) = (weight.columns(), weight.rows());
    let bias = bias.map_or(vec![0.0; outputs], |b| frame.plain_weight(b));
    let [low, high] = clip.map_or([f32::NEG_INFINITY, f32::INFINITY], |c| c.input);
    let clipped: Vec<f32> = frame.f32s(x).iter().map(|x| x.max(low).min(high)).collect();
    let [low, high] = clip.map_or([f32::NEG_INFINITY, f32::INFINITY], |c| c.output);
    let x: Vec<Vec<f64>> = clipped.chunks_exact(inputs).map(|row| in_form(row, form)).collect();
    let mut y = vec![0.0; x.len() * outputs];
    for output in 0..outputs {
        let w = weight_row(weight, output, form);
        for (row, x) in x.iter().enumerate() {
            y[row * outputs + output] = ((dot(x, &w) + bias[output] as f64) as f32).max(low).min(high);
        }
    }
    y
}

/// A row as it enters a product. Integer forms become `q · scale`, which is exact in f64, so that a product is the exact integer sum times
/// the two scales, up to f64 rounding.
pub(super) fn in_form(row: &[f32], form: ActivationForm) -> Vec<f64> {
    match form {
        ActivationForm::F32 => row.iter().map(|&x| x as f64).collect(),
        ActivationForm::F16 => row.iter().map(|&x| f16::from_f32(x).to_f64()).collect(),
        ActivationForm::I8Row => quantised(row),
        ActivationForm::I8Block32 => row.chunks(32).flat_map(quantised).collect(),
    }
}

fn quantised(group: &[f32]) -> Vec<f64> {
    let amax = group.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    let (scale, inverse) = (amax / 127.0, 127.0 / amax);
    if inverse.is_infinite() {
        return vec![0.0; group.len()];
    }
    group.iter().map(|&x| (x * inverse).round_ties_even().clamp(-127.0, 127.0) as f64 * scale as f64).collect()
}

/// A weight row as it enters a product: the decoded values or, for integer forms, quant, scale and minimum without rounding.
pub(super) fn weight_row(weight: &WeightTensor, row: usize, form: ActivationForm) -> Vec<f64> {
    let columns = 0..weight.columns();
    if form.is_integer() {
        let exact = |c| weight.quant(row, c) as f64 * weight.scale_at(row, c) as f64 + weight.min_at(row, c) as f64;
        return columns.map(exact).collect();
    }
    let mut numbers = vec![0.0; weight.columns()];
    weight.decode_row(row, &mut numbers);
    numbers.iter().map(|&w| w as f64).collect()
}

/// A way to add products.
pub(super) type Dot = fn(&[f64], &[f64]) -> f64;

pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The sum in f16, rounded after every product.
pub(super) fn half_dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).fold(f16::ZERO, |sum, (a, b)| f16::from_f64(sum.to_f64() + a * b)).to_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_in_f16_lose_what_is_small_beside_them() {
        let (mut a, b) = (vec![1.0; 5000], vec![1.0; 5000]);
        assert_eq!((dot(&a, &b), half_dot(&a, &b)), (5000.0, 2048.0), "2048 + 1 is 2048 in f16");
        a.truncate(100);
        assert_eq!(half_dot(&a, &b[..100]), 100.0);
    }
}

//! Elementwise ops, computed in f64 and rounded once.

use super::frame::Frame;
use crate::{Activation, Name};
use std::f64::consts::{FRAC_1_SQRT_2, PI};

pub(super) fn map(frame: &Frame<'_>, x: &Name, f: impl Fn(f64) -> f64) -> Vec<f32> {
    frame.f32s(x).iter().map(|&x| f(x as f64) as f32).collect()
}

pub(super) fn zip(frame: &Frame<'_>, a: &Name, b: &Name, f: impl Fn(f64, f64) -> f64) -> Vec<f32> {
    frame.f32s(a).iter().zip(frame.f32s(b)).map(|(&a, &b)| f(a as f64, b as f64) as f32).collect()
}

pub(super) fn scale(frame: &Frame<'_>, x: &Name, factor: f32, weight: Option<&Name>) -> Vec<f32> {
    let weight = weight.map_or(vec![1.0], |w| frame.plain_weight(w));
    let numbers = frame.f32s(x).iter().enumerate();
    numbers.map(|(i, &x)| (x as f64 * factor as f64 * weight[i % weight.len()] as f64) as f32).collect()
}

pub(super) fn activate(x: f64, activation: Activation) -> f64 {
    match activation {
        Activation::Silu => x * sigmoid(x),
        Activation::GeluTanh => 0.5 * x * (1.0 + ((2.0 / PI).sqrt() * (x + 0.044715 * x * x * x)).tanh()),
        Activation::GeluErf => 0.5 * x * (1.0 + erf(x * FRAC_1_SQRT_2)),
        Activation::Sigmoid => sigmoid(x),
        Activation::Relu => x.max(0.0),
    }
}

pub(super) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

pub(super) fn softplus(x: f64) -> f64 {
    // ln(1 + eˣ) = max(x, 0) + ln(1 + e^−|x|), which cannot overflow.
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

pub(super) fn softcap(x: f64, cap: f64) -> f64 {
    cap * (x / cap).tanh()
}

/// The error function, by `erf(x) = 2/√π · e^(−x²) · Σ 2ⁿ x^(2n+1) / (1·3·5···(2n+1))`: all terms have one sign, so nothing cancels.
pub(super) fn erf(x: f64) -> f64 {
    if x.is_nan() || x.abs() > 6.0 {
        return if x.is_nan() { x } else { x.signum() };
    }
    let (mut term, mut sum, mut n) = (x, x, 0.0);
    while term.abs() > sum.abs() * 1e-17 {
        n += 1.0;
        term *= 2.0 * x * x / (2.0 * n + 1.0);
        sum += term;
    }
    2.0 / PI.sqrt() * (-x * x).exp() * sum
}

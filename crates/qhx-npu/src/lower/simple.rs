//! Elementwise functions.

use super::Lowering;
use crate::graph::TensorId;
use qhx_ir::{Activation, DeviceError, Name};

/// `Φ(x) = 1 / (1 + exp(x·p(x²)))` for the normal distribution's Φ: the coefficients of p, fitted on |x| ≤ 5.5, where x·Φ(x) is off by at most
/// 2.6e-5. The library's own `Gelu` is off by 0.0024.
const NORMAL_DISTRIBUTION: [f32; 3] = [-1.5950158, -0.0740113, 0.00070303];

/// Where the polynomial was fitted.
const NEAR: f32 = 5.5;

/// The largest exponent for which one more than its exponential is within f16.
const EXPONENT: f32 = 11.0;

/// Smaller exponents are clamped to this one: its exponential is negligible next to 1, and the library's exponential of far smaller values is NaN.
const LEAST_EXPONENT: f32 = -16.0;

impl Lowering<'_> {
    pub(super) fn activation(&mut self, x: TensorId, activation: Activation) -> TensorId {
        match activation {
            Activation::Relu => self.builder.unary("Relu", "relu", x),
            Activation::Sigmoid => self.sigmoid(x),
            Activation::Silu => {
                let minus = self.builder.unary("ElementWiseNeg", "minus", x);
                self.gated(x, minus)
            }
            // ½(1 + tanh u) = 1 / (1 + exp(−2u)), without the loss of digits where tanh is near −1.
            Activation::GeluTanh => {
                let root = (8.0 / std::f32::consts::PI).sqrt();
                self.gated_by_polynomial(x, &[-root, -root * 0.044715])
            }
            Activation::GeluErf => self.gated_by_polynomial(x, &NORMAL_DISTRIBUTION),
        }
    }

    /// The library's own `Sigmoid` has steps of 5e-4: small results, which gates depend on, would lose their digits.
    pub(super) fn sigmoid(&mut self, x: TensorId) -> TensorId {
        let minus = self.builder.unary("ElementWiseNeg", "minus", x);
        let one = self.builder.number(1.0);
        self.gated(one, minus)
    }

    /// `x / (1 + exp(exponent))`. The division turns gates below f16's smallest normal number into 0.
    fn gated(&mut self, x: TensorId, exponent: TensorId) -> TensorId {
        let power = self.exponential(exponent);
        let one = self.builder.number(1.0);
        let below = self.builder.add("below", power, one);
        self.builder.binary("ElementWiseDivide", "gated", x, below)
    }

    /// `exp(x)`, within f16 for every x.
    pub(super) fn exponential(&mut self, x: TensorId) -> TensorId {
        let within = self.builder.clamp(x, LEAST_EXPONENT, EXPONENT);
        self.builder.unary("ElementWiseExp", "exp", within)
    }

    /// `x / (1 + exp(x·p(x²)))`. Beyond ±5.5 the gate is within 1e-7 of 0 or 1, so its argument is clamped there and no power overflows.
    fn gated_by_polynomial(&mut self, x: TensorId, coefficients: &[f32]) -> TensorId {
        let near = self.builder.clamp(x, -NEAR, NEAR);
        let square = self.builder.multiply("square", near, near);
        let mut sum = None;
        for &c in coefficients.iter().rev() {
            let c = self.builder.number(c);
            sum = Some(match sum {
                None => c,
                Some(sum) => {
                    let product = self.builder.multiply("term", sum, square);
                    self.builder.add("terms", product, c)
                }
            });
        }
        let argument = sum.map_or(near, |sum| self.builder.multiply("argument", sum, near));
        self.gated(x, argument)
    }

    pub(super) fn softcap(&mut self, x: TensorId, cap: f32) -> TensorId {
        let small = self.builder.scale("small", x, 1.0 / cap);
        let bent = self.builder.unary("Tanh", "bent", small);
        self.builder.scale("capped", bent, cap)
    }

    pub(super) fn scale(&mut self, x: &Name, factor: f32, weight: Option<&Name>) -> Result<TensorId, DeviceError> {
        let x = self.value(x)?;
        let Some(weight) = weight else { return Ok(self.builder.scale("scaled", x, factor)) };
        let dims = self.program.weights[weight].shape.clone();
        let key = format!("{weight}.{factor}");
        let factors = self.derived(&key, &[weight], &dims, |w| w.concat().iter().map(|w| w * factor).collect())?;
        Ok(self.builder.multiply("scaled", x, factors))
    }
}

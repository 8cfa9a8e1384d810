//! exp, tanh, erf and what is built from them, for vectors. Errors are a few units in the last place.
#![allow(unsafe_code)] // Vector operations.
#![allow(clippy::undocumented_unsafe_blocks, clippy::excessive_precision)] // SAFETY throughout: callers promise that the CPU has V's instructions.

use super::vector::Vector;
use qhx_ir::Activation;

/// `coefficients[0]·x^(n−1) + … + coefficients[n−1]`.
#[inline(always)]
unsafe fn polynomial<V: Vector>(x: V, coefficients: &[f32]) -> V {
    unsafe {
        let mut sum = V::splat(coefficients[0]);
        for &c in &coefficients[1..] {
            sum = sum.mul_add(x, V::splat(c));
        }
        sum
    }
}

/// e^x, for x beyond the range of f32 its smallest or largest normal number.
#[inline(always)]
pub(crate) unsafe fn exp<V: Vector>(x: V) -> V {
    unsafe {
        let x = x.min(V::splat(88.02)).max(V::splat(-87.33));
        let n = x.mul(V::splat(std::f32::consts::LOG2_E)).round();
        // ln 2 in two parts: the first has few bits, so that n · part is exact.
        let r = n.mul_add(V::splat(-0.693359375), x);
        let r = n.mul_add(V::splat(2.12194440e-4), r);
        let p = polynomial(r, &[1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1]);
        p.mul_add(r.mul(r), r.add(V::splat(1.0))).mul(n.exp2_whole())
    }
}

/// `1 / (1 + e^−x)`.
#[inline(always)]
pub(crate) unsafe fn sigmoid<V: Vector>(x: V) -> V {
    unsafe {
        let one = V::splat(1.0);
        one.div(one.add(exp(V::splat(0.0).sub(x))))
    }
}

/// Hyperbolic tangent.
#[inline(always)]
pub(crate) unsafe fn tanh<V: Vector>(x: V) -> V {
    unsafe {
        let square = x.mul(x);
        let small = polynomial(square, &[-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1]);
        let small = small.mul(square).mul_add(x, x);
        // 1 − 2 / (e^2|x| + 1) with the sign of x; loses digits only where the polynomial is taken.
        let size = x.abs();
        let large = V::splat(1.0).sub(V::splat(2.0).div(exp(size.add(size)).add(V::splat(1.0))));
        let large = x.less(V::splat(0.0), V::splat(0.0).sub(large), large);
        size.less(V::splat(0.625), small, large)
    }
}

/// Error function, as a quotient of polynomials on −4 .. 4, beyond which it is ±1 in f32.
#[inline(always)]
unsafe fn erf<V: Vector>(x: V) -> V {
    unsafe {
        let x = x.min(V::splat(4.0)).max(V::splat(-4.0));
        let square = x.mul(x);
        let above = polynomial(
            square,
            &[
                -2.72614225801306e-10,
                2.77068142495902e-8,
                -2.10102402082508e-6,
                -5.69250639462346e-5,
                -7.34990630326855e-4,
                -2.95459980854025e-3,
                -1.60960333262415e-2,
            ],
        );
        let below = polynomial(
            square,
            &[-1.45660718464996e-5, -2.13374055278905e-4, -1.68282697438203e-3, -7.37332916720468e-3, -1.42647390514189e-2],
        );
        x.mul(above).div(below)
    }
}

/// `activation(x)`.
#[inline(always)]
pub(crate) unsafe fn activate<V: Vector>(activation: Activation, x: V) -> V {
    unsafe {
        match activation {
            Activation::Silu => x.mul(sigmoid(x)),
            Activation::GeluTanh => {
                // 0.5x(1 + tanh u) = x · sigmoid(2u).
                let cubic = x.mul(x).mul_add(V::splat(0.044715), V::splat(1.0)).mul(x);
                x.mul(sigmoid(cubic.mul(V::splat(2.0 * 0.797_884_56))))
            }
            Activation::GeluErf => {
                let half = x.mul(V::splat(0.5));
                half.mul_add(erf(x.mul(V::splat(std::f32::consts::FRAC_1_SQRT_2))), half)
            }
            Activation::Sigmoid => sigmoid(x),
            Activation::Relu => x.max(V::splat(0.0)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Instructions, map};
    use crate::kernels::map::Unary;
    use qhx_ir::Activation;

    /// erf by its series (small) or continued fraction (large), in f64.
    fn erf(x: f64) -> f64 {
        let a = x.abs();
        let value = if a < 3.0 {
            let (mut term, mut sum, mut n) = (a, a, 0.0);
            while term.abs() > 1e-18 {
                n += 1.0;
                term *= -a * a / n;
                sum += term / (2.0 * n + 1.0);
            }
            sum * 2.0 / std::f64::consts::PI.sqrt()
        } else {
            let tail = (1..60).rev().fold(a, |f, k| a + k as f64 / 2.0 / f);
            1.0 - (-a * a).exp() / tail / std::f64::consts::PI.sqrt()
        };
        value.copysign(x)
    }

    #[test]
    fn close_to_f64() {
        let xs: Vec<f32> = (-4000..=4000).map(|i| i as f32 * 0.005).chain([-1e4, 1e4, 0.0, -0.0, 1e-20, -88.0, 60.0]).collect();
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let gelu = |x: f64| 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh());
        type Case = (Unary, Box<dyn Fn(f64) -> f64>, f64);
        let cases: Vec<Case> = vec![
            (Unary::Activate(Activation::Silu), Box::new(move |x| x * sigmoid(x)), 1e-6),
            (Unary::Activate(Activation::Sigmoid), Box::new(sigmoid), 1e-6),
            (Unary::Activate(Activation::GeluTanh), Box::new(gelu), 1e-6),
            (Unary::Activate(Activation::GeluErf), Box::new(|x| 0.5 * x * (1.0 + erf(x / 2f64.sqrt()))), 1e-6),
            (Unary::Activate(Activation::Relu), Box::new(|x| x.max(0.0)), 0.0),
            (Unary::Softcap(5.0), Box::new(|x| 5.0 * (x / 5.0).tanh()), 3e-7),
        ];
        for instructions in Instructions::all() {
            for (op, exact, tolerance) in &cases {
                let mut ys = vec![0.0; xs.len()];
                map::unary(instructions, *op, &xs, &mut ys);
                for (&x, &y) in xs.iter().zip(&ys) {
                    let wanted = exact(x as f64);
                    // Of the result, or of what the result is a small part of.
                    let scale = wanted.abs().max((x.abs() as f64).min(1.0));
                    assert!((y as f64 - wanted).abs() <= tolerance * scale, "{instructions:?} {op:?}({x}) = {y}, not {wanted}");
                }
            }
        }
    }
}

//! Elementwise kernels. The result may be written over an operand.
#![allow(unsafe_code)] // Vector loads and stores.

use super::{
    Instructions, math, run,
    vector::{Kernel, Vector},
};
use qhx_ir::Activation;

/// A function of one number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Unary {
    /// An activation.
    Activate(Activation),
    /// `x · factor`.
    Scale(f32),
    /// `cap · tanh(x / cap)`.
    Softcap(f32),
    /// `min(max(x, low), high)`.
    Clamp(f32, f32),
}

/// A function of two numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Binary {
    /// `a + b`.
    Add,
    /// `a · b`.
    Mul,
    /// `act(a) · b`.
    Gate(Activation),
    /// `a · b · factor`.
    ScaledMul(f32),
    /// `a + b · factor`.
    AddScaled(f32),
}

/// `y = op(x)`.
pub(crate) fn unary(instructions: Instructions, op: Unary, x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len(), "elementwise lengths");
    run(instructions, Map1 { op, x: x.as_ptr(), y: y.as_mut_ptr(), n: y.len() });
}

/// `y = op(y)`.
pub(crate) fn unary_in_place(instructions: Instructions, op: Unary, y: &mut [f32]) {
    let y_start = y.as_mut_ptr();
    run(instructions, Map1 { op, x: y_start, y: y_start, n: y.len() });
}

/// `y = op(a, b)`.
pub(crate) fn binary(instructions: Instructions, op: Binary, a: &[f32], b: &[f32], y: &mut [f32]) {
    assert!(a.len() == y.len() && b.len() == y.len(), "elementwise lengths");
    run(instructions, Map2 { op, a: a.as_ptr(), b: b.as_ptr(), y: y.as_mut_ptr(), n: y.len() });
}

/// `y = op(y, b)`.
pub(crate) fn binary_into_left(instructions: Instructions, op: Binary, y: &mut [f32], b: &[f32]) {
    assert_eq!(b.len(), y.len(), "elementwise lengths");
    let start = y.as_mut_ptr();
    run(instructions, Map2 { op, a: start, b: b.as_ptr(), y: start, n: y.len() });
}

/// `y = op(a, y)`.
pub(crate) fn binary_into_right(instructions: Instructions, op: Binary, a: &[f32], y: &mut [f32]) {
    assert_eq!(a.len(), y.len(), "elementwise lengths");
    let start = y.as_mut_ptr();
    run(instructions, Map2 { op, a: a.as_ptr(), b: start, y: start, n: y.len() });
}

/// `y = y + a · b`.
pub(crate) fn accumulate(instructions: Instructions, y: &mut [f32], a: &[f32], b: &[f32]) {
    assert!(a.len() == y.len() && b.len() == y.len(), "elementwise lengths");
    run(instructions, Accumulate { a: a.as_ptr(), b: b.as_ptr(), y: y.as_mut_ptr(), n: y.len() });
}

struct Map1 {
    op: Unary,
    x: *const f32,
    y: *mut f32,
    n: usize,
}

impl Map1 {
    // SAFETY: made only by the functions above, which checked the lengths; each number is read before it is written.
    #[inline(always)]
    #[allow(clippy::undocumented_unsafe_blocks)]
    unsafe fn each<V: Vector>(&self, f: impl MapOne) {
        unsafe {
            let mut i = 0;
            while i + V::LANES <= self.n {
                f.map(V::load(self.x.add(i))).store(self.y.add(i));
                i += V::LANES;
            }
            if i < self.n {
                f.map(V::load_part(self.x.add(i), self.n - i)).store_part(self.y.add(i), self.n - i);
            }
        }
    }
}

/// A type for each function, so that the loop over it is compiled for it.
trait MapOne {
    unsafe fn map<V: Vector>(&self, x: V) -> V;
}

struct Silu;
struct Other(Activation);
struct Scale(f32);
struct Softcap(f32);
struct Clamp(f32, f32);

#[allow(clippy::undocumented_unsafe_blocks)] // SAFETY: the caller promises V's instructions.
mod functions {
    use super::*;

    impl MapOne for Silu {
        #[inline(always)]
        unsafe fn map<V: Vector>(&self, x: V) -> V {
            unsafe { math::activate(Activation::Silu, x) }
        }
    }
    impl MapOne for Other {
        #[inline(always)]
        unsafe fn map<V: Vector>(&self, x: V) -> V {
            unsafe { math::activate(self.0, x) }
        }
    }
    impl MapOne for Scale {
        #[inline(always)]
        unsafe fn map<V: Vector>(&self, x: V) -> V {
            unsafe { x.mul(V::splat(self.0)) }
        }
    }
    impl MapOne for Softcap {
        #[inline(always)]
        unsafe fn map<V: Vector>(&self, x: V) -> V {
            unsafe { math::tanh(x.div(V::splat(self.0))).mul(V::splat(self.0)) }
        }
    }
    impl MapOne for Clamp {
        #[inline(always)]
        unsafe fn map<V: Vector>(&self, x: V) -> V {
            unsafe { x.max(V::splat(self.0)).min(V::splat(self.1)) }
        }
    }
}

impl Kernel for Map1 {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: see `each`.
        unsafe {
            match self.op {
                Unary::Activate(Activation::Silu) => self.each::<V>(Silu),
                Unary::Activate(other) => self.each::<V>(Other(other)),
                Unary::Scale(factor) => self.each::<V>(Scale(factor)),
                Unary::Softcap(cap) => self.each::<V>(Softcap(cap)),
                Unary::Clamp(low, high) => self.each::<V>(Clamp(low, high)),
            }
        }
    }
}

struct Map2 {
    op: Binary,
    a: *const f32,
    b: *const f32,
    y: *mut f32,
    n: usize,
}

impl Kernel for Map2 {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: made only by the functions above, which checked the lengths; each number is read before it is written.
        unsafe {
            let (mut i, n) = (0, self.n);
            while i + V::LANES <= n {
                let (a, b) = (V::load(self.a.add(i)), V::load(self.b.add(i)));
                combine(self.op, a, b).store(self.y.add(i));
                i += V::LANES;
            }
            if i < n {
                let (a, b) = (V::load_part(self.a.add(i), n - i), V::load_part(self.b.add(i), n - i));
                combine(self.op, a, b).store_part(self.y.add(i), n - i);
            }
        }
    }
}

struct Accumulate {
    a: *const f32,
    b: *const f32,
    y: *mut f32,
    n: usize,
}

impl Kernel for Accumulate {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: made only by `accumulate`, which checked the lengths.
        unsafe {
            let (mut i, n) = (0, self.n);
            while i + V::LANES <= n {
                V::load(self.a.add(i)).mul_add(V::load(self.b.add(i)), V::load(self.y.add(i))).store(self.y.add(i));
                i += V::LANES;
            }
            while i < n {
                *self.y.add(i) += *self.a.add(i) * *self.b.add(i);
                i += 1;
            }
        }
    }
}

// The choice is the same in every round of the loop: the compiler takes it out, and where not it is predicted.
#[inline(always)]
unsafe fn combine<V: Vector>(op: Binary, a: V, b: V) -> V {
    // SAFETY: the caller promises V's instructions.
    unsafe {
        match op {
            Binary::Add => a.add(b),
            Binary::Mul => a.mul(b),
            Binary::Gate(activation) => math::activate(activation, a).mul(b),
            Binary::ScaledMul(factor) => a.mul(b).mul(V::splat(factor)),
            Binary::AddScaled(factor) => b.mul_add(V::splat(factor), a),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_and_place() {
        for instructions in Instructions::all() {
            for n in 0..40 {
                let a: Vec<f32> = (0..n).map(|i| i as f32 - 7.0).collect();
                let b: Vec<f32> = (0..n).map(|i| 0.5 * i as f32).collect();
                for op in [Binary::Add, Binary::Mul, Binary::Gate(Activation::Relu), Binary::ScaledMul(2.0), Binary::AddScaled(-1.5)] {
                    let mut y = vec![0.0; n];
                    binary(instructions, op, &a, &b, &mut y);
                    for i in 0..n {
                        let wanted = match op {
                            Binary::Add => a[i] + b[i],
                            Binary::Mul => a[i] * b[i],
                            Binary::Gate(_) => a[i].max(0.0) * b[i],
                            Binary::ScaledMul(f) => a[i] * b[i] * f,
                            Binary::AddScaled(f) => a[i] + b[i] * f,
                        };
                        assert_eq!(y[i], wanted);
                    }
                    let (mut left, mut right) = (a.clone(), b.clone());
                    binary_into_left(instructions, op, &mut left, &b);
                    binary_into_right(instructions, op, &a, &mut right);
                    assert!(left == y && right == y);
                }
                let mut clamped = vec![0.0; n];
                unary(instructions, Unary::Clamp(-3.0, 4.0), &a, &mut clamped);
                let mut scaled = a.clone();
                unary_in_place(instructions, Unary::Scale(3.0), &mut scaled);
                assert!((0..n).all(|i| clamped[i] == a[i].clamp(-3.0, 4.0) && scaled[i] == 3.0 * a[i]));
            }
        }
    }
}

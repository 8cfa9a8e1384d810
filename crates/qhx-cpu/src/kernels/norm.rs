//! Norms of one row. The result may be written over the input.
#![allow(unsafe_code)] // Vector loads and stores.

use super::{
    Instructions, run,
    vector::{Kernel, Vector},
};

/// What a norm does to a row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Norm<'a> {
    /// Subtract the mean first.
    pub(crate) centred: bool,
    /// Factors, or 1.
    pub(crate) weight: Option<&'a [f32]>,
    /// Added at the end, or 0.
    pub(crate) bias: Option<&'a [f32]>,
    /// Added under the root.
    pub(crate) eps: f32,
}

impl Norm<'_> {
    /// `y = norm(x)`.
    pub(crate) fn apply(&self, instructions: Instructions, x: &[f32], y: &mut [f32]) {
        assert_eq!(x.len(), y.len(), "row lengths");
        self.run(instructions, x.as_ptr(), y);
    }

    /// `y = norm(y)`.
    pub(crate) fn apply_in_place(&self, instructions: Instructions, y: &mut [f32]) {
        self.run(instructions, y.as_ptr(), y);
    }

    fn run(&self, instructions: Instructions, x: *const f32, y: &mut [f32]) {
        let fits = |part: Option<&[f32]>| part.is_none_or(|p| p.len() == y.len());
        assert!(fits(self.weight) && fits(self.bias), "norm weights must be as long as the row");
        run(instructions, Row { norm: *self, x, y: y.as_mut_ptr(), n: y.len() });
    }
}

/// `Σ x²`.
pub(crate) fn sum_of_squares(instructions: Instructions, x: &[f32]) -> f32 {
    run(instructions, Squares { x: x.as_ptr(), n: x.len(), centre: 0.0 })
}

struct Squares {
    x: *const f32,
    n: usize,
    centre: f32,
}

// SAFETY of the blocks below: pointers come from slices of `n` numbers.
impl Kernel for Squares {
    type Output = f32;

    #[inline(always)]
    unsafe fn run<V: Vector>(self) -> f32 {
        // SAFETY: see above.
        unsafe {
            let centre = V::splat(self.centre);
            let mut sums = [V::splat(0.0); 4];
            let mut i = 0;
            while i + 4 * V::LANES <= self.n {
                for (j, sum) in sums.iter_mut().enumerate() {
                    let difference = V::load(self.x.add(i + j * V::LANES)).sub(centre);
                    *sum = difference.mul_add(difference, *sum);
                }
                i += 4 * V::LANES;
            }
            let mut total = sums[0].add(sums[1]).add(sums[2].add(sums[3])).sum();
            while i < self.n {
                let difference = *self.x.add(i) - self.centre;
                total += difference * difference;
                i += 1;
            }
            total
        }
    }
}

struct Sum {
    x: *const f32,
    n: usize,
}

impl Kernel for Sum {
    type Output = f32;

    #[inline(always)]
    unsafe fn run<V: Vector>(self) -> f32 {
        // SAFETY: see above.
        unsafe {
            let mut sum = V::splat(0.0);
            let mut i = 0;
            while i + V::LANES <= self.n {
                sum = sum.add(V::load(self.x.add(i)));
                i += V::LANES;
            }
            if i < self.n {
                sum = sum.add(V::load_part(self.x.add(i), self.n - i));
            }
            sum.sum()
        }
    }
}

struct Row<'a> {
    norm: Norm<'a>,
    x: *const f32,
    y: *mut f32,
    n: usize,
}

impl Kernel for Row<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let Self { norm, x, y, n } = self;
        // SAFETY: made only by `Norm::run`, which checked the lengths; each number is read before it is written.
        unsafe {
            let centre = if norm.centred { Sum { x, n }.run::<V>() / n as f32 } else { 0.0 };
            let squares = Squares { x, n, centre }.run::<V>();
            let factor = 1.0 / (squares / n as f32 + norm.eps).sqrt();
            let (centres, factors) = (V::splat(centre), V::splat(factor));
            let weight = norm.weight.map_or(std::ptr::null(), <[f32]>::as_ptr);
            let bias = norm.bias.map_or(std::ptr::null(), <[f32]>::as_ptr);
            let mut i = 0;
            while i + V::LANES <= n {
                let mut value = V::load(x.add(i)).sub(centres).mul(factors);
                if !weight.is_null() {
                    value = value.mul(V::load(weight.add(i)));
                }
                if !bias.is_null() {
                    value = value.add(V::load(bias.add(i)));
                }
                value.store(y.add(i));
                i += V::LANES;
            }
            while i < n {
                let mut value = (*x.add(i) - centre) * factor;
                if !weight.is_null() {
                    value *= *weight.add(i);
                }
                if !bias.is_null() {
                    value += *bias.add(i);
                }
                *y.add(i) = value;
                i += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_f64() {
        for instructions in Instructions::all() {
            for n in [1, 3, 16, 37, 64, 129] {
                let x: Vec<f32> = (0..n).map(|i| ((i * 31 % 17) as f32 - 4.0) * 0.7).collect();
                let weight: Vec<f32> = (0..n).map(|i| 1.0 + 0.01 * i as f32).collect();
                let bias: Vec<f32> = (0..n).map(|i| 0.1 * i as f32).collect();
                for centred in [false, true] {
                    for (weight, bias) in [(None, None), (Some(&weight[..]), None), (Some(&weight[..]), Some(&bias[..]))] {
                        let norm = Norm { centred, weight, bias, eps: 1e-5 };
                        let mean = if centred { x.iter().map(|&v| v as f64).sum::<f64>() / n as f64 } else { 0.0 };
                        let var = x.iter().map(|&v| (v as f64 - mean).powi(2)).sum::<f64>() / n as f64;
                        let mut y = vec![0.0; n];
                        norm.apply(instructions, &x, &mut y);
                        for i in 0..n {
                            let plain = (x[i] as f64 - mean) / (var + 1e-5).sqrt();
                            let wanted = plain * weight.map_or(1.0, |w| w[i] as f64) + bias.map_or(0.0, |b| b[i] as f64);
                            assert!((y[i] as f64 - wanted).abs() < 1e-5 * wanted.abs().max(1.0));
                        }
                        let mut in_place = x.clone();
                        norm.apply_in_place(instructions, &mut in_place);
                        assert_eq!(in_place, y);
                    }
                }
                let squares: f64 = x.iter().map(|&v| (v as f64).powi(2)).sum();
                assert!((sum_of_squares(instructions, &x) as f64 - squares).abs() < 1e-5 * squares);
            }
        }
    }
}

//! Rows of activations in their integer form: how they lie in memory, and how they are made.
#![allow(unsafe_code)] // Vector loads and stores.

use crate::kernels::{
    Instructions, run,
    vector::{Kernel, Vector},
};

/// Numbers in a cache line.
const LINE: usize = 16;

/// How a quantised row lies in f32 numbers. Everything is padded with zeros: quants to multiples of 128, numbers for blocks to multiples of 16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    columns: usize,
    /// Places for quants.
    padded: usize,
    /// Places for one number for each 32.
    blocks: usize,
}

/// One quantised row. Which parts are read depends on the instruction set.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) struct Row<'a> {
    /// Quants.
    pub(crate) quants: &'a [i8],
    /// The same as 16-bit numbers.
    pub(crate) wide: &'a [i16],
    /// One scale for each 32.
    pub(crate) scales: &'a [f32],
    /// scale · Σ quants for each 32.
    pub(crate) sums32: &'a [f32],
    /// scale · Σ quants for each 16.
    pub(crate) sums16: &'a [f32],
    /// −128 · Σ quants for each 32.
    pub(crate) shifts32: &'a [i32],
    /// −128 · Σ quants for each 16.
    pub(crate) shifts16: &'a [i32],
    /// −4 · Σ quants for each 32, as two equal 16-bit numbers.
    pub(crate) fours32: &'a [i32],
}

impl Layout {
    pub(crate) fn new(columns: usize) -> Self {
        Self { columns, padded: columns.next_multiple_of(128), blocks: columns.div_ceil(32).next_multiple_of(16) }
    }

    /// Numbers of the row.
    pub(crate) fn columns(self) -> usize {
        self.columns
    }

    /// f32 numbers that a row takes: with a cache line more than its parts, so that rows do not meet in the same few places of a cache.
    pub(crate) fn width(self) -> usize {
        self.padded / 4 + self.padded / 2 + 8 * self.blocks + LINE
    }

    /// The quantised row in `numbers`.
    pub(crate) fn row(self, numbers: &[f32]) -> Row<'_> {
        let (quants, rest) = numbers[..self.width()].split_at(self.padded / 4);
        let (wide, rest) = rest.split_at(self.padded / 2);
        let (scales, rest) = rest.split_at(self.blocks);
        let (sums32, rest) = rest.split_at(self.blocks);
        let (sums16, rest) = rest.split_at(2 * self.blocks);
        let (shifts32, rest) = rest.split_at(self.blocks);
        let (shifts16, rest) = rest.split_at(2 * self.blocks);
        let fours32 = &rest[..self.blocks];
        let cast = bytemuck::cast_slice;
        Row {
            quants: cast(quants),
            wide: bytemuck::cast_slice(wide),
            scales,
            sums32,
            sums16,
            shifts32: bytemuck::cast_slice(shifts32),
            shifts16: bytemuck::cast_slice(shifts16),
            fours32: bytemuck::cast_slice(fours32),
        }
    }

    /// Quantises `x` into `out`, with one scale for the whole row or one for each 32 numbers: `scale = amax / 127`, `quant = round(x · 127/amax)`.
    pub(crate) fn quantise(self, instructions: Instructions, by_row: bool, x: &[f32], out: &mut [f32]) {
        assert_eq!(x.len(), self.columns, "the row must have the layout's length");
        let (quants, rest) = out[..self.width()].split_at_mut(self.padded / 4);
        let (wide, rest) = rest.split_at_mut(self.padded / 2);
        let (scales, rest) = rest.split_at_mut(self.blocks);
        let (sums32, rest) = rest.split_at_mut(self.blocks);
        let (sums16, rest) = rest.split_at_mut(2 * self.blocks);
        let (shifts32, rest) = rest.split_at_mut(self.blocks);
        let (shifts16, rest) = rest.split_at_mut(2 * self.blocks);
        let fours32 = &mut rest[..self.blocks];
        let quants: &mut [i8] = bytemuck::cast_slice_mut(quants);
        quants[self.columns..].fill(0);
        let parts = Parts {
            wide: bytemuck::cast_slice_mut(wide),
            scales,
            sums32,
            sums16,
            shifts32: bytemuck::cast_slice_mut(shifts32),
            shifts16: bytemuck::cast_slice_mut(shifts16),
            fours32: bytemuck::cast_slice_mut(fours32),
        };
        run(instructions, Quantise { x, by_row, quants, parts });
    }
}

struct Parts<'a> {
    wide: &'a mut [i16],
    scales: &'a mut [f32],
    sums32: &'a mut [f32],
    sums16: &'a mut [f32],
    shifts32: &'a mut [i32],
    shifts16: &'a mut [i32],
    fours32: &'a mut [i32],
}

struct Quantise<'a> {
    x: &'a [f32],
    by_row: bool,
    quants: &'a mut [i8],
    parts: Parts<'a>,
}

impl Kernel for Quantise<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let Self { x, by_row, quants, parts } = self;
        // SAFETY: the caller has V's instructions; slices are checked where they are cut.
        unsafe {
            let row = by_row.then(|| scale_and_factor(largest::<V>(x)));
            let (least, most) = (V::splat(-127.0), V::splat(127.0));
            let blocks = x.len().div_ceil(32);
            let sums = &mut parts.sums16[..2 * blocks];
            for (b, (x, sums)) in x.chunks(32).zip(sums.chunks_exact_mut(2)).enumerate() {
                let (scale, factor) = match row {
                    Some(row) => row,
                    None => scale_and_factor(largest::<V>(x)),
                };
                parts.scales[b] = scale;
                let quants = &mut quants[b * 32..][..x.len()];
                if x.len() == 32 {
                    let (mut halves, factors) = ([V::splat(0.0); 2], V::splat(factor));
                    for i in 0..32 / V::LANES {
                        let whole = V::load(x.as_ptr().add(i * V::LANES)).mul(factors).round().min(most).max(least);
                        whole.store_i8(quants.as_mut_ptr().add(i * V::LANES));
                        let half = i * V::LANES / 16;
                        halves[half] = halves[half].add(whole);
                    }
                    (sums[0], sums[1]) = (halves[0].sum(), halves[1].sum());
                } else {
                    sums.fill(0.0);
                    for (i, x) in x.iter().enumerate() {
                        let whole = (x * factor).round_ties_even().clamp(-127.0, 127.0);
                        quants[i] = whole as i8;
                        sums[i / 16] += whole;
                    }
                }
            }
            parts.scales[blocks..].fill(0.0);
            parts.sums16[2 * blocks..].fill(0.0);
            // What is made from quants and their sums is made in loops of its own, which become vectors.
            for (wide, quant) in parts.wide.iter_mut().zip(&*quants) {
                *wide = *quant as i16;
            }
            for b in 0..parts.scales.len() {
                let (scale, low, high) = (parts.scales[b], parts.sums16[2 * b], parts.sums16[2 * b + 1]);
                parts.sums32[b] = scale * (low + high);
                parts.shifts32[b] = -128 * (low + high) as i32;
                let four = (-4.0 * (low + high)) as i16 as u16 as u32;
                parts.fours32[b] = (four << 16 | four) as i32;
            }
            for (shift, sum) in parts.shifts16.iter_mut().zip(&*parts.sums16) {
                *shift = -128 * *sum as i32;
            }
            for (sums, scale) in parts.sums16.chunks_exact_mut(2).zip(&*parts.scales) {
                (sums[0], sums[1]) = (scale * sums[0], scale * sums[1]);
            }
        }
    }
}

/// `amax / 127`, and what numbers are multiplied with: of numbers so small that it overflows nothing is left.
#[inline(always)]
fn scale_and_factor(amax: f32) -> (f32, f32) {
    if amax > 1e-36 { (amax / 127.0, 127.0 / amax) } else { (0.0, 0.0) }
}

#[inline(always)]
unsafe fn largest<V: Vector>(x: &[f32]) -> f32 {
    // SAFETY: the caller has V's instructions; all loads are within `x`.
    unsafe {
        let mut largest = V::splat(0.0);
        let mut i = 0;
        while i + V::LANES <= x.len() {
            largest = largest.max(V::load(x.as_ptr().add(i)).abs());
            i += V::LANES;
        }
        if i < x.len() {
            largest = largest.max(V::load_part(x.as_ptr().add(i), x.len() - i).abs());
        }
        largest.largest()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantises_as_stated() {
        for instructions in Instructions::all() {
            for n in [1, 7, 16, 32, 45, 64, 200, 576] {
                for by_row in [false, true] {
                    let mut x: Vec<f32> = (0..n).map(|i| ((i * 37 % 23) as f32 - 11.0) * 0.37 * (1 + i / 32) as f32).collect();
                    if n > 64 {
                        x[32..64].fill(0.0);
                    }
                    if n == 200 {
                        x[64..96].fill(1e-40);
                    }
                    let layout = Layout::new(n);
                    let mut out = vec![f32::NAN; layout.width()];
                    layout.quantise(instructions, by_row, &x, &mut out);
                    let row = layout.row(&out);
                    let amax = |x: &[f32]| x.iter().fold(0.0f32, |m, v| m.max(v.abs()));
                    for (b, group) in x.chunks(32).enumerate() {
                        let amax = amax(if by_row { &x } else { group });
                        let amax = if amax < 1e-36 { 0.0 } else { amax };
                        assert_eq!(row.scales[b], amax / 127.0);
                        let factor = if amax > 0.0 { 127.0 / amax } else { 0.0 };
                        let wanted: Vec<i8> = group.iter().map(|x| (x * factor).round_ties_even() as i8).collect();
                        assert_eq!(&row.quants[b * 32..][..wanted.len()], wanted);
                        let low: i32 = wanted.iter().take(16).map(|&q| q as i32).sum();
                        let sum: i32 = wanted.iter().map(|&q| q as i32).sum();
                        assert_eq!((row.shifts32[b], row.shifts16[2 * b]), (-128 * sum, -128 * low));
                        let four = (-4 * sum) as i16 as u16 as u32;
                        assert_eq!(row.fours32[b] as u32, four << 16 | four);
                        assert!((row.sums32[b] - row.scales[b] * sum as f32).abs() <= 1e-6 * row.sums32[b].abs());
                    }
                    assert!(row.quants[n..].iter().all(|&q| q == 0) && row.scales[n.div_ceil(32)..].iter().all(|&s| s == 0.0));
                    assert!(row.quants.iter().zip(row.wide).all(|(&a, &b)| a as i16 == b));
                }
            }
        }
    }
}

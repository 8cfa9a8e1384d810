//! Rotary embedding of one head.
#![allow(unsafe_code)] // Vector loads and stores.

use super::{
    Instructions, run,
    vector::{Kernel, Vector},
};

/// Turns the pairs of a head in place: in each block (start, length) number `start + i` with `start + i + length / 2`. `cosines` and `sines` have one number for
/// each pair, counted through all blocks.
pub(crate) fn rotate(instructions: Instructions, head: &mut [f32], blocks: &[(usize, usize)], cosines: &[f32], sines: &[f32]) {
    let mut pair = 0;
    for &(start, length) in blocks {
        let half = length / 2;
        let (a, b) = head[start..start + 2 * half].split_at_mut(half);
        let (cosines, sines) = (&cosines[pair..pair + half], &sines[pair..pair + half]);
        run(instructions, Rotate { a, b, cosines, sines });
        pair += half;
    }
}

/// All four have one length.
struct Rotate<'a> {
    a: &'a mut [f32],
    b: &'a mut [f32],
    cosines: &'a [f32],
    sines: &'a [f32],
}

impl Kernel for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let n = self.a.len();
        let (a, b) = (self.a.as_mut_ptr(), self.b.as_mut_ptr());
        let (cosines, sines) = (self.cosines.as_ptr(), self.sines.as_ptr());
        // SAFETY: all four slices have `n` numbers.
        unsafe {
            let mut i = 0;
            while i + V::LANES <= n {
                let (x, y) = (V::load(a.add(i)), V::load(b.add(i)));
                let (cosine, sine) = (V::load(cosines.add(i)), V::load(sines.add(i)));
                x.mul(cosine).sub(y.mul(sine)).store(a.add(i));
                y.mul(cosine).add(x.mul(sine)).store(b.add(i));
                i += V::LANES;
            }
            while i < n {
                let (x, y, cosine, sine) = (*a.add(i), *b.add(i), *cosines.add(i), *sines.add(i));
                *a.add(i) = x * cosine - y * sine;
                *b.add(i) = y * cosine + x * sine;
                i += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_pairs_and_leaves_the_rest() {
        for instructions in Instructions::all() {
            let blocks = [(1, 6), (9, 40)];
            let start: Vec<f32> = (0..50).map(|i| i as f32).collect();
            let (cosines, sines): (Vec<f32>, Vec<f32>) = (0..23).map(|i| ((i as f32).cos(), (i as f32).sin())).unzip();
            let mut head = start.clone();
            rotate(instructions, &mut head, &blocks, &cosines, &sines);
            let mut wanted = start.clone();
            let mut pair = 0;
            for (first, length) in blocks {
                for i in first..first + length / 2 {
                    let (a, b) = (start[i], start[i + length / 2]);
                    wanted[i] = a * cosines[pair] - b * sines[pair];
                    wanted[i + length / 2] = b * cosines[pair] + a * sines[pair];
                    pair += 1;
                }
            }
            assert!(head.iter().zip(&wanted).all(|(a, b)| (a - b).abs() < 1e-5));
            assert!(head[0] == 0.0 && head[7] == 7.0 && head[49] == 49.0);
        }
    }
}

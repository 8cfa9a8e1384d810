//! The suite's own random number generator, so that a case can be reproduced from its seed on any machine.

use crate::random::{STEP, mix};

/// SplitMix64.
#[derive(Clone)]
pub(crate) struct Rng(u64);

impl Rng {
    /// A stream of its own for each list of numbers.
    pub(crate) fn new(parts: &[u64]) -> Self {
        let mut rng = Self(STEP);
        for &part in parts {
            rng.0 = rng.next() ^ part;
        }
        rng.next();
        rng
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0)
    }

    /// 0..n.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    /// low..=high.
    pub(crate) fn between(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high - low + 1)
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// 0..1.
    pub(crate) fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// Mean 0, deviation 1 (a sum of four uniforms: no far tails, so magnitudes stay known).
    pub(crate) fn normal(&mut self) -> f32 {
        let sum: f32 = (0..4).map(|_| self.uniform()).sum();
        (sum - 2.0) * 3.0f32.sqrt()
    }

    pub(crate) fn normals(&mut self, n: usize, magnitude: f32) -> Vec<f32> {
        (0..n).map(|_| self.normal() * magnitude).collect()
    }
}

/// A name as a number, for [`Rng::new`].
pub(crate) fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ b as u64).wrapping_mul(0x0100_0000_01b3))
}

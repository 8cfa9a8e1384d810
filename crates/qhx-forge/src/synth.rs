//! Seeded random weights, the same on every machine and in every language that follows this page.
//!
//! Number `i` of the checkpoint tensor `name` is `u = 2 · (top 24 bits of mix(key + i · G)) / 2²⁴ − 1`, exact in f32, with `key = mix(fnv1a64(name) + mix(seed))`,
//! `G = 0x9E3779B97F4A7C15`, `mix` the finaliser of SplitMix64 and all sums modulo 2⁶⁴; then, by the tensor's shape and name,
//!
//! | tensor | number |
//! |---|---|
//! | rank 2 or more | `u · sqrt(3 / columns)`: unit variance stays unit variance (columns: the row length in the bundle; all dimensions but the first where the bundle computes the weight from the tensor) |
//! | a norm's weight (the last part but one of the name starts with `norm` or ends in it), `layer_scalar` | `1 + u / 4`, or `u / 4` where the bundle adds one |
//! | any other vector | `u / 8` |
//!
//! Pages of such a tensor are all different and not zero, so that benchmarks read what they claim to read.

use qhx_runtime::sample::random::mix;

/// The generator of one tensor's numbers.
#[derive(Clone, Copy, Debug)]
pub struct TensorNumbers {
    key: u64,
    offset: f32,
    factor: f32,
}

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

impl TensorNumbers {
    /// For the tensor `name` whose bundle form has `rank` dimensions and rows of `columns`; `zero_centred` where the bundle adds one.
    pub fn new(seed: u64, name: &str, rank: usize, columns: usize, zero_centred: bool) -> Self {
        let fnv = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ b as u64).wrapping_mul(0x0000_0100_0000_01b3));
        let key = mix(fnv.wrapping_add(mix(seed)));
        let (offset, factor) = match rank {
            0 | 1 if zero_centred => (0.0, 0.25),
            0 | 1 if is_norm(name) || name.ends_with("layer_scalar") => (1.0, 0.25),
            0 | 1 => (0.0, 0.125),
            _ => (0.0, (3.0 / columns as f64).sqrt() as f32),
        };
        Self { key, offset, factor }
    }

    /// Numbers from `first` on.
    pub fn fill(&self, first: u64, out: &mut [f32]) {
        for (i, x) in out.iter_mut().enumerate() {
            let bits = mix(self.key.wrapping_add((first + i as u64).wrapping_mul(GOLDEN))) >> 40;
            let u = bits as f32 / (1 << 23) as f32 - 1.0;
            *x = self.offset + u * self.factor;
        }
    }
}

fn is_norm(name: &str) -> bool {
    let module = name.strip_suffix(".weight").map(|module| module.rsplit('.').next().unwrap_or(module));
    module.is_some_and(|module| module.starts_with("norm") || module.ends_with("norm"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_numbers() {
        let mut out = [0.0; 4];
        TensorNumbers::new(7, "model.layers.0.self_attn.q_proj.weight", 2, 48, false).fill(0, &mut out);
        let mut tail = [0.0; 2];
        TensorNumbers::new(7, "model.layers.0.self_attn.q_proj.weight", 2, 48, false).fill(2, &mut tail);
        assert_eq!(out[2..], tail);
        assert!(out.iter().all(|x| x.abs() <= 0.25 && *x != 0.0));
        // These bits must never change: the same seed gives the same model on every machine, today and later.
        assert_eq!(out.map(f32::to_bits), KNOWN);
        let mut other = [0.0; 4];
        TensorNumbers::new(8, "model.layers.0.self_attn.q_proj.weight", 2, 48, false).fill(0, &mut other);
        assert_ne!(out, other);
    }

    const KNOWN: [u32; 4] = [1045718414, 1040397046, 3189780588, 1045060942];

    #[test]
    fn norms_are_near_one() {
        let mut out = [0.0; 64];
        TensorNumbers::new(1, "model.norm.weight", 1, 64, false).fill(0, &mut out);
        assert!(out.iter().all(|x| (0.75..=1.25).contains(x)));
        TensorNumbers::new(1, "model.norm.weight", 1, 64, true).fill(0, &mut out);
        assert!(out.iter().all(|x| x.abs() <= 0.25));
    }
}

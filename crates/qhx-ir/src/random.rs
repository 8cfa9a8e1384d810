//! Random numbers that are the same on every platform.
//!
//! The generator is counter-based: draw `n` of seed `s` is a pure function of both, so that whatever draws can go back, fork or
//! resume at any draw without replaying the ones before. It is SplitMix64 with its start mixed from the seed, so that neighbouring
//! seeds have nothing in common.

/// What SplitMix64 adds to its state for each draw.
pub(crate) const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Draw `draw` of `seed`: uniform in [0, 1), a multiple of 2⁻⁵³.
pub fn uniform(seed: u64, draw: u64) -> f64 {
    let bits = mix(mix(seed.wrapping_add(STEP)).wrapping_add(draw.wrapping_add(1).wrapping_mul(STEP)));
    (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

/// The finaliser of SplitMix64 (Steele, Lea, Flood 2014).
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_fixed_values() {
        // Any change here changes what users' seeds reproduce.
        let draws: Vec<u64> = (0..3).map(|n| (uniform(42, n) * (1u64 << 53) as f64) as u64).collect();
        assert_eq!(draws, FIXED);
        assert_ne!(uniform(42, 0), uniform(43, 0));
        assert!(uniform(u64::MAX, u64::MAX) < 1.0);
    }

    const FIXED: [u64; 3] = [3092098744885774, 8608601199334984, 4380647180739872];

    #[test]
    fn draws_are_uniform() {
        let mut buckets = [0u32; 16];
        for n in 0..160_000 {
            buckets[(uniform(7, n) * 16.0) as usize] += 1;
        }
        // Standard deviation of a bucket is about 97.
        assert!(buckets.iter().all(|&count| count.abs_diff(10_000) < 500), "{buckets:?}");
    }
}

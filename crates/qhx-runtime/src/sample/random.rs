//! Random numbers and exponentials that are the same on every platform.
//!
//! The generator is counter-based: draw `n` of seed `s` is a pure function of both, so that a session can be rolled back, forked or
//! resumed at any draw without replaying the ones before. It is SplitMix64 with its start mixed from the seed, so that neighbouring
//! seeds have nothing in common.

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

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

/// e^x for x ≤ 0 from additions and multiplications only, to about 13 digits. Below −60 it is 0: no draw of 53 bits could tell the
/// difference. Written without branches and calls so that a loop over a vocabulary is vectorised.
pub(super) fn exp_of_negative(x: f64) -> f64 {
    const LN2_HIGH: f64 = 6.931_471_803_691_238e-1;
    const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    /// Adding this leaves the nearest whole number in the low bits of the sum.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    const TAYLOR: [f64; 11] = [
        1.0 / 3_628_800.0,
        1.0 / 362_880.0,
        1.0 / 40_320.0,
        1.0 / 5_040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        1.0 / 2.0,
        1.0,
        1.0,
    ];
    let bounded = if x >= -60.0 { x } else { -60.0 };
    let shifted = bounded * std::f64::consts::LOG2_E + ROUND;
    let doublings = shifted - ROUND;
    let rest = bounded - doublings * LN2_HIGH - doublings * LN2_LOW;
    let series = TAYLOR.iter().fold(0.0, |sum, term| sum * rest + term);
    let power = f64::from_bits(shifted.to_bits().wrapping_add(1023) << 52);
    if x >= -60.0 { series * power } else { 0.0 }
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

    #[test]
    fn exponential_agrees_with_the_platform() {
        for step in 0..60_000 {
            let x = -f64::from(step) / 1000.0;
            let (ours, theirs) = (exp_of_negative(x), x.exp());
            assert!((ours / theirs - 1.0).abs() < 1e-12, "exp({x}): {ours} against {theirs}");
        }
        assert_eq!(exp_of_negative(0.0), 1.0);
        assert_eq!(exp_of_negative(f64::NEG_INFINITY), 0.0);
        assert_eq!(exp_of_negative(-1e300), 0.0);
    }
}

//! Random numbers and exponentials that are the same on every platform.

pub use qhx_ir::random::{mix, uniform};

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

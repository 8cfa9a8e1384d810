//! Rotary embeddings from a configuration, in the published style (`rope_theta`, `rope_scaling`) and in that of transformers 5
//! (`rope_parameters`), to the [`Rotary`] data that a program holds.
//!
//! Frequencies are computed as transformers does, in f32: `1 / theta^(2i / n)`.

use crate::{Config, ForgeError};
use qhx_ir::{Rotary, RotaryVariant};

/// The rotary part of a configuration.
#[derive(Clone, Copy)]
pub struct RopeConfig<'a> {
    /// Where `rope_theta` stands.
    outer: Config<'a>,
    /// Where the type and its parameters stand: `rope_parameters` or `rope_scaling`.
    inner: Option<Config<'a>>,
    name: &'static str,
}

impl<'a> RopeConfig<'a> {
    /// Finds the rotary fields in the text section of a configuration.
    pub fn of(text: Config<'a>) -> Self {
        match text.section("rope_parameters") {
            Some(inner) => Self { outer: inner, inner: Some(inner), name: "rope_parameters" },
            None => Self { outer: text, inner: text.section("rope_scaling"), name: "rope_scaling" },
        }
    }

    /// The rotary fields of one layer type, where `rope_parameters` holds a section for each.
    pub fn of_layer_type(text: Config<'a>, layer_type: &'a str) -> Option<Self> {
        let inner = text.section("rope_parameters")?.section(layer_type)?;
        Some(Self { outer: inner, inner: Some(inner), name: "rope_parameters" })
    }

    /// The base. There is no safe default: class defaults of transformers are rarely the published values.
    pub fn theta(&self) -> Result<f64, ForgeError> {
        match self.outer.number("rope_theta")? {
            theta if theta > 1.0 => Ok(theta),
            theta => Err(self.outer.error("rope_theta", format!("must be above 1, found {theta}"))),
        }
    }

    /// `default`, `linear`, `llama3`, `longrope` …
    pub fn kind(&self) -> Result<&'a str, ForgeError> {
        let Some(inner) = self.inner else { return Ok("default") };
        Ok(inner.text_if_any("rope_type")?.or(inner.text_if_any("type")?).unwrap_or("default"))
    }

    /// The parameters of that type.
    pub fn parameters(&self) -> Result<Config<'a>, ForgeError> {
        self.inner.ok_or_else(|| self.outer.error(self.name, "is missing"))
    }

    /// The part of the head that is rotated: `partial_rotary_factor`, beside the rotary's parameters or in the text section.
    pub fn partial_factor(&self, text: Config<'a>, default: f64) -> Result<f64, ForgeError> {
        let factor = self.outer.number_if_any("partial_rotary_factor")?.or(text.number_if_any("partial_rotary_factor")?).unwrap_or(default);
        match factor > 0.0 && factor <= 1.0 {
            true => Ok(factor),
            false => Err(self.outer.error("partial_rotary_factor", format!("must be above 0 and at most 1, found {factor}"))),
        }
    }

    /// A one-block rotary over the first `length` numbers of a head, for types whose constants do not change with the length of a text.
    pub fn plain(&self, length: usize) -> Result<Rotary, ForgeError> {
        let mut inv_freq = frequencies(self.theta()?, length);
        match self.kind()? {
            // `mrope` is the plain rotary with several position streams.
            "default" | "mrope" => {}
            "linear" => {
                let factor = self.parameters()?.number("factor")?;
                if factor <= 0.0 {
                    return Err(self.parameters()?.error("factor", format!("must be above 0, found {factor}")));
                }
                inv_freq.iter_mut().for_each(|f| *f /= factor as f32);
            }
            // Not a published type: what GGUF files hold instead of the rule's parameters.
            "divisors" => {
                let divisors = self.parameters()?.numbers_if_any("divisors")?.unwrap_or_default();
                if divisors.len() != inv_freq.len() {
                    let reason = format!("must have {} numbers, found {}", inv_freq.len(), divisors.len());
                    return Err(self.parameters()?.error("divisors", reason));
                }
                inv_freq.iter_mut().zip(divisors).for_each(|(f, divisor)| *f /= divisor as f32);
            }
            "llama3" => self.stretch_low_frequencies(&mut inv_freq)?,
            other => {
                let known = "default, linear, llama3, mrope";
                return Err(self.parameters()?.error("rope_type", format!("is `{other}`, which this family does not support ({known})")));
            }
        }
        Ok(one_block(length, inv_freq, 1.0))
    }

    /// `llama3`: low frequencies are divided by a factor, high ones kept, those between blended.
    fn stretch_low_frequencies(&self, inv_freq: &mut [f32]) -> Result<(), ForgeError> {
        let parameters = self.parameters()?;
        let factor = parameters.number("factor")?;
        let (low, high) = (parameters.number("low_freq_factor")?, parameters.number("high_freq_factor")?);
        let original = parameters.number("original_max_position_embeddings")?;
        if factor <= 0.0 || low <= 0.0 || high <= low {
            return Err(parameters.error("factor", "needs factor > 0 and 0 < low_freq_factor < high_freq_factor"));
        }
        for f in inv_freq {
            let wavelength = std::f64::consts::TAU / *f as f64;
            *f = if wavelength > original / low {
                (*f as f64 / factor) as f32
            } else if wavelength < original / high {
                *f
            } else {
                let smooth = (original / wavelength - low) / (high - low);
                ((1.0 - smooth) * *f as f64 / factor + smooth * *f as f64) as f32
            };
        }
        Ok(())
    }
}

/// `theta^(−2i / length)` for `i < length / 2`.
pub fn frequencies(theta: f64, length: usize) -> Vec<f32> {
    (0..length / 2).map(|i| 1.0 / (theta as f32).powf(2.0 * i as f32 / length as f32)).collect()
}

/// A rotary with one block over the first `length` numbers and one variant.
pub fn one_block(length: usize, inv_freq: Vec<f32>, amplitude: f32) -> Rotary {
    Rotary { blocks: vec![(0, length)], streams: Vec::new(), variants: vec![RotaryVariant { inv_freq, amplitude }] }
}

/// The position stream (time, height, width) of each frequency in the interleaved scheme: frequency `j` belongs to height where
/// `j % 3 == 1`, to width where `j % 3 == 2`, each only below three times its section; else to time.
pub fn interleaved_streams(sections: [usize; 3], frequencies: usize) -> Vec<usize> {
    (0..frequencies)
        .map(|j| match j % 3 {
            stream @ (1 | 2) if j < 3 * sections[stream] => stream,
            _ => 0,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn both_styles_agree() {
        let published = json!({"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}});
        let new = json!({"rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}});
        let a = RopeConfig::of(Config::new(&published)).plain(128).unwrap();
        assert_eq!(a, RopeConfig::of(Config::new(&new)).plain(128).unwrap());
        let plain = frequencies(500000.0, 128);
        let stretched = &a.variants[0].inv_freq;
        assert_eq!(stretched[0], plain[0]);
        assert!((stretched[63] / plain[63] - 0.125).abs() < 1e-6);
    }

    /// Llama 3.1's own numbers, worked out beside this code: frequencies of short waves are kept, those of long ones divided by 8, and the shorter a wave between them,
    /// the more of its frequency is kept.
    #[test]
    fn llama3_blends_from_high_frequencies_to_low_ones() {
        let config = json!({"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}});
        let rotary = RopeConfig::of(Config::new(&config)).plain(128).unwrap();
        let found = &rotary.variants[0].inv_freq;
        for (place, expected) in [
            (1, 8.146172339e-1),
            (28, 3.211445995e-3),
            (29, 2.166570764e-3),
            (30, 1.371893568e-3),
            (31, 8.567514129e-4),
            (32, 5.248461610e-4),
            (33, 3.126937504e-4),
            (34, 1.785078128e-4),
            (35, 9.556212354e-5),
            (63, 3.068925989e-7),
        ] {
            assert!((f64::from(found[place]) / expected - 1.0).abs() < 1e-5, "frequency {place}: {} instead of {expected}", found[place]);
        }
        assert!(found.is_sorted_by(|a, b| a > b), "{found:?}");
    }

    #[test]
    fn divisors_give_the_frequencies_of_the_rule_that_made_them() {
        let rule = json!({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64}});
        let rule = RopeConfig::of(Config::new(&rule)).plain(32).unwrap();
        let expected = &rule.variants[0].inv_freq;
        let divisors: Vec<f32> = frequencies(5e5, 32).iter().zip(expected).map(|(plain, f)| plain / f).collect();
        let table = json!({"rope_theta": 5e5, "rope_scaling": {"rope_type": "divisors", "divisors": divisors}});
        let found = RopeConfig::of(Config::new(&table)).plain(32).unwrap();
        for (a, b) in found.variants[0].inv_freq.iter().zip(expected) {
            assert!((a / b - 1.0).abs() < 1e-6, "{a} {b}");
        }
        assert!(divisors.contains(&1.0) && divisors.contains(&8.0) && divisors.iter().any(|&d| d > 1.1 && d < 7.9));
        let error = RopeConfig::of(Config::new(&table)).plain(64).unwrap_err().to_string();
        assert!(error.contains("must have 32 numbers, found 16"), "{error}");
    }

    #[test]
    fn linear_scaling_needs_a_factor_above_0() {
        let linear = |factor: f64| {
            let json = json!({"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": factor}});
            RopeConfig::of(Config::new(&json)).plain(64).map_err(|e| e.to_string())
        };
        assert_eq!(linear(4.0).unwrap().variants[0].inv_freq[0], 0.25);
        for factor in [0.0, -1.0] {
            let error = linear(factor).unwrap_err();
            assert!(error.contains("`rope_scaling.factor` must be above 0, found"), "{error}");
        }
    }

    #[test]
    fn unknown_types_are_named() {
        let json = json!({"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 4.0}});
        let error = RopeConfig::of(Config::new(&json)).plain(64).unwrap_err().to_string();
        assert!(error.contains("`rope_scaling.rope_type` is `yarn`"), "{error}");
        let error = RopeConfig::of(Config::new(&json!({}))).plain(64).unwrap_err().to_string();
        assert!(error.contains("`rope_theta` is missing"), "{error}");
    }

    #[test]
    fn interleaving_has_a_tail_on_time() {
        let streams = interleaved_streams([24, 20, 20], 64);
        assert_eq!(streams[..7], [0, 1, 2, 0, 1, 2, 0]);
        assert_eq!(streams[57..], [0, 1, 2, 0, 0, 0, 0]);
    }
}

//! What can be expected of a precision: its class, the limits of that class, and whether a measurement is within them.
//!
//! The one place that has these numbers; `docs/precision.md` gives their reasons. A limit separates what is as good as the precision can be from what is broken. Only so many tokens can be
//! measured, so a limit counts as exceeded only where chance is no explanation: where the lower end of a one-sided 95 % confidence interval is above it.

use qhx_bundle::parity::{CONFIDENCE, Closeness, Limits, PlainRounding, WideFlips, is_above};
use qhx_ir::{Checked, Encoding, KvType, Name, OpKind, Slot};
use std::collections::{BTreeMap, BTreeSet};

/// What a bundle's numbers can do, by what it stores and how it computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// f32 throughout.
    F32,
    /// 16-bit floats, or keys and values in f16.
    F16,
    /// Computed in f16 throughout, as NPUs do.
    F16Arithmetic,
    /// Weights without loss, activations in int8.
    Int8Activations,
    /// int8 weights, f32 activations.
    Int8,
    /// int8 weights and activations.
    Int8Both,
    /// About 6 bits.
    Bits6,
    /// About 5 bits.
    Bits5,
    /// About 4 bits, rounded with calibration.
    Bits4Calibrated,
    /// About 4 bits, each number rounded for itself.
    Bits4,
}

/// Layer matrices with integer activations count from this share of numbers on.
const INTEGER_SHARE: f64 = 0.1;

impl Class {
    /// All of them, the closest to f32 first.
    pub const ALL: [Self; 10] = [
        Self::F32,
        Self::F16,
        Self::F16Arithmetic,
        Self::Int8Activations,
        Self::Int8,
        Self::Int8Both,
        Self::Bits6,
        Self::Bits5,
        Self::Bits4Calibrated,
        Self::Bits4,
    ];

    /// The class of a bundle's programs. `lossless` has the encoding in which each weight loses nothing of the checkpoint.
    ///
    /// Bits are the mean over the numbers of all layer matrices (not tables and output head), without scales; what is stored without loss, and floats, count as 8.
    pub fn of<'a>(programs: impl IntoIterator<Item = &'a Checked>, lossless: &BTreeMap<Name, Encoding>, calibrated: bool) -> Self {
        let mut sums = Sums::default();
        for program in programs {
            sums.add(program, lossless);
        }
        sums.class(calibrated)
    }

    /// What a model must keep to. A router that is nearly undecided takes other experts after the slightest rounding, so models that have one may differ more where anything is rounded.
    pub fn limits(self, has_router: bool) -> Limits {
        // What leaps of a router add to flips, mean and 99 % KL, and flips at wide margins.
        let leaps = match self {
            Self::F32 => [0.0; 4],
            _ if !has_router => [0.0; 4],
            Self::F16 | Self::F16Arithmetic => [0.002, 0.0005, 0.02, 0.002],
            _ => [0.03, 0.03, 1.0, 0.01],
        };
        let limits = |flips: f64, mean_kl: f64, p99_kl: f64, margin, share: f64| Limits {
            flips: flips + leaps[0],
            mean_kl: mean_kl + leaps[1],
            p99_kl: Some(p99_kl + leaps[2]),
            wide_flips: Some(WideFlips { margin, share: share + leaps[3] }),
        };
        match self {
            Self::F32 => limits(0.001, 1e-6, 1e-5, 0.01, 0.0),
            Self::F16 => limits(0.001, 1e-4, 1e-3, 0.1, 0.0005),
            Self::F16Arithmetic => limits(0.01, 0.001, 0.02, 0.5, 0.003),
            Self::Int8Activations | Self::Int8 => limits(0.04, 0.006, 0.04, 0.5, 0.003),
            Self::Int8Both => limits(0.05, 0.008, 0.05, 0.5, 0.003),
            Self::Bits6 => limits(0.10, 0.03, 0.2, 1.0, 0.01),
            Self::Bits5 => limits(0.17, 0.12, 0.8, 2.0, 0.02),
            Self::Bits4Calibrated => limits(0.18, 0.14, 1.2, 2.0, 0.03),
            Self::Bits4 => limits(0.32, 0.40, 2.5, 3.0, 0.05),
        }
    }

    /// Where the f32 model's best two logits are closer than this, either is as good, and a flip does not count against the limit. Rounding to few bits is judged by all flips.
    pub fn tie(self) -> f32 {
        match self {
            Self::F32 => 0.001,
            Self::F16 | Self::F16Arithmetic => 0.05,
            _ => 0.0,
        }
    }

    /// What people call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::F16Arithmetic => "f16 arithmetic",
            Self::Int8Activations => "int8 activations",
            Self::Int8 => "int8",
            Self::Int8Both => "int8 with int8 activations",
            Self::Bits6 => "6 bits",
            Self::Bits5 => "5 bits",
            Self::Bits4Calibrated => "4 bits with calibration",
            Self::Bits4 => "4 bits without calibration",
        }
    }
}

/// What a bundle's weights and products add up to.
#[derive(Default)]
struct Sums {
    /// Numbers of layer matrices, their bits, and those that meet integer activations.
    numbers: f64,
    bits: f64,
    integer: f64,
    /// Whether any weight lost something as integers, or as floats.
    quantised: bool,
    rounded: bool,
    f16_state: bool,
}

impl Sums {
    fn add(&mut self, program: &Checked, lossless: &BTreeMap<Name, Encoding>) {
        let last = program.stages.len().saturating_sub(1);
        let is_exact = |name: &Name, encoding: Encoding| encoding == Encoding::F32 || lossless.get(name) == Some(&encoding);
        for (name, weight) in program.weights.iter().filter(|(name, weight)| !is_exact(name, weight.encoding)) {
            self.quantised |= !weight.encoding.is_float() && weight.shape.len() > 1;
            self.rounded |= weight.encoding.is_float() && lossless.contains_key(name);
        }
        self.f16_state |= program.slots.values().any(|slot| matches!(slot, Slot::Kv { dtype: KvType::F16, .. }));
        let mut seen = BTreeSet::new();
        for (place, op) in program.ops.iter().enumerate() {
            let is_integer = match &op.op {
                OpKind::Linear { activation, .. } => activation.is_integer(),
                OpKind::Experts { form, .. } => form.is_integer(),
                _ => continue,
            };
            let has_logits = program.outputs.iter().any(|output| *output.name == *"logits");
            if has_logits && program.stage_of_op(place) == last {
                continue;
            }
            for name in op.op.matrices() {
                let Some(weight) = program.weights.get(name).filter(|_| seen.insert(name)) else { continue };
                let numbers = weight.shape.iter().product::<usize>() as f64;
                let bits = if is_exact(name, weight.encoding) { 8.0 } else { stored_bits(weight.encoding).min(8.0) };
                self.numbers += numbers;
                self.bits += bits * numbers;
                self.integer += if is_integer { numbers } else { 0.0 };
            }
        }
    }

    fn class(&self, calibrated: bool) -> Class {
        let integer = self.integer > INTEGER_SHARE * self.numbers;
        match (self.quantised, integer, self.bits / self.numbers.max(1.0)) {
            (false, false, _) if self.rounded || self.f16_state => Class::F16,
            (false, false, _) => Class::F32,
            (false, true, _) => Class::Int8Activations,
            (true, false, bits) if bits >= 7.0 => Class::Int8,
            (true, true, bits) if bits >= 7.0 => Class::Int8Both,
            (.., bits) if bits >= 5.5 => Class::Bits6,
            (.., bits) if bits >= 4.6 => Class::Bits5,
            _ if calibrated => Class::Bits4Calibrated,
            _ => Class::Bits4,
        }
    }
}

/// Bits of a number in an encoding, without scales.
fn stored_bits(encoding: Encoding) -> f64 {
    const COLUMNS: usize = 1 << 12;
    encoding.row_bytes(COLUMNS).map_or(32.0, |row| 8.0 * row.data as f64 / COLUMNS as f64)
}

/// How many times what plain rounding of the weights loses a bundle may lose: it also rounds activations, or keys and values, and may have fewer scales.
const ALLOWANCE: f64 = 2.0;

/// The limits of a model that is known to lose more than others: by plain rounding, or by the types of its own file.
pub(super) fn raised(limits: Limits, plain: &PlainRounding) -> Limits {
    let PlainRounding { flips, wide_flips, mean_kl, p99_kl } = *plain;
    // As many times the chance of a flip, which never comes to all tokens.
    let share = |plain: f64| 1.0 - (1.0 - plain).powf(ALLOWANCE);
    Limits {
        flips: limits.flips.max(share(flips)),
        mean_kl: limits.mean_kl.max(ALLOWANCE * mean_kl),
        p99_kl: limits.p99_kl.map(|limit| limit.max(ALLOWANCE * p99_kl)),
        wide_flips: limits.wide_flips.map(|wide| WideFlips { share: wide.share.max(share(wide_flips)), ..wide }),
    }
}

/// How far beyond the limits of its class a bundle is that something is wrong with, and not only coarse.
const BROKEN: f64 = 8.0;

/// What a bundle must keep to whose types the checkpoint has chosen: beyond that it is broken.
pub(super) fn of_what_is_broken(limits: Limits) -> Limits {
    Limits { flips: (BROKEN * limits.flips).min(0.9), mean_kl: BROKEN * limits.mean_kl, p99_kl: None, wide_flips: None }
}

/// The limits that a measurement exceeds, each with the measured value.
pub(super) fn exceeded(found: &Closeness) -> Vec<String> {
    let Closeness { tokens, ties, wide_flips, mean_kl, mean_kl_error, p99_kl, above_p99, limits, .. } = found;
    let (counted, is_above) = (found.counted(), |count: usize, limit: f64| is_above(count, *tokens, limit));
    let mut told = Vec::new();
    if is_above(counted, limits.flips) {
        let ties = if *ties > 0 { format!(", ties not counted: {ties}") } else { String::new() };
        told.push(format!("{} of tokens differ (limit {}{ties})", percent(share(counted, *tokens)), percent(limits.flips)));
    }
    if mean_kl.is_nan() || mean_kl - CONFIDENCE * mean_kl_error > limits.mean_kl {
        told.push(format!("mean KL {} (limit {})", number(*mean_kl), number(limits.mean_kl)));
    }
    if let Some(limit) = limits.p99_kl.filter(|_| is_above(*above_p99, 0.01)) {
        told.push(format!("99 % KL {} (limit {})", number(*p99_kl), number(limit)));
    }
    if let Some(limit) = limits.wide_flips.filter(|limit| is_above(*wide_flips, limit.share)) {
        let found = percent(share(*wide_flips, *tokens));
        let WideFlips { margin, share } = limit;
        let allowed = percent(share);
        told.push(format!(
            "{found} of tokens differ where the f32 model's best two logits were more than {margin} apart (limit {allowed})"
        ));
    }
    told
}

fn share(count: usize, of: usize) -> f64 {
    count as f64 / of.max(1) as f64
}

/// A share for people: `1.9 %`.
pub(super) fn percent(share: f64) -> String {
    let digits = if share >= 0.1 {
        0
    } else if share >= 0.002 {
        1
    } else {
        2
    };
    let text = format!("{:.digits$}", 100.0 * share);
    let text = if digits > 0 { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{} %", if text.is_empty() { "0" } else { text })
}

/// A divergence for people, with two digits that count.
pub(super) fn number(x: f64) -> String {
    if x == 0.0 || !x.is_finite() || x.abs() >= f64::MAX {
        return if x == 0.0 { "0".into() } else { "no number".into() };
    }
    let rounded: f64 = format!("{x:.1e}").parse().unwrap_or(x);
    if rounded.abs() < 1e-4 { format!("{rounded:e}") } else { format!("{rounded}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Config, families, plan::PrecisionPlan, precision::Precision};
    use qhx_ir::ActivationForm;
    use std::path::Path;

    fn programs(plan: &PrecisionPlan) -> Vec<Checked> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/qwen3_vl/config.json");
        let config: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let config = Config::new(&config);
        plan.write(families::of(config).unwrap(), config, &()).unwrap().programs.into_iter().map(|written| written.program).collect()
    }

    fn encodings(programs: &[Checked]) -> BTreeMap<Name, Encoding> {
        programs.iter().flat_map(|program| &program.weights).map(|(name, weight)| (name.clone(), weight.encoding)).collect()
    }

    #[test]
    fn a_class_follows_from_what_is_stored() {
        use Precision::*;
        let f32 = encodings(&programs(&F32.into()));
        let class = |precision: Precision| Class::of(&programs(&precision.into()), &f32, false);
        assert_eq!([F32, F16, W8, W4, W4Row].map(class), [Class::F32, Class::F16, Class::Int8Both, Class::Bits4, Class::Bits4]);
        assert_eq!(class(W8F16Head), Class::Int8Both);
        let w4 = programs(&W4.into());
        assert_eq!(Class::of(&w4, &f32, true), Class::Bits4Calibrated);
        // A checkpoint that is int4 itself loses nothing but what its activations do.
        assert_eq!(Class::of(&w4, &encodings(&w4), false), Class::Int8Activations);
        assert_eq!(Class::of(&programs(&F16.into()), &encodings(&programs(&F16.into())), false), Class::F16, "keys and values");
    }

    #[test]
    fn mixtures_have_the_class_of_their_mean_bits() {
        let f32 = encodings(&programs(&Precision::F32.into()));
        let base = programs(&Precision::W8.into());
        let weights = || {
            let all = base.iter().flat_map(|program| &program.weights);
            all.filter(|(_, weight)| !weight.encoding.is_float()).map(|(name, _)| name.clone())
        };
        let mixed = |low: &dyn Fn(&str) -> bool, form| {
            let plan = PrecisionPlan {
                encodings: weights().filter(|name| low(name)).map(|name| (name, Encoding::I4_BLOCK32)).collect(),
                activations: weights().map(|name| (name, form)).collect(),
                ..PrecisionPlan::from(Precision::W8)
            };
            Class::of(&programs(&plan), &f32, false)
        };
        assert_eq!(mixed(&|_| false, ActivationForm::F32), Class::Int8);
        assert_eq!(mixed(&|_| false, ActivationForm::I8Row), Class::Int8Both);
        assert_eq!(mixed(&|weight| weight.contains("attn"), ActivationForm::F32), Class::Bits6);
        assert_eq!(mixed(&|_| true, ActivationForm::F32), Class::Bits4);
    }

    #[test]
    fn limits_rise_from_class_to_class() {
        let limits = Class::ALL.map(|class| class.limits(false));
        assert!(limits.windows(2).all(|pair| {
            let [a, b] = pair else { return false };
            let wide = |limits: &Limits| limits.wide_flips.map(|wide| (wide.margin, wide.share)).unwrap();
            let (of_a, of_b) = (wide(a), wide(b));
            a.flips <= b.flips && a.mean_kl <= b.mean_kl && a.p99_kl <= b.p99_kl && of_a.0 <= of_b.0 && of_a.1 <= of_b.1
        }));
    }

    #[test]
    fn routers_are_allowed_more_where_anything_is_rounded() {
        for class in Class::ALL {
            let (plain, routed) = (class.limits(false), class.limits(true));
            match class {
                Class::F32 => assert_eq!(plain, routed),
                _ => assert!(routed.mean_kl > plain.mean_kl && routed.flips > plain.flips && routed.p99_kl > plain.p99_kl),
            }
        }
    }

    /// Flips, mean KL, 99 % KL, and the margin and share of flips at wide margins, of the rows of a table in `docs/precision.md`: those of the classes, then those of
    /// what routers add.
    fn published() -> Vec<[f64; 5]> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/precision.md");
        let text = std::fs::read_to_string(path).unwrap();
        let number = |cell: &str| {
            let digits = cell.trim().trim_start_matches('+');
            match digits.strip_suffix('%') {
                Some(percent) => percent.parse::<f64>().unwrap() / 100.0,
                None => digits.parse().unwrap(),
            }
        };
        let table = text.lines().skip_while(|line| !line.starts_with("| class | flips")).skip(2).take_while(|line| line.starts_with('|'));
        let row = |line: &str| {
            let cells: Vec<&str> = line.split('|').skip(2).collect();
            let [flips, mean_kl, p99_kl, wide, _] = cells[..] else { panic!("{line}") };
            let (margin, share) = wide.split_once(':').unwrap_or(("0", wide));
            let share = if share.trim() == "none" { 0.0 } else { number(share) };
            [number(flips), number(mean_kl), number(p99_kl), number(margin), share]
        };
        table.map(row).collect()
    }

    /// A limit that changes is a promise that changes: it is written down twice.
    #[test]
    fn limits_are_those_that_are_published() {
        let published = published();
        assert_eq!(published.len(), Class::ALL.len() + 2);
        for (place, class) in Class::ALL.into_iter().enumerate() {
            for has_router in [false, true] {
                let limits = class.limits(has_router);
                let WideFlips { margin, share } = limits.wide_flips.unwrap();
                let found = [limits.flips, limits.mean_kl, limits.p99_kl.unwrap(), f64::from(margin), share];
                let leaps = match class {
                    _ if !has_router => [0.0; 5],
                    Class::F32 => [0.0; 5],
                    Class::F16 | Class::F16Arithmetic => published[Class::ALL.len()],
                    _ => published[Class::ALL.len() + 1],
                };
                for (column, name) in ["flips", "mean KL", "99 % KL", "margin", "flips at wide margins"].into_iter().enumerate() {
                    let expected = published[place][column] + leaps[column];
                    assert!(
                        (found[column] - expected).abs() <= 1e-6 * expected,
                        "{}, router: {has_router}: {name} {} instead of {expected}",
                        class.name(),
                        found[column]
                    );
                }
            }
        }
        assert_eq!(Class::ALL.map(Class::tie), [0.001, 0.05, 0.05, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    }

    /// Over so many tokens that chance explains nothing, what is at a limit passes, and what is a little above it does not; one limit at a time.
    #[test]
    fn each_limit_of_each_class_is_kept_to() {
        const TOKENS: usize = 100_000_000;
        let count = |share: f64| (share * TOKENS as f64).round() as usize;
        for (class, has_router) in Class::ALL.into_iter().flat_map(|class| [(class, false), (class, true)]) {
            let limits = class.limits(has_router);
            let share = limits.wide_flips.unwrap().share;
            let at = Closeness {
                class: class.name().into(),
                tokens: TOKENS,
                flips: count(limits.flips),
                ties: 0,
                wide_flips: count(share),
                mean_kl: limits.mean_kl,
                mean_kl_error: 0.0,
                p99_kl: limits.p99_kl.unwrap(),
                above_p99: count(0.01),
                limits,
                own_types: false,
                plain: None,
            };
            assert_eq!(exceeded(&at), [""; 0], "{} at its limits", class.name());
            let above = |count: usize| count + count / 20 + 1;
            for (found, told) in [
                (Closeness { flips: above(at.flips), ..at.clone() }, "of tokens differ (limit"),
                (Closeness { mean_kl: at.mean_kl * 1.05, ..at.clone() }, "mean KL"),
                (Closeness { above_p99: above(at.above_p99), ..at.clone() }, "99 % KL"),
                (Closeness { wide_flips: above(at.wide_flips), ..at.clone() }, "best two logits were more than"),
            ] {
                let problems = exceeded(&found);
                assert!(problems.len() == 1 && problems[0].contains(told), "{}: {told}: {problems:?}", class.name());
            }
            // Ties are taken off the flips, and off nothing else.
            let tied = Closeness { flips: above(at.flips), ties: at.flips / 20 + 1, ..at.clone() };
            assert_eq!(exceeded(&tied), [""; 0], "{}", class.name());
            // What the error of the mean explains is no excess; a hair more is.
            let unsure = |times: f64| Closeness { mean_kl: at.mean_kl * 2.0, mean_kl_error: at.mean_kl * times / CONFIDENCE, ..at.clone() };
            assert!(exceeded(&unsure(1.01)).is_empty() && exceeded(&unsure(0.99)).len() == 1, "{}", class.name());
        }
    }

    /// Bits per number, whether weights lost something, and integer activations: where one class ends and the next begins.
    #[test]
    fn classes_begin_at_their_bits() {
        let class = |bits: f64, integer: f64, calibrated: bool| {
            let sums = Sums { numbers: 1000.0, bits: bits * 1000.0, integer: integer * 1000.0, quantised: true, ..Sums::default() };
            sums.class(calibrated)
        };
        for (bits, expected) in [(8.0, Class::Int8), (7.0, Class::Int8), (6.99, Class::Bits6), (5.5, Class::Bits6), (5.49, Class::Bits5)] {
            assert_eq!(class(bits, 0.0, false), expected, "{bits} bits");
        }
        for (bits, calibrated, expected) in
            [(4.6, true, Class::Bits5), (4.59, true, Class::Bits4Calibrated), (4.59, false, Class::Bits4), (2.0, false, Class::Bits4)]
        {
            assert_eq!(class(bits, 1.0, calibrated), expected, "{bits} bits");
        }
        // A tenth of integer activations is none, a little more is.
        assert_eq!(
            [0.0, 0.1, 0.11, 1.0].map(|share| class(8.0, share, false)),
            [Class::Int8, Class::Int8, Class::Int8Both, Class::Int8Both]
        );
        let lossless =
            |rounded, f16_state, integer| Sums { numbers: 1.0, bits: 8.0, integer, rounded, f16_state, ..Sums::default() }.class(true);
        assert_eq!(
            [lossless(false, false, 0.0), lossless(true, false, 0.0), lossless(false, true, 0.0)],
            [Class::F32, Class::F16, Class::F16]
        );
        assert_eq!(lossless(true, true, 1.0), Class::Int8Activations);
    }

    #[test]
    fn limits_are_raised_to_what_plain_rounding_loses() {
        let limits = Class::Int8.limits(false);
        let nothing = PlainRounding { flips: 0.02, wide_flips: 0.0, mean_kl: 0.002, p99_kl: 0.01 };
        assert_eq!(raised(limits, &nothing), limits, "never lowered");
        let much = raised(limits, &PlainRounding { flips: 0.36, wide_flips: 0.19, mean_kl: 0.5, p99_kl: 3.0 });
        let wide = much.wide_flips.unwrap();
        assert!((much.flips - 0.5904).abs() < 1e-9 && (wide.share - 0.3439).abs() < 1e-9 && wide.margin == 0.5, "{much:?}");
        assert_eq!((much.mean_kl, much.p99_kl), (1.0, Some(6.0)));
        let all = raised(limits, &PlainRounding { flips: 1.0, wide_flips: 1.0, mean_kl: 9.0, p99_kl: 20.0 });
        assert_eq!(all.flips, 1.0);
    }

    #[test]
    fn a_limit_is_exceeded_where_chance_is_no_explanation() {
        let found = |tokens: usize, flips: usize, mean_kl: f64| Closeness {
            class: "int8".into(),
            tokens,
            flips,
            ties: 0,
            wide_flips: 0,
            mean_kl,
            mean_kl_error: mean_kl / (tokens as f64).sqrt(),
            p99_kl: 0.01,
            above_p99: 0,
            limits: Class::Int8.limits(false),
            own_types: false,
            plain: None,
        };
        assert_eq!(exceeded(&found(2000, 38, 0.0013)), [""; 0]);
        assert_eq!(exceeded(&found(2000, 85, 0.0061)), [""; 0], "4.25 % may be 4 %");
        assert_eq!(exceeded(&found(2000, 200, 0.047)), ["10 % of tokens differ (limit 4 %)", "mean KL 0.047 (limit 0.006)"]);
        let tied = |ties| exceeded(&Closeness { ties, ..found(2000, 200, 0.001) });
        assert_eq!(tied(140), [""; 0], "ties are not counted");
        assert_eq!(tied(20), ["9 % of tokens differ (limit 4 %, ties not counted: 20)"]);
        let wide = Closeness { wide_flips: 20, above_p99: 100, p99_kl: 0.2, ..found(2000, 20, 0.001) };
        let told = exceeded(&wide);
        assert!(told.len() == 2 && told[0] == "99 % KL 0.2 (limit 0.04)" && told[1].starts_with("1 % of tokens differ where"), "{told:?}");
        assert_eq!(exceeded(&Closeness { mean_kl: f64::NAN, ..found(2000, 0, 0.0) }), ["mean KL no number (limit 0.006)"]);
        assert_eq!([0.0, 0.0007, 0.001, 0.0194, 0.1371].map(percent), ["0 %", "0.07 %", "0.1 %", "1.9 %", "14 %"]);
        assert_eq!([0.0, 0.00132, 0.12, 3.4e-7, 2.5].map(number), ["0", "0.0013", "0.12", "3.4e-7", "2.5"]);
    }
}

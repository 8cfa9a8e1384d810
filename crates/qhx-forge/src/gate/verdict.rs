//! The gate's verdict in words: what was compared, how much of it, what it means; and how much of the suite stands behind it.

use super::{
    judge::Standard,
    limits::{Class, number, percent},
    suite::{Suite, SuitePrompt},
};
use qhx_bundle::parity::{CONFIDENCE, Closeness, Covered, GateKind, PlainRounding};
use std::collections::BTreeMap;

/// What a measurement comes to.
#[derive(Clone, Debug, Default)]
pub(super) struct Outcome {
    /// The limits that are exceeded, in words.
    pub(super) exceeded: Vec<String>,
    /// Tokens of answers, and those that are not the f32 model's choice.
    pub(super) answer_flips: usize,
    pub(super) answer_tokens: usize,
    /// Whether all logits are numbers.
    pub(super) finite: bool,
}

impl Outcome {
    /// Whether the bundle passes. The strict gate allows no token of an answer to differ, whatever the limits are.
    pub(super) fn passed(&self, kind: GateKind) -> bool {
        self.finite && self.exceeded.is_empty() && (kind == GateKind::Tolerant || self.answer_flips == 0)
    }
}

/// The verdict as a sentence: what was compared, what was found beside its limits, and what that means.
pub(super) fn sentence(standard: &Standard, found: &Closeness, outcome: &Outcome) -> String {
    let Closeness { tokens, flips, ties, mean_kl, mean_kl_error, limits, .. } = found;
    let passed = outcome.passed(standard.kind);
    // A measurement above its limit passes where chance explains the difference.
    let limit = |above: bool, limit: String| match (standard.own_types && passed, above && passed) {
        (true, _) => String::new(),
        (false, true) => format!(" (limit {limit}; within chance for so few tokens)"),
        (false, false) => format!(" (limit {limit})"),
    };
    let differ = match flips {
        0 => format!("all {} tokens are the f32 model's choice", grouped(*tokens)),
        _ => {
            let share = found.counted() as f64 / *tokens as f64;
            let limit = limit(share > limits.flips, percent(limits.flips));
            let differ = format!("{} of {} tokens differ from the f32 model's choice{limit}", percent(share), grouped(*tokens));
            match ties {
                0 => differ,
                1 => differ + "; 1 more differs at a tie and is not counted",
                ties => format!("{differ}; {} more differ at ties and are not counted", grouped(*ties)),
            }
        }
    };
    let kl = match *mean_kl > limits.mean_kl && passed {
        true => format!("{} ± {}", number(*mean_kl), number(CONFIDENCE * mean_kl_error)),
        false => number(*mean_kl),
    };
    let limit_of_kl = limit(*mean_kl > limits.mean_kl, number(limits.mean_kl));
    let mut text = format!("{}: {differ}, mean KL {kl}{limit_of_kl}", standard.label);
    let class = &found.class;
    if passed && standard.own_types {
        return text + &format!(": this is the cost of the file's own types ({class})");
    }
    if passed {
        text += &match (standard.own_limits, *flips) {
            (true, _) => ": within the limits that were asked for".to_owned(),
            (false, 0) if class == Class::F32.name() => String::new(),
            (false, _) => match found.plain {
                None => format!(": as good as {class} gets"),
                Some(plain) => format!(": as good as {class} gets for this model, which loses more than others do: {}", told(&plain)),
            },
        };
        return text;
    }
    let mut reasons = outcome.exceeded.clone();
    if standard.kind == GateKind::Strict && outcome.answer_flips > 0 {
        let Outcome { answer_flips, answer_tokens, .. } = outcome;
        reasons.push(format!(
            "{} of {} tokens of answers differ, and the strict gate allows none",
            grouped(*answer_flips),
            grouped(*answer_tokens)
        ));
    }
    if !outcome.finite {
        reasons.push("some logits are not numbers".into());
    }
    let expected = if standard.own_limits {
        "the limits that were asked for are exceeded".to_owned()
    } else if standard.own_types {
        format!("more than the file's own types ({class}) can cost")
    } else {
        match found.plain {
            None => format!("not as good as {class} can be"),
            Some(plain) => format!("not as good as {class} can be for this model ({})", told(&plain)),
        }
    };
    text + &format!(": {expected}: {}", reasons.join("; "))
}

/// What plain rounding loses.
fn told(plain: &PlainRounding) -> String {
    format!("plain rounding changes {} of tokens, mean KL {}", percent(plain.flips), number(plain.mean_kl))
}

/// How many prompts of each kind were asked, of how many that the suite has, in the suite's order of kinds.
pub(super) fn coverage<'a>(suite: &Suite, asked: impl Iterator<Item = &'a SuitePrompt>) -> Vec<Covered> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    asked.for_each(|prompt| *counts.entry(prompt.kind()).or_default() += 1);
    let covered =
        |(kind, of): &(String, usize)| Covered { kind: kind.clone(), prompts: counts.get(&**kind).copied().unwrap_or(0), of: *of };
    suite.kinds().iter().map(covered).collect()
}

/// A number with its thousands apart: `1,024`.
fn grouped(n: usize) -> String {
    let digits = n.to_string();
    let first = digits.len() % 3;
    let groups = digits.as_bytes()[first..].chunks(3).map(|group| String::from_utf8_lossy(group).into_owned());
    let start = (first > 0).then(|| digits[..first].to_owned());
    start.into_iter().chain(groups).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::{super::limits::exceeded, *};

    #[test]
    fn verdicts_say_what_was_compared_and_what_the_limit_is() {
        let standard = |label: &str, class: Class, kind| Standard {
            label: label.into(),
            kind,
            class: class.name().into(),
            limits: class.limits(false),
            tie: class.tie(),
            own_limits: false,
            own_types: false,
            plain: None,
        };
        let found = |standard: &Standard, flips, mean_kl| Closeness {
            class: standard.class.clone(),
            tokens: 2386,
            flips,
            ties: 0,
            wide_flips: 0,
            mean_kl,
            mean_kl_error: 1e-5,
            p99_kl: 0.01,
            above_p99: 0,
            limits: standard.failing(),
            own_types: standard.own_types,
            plain: standard.plain,
        };
        let told = |standard: &Standard, flips, mean_kl, answer_flips, finite| {
            let found = found(standard, flips, mean_kl);
            let outcome = Outcome { exceeded: exceeded(&found), answer_flips, answer_tokens: 1024, finite };
            sentence(standard, &found, &outcome)
        };
        let (w8, f32) = (standard("w8", Class::Int8, GateKind::Tolerant), standard("f32", Class::F32, GateKind::Strict));
        assert_eq!(
            told(&w8, 45, 0.0013, 9, true),
            "w8: 1.9 % of 2,386 tokens differ from the f32 model's choice (limit 4 %), mean KL 0.0013 (limit 0.006): as good as int8 gets"
        );
        assert_eq!(
            told(&w8, 239, 0.047, 9, true),
            "w8: 10 % of 2,386 tokens differ from the f32 model's choice (limit 4 %), mean KL 0.047 (limit 0.006): not as good as int8 can be: 10 % of tokens differ (limit 4 %); mean KL 0.047 (limit 0.006)"
        );
        assert_eq!(told(&f32, 0, 3e-10, 0, true), "f32: all 2,386 tokens are the f32 model's choice, mean KL 3e-10 (limit 1e-6)");
        assert!(
            told(&f32, 1, 3e-10, 1, true)
                .ends_with("not as good as f32 can be: 1 of 1,024 tokens of answers differ, and the strict gate allows none")
        );
        assert!(told(&w8, 0, 0.0, 0, false).ends_with("some logits are not numbers"));
        let raised = w8.clone().raised(PlainRounding { flips: 0.1, wide_flips: 0.0, mean_kl: 0.05, p99_kl: 0.3 });
        assert_eq!(
            told(&raised, 239, 0.047, 9, true),
            "w8: 10 % of 2,386 tokens differ from the f32 model's choice (limit 19 %), mean KL 0.047 (limit 0.1): as good as int8 gets for this model, which loses more than others do: plain rounding changes 10 % of tokens, mean KL 0.05"
        );
        assert!(told(&raised, 239, 0.11, 9, true).ends_with(
            ": not as good as int8 can be for this model (plain rounding changes 10 % of tokens, mean KL 0.05): mean KL 0.11 (limit 0.1)"
        ));
        let own = Standard { own_limits: true, ..w8 };
        assert!(told(&own, 45, 0.0013, 9, true).ends_with(": within the limits that were asked for"));
        assert!(told(&own, 45, 0.013, 9, true).ends_with("the limits that were asked for are exceeded: mean KL 0.013 (limit 0.006)"));
        // What is within chance, what is at ties, and what only measures says so.
        let few = |standard: &Standard, flips, ties, mean_kl| {
            let found = Closeness { tokens: 96, ties, mean_kl_error: 0.001, ..found(standard, flips, mean_kl) };
            sentence(standard, &found, &Outcome { exceeded: exceeded(&found), answer_flips: 0, answer_tokens: 64, finite: true })
        };
        let w8 = standard("w8", Class::Int8, GateKind::Tolerant);
        assert_eq!(
            few(&w8, 5, 0, 0.0065),
            "w8: 5.2 % of 96 tokens differ from the f32 model's choice (limit 4 %; within chance for so few tokens), mean KL 0.0065 ± 0.0016 (limit 0.006; within chance for so few tokens): as good as int8 gets"
        );
        let f16 = standard("f16", Class::F16, GateKind::Tolerant);
        assert_eq!(
            few(&f16, 3, 3, 1e-5),
            "f16: 0 % of 96 tokens differ from the f32 model's choice (limit 0.1 %); 3 more differ at ties and are not counted, mean KL 1e-5 (limit 0.0001): as good as f16 gets"
        );
        assert!(few(&f16, 1, 1, 1e-5).contains("(limit 0.1 %); 1 more differs at a tie and is not counted, mean KL"));
        let own_types = Standard { own_types: true, ..standard("native", Class::Int8Activations, GateKind::Tolerant) };
        assert_eq!(
            few(&own_types, 3, 0, 0.005),
            "native: 3.1 % of 96 tokens differ from the f32 model's choice, mean KL 0.005: this is the cost of the file's own types (int8 activations)"
        );
        assert_eq!(
            few(&own_types, 60, 0, 0.1),
            "native: 62 % of 96 tokens differ from the f32 model's choice (limit 32 %), mean KL 0.1 (limit 0.048): more than the file's own types (int8 activations) can cost: 62 % of tokens differ (limit 32 %); mean KL 0.1 (limit 0.048)"
        );
        assert_eq!([0, 7, 999, 1000, 1234567].map(grouped), ["0", "7", "999", "1,000", "1,234,567"]);
    }
}

//! The gate's verdict in words: what was compared, how much of it, what it means; and how much of the suite stands behind it.

use super::suite::{Suite, SuitePrompt};
use qhx_bundle::parity::{Covered, GateKind};
use std::collections::BTreeMap;

/// What was found out about tokens.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tokens {
    pub(super) prompts: usize,
    pub(super) tokens: usize,
    /// Tokens that are not the f32 model's choice.
    pub(super) flips: usize,
    /// Those among them that the tolerant rule accepts.
    pub(super) accepted: usize,
    /// The largest distance of the f32 model's best two logits at a flip.
    pub(super) worst_margin: Option<f32>,
    /// Whether all logits are numbers.
    pub(super) finite: bool,
}

/// The verdict as a sentence.
pub(super) fn sentence(kind: GateKind, passed: bool, found: Tokens) -> String {
    let Tokens { prompts, tokens, flips, accepted, worst_margin, finite } = found;
    let count = |n: usize, what: &str| format!("{} {what}{}", grouped(n), if n == 1 { "" } else { "s" });
    let mut text = match (flips, worst_margin) {
        (0, _) | (_, None) => format!("{} of {}, each the f32 model's own choice", count(tokens, "token"), count(prompts, "answer")),
        (_, Some(margin)) => {
            let digits = if margin < 0.01 { 4 } else { 2 };
            let differ = if flips == 1 { "differs" } else { "differ" };
            format!(
                "{} of {} {differ} from the f32 model's choice, where its best two logits were {}{margin:.digits$} apart",
                grouped(flips),
                count(tokens, "token"),
                if flips == 1 { "" } else { "at most " },
            )
        }
    };
    let share = 100.0 * flips as f64 / tokens.max(1) as f64;
    match (kind, passed, flips) {
        (_, _, 0) => {}
        (GateKind::Tolerant, true, _) => text += &format!(" ({share:.1} %, within the limit of 1 %)"),
        (GateKind::Strict, _, _) => text += " (the strict gate allows none)",
        (GateKind::Tolerant, false, _) => {
            text += &format!(" ({share:.1} %, the limit is 1 %");
            if flips > accepted {
                text += &format!("; {} where that model was not close to undecided", grouped(flips - accepted));
            }
            text += ")";
        }
    }
    if !finite {
        text += ", and some logits are not numbers";
    }
    text
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
    use super::*;

    #[test]
    fn verdicts_say_what_was_compared_and_what_the_limit_is() {
        let found = Tokens { prompts: 16, tokens: 1024, flips: 0, accepted: 0, worst_margin: None, finite: true };
        let one = Tokens { flips: 1, accepted: 1, worst_margin: Some(0.02), ..found };
        let many = Tokens { flips: 137, accepted: 100, worst_margin: Some(1.5), ..found };
        assert_eq!(sentence(GateKind::Strict, true, found), "1,024 tokens of 16 answers, each the f32 model's own choice");
        assert_eq!(
            sentence(GateKind::Tolerant, true, one),
            "1 of 1,024 tokens differs from the f32 model's choice, where its best two logits were 0.02 apart (0.1 %, within the limit of 1 %)"
        );
        assert_eq!(
            sentence(GateKind::Strict, false, Tokens { worst_margin: Some(0.0012), ..one }),
            "1 of 1,024 tokens differs from the f32 model's choice, where its best two logits were 0.0012 apart (the strict gate allows none)"
        );
        assert_eq!(
            sentence(GateKind::Tolerant, false, many),
            "137 of 1,024 tokens differ from the f32 model's choice, where its best two logits were at most 1.50 apart (13.4 %, the limit is 1 %; 37 where that model was not close to undecided)"
        );
        let broken = Tokens { prompts: 1, tokens: 1, finite: false, ..found };
        assert_eq!(
            sentence(GateKind::Tolerant, false, broken),
            "1 token of 1 answer, each the f32 model's own choice, and some logits are not numbers"
        );
        assert_eq!([0, 7, 999, 1000, 1234567].map(grouped), ["0", "7", "999", "1,000", "1,234,567"]);
    }
}

//! The oracle of a bundle, replayed: every stored weight read, every prompt answered again, every stage compared.

use super::{Answer, Notes, VerifyError, draw, encode_noted, play, sums, top, tower_stages, weight_sums};
use crate::{Cancel, MediaKind, Medium, Model, Prompt};
use qhx_bundle::{
    Bundle,
    parity::{Case, CaseMedium, GateResult, MAX_PARITY_BYTES, Parity, StageCheck, is_above},
};
use qhx_ir::{Checked, Encoding, OpKind};
use serde::Serialize;

/// How a bundle stands to its oracle.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Whether everything is as it should be.
    pub passed: bool,
    /// The verdict in one line.
    pub result: String,
    /// Everything that is wrong, the most telling first; each names a stage where it can.
    pub problems: Vec<String>,
    /// The first stage that departs from the oracle, in the program's order; of damaged weights the stages that use them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stage: Option<String>,
    /// What ran it.
    pub device: String,
    /// Weights read and summed.
    pub weights: usize,
    /// Those whose sums are wrong.
    pub damaged_weights: Vec<String>,
    /// Prompts replayed.
    pub prompts: usize,
    /// Pictures and sounds among them, each encoded again.
    pub media: usize,
    /// Tokens compared.
    pub tokens: usize,
    /// Tokens that differ, in order.
    pub differences: Vec<Difference>,
    /// The largest difference of two logits among those that the oracle has.
    pub max_logit_error: f32,
    /// Each stage's departure from the oracle, in order.
    pub stages: Vec<StageDifference>,
    /// The stage that departs most, as a share of what it may.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worst_stage: Option<StageDifference>,
}

/// A token that is not the oracle's.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// The case.
    pub case: String,
    /// The token's place in the answer.
    pub step: usize,
    /// The oracle's token.
    pub expected: u32,
    /// This machine's.
    pub found: u32,
    /// How far the oracle's best logit is above its second.
    pub expected_margin: f32,
    /// How far this machine's best logit is above that of the oracle's token.
    pub found_margin: f32,
    /// The largest difference of two logits at this step, among those that the oracle has.
    pub logit_error: f32,
    /// Whether another device may differ here: the oracle was itself close to undecided.
    pub accepted: bool,
}

/// How far a stage is from the oracle.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StageDifference {
    /// The stage.
    pub stage: String,
    /// Root mean square over all rows of the difference, as a share of the row's norm.
    pub error: f64,
    /// What it may be.
    pub tolerance: f64,
}

/// What tokens and margins say under the tolerant rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing differs.
    Exact,
    /// What differs is within the rule.
    Tolerated,
    /// Too much differs, or where nothing should.
    Failed,
}

/// How far two machines may be apart that run the same bundle.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rule {
    /// The share of tokens that may differ …
    share: f64,
    /// … each where the oracle's best logit was less than this above its second.
    margin: f32,
}

impl Default for Rule {
    fn default() -> Self {
        Self { share: 0.01, margin: 0.5 }
    }
}

impl Rule {
    /// A model that loses more than others by plain rounding is as sensitive to the order of sums: it may differ as much as by that, at any margin.
    fn of(parity: &Parity) -> Self {
        let rule = Self::default();
        match parity.gate.closeness.as_ref().and_then(|closeness| closeness.plain) {
            Some(plain) => Self { share: rule.share.max(plain.flips), margin: f32::INFINITY },
            None => rule,
        }
    }

    /// Every difference accepted, and no more of them than may be, as far as chance allows to tell.
    pub(super) fn verdict(self, differences: usize, accepted: usize, tokens: usize) -> Verdict {
        match differences {
            0 => Verdict::Exact,
            n if n == accepted && !is_above(n, tokens, self.share) => Verdict::Tolerated,
            _ => Verdict::Failed,
        }
    }

    /// Whether a differing token is accepted: the margin is small, and below twice the largest logit error of the step.
    pub(super) fn accepts(self, margin: f32, logit_error: f32) -> bool {
        margin < (2.0 * logit_error).min(self.margin)
    }
}

/// What a stage's [`StageDifference::error`] may be on another device or instruction set: sums are taken in another order there, and where rows become integers a
/// number close to a half is rounded the other way.
pub fn tolerance(program: &Checked) -> f64 {
    let integer = program.ops.iter().any(|op| match &op.op {
        OpKind::Linear { activation, .. } => activation.is_integer(),
        OpKind::Experts { form, .. } => form.is_integer(),
        _ => false,
    });
    match (integer, program.weights.values().all(|weight| weight.encoding == Encoding::F32)) {
        (true, _) => 0.05,
        (false, false) => 5e-3,
        (false, true) => 1e-3,
    }
}

/// The share of how far a stage is from the f32 program by which it may differ between two machines, where a model loses more than others by plain rounding: what it makes of another order of sums it
/// carries on from stage to stage, as it does with rounding.
const CARRIED: f64 = 0.5;

/// What such a model's stage may differ by; nothing for other models.
fn carried(parity: &Parity, stage: &str) -> f64 {
    let is_sensitive = parity.gate.closeness.as_ref().is_some_and(|closeness| closeness.plain.is_some());
    let stage = parity.stages.iter().find(|result| is_sensitive && result.stage == stage);
    // Of two rows as long as each other, the difference as a share of their length.
    stage.map_or(0.0, |stage| CARRIED * (2.0 * (1.0 - stage.cosine)).max(0.0).sqrt())
}

/// Replays the oracle of `bundle` on `model`, which was loaded from it. `progress` gets (done, all) tokens.
pub fn replay(bundle: &Bundle, model: &Model, cancel: &Cancel, progress: &mut dyn FnMut(usize, usize)) -> Result<Report, VerifyError> {
    let parity = oracle(bundle)?;
    let mut replay = Replay::new(model, &parity);
    replay.compare_weights(&parity, weight_sums(bundle, cancel)?);
    let all = parity.cases.iter().map(|case| case.ids.len()).sum();
    for case in &parity.cases {
        let before = replay.report.tokens;
        replay.case(case, cancel, &mut |step| progress(before + step, all))?;
    }
    Ok(replay.finish())
}

/// The oracle that a bundle carries.
pub fn oracle(bundle: &Bundle) -> Result<Parity, VerifyError> {
    let parity = parity(bundle, Parity::from_json)?;
    parity.ok_or_else(|| VerifyError::NoOracle { bundle: bundle.place().into() })
}

/// What the gate said when a bundle was made; none where it was made without one.
pub fn verdict(bundle: &Bundle) -> Result<Option<GateResult>, VerifyError> {
    parity(bundle, Parity::verdict_in)
}

/// How the precisions of a bundle were chosen, in a sentence; none where there was nothing to choose, or no gate.
pub fn choices(bundle: &Bundle) -> Result<Option<String>, VerifyError> {
    Ok(parity(bundle, Parity::choices_note_in)?.flatten())
}

/// What `read` finds in the text of a bundle's `parity.json`, where it has one.
fn parity<T>(bundle: &Bundle, read: impl Fn(&str) -> Result<T, String>) -> Result<Option<T>, VerifyError> {
    let Some(file) = &bundle.manifest().parity else { return Ok(None) };
    let wrong = |reason: String| VerifyError::Oracle { bundle: bundle.place().into(), reason };
    if bundle.manifest().files.get(file).is_some_and(|entry| entry.bytes > MAX_PARITY_BYTES) {
        return Err(wrong(format!("`{file}` may have {MAX_PARITY_BYTES} bytes at most")));
    }
    read(&bundle.read_text(file)?).map(Some).map_err(wrong)
}

/// A report in the making.
struct Replay<'a> {
    model: &'a Model,
    report: Report,
    rule: Rule,
    /// By stage: those of towers, then those of the text, the head last.
    sums: Vec<StageSum>,
}

/// What is known of a stage so far.
struct StageSum {
    stage: String,
    tolerance: f64,
    /// Of squared relative differences.
    sum: f64,
    count: usize,
}

impl<'a> Replay<'a> {
    fn new(model: &'a Model, parity: &Parity) -> Self {
        let device = model.device();
        let instructions = device.text("instructions").map_or(String::new(), |set| format!(", {set}"));
        let report = Report {
            passed: false,
            result: String::new(),
            problems: Vec::new(),
            stage: None,
            device: format!("{}{instructions}", device.name),
            weights: 0,
            damaged_weights: Vec::new(),
            prompts: parity.cases.len(),
            media: parity.cases.iter().map(|case| case.media.len()).sum(),
            tokens: 0,
            differences: Vec::new(),
            max_logit_error: 0.0,
            stages: Vec::new(),
            worst_stage: None,
        };
        let new = |stage: String, tolerance: f64| {
            let tolerance = tolerance.max(carried(parity, &stage));
            StageSum { stage, tolerance, sum: 0.0, count: 0 }
        };
        let towers = [MediaKind::Image, MediaKind::Audio].into_iter().filter_map(|kind| model.tower_program(kind));
        let towers = towers.flat_map(|program| tower_stages(program).into_iter().map(|stage| new(stage.to_string(), tolerance(program))));
        let text = model.program().stages.iter().map(|stage| new(stage.name.to_string(), tolerance(model.program())));
        Self { model, report, rule: Rule::of(parity), sums: towers.chain(text).collect() }
    }

    /// Every weight that either side knows must be on the other, with the same sums.
    fn compare_weights(&mut self, parity: &Parity, found: Vec<qhx_bundle::parity::WeightSum>) {
        self.report.weights = found.len();
        for weight in &found {
            let expected = parity.weights.iter().find(|w| w.weight == weight.weight);
            let whole = expected.is_some_and(|e| sums::same(e.sum, weight.sum) && sums::same(e.squares, weight.squares));
            if !whole {
                let stages = weight.stages.join(", ");
                self.report
                    .problems
                    .push(format!("stage {stages}: the weight `{}` is damaged: its numbers have other sums", weight.weight));
                self.report.stage.get_or_insert(stages);
                self.report.damaged_weights.push(weight.weight.clone());
            }
        }
        for weight in parity.weights.iter().filter(|w| !found.iter().any(|f| f.weight == w.weight)) {
            self.report.problems.push(format!("stage {}: the weight `{}` is gone", weight.stages.join(", "), weight.weight));
        }
    }

    fn case(&mut self, case: &Case, cancel: &Cancel, progress: &mut dyn FnMut(usize)) -> Result<(), VerifyError> {
        let stages: Vec<_> = case.stages.iter().map(|stage| stage.stage.as_str().into()).collect();
        let mut notes = Notes::new(&stages, &case.rows);
        let prompt = self.prompt(case, cancel)?;
        let mut session = self.model.session()?;
        let (mut steps, rule) = (Vec::new(), self.rule);
        let mut logits = |step: usize, logits: &[f32]| {
            steps.push(Step::compare(case, step, logits, rule));
            progress(step + 1);
        };
        play(&mut session, &prompt, Answer::Given(&case.ids), cancel, &mut logits, &mut |first, tap| notes.take(first, tap))?;
        self.report.tokens += steps.len();
        for step in steps {
            self.report.max_logit_error = self.report.max_logit_error.max(step.logit_error);
            self.report.differences.extend(step.difference);
            self.note_last_stage(step.relative_error);
        }
        self.compare_stages(&case.stages, &notes);
        Ok(())
    }

    /// The prompt of a case. Its media are drawn and encoded, and what the towers made is compared.
    fn prompt(&mut self, case: &Case, cancel: &Cancel) -> Result<Prompt, VerifyError> {
        let ids = case.prompt_ids.clone();
        if case.media.is_empty() {
            return Ok(Prompt::from_ids(ids));
        }
        let media = case.media.iter().map(|medium| self.medium(medium)).collect::<Result<Vec<_>, _>>()?;
        let prompt = Prompt::from_ids_with_media(self.model, ids, &media)?;
        for (expected, medium) in case.media.iter().zip(&media) {
            let notes = encode_noted(self.model, medium, &expected.rows, cancel)?;
            self.compare_stages(&expected.stages, &notes);
        }
        Ok(prompt)
    }

    fn medium(&self, expected: &CaseMedium) -> Result<Medium, VerifyError> {
        let (medium, sum) = draw(expected.drawing, self.model.name(), self.model.media())?;
        if sum != expected.sha256 {
            let reason = format!("this qhx makes another {}: forge the bundle again", medium.name());
            return Err(VerifyError::Oracle { bundle: self.model.name().into(), reason });
        }
        Ok(medium)
    }

    fn compare_stages(&mut self, expected: &[StageCheck], notes: &Notes) {
        // A device that was prepared ahead of time shows only some stages, and where it reads prompts and another one writes only of some rows: the
        // others show themselves in the logits.
        let is_shown = |stage: &&StageCheck| notes.stage(&stage.stage).iter().any(|row| !row.is_empty());
        for expected in expected.iter().filter(is_shown) {
            let rows = notes.stage(&expected.stage);
            let found = notes.numbers(&expected.stage);
            let Some(sum) = self.sums.iter_mut().find(|sum| sum.stage == expected.stage) else {
                self.report.problems.push(format!("the oracle has a stage `{}`, which the program has not", expected.stage));
                continue;
            };
            let numbers = expected.numbers.chunks_exact(3).zip(found.chunks_exact(3));
            for ((expected, found), _) in numbers.zip(rows).filter(|(_, row)| !row.is_empty()) {
                let scale = f64::from(expected[0]).max(1e-20);
                let error = expected.iter().zip(found).map(|(e, f)| (f64::from(*e) - f64::from(*f)).abs() / scale);
                sum.add(error.fold(0.0, larger));
            }
        }
    }

    fn note_last_stage(&mut self, error: f64) {
        if let Some(last) = self.sums.last_mut() {
            last.add(error);
        }
    }

    fn finish(self) -> Report {
        let Self { mut report, sums, rule, .. } = self;
        report.stages = sums.into_iter().filter(|sum| sum.count > 0).map(StageSum::difference).collect();
        let share = |stage: &StageDifference| stage.error / stage.tolerance;
        report.worst_stage = report.stages.iter().max_by(|a, b| share(a).total_cmp(&share(b))).cloned();
        if let Some(first) = report.stages.iter().find(|stage| stage.error.is_nan() || stage.error > stage.tolerance) {
            report.problems.push(format!(
                "stage {}: departs from the oracle by {:.2e} (at most {:.0e} is allowed)",
                first.stage, first.error, first.tolerance
            ));
            report.stage.get_or_insert(first.stage.clone());
        }
        let accepted = report.differences.iter().filter(|d| d.accepted).count();
        let verdict = rule.verdict(report.differences.len(), accepted, report.tokens);
        if verdict == Verdict::Failed
            && let Some(d) = report.differences.iter().find(|d| !d.accepted).or(report.differences.first())
        {
            report.problems.push(format!(
                "{} of {} tokens differ ({accepted} of them where that may be); `{}`, token {}: expected {} (margin {:.3}), found {} (margin {:.3})",
                report.differences.len(), report.tokens, d.case, d.step, d.expected, d.expected_margin, d.found, d.found_margin
            ));
        }
        report.passed = report.problems.is_empty();
        report.result = format!(
            "{}: {} of {} tokens as expected, largest logit difference {:.2e}, {} weights {}",
            if report.passed { "pass" } else { "FAIL" },
            report.tokens - report.differences.len(),
            report.tokens,
            report.max_logit_error,
            report.weights,
            if report.damaged_weights.is_empty() { "whole".into() } else { format!("of which {} damaged", report.damaged_weights.len()) },
        );
        report
    }
}

impl StageSum {
    fn add(&mut self, error: f64) {
        self.sum += error * error;
        self.count += 1;
    }

    fn difference(self) -> StageDifference {
        StageDifference { stage: self.stage, error: (self.sum / self.count as f64).sqrt(), tolerance: self.tolerance }
    }
}

/// The larger of two; what is no number is larger than any.
fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::INFINITY } else { a.max(b) }
}

/// A step beside the oracle's.
struct Step {
    logit_error: f32,
    relative_error: f64,
    difference: Option<Difference>,
}

impl Step {
    fn compare(case: &Case, step: usize, logits: &[f32], rule: Rule) -> Self {
        let (ids, expected) = (&case.top_ids[step], &case.top_logits[step]);
        let logit = |id: u32| logits.get(id as usize).copied().unwrap_or(f32::NAN);
        let (mut error, mut scale) = (0.0, 1.0f64);
        for (&id, &expected) in ids.iter().zip(expected) {
            error = larger(error, (f64::from(logit(id)) - f64::from(expected)).abs());
            scale = scale.max(f64::from(expected).abs());
        }
        let best = top(logits, 1).first().map_or((u32::MAX, f32::NAN), |&best| best);
        let expected_id = case.ids[step];
        let expected_margin = expected[0] - expected.get(1).copied().unwrap_or(f32::NEG_INFINITY);
        let difference = (best.0 != expected_id).then(|| Difference {
            case: case.name.clone(),
            step,
            expected: expected_id,
            found: best.0,
            expected_margin,
            found_margin: best.1 - logit(expected_id),
            logit_error: error as f32,
            accepted: rule.accepts(expected_margin, error as f32),
        });
        Self { logit_error: error as f32, relative_error: error / scale, difference }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tolerant_rule() {
        let rule = Rule::default();
        assert!(rule.accepts(0.03, 0.02) && !rule.accepts(0.05, 0.02) && !rule.accepts(0.6, 9.0) && !rule.accepts(0.0, 0.0));
        assert_eq!(rule.verdict(0, 0, 10), Verdict::Exact);
        assert_eq!(rule.verdict(1, 1, 100), Verdict::Tolerated);
        assert_eq!(rule.verdict(2, 2, 100), Verdict::Tolerated, "it may be chance");
        assert_eq!(rule.verdict(3, 3, 100), Verdict::Failed, "more than 1 %");
        assert_eq!(rule.verdict(20, 20, 1000), Verdict::Failed, "more than 1 %");
        assert_eq!(rule.verdict(1, 0, 1000), Verdict::Failed, "not accepted");
        assert_eq!(larger(f64::NAN, 1.0), f64::INFINITY);
    }
}

//! Compares what the bundle did with what the f32 program does, number by number as the f32 pass brings them, and gives the verdict.

use super::{
    Scope,
    suite::Drawn,
    teacher::{Audience, Pass},
    verdict::{Tokens, sentence},
};
use qhx_bundle::parity::{Case, CaseKind, CaseMedium, Flip, GateKind, GateResult, StageCheck};
use qhx_ir::Name;
use qhx_runtime::{
    Prompt,
    verify::{Notes, Verdict, golden::cosine, share, top},
};
use std::collections::HashMap;

/// Logits that are kept of each step.
const TOP: usize = 5;
/// Rows of a case whose stages are compared …
const COMPARED_ROWS: usize = 16;
/// … and noted in the oracle.
const NOTED_ROWS: usize = 3;

/// A prompt that the bundle has answered.
pub(super) struct Played {
    pub(super) name: String,
    pub(super) prompt: Prompt,
    /// Its media, and what the bundle's towers made of them.
    pub(super) media: Vec<(Drawn, Notes)>,
    pub(super) ids: Vec<u32>,
    /// `[tokens, vocabulary]`.
    pub(super) logits: Vec<f32>,
    pub(super) notes: Notes,
}

/// The rows of a tower's call that are compared.
pub(super) fn compared_medium_rows(rows: usize) -> Vec<usize> {
    compared_rows(rows, 1)
}

/// The rows of a case that are compared: evenly spread over the prompt and over the answer, the first, the prompt's last and the very last among them.
pub(super) fn compared_rows(prompt: usize, tokens: usize) -> Vec<usize> {
    let spread = |first: usize, count: usize| {
        let wanted = count.min(COMPARED_ROWS / 2);
        (0..wanted).map(move |i| first + if wanted > 1 { i * (count - 1) / (wanted - 1) } else { count - 1 })
    };
    let mut rows: Vec<usize> = spread(0, prompt).chain(spread(prompt, tokens - 1)).collect();
    rows.dedup();
    rows
}

/// The places in [`compared_rows`] that the oracle notes.
fn noted(rows: &[usize], prompt: usize) -> Vec<usize> {
    let last_of_prompt = rows.iter().rposition(|&row| row < prompt).unwrap_or(0);
    let mut places = vec![0, last_of_prompt, rows.len() - 1];
    places.dedup();
    places.truncate(NOTED_ROWS);
    places
}

/// Everything that the f32 pass says about the answers.
pub(super) struct Judge<'a> {
    played: &'a [Played],
    vocabulary: usize,
    steps: Vec<Vec<Step>>,
    /// By stage: cosines of rows.
    cosines: Vec<(Name, Vec<f64>)>,
    /// Places in `cosines`.
    places: HashMap<Name, usize>,
    progress: &'a mut dyn FnMut(usize, usize),
}

/// The verdict with all that it rests on.
pub(super) struct Measurement {
    pub(super) gate: GateResult,
    /// Mean and lowest cosine of each stage.
    pub(super) cosines: Vec<(Name, f64, f64)>,
    pub(super) cases: Vec<Case>,
}

impl<'a> Judge<'a> {
    pub(super) fn new(played: &'a [Played], vocabulary: usize, stages: &[Name], progress: &'a mut dyn FnMut(usize, usize)) -> Self {
        let steps = played.iter().map(|p| vec![Step::default(); p.ids.len()]).collect();
        let places = stages.iter().enumerate().map(|(place, stage)| (stage.clone(), place)).collect();
        Self { played, vocabulary, steps, cosines: stages.iter().map(|s| (s.clone(), Vec::new())).collect(), places, progress }
    }

    /// The verdict of `kind`; `row_stages` are those whose rows the oracle notes.
    pub(super) fn verdict(mut self, kind: GateKind, row_stages: &[Name], scope: Scope) -> Measurement {
        if let Some((_, cosines)) = self.cosines.last_mut() {
            cosines.extend(self.steps.iter().flatten().map(Step::cosine));
        }
        let mean = |list: &[f64]| if list.is_empty() { 1.0 } else { list.iter().sum::<f64>() / list.len() as f64 };
        let lowest = |list: &[f64]| list.iter().copied().fold(1.0, |m, x| if x.is_nan() || m < x { m } else { x });
        let cosines: Vec<_> = self.cosines.iter().map(|(stage, list)| (stage.clone(), round(mean(list)), round(lowest(list)))).collect();
        let worst = cosines.iter().min_by(|a, b| a.1.total_cmp(&b.1));
        let (worst_stage, worst_cosine) = worst.map_or((String::new(), 1.0), |(stage, cosine, _)| (stage.to_string(), *cosine));
        let cases: Vec<Case> =
            self.played.iter().zip(&self.steps).map(|(played, steps)| case(played, steps, self.vocabulary, row_stages)).collect();
        let flips: Vec<&Flip> = cases.iter().flat_map(|case| &case.flips).collect();
        let accepted = flips.iter().filter(|flip| flip.accepted).count();
        let tokens = cases.iter().map(|case| case.ids.len()).sum();
        let finite = self.steps.iter().flatten().all(|step| step.error.is_finite());
        let passed = finite
            && matches!((kind, Verdict::of(flips.len(), accepted, tokens)), (_, Verdict::Exact) | (GateKind::Tolerant, Verdict::Tolerated));
        let kls: Vec<f64> = self.steps.iter().flatten().map(Step::kl).collect();
        let exact_prompts = cases.iter().filter(|case| case.flips.is_empty()).count();
        let largest = |list: &mut dyn Iterator<Item = f32>| list.fold(None, |m: Option<f32>, x| Some(m.map_or(x, |m| m.max(x))));
        let worst_margin = largest(&mut flips.iter().map(|flip| flip.margin));
        let found = Tokens { prompts: cases.len(), tokens, flips: flips.len(), accepted, worst_margin, finite };
        let result = sentence(kind, passed, found);
        Measurement {
            gate: GateResult {
                kind,
                passed,
                result,
                prompts: cases.len(),
                exact_prompts,
                tokens,
                flips: flips.len(),
                worst_accepted_margin: largest(&mut flips.iter().filter(|flip| flip.accepted).map(|flip| flip.margin)),
                max_logit_error: cases.iter().flat_map(|case| &case.logit_errors).fold(0.0, |m, &x| m.max(x)),
                mean_kl: round(mean(&kls)),
                max_kl: round(kls.iter().copied().fold(0.0, f64::max)),
                worst_stage,
                worst_cosine,
                limited: (!scope.limited.is_empty()).then(|| scope.limited.join("; ")),
                covered: scope.covered,
            },
            cosines,
            cases,
        }
    }
}

fn case(played: &Played, steps: &[Step], vocabulary: usize, row_stages: &[Name]) -> Case {
    let rows = played.notes.rows();
    let places = noted(rows, played.prompt.ids().len());
    let tops: Vec<_> = played.logits.chunks_exact(vocabulary).map(|row| top(row, TOP)).collect();
    let flips = steps.iter().zip(&played.ids).enumerate().filter(|(_, (step, id))| step.best.0 != **id).map(|(n, (step, &id))| Flip {
        step: n,
        id,
        f32_id: step.best.0,
        margin: finite(step.margin()),
        logit_error: finite(step.error),
        accepted: Verdict::accepts(step.margin(), step.error),
    });
    Case {
        kind: if played.media.is_empty() { CaseKind::Text } else { CaseKind::Media },
        name: played.name.clone(),
        prompt_ids: played.prompt.ids().to_vec(),
        media: played.media.iter().map(|(drawn, notes)| medium(drawn, notes)).collect(),
        ids: played.ids.clone(),
        top_ids: tops.iter().map(|top| top.iter().map(|(id, _)| *id).collect()).collect(),
        top_logits: tops.iter().map(|top| top.iter().map(|(_, logit)| finite(*logit)).collect()).collect(),
        f32_margins: steps.iter().map(|step| finite(step.margin())).collect(),
        logit_errors: steps.iter().map(|step| finite(step.error)).collect(),
        mean_kl: round(steps.iter().map(Step::kl).sum::<f64>() / steps.len() as f64),
        flips: flips.collect(),
        rows: places.iter().map(|&place| rows[place]).collect(),
        stages: row_stages.iter().map(|stage| check(&played.notes, &places, stage)).collect(),
    }
}

fn medium(drawn: &Drawn, notes: &Notes) -> CaseMedium {
    let Drawn { drawing, sha256, medium } = drawn;
    let (places, rows) = (noted(notes.rows(), medium.rows() / 2), notes.rows());
    let stages = notes.stages().map(|stage| check(notes, &places, stage)).collect();
    CaseMedium { drawing: *drawing, sha256: *sha256, rows: places.iter().map(|&place| rows[place]).collect(), stages }
}

/// What the oracle notes of a stage, at some places among the rows that were compared.
fn check(notes: &Notes, places: &[usize], stage: &str) -> StageCheck {
    let numbers = notes.numbers(stage);
    let numbers = places.iter().flat_map(|&place| numbers.get(3 * place..3 * place + 3).unwrap_or(&[0.0; 3])).map(|x| finite(*x));
    StageCheck { stage: stage.into(), numbers: numbers.collect() }
}

impl Audience for Judge<'_> {
    fn stage(&mut self, stage: &str, pass: &Pass, values: &[f32]) {
        let Some(cosines) = self.places.get(stage).map(|&place| &mut self.cosines[place].1) else { return };
        if !pass.is_last {
            return;
        }
        let played = &self.played[pass.case];
        let notes = pass.medium.map_or(&played.notes, |number| &played.media[number].1);
        for (&row, found) in notes.rows().iter().zip(notes.stage(stage)).filter(|(_, found)| !found.is_empty()) {
            let row = share(row, pass.rows, values.len() / found.len());
            if let Some(expected) = row.and_then(|row| values.get(row * found.len()..(row + 1) * found.len())) {
                cosines.push(cosine(found, expected));
            }
        }
    }

    fn logits(&mut self, pass: &Pass, first_id: usize, width: usize, logits: &[f32]) {
        let found = &self.played[pass.case].logits;
        for (i, expected) in logits.chunks_exact(width).enumerate() {
            let n = pass.first_step + i;
            let found = &found[n * self.vocabulary + first_id..][..width];
            self.steps[pass.case][n].add(first_id, expected, found);
        }
    }

    fn output(&mut self, _: &Pass, _: &str, _: &[f32]) {}

    fn progress(&mut self, done: usize, all: usize) {
        (self.progress)(done, all);
    }
}

/// A row of logits beside the f32 program's, taken in blocks.
#[derive(Clone, Debug)]
struct Step {
    /// The f32 program's best id and its logit, and the second logit.
    best: (u32, f32),
    second: f32,
    /// Largest difference.
    error: f32,
    /// `Σ exp(a − max a)`, and `Σ exp(a − max a)·(a − b)`.
    f32_sum: f64,
    weighted: f64,
    /// The bundle's maximum, and `Σ exp(b − max b)`.
    max: f32,
    sum: f64,
    /// `Σ ab`, `Σ aa`, `Σ bb`.
    products: [f64; 3],
}

impl Default for Step {
    fn default() -> Self {
        let low = f32::NEG_INFINITY;
        Self { best: (0, low), second: low, error: 0.0, f32_sum: 0.0, weighted: 0.0, max: low, sum: 0.0, products: [0.0; 3] }
    }
}

impl Step {
    fn add(&mut self, first_id: usize, expected: &[f32], found: &[f32]) {
        let before = self.best.1;
        for (i, (&a, &b)) in expected.iter().zip(found).enumerate() {
            if a > self.best.1 {
                self.second = self.best.1;
                self.best = ((first_id + i) as u32, a);
            } else {
                self.second = self.second.max(a);
            }
            let difference = (a - b).abs();
            self.error = if difference.is_nan() { f32::INFINITY } else { self.error.max(difference) };
        }
        let scale = |from: f32, to: f32| if from == f32::NEG_INFINITY { 0.0 } else { (f64::from(from) - f64::from(to)).exp() };
        let shrink = scale(before, self.best.1);
        (self.f32_sum, self.weighted) = (self.f32_sum * shrink, self.weighted * shrink);
        let max = found.iter().copied().fold(self.max, f32::max);
        self.sum *= scale(self.max, max);
        self.max = max;
        for (&a, &b) in expected.iter().zip(found) {
            let e = (f64::from(a) - f64::from(self.best.1)).exp();
            self.f32_sum += e;
            self.weighted += e * (f64::from(a) - f64::from(b));
            self.sum += (f64::from(b) - f64::from(max)).exp();
            let (a, b) = (f64::from(a), f64::from(b));
            self.products = [self.products[0] + a * b, self.products[1] + a * a, self.products[2] + b * b];
        }
    }

    fn margin(&self) -> f32 {
        self.best.1 - self.second
    }

    /// `Σ p ln(p/q)` with p the f32 program's distribution.
    fn kl(&self) -> f64 {
        let (log_p, log_q) = (f64::from(self.best.1) + self.f32_sum.ln(), f64::from(self.max) + self.sum.ln());
        let kl = self.weighted / self.f32_sum - log_p + log_q;
        if kl.is_finite() { kl.max(0.0) } else { f64::MAX }
    }

    fn cosine(&self) -> f64 {
        let [ab, aa, bb] = self.products;
        if aa * bb > 0.0 { ab / (aa.sqrt() * bb.sqrt()) } else { 0.0 }
    }
}

/// JSON has no infinities.
fn finite(x: f32) -> f32 {
    if x.is_finite() { x } else { f32::MAX }
}

/// Nine digits are enough for people.
fn round(x: f64) -> f64 {
    if x.is_finite() { format!("{x:.8e}").parse().unwrap_or(x) } else { f64::MAX }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_logits_add_up() {
        let a: Vec<f32> = (0..50).map(|i| ((i * 37 % 50) as f32 / 5.0).sin() * 4.0).collect();
        let b: Vec<f32> = a.iter().enumerate().map(|(i, x)| x + if i % 3 == 0 { 0.125 } else { -0.0625 }).collect();
        let whole = {
            let mut step = Step::default();
            step.add(0, &a, &b);
            step
        };
        let mut cut = Step::default();
        for first in (0..50).step_by(7) {
            let end = 50.min(first + 7);
            cut.add(first, &a[first..end], &b[first..end]);
        }
        assert_eq!((cut.best, cut.second, cut.error), (whole.best, whole.second, whole.error));
        let p = |logits: &[f32]| {
            let sum: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
            logits.iter().map(|&x| f64::from(x).exp() / sum).collect::<Vec<_>>()
        };
        let expected: f64 = p(&a).iter().zip(p(&b)).map(|(p, q)| p * (p / q).ln()).sum();
        assert!((whole.kl() - expected).abs() < 1e-9 && (cut.kl() - expected).abs() < 1e-9, "{} {} {expected}", whole.kl(), cut.kl());
        let mut sorted = a.clone();
        sorted.sort_by(|x, y| y.total_cmp(x));
        assert_eq!(whole.margin(), sorted[0] - sorted[1]);
        assert!((whole.cosine() - cosine(&a, &b)).abs() < 1e-12);
    }

    #[test]
    fn rows_that_are_compared() {
        assert_eq!(compared_rows(1, 1), [0]);
        assert_eq!(compared_rows(3, 2), [0, 1, 2, 3]);
        let rows = compared_rows(600, 64);
        assert!(rows.len() == 16 && rows[0] == 0 && rows.contains(&599) && rows.ends_with(&[662]) && rows.is_sorted());
        assert_eq!(noted(&rows, 600).iter().map(|&p| rows[p]).collect::<Vec<_>>(), [0, 599, 662]);
        assert_eq!(noted(&[0], 1), [0]);
    }
}

//! Compares what the bundle did with what the f32 program does, number by number as the f32 pass brings them, and gives the verdict.

use super::{
    Scope,
    limits::{exceeded, of_what_is_broken, raised},
    suite::Drawn,
    teacher::{Audience, Pass},
    verdict::{Outcome, sentence},
};
use qhx_bundle::parity::{Case, CaseKind, CaseMedium, Closeness, Flip, GateKind, GateResult, Limits, PlainRounding, StageCheck};
use qhx_ir::Name;
use qhx_runtime::{
    Prompt,
    eval::{Divergence, RowDivergence, TokenDivergence},
    verify::{Notes, centred, golden::cosine, share, top},
};
use std::{
    collections::{BTreeSet, HashMap},
    thread,
};

/// Logits that are kept of each step.
const TOP: usize = 5;
/// Rows of a case whose stages are compared …
const COMPARED_ROWS: usize = 16;
/// … and noted in the oracle.
const NOTED_ROWS: usize = 3;

/// Logits from which on they are compared by several threads.
const NUMBERS_PER_THREAD: usize = 1 << 16;

/// A prompt that the bundle has answered.
pub(super) struct Played {
    pub(super) name: String,
    pub(super) prompt: Prompt,
    /// Its media, and what the bundle's towers made of them.
    pub(super) media: Vec<(Drawn, Notes)>,
    pub(super) ids: Vec<u32>,
    /// Rows of the prompt, those before its last, whose logits are compared too.
    pub(super) shown: usize,
    /// `[shown + tokens, vocabulary]`.
    pub(super) logits: Vec<f32>,
    pub(super) notes: Notes,
}

impl Played {
    /// The tokens that follow on the compared rows.
    fn targets(&self) -> impl Iterator<Item = u32> {
        let prompt = self.prompt.ids();
        prompt[prompt.len() - self.shown..].iter().chain(&self.ids).copied()
    }

    /// The same tokens, for logits of another: all zero yet.
    pub(super) fn for_another(&self) -> Self {
        Self {
            name: self.name.clone(),
            prompt: self.prompt.clone(),
            media: self.media.iter().map(|(drawn, _)| (drawn.clone(), Notes::default())).collect(),
            ids: self.ids.clone(),
            shown: self.shown,
            logits: vec![0.0; self.logits.len()],
            notes: Notes::default(),
        }
    }
}

/// What a bundle is held to.
#[derive(Clone, Debug)]
pub(super) struct Standard {
    /// What the bundle's precision is called.
    pub(super) label: String,
    pub(super) kind: GateKind,
    /// The class of precision.
    pub(super) class: String,
    pub(super) limits: Limits,
    /// See [`Class::tie`](super::limits::Class::tie).
    pub(super) tie: f32,
    /// Whether somebody asked for these limits.
    pub(super) own_limits: bool,
    /// Whether the types of the checkpoint decide how the bundle computes: the gate then measures what they cost, and fails only what is broken.
    pub(super) own_types: bool,
    /// What the limits were raised for.
    pub(super) plain: Option<PlainRounding>,
}

impl Standard {
    /// Raised for a model that loses more than others by plain rounding already.
    pub(super) fn raised(self, plain: PlainRounding) -> Self {
        Self { limits: raised(self.limits, &plain), plain: Some(plain), ..self }
    }

    /// The limits beyond which a bundle fails.
    pub(super) fn failing(&self) -> Limits {
        if self.own_types { of_what_is_broken(self.limits) } else { self.limits }
    }
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
    /// By case: the compared rows of its prompt, then the steps of its answer.
    rows: Vec<Vec<RowDivergence>>,
    /// By stage: cosines of rows.
    cosines: Vec<(Name, Vec<f64>)>,
    /// Places in `cosines`.
    places: HashMap<Name, usize>,
    /// Stages whose rows the bundle keeps without their mean.
    centred: BTreeSet<String>,
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
    pub(super) fn new(
        played: &'a [Played],
        vocabulary: usize,
        stages: &[Name],
        centred: BTreeSet<String>,
        progress: &'a mut dyn FnMut(usize, usize),
    ) -> Self {
        let rows = played.iter().map(|played| played.targets().map(RowDivergence::new).collect()).collect();
        let places = stages.iter().enumerate().map(|(place, stage)| (stage.clone(), place)).collect();
        Self { played, vocabulary, rows, cosines: stages.iter().map(|s| (s.clone(), Vec::new())).collect(), places, centred, progress }
    }

    /// The verdict by a standard; `row_stages` are those whose rows the oracle notes.
    pub(super) fn verdict(mut self, standard: &Standard, row_stages: &[Name], scope: Scope) -> Measurement {
        if let Some((_, cosines)) = self.cosines.last_mut() {
            cosines.extend(self.rows.iter().flatten().map(RowDivergence::cosine));
        }
        let mean = |list: &[f64]| if list.is_empty() { 1.0 } else { list.iter().sum::<f64>() / list.len() as f64 };
        let lowest = |list: &[f64]| list.iter().copied().fold(1.0, |m, x| if x.is_nan() || m < x { m } else { x });
        let cosines: Vec<_> = self.cosines.iter().map(|(stage, list)| (stage.clone(), round(mean(list)), round(lowest(list)))).collect();
        let worst = cosines.iter().min_by(|a, b| a.1.total_cmp(&b.1));
        let (worst_stage, worst_cosine) = worst.map_or((String::new(), 1.0), |(stage, cosine, _)| (stage.to_string(), *cosine));
        let limits = standard.failing();
        let case = |(played, rows): (&Played, &Vec<RowDivergence>)| case(played, rows, self.vocabulary, row_stages, &limits);
        let cases: Vec<Case> = self.played.iter().zip(&self.rows).map(case).collect();
        let flips: Vec<&Flip> = cases.iter().flat_map(|case| &case.flips).collect();
        let tokens = cases.iter().map(|case| case.ids.len()).sum();
        let judged = self.closeness(standard, limits);
        let outcome = Outcome {
            exceeded: exceeded(&judged),
            answer_flips: flips.len(),
            answer_tokens: tokens,
            finite: self.rows.iter().flatten().all(|row| row.error().is_finite()),
        };
        let exact_prompts = cases.iter().filter(|case| case.flips.is_empty()).count();
        let largest = |list: &mut dyn Iterator<Item = f32>| list.fold(None, |m: Option<f32>, x| Some(m.map_or(x, |m| m.max(x))));
        let result = sentence(standard, &judged, &outcome);
        let closeness = match standard.own_types {
            true => self.closeness(standard, raised(standard.limits, &self.plain(standard))),
            false => judged,
        };
        let kls = self.rows.iter().flatten().map(RowDivergence::kl);
        Measurement {
            gate: GateResult {
                kind: standard.kind,
                passed: outcome.passed(standard.kind),
                result,
                prompts: cases.len(),
                exact_prompts,
                tokens,
                flips: flips.len(),
                worst_accepted_margin: largest(&mut flips.iter().filter(|flip| flip.accepted).map(|flip| flip.margin)),
                max_logit_error: cases.iter().flat_map(|case| &case.logit_errors).fold(0.0, |m, &x| m.max(x)),
                mean_kl: closeness.mean_kl,
                max_kl: round(kls.fold(0.0, f64::max)),
                worst_stage,
                worst_cosine,
                closeness: Some(closeness),
                limited: (!scope.limited.is_empty()).then(|| scope.limited.join("; ")),
                covered: scope.covered,
            },
            cosines,
            cases,
        }
    }

    /// Whether a standard's limits are exceeded.
    pub(super) fn exceeds(&self, standard: &Standard) -> bool {
        !exceeded(&self.closeness(standard, standard.failing())).is_empty()
    }

    /// What was lost, by plain rounding if that was read.
    pub(super) fn plain(&self, standard: &Standard) -> PlainRounding {
        let Closeness { tokens, flips, wide_flips, mean_kl, p99_kl, .. } = self.closeness(standard, standard.limits);
        let share = |count: usize| round(count as f64 / tokens.max(1) as f64);
        PlainRounding { flips: share(flips), wide_flips: share(wide_flips), mean_kl, p99_kl }
    }

    /// How close all compared rows are, with these limits.
    fn closeness(&self, standard: &Standard, limits: Limits) -> Closeness {
        let tokens: Vec<TokenDivergence> = self.rows.iter().flatten().map(RowDivergence::token).collect();
        let count = |is: &dyn Fn(&TokenDivergence) -> bool| tokens.iter().filter(|token| is(token)).count();
        let is_wide = |token: &TokenDivergence| token.is_flip && limits.wide_flips.is_some_and(|wide| token.margin > wide.margin);
        let is_tie = |token: &TokenDivergence| token.is_flip && token.margin < standard.tie;
        let (flips, ties, wide_flips) = (count(&|token| token.is_flip), count(&is_tie), count(&is_wide));
        let (above_p99, all) = (count(&|token| limits.p99_kl.is_some_and(|limit| token.kl > limit)), tokens.len());
        let together = Divergence::of(tokens);
        Closeness {
            class: standard.class.clone(),
            tokens: all,
            flips,
            ties,
            wide_flips,
            mean_kl: round(together.kl_mean),
            mean_kl_error: round(together.kl_mean_error),
            p99_kl: round(together.kl_p99),
            above_p99,
            limits,
            own_types: standard.own_types,
            plain: standard.plain,
        }
    }
}

fn case(played: &Played, rows: &[RowDivergence], vocabulary: usize, row_stages: &[Name], limits: &Limits) -> Case {
    let steps = &rows[played.shown..];
    let noted_rows = played.notes.rows();
    let places = noted(noted_rows, played.prompt.ids().len());
    let tops: Vec<_> = played.logits.chunks_exact(vocabulary).skip(played.shown).map(|row| top(row, TOP)).collect();
    let flips = steps.iter().zip(&played.ids).enumerate().filter(|(_, (step, id))| step.best() != **id).map(|(n, (step, &id))| Flip {
        step: n,
        id,
        f32_id: step.best(),
        margin: finite(step.margin()),
        logit_error: finite(step.error()),
        accepted: limits.wide_flips.is_none_or(|wide| step.margin() <= wide.margin),
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
        logit_errors: steps.iter().map(|step| finite(step.error())).collect(),
        mean_kl: round(steps.iter().map(RowDivergence::kl).sum::<f64>() / steps.len() as f64),
        flips: flips.collect(),
        rows: places.iter().map(|&place| noted_rows[place]).collect(),
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
                cosines.push(if self.centred.contains(stage) { cosine(found, &centred(expected)) } else { cosine(found, expected) });
            }
        }
    }

    fn logits(&mut self, pass: &Pass, first_id: usize, width: usize, logits: &[f32]) {
        let (first, vocabulary) = (pass.first_step, self.vocabulary);
        let found = &self.played[pass.case].logits;
        let rows = &mut self.rows[pass.case][first..][..logits.len() / width];
        let threads = if logits.len() < NUMBERS_PER_THREAD { 1 } else { thread::available_parallelism().map_or(1, usize::from) };
        let piece = rows.len().div_ceil(threads).max(1);
        let add = move |number: usize, rows: &mut [RowDivergence], expected: &[f32]| {
            for (i, (row, expected)) in rows.iter_mut().zip(expected.chunks_exact(width)).enumerate() {
                let place = (first + number * piece + i) * vocabulary + first_id;
                row.add(first_id, expected, &found[place..][..width]);
            }
        };
        let mut pieces = rows.chunks_mut(piece).zip(logits.chunks(piece * width)).enumerate();
        let own = pieces.next();
        thread::scope(|scope| {
            pieces.for_each(|(number, (rows, expected))| _ = scope.spawn(move || add(number, rows, expected)));
            if let Some((number, (rows, expected))) = own {
                add(number, rows, expected);
            }
        });
    }

    fn output(&mut self, _: &Pass, _: &str, _: &[f32]) {}

    fn progress(&mut self, done: usize, all: usize) {
        (self.progress)(done, all);
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
    fn rows_that_are_compared() {
        assert_eq!(compared_rows(1, 1), [0]);
        assert_eq!(compared_rows(3, 2), [0, 1, 2, 3]);
        let rows = compared_rows(600, 64);
        assert!(rows.len() == 16 && rows[0] == 0 && rows.contains(&599) && rows.ends_with(&[662]) && rows.is_sorted());
        assert_eq!(noted(&rows, 600).iter().map(|&p| rows[p]).collect::<Vec<_>>(), [0, 599, 662]);
        assert_eq!(noted(&[0], 1), [0]);
    }
}

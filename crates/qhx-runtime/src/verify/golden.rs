//! An oracle from outside: a folder with `oracle.json` and, for more than tokens, `oracle.safetensors`.
//!
//! ```text
//! oracle.json         {"prompts": [{"name": "len5", "ids": [326, 436], "greedy": [81, 285, 285]}, …], …}
//! oracle.safetensors  len5.step_logits [tokens, vocabulary]: the logits from which each token was chosen   (f32, may be absent)
//!                     len5.tap.STAGE   [prompt rows, width]: what a stage made of the prompt              (f32, may be absent)
//! ```
//!
//! Other fields and tensors are passed over. A program that is f32 throughout is held strictly: every token, logits and stages within 0.1 %. Any other is held to
//! the limits that it passed when it was made, or else to the tolerant rule, with the margins of the given logits.

use super::{Answer, Notes, Verdict, VerifyError, centred, centred_stages, play, replay::Rule, row_stages, top};
use crate::{
    Cancel, Error, Model,
    tensors::{self, Tensor},
};
use qhx_bundle::{
    BundlePath, files,
    parity::{Limits, is_above},
};
use qhx_ir::{ActivationForm, Encoding, OpKind};
use serde::{Deserialize, Serialize};
use std::{borrow::Cow, collections::HashMap, path::Path};

/// The longest `oracle.json` that is read.
const MAX_BYTES: u64 = 64 << 20;
/// What f32 programs may differ by, as a share of the largest number.
const STRICT: f64 = 1e-3;

/// How a bundle stands to an outside oracle.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Whether everything is as it should be.
    pub passed: bool,
    /// The verdict in one line.
    pub result: String,
    /// Everything that is wrong.
    pub problems: Vec<String>,
    /// Whether every token had to be equal.
    pub strict: bool,
    /// Prompts replayed, and those that are too long for the model's context.
    pub prompts: usize,
    /// Prompts left out: the model has no room for them.
    pub left_out: usize,
    /// Tokens compared.
    pub tokens: usize,
    /// Tokens that differ, in order.
    pub differences: Vec<super::Difference>,
    /// The largest difference of two logits.
    pub max_logit_error: f32,
    /// The stage whose cosine is lowest, where the oracle has stages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worst_stage: Option<(String, f64)>,
}

#[derive(Deserialize)]
struct File {
    prompts: Vec<GoldenPrompt>,
}

#[derive(Deserialize)]
struct GoldenPrompt {
    name: String,
    ids: Vec<u32>,
    greedy: Vec<u32>,
}

/// Holds `model` to the folder `golden`. `limits` are those that the bundle passed when it was made, where it says so.
pub fn golden(
    model: &Model,
    golden: &Path,
    limits: Option<&Limits>,
    cancel: &Cancel,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Report, VerifyError> {
    let (prompts, tensors) = read(golden, model)?;
    let strict = is_f32(model);
    let mut report = Report {
        passed: false,
        result: String::new(),
        problems: Vec::new(),
        strict,
        prompts: 0,
        left_out: 0,
        tokens: 0,
        differences: Vec::new(),
        max_logit_error: 0.0,
        worst_stage: None,
    };
    let all = prompts.iter().map(|p| p.greedy.len()).sum();
    for prompt in &prompts {
        if prompt.ids.len() + prompt.greedy.len() - 1 > model.context() {
            report.left_out += 1;
            continue;
        }
        report.prompts += 1;
        one(model, prompt, &tensors, strict, &mut report, cancel, &mut |done| progress(done, all))?;
    }
    let accepted = report.differences.iter().filter(|d| d.accepted).count();
    let verdict = match limits {
        Some(limits) => within(limits, &report),
        None => Rule::default().verdict(report.differences.len(), accepted, report.tokens),
    };
    if (strict && verdict != Verdict::Exact || verdict == Verdict::Failed)
        && let Some(d) = report.differences.iter().find(|d| strict || !d.accepted).or(report.differences.first())
    {
        report.problems.push(format!(
            "{} of {} tokens differ; `{}`, token {}: expected {} (margin {:.3}), found {} (margin {:.3})",
            report.differences.len(),
            report.tokens,
            d.case,
            d.step,
            d.expected,
            d.expected_margin,
            d.found,
            d.found_margin
        ));
    }
    if report.prompts == 0 {
        report.problems.push("no prompt of the oracle fits the model's context".into());
    }
    report.passed = report.problems.is_empty();
    let equal = report.tokens - report.differences.len();
    let verdict = if report.passed { "pass" } else { "FAIL" };
    report.result =
        format!("{verdict}: {equal} of {} tokens as expected, largest logit difference {:.2e}", report.tokens, report.max_logit_error);
    Ok(report)
}

/// What tokens and margins say under the limits of the bundle's precision.
fn within(limits: &Limits, report: &Report) -> Verdict {
    let wide = |margin: f32| report.differences.iter().filter(|d| d.expected_margin > margin).count();
    let is_above = |count: usize, limit: f64| is_above(count, report.tokens, limit);
    match report.differences.len() {
        0 => Verdict::Exact,
        n if is_above(n, limits.flips) => Verdict::Failed,
        _ if limits.wide_flips.is_some_and(|limit| is_above(wide(limit.margin), limit.share)) => Verdict::Failed,
        _ => Verdict::Tolerated,
    }
}

fn one(
    model: &Model,
    prompt: &GoldenPrompt,
    tensors: &HashMap<String, Tensor>,
    strict: bool,
    report: &mut Report,
    cancel: &Cancel,
    progress: &mut dyn FnMut(usize),
) -> Result<(), VerifyError> {
    let width = model.vocabulary().logits;
    let known = tensors.get(&format!("{}.step_logits", prompt.name));
    let stages: Vec<_> =
        row_stages(model.program()).into_iter().filter(|s| tensors.contains_key(&format!("{}.tap.{s}", prompt.name))).collect();
    // Stages are given for the prompt; an answer that makes the session read it again (another epoch) must not replace them.
    let rows: Vec<usize> = (0..prompt.ids.len()).collect();
    let mut notes = Notes::new(&stages, &rows);
    let (mut errors, before) = (0.0f64, report.tokens);
    let mut session = model.session()?;
    let answering = std::cell::Cell::new(false);
    let mut logits = |step: usize, logits: &[f32]| {
        answering.set(true);
        let expected = known.and_then(|known| known.values.get(step * width..(step + 1) * width));
        let best = top(logits, 1).first().map_or((u32::MAX, f32::NAN), |&best| best);
        let own = |id: u32| logits.get(id as usize).copied().unwrap_or(f32::NAN);
        let error = expected.map_or(0.0, |expected| expected.iter().zip(logits).fold(0f32, |m, (a, b)| worse(m, (a - b).abs())));
        if let Some(expected) = expected {
            let scale = expected.iter().fold(1f32, |m, x| m.max(x.abs()));
            errors = errors.max(f64::from(error / scale));
        }
        report.max_logit_error = report.max_logit_error.max(error);
        report.tokens += 1;
        if best.0 != prompt.greedy[step] {
            // Without given logits this machine's own margin stands for the oracle's.
            let found_margin = best.1 - own(prompt.greedy[step]);
            let margin = expected.map_or(found_margin, |expected| match top(expected, 2)[..] {
                [first, second] => first.1 - second.1,
                _ => f32::INFINITY,
            });
            let error = if expected.is_some() { error } else { report.max_logit_error };
            report.differences.push(super::Difference {
                case: prompt.name.clone(),
                step,
                expected: prompt.greedy[step],
                found: best.0,
                expected_margin: margin,
                found_margin,
                logit_error: error,
                accepted: Rule::default().accepts(margin, error),
            });
        }
        progress(before + step + 1);
    };
    let mut taps = |first: usize, tap: qhx_ir::Tap<'_>| {
        if !answering.get() {
            notes.take(first, tap);
        }
    };
    let read = crate::Prompt::from_ids(prompt.ids.clone());
    play(&mut session, &read, Answer::Given(&prompt.greedy), cancel, &mut logits, &mut taps)?;
    if strict && (errors.is_nan() || errors > STRICT) {
        report.problems.push(format!("`{}`: logits differ by {errors:.2e} of the largest (at most {STRICT:.0e} is allowed)", prompt.name));
    }
    let without_mean = centred_stages([model.program()]);
    for stage in &stages {
        let expected = &tensors[&format!("{}.tap.{stage}", prompt.name)].values;
        let rows = notes.stage(stage);
        let expected: Cow<'_, [f32]> = match (rows.first().map(Vec::len), without_mean.contains(&**stage)) {
            (Some(width @ 1..), true) => expected.chunks(width).flat_map(centred).collect(),
            _ => expected.into(),
        };
        let found = rows.concat();
        if found.len() != expected.len() {
            report.problems.push(format!("stage {stage}: `{}` has {} numbers, the oracle {}", prompt.name, found.len(), expected.len()));
            continue;
        }
        let cosine = cosine(&found, &expected);
        if report.worst_stage.as_ref().is_none_or(|(_, worst)| cosine < *worst) {
            report.worst_stage = Some((stage.to_string(), cosine));
        }
        let scale = expected.iter().fold(1f32, |m, x| m.max(x.abs()));
        let error = found.iter().zip(&*expected).fold(0f32, |m, (a, b)| worse(m, (a - b).abs() / scale));
        if strict && (error.is_nan() || f64::from(error) > STRICT) {
            report.problems.push(format!("stage {stage}: departs by {error:.2e} on `{}` (at most {STRICT:.0e} is allowed)", prompt.name));
        }
    }
    Ok(())
}

/// The larger of two; what is no number is larger than any.
fn worse(a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() { f32::INFINITY } else { a.max(b) }
}

/// Cosine of the angle between two lists; 1 where both are zero.
pub fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let (mut product, mut squares) = (0f64, (0f64, 0f64));
    for (&a, &b) in a.iter().zip(b) {
        let (a, b) = (f64::from(a), f64::from(b));
        product += a * b;
        squares = (squares.0 + a * a, squares.1 + b * b);
    }
    match squares {
        (0.0, 0.0) => 1.0,
        (a, b) if a * b > 0.0 => product / (a.sqrt() * b.sqrt()),
        _ => 0.0,
    }
}

fn is_f32(model: &Model) -> bool {
    let program = model.program();
    program.weights.values().all(|w| w.encoding == Encoding::F32)
        && program.ops.iter().all(
            |op| !matches!(&op.op, OpKind::Linear { activation: form, .. } | OpKind::Experts { form, .. } if *form != ActivationForm::F32),
        )
}

/// The prompts and tensors of a folder, everything checked that can be.
fn read(folder: &Path, model: &Model) -> Result<(Vec<GoldenPrompt>, HashMap<String, Tensor>), VerifyError> {
    let path = folder.join("oracle.json");
    let wrong = |reason: String| VerifyError::Golden { path: path.clone(), reason };
    let missing = |reason: String| wrong(format!("{reason}; a golden folder has an oracle.json (docs/parity.md shows it)"));
    let root = folder.canonicalize().map_err(|e| missing(format!("cannot be read: {e}")))?;
    let inside = |name: &str| BundlePath::new(name).map_err(|e| wrong(e.to_string()));
    let text = files::read_inside(&root, &inside("oracle.json")?, MAX_BYTES).map_err(|e| missing(e.reason()))?;
    let File { prompts } = serde_json::from_slice(&text).map_err(|e| wrong(format!("is no oracle: {e}")))?;
    if prompts.is_empty() {
        return Err(wrong("has no prompts".into()));
    }
    let vocabulary = model.vocabulary();
    for prompt in &prompts {
        if prompt.ids.is_empty() || prompt.greedy.is_empty() {
            return Err(wrong(format!("prompt `{}` needs `ids` and `greedy`, at least one of each", prompt.name)));
        }
        if let Some(id) = prompt.ids.iter().chain(&prompt.greedy).find(|&&id| id as usize >= vocabulary.ids.min(vocabulary.logits)) {
            return Err(wrong(format!(
                "prompt `{}` has the id {id}, which is not in the model's vocabulary of {}",
                prompt.name, vocabulary.ids
            )));
        }
    }
    let path = folder.join("oracle.safetensors");
    let bytes = match files::read_inside(&root, &inside("oracle.safetensors")?, tensors::MAX_TENSOR_FILE_BYTES) {
        Err(error) if error.is_missing() => return Ok((prompts, HashMap::new())),
        bytes => bytes.map_err(Error::from)?,
    };
    let tensors: HashMap<_, _> = tensors::parse(&path, &bytes)?.into_iter().map(|tensor| (tensor.name.clone(), tensor)).collect();
    for prompt in &prompts {
        let expected = [prompt.greedy.len(), vocabulary.logits];
        if let Some(found) = tensors.get(&format!("{}.step_logits", prompt.name)).filter(|t| t.shape != expected) {
            let reason =
                format!("`{}` has shape {:?}, expected {expected:?} (tokens of the answer, logits of the model)", found.name, found.shape);
            return Err(VerifyError::Golden { path, reason });
        }
    }
    Ok((prompts, tensors))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cosines() {
        assert_eq!(cosine(&[1.0, 0.0], &[2.0, 0.0]), 1.0);
        assert_eq!((cosine(&[0.0], &[0.0]), cosine(&[0.0], &[1.0])), (1.0, 0.0));
        assert!(cosine(&[1.0, 1.0], &[1.0, -1.0]).abs() < 1e-12);
    }
}

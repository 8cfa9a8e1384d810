//! The generate loop: a prompt's ids in, tokens and text out, one by one.

use crate::{
    Cancel, Error, LogitProcessor, MediaKind, NextToken, Prompt, Session, Work,
    placement::{Fallback, PlacedStage, Placement},
    sample::SamplerConfig,
    timing::{PrefillPath, Timing, milliseconds},
    writer::Writer,
};
use serde::Serialize;
use std::time::Instant;

/// How an answer is to be made.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateOptions {
    /// The most tokens to choose.
    pub max_new: usize,
    /// Treat end-of-answer ids as any other.
    pub ignore_eos: bool,
    /// Texts that end the answer; they are not part of it.
    pub stop: Vec<String>,
    /// How tokens are chosen.
    pub sampler: SamplerConfig,
    /// Keep the logits from which each token was chosen.
    pub keep_logits: bool,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self { max_new: 256, ignore_eos: false, stop: Vec::new(), sampler: SamplerConfig::default(), keep_logits: false }
    }
}

/// A part of an answer as it comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece<'a> {
    /// The token that was chosen; absent for text that was held back until the end.
    pub id: Option<u32>,
    /// The text that is now certain: never half a character, never part of a stop string, often empty.
    pub text: &'a str,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FinishReason {
    /// As many tokens as were asked for, or as the context holds.
    Length,
    /// An end-of-answer id or a stop string.
    Stop,
    /// Somebody asked to stop.
    Cancelled,
}

/// An answer. Its JSON is what `--json` prints.
#[derive(Clone, Debug, Serialize)]
pub struct Generation {
    /// The prompt.
    pub prompt_ids: Vec<u32>,
    /// The tokens chosen; a token that ended the answer is the last of them.
    pub ids: Vec<u32>,
    /// Their text, without special tokens and without a stop string; empty for a model without tokenizer.
    pub text: String,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Where the time went.
    pub timing: Timing,
    /// How the prompt was read.
    pub prefill_path: PrefillPath,
    /// Where each stage ran, and how often.
    pub stages: Vec<StageRuns>,
    /// Stages that ran elsewhere than was preferred.
    pub fallbacks: Vec<Fallback>,
    /// Something a person should know about how it ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// Media in the prompt.
    #[serde(skip)]
    pub media: usize,
    /// Rows of the prompt that the session already had.
    #[serde(skip)]
    pub kept_rows: usize,
    /// The logits from which each token was chosen, `[generated, vocabulary]`, where they were asked for.
    #[serde(skip)]
    pub step_logits: Vec<f32>,
}

impl Generation {
    /// An answer that was cancelled before it began.
    pub(crate) fn cancelled(prompt: &Prompt, timing: Timing) -> Self {
        Self {
            prompt_ids: prompt.ids().to_vec(),
            ids: Vec::new(),
            text: String::new(),
            finish_reason: FinishReason::Cancelled,
            timing,
            prefill_path: PrefillPath::Batched,
            stages: Vec::new(),
            fallbacks: Vec::new(),
            note: None,
            media: prompt.media().len(),
            kept_rows: 0,
            step_logits: Vec::new(),
        }
    }
}

/// Where a stage ran, and how often.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StageRuns {
    /// The stage's name.
    pub stage: String,
    /// The device's name.
    pub device: String,
    /// Calls.
    pub runs: usize,
}

/// Answers `prompt` on `session`, which keeps what it has in common with it. Each piece goes to `on_piece` as soon as it is certain.
///
/// Afterwards the session holds the prompt and all chosen tokens but the last. Cancelled while the prompt is read, it holds what it held. Many answers at once are
/// the business of the [`crate::engine`].
pub fn generate(
    session: &mut Session,
    prompt: &Prompt,
    options: &GenerateOptions,
    cancel: &Cancel,
    on_piece: &mut dyn FnMut(Piece<'_>),
) -> Result<Generation, Error> {
    generate_with(session, prompt, options, Vec::new(), cancel, on_piece)
}

/// The same with processors in front of the sampler.
pub fn generate_with(
    session: &mut Session,
    prompt: &Prompt,
    options: &GenerateOptions,
    processors: Vec<Box<dyn LogitProcessor>>,
    cancel: &Cancel,
    on_piece: &mut dyn FnMut(Piece<'_>),
) -> Result<Generation, Error> {
    let writer = Writer::new(session.model(), options, processors)?;
    session.want_largest_only(writer.wants_largest());
    let generation = answer(session, prompt, writer, cancel, on_piece);
    session.want_largest_only(false);
    generation
}

fn answer(
    session: &mut Session,
    prompt: &Prompt,
    mut writer: Writer,
    cancel: &Cancel,
    on_piece: &mut dyn FnMut(Piece<'_>),
) -> Result<Generation, Error> {
    let started = Instant::now();
    let (before, loads) = (session.work(), session.model().runner().loads);
    let mut timing = Timing::of_prompt(session.model(), prompt);
    let mut kept_rows = 0;
    let mut prefill_path = PrefillPath::Batched;
    match session.prepare_prompt(prompt, cancel) {
        Ok(prepared) => {
            kept_rows = prepared.kept;
            prefill_path = PrefillPath::of(prepared.read, prepared.calls);
            if let Some(reason) = session.model().runner().executable.row_by_row() {
                prefill_path = PrefillPath::DecodeOverPrompt;
                writer.note = Some(format!("prompts are processed row by row, because the prefill graph could not be loaded: {reason}"));
            }
            let encode_time = session.work().encode - before.encode;
            timing.encode_ms += milliseconds(encode_time);
            timing.prefill_ms = milliseconds(started.elapsed() - encode_time);
            let head_before = session.work().last_stage;
            while writer.finish_reason.is_none() {
                let next = session.next_token().unwrap_or(NextToken::Logits(&[]));
                let Some(id) = writer.choose(next, session.ids(), session.context(), on_piece)? else { break };
                match session.append(&[id], cancel) {
                    Ok(_) => {}
                    Err(Error::Cancelled) => writer.finish_reason = Some(FinishReason::Cancelled),
                    Err(error) => return Err(error),
                }
            }
            timing.lm_head_ms = milliseconds(session.work().last_stage - head_before);
        }
        Err(Error::Cancelled) => writer.finish_reason = Some(FinishReason::Cancelled),
        Err(error) => return Err(error),
    }
    timing.end(prompt, started, writer.first_token, writer.ids.len());
    writer.flush(on_piece)?;
    let runner = session.model().runner();
    writer.note = writer.note.or_else(|| runner.moved.clone().filter(|_| runner.loads > loads));
    drop(runner);
    let (stages, fallbacks) = where_it_ran(session, prompt, before);
    Ok(Generation {
        prompt_ids: prompt.ids().to_vec(),
        ids: writer.ids,
        text: writer.text,
        finish_reason: writer.finish_reason.unwrap_or(FinishReason::Length),
        timing,
        prefill_path,
        stages,
        fallbacks,
        note: writer.note,
        media: prompt.media().len(),
        kept_rows,
        step_logits: writer.step_logits,
    })
}

/// The stages that worked on an answer since `before`, and how often: those of the towers whose media the prompt has, then those of the text program.
pub(crate) fn where_it_ran(session: &Session, prompt: &Prompt, before: Work) -> (Vec<StageRuns>, Vec<Fallback>) {
    let model = session.model();
    let work = session.work();
    let (mut stages, mut fallbacks) = (Vec::new(), Vec::new());
    let mut add = |placement: &Placement, runs: [usize; 2]| {
        for PlacedStage { stage, device, phase, .. } in &placement.stages {
            let runs = phase.map_or(runs.iter().sum(), |phase| runs[phase as usize]);
            let same = stages.iter_mut().rev().take_while(|s: &&mut StageRuns| s.stage == *stage).find(|s| s.device == *device);
            match same {
                Some(same) => same.runs += runs,
                None => stages.push(StageRuns { stage: stage.clone(), device: device.clone(), runs }),
            }
        }
        fallbacks.extend_from_slice(&placement.fallbacks);
    };
    for kind in [MediaKind::Image, MediaKind::Audio] {
        let is_there = prompt.media().iter().any(|placed| placed.medium().kind() == kind);
        if let Some(placement) = model.tower_placement(kind).filter(|_| is_there) {
            add(&placement, [work.encoded(kind) - before.encoded(kind), 0]);
        }
    }
    let decode = work.decode_calls - before.decode_calls;
    add(model.placement(), [work.calls - before.calls - decode, decode]);
    (stages, fallbacks)
}

//! The generate loop: a prompt's ids in, tokens and text out, one by one.

use crate::{
    Cancel, Error, MediaKind, Prompt, Session, Work,
    memory::peak_rss_bytes,
    placement::{Fallback, PlacedStage, Placement},
    sample::{Sampler, SamplerConfig},
    text::{Detokenizer, StopStrings},
    timing::{PrefillPath, Timing, milliseconds},
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
/// Afterwards the session holds the prompt and all chosen tokens but the last. Cancelled while the prompt is read, it holds what it held.
pub fn generate(
    session: &mut Session,
    prompt: &Prompt,
    options: &GenerateOptions,
    cancel: &Cancel,
    on_piece: &mut dyn FnMut(Piece<'_>),
) -> Result<Generation, Error> {
    session.want_largest_only(options.sampler.is_greedy() && !options.keep_logits);
    let generation = answer(session, prompt, options, cancel, on_piece);
    session.want_largest_only(false);
    generation
}

fn answer(
    session: &mut Session,
    prompt: &Prompt,
    options: &GenerateOptions,
    cancel: &Cancel,
    on_piece: &mut dyn FnMut(Piece<'_>),
) -> Result<Generation, Error> {
    let started = Instant::now();
    let mut answer = Answer::new(session, options)?;
    let before = session.work();
    let mut timing = Timing {
        load_ms: milliseconds(session.model().load_time()),
        encode_ms: milliseconds(prompt.encode_time()),
        prompt_tokens: prompt.ids().len(),
        ..Timing::default()
    };
    let mut kept_rows = 0;
    let mut prefill_path = PrefillPath::Batched;
    match session.prepare_prompt(prompt, cancel) {
        Ok(prepared) => {
            kept_rows = prepared.kept;
            prefill_path = PrefillPath::of(prepared.read, prepared.calls);
            if let Some(reason) = session.model().executable().row_by_row() {
                prefill_path = PrefillPath::DecodeOverPrompt;
                answer.note = Some(format!("prompts are processed row by row, because the prefill graph could not be loaded: {reason}"));
            }
            let encode_time = session.work().encode - before.encode;
            timing.encode_ms += milliseconds(encode_time);
            timing.prefill_ms = milliseconds(started.elapsed() - encode_time);
            let head_before = session.work().last_stage;
            while answer.finish_reason.is_none() {
                answer.step(session, cancel, on_piece)?;
            }
            timing.lm_head_ms = milliseconds(session.work().last_stage - head_before);
        }
        Err(Error::Cancelled) => answer.finish_reason = Some(FinishReason::Cancelled),
        Err(error) => return Err(error),
    }
    if let Some(first) = answer.first_token {
        let decode = first.elapsed();
        timing.ttft_ms = milliseconds(prompt.encode_time() + (first - started));
        timing.decode_ms = milliseconds(decode);
        if answer.ids.len() > 1 {
            timing.decode_tokens_per_second = (answer.ids.len() - 1) as f64 / decode.as_secs_f64();
        }
    }
    answer.flush(on_piece)?;
    timing.generated_tokens = answer.ids.len();
    timing.peak_rss_bytes = peak_rss_bytes();
    let (stages, fallbacks) = where_it_ran(session, prompt, before);
    Ok(Generation {
        prompt_ids: prompt.ids().to_vec(),
        ids: answer.ids,
        text: answer.text,
        finish_reason: answer.finish_reason.unwrap_or(FinishReason::Length),
        timing,
        prefill_path,
        stages,
        fallbacks,
        note: answer.note,
        media: prompt.media().len(),
        kept_rows,
        step_logits: answer.step_logits,
    })
}

/// The stages that worked on an answer since `before`, and how often: those of the towers whose media the prompt has, then those of the text program.
fn where_it_ran(session: &Session, prompt: &Prompt, before: Work) -> (Vec<StageRuns>, Vec<Fallback>) {
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

/// An answer in the making.
struct Answer<'a> {
    options: &'a GenerateOptions,
    eos: Vec<u32>,
    sampler: Sampler,
    detokenizer: Option<Detokenizer>,
    stops: StopStrings,
    /// Whether a stop string has come: what is still held is not part of the answer.
    stopped: bool,
    ids: Vec<u32>,
    /// When the first of them was known.
    first_token: Option<Instant>,
    text: String,
    step_logits: Vec<f32>,
    finish_reason: Option<FinishReason>,
    note: Option<String>,
}

impl<'a> Answer<'a> {
    fn new(session: &Session, options: &'a GenerateOptions) -> Result<Self, Error> {
        let model = session.model();
        if !options.stop.is_empty() && model.tokenizer().is_none() {
            return Err(Error::NoTokenizer { what: "stop strings" });
        }
        Ok(Self {
            options,
            eos: if options.ignore_eos { Vec::new() } else { model.eos().to_vec() },
            sampler: Sampler::new(options.sampler.clone())?,
            detokenizer: model.tokenizer().map(|tokenizer| tokenizer.detokenizer(true)),
            stops: StopStrings::new(options.stop.iter().cloned())?,
            stopped: false,
            ids: Vec::with_capacity(options.max_new.min(model.context())),
            first_token: None,
            text: String::new(),
            step_logits: Vec::new(),
            finish_reason: (options.max_new == 0).then_some(FinishReason::Length),
            note: None,
        })
    }

    /// Chooses the next token and, unless it ends the answer, puts it into the session.
    fn step(&mut self, session: &mut Session, cancel: &Cancel, on_piece: &mut dyn FnMut(Piece<'_>)) -> Result<(), Error> {
        let logits = session.logits().unwrap_or_default();
        let id = self.sampler.sample(logits, session.ids())?;
        if self.options.keep_logits {
            self.step_logits.extend_from_slice(logits);
        }
        self.ids.push(id);
        self.first_token.get_or_insert_with(Instant::now);
        if self.eos.contains(&id) {
            on_piece(Piece { id: Some(id), text: "" });
            self.finish_reason = Some(FinishReason::Stop);
            return Ok(());
        }
        self.show(id, on_piece)?;
        if self.stopped {
            self.finish_reason = Some(FinishReason::Stop);
        } else if self.ids.len() >= self.options.max_new {
            self.finish_reason = Some(FinishReason::Length);
        } else if session.len() >= session.context() {
            self.finish_reason = Some(FinishReason::Length);
            let context = session.context();
            self.note = Some(format!("the context of {context} tokens is full: the answer may be cut short (raise it with --context)"));
        } else {
            match session.append(&[id], cancel) {
                Ok(_) => {}
                Err(Error::Cancelled) => self.finish_reason = Some(FinishReason::Cancelled),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn show(&mut self, id: u32, on_piece: &mut dyn FnMut(Piece<'_>)) -> Result<(), Error> {
        let Some(detokenizer) = &mut self.detokenizer else {
            on_piece(Piece { id: Some(id), text: "" });
            return Ok(());
        };
        let certain = self.stops.push(detokenizer.push(id)?);
        self.stopped = certain.by.is_some();
        self.text.push_str(&certain.text);
        on_piece(Piece { id: Some(id), text: &certain.text });
        Ok(())
    }

    /// Gives out what was held back in case more would come.
    fn flush(&mut self, on_piece: &mut dyn FnMut(Piece<'_>)) -> Result<(), Error> {
        let Some(detokenizer) = self.detokenizer.as_mut().filter(|_| !self.stopped) else { return Ok(()) };
        let last = self.stops.push(detokenizer.flush()?);
        let mut rest = last.text;
        match last.by {
            Some(_) => self.finish_reason = Some(FinishReason::Stop),
            None => rest += &self.stops.flush(),
        }
        if !rest.is_empty() {
            on_piece(Piece { id: None, text: &rest });
        }
        self.text.push_str(&rest);
        Ok(())
    }
}

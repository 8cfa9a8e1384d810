//! The generate loop: a prompt's ids in, tokens and text out, one by one.

use crate::{
    Cancel, Error, FinishReason, GenerateOptions, Generation, LogitProcessor, Model, Piece, Prompt, Session, StageRuns, Wanted, Work,
    drafter::Drafter,
    placement::{Fallback, PlacedStage, Placement},
    timing::{ExpertCacheUse, PrefillPath, Timing, milliseconds},
    writer::Writer,
};
use qhx_media::MediaKind;
use std::time::Instant;

/// Answers `prompt` on `session`, which keeps what it has in common with it. Each piece goes to `on_piece` as soon as it is certain.
///
/// Afterwards the session holds the prompt and all chosen tokens but those of the last step, which is one unless a structure forced more. Cancelled while the prompt is read, it holds what it held. Many answers at once are
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
    let writer = Writer::new(session.model(), prompt, options, processors)?;
    let drafter = Drafter::new(session.model(), prompt, options)?;
    session.want(writer.wanted());
    session.keep_hidden_rows(drafter.wants_hidden_rows());
    let generation = answer(session, prompt, writer, drafter, cancel, on_piece);
    session.want(Wanted::Logits);
    session.keep_hidden_rows(false);
    generation
}

fn answer(
    session: &mut Session,
    prompt: &Prompt,
    mut writer: Writer,
    mut drafter: Drafter,
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
            if session.model().runner().executable.row_by_row().is_some() {
                prefill_path = PrefillPath::DecodeOverPrompt;
            }
            let encode_time = session.work().encode - before.encode;
            timing.encode_ms += milliseconds(encode_time);
            timing.prefill_ms = milliseconds(started.elapsed() - encode_time);
            let (head_before, most_drafts) = (session.work().last_stage, session.model().room_for_drafts(1, 1));
            while writer.finish_reason.is_none() {
                let chosen = drafter.choose(session, &mut writer, on_piece)?;
                if chosen.is_empty() {
                    break;
                }
                session.put_last(&chosen)?;
                drafter.draft(session, &writer, 0, most_drafts);
                match session.compute_last(chosen.len(), cancel) {
                    Ok(()) => {}
                    Err(Error::Cancelled) => writer.finish_reason = Some(FinishReason::Cancelled),
                    Err(error) => return Err(error),
                }
            }
            timing.lm_head_ms = milliseconds(session.work().last_stage - head_before);
        }
        Err(Error::Cancelled) => writer.finish_reason = Some(FinishReason::Cancelled),
        Err(error) => return Err(error),
    }
    timing.expert_cache = ExpertCacheUse::of(session.work().experts.since(&before.experts));
    timing.end(prompt, started, writer.first_token, writer.ids.len());
    drafter.tell(&mut timing);
    timing.shaped(writer.mask_time, writer.forced_tokens);
    writer.flush(on_piece)?;
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
        note: writer.note.or_else(|| drafter.note()).or_else(|| note(session.model(), loads)),
        stop_string: writer.stop_string,
        log_probs: writer.log_probs,
        media: prompt.media().len(),
        kept_rows,
        step_logits: writer.step_logits,
    })
}

/// What a person should know about how an answer was computed that began when the program had been loaded `loads` times.
pub(crate) fn note(model: &Model, loads: u64) -> Option<String> {
    let runner = model.runner();
    let row_by_row = runner.executable.row_by_row();
    let note =
        row_by_row.map(|reason| format!("prompts are processed row by row, because the prefill graph could not be loaded: {reason}"));
    note.or_else(|| runner.moved.clone().filter(|_| runner.loads > loads))
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

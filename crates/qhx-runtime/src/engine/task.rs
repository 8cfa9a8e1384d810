//! A request on its way: first a job that waits, then a task with a session.

use super::{Request, answer::Sender};
use crate::{
    Cancel, Error, FinishReason, Generation, Model, Piece, PlacedMedium, Prompt, Session, Wanted, Work,
    drafter::Drafter,
    generate::{note, where_it_ran},
    rows::{MediumSpan, Rows},
    timing::{ExpertCacheUse, PrefillPath, Timing, milliseconds},
    writer::Writer,
};
use qhx_ir::IdMask;
use std::{
    collections::BTreeSet,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

/// The media of a prompt, encoded.
pub(super) fn encode(model: &Model, prompt: &Prompt, cancel: &Cancel) -> Result<Vec<MediumSpan>, Error> {
    let encode = |placed: &PlacedMedium| Ok(MediumSpan::new(placed.first(), model.encode(placed.medium(), cancel)?));
    prompt.media().iter().map(encode).collect()
}

/// What a tower is at work on while the engine computes the rows before it.
pub(super) struct Awaited {
    media: Vec<(PlacedMedium, MediumSpan)>,
    towers: TowerTime,
}

/// When the towers had made all media of a request, and how long they took.
type TowerTime = Arc<OnceLock<(Instant, Duration)>>;

impl Awaited {
    /// Encodes the media; `arrived` is told of each.
    pub(super) fn encode(self, model: &Model, cancel: &Cancel, arrived: impl Fn()) -> Result<(), Error> {
        let began = Instant::now();
        let last = self.media.len().saturating_sub(1);
        for (number, (placed, span)) in self.media.iter().enumerate() {
            let encoded = model.encode(placed.medium(), cancel)?;
            if number == last {
                // Before its rows are there: afterwards the answer may begin.
                let _ = self.towers.set((Instant::now(), began.elapsed()));
            }
            span.arrive(encoded);
            arrived();
        }
        Ok(())
    }
}

/// A request that waits.
pub(super) struct Job {
    pub(super) prompt: Prompt,
    /// Its media.
    pub(super) media: Vec<MediumSpan>,
    pub(super) scope: u64,
    pub(super) alone: bool,
    pub(super) cancel: Cancel,
    sender: Sender,
    writer: Writer,
    drafter: Drafter,
    towers: TowerTime,
    asked: Instant,
}

impl Job {
    /// Checks a request, and encodes its media unless their towers run beside the text program: then what is left to be encoded comes with it.
    pub(super) fn new(model: &Model, request: Request, sender: Sender, asked: Instant) -> Result<(Self, Option<Awaited>), Error> {
        let Request { prompt, options, processors, draft, cancel, scope, alone } = request;
        model.check_prompt(prompt.ids())?;
        let writer = Writer::new(model, &prompt, &options, processors)?;
        let drafter = match draft {
            Some(own) => Drafter::of(own),
            None => Drafter::new(model, &prompt, &options)?,
        };
        let towers = TowerTime::default();
        let (media, awaited) = match model.encodes_beside_text(&prompt)? {
            true => {
                let span = |placed: &PlacedMedium| {
                    let medium = placed.medium();
                    Ok(MediumSpan::awaited(placed.first(), medium, model.soft_rows(medium)?))
                };
                let spans = prompt.media().iter().map(span).collect::<Result<Vec<_>, Error>>()?;
                let media = prompt.media().iter().cloned().zip(spans.iter().cloned()).collect();
                (spans, Some(Awaited { media, towers: towers.clone() }))
            }
            false => {
                let began = Instant::now();
                let media = encode(model, &prompt, &cancel)?;
                let _ = towers.set((Instant::now(), began.elapsed()));
                (media, None)
            }
        };
        Ok((Self { prompt, media, scope, alone, cancel, sender, writer, drafter, towers, asked }, awaited))
    }

    /// Whether all of its rows can be computed.
    pub(super) fn is_ready(&self) -> bool {
        self.media.iter().all(|medium| medium.encoded().is_some())
    }

    /// Whether nobody wants its answer any more.
    pub(super) fn is_unwanted(&self) -> bool {
        self.cancel.is_cancelled() || self.sender.has_ended()
    }

    /// Ends it before it began.
    pub(super) fn cancelled(self) {
        let encode_time = self.towers.get().map_or(Duration::ZERO, |(_, took)| *took);
        let mut timing = Timing { encode_ms: milliseconds(encode_time), ..Timing::default() };
        timing.prompt_tokens = self.prompt.ids().len();
        self.sender.end(Ok(Generation::cancelled(&self.prompt, timing)));
    }

    /// Begins to answer on a session that holds the first `reused` rows of the prompt; the others are put in, to be computed.
    pub(super) fn begin(self, mut session: Session, reused: usize) -> Task {
        let Self { prompt, media, scope, alone, cancel, sender, writer, drafter, towers, asked } = self;
        session.put_in(prompt.ids(), &media, reused);
        session.want(writer.wanted());
        session.keep_hidden_rows(drafter.wants_hidden_rows());
        let timing = Timing::of_prompt(session.model(), &prompt);
        let (before, loads) = (session.work(), session.model().runner().loads);
        let began = Instant::now();
        let keep_at = BTreeSet::from([prompt.stable_rows()]);
        let (mask, is_prepared) = (None, false);
        Task {
            session,
            prompt,
            scope,
            alone,
            cancel,
            reused,
            keep_at,
            mask,
            is_prepared,
            sender,
            writer,
            drafter,
            before,
            loads,
            timing,
            towers,
            asked,
            began,
        }
    }

    /// Ends it with an error.
    pub(super) fn refuse(self, error: Error) {
        self.sender.refuse(error);
    }
}

/// A request that is being answered.
pub(super) struct Task {
    /// Holds the rows of the prompt and of what was chosen; its state is as far as it was computed.
    pub(super) session: Session,
    pub(super) prompt: Prompt,
    pub(super) scope: u64,
    pub(super) alone: bool,
    pub(super) cancel: Cancel,
    /// Rows of the prompt that were there.
    pub(super) reused: usize,
    /// Rows at which what was computed is to be kept: others begin alike up to there.
    pub(super) keep_at: BTreeSet<usize>,
    /// What may be chosen next, where the device chooses among some ids.
    pub(super) mask: Option<OnceLock<IdMask>>,
    /// Whether it is known what may follow.
    is_prepared: bool,
    sender: Sender,
    writer: Writer,
    drafter: Drafter,
    before: Work,
    /// How often the program had been loaded when it began.
    loads: u64,
    timing: Timing,
    towers: TowerTime,
    asked: Instant,
    /// When the prompt was begun.
    began: Instant,
}

impl Task {
    /// Rows that are computed.
    pub(super) fn done(&self) -> usize {
        self.session.sequence.state.len()
    }

    /// Rows that are yet to be computed.
    pub(super) fn left(&self) -> usize {
        self.session.len() - self.done()
    }

    /// Those that can be computed now: up to the first medium that its tower has yet to encode.
    pub(super) fn ready(&self) -> usize {
        self.rows().ready(self.done()) - self.done()
    }

    /// Whether the prompt is computed and tokens are being chosen.
    pub(super) fn decodes(&self) -> bool {
        self.session.len() > self.prompt.ids().len()
    }

    /// Tells whoever asked how far the prompt is.
    pub(super) fn tell_progress(&self) {
        if !self.decodes() {
            self.sender.progress(self.done());
        }
    }

    /// Whether nobody wants its answer any more.
    pub(super) fn is_unwanted(&self) -> bool {
        self.cancel.is_cancelled() || self.sender.has_ended()
    }

    /// Puts drafts behind a row that was chosen, in a step with so many rows of other answers and room for `most` more, and asks the processors what may follow. Gives the
    /// number of drafts.
    pub(super) fn prepare_choice(&mut self, others: usize, most: usize) -> usize {
        if std::mem::replace(&mut self.is_prepared, true) {
            return 0;
        }
        let drafts = if self.is_decode_step() { self.drafter.draft(&mut self.session, &self.writer, others, most) } else { 0 };
        // What may follow a draft is known when it was chosen: then the logits decide.
        let mask = if drafts == 0 { self.writer.mask(self.session.ids()) } else { None };
        self.session.want(if mask.is_some() { Wanted::Largest } else { self.writer.wanted() });
        self.mask = mask.map(OnceLock::from);
        drafts
    }

    /// Whether the next step computes the row of a token that was chosen.
    pub(super) fn is_decode_step(&self) -> bool {
        self.decodes() && self.left() == 1 + self.session.sequence.drafts
    }

    /// Whether all rows are computed, and a token is to be chosen.
    pub(super) fn is_computed(&self) -> bool {
        self.left() == 0 || self.session.sequence.drafts > 0
    }

    /// All rows are computed: chooses the next token, and puts it in with those that must follow it. Whether the answer goes on.
    pub(super) fn choose(&mut self) -> Result<bool, Error> {
        if !self.decodes() && self.writer.first_token.is_none() {
            // What was computed beside towers took no time of its own.
            let began = self.towers.get().map_or(self.began, |(done, _)| self.began.max(*done));
            self.timing.prefill_ms = milliseconds(began.elapsed());
        }
        if self.writer.finish_reason.is_some() {
            return Ok(false);
        }
        let sender = &self.sender;
        let mut send = |piece: Piece<'_>| sender.send(piece.into());
        let chosen = self.drafter.choose(&mut self.session, &mut self.writer, &mut send)?;
        if !chosen.is_empty() {
            self.session.put_last(&chosen)?;
            self.is_prepared = false;
        }
        Ok(!chosen.is_empty())
    }

    /// Ends the answer, and gives back the session.
    pub(super) fn end(mut self, cancelled: bool) -> Session {
        if cancelled {
            self.writer.finish_reason = Some(FinishReason::Cancelled);
        }
        self.timing.encode_ms += self.towers.get().map_or(0.0, |(_, took)| milliseconds(*took));
        self.timing.end(&self.prompt, self.asked, self.writer.first_token, self.writer.ids.len());
        self.drafter.tell(&mut self.timing);
        self.timing.shaped(self.writer.mask_time, self.writer.forced_tokens);
        let sender = &self.sender;
        let flushed = self.writer.flush(&mut |piece| sender.send(piece.into()));
        let (stages, fallbacks) = where_it_ran(&self.session, &self.prompt, self.before);
        let work = self.session.work();
        let prefilled = self.prompt.ids().len() - self.reused;
        let calls = work.calls - self.before.calls - (work.decode_calls - self.before.decode_calls);
        self.timing.lm_head_ms = milliseconds(work.last_stage - self.before.last_stage);
        self.timing.expert_cache = ExpertCacheUse::of(work.experts.since(&self.before.experts));
        let Writer { ids, text, finish_reason, note: end, step_logits, stop_string, log_probs, .. } = self.writer;
        let generation = Generation {
            prompt_ids: self.prompt.ids().to_vec(),
            ids,
            text,
            finish_reason: finish_reason.unwrap_or(FinishReason::Length),
            timing: self.timing,
            prefill_path: PrefillPath::of(prefilled, calls),
            stages,
            fallbacks,
            note: end.or_else(|| self.drafter.note()).or_else(|| note(self.session.model(), self.loads)),
            stop_string,
            log_probs,
            media: self.prompt.media().len(),
            kept_rows: self.reused,
            step_logits,
        };
        self.sender.end(flushed.map(|()| generation));
        self.session
    }

    /// Ends it with an error.
    pub(super) fn fail(self, error: Error) {
        self.sender.refuse(error);
    }

    /// The rows that the request was made with.
    pub(super) fn rows(&self) -> &Rows {
        &self.session.sequence.rows
    }
}

//! Lets a bundle answer the prompts of a suite: each prompt is read by itself, then several answers are decoded together, each as if it were alone.

use super::{
    ANSWERING_SHARE, Gate, GateProgress, PROMPT_LOGIT_BYTES,
    judge::{Played, compared_medium_rows, compared_rows},
    pace::{Pace, Work},
    suite::{Suite, SuitePrompt},
};
use crate::ForgeError;
use qhx_bundle::Bundle;
use qhx_ir::{Name, Tap};
use qhx_runtime::{
    LoadOptions, Model, ModelParts, Session,
    eval::rows_at_once,
    verify::{Answer, Listener, Notes, Player, encode_noted, play_together},
};
use std::{
    cell::{Cell, RefCell},
    time::{Duration, Instant},
};

/// Prompts that are answered together.
const TOGETHER: usize = 8;

/// A prompt, and how many of its rows are compared, those before its last.
pub(super) type Asked<'s> = (&'s SuitePrompt, usize);

impl Gate<'_, '_> {
    /// The prompts with their answers, the number of logits, and whether the budget cut the suite short: never before one of every kind is answered.
    pub(super) fn answer_suite(
        &mut self,
        bundle: &Bundle,
        stages: &[Name],
        suite: &Suite,
        prompts: usize,
    ) -> Result<(Vec<Played>, usize, bool), ForgeError> {
        let started = (self.clock)();
        let rows = |prompt: &SuitePrompt| prompt.prompt.ids().len();
        let longest = suite.prompts.iter().map(rows).max().unwrap_or(1);
        let tokens = suite.tokens;
        // A budget is looked at after each prompt.
        let together = if self.options.budget.is_some() { 1 } else { TOGETHER };
        let model = self.load(bundle, (longest + tokens).min(bundle.manifest().model.context_length), together)?;
        let vocabulary = model.vocabulary().logits;
        let mut rows_left = PROMPT_LOGIT_BYTES / 4 / vocabulary.max(1);
        let asked = &suite.prompts[..suite.prompts.len().min(prompts)];
        let all = Work { rows: asked.iter().map(rows).sum(), tokens: asked.len() * tokens };
        let (mut played, mut left, mut pace) = (Vec::new(), all, Pace::default());
        let mut sessions = (0..together.min(asked.len())).map(|_| model.session()).collect::<Result<Vec<_>, _>>()?;
        for prompts in asked.chunks(together) {
            let late = self.options.budget.is_some_and(|budget| (self.clock)() - started > budget.mul_f64(ANSWERING_SHARE));
            if late && played.len() >= suite.required() {
                return Ok((played, vocabulary, true));
            }
            let done = GateProgress {
                what: "answering prompts",
                done: played.len() * tokens,
                total: asked.len() * tokens,
                left: pace.left(left, all),
            };
            let shown = prompts.iter().enumerate().map(|(number, prompt)| {
                // Rows that stand for media predict nothing.
                let most = if prompt.media.is_empty() { rows(prompt) - 1 } else { 0 };
                let shown = most.min(rows_left / (asked.len() - played.len() - number));
                rows_left -= shown;
                (prompt, shown)
            });
            let shown: Vec<Asked<'_>> = shown.collect();
            let (answered, [prefill, decode]) = self.answer_prompts(&model, &mut sessions, &shown, stages, tokens, done)?;
            let work = Work { rows: prompts.iter().map(rows).sum(), tokens: prompts.len() * tokens };
            pace.add(work, prefill, decode);
            left = Work { rows: left.rows - work.rows, tokens: left.tokens - work.tokens };
            played.extend(answered);
        }
        Ok((played, vocabulary, false))
    }

    /// Lets a model answer as many prompts as there are sessions, or fewer; also what that took up to the last one's first token, and from there on. `done` is how far the prompts before them came.
    pub(super) fn answer_prompts(
        &mut self,
        model: &Model,
        sessions: &mut [Session],
        asked: &[Asked<'_>],
        stages: &[Name],
        tokens: usize,
        done: GateProgress<'_>,
    ) -> Result<(Vec<Played>, [Duration; 2]), ForgeError> {
        let (started, steps, first_tokens) = (Instant::now(), Cell::new(0), Cell::new(None));
        let tell = RefCell::new(&mut *self.options.progress);
        let told = |step: usize| {
            steps.set(steps.get() + 1);
            if step == 0 {
                first_tokens.set(Some(started.elapsed()));
            }
            tell.borrow_mut()(GateProgress { done: done.done + steps.get(), ..done });
        };
        let mut records = Vec::new();
        for (SuitePrompt { prompt, media, .. }, shown) in asked {
            let media = media.iter().map(|drawn| {
                let notes = encode_noted(model, &drawn.medium, &compared_medium_rows(drawn.medium.rows()), &self.options.cancel)?;
                Ok((drawn.clone(), notes))
            });
            records.push(Record {
                media: media.collect::<Result<Vec<_>, ForgeError>>()?,
                notes: Notes::new(stages, &compared_rows(prompt.ids().len(), tokens)),
                logits: Vec::with_capacity((shown + tokens) * model.vocabulary().logits),
                told: &told,
            });
        }
        let players = asked.iter().zip(sessions).zip(&mut records).map(|((&(prompt, shown), session), record)| {
            let answer = if prompt.until_end { Answer::Until { most: tokens, ends: model.eos() } } else { Answer::Greedy(tokens) };
            Player::new(session, &prompt.prompt, shown, answer, record)
        });
        let mut players: Vec<Player<'_>> = players.collect();
        play_together(&mut players, &self.options.cancel)?;
        let answers: Vec<Vec<u32>> = players.iter().map(|player| player.ids().to_vec()).collect();
        drop(players);
        let played = asked.iter().zip(records).zip(answers).map(|((&(SuitePrompt { name, prompt, .. }, shown), record), ids)| {
            let Record { media, mut notes, logits, .. } = record;
            notes.truncate(prompt.ids().len() + ids.len() - 1);
            Played { name: name.clone(), prompt: prompt.clone(), media, ids, shown, logits, notes }
        });
        let played = played.collect();
        let (all, prefill) = (started.elapsed(), first_tokens.get().unwrap_or_default());
        Ok((played, [prefill, all.saturating_sub(prefill)]))
    }

    fn load(&self, bundle: &Bundle, context: usize, sessions: usize) -> Result<Model, ForgeError> {
        // Weights are mapped: what does not fit comes from the disk again.
        let wanted = rows_at_once(bundle.manifest().model.vocab_size);
        let options = LoadOptions { context: Some(context), wanted, sessions, overcommit: true, ..LoadOptions::default() };
        Ok(Model::on_device(ModelParts::of(bundle)?, self.device.clone(), &options)?)
    }
}

/// What is kept of a prompt and its answer.
struct Record<'t> {
    media: Vec<(super::suite::Drawn, Notes)>,
    notes: Notes,
    logits: Vec<f32>,
    /// Told of each token.
    told: &'t dyn Fn(usize),
}

impl Listener for Record<'_> {
    fn prompt_row(&mut self, logits: &[f32]) {
        self.logits.extend_from_slice(logits);
    }

    fn step(&mut self, step: usize, logits: &[f32]) {
        self.logits.extend_from_slice(logits);
        (self.told)(step);
    }

    fn tap(&mut self, first: usize, tap: Tap<'_>) {
        self.notes.take(first, tap);
    }
}

//! A session: the rows that were put in, and the state that a device has computed from them.
//!
//! The rows are the truth; the state is what has been computed of a prefix of them. Every step is a transaction: it either adds its rows or leaves
//! the session as it was. Whatever the state has lost (a rollback over recurrent slots, a step that was stopped, a constant that
//! changes with the total length) is computed again from the rows when the next step needs it.
//!
//! Knows programs, states and calls; knows nothing of text.

mod checkpoint;
mod snapshot;

use crate::{
    Cancel, Encoded, Error, Model, NextToken, Prompt, ShowLogits, ShowTap, Wanted, Work,
    hidden_rows::HiddenRows,
    rows::MediumSpan,
    runner::{Purpose, Span, Watch},
    sequence::Sequence,
};
use checkpoint::{Checkpoint, recurrent};
use qhx_bundle::Digest;
use qhx_ir::{Phase, State, Tap};
use qhx_media::MediaKind;
use std::{sync::Arc, time::Instant};

/// Checkpoints of recurrent slots that a session keeps by itself; those asked for with [`Session::checkpoint`] do not count.
const AUTOMATIC_CHECKPOINTS: usize = 8;

/// One conversation or completion on a model. Sessions of one model are independent; calls of two take turns.
///
/// ```no_run
/// # fn example(model: &qhx_runtime::Model) -> Result<(), qhx_runtime::Error> {
/// use qhx_runtime::{Cancel, sample::argmax};
/// let mut session = model.session()?;
/// let logits = session.append(&[1, 17, 4], &Cancel::new())?;
/// let next = argmax(logits)? as u32;
/// session.append(&[next], &Cancel::new())?;
/// session.rollback(3)?;
/// # Ok(()) }
/// ```
pub struct Session {
    model: Model,
    pub(crate) sequence: Sequence,
    /// [`crate::runner::Runner::loads`] of the program that the state belongs to.
    loads: u64,
    /// Whether the state is of unknown content (a device failed while it was being restored) and must be made anew.
    lost: bool,
    /// By rising length, none beyond the state.
    checkpoints: Vec<Checkpoint>,
    /// [`Prompt::stable_rows`] of the prompt that is being put in: a good row for a checkpoint.
    stable_rows: usize,
}

/// Takes what a stage made of rows of one of several sessions: its number, the number of its first row, and the tap.
type ShowTaps<'a> = dyn FnMut(usize, usize, Tap<'_>) + 'a;

/// How a prompt met what the session already had: see [`Session::prepare`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptReuse {
    /// Rows of the prompt whose state was there already.
    pub kept: usize,
    /// Rows computed for it.
    pub read: usize,
    /// Calls it took.
    pub calls: usize,
}

impl Model {
    /// A fresh session.
    pub fn session(&self) -> Result<Session, Error> {
        Session::new(self.clone())
    }
}

impl Session {
    fn new(model: Model) -> Result<Self, Error> {
        let (state, loads) = model.new_state()?;
        let sequence = Sequence::new(state, model.context(), model.vocabulary().logits);
        Ok(Self { model, sequence, loads, lost: false, checkpoints: Vec::new(), stable_rows: 0 })
    }

    /// The model it runs on.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The ids that were put in, in order.
    pub fn ids(&self) -> &[u32] {
        self.sequence.rows.ids()
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.sequence.rows.len()
    }

    /// Whether nothing was put in.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The most rows it can hold.
    pub fn context(&self) -> usize {
        self.sequence.state.capacity().min(self.model.context())
    }

    /// The logits of the last row, if the last thing that happened to this session was a step.
    pub fn logits(&self) -> Option<&[f32]> {
        self.sequence.logits()
    }

    /// What is known of the token after the last row, if the last thing that happened to this session was a step.
    pub fn next_token(&self) -> Option<NextToken<'_>> {
        self.sequence.next_token()
    }

    /// What is wanted of the logits from now on: see [`Session::next_token`]. Where all logits of several rows are shown ([`Session::append_showing`]) they are all there.
    pub fn want(&mut self, wanted: Wanted) {
        self.sequence.wanted = wanted;
    }

    /// From now on what feeds the model's own drafts is kept of each row that is computed, or no more.
    pub(crate) fn keep_hidden_rows(&mut self, keep: bool) {
        self.sequence.hidden = self.model.draft_program().filter(|_| keep).map(|draft| HiddenRows::new(draft.width));
    }

    /// What it has made the device do so far.
    pub fn work(&self) -> Work {
        self.sequence.work
    }

    /// Bytes that its state and its checkpoints hold.
    pub fn bytes(&self) -> u64 {
        self.sequence.state.bytes() + self.checkpoints.iter().map(Checkpoint::bytes).sum::<u64>()
    }

    /// Puts `ids` in and gives the logits of the last one (none where only the largest is wanted). Long inputs are computed in chunks; a single id after others is a
    /// decode step.
    ///
    /// On an error, cancellation included, the session is as it was.
    pub fn append(&mut self, ids: &[u32], cancel: &Cancel) -> Result<&[f32], Error> {
        self.step(ids, &[], 1, cancel, &mut Watch::default())?;
        Ok(&self.sequence.logits)
    }

    /// The part of `most` guesses that may be put in behind the last row: within the context and the program's epoch.
    pub(crate) fn room_for_drafts(&self, most: usize) -> usize {
        let (program, len) = (self.model.program(), self.len());
        let most = most.min(self.context().saturating_sub(len));
        (0..=most).rev().find(|more| program.epoch(len + more) == program.epoch(len)).unwrap_or(0)
    }

    /// Puts in the rows of tokens that were chosen, to be computed.
    pub(crate) fn put_last(&mut self, ids: &[u32]) -> Result<(), Error> {
        self.check_ids(ids, self.len())?;
        self.sequence.chosen_from = Some(self.len());
        self.sequence.rows.extend(ids, &[]);
        Ok(())
    }

    /// Computes the so many rows that were put in last, with the drafts behind them. On an error they are taken out again.
    pub(crate) fn compute_last(&mut self, rows: usize, cancel: &Cancel) -> Result<(), Error> {
        let computed = self.compute_drafted(cancel).and_then(|computed| match computed {
            true => Ok(()),
            false => self.compute(self.len() - 1, cancel, &mut Watch::default()),
        });
        if computed.is_err() {
            self.sequence.forget_drafts();
            self.sequence.rows.truncate(self.len() - rows);
            self.settle();
        }
        computed
    }

    /// Computes the last row and its drafts; false where there are none, or where the state was lost and more than these rows are to be computed.
    fn compute_drafted(&mut self, cancel: &Cancel) -> Result<bool, Error> {
        let wanted = 1 + self.sequence.drafts;
        if wanted == 1 {
            return Ok(false);
        }
        self.refresh()?;
        let rows = self.sequence.state.len()..self.len();
        if rows.len() == wanted {
            let model = self.model.clone();
            let purpose = Purpose { phase: Phase::Decode, cancel: Some(cancel.flag()) };
            let mut spans = [Span { sequence: &mut self.sequence, rows, wanted, mask: None }];
            match model.runner().call(&mut spans, &purpose, &mut Watch::default()) {
                Err(Error::Device(lost)) if lost.left_device().is_some() => model.recover(lost)?,
                result => return result.map(|()| true),
            }
        }
        self.sequence.forget_drafts();
        Ok(false)
    }

    /// Puts an id into each of several sessions of one model, in one call; what stages make of each goes to `taps`, with the session's place and the row's number. On an error none
    /// of them has changed.
    pub(crate) fn append_together(
        sessions: &mut [&mut Self],
        ids: &[u32],
        cancel: &Cancel,
        taps: Option<&mut ShowTaps<'_>>,
    ) -> Result<(), Error> {
        let Some(model) = sessions.first().map(|session| session.model.clone()) else { return Ok(()) };
        for (session, &id) in sessions.iter().zip(ids) {
            session.check_ids(&[id], session.len())?;
        }
        let before: Vec<usize> = sessions.iter().map(|session| session.len()).collect();
        let mut split = taps.map(|taps| {
            let before = &before;
            move |_: usize, tap: Tap<'_>| {
                let (mut shape, width) = (tap.shape.to_vec(), tap.values.len() / before.len());
                shape.iter_mut().take(1).for_each(|rows| *rows = 1);
                for (place, (&row, values)) in before.iter().zip(tap.values.chunks_exact(width)).enumerate() {
                    taps(place, row, Tap { shape: &shape, values, ..tap });
                }
            }
        });
        let mut advance = |sessions: &mut [&mut Self]| {
            for (session, &id) in sessions.iter_mut().zip(ids) {
                session.sequence.rows.extend(&[id], &[]);
                session.refresh()?;
            }
            let mut spans: Vec<Span<'_>> = sessions
                .iter_mut()
                .map(|session| Span {
                    rows: session.sequence.state.len()..session.len(),
                    sequence: &mut session.sequence,
                    wanted: 1,
                    mask: None,
                })
                .collect();
            let purpose = Purpose { phase: Phase::Decode, cancel: Some(cancel.flag()) };
            let taps = split.as_mut().map(|split| split as &mut ShowTap<'_>);
            model.runner().call(&mut spans, &purpose, &mut Watch { logits: None, taps })
        };
        let result = advance(sessions);
        if result.is_err() {
            for (session, &before) in sessions.iter_mut().zip(&before) {
                session.sequence.rows.truncate(before);
                session.settle();
            }
        }
        result
    }

    /// Puts a prompt in after what is there, its media included, and gives the logits of the last row.
    pub fn append_prompt(&mut self, prompt: &Prompt, cancel: &Cancel) -> Result<&[f32], Error> {
        let media = self.encode(prompt, self.len(), cancel)?;
        self.step(prompt.ids(), &media, 1, cancel, &mut Watch::default())?;
        Ok(&self.sequence.logits)
    }

    /// Like [`Session::append`], and shows the logits of the last `wanted` of the new rows, in order, with their row numbers.
    /// Rows are read [`crate::LoadOptions::wanted`] at a time where their logits are asked for.
    pub fn append_showing(&mut self, ids: &[u32], wanted: usize, cancel: &Cancel, show: &mut ShowLogits<'_>) -> Result<(), Error> {
        self.step(ids, &[], wanted.clamp(1, ids.len().max(1)), cancel, &mut Watch { logits: Some(show), taps: None })
    }

    /// Like [`Session::append_showing`], and shows what every stage made, call by call, with the number of the call's first row.
    pub fn append_traced(
        &mut self,
        ids: &[u32],
        wanted: usize,
        cancel: &Cancel,
        show: &mut ShowLogits<'_>,
        taps: &mut ShowTap<'_>,
    ) -> Result<(), Error> {
        self.step(ids, &[], wanted.clamp(1, ids.len().max(1)), cancel, &mut Watch { logits: Some(show), taps: Some(taps) })
    }

    /// Like [`Session::append_traced`] for a prompt with media.
    pub fn append_prompt_traced(
        &mut self,
        prompt: &Prompt,
        wanted: usize,
        cancel: &Cancel,
        show: &mut ShowLogits<'_>,
        taps: &mut ShowTap<'_>,
    ) -> Result<(), Error> {
        let media = self.encode(prompt, self.len(), cancel)?;
        let wanted = wanted.clamp(1, prompt.ids().len().max(1));
        self.step(prompt.ids(), &media, wanted, cancel, &mut Watch { logits: Some(show), taps: Some(taps) })
    }

    /// Makes the session hold exactly `ids`: keeps the longest common prefix with what it has and reads the rest. The last row is always
    /// read, so that its logits are there.
    ///
    /// On an error, cancellation included, the session holds what it held.
    pub fn prepare(&mut self, ids: &[u32], cancel: &Cancel) -> Result<PromptReuse, Error> {
        self.prepare_rows(ids, &[], cancel)
    }

    /// Like [`Session::prepare`] for a prompt with media: they are compared by content, and encoded only where they are new.
    pub fn prepare_prompt(&mut self, prompt: &Prompt, cancel: &Cancel) -> Result<PromptReuse, Error> {
        self.check_ids(prompt.ids(), 0)?;
        let media = self.encode(prompt, 0, cancel)?;
        self.stable_rows = prompt.stable_rows();
        let prepared = self.prepare_rows(prompt.ids(), &media, cancel);
        self.stable_rows = 0;
        prepared
    }

    fn prepare_rows(&mut self, ids: &[u32], media: &[MediumSpan], cancel: &Cancel) -> Result<PromptReuse, Error> {
        self.check_ids(ids, 0)?;
        let common = self.sequence.rows.common_prefix(ids, media).min(ids.len() - 1);
        let replaced = (self.sequence.rows.clone(), self.sequence.logits.clone(), self.sequence.largest.clone());
        let before = self.sequence.work;
        self.rollback(common)?;
        let new = |media: &'_ [MediumSpan]| media.iter().position(|medium| medium.end() > common).unwrap_or(media.len());
        if let Err(error) = self.step(&ids[common..], &media[new(media)..], 1, cancel, &mut Watch::default()) {
            let (rows, logits, largest) = replaced;
            self.sequence.rows.extend(&rows.ids()[common..], &rows.media()[new(rows.media())..]);
            (self.sequence.logits, self.sequence.largest) = (logits, largest);
            return Err(error);
        }
        let read = self.sequence.work.rows - before.rows;
        // A change of epoch or a rollback over recurrent slots computes rows before the common prefix again; a lost device costs some twice.
        Ok(PromptReuse { kept: ids.len().saturating_sub(read), read, calls: self.sequence.work.calls - before.calls })
    }

    /// The media of a prompt that begins at row `first`, encoded. Those that stand in this session already are not encoded again.
    fn encode(&mut self, prompt: &Prompt, first: usize, cancel: &Cancel) -> Result<Vec<MediumSpan>, Error> {
        let started = Instant::now();
        let mut media = Vec::with_capacity(prompt.media().len());
        for placed in prompt.media() {
            let medium = placed.medium();
            let encoded = match self.encoded(medium.kind(), medium.digest()) {
                Some(encoded) => encoded.clone(),
                None => {
                    let (encoded, is_new) = self.model.encode_counted(medium, cancel)?;
                    match medium.kind() {
                        MediaKind::Image => self.sequence.work.images += usize::from(is_new),
                        MediaKind::Audio => self.sequence.work.sounds += usize::from(is_new),
                    }
                    encoded
                }
            };
            media.push(MediumSpan::new(first + placed.first(), encoded));
        }
        self.sequence.work.encode += started.elapsed();
        Ok(media)
    }

    /// What a tower made of a medium that is in this session.
    pub(crate) fn encoded(&self, kind: MediaKind, digest: Digest) -> Option<&Arc<Encoded>> {
        let mut here = self.sequence.rows.media().iter().filter_map(MediumSpan::encoded);
        here.find(|encoded| (encoded.kind(), encoded.digest()) == (kind, digest))
    }

    /// Forgets the rows from `len` on. State that cannot be cut there (recurrent slots) goes back to the nearest checkpoint before it;
    /// the next step computes what is missing from the rows.
    pub fn rollback(&mut self, len: usize) -> Result<(), Error> {
        if len > self.len() {
            return Err(Error::Rollback { to: len, rows: self.len() });
        }
        if len < self.len() {
            self.sequence.rows.truncate(len);
            self.sequence.forget_logits();
        }
        self.settle();
        Ok(())
    }

    /// Forgets everything.
    pub fn reset(&mut self) {
        self.sequence.rows.truncate(0);
        self.sequence.forget_logits();
        self.settle();
    }

    /// An independent session that holds the same. On the CPU the two share the memory of what they have in common.
    pub fn fork(&self) -> Result<Self, Error> {
        Ok(Self {
            model: self.model.clone(),
            sequence: self.sequence.fork(self.model.context())?,
            loads: self.loads,
            lost: self.lost,
            checkpoints: self.checkpoints.clone(),
            stable_rows: 0,
        })
    }

    /// Remembers the present state, so that a rollback to here (or a little beyond) is cheap. Programs without recurrent slots need none.
    /// A checkpoint lives until a rollback to before it.
    pub fn checkpoint(&mut self) -> Result<(), Error> {
        self.take_checkpoint(true)
    }

    /// Makes the rows those of a prompt, of which the state holds the first `computed`.
    pub(crate) fn put_in(&mut self, ids: &[u32], media: &[MediumSpan], computed: usize) {
        debug_assert_eq!(self.sequence.state.len(), computed);
        self.sequence.forget_logits();
        self.sequence.rows.truncate(0);
        self.sequence.rows.extend(ids, media);
    }

    /// Forgets the rows that are put in and not computed.
    pub(crate) fn forget_uncomputed(&mut self) {
        let computed = self.sequence.state.len();
        self.sequence.rows.truncate(computed);
    }

    /// Takes what recurrent slots were at an earlier row from a state of the same rows; to be told by rising length.
    pub(crate) fn remember(&mut self, earlier: &dyn State) {
        self.checkpoints.extend(Checkpoint::take(self.model.program(), earlier));
    }

    /// The states from which others can go on: after the last computed row, and at the checkpoints before it. Those that cannot be copied now are left out.
    pub(crate) fn computed(&self) -> Vec<Box<dyn State>> {
        let state = &self.sequence.state;
        if self.lost {
            return Vec::new();
        }
        let at = |checkpoint: &Checkpoint| {
            let mut earlier = state.fork().ok()?;
            checkpoint.restore(&mut *earlier).ok()?;
            Some(earlier)
        };
        let earlier = self.checkpoints.iter().filter(|checkpoint| checkpoint.len < state.len()).filter_map(at);
        earlier.chain(state.fork().ok()).collect()
    }

    fn check_ids(&self, ids: &[u32], rows: usize) -> Result<(), Error> {
        self.model.check_ids(ids)?;
        match (rows, self.context()) {
            (0, context) if ids.len() > context => {
                Err(Error::PromptTooLong { prompt: ids.len(), context, limit: self.model.context_limit() })
            }
            (rows, context) if ids.len() > context - rows => Err(Error::ContextFull { rows, more: ids.len(), context }),
            _ => Ok(()),
        }
    }

    /// The one way forward: adds `ids` and the media among them, computes, and takes them back if that fails.
    fn step(&mut self, ids: &[u32], media: &[MediumSpan], wanted: usize, cancel: &Cancel, watch: &mut Watch<'_>) -> Result<(), Error> {
        let before = self.len();
        self.check_ids(ids, before)?;
        self.sequence.rows.extend(ids, media);
        if let Err(error) = self.compute(self.len() - wanted, cancel, watch) {
            self.sequence.rows.truncate(before);
            self.settle();
            return Err(error);
        }
        if ids.len() > 1 {
            // A prompt's end is where the next turn most often parts from this one. Without it a rollback only computes more.
            let _ = self.take_checkpoint(false);
        }
        Ok(())
    }

    /// Computes the rows that the state lacks, and the logits of those from `first_wanted` on.
    fn compute(&mut self, first_wanted: usize, cancel: &Cancel, watch: &mut Watch<'_>) -> Result<(), Error> {
        let total = self.len();
        self.refresh()?;
        let decodes = total - self.sequence.state.len() == 1 && total > 1;
        let most_wanted = self.model.wanted();
        let model = self.model.clone();
        let stable = self.stable_rows;
        let end_of_call = |first: usize| {
            let end = total.min(first + model.chunk_of(total - first)).min(first.max(first_wanted) + most_wanted);
            if first < stable { end.min(stable) } else { end }
        };
        if end_of_call(self.sequence.state.len()) < total {
            // More than one call: a failure in a later one should find the way back to here.
            let _ = self.take_checkpoint(false);
        }
        while self.sequence.state.len() < total {
            if cancel.is_cancelled() {
                return Err(Error::Cancelled);
            }
            let first = self.sequence.state.len();
            let end = end_of_call(first);
            let wanted = end.saturating_sub(first.max(first_wanted));
            // A state that is lost on the way is computed again like a prompt.
            let phase = if decodes && total - first == 1 { Phase::Decode } else { Phase::Prefill };
            self.call(first..end, wanted, &Purpose { phase, cancel: Some(cancel.flag()) }, watch)?;
            if self.sequence.state.len() == stable {
                let _ = self.take_checkpoint(false);
            }
        }
        Ok(())
    }

    /// Gets the state ready to go on: forgets it where the number of rows has changed the program's constants, and makes a new one where it is lost.
    pub(crate) fn refresh(&mut self) -> Result<(), Error> {
        let epoch = self.model.program().epoch(self.len());
        if epoch != self.sequence.epoch {
            self.forget_state();
            self.sequence.epoch = epoch;
        }
        if self.lost || self.loads != self.model.runner().loads {
            self.checkpoints.clear();
            (self.sequence.state, self.loads) = self.model.new_state()?;
            self.lost = false;
        }
        Ok(())
    }

    /// One call of the program over a span of rows, committed; none where the device was lost and the rows have to be computed again.
    fn call(&mut self, rows: std::ops::Range<usize>, wanted: usize, purpose: &Purpose<'_>, watch: &mut Watch<'_>) -> Result<(), Error> {
        let model = self.model.clone();
        let result = model.runner().call(&mut [Span { sequence: &mut self.sequence, rows, wanted, mask: None }], purpose, watch);
        match result {
            Err(Error::Device(lost)) if lost.left_device().is_some() => {
                model.recover(lost)?;
                self.refresh()
            }
            result => result,
        }
    }

    /// Brings the state back to where the rows end, or to the nearest place before it from which the next step can compute.
    fn settle(&mut self) {
        let len = self.len();
        self.checkpoints.retain(|c| c.len <= len);
        if self.lost || self.sequence.state.len() <= len {
            return;
        }
        let program = self.model.program();
        let done = match self.checkpoints.last() {
            _ if recurrent(program).next().is_none() => self.sequence.state.truncate(len),
            Some(checkpoint) => checkpoint.restore(&mut *self.sequence.state),
            None => Checkpoint::start(program).restore(&mut *self.sequence.state),
        };
        // A device that cannot go back that far (it kept a window only) starts again: the rows are all there.
        if done.is_err() {
            self.forget_state();
        }
    }

    /// Back to before the first row.
    fn forget_state(&mut self) {
        self.checkpoints.clear();
        self.lost |= Checkpoint::start(self.model.program()).restore(&mut *self.sequence.state).is_err();
    }

    fn take_checkpoint(&mut self, kept: bool) -> Result<(), Error> {
        let len = self.sequence.state.len();
        if len == 0 || self.lost || recurrent(self.model.program()).next().is_none() {
            return Ok(());
        }
        match self.checkpoints.last_mut() {
            Some(last) if last.len == len => last.kept |= kept,
            _ => {
                let mut checkpoint = Checkpoint::take(self.model.program(), &*self.sequence.state)?;
                checkpoint.kept = kept;
                self.checkpoints.push(checkpoint);
            }
        }
        if self.checkpoints.iter().filter(|c| !c.kept).count() > AUTOMATIC_CHECKPOINTS {
            let oldest = self.checkpoints.iter().position(|c| !c.kept);
            oldest.map(|at| self.checkpoints.remove(at));
        }
        Ok(())
    }
}

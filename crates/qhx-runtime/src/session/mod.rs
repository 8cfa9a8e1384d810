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
    Cancel, Encoded, Error, MediaKind, Model, Prompt,
    rows::{Rows, Run},
    runner::{Purpose, Span},
};
use checkpoint::{Checkpoint, recurrent};
use qhx_bundle::Digest;
use qhx_ir::{DeviceError, IdMask, Phase, State, Tap, Want};
use std::{
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

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
    pub(crate) rows: Rows,
    pub(crate) state: Box<dyn State>,
    /// [`crate::runner::Runner::loads`] of the program that `state` belongs to.
    loads: u64,
    /// Whether `state` is of unknown content (a device failed while it was being restored) and must be made anew.
    lost: bool,
    /// The program's epoch for which `state` was computed.
    pub(crate) epoch: usize,
    /// By rising length, none beyond `state`.
    checkpoints: Vec<Checkpoint>,
    /// Of the last row; empty when they are not known.
    logits: Vec<f32>,
    /// The id and the value of the largest logit of the last row, where nothing else was wanted.
    largest: Option<(u32, f32)>,
    /// Whether only the largest of them is wanted.
    largest_only: bool,
    pub(crate) work: Work,
}

/// What is known of the next token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NextToken<'a> {
    /// All logits.
    Logits(&'a [f32]),
    /// The largest logit.
    Largest {
        /// Its id.
        id: u32,
        /// The logit.
        value: f32,
    },
}

/// What a session has made the device do so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Calls of the program.
    pub calls: usize,
    /// Those of them that wrote: see [`Phase`].
    pub decode_calls: usize,
    /// Rows computed, those computed again included.
    pub rows: usize,
    /// Time spent in the program's last stage (the output head), as far as the device tells.
    pub last_stage: Duration,
    /// Images that a tower encoded.
    pub images: usize,
    /// Sounds that a tower encoded.
    pub sounds: usize,
    /// Time that took.
    pub encode: Duration,
}

impl Work {
    /// Counts a call in which so many of the session's rows were computed.
    pub(crate) fn add(&mut self, phase: Phase, rows: usize, last_stage: Duration) {
        self.calls += 1;
        self.decode_calls += usize::from(phase == Phase::Decode);
        self.rows += rows;
        self.last_stage += last_stage;
    }

    /// Media of a kind that a tower encoded.
    pub fn encoded(&self, kind: MediaKind) -> usize {
        match kind {
            MediaKind::Image => self.images,
            MediaKind::Audio => self.sounds,
        }
    }
}

/// How a prompt met what the session already had: see [`Session::prepare`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prepared {
    /// Rows of the prompt whose state was there already.
    pub kept: usize,
    /// Rows computed for it.
    pub read: usize,
    /// Calls it took.
    pub calls: usize,
}

/// Takes the logits of a row, and the row's number.
pub type ShowLogits<'a> = dyn FnMut(usize, &[f32]) + 'a;
/// Takes what a stage made in a call, and the number of the call's first row.
pub type ShowTap<'a> = dyn FnMut(usize, Tap<'_>) + 'a;

/// What a step reports while it runs.
#[derive(Default)]
pub(crate) struct Watch<'a> {
    /// Gets the logits of each wanted row with the row's number.
    pub(crate) logits: Option<&'a mut ShowLogits<'a>>,
    /// Gets each stage's tap with the number of the call's first row.
    pub(crate) taps: Option<&'a mut ShowTap<'a>>,
}

impl Session {
    pub(crate) fn new(model: Model) -> Result<Self, Error> {
        let (state, loads) = model.new_state()?;
        let rows = Rows::with_capacity(model.context());
        let logits = Vec::with_capacity(model.vocabulary().logits);
        Ok(Self {
            model,
            rows,
            state,
            loads,
            lost: false,
            epoch: 0,
            checkpoints: Vec::new(),
            logits,
            largest: None,
            largest_only: false,
            work: Work::default(),
        })
    }

    /// The model it runs on.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The ids that were put in, in order.
    pub fn ids(&self) -> &[u32] {
        self.rows.ids()
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether nothing was put in.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The most rows it can hold.
    pub fn context(&self) -> usize {
        self.state.capacity().min(self.model.context())
    }

    /// The logits of the last row, if the last thing that happened to this session was a step.
    pub fn logits(&self) -> Option<&[f32]> {
        (!self.logits.is_empty()).then_some(&self.logits[..])
    }

    /// What is known of the token after the last row, if the last thing that happened to this session was a step.
    pub fn next_token(&self) -> Option<NextToken<'_>> {
        match self.largest {
            Some((id, value)) => Some(NextToken::Largest { id, value }),
            None => self.logits().map(NextToken::Logits),
        }
    }

    /// From now on only the largest logit is wanted, and its id, which is faster: see [`Session::next_token`]. Where all logits of several rows are
    /// shown ([`Session::append_showing`]) they are all there.
    pub fn want_largest_only(&mut self, largest_only: bool) {
        self.largest_only = largest_only;
    }

    /// What a call should give of the last row.
    pub(crate) fn want<'m>(&self, all_logits: bool, mask: Option<&'m OnceLock<IdMask>>) -> Want<'m> {
        match mask {
            _ if all_logits || !self.largest_only => Want::Logits,
            Some(mask) => Want::LargestAllowed(mask),
            None => Want::Largest,
        }
    }

    pub(crate) fn set_logits(&mut self, logits: &[f32]) {
        self.largest = None;
        self.logits.clear();
        self.logits.extend_from_slice(logits);
    }

    pub(crate) fn set_largest(&mut self, id: u32, value: f32) {
        self.logits.clear();
        self.largest = Some((id, value));
    }

    fn forget_logits(&mut self) {
        self.logits.clear();
        self.largest = None;
    }

    /// What it has made the device do so far.
    pub fn work(&self) -> Work {
        self.work
    }

    /// Bytes that its state and its checkpoints hold.
    pub fn bytes(&self) -> u64 {
        self.state.bytes() + self.checkpoints.iter().map(Checkpoint::bytes).sum::<u64>()
    }

    /// Puts `ids` in and gives the logits of the last one (none where only the largest is wanted). Long inputs are computed in chunks; a single id after others is a
    /// decode step.
    ///
    /// On an error, cancellation included, the session is as it was.
    pub fn append(&mut self, ids: &[u32], cancel: &Cancel) -> Result<&[f32], Error> {
        self.step(ids, &[], 1, cancel, &mut Watch::default())?;
        Ok(&self.logits)
    }

    /// Puts an id into each of several sessions of one model, in one call. On an error none of them has changed.
    pub(crate) fn append_together(sessions: &mut [Self], ids: &[u32], cancel: &Cancel) -> Result<(), Error> {
        let Some(model) = sessions.first().map(|session| session.model.clone()) else { return Ok(()) };
        for (session, &id) in sessions.iter().zip(ids) {
            session.check_ids(&[id], session.len())?;
        }
        let before: Vec<usize> = sessions.iter().map(Self::len).collect();
        let advance = |sessions: &mut [Self]| {
            for (session, &id) in sessions.iter_mut().zip(ids) {
                session.rows.extend(&[id], &[]);
                session.refresh()?;
            }
            let mut spans: Vec<Span<'_>> = sessions
                .iter_mut()
                .map(|session| Span { rows: session.state.len()..session.len(), session, wanted: 1, mask: None })
                .collect();
            let purpose = Purpose { phase: Phase::Decode, cancel: Some(cancel.flag()) };
            model.runner().call(&model, &mut spans, &purpose, &mut Watch::default())
        };
        let result = advance(sessions);
        if result.is_err() {
            for (session, before) in sessions.iter_mut().zip(before) {
                session.rows.truncate(before);
                session.settle();
            }
        }
        result
    }

    /// Puts a prompt in after what is there, its media included, and gives the logits of the last row.
    pub fn append_prompt(&mut self, prompt: &Prompt, cancel: &Cancel) -> Result<&[f32], Error> {
        let runs = self.encode(prompt, self.len(), cancel)?;
        self.step(prompt.ids(), &runs, 1, cancel, &mut Watch::default())?;
        Ok(&self.logits)
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
        let runs = self.encode(prompt, self.len(), cancel)?;
        let wanted = wanted.clamp(1, prompt.ids().len().max(1));
        self.step(prompt.ids(), &runs, wanted, cancel, &mut Watch { logits: Some(show), taps: Some(taps) })
    }

    /// Makes the session hold exactly `ids`: keeps the longest common prefix with what it has and reads the rest. The last row is always
    /// read, so that its logits are there.
    ///
    /// On an error, cancellation included, the session holds what it held.
    pub fn prepare(&mut self, ids: &[u32], cancel: &Cancel) -> Result<Prepared, Error> {
        self.prepare_rows(ids, &[], cancel)
    }

    /// Like [`Session::prepare`] for a prompt with media: they are compared by content, and encoded only where they are new.
    pub fn prepare_prompt(&mut self, prompt: &Prompt, cancel: &Cancel) -> Result<Prepared, Error> {
        self.check_ids(prompt.ids(), 0)?;
        let runs = self.encode(prompt, 0, cancel)?;
        self.prepare_rows(prompt.ids(), &runs, cancel)
    }

    fn prepare_rows(&mut self, ids: &[u32], runs: &[Run], cancel: &Cancel) -> Result<Prepared, Error> {
        self.check_ids(ids, 0)?;
        let common = self.rows.common_prefix(ids, runs).min(ids.len() - 1);
        let replaced = (self.rows.clone(), self.logits.clone(), self.largest);
        let before = self.work;
        self.rollback(common)?;
        let new = |runs: &'_ [Run]| runs.iter().position(|run| run.end() > common).unwrap_or(runs.len());
        if let Err(error) = self.step(&ids[common..], &runs[new(runs)..], 1, cancel, &mut Watch::default()) {
            let (rows, logits, largest) = replaced;
            self.rows.extend(&rows.ids()[common..], &rows.runs()[new(rows.runs())..]);
            (self.logits, self.largest) = (logits, largest);
            return Err(error);
        }
        let read = self.work.rows - before.rows;
        // A change of epoch or a rollback over recurrent slots computes rows before the common prefix again; a lost device costs some twice.
        Ok(Prepared { kept: ids.len().saturating_sub(read), read, calls: self.work.calls - before.calls })
    }

    /// The media of a prompt that begins at row `first`, encoded. Those that stand in this session already are not encoded again.
    fn encode(&mut self, prompt: &Prompt, first: usize, cancel: &Cancel) -> Result<Vec<Run>, Error> {
        let started = Instant::now();
        let mut runs = Vec::with_capacity(prompt.media().len());
        for placed in prompt.media() {
            let medium = placed.medium();
            let encoded = match self.encoded(medium.kind(), medium.digest()) {
                Some(encoded) => encoded.clone(),
                None => {
                    let (encoded, is_new) = self.model.encode_counted(medium, cancel)?;
                    match medium.kind() {
                        MediaKind::Image => self.work.images += usize::from(is_new),
                        MediaKind::Audio => self.work.sounds += usize::from(is_new),
                    }
                    encoded
                }
            };
            runs.push(Run::new(first + placed.first(), encoded));
        }
        self.work.encode += started.elapsed();
        Ok(runs)
    }

    /// What a tower made of a medium that is in this session.
    pub(crate) fn encoded(&self, kind: MediaKind, digest: Digest) -> Option<&Arc<Encoded>> {
        let mut here = self.rows.runs().iter().map(|run| &run.encoded);
        here.find(|encoded| (encoded.kind(), encoded.digest()) == (kind, digest))
    }

    /// Forgets the rows from `len` on. State that cannot be cut there (recurrent slots) goes back to the nearest checkpoint before it;
    /// the next step computes what is missing from the rows.
    pub fn rollback(&mut self, len: usize) -> Result<(), Error> {
        if len > self.len() {
            return Err(Error::Rollback { to: len, rows: self.len() });
        }
        if len < self.len() {
            self.rows.truncate(len);
            self.forget_logits();
        }
        self.settle();
        Ok(())
    }

    /// Forgets everything.
    pub fn reset(&mut self) {
        self.rows.truncate(0);
        self.forget_logits();
        self.settle();
    }

    /// An independent session that holds the same. On the CPU the two share the memory of what they have in common.
    pub fn fork(&self) -> Result<Self, Error> {
        Ok(Self {
            model: self.model.clone(),
            rows: self.rows.copy_with_capacity(self.model.context()),
            state: self.state.fork()?,
            loads: self.loads,
            lost: self.lost,
            epoch: self.epoch,
            checkpoints: self.checkpoints.clone(),
            logits: self.logits.clone(),
            largest: self.largest,
            largest_only: self.largest_only,
            work: self.work,
        })
    }

    /// Remembers the present state, so that a rollback to here (or a little beyond) is cheap. Programs without recurrent slots need none.
    /// A checkpoint lives until a rollback to before it.
    pub fn checkpoint(&mut self) -> Result<(), Error> {
        self.take_checkpoint(true)
    }

    /// Makes the rows those of a prompt, of which the state holds the first `computed`.
    pub(crate) fn put_in(&mut self, ids: &[u32], runs: &[Run], computed: usize) {
        debug_assert_eq!(self.state.len(), computed);
        self.forget_logits();
        self.rows.truncate(0);
        self.rows.extend(ids, runs);
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
    fn step(&mut self, ids: &[u32], runs: &[Run], wanted: usize, cancel: &Cancel, watch: &mut Watch<'_>) -> Result<(), Error> {
        let before = self.len();
        self.check_ids(ids, before)?;
        self.rows.extend(ids, runs);
        if let Err(error) = self.compute(self.len() - wanted, cancel, watch) {
            self.rows.truncate(before);
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
        let decodes = total - self.state.len() == 1 && total > 1;
        let most_wanted = self.model.wanted();
        let model = self.model.clone();
        let end_of_call = |first: usize| total.min(first + model.chunk_of(total - first)).min(first.max(first_wanted) + most_wanted);
        if end_of_call(self.state.len()) < total {
            // More than one call: a failure in a later one should find the way back to here.
            let _ = self.take_checkpoint(false);
        }
        while self.state.len() < total {
            if cancel.is_cancelled() {
                return Err(Error::Cancelled);
            }
            let first = self.state.len();
            let end = end_of_call(first);
            let wanted = end.saturating_sub(first.max(first_wanted));
            // A state that is lost on the way is computed again like a prompt.
            let phase = if decodes && total - first == 1 { Phase::Decode } else { Phase::Prefill };
            self.call(first..end, wanted, &Purpose { phase, cancel: Some(cancel.flag()) }, watch)?;
        }
        Ok(())
    }

    /// Gets the state ready to go on: forgets it where the number of rows has changed the program's constants, and makes a new one where it is lost.
    pub(crate) fn refresh(&mut self) -> Result<(), Error> {
        let epoch = self.model.program().epoch(self.len());
        if epoch != self.epoch {
            self.forget_state();
            self.epoch = epoch;
        }
        if self.lost || self.loads != self.model.runner().loads {
            self.checkpoints.clear();
            (self.state, self.loads) = self.model.new_state()?;
            self.lost = false;
        }
        Ok(())
    }

    /// One call of the program over a span of rows, committed; none where the device was lost and the rows have to be computed again.
    fn call(&mut self, rows: std::ops::Range<usize>, wanted: usize, purpose: &Purpose<'_>, watch: &mut Watch<'_>) -> Result<(), Error> {
        let model = self.model.clone();
        let result = model.runner().call(&model, &mut [Span { session: self, rows, wanted, mask: None }], purpose, watch);
        match result {
            Err(Error::Device(lost @ DeviceError::Lost { .. })) => {
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
        if self.lost || self.state.len() <= len {
            return;
        }
        let program = self.model.program();
        let done = match self.checkpoints.last() {
            _ if recurrent(program).next().is_none() => self.state.truncate(len),
            Some(checkpoint) => checkpoint.restore(&mut *self.state),
            None => Checkpoint::start(program).restore(&mut *self.state),
        };
        // A device that cannot go back that far (it kept a window only) starts again: the rows are all there.
        if done.is_err() {
            self.forget_state();
        }
    }

    /// Back to before the first row.
    fn forget_state(&mut self) {
        self.checkpoints.clear();
        self.lost |= Checkpoint::start(self.model.program()).restore(&mut *self.state).is_err();
    }

    fn take_checkpoint(&mut self, kept: bool) -> Result<(), Error> {
        let len = self.state.len();
        if len == 0 || self.lost || recurrent(self.model.program()).next().is_none() {
            return Ok(());
        }
        match self.checkpoints.last_mut() {
            Some(last) if last.len == len => last.kept |= kept,
            _ => {
                let mut checkpoint = Checkpoint::take(self.model.program(), &*self.state)?;
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

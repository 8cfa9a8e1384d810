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
    inputs::Inputs,
    placement::Phase,
    rows::{Rows, Run},
};
use checkpoint::{Checkpoint, recurrent};
use qhx_bundle::Digest;
use qhx_ir::{Call, Segment, State, Tap};
use std::{
    sync::Arc,
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
    rows: Rows,
    state: Box<dyn State>,
    /// Whether `state` is of unknown content (a device failed while it was being restored) and must be made anew.
    lost: bool,
    /// The program's epoch for which `state` was computed.
    epoch: usize,
    /// By rising length, none beyond `state`.
    checkpoints: Vec<Checkpoint>,
    inputs: Inputs,
    /// Of the last row; empty when they are not known.
    logits: Vec<f32>,
    /// Whether only the largest of them is wanted.
    largest_only: bool,
    work: Work,
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
struct Watch<'a> {
    /// Gets the logits of each wanted row with the row's number.
    logits: Option<&'a mut ShowLogits<'a>>,
    /// Gets each stage's tap with the number of the call's first row.
    taps: Option<&'a mut ShowTap<'a>>,
}

impl Session {
    pub(crate) fn new(model: Model) -> Result<Self, Error> {
        let state = model.new_state()?;
        let rows = Rows::with_capacity(model.context());
        let logits = Vec::with_capacity(model.vocabulary().logits);
        Ok(Self {
            model,
            rows,
            state,
            lost: false,
            epoch: 0,
            checkpoints: Vec::new(),
            inputs: Inputs::default(),
            logits,
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

    /// From now on only the largest logit is wanted, and its place: the device may give −∞ for others, which is faster. Where all logits of several rows are
    /// shown ([`Session::append_showing`]) they are all there.
    pub fn want_largest_only(&mut self, largest_only: bool) {
        if self.largest_only && !largest_only {
            // What stands here may lack some.
            self.logits.clear();
        }
        self.largest_only = largest_only;
    }

    /// What it has made the device do so far.
    pub fn work(&self) -> Work {
        self.work
    }

    /// Bytes that its state and its checkpoints hold.
    pub fn bytes(&self) -> u64 {
        self.state.bytes() + self.checkpoints.iter().map(Checkpoint::bytes).sum::<u64>()
    }

    /// Puts `ids` in and gives the logits of the last one. Long inputs are read in chunks.
    ///
    /// On an error, cancellation included, the session is as it was.
    pub fn append(&mut self, ids: &[u32], cancel: &Cancel) -> Result<&[f32], Error> {
        self.step(ids, &[], 1, cancel, &mut Watch::default())?;
        Ok(&self.logits)
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
        let replaced = (self.rows.clone(), self.logits.clone());
        let before = self.work;
        self.rollback(common)?;
        let new = |runs: &'_ [Run]| runs.iter().position(|run| run.end() > common).unwrap_or(runs.len());
        if let Err(error) = self.step(&ids[common..], &runs[new(runs)..], 1, cancel, &mut Watch::default()) {
            let (rows, logits) = replaced;
            self.rows.extend(&rows.ids()[common..], &rows.runs()[new(rows.runs())..]);
            self.logits = logits;
            return Err(error);
        }
        let read = self.work.rows - before.rows;
        // A change of epoch or a rollback over recurrent slots reads rows before the common prefix again.
        Ok(Prepared { kept: ids.len() - read, read, calls: self.work.calls - before.calls })
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
            self.logits.clear();
        }
        self.settle();
        Ok(())
    }

    /// Forgets everything.
    pub fn reset(&mut self) {
        self.rows.truncate(0);
        self.logits.clear();
        self.settle();
    }

    /// An independent session that holds the same.
    pub fn fork(&self) -> Self {
        Self {
            model: self.model.clone(),
            rows: self.rows.copy_with_capacity(self.model.context()),
            state: self.state.fork(),
            lost: self.lost,
            epoch: self.epoch,
            checkpoints: self.checkpoints.clone(),
            inputs: Inputs::default(),
            logits: self.logits.clone(),
            largest_only: self.largest_only,
            work: self.work,
        }
    }

    /// Remembers the present state, so that a rollback to here (or a little beyond) is cheap. Programs without recurrent slots need none.
    /// A checkpoint lives until a rollback to before it.
    pub fn checkpoint(&mut self) -> Result<(), Error> {
        self.take_checkpoint(true)
    }

    fn check_ids(&self, ids: &[u32], rows: usize) -> Result<(), Error> {
        if ids.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        let vocabulary = self.model.vocabulary().ids;
        if let Some(at) = ids.iter().position(|&id| id as usize >= vocabulary) {
            return Err(Error::UnknownId { id: ids[at], at, vocabulary });
        }
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
        let epoch = self.model.program().epoch(total);
        if epoch != self.epoch {
            self.forget_state();
            self.epoch = epoch;
        }
        if self.lost {
            self.checkpoints.clear();
            self.state = self.model.new_state()?;
            self.lost = false;
        }
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
            self.call(first..end, end.saturating_sub(first.max(first_wanted)), cancel, watch)?;
        }
        Ok(())
    }

    /// One call of the program over a span of rows, committed.
    fn call(&mut self, span: std::ops::Range<usize>, wanted: usize, cancel: &Cancel, watch: &mut Watch<'_>) -> Result<(), Error> {
        let Self { model, rows, state, inputs, logits, largest_only, epoch, work, .. } = self;
        let program = model.program();
        let mut executable = model.executable();
        let (first, count, completes) = (span.start, span.len(), span.end == rows.len());
        inputs.lend(program, model.placeholders(), rows, span, wanted, |bindings, inputs| {
            let mut segments = [Segment::new(Some(&mut **state), 0, count)];
            let mut tap;
            let taps: Option<&mut dyn FnMut(Tap<'_>)> = match &mut watch.taps {
                Some(show) => {
                    tap = |it: Tap<'_>| show(first, it);
                    Some(&mut tap)
                }
                None => None,
            };
            let (epoch, cancel, largest_only) = (*epoch, Some(cancel.flag()), *largest_only && watch.logits.is_none());
            executable.run(&mut Call { bindings, inputs, segments: &mut segments, epoch, cancel, taps, largest_only })
        })?;
        let width = model.vocabulary().logits;
        let output = match executable.output("logits") {
            Some(output) if output.len() == wanted * width => output,
            found => return Err(model.wrong_output(wanted, found.map(<[f32]>::len))),
        };
        state.commit(count)?;
        work.calls += 1;
        work.decode_calls += usize::from(Phase::of(count) == Phase::Decode);
        work.rows += count;
        work.last_stage += executable.last_stage_time().unwrap_or_default();
        // Only the step's last call replaces them: until then the step may still fail.
        if completes {
            logits.clear();
            logits.extend_from_slice(&output[output.len().saturating_sub(width)..]);
        }
        if let Some(show) = &mut watch.logits {
            output.chunks_exact(width).enumerate().for_each(|(i, row)| show(first + count - wanted + i, row));
        }
        Ok(())
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

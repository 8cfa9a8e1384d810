//! The engine's thread: who computes what in the next step.

use super::{
    Loan, Shared,
    pace::{self, Pace},
    prefixes::{self, Prefixes, Start},
    task::{Job, Task},
};
use crate::{
    Error, Model, Session,
    rows::MediumSpan,
    runner::{Purpose, Span, Watch},
};
use qhx_ir::{DeviceError, Phase};
use std::{
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, PoisonError},
    time::Instant,
};

/// With recurrent slots, what was computed is kept every so many rows of a prompt.
const KEEP_EVERY: usize = 1024;
/// A request waits for a prefix that is being computed if that saves it at least so many rows.
const WORTH_WAITING: usize = 32;

pub(super) struct Scheduler {
    shared: Arc<Shared>,
    model: Model,
    waiting: Vec<Job>,
    /// In the order in which they began.
    active: Vec<Task>,
    /// Whether there is nothing to compute until something happens: what is left waits for its media.
    stalled: bool,
    prefixes: Prefixes,
    pace: Pace,
    /// Rows computed since this was last told.
    rows: u64,
    /// Answers that can be made at once.
    sessions: usize,
    /// Whether calls are shared by several answers.
    batches: bool,
    /// Whether prefill and decode run on different devices, so that their rows cannot share a call.
    phases_apart: bool,
}

/// The rows of a task in the next step.
struct Planned {
    task: usize,
    rows: Range<usize>,
    phase: Phase,
}

impl Scheduler {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        let model = shared.model.clone();
        let sessions = model.sessions();
        let batches = model.runner().executable.max_segments() > 1;
        Self {
            prefixes: Prefixes::new(model.program()),
            phases_apart: model.placement().stages.iter().any(|stage| stage.phase.is_some()),
            waiting: Vec::new(),
            active: Vec::new(),
            stalled: false,
            pace: Pace::default(),
            rows: 0,
            sessions,
            batches,
            shared,
            model,
        }
    }

    /// Works until the engine is stopped.
    pub(super) fn run(mut self) {
        while self.take_requests() {
            let stepped = catch_unwind(AssertUnwindSafe(|| self.step()));
            if stepped.is_err() {
                // A panic of a device or of a caller's processor: nobody can say what the states hold.
                self.active.drain(..).for_each(|task| task.fail(Error::EngineFailed));
                self.prefixes.clear();
                self.stalled = false;
            }
            self.publish();
        }
        // Whoever still waits is told: an answer keeps the queue alive, but nobody looks at it any more.
        let left = std::mem::take(&mut self.shared.queue().jobs);
        drop(left);
    }

    /// Waits for something to do. Takes what has come; whether the engine goes on.
    fn take_requests(&mut self) -> bool {
        let shared = self.shared.clone();
        let mut queue = shared.queue();
        loop {
            if queue.stopped {
                return false;
            }
            let (loans, returned) = (std::mem::take(&mut queue.loans), std::mem::take(&mut queue.returned));
            if !loans.is_empty() || !returned.is_empty() {
                drop(queue);
                returned.iter().for_each(|session| self.take_back(session));
                loans.into_iter().for_each(|loan| self.lend(loan));
                queue = shared.queue();
                continue;
            }
            self.waiting.extend(queue.jobs.drain(..));
            let happened = std::mem::take(&mut queue.news) || !self.stalled;
            if happened && (!self.waiting.is_empty() || !self.active.is_empty()) {
                return true;
            }
            queue = shared.wake.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Gives somebody a session that holds as much of a prompt as is there.
    fn lend(&mut self, Loan { ids, media, to }: Loan) {
        let session = self.session_for(&ids, &media, 0).map(|(mut session, reused)| {
            session.put_in(&ids, &media, reused);
            session.forget_uncomputed();
            if self.prefixes.are_recurrent() {
                let earlier = self.prefixes.within(&ids, &media, session.sequence.epoch, reused);
                earlier.into_iter().for_each(|state| session.remember(state));
            }
            session
        });
        // Who asked may be gone.
        let _ = to.send(session);
    }

    /// Keeps what a session has computed.
    fn take_back(&mut self, session: &Session) {
        for state in session.computed() {
            let _ = self.prefixes.keep(&session.sequence.rows, &*state, session.sequence.epoch, 0);
        }
        self.make_room();
    }

    fn step(&mut self) {
        self.drop_cancelled();
        self.admit();
        self.refresh();
        self.prepare_choices();
        let decodes = self.active.iter().any(Task::decodes);
        let planned = self.plan();
        self.stalled = planned.is_empty();
        if self.stalled {
            return;
        }
        let started = Instant::now();
        let (prompt_rows, calls) = (planned.iter().filter(|p| p.phase == Phase::Prefill).map(|p| p.rows.len()).sum(), self.calls(planned));
        let failed: Vec<_> = calls.iter().filter_map(|call| Some((call, self.call(call).err()?))).collect();
        self.give_up(&failed);
        self.pace.learn(started.elapsed(), prompt_rows, decodes);
        if decodes {
            let mut queue = self.shared.queue();
            queue.stats.longest_step = queue.stats.longest_step.max(started.elapsed());
        }
        self.active.iter().for_each(Task::tell_progress);
        self.keep_prefixes();
        self.choose();
    }

    fn drop_cancelled(&mut self) {
        for job in self.waiting.extract_if(.., |job| job.is_unwanted()) {
            job.cancelled();
        }
        let cancelled: Vec<Task> = self.active.extract_if(.., |task| task.is_unwanted()).collect();
        cancelled.into_iter().for_each(|task| self.retire(task, true));
    }

    /// Begins the requests for which there is a place, first come, first served. One that has a beginning in common with a prompt that is being computed waits for it. The last place
    /// is not for one whose media are being encoded: others would wait for its tower.
    fn admit(&mut self) {
        let mut next = 0;
        while next < self.waiting.len() && self.active.len() < self.sessions {
            let is_last_of_several = self.sessions > 1 && self.active.len() + 1 == self.sessions;
            if is_last_of_several && !self.waiting[next].is_ready() || self.is_being_computed(next) {
                next += 1;
                continue;
            }
            let job = self.waiting.remove(next);
            let begun = match job.alone {
                true => self.model.session().map(|session| (session, 0)),
                false => self.session_for(job.prompt.ids(), &job.media, job.scope),
            };
            match begun {
                Ok((session, reused)) => {
                    let task = job.begin(session, reused);
                    self.shared.queue().stats.reused_rows += reused as u64;
                    self.active.push(task);
                }
                Err(error) => job.refuse(error),
            }
        }
    }

    /// Whether a running task is computing rows that a waiting one needs; it is told to keep them.
    fn is_being_computed(&mut self, job: usize) -> bool {
        let job = &self.waiting[job];
        if job.alone {
            return false;
        }
        let (ids, epoch) = (job.prompt.ids(), self.model.program().epoch(job.prompt.ids().len()));
        let there = self.prefixes.longest(ids, &job.media, epoch, job.scope);
        for task in self.active.iter_mut().filter(|task| !task.alone && task.scope == job.scope && task.session.sequence.epoch == epoch) {
            let prompt = task.prompt.ids().len();
            let common = task.rows().common_prefix(ids, &job.media).min(ids.len() - 1).min(prompt);
            if common >= there + WORTH_WAITING && task.done() < common {
                task.keep_at.insert(common);
                return true;
            }
        }
        false
    }

    /// A session that holds as much of a prompt as is there.
    fn session_for(&mut self, ids: &[u32], media: &[MediumSpan], scope: u64) -> Result<(Session, usize), Error> {
        let mut session = self.model.session()?;
        session.sequence.epoch = self.model.program().epoch(ids.len());
        let kept = self.prefixes.start(ids, media, session.sequence.epoch, scope);
        // A running task has rows, too, from any of which a program without recurrent slots can go on.
        let sources =
            self.active.iter().filter(|task| !task.alone && task.scope == scope && task.session.sequence.epoch == session.sequence.epoch);
        let running = sources
            .filter(|_| !self.prefixes.are_recurrent())
            .map(|task| (task, task.rows().common_prefix(ids, media).min(ids.len() - 1).min(task.done())));
        let best = running.max_by_key(|(_, rows)| *rows).filter(|(_, rows)| *rows > kept.as_ref().map_or(0, |kept| kept.rows));
        let start = match best {
            Some((task, rows)) => prefixes::fork(&*task.session.sequence.state, rows).ok().map(|state| Start { state, rows }).or(kept),
            None => kept,
        };
        let reused = start.map_or(0, |Start { state, rows }| {
            session.sequence.state = state;
            rows
        });
        Ok((session, reused))
    }

    /// Gets all states ready to go on.
    fn refresh(&mut self) {
        let mut failed = Vec::new();
        for (place, task) in self.active.iter_mut().enumerate() {
            failed.extend(task.session.refresh().err().map(|error| (place, error)));
        }
        for (place, error) in failed.into_iter().rev() {
            self.active.remove(place).fail(error);
        }
    }

    /// The rows of the next step: one of each answer that is being made, then rows of prompts, first come, first served.
    fn plan(&self) -> Vec<Planned> {
        let mut planned: Vec<Planned> = Vec::new();
        for (task, decoding) in self.active.iter().enumerate().filter(|(_, task)| task.is_decode_step()) {
            planned.push(Planned { task, rows: decoding.done()..decoding.session.len(), phase: Phase::Decode });
        }
        let decoding = planned.iter().map(|planned| planned.rows.len()).sum();
        let mut room = self.model.chunk().saturating_sub(if self.phases_apart || !self.batches { 0 } else { decoding });
        let (answers, prompts) = (planned.len(), self.active.len() - planned.len());
        if answers > 0 {
            let time = pace::longer(self.shared.options.step_time, answers, prompts);
            room = room.min(self.pace.rows_within(time, self.model.chunk()));
        }
        // Also answers whose rows have to be computed again.
        for (task, reading) in self.active.iter().enumerate().filter(|(_, task)| !task.is_decode_step() && task.ready() > 0) {
            if room == 0 {
                break;
            }
            let (done, end) = (reading.done(), reading.done() + reading.ready());
            let next_kept = match self.prefixes.are_recurrent() {
                true => (done / KEEP_EVERY + 1) * KEEP_EVERY,
                false => end,
            };
            let next_kept = reading.keep_at.range(done + 1..).next().copied().unwrap_or(end).min(next_kept);
            let chunk = self.model.chunk_of(end - done).min(room);
            let rows = done..end.min(done + chunk).min(next_kept);
            room -= rows.len();
            planned.push(Planned { task, rows, phase: Phase::Prefill });
        }
        planned
    }

    /// The calls that compute planned rows.
    fn calls(&self, planned: Vec<Planned>) -> Vec<Vec<Planned>> {
        if !self.batches {
            return planned.into_iter().map(|one| vec![one]).collect();
        }
        let (decode, prefill): (Vec<_>, Vec<_>) =
            planned.into_iter().partition(|planned| self.phases_apart && planned.phase == Phase::Decode);
        [decode, prefill].into_iter().filter(|call| !call.is_empty()).collect()
    }

    /// Runs a call. Where memory is short, prefixes are given up until it is not.
    fn call(&mut self, planned: &[Planned]) -> Result<(), Error> {
        loop {
            let phase = if planned.iter().all(|planned| planned.phase == Phase::Decode) { Phase::Decode } else { Phase::Prefill };
            // Whoever is alone in a call may stop it in the middle.
            let alone = match planned {
                [only] => Some(self.active[only.task].cancel.clone()),
                _ => None,
            };
            let mut by_task: Vec<Option<&mut Task>> = self.active.iter_mut().map(Some).collect();
            let mut spans = Vec::with_capacity(planned.len());
            for Planned { task, rows, .. } in planned {
                let Some(Task { session, mask, .. }) = by_task[*task].take() else { continue };
                let wanted = if rows.end == session.len() { 1 + session.sequence.drafts } else { 0 };
                spans.push(Span { sequence: &mut session.sequence, rows: rows.clone(), wanted, mask: mask.as_ref() });
            }
            let purpose = Purpose { phase, cancel: alone.as_ref().map(|cancel| cancel.flag()) };
            let result = self.model.runner().call(&mut spans, &purpose, &mut Watch::default());
            drop(spans);
            if result.is_ok() {
                self.rows += planned.iter().map(|planned| planned.rows.len() as u64).sum::<u64>();
            }
            match result {
                Err(Error::Device(DeviceError::StatesFull { .. } | DeviceError::Exhausted { .. })) if self.prefixes.evict() => {}
                // All that was computed is gone; it is computed again from the rows.
                Err(Error::Device(lost)) if lost.left_device().is_some() => {
                    planned.iter().for_each(|planned| self.active[planned.task].session.sequence.forget_drafts());
                    self.prefixes.clear();
                    return self.model.recover(lost);
                }
                result => return result,
            }
        }
    }

    /// Guesses at what follows the rows of answers, and asks what may.
    fn prepare_choices(&mut self) {
        let mut decoding = self.active.iter().filter(|task| task.is_decode_step()).count();
        let others = if self.batches { decoding.saturating_sub(1) } else { 0 };
        // Rows of prompts are in the same call, unless the phases are apart.
        let reading = self.active.iter().filter(|task| !self.phases_apart && self.batches && !task.is_decode_step());
        let reading: usize = reading.map(Task::ready).sum();
        let mut room = self.model.room_for_drafts(self.active.len(), others + 1 + reading.min(self.model.chunk()));
        for task in &mut self.active {
            // What is left is shared by those that are left.
            let most = room.div_ceil(decoding.max(1));
            decoding -= usize::from(task.is_decode_step());
            room -= task.prepare_choice(others, most);
        }
    }

    /// Ends tasks whose calls failed: where memory is short, the last that began; else all that were in the call. Who was cancelled ends with the next step.
    fn give_up(&mut self, failed: &[(&Vec<Planned>, Error)]) {
        let mut ended: Vec<(usize, &Error)> = Vec::new();
        for (call, error) in failed {
            call.iter().for_each(|planned| self.active[planned.task].session.sequence.forget_drafts());
            match error {
                Error::Cancelled => {}
                Error::Device(DeviceError::StatesFull { .. }) => ended.extend(call.iter().map(|p| p.task).max().map(|task| (task, error))),
                _ => ended.extend(call.iter().map(|planned| (planned.task, error))),
            }
        }
        ended.sort_unstable_by_key(|(task, _)| std::cmp::Reverse(*task));
        for (task, error) in ended {
            self.active.remove(task).fail(error.again());
        }
    }

    /// Keeps what tasks have computed where others may go on from: at ends of prompts, where another request parts from it, and with recurrent slots every so many rows.
    fn keep_prefixes(&mut self) {
        for task in self.active.iter_mut().filter(|task| !task.alone && !task.decodes()) {
            let (done, prompt) = (task.done(), task.prompt.ids().len());
            let asked = task.keep_at.remove(&done);
            let by_itself = done == prompt || self.prefixes.are_recurrent() && done % KEEP_EVERY == 0;
            if done > task.reused && (asked || by_itself) {
                // Without it others only compute more.
                let _ = self.prefixes.keep(task.rows(), &*task.session.sequence.state, task.session.sequence.epoch, task.scope);
            }
        }
        self.make_room();
    }

    /// Gives up prefixes beyond the bytes that may be kept.
    fn make_room(&mut self) {
        let most = self.shared.prefix_bytes;
        let held = |prefixes: &Prefixes| match self.model.runner().executable.state_bytes() {
            Some(bytes) => bytes.total(),
            None => prefixes.bytes(),
        };
        while held(&self.prefixes) > most && self.prefixes.evict() {}
    }

    /// Chooses tokens for the tasks whose rows are all computed; those that end make place.
    fn choose(&mut self) {
        let mut ended = Vec::new();
        for (place, task) in self.active.iter_mut().enumerate().filter(|(_, task)| task.is_computed()) {
            match task.choose() {
                Ok(true) => {}
                Ok(false) => ended.push((place, None)),
                Err(error) => ended.push((place, Some(error))),
            }
        }
        for (place, error) in ended.into_iter().rev() {
            let task = self.active.remove(place);
            match error {
                None => self.retire(task, false),
                Some(error) => task.fail(error),
            }
        }
    }

    /// Ends an answer. What it computed is kept: a next turn begins with it.
    fn retire(&mut self, task: Task, cancelled: bool) {
        let (scope, alone) = (task.scope, task.alone);
        let session = task.end(cancelled);
        if !alone {
            let _ = self.prefixes.keep(&session.sequence.rows, &*session.sequence.state, session.sequence.epoch, scope);
            drop(session);
            self.make_room();
        }
    }

    /// Tells what the engine does.
    fn publish(&mut self) {
        let bytes = self.model.runner().executable.state_bytes().unwrap_or_default();
        let mut queue = self.shared.queue();
        queue.stats.steps += 1;
        queue.stats.rows += std::mem::take(&mut self.rows);
        queue.stats.active = self.active.len();
        queue.stats.waiting = queue.jobs.len() + self.waiting.len();
        queue.stats.prefixes = self.prefixes.len();
        (queue.stats.kv_bytes, queue.stats.recurrent_bytes) = (bytes.kv, bytes.recurrent);
    }
}

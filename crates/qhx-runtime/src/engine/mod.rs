//! Many answers at once on one model.
//!
//! One thread takes requests from a bounded queue and works in steps. A step gathers the next row of every running answer, fills the rest of its rows with chunks of
//! prompts that are still being computed, runs one call, chooses tokens and hands pieces out. So a long prompt delays running answers by one step at most, a cancelled request is
//! gone after the step, and an answer never depends on who else was in its calls.
//!
//! What was computed is kept: a request starts from the longest prefix that it has in common with what is there.
//!
//! ```no_run
//! # fn example(model: qhx_runtime::Model) -> Result<(), qhx_runtime::Error> {
//! use qhx_runtime::{Prompt, engine::{Engine, EngineOptions, Request}};
//! let engine = Engine::start(model.clone(), EngineOptions::default())?;
//! let prompts = ["The sky is", "Water boils at"];
//! let answers: Vec<_> = prompts.iter().map(|text| engine.submit(Request::new(Prompt::completion(&model, text)?))).collect::<Result<_, _>>()?;
//! for mut answer in answers {
//!     for piece in &mut answer {
//!         print!("{}", piece?.text);
//!     }
//!     println!(" ({} tokens)", answer.finish()?.ids.len());
//! }
//! # Ok(()) }
//! ```

mod answer;
mod pace;
mod prefixes;
mod scheduler;
mod task;

pub use answer::{Answer, AnswerPiece};

use crate::{
    Cancel, Error, GenerateOptions, LogitProcessor, Model, Prompt, Session, draft::Draft, memory::available_bytes, rows::MediumSpan,
};
use answer::Sender;
use scheduler::Scheduler;
use std::{
    collections::VecDeque,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};
use task::Job;

/// How an engine works.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct EngineOptions {
    /// Requests that may wait; more are refused.
    pub queue: usize,
    /// How long a step may take while answers are running: prompts are computed in chunks that fit. Where there are more prompts than answers, up to four times as long.
    pub step_time: Duration,
    /// Bytes that the states of running answers and of what is kept for requests that begin alike may have together. Beyond it, what is kept is given up, the least
    /// recently used first. By default a sixteenth of the memory that is free when the engine starts, 2 GiB at most.
    pub prefix_bytes: Option<u64>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self { queue: 1024, step_time: Duration::from_millis(250), prefix_bytes: None }
    }
}

/// The default size of the prefix cache, given the free memory.
fn prefix_bytes_with(free: Option<u64>) -> u64 {
    const MOST: u64 = 2 << 30;
    free.map_or(MOST, |free| (free / 16).min(MOST))
}

/// Something to be answered.
#[non_exhaustive]
pub struct Request {
    /// What is put in.
    pub prompt: Prompt,
    /// How the answer is to be made.
    pub options: GenerateOptions,
    /// In front of the sampler, in order.
    pub processors: Vec<Box<dyn LogitProcessor>>,
    /// Guesses at what comes next, instead of those that the options name. All of them are computed, whether that pays or not.
    pub draft: Option<Box<dyn Draft>>,
    /// Set from any thread to stop.
    pub cancel: Cancel,
    /// Only requests of the same scope share what was computed: how long a prompt takes tells whether somebody asked it before.
    pub scope: u64,
    /// Keep nothing of it for later requests, and start from nothing.
    pub alone: bool,
}

impl Request {
    /// A prompt, answered as by default.
    pub fn new(prompt: Prompt) -> Self {
        Self {
            prompt,
            options: GenerateOptions::default(),
            processors: Vec::new(),
            draft: None,
            cancel: Cancel::new(),
            scope: 0,
            alone: false,
        }
    }

    /// The same with other options.
    pub fn with_options(mut self, options: GenerateOptions) -> Self {
        self.options = options;
        self
    }

    /// The same with one more processor.
    pub fn with_processor(mut self, processor: impl LogitProcessor + 'static) -> Self {
        self.processors.push(Box::new(processor));
        self
    }

    /// The same with guesses of the caller's own, all of which are computed.
    pub fn with_draft(mut self, draft: impl Draft + 'static) -> Self {
        self.draft = Some(Box::new(draft));
        self
    }
}

/// What an engine has done and holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
#[non_exhaustive]
pub struct EngineStats {
    /// Requests that wait.
    pub waiting: usize,
    /// Answers that are being made.
    pub active: usize,
    /// Steps.
    pub steps: u64,
    /// Rows computed, of prompts and of answers.
    pub rows: u64,
    /// Rows of prompts that were not computed, because they were there.
    pub reused_rows: u64,
    /// Prefixes kept.
    pub prefixes: usize,
    /// Bytes of keys and values, what is shared counted once.
    pub kv_bytes: u64,
    /// Bytes of recurrent states, what is shared counted once.
    pub recurrent_bytes: u64,
    /// The longest step so far in which an answer was waiting for its next token.
    pub longest_step: Duration,
}

/// An engine. Clones share it; with the last clone, what is still running is cancelled.
#[derive(Clone)]
pub struct Engine(Arc<Handle>);

/// Ends the engine's thread when the last engine is dropped.
struct Handle {
    shared: Arc<Shared>,
    thread: Mutex<Option<thread::JoinHandle<()>>>,
}

/// What the engine's thread and its users have in common.
struct Shared {
    model: Model,
    options: EngineOptions,
    /// [`EngineOptions::prefix_bytes`], as it was said or found.
    prefix_bytes: u64,
    queue: Mutex<Queue>,
    /// Something happened: a request came, one was cancelled, a medium is encoded, or the engine is to stop.
    wake: Condvar,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    loans: Vec<Loan>,
    /// Sessions of which something is to be kept.
    returned: Vec<Session>,
    /// Whether something has happened since the engine last looked.
    news: bool,
    stopped: bool,
    stats: EngineStats,
}

/// Somebody wants a session that holds as much of a prompt as is there.
struct Loan {
    ids: Vec<u32>,
    media: Vec<MediumSpan>,
    to: mpsc::SyncSender<Result<Session, Error>>,
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the engine that something has happened.
    fn tell(&self) {
        self.queue().news = true;
        self.wake.notify_all();
    }
}

impl Engine {
    /// Starts the engine's thread. How many answers share a call is what `model` was loaded for: [`crate::LoadOptions::sessions`].
    pub fn start(model: Model, options: EngineOptions) -> Result<Self, Error> {
        let prefix_bytes = options.prefix_bytes.unwrap_or_else(|| prefix_bytes_with(available_bytes()));
        let shared = Arc::new(Shared { model, options, prefix_bytes, queue: Mutex::default(), wake: Condvar::new() });
        let scheduler = Scheduler::new(shared.clone());
        let thread = thread::Builder::new().name("qhx-engine".into()).spawn(move || scheduler.run());
        let thread = thread.map_err(|source| Error::Thread { source })?;
        Ok(Self(Arc::new(Handle { shared, thread: Mutex::new(Some(thread)) })))
    }

    /// The model that it runs.
    pub fn model(&self) -> &Model {
        &self.0.shared.model
    }

    /// How it works.
    pub fn options(&self) -> &EngineOptions {
        &self.0.shared.options
    }

    /// Bytes that states may have: [`EngineOptions::prefix_bytes`], or what was chosen when it started.
    pub fn prefix_bytes(&self) -> u64 {
        self.0.shared.prefix_bytes
    }

    /// Queues a request. Its media are encoded here, on the caller's thread; all else happens on the engine's. Where towers have a device of their own, the engine computes what stands
    /// before a medium meanwhile. Fails where the request cannot be answered, or where too many are waiting.
    pub fn submit(&self, request: Request) -> Result<Answer, Error> {
        let shared = &self.0.shared;
        let (sender, answer) = answer::channel(request.cancel.clone(), shared.clone());
        let cancel = request.cancel.clone();
        let (job, awaited) = Job::new(&shared.model, request, sender, Instant::now())?;
        let mut queue = shared.queue();
        if queue.jobs.len() >= shared.options.queue {
            return Err(Error::QueueFull { waiting: queue.jobs.len() });
        }
        queue.jobs.push_back(job);
        queue.stats.waiting = queue.jobs.len();
        drop(queue);
        shared.tell();
        if let Some(awaited) = awaited
            && let Err(error) = awaited.encode(&shared.model, &cancel, || shared.tell())
        {
            answer.abandon();
            return Err(error);
        }
        Ok(answer)
    }

    /// A session of the caller's own that holds `prompt`: for what a request cannot do, such as saving it to a file. It starts from what the engine has kept; the
    /// rest is computed here, in turns with the engine's steps.
    pub fn session(&self, prompt: &Prompt, cancel: &Cancel) -> Result<Session, Error> {
        let shared = &self.0.shared;
        shared.model.check_prompt(prompt.ids())?;
        let (to, lent) = mpsc::sync_channel(1);
        let loan = Loan { ids: prompt.ids().to_vec(), media: task::encode(&shared.model, prompt, cancel)?, to };
        shared.queue().loans.push(loan);
        shared.tell();
        let mut session = lent.recv().map_err(|_| Error::EngineStopped)??;
        session.prepare_prompt(prompt, cancel)?;
        Ok(session)
    }

    /// Keeps what a session has computed for requests that begin alike, in scope 0. The session must be one of this engine's model.
    pub fn keep(&self, session: Session) {
        self.0.shared.queue().returned.push(session);
        self.0.shared.tell();
    }

    /// What it has done and holds.
    pub fn stats(&self) -> EngineStats {
        self.0.shared.queue().stats
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.queue().stopped = true;
        self.shared.tell();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // A processor of a caller may drop the last engine on the engine's own thread.
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != thread::current().id()) {
            let _ = thread.join();
        }
    }
}

impl Sender {
    /// Ends a request that will not be answered.
    fn refuse(self, error: Error) {
        self.end(Err(error));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_have_a_share_of_what_is_free() {
        assert_eq!([None, Some(1 << 40), Some(16 << 20), Some(0)].map(prefix_bytes_with), [2 << 30, 2 << 30, 1 << 20, 0]);
    }
}

//! Weights that take the place of others while the device computes: a thread of its own brings them there.
//!
//! The caller names what is to be written and goes on. The thread writes it to staging memory and has it copied from there on the lane for transfers; the copy waits for the last call
//! that reads what was there before. A call that reads a part waits on the device for the part's last copy, and on the host only until that is submitted.

use crate::{
    upload::{Copies, Upload},
    vulkan::{Buffer, Fault, Gpu, Submission},
};
use qhx_ir::{DeviceError, Transfer, WeightTensor};
use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    io,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// How long the thread sleeps between two looks at copies under way, if somebody wants to know when they end.
const GLANCE: Duration = Duration::from_micros(50);

/// One of the arrays that a weight is stored in.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Content {
    Data,
    Scale,
    Min,
}

impl Content {
    pub(crate) fn of(self, tensor: &WeightTensor) -> &[u8] {
        match self {
            Self::Data => tensor.data(),
            Self::Scale => tensor.scale(),
            Self::Min => tensor.min(),
        }
    }
}

/// Bytes that are to be written.
pub(crate) enum Source {
    Stored(WeightTensor, Content),
    Numbers(Vec<f32>),
}

/// What is to be written where.
pub(crate) struct Piece {
    pub(crate) to: Arc<Buffer>,
    pub(crate) offset: u64,
    pub(crate) content: Source,
}

/// Parts of weights.
#[derive(Debug)]
pub(crate) enum Parts {
    All,
    These(BTreeSet<usize>),
}

impl Parts {
    pub(crate) fn none() -> Self {
        Self::These(BTreeSet::new())
    }

    /// These as well; numbers below 0 are none.
    pub(crate) fn extend(&mut self, more: &[i32]) {
        if let Self::These(parts) = self {
            parts.extend(more.iter().filter_map(|&part| usize::try_from(part).ok()));
        }
    }
}

/// Transfers to the weights of one executable.
pub(crate) struct Transfers {
    gpu: Arc<Gpu>,
    shared: Arc<Shared>,
    /// Started by the first transfer.
    thread: Option<JoinHandle<()>>,
    /// Whether somebody wants to know when transfers begin and end.
    timed: bool,
    /// The last call that reads a part, and the last one that may read any.
    read: HashMap<usize, Submission>,
    all_read: Option<Submission>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// How many jobs of each part are not submitted yet.
    waiting: HashMap<usize, usize>,
    /// The last copy to each part.
    copied: HashMap<usize, Submission>,
    ended: Vec<Transfer>,
    failure: Option<Fault>,
    closing: bool,
}

/// A part of a weight that is to be written.
struct Job {
    weight: String,
    part: usize,
    bytes: u64,
    pieces: Vec<Piece>,
    after: Option<Submission>,
}

impl Transfers {
    pub(crate) fn new(gpu: &Arc<Gpu>, timed: bool) -> Self {
        Self { gpu: gpu.clone(), shared: Arc::default(), thread: None, timed, read: HashMap::new(), all_read: None }
    }

    /// Begins to bring a part of a weight to the device.
    pub(crate) fn add(&mut self, weight: &str, part: usize, bytes: u64, pieces: Vec<Piece>) -> Result<(), DeviceError> {
        self.start().map_err(|e| DeviceError::Resources(format!("no thread can be started for transfers to the GPU: {e}")))?;
        let after = self.read.get(&part).copied().max(self.all_read);
        let mut state = self.shared.healthy()?;
        state.jobs.push_back(Job { weight: weight.to_owned(), part, bytes, pieces, after });
        *state.waiting.entry(part).or_default() += 1;
        self.shared.changed.notify_all();
        Ok(())
    }

    fn start(&mut self) -> io::Result<()> {
        if self.thread.is_none() {
            let (shared, gpu, timed) = (self.shared.clone(), self.gpu.clone(), self.timed);
            self.thread = Some(thread::Builder::new().name("transfers".into()).spawn(move || shared.work(&gpu, timed))?);
        }
        Ok(())
    }

    /// Waits until transfers to some parts are submitted. Gives the last of them: who reads the parts has to wait for it.
    pub(crate) fn submitted(&self, parts: &Parts) -> Result<Option<Submission>, DeviceError> {
        let mut state = self.shared.healthy()?;
        loop {
            let (is_waiting, last) = match parts {
                Parts::All => (!state.waiting.is_empty(), state.copied.values().max()),
                Parts::These(parts) => (
                    parts.iter().any(|part| state.waiting.contains_key(part)),
                    parts.iter().filter_map(|part| state.copied.get(part)).max(),
                ),
            };
            if !is_waiting {
                return Ok(last.copied());
            }
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.check()?;
        }
    }

    /// The last transfer that has ended: what is submitted now sees all up to it.
    pub(crate) fn arrived(&self) -> Result<Option<Submission>, DeviceError> {
        let state = self.shared.healthy()?;
        Ok(state.copied.values().copied().filter(|&copy| self.gpu.has_ended(copy).unwrap_or(true)).max())
    }

    /// The parts whose transfers have not ended.
    pub(crate) fn on_the_way(&self) -> Vec<usize> {
        let state = self.shared.lock();
        let copied = state.copied.iter().filter(|(_, copy)| !self.gpu.has_ended(**copy).unwrap_or(true)).map(|(part, _)| part);
        let all: BTreeSet<usize> = state.waiting.keys().chain(copied).copied().collect();
        all.into_iter().collect()
    }

    /// Some parts are read by what was submitted: they are not written before it has ended.
    pub(crate) fn are_read(&mut self, parts: &Parts, by: Submission) {
        match parts {
            Parts::All => self.all_read = Some(by),
            Parts::These(parts) => self.read.extend(parts.iter().map(|&part| (part, by))),
        }
    }

    /// The transfers that have ended since this was asked the last time.
    pub(crate) fn take_ended(&self) -> Vec<Transfer> {
        std::mem::take(&mut self.shared.lock().ended)
    }
}

impl Drop for Transfers {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.shared.lock().closing = true;
        self.shared.changed.notify_all();
        let _ = thread.join();
    }
}

impl State {
    fn check(&self) -> Result<(), DeviceError> {
        self.failure.clone().map_or(Ok(()), |fault| Err(fault.into()))
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state, unless a transfer has failed.
    fn healthy(&self) -> Result<MutexGuard<'_, State>, DeviceError> {
        let state = self.lock();
        state.check()?;
        Ok(state)
    }

    /// What the thread does, until the transfers are closed.
    fn work(&self, gpu: &Arc<Gpu>, timed: bool) {
        let _guard = Guard(self);
        let (mut upload, mut watch) = (Upload::new(gpu, timed), Watch { gpu, under_way: VecDeque::new(), free: None });
        while let Some(job) = self.next(&mut watch) {
            let done = bring(&mut upload, &job);
            let began = Instant::now();
            let mut state = self.lock();
            match done {
                Ok(Some(copies)) => {
                    state.copied.insert(job.part, copies.submission);
                    if timed {
                        let (weight, bytes) = (job.weight, job.bytes);
                        watch.under_way.push_back((copies, Transfer { weight, bytes, began, ended: began }));
                    }
                }
                Ok(None) => {}
                Err(fault) => {
                    state.failure = Some(fault);
                    state.jobs.clear();
                    state.waiting.clear();
                }
            }
            if let Some(count) = state.waiting.get_mut(&job.part) {
                *count -= 1;
                if *count == 0 {
                    state.waiting.remove(&job.part);
                }
            }
            state.ended.extend(watch.ended());
            self.changed.notify_all();
        }
    }

    /// Waits for the next job; none at the end.
    fn next(&self, watch: &mut Watch<'_>) -> Option<Job> {
        let mut state = self.lock();
        loop {
            if state.closing {
                return None;
            }
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            state = match watch.under_way.is_empty() {
                true => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                false => self.changed.wait_timeout(state, GLANCE).unwrap_or_else(PoisonError::into_inner).0,
            };
            state.ended.extend(watch.ended());
        }
    }
}

/// Nobody waits for a thread that has panicked.
struct Guard<'a>(&'a Shared);

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.lock().failure = Some(Fault::Lost("the thread for transfers has panicked".into()));
            self.0.changed.notify_all();
        }
    }
}

/// Has a job's bytes copied.
fn bring(upload: &mut Upload, job: &Job) -> Result<Option<Copies>, Fault> {
    upload.wait_for(job.after);
    for Piece { to, offset, content } in &job.pieces {
        match content {
            Source::Stored(tensor, content) => upload.write(to, *offset, content.of(tensor))?,
            Source::Numbers(numbers) => upload.write(to, *offset, bytemuck::cast_slice(numbers))?,
        }
    }
    upload.flush()
}

/// Copies whose ends are of interest.
struct Watch<'a> {
    gpu: &'a Gpu,
    under_way: VecDeque<(Copies, Transfer)>,
    /// When the last one ended.
    free: Option<Instant>,
}

impl Watch<'_> {
    /// Those that have ended since the last look. They are made one after the other.
    fn ended(&mut self) -> Vec<Transfer> {
        let mut all = Vec::new();
        while let Some((copies, _)) = self.under_way.front()
            && self.gpu.has_ended(copies.submission).unwrap_or(true)
            && let Some((copies, transfer)) = self.under_way.pop_front()
        {
            // Where the device does not tell, they began as soon as they could, and have ended just now.
            let [began, ended] = copies.recording.span().unwrap_or_else(|| [transfer.began, Instant::now()]);
            let began = self.free.map_or(began, |free| free.max(began));
            let ended = ended.max(began);
            self.free = Some(ended);
            all.push(Transfer { began, ended, ..transfer });
        }
        all
    }
}

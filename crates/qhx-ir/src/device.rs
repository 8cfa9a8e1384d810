//! The interface between programs and the hardware that runs them.
//!
//! It has two halves. A [`Device`] is knowledge and needs no hardware: which ops it supports, what the host does for it, what would be compiled. A
//! [`Machine`] is a device that was opened: it compiles, loads and runs.

use crate::{Call, Checked, DeviceError, Matrix, Name, State, Timeline, WeightTensor, check};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
    ops::Add,
    path::PathBuf,
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, Instant},
};

/// What is known of a kind of hardware that runs programs.
pub trait Device: Send + Sync {
    /// `cpu`, `gpu`, `npu` …
    fn name(&self) -> &str;

    /// Whether it supports an op of a program; the error is the reason why placement moves the stage to another device.
    fn accepts(&self, program: &Checked, op: &crate::Op) -> Result<(), DeviceError>;

    /// Whether the host computes an op that the device accepts: looking up rows, scattering them, choosing experts.
    fn on_host(&self, _program: &Checked, _op: &crate::Op) -> bool {
        false
    }

    /// The plan that [`Machine::prepare`] would follow; the error says, with numbers, why the program does not fit.
    fn plan(&self, pieces: &[Piece<'_>], _target: &Target) -> Result<Planned, DeviceError> {
        Ok(Planned { rows: all_rows(pieces), notes: Vec::new() })
    }

    /// The weights that are still needed when a prepared program is loaded: those that the host reads. A device that prepares nothing needs all of them.
    fn host_weights(&self, program: &Checked) -> Vec<Name> {
        program.weights.keys().cloned().collect()
    }

    /// Bytes of its own memory that can be used now, for a device that weights are copied to: it is opened for that. `None` where programs use the host's memory.
    fn own_memory(&self) -> Result<Option<u64>, DeviceError> {
        Ok(None)
    }

    /// Whether a program can be held here of which another device computes a part: weights of what is loaded can be replaced ([`Executable::replace_part`]), and calls
    /// pause where they are told to ([`LoadOptions::pauses`]).
    fn replaces_weights(&self) -> bool {
        false
    }

    /// Opens it: starts its threads, loads its driver. Opening it again gives the same machine.
    fn open(&self) -> Result<Arc<dyn Machine>, DeviceError>;

    /// [`Machine::load`] of the opened device.
    fn load(&self, program: &Checked, weights: &Arc<dyn Weights>, options: &LoadOptions) -> Result<Box<dyn Executable>, DeviceError> {
        self.open()?.load(program, weights, options)
    }
}

/// A device that was opened.
pub trait Machine: Send + Sync {
    /// A description for people and for placement.
    fn describe(&self) -> DeviceInfo;

    /// Compiles a program, or the pieces of one that run here, ahead of time (called by the forge). Devices that compile at load do nothing.
    fn prepare(&self, _pieces: &[Piece<'_>], _weights: &Arc<dyn Weights>, _target: &Target) -> Result<Vec<Artifact>, DeviceError> {
        Ok(Vec::new())
    }

    /// Loads a program. To load a part of one, cut it out first: [`Checked::cut`].
    fn load(&self, program: &Checked, weights: &Arc<dyn Weights>, options: &LoadOptions) -> Result<Box<dyn Executable>, DeviceError>;

    /// Adds `left · rightᵀ` to a matrix in memory whose rows are `stride` numbers apart; the numbers between two rows stay as they are.
    fn add_product(&self, left: Matrix<'_>, right: Matrix<'_>, sum: &mut [f32], stride: usize) {
        left.add_product(right, sum, stride);
    }
}

/// The description of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceInfo {
    /// `cpu`, `gpu`, `npu` …
    pub name: String,
    /// Its name for people.
    pub description: String,
    /// Usable memory in bytes, where known.
    pub memory_bytes: Option<u64>,
    /// Number of threads or queues.
    pub threads: usize,
    /// Further facts for placement or people (`instructions: avx2+fma` …).
    pub facts: BTreeMap<String, Fact>,
}

impl DeviceInfo {
    /// A fact that is a text.
    pub fn text(&self, fact: &str) -> Option<&str> {
        match self.facts.get(fact) {
            Some(Fact::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// Whether it is a test device: software on the processor in place of a GPU.
    pub fn is_software(&self) -> bool {
        self.text("type") == Some("software")
    }

    /// A fact that is a number.
    pub fn number(&self, fact: &str) -> Option<u64> {
        match self.facts.get(fact) {
            Some(Fact::Number(number) | Fact::Bytes(number)) => Some(*number),
            _ => None,
        }
    }
}

/// A fact about a device. What is read from JSON has numbers only, no amounts of memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Fact {
    /// A name or a version.
    Text(String),
    /// A count.
    Number(u64),
    /// An amount of memory.
    Bytes(u64),
    /// Cores, by their numbers.
    Cores(Vec<usize>),
}

impl From<&str> for Fact {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Fact {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

/// A program, or a part cut out of one, to be compiled ahead of time.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// Its ops.
    pub program: &'a Checked,
    /// The row counts (`T`) at which a device with static shapes compiles it.
    pub rows: &'a [usize],
}

/// The row counts of all pieces, in ascending order.
pub fn all_rows(pieces: &[Piece<'_>]) -> Vec<usize> {
    let rows: BTreeSet<usize> = pieces.iter().flat_map(|piece| piece.rows.iter().copied()).collect();
    rows.into_iter().collect()
}

/// The target of ahead-of-time compilation.
#[derive(Clone, Debug, Default)]
pub struct Target {
    /// The whole program's name: `text`.
    pub program: String,
    /// The longest session, in rows.
    pub context: usize,
    /// The folder for the files; absent: a new temporary folder.
    pub folder: Option<PathBuf>,
    /// Set to cancel; checked between graphs.
    pub cancel: Option<Arc<AtomicBool>>,
}

/// The plan of [`Machine::prepare`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Planned {
    /// Those of the pieces' row counts for which graphs would be compiled.
    pub rows: Vec<usize>,
    /// Where the plan differs from what was requested and why, and its risks.
    pub notes: Vec<String>,
}

/// A file that [`Machine::prepare`] wrote.
#[derive(Clone, Debug)]
pub struct Artifact {
    /// File name inside the target's folder.
    pub name: String,
    /// Where the device wrote it.
    pub file: PathBuf,
}

/// How to load a program.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// The largest `T` of any call, for which the device plans its memory.
    pub max_rows: usize,
    /// The largest `R` of any call.
    pub max_soft_rows: usize,
    /// The most rows of any call whose logits are wanted whole. Of more rows something smaller may be wanted: see [`crate::Want`].
    pub max_wanted: usize,
    /// The most segments of any call. A device may offer fewer: see [`Executable::max_segments`].
    pub max_segments: usize,
    /// The most bytes that all states together may have, where the device counts them; absent: no limit.
    pub max_state_bytes: Option<u64>,
    /// Weights that are going to be replaced: the device has to hold them in memory of its own. See [`Executable::replace_part`].
    pub replaceable: Vec<Name>,
    /// Where calls wait for inputs that the host makes meanwhile, in the program's order. Needs [`Device::replaces_weights`].
    pub pauses: Vec<Pause>,
    /// Programs that are loaded on a device with the same number never compute at the same time: one memory for intermediate values is enough for all of them.
    pub scratch_group: Option<u64>,
    /// A file in which a device may keep how a program was used, for the next time it is loaded; absent: nothing is kept.
    pub history: Option<PathBuf>,
    /// Folder with the files that [`Machine::prepare`] wrote.
    pub artifacts: Option<PathBuf>,
    /// Told how far loading is, by a device that copies weights to memory of its own.
    pub progress: Option<LoadProgress>,
    /// Where calls are written down, where somebody wants to look at them.
    pub timeline: Option<Timeline>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            max_rows: 256,
            max_soft_rows: 256,
            max_wanted: 1,
            max_segments: 1,
            max_state_bytes: None,
            replaceable: Vec::new(),
            pauses: Vec::new(),
            scratch_group: None,
            history: None,
            artifacts: None,
            progress: None,
            timeline: None,
        }
    }
}

/// A place in a program where the host is shown what a call has computed so far, or where the call waits for inputs that the host makes of it, or both: see [`Call::host`].
/// The caller gives such inputs any content of the right length when the call begins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pause {
    /// The place of the op before which it is.
    pub before: usize,
    /// Values that ops before it make, and of which inputs are made. Where there are none, the inputs are made while the device computes.
    pub gives: Vec<Name>,
    /// Inputs that no op before it reads. Where there are none, the device goes on while the host looks at what it is given.
    pub takes: Vec<Name>,
    /// Inputs that are there from the beginning, and that the host may give anew where it replaces weights ([`crate::Paused::replace`]): they come behind those that are
    /// taken. No op before it reads them.
    pub changes: Vec<Name>,
}

/// Is told how many bytes of weights are loaded, and how many there are.
#[derive(Clone)]
pub struct LoadProgress(Arc<dyn Fn(u64, u64) + Send + Sync>);

impl LoadProgress {
    /// Calls `tell` with the bytes done and all bytes.
    pub fn new(tell: impl Fn(u64, u64) + Send + Sync + 'static) -> Self {
        Self(Arc::new(tell))
    }

    /// So many bytes of so many are loaded.
    pub fn tell(&self, done: u64, total: u64) {
        (self.0)(done, total);
    }
}

impl fmt::Debug for LoadProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LoadProgress")
    }
}

impl LoadOptions {
    /// Whether a call is within them.
    pub fn check(&self, program: &Checked, call: &Call<'_>) -> Result<(), DeviceError> {
        let (found, logits, segments) = (call.bindings, call.logit_rows(), call.segments.len());
        if found.rows <= self.max_rows
            && found.soft_rows <= self.max_soft_rows
            && logits <= self.max_wanted
            && segments <= self.max_segments
        {
            return Ok(());
        }
        Err(DeviceError::Call(format!(
            "a call of T = {}, R = {}, L = {logits} rows in {segments} segments exceeds the {}, {}, {} and {} that program `{}` was loaded for",
            found.rows, found.soft_rows, self.max_rows, self.max_soft_rows, self.max_wanted, self.max_segments, program.name
        )))
    }
}

/// Where weights come from.
pub trait Weights: Send + Sync {
    /// The tensor of that name, without a copy; `None` if there is none.
    fn tensor(&self, name: &str) -> Option<WeightTensor>;
}

impl dyn Weights {
    /// The tensor that `program` declares as `name`, checked against the declaration.
    pub fn declared(&self, program: &Checked, name: &Name) -> Result<WeightTensor, DeviceError> {
        let tensor = self.tensor(name).ok_or_else(|| DeviceError::Weight { name: name.clone(), reason: "is not in the bundle".into() })?;
        check::check_weight(program, name, tensor.encoding(), tensor.shape())?;
        Ok(tensor)
    }
}

impl Weights for HashMap<String, WeightTensor> {
    fn tensor(&self, name: &str) -> Option<WeightTensor> {
        self.get(name).cloned()
    }
}

/// Where the time of calls went.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Profile {
    /// Calls.
    pub calls: usize,
    /// How long all of them took.
    pub seconds: f64,
    /// Steps of the same kind together, those that took longest first.
    pub steps: Vec<StepProfile>,
}

/// All steps of a kind.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct StepProfile {
    /// What they do.
    pub step: String,
    /// How often one of them ran.
    pub runs: usize,
    /// How long they took together.
    pub seconds: f64,
    /// Bytes of weights that they read.
    pub weight_bytes: u64,
    /// How often work was shared out to all threads, which then wait for each other.
    pub barriers: usize,
    /// Of the time between sharing out and going on, the mean over all threads before they began to work.
    pub late_seconds: f64,
    /// The same while they worked; what is missing of the whole is waiting for others.
    pub busy_seconds: f64,
    /// The whole.
    pub shared_seconds: f64,
}

/// A loaded program.
pub trait Executable: Send {
    /// The program it runs.
    fn program(&self) -> &Checked;

    /// A fresh state for a session of at most `context` rows.
    fn new_state(&self, context: usize) -> Result<Box<dyn State>, DeviceError>;

    /// Begins a call. Changes to states are provisional until [`State::commit`].
    ///
    /// A device of its own (a GPU) works on while the caller goes on; a device that has only the caller's processor works in [`Executable::wait`]. So
    /// that two devices overlap, submit to the first, wait for the second, then wait for the first.
    fn submit(&mut self, call: &mut Call<'_>) -> Result<Ticket, DeviceError>;

    /// Ends a call, the same that was submitted: its outputs, taps and states are filled in. Calls are waited for in the order in which they were submitted.
    fn wait(&mut self, ticket: Ticket, call: &mut Call<'_>) -> Result<(), DeviceError>;

    /// Runs a call to its end.
    fn run(&mut self, call: &mut Call<'_>) -> Result<(), DeviceError> {
        let ticket = self.submit(call)?;
        self.wait(ticket, call)
    }

    /// Whether a call that was submitted goes on while the caller does something else.
    fn works_in_background(&self) -> bool {
        false
    }

    /// The most segments of a call; a device with one serves sessions in turns.
    fn max_segments(&self) -> usize {
        1
    }

    /// Whether recurrent slots can commit a part of a call's rows: see [`crate::Segment::partial`].
    fn commits_partly(&self) -> bool {
        false
    }

    /// A row is computed alike, bit by bit, whatever else is in its call, as long as that has at most so many rows; 0: no such promise is made. Up to 16 drafts may come on top where their segments
    /// say so ([`crate::Segment::partial`]): a device with a faster way for several rows, in which they come out otherwise, does not take it for such a call. Only so can drafts be computed beside
    /// other rows without ever changing an answer.
    fn invariant_rows(&self) -> usize {
        0
    }

    /// Bytes that all states of this executable hold together, what they share counted once; `None` if the device does not count.
    fn state_bytes(&self) -> Option<StateBytes> {
        None
    }

    /// How long the last stage of the program (for text: the output head) took in the last successful call, where the device measures it.
    fn last_stage_time(&self) -> Option<Duration> {
        None
    }

    /// The weights that the last successful call read, where the device counts them.
    fn weights_read(&self) -> Option<WeightsRead<'_>> {
        None
    }

    /// Measures the steps of all calls from here on, where the device can.
    fn begin_profile(&mut self) {}

    /// What was measured since [`Executable::begin_profile`]; nothing is measured any more.
    fn take_profile(&mut self) -> Option<Profile> {
        None
    }

    /// The traffic between the host and the device's graphs in the last successful call, where the device has graphs and counts it.
    fn traffic(&self) -> Option<Traffic> {
        None
    }

    /// Why prefill runs row by row: the device could not load its prefill graphs.
    fn row_by_row(&self) -> Option<&str> {
        None
    }

    /// Replaces one of the parts of a weight ([`WeightTensor::part`]): that of an expert by that of another. Calls that are submitted later see it; a call that is under way must not read that part.
    /// Where the device transfers behind the caller's back, an error may come from a later call.
    /// Needs [`LoadOptions::replaceable`].
    fn replace_part(&mut self, weight: &str, _number: usize, _part: &WeightTensor) -> Result<(), DeviceError> {
        Err(DeviceError::Weight { name: weight.into(), reason: "cannot be replaced on this device".into() })
    }

    /// What [`Executable::replace_part`] brought to the device since this was asked the last time, as far as it is there. None: the device brings nothing behind the caller's back.
    fn take_transfers(&mut self) -> Option<Vec<Transfer>> {
        None
    }

    /// The parts that were replaced and are not there yet: a call that is submitted now must not choose them in a pause.
    fn parts_on_the_way(&self) -> Vec<usize> {
        Vec::new()
    }

    /// What became of the chosen experts in all calls so far, where only some of them lie on the device with the rest of the program.
    fn expert_cache(&self) -> Option<ExpertCache> {
        None
    }

    /// Bytes of memory in addition to weights and states (activations, packed panels).
    fn scratch_bytes(&self) -> u64;
}

/// A part of a weight that was brought to a device while it could do other things.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The weight's name.
    pub weight: String,
    /// What is stored of it.
    pub bytes: u64,
    /// When it began.
    pub began: Instant,
    /// When it was there.
    pub ended: Instant,
}

/// A call that was begun: the device's own number for it.
#[derive(Debug)]
#[must_use = "a call that is not waited for has no results"]
pub struct Ticket(pub u64);

/// The memory of states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateBytes {
    /// Key and value rows.
    pub kv: u64,
    /// Recurrent slots.
    pub recurrent: u64,
}

impl StateBytes {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.kv + self.recurrent
    }
}

impl std::iter::Sum for StateBytes {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |a, b| Self { kv: a.kv + b.kv, recurrent: a.recurrent + b.recurrent })
    }
}

/// Traffic between a host and the graphs of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Executions of graphs.
    pub executions: u64,
    /// Bytes that the host writes into inputs: rows, masks, rotary tables, recurrent states.
    pub bytes_in: u64,
    /// Bytes that it reads from outputs: rows, new keys and values, updates of recurrent states.
    pub bytes_out: u64,
    /// Bytes of inputs that are lent: keys and values, experts. The emulator reads them in place; a phone's library copies them.
    pub bytes_lent: u64,
}

impl Add for Traffic {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self {
            executions: self.executions + other.executions,
            bytes_in: self.bytes_in + other.bytes_in,
            bytes_out: self.bytes_out + other.bytes_out,
            bytes_lent: self.bytes_lent + other.bytes_lent,
        }
    }
}

/// What became of chosen experts of which only some lie on the device with the rest of the program. A choice is a row and one of its experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertCache {
    /// Choices whose expert lay there.
    pub hits: u64,
    /// Choices whose expert was transferred for them.
    pub fetched: u64,
    /// Choices that were computed on the processor, from where the expert lies.
    pub misses: u64,
    /// Experts that were transferred: for choices, ahead of them, and to take the place of others that are used less.
    pub transfers: u64,
    /// Their bytes.
    pub transferred_bytes: u64,
}

impl ExpertCache {
    /// The share of choices whose expert lay there; 0 where there were none.
    pub fn hit_rate(&self) -> f64 {
        self.hits as f64 / ((self.hits + self.fetched + self.misses) as f64).max(1.0)
    }

    /// What was added since an earlier count.
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            hits: self.hits.saturating_sub(earlier.hits),
            fetched: self.fetched.saturating_sub(earlier.fetched),
            misses: self.misses.saturating_sub(earlier.misses),
            transfers: self.transfers.saturating_sub(earlier.transfers),
            transferred_bytes: self.transferred_bytes.saturating_sub(earlier.transferred_bytes),
        }
    }
}

impl Add for ExpertCache {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self {
            hits: self.hits + other.hits,
            fetched: self.fetched + other.fetched,
            misses: self.misses + other.misses,
            transfers: self.transfers + other.transfers,
            transferred_bytes: self.transferred_bytes + other.transferred_bytes,
        }
    }
}

/// The weights that a call read.
#[derive(Clone, Copy, Debug)]
pub struct WeightsRead<'a> {
    /// Bytes: only the experts used and the table rows looked up.
    pub bytes: u64,
    /// For each op with experts, in program order: the number of rows per expert.
    pub expert_rows: &'a [Vec<usize>],
}

//! What a device is to the rest: the traits between programs and the hardware that runs them.

use crate::{Bindings, CheckError, Checked, DType, KvType, Name, WeightTensor, check};
use serde::{Deserialize, Serialize};
use std::{
    any::Any,
    collections::{BTreeMap, BTreeSet, HashMap},
    ops::Add,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use thiserror::Error;

/// Why a device could not do what it was asked.
#[derive(Debug, Error)]
pub enum DeviceError {
    /// The device does not take this op: under automatic placement the stage goes elsewhere.
    #[error("{device} does not take `{path}`: {reason}")]
    Refused {
        /// The device's name.
        device: String,
        /// The op's path.
        path: Name,
        /// Why.
        reason: String,
    },
    /// A weight is missing or is not what the program declares.
    #[error("weight `{name}`: {reason}")]
    Weight {
        /// The weight's name.
        name: Name,
        /// What was expected and found.
        reason: String,
    },
    /// The program does not type-check.
    #[error(transparent)]
    Program(#[from] CheckError),
    /// The call does not fit the program, the state or what was loaded.
    #[error("{0}")]
    Call(String),
    /// The call was cancelled; the states are as they were before it.
    #[error("cancelled")]
    Cancelled,
    /// The machine has not what the model needs.
    #[error("{0}")]
    Resources(String),
}

/// A machine that runs programs.
pub trait Device: Send + Sync {
    /// What it is, for people and for placement.
    fn describe(&self) -> DeviceInfo;

    /// Whether it takes an op of a program; the error is the reason for which placement moves the stage elsewhere.
    fn accepts(&self, program: &Checked, op: &crate::Op) -> Result<(), DeviceError>;

    /// Whether an op that it accepts is work which the host does for it: looking rows up, placing them, choosing experts.
    fn on_host(&self, _program: &Checked, _op: &crate::Op) -> bool {
        false
    }

    /// What [`Device::prepare`] would keep to, found without making anything; an error says in numbers why the program does not fit.
    fn plan(&self, pieces: &[Piece<'_>], _target: &Target) -> Result<Planned, DeviceError> {
        Ok(Planned { rows: all_rows(pieces), notes: Vec::new() })
    }

    /// Makes what must be made ahead of time (called by the forge) of a program, or of the pieces of one that run here. Devices that compile at load make nothing.
    fn prepare(&self, _pieces: &[Piece<'_>], _weights: &Arc<dyn Weights>, _target: &Target) -> Result<Vec<Artifact>, DeviceError> {
        Ok(Vec::new())
    }

    /// The weights that must still be there when a prepared program is loaded: those that the host reads itself. A device that prepares nothing needs all.
    fn host_weights(&self, program: &Checked) -> Vec<Name> {
        program.weights.keys().cloned().collect()
    }

    /// Gets a program ready to run. A part of a program is loaded by cutting it out first: [`Checked::cut`].
    fn load(&self, program: &Checked, weights: &Arc<dyn Weights>, options: &LoadOptions) -> Result<Box<dyn Executable>, DeviceError>;
}

/// What a device says of itself.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceInfo {
    /// `cpu`, `gpu`, `npu` …
    pub name: String,
    /// What a person would call it.
    pub description: String,
    /// Memory it can use, in bytes, where known.
    pub memory_bytes: Option<u64>,
    /// Threads or queues it works with.
    pub threads: usize,
    /// Further facts that placement or people may want (`instructions: avx2+fma` …).
    pub facts: BTreeMap<String, String>,
}

/// A program, or a part that was cut out of it, that is to be compiled ahead of time.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// Its ops.
    pub program: &'a Checked,
    /// The row counts (`T`) at which a device with static shapes compiles it.
    pub rows: &'a [usize],
}

/// The row counts of all pieces, rising.
pub fn all_rows(pieces: &[Piece<'_>]) -> Vec<usize> {
    let rows: BTreeSet<usize> = pieces.iter().flat_map(|piece| piece.rows.iter().copied()).collect();
    rows.into_iter().collect()
}

/// For what, and under which name, a program is compiled ahead of time.
#[derive(Clone, Debug, Default)]
pub struct Target {
    /// The whole program's name: `text`.
    pub program: String,
    /// Longest session.
    pub context: usize,
    /// Where files are written; absent: a fresh folder among the system's temporary ones.
    pub folder: Option<PathBuf>,
    /// Set by somebody who wants to stop; looked at between graphs.
    pub cancel: Option<Arc<AtomicBool>>,
}

/// What [`Device::prepare`] would keep to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Planned {
    /// Of the pieces' row counts, those at which they would be compiled.
    pub rows: Vec<usize>,
    /// Why it is not all that was asked for, and what is dangerous about it.
    pub notes: Vec<String>,
}

/// A file that [`Device::prepare`] made.
#[derive(Clone, Debug)]
pub struct Artifact {
    /// File name inside the target's folder.
    pub name: String,
    /// Where the device wrote it.
    pub file: PathBuf,
}

/// How a program is to be loaded.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// The largest `T` of any call: what the device plans its memory for.
    pub max_rows: usize,
    /// The largest `R` of any call.
    pub max_soft_rows: usize,
    /// The largest `L` of any call.
    pub max_wanted: usize,
    /// Folder with what [`Device::prepare`] made.
    pub artifacts: Option<PathBuf>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self { max_rows: 256, max_soft_rows: 256, max_wanted: 1, artifacts: None }
    }
}

/// Where weights come from.
pub trait Weights: Send + Sync {
    /// The tensor of that name, not copied; `None` where there is none.
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

/// A loaded program.
pub trait Executable: Send {
    /// The program it runs.
    fn program(&self) -> &Checked;

    /// A fresh state for a session of at most `context` rows.
    fn new_state(&self, context: usize) -> Result<Box<dyn State>, DeviceError>;

    /// Runs one call. States are read, and written only provisionally: a step counts once [`State::commit`] says so.
    fn run(&mut self, call: &mut Call<'_>) -> Result<(), DeviceError>;

    /// An output of the last successful call: its numbers, row-major; `None` for an unknown name. Whole numbers (chosen experts that cross a
    /// cut) come as floats.
    fn output(&self, name: &str) -> Option<&[f32]>;

    /// How long the last stage of the program (for text: the output head) took in the last successful call, where the device can tell.
    fn last_stage_time(&self) -> Option<Duration> {
        None
    }

    /// What the last successful call read of the weights, where the device counts it.
    fn weights_read(&self) -> Option<WeightsRead<'_>> {
        None
    }

    /// What the last successful call moved between the host and the device's graphs, where the device has such and counts it.
    fn traffic(&self) -> Option<Traffic> {
        None
    }

    /// Why rows go one by one through what reads many at once: the device could not load it.
    fn row_by_row(&self) -> Option<&str> {
        None
    }

    /// Bytes of memory beside the weights and states (activations, packed panels).
    fn scratch_bytes(&self) -> u64;
}

/// What moves between a host and the graphs of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Executions of graphs.
    pub executions: u64,
    /// Bytes that the host writes into inputs: rows, masks, rotary tables, recurrent states.
    pub bytes_in: u64,
    /// Bytes that it reads from outputs: rows, new keys and values, what recurrent states become.
    pub bytes_out: u64,
    /// Bytes of inputs that are handed over where they lie, without a copy: keys and values, experts.
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

/// What a call read of the weights.
#[derive(Clone, Copy, Debug)]
pub struct WeightsRead<'a> {
    /// Bytes: of experts the used ones only, of tables the rows looked up.
    pub bytes: u64,
    /// For each op with experts, in the program's order: how many rows each expert got.
    pub expert_rows: &'a [Vec<usize>],
}

/// One call of an executable.
pub struct Call<'a> {
    /// `T`, `R` and `L`.
    pub bindings: Bindings,
    /// The inputs, in the program's order.
    pub inputs: &'a [InputData<'a>],
    /// Who the rows belong to, in rising order of `first_row`, apart. Rows outside are padding.
    pub segments: &'a mut [Segment<'a>],
    /// The program's epoch: see [`crate::Program::epoch`].
    pub epoch: usize,
    /// Checked at the device's own boundaries; when set, the call ends with [`DeviceError::Cancelled`].
    pub cancel: Option<&'a AtomicBool>,
    /// Receives every stage's tap.
    pub taps: Option<&'a mut dyn FnMut(Tap<'_>)>,
    /// Of each row of the outputs only the largest number and its place are wanted (the first, of equal ones): a device may give −∞ for others and spare
    /// itself their computation.
    pub largest_only: bool,
}

/// The rows `first_row .. first_row + valid_rows` of a call belong to `state`; rows after them, up to the next segment, are padding: they neither
/// change the state nor reach valid rows. In values with fewer rows (`T/n`, `ceil(T/n)`) the segment starts at `first_row / n`, which must
/// be whole, and has `ceil(valid_rows / n)` rows.
pub struct Segment<'a> {
    /// `None` for programs without slots.
    pub state: Option<&'a mut dyn State>,
    /// First row in the call.
    pub first_row: usize,
    /// Number of rows that count.
    pub valid_rows: usize,
}

/// An input's numbers, row-major.
#[derive(Clone, Copy, Debug)]
pub enum InputData<'a> {
    /// Activations.
    F32(&'a [f32]),
    /// Ids, positions, row numbers.
    I32(&'a [i32]),
}

/// What a stage made.
#[derive(Clone, Copy, Debug)]
pub struct Tap<'a> {
    /// The stage's name.
    pub stage: &'a str,
    /// Its shape in this call.
    pub shape: &'a [usize],
    /// The numbers, row-major; rows outside segments have no meaning.
    pub values: &'a [f32],
}

impl Call<'_> {
    /// Checks everything about this call that does not depend on the device: input count, types and lengths, table and row numbers in range,
    /// segments, epoch, and room in the states. Devices call it first.
    pub fn check(&self, program: &Checked) -> Result<(), DeviceError> {
        let wrong = |reason: String| Err(DeviceError::Call(format!("program `{}`: {reason}", program.name)));
        let rows = self.bindings.rows;
        if rows == 0 {
            return wrong("a call needs at least one row".into());
        }
        if self.bindings.soft_rows > rows || self.inputs.len() != program.inputs.len() {
            return wrong(format!("{} inputs and {} soft rows do not fit", self.inputs.len(), self.bindings.soft_rows));
        }
        for dim in &program.limits().exact {
            dim.bind(&self.bindings).map(drop).or_else(wrong)?;
        }
        for (input, data) in program.inputs.iter().zip(self.inputs) {
            let mut numbers = 1usize;
            for dim in &input.shape {
                numbers = numbers.saturating_mul(dim.bind(&self.bindings).map_err(DeviceError::Call)?);
            }
            let (dtype, length) = match data {
                InputData::F32(x) => (DType::F32, x.len()),
                InputData::I32(x) => (DType::I32, x.len()),
            };
            if dtype != input.dtype || length != numbers {
                return wrong(format!("input `{}` needs {numbers} numbers of {:?}, found {length} of {dtype:?}", input.name, input.dtype));
            }
        }
        for &(place, limit) in &program.limits().indexes {
            let limit = limit.bind(&self.bindings).map_err(DeviceError::Call)?;
            if let InputData::I32(numbers) = self.inputs[place]
                && let Some(bad) = numbers.iter().find(|&&i| i < 0 || i as usize >= limit)
            {
                return wrong(format!("input `{}` has {bad}, which is not below {limit}", program.inputs[place].name));
            }
        }
        if self.epoch > program.epochs.len() {
            return wrong(format!("epoch {} of {}", self.epoch, program.epochs.len() + 1));
        }
        let (mut next, step) = (0, program.limits().segment_step);
        for segment in self.segments.iter() {
            let end = segment.first_row.saturating_add(segment.valid_rows);
            if segment.first_row < next || end > rows || segment.valid_rows == 0 || segment.first_row % step != 0 {
                return wrong(format!("segment {}..{end} does not fit the {rows} rows of the call", segment.first_row));
            }
            next = end;
            match &segment.state {
                None if !program.slots.is_empty() => return wrong("a segment without state".into()),
                Some(state) if state.len() + segment.valid_rows > state.capacity() => {
                    return wrong(format!(
                        "{} rows and {} more are beyond the context of {} rows",
                        state.len(),
                        segment.valid_rows,
                        state.capacity()
                    ));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Whether somebody asked to stop.
    pub fn is_cancelled(&self) -> bool {
        self.cancel.is_some_and(|flag| flag.load(Ordering::Relaxed))
    }
}

/// The slots of one session on one device.
pub trait State: Send {
    /// Committed rows.
    fn len(&self) -> usize;

    /// Whether nothing is committed.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The most rows it can hold.
    fn capacity(&self) -> usize;

    /// The first `rows` valid rows of the last call now count. With recurrent slots it must be all of them.
    fn commit(&mut self, rows: usize) -> Result<(), DeviceError>;

    /// Forgets the KV rows from `len` on. Recurrent slots are left as they are: the caller imports what they were at `len`.
    fn truncate(&mut self, len: usize) -> Result<(), DeviceError>;

    /// An independent copy of what is committed.
    fn fork(&self) -> Box<dyn State>;

    /// A slot's committed content in canonical form; of a KV slot the rows from `first` on. A state that no longer has them all says so.
    fn export_rows(&self, slot: &str, first: usize) -> Result<SlotData, DeviceError>;

    /// Replaces a slot's content; of a KV slot the rows from `first` on. They must end where the committed ones end, or stand behind them: import such
    /// rows for all KV slots, then [`State::set_len`].
    fn import_rows(&mut self, slot: &str, first: usize, data: &SlotData) -> Result<(), DeviceError>;

    /// A slot's committed content in canonical form.
    fn export(&self, slot: &str) -> Result<SlotData, DeviceError> {
        self.export_rows(slot, 0)
    }

    /// Replaces a slot's content; KV rows must be as many as are committed (import all slots, then [`State::set_len`] for a fresh state).
    fn import(&mut self, slot: &str, data: &SlotData) -> Result<(), DeviceError> {
        self.import_rows(slot, 0, data)
    }

    /// Declares `len` rows as committed after KV slots of that length were imported.
    fn set_len(&mut self, len: usize) -> Result<(), DeviceError>;

    /// Bytes it holds now.
    fn bytes(&self) -> u64;

    /// For the device that made it.
    fn as_any(&self) -> &dyn Any;

    /// For the device that made it.
    fn as_any_mut(&mut self) -> &mut dyn Any;
}

/// A slot's content, the same on every device.
#[derive(Clone, Debug, PartialEq)]
pub enum SlotData {
    /// Rows `[position, kv_heads, head_dim]` as little-endian numbers of `dtype`.
    Kv {
        /// Number type.
        dtype: KvType,
        /// Number of positions.
        rows: usize,
        /// Key bytes.
        keys: Vec<u8>,
        /// Value bytes.
        values: Vec<u8>,
    },
    /// FIFO rows or delta state.
    Recurrent(Vec<f32>),
}

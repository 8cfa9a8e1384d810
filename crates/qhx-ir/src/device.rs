//! The interface between programs and the hardware that runs them.

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

/// Why a device operation failed.
#[derive(Debug, Error)]
pub enum DeviceError {
    /// The device does not support this op: under automatic placement the stage goes to another device.
    #[error("{device} does not support `{path}`: {reason}")]
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
    /// The call does not match the program, the state or the load options.
    #[error("{0}")]
    Call(String),
    /// The call was cancelled; the states are as they were before it.
    #[error("cancelled")]
    Cancelled,
    /// The machine lacks what the model needs.
    #[error("{0}")]
    Resources(String),
}

/// Hardware that runs programs.
pub trait Device: Send + Sync {
    /// A description for people and for placement.
    fn describe(&self) -> DeviceInfo;

    /// Whether it supports an op of a program; the error is the reason why placement moves the stage to another device.
    fn accepts(&self, program: &Checked, op: &crate::Op) -> Result<(), DeviceError>;

    /// Whether the host computes an op that the device accepts: looking up rows, scattering them, choosing experts.
    fn on_host(&self, _program: &Checked, _op: &crate::Op) -> bool {
        false
    }

    /// The plan that [`Device::prepare`] would follow, without compiling anything; the error says, with numbers, why the program does not fit.
    fn plan(&self, pieces: &[Piece<'_>], _target: &Target) -> Result<Planned, DeviceError> {
        Ok(Planned { rows: all_rows(pieces), notes: Vec::new() })
    }

    /// Compiles a program, or the pieces of one that run here, ahead of time (called by the forge). Devices that compile at load do nothing.
    fn prepare(&self, _pieces: &[Piece<'_>], _weights: &Arc<dyn Weights>, _target: &Target) -> Result<Vec<Artifact>, DeviceError> {
        Ok(Vec::new())
    }

    /// The weights that are still needed when a prepared program is loaded: those that the host reads. A device that prepares nothing needs all of them.
    fn host_weights(&self, program: &Checked) -> Vec<Name> {
        program.weights.keys().cloned().collect()
    }

    /// Loads a program. To load a part of one, cut it out first: [`Checked::cut`].
    fn load(&self, program: &Checked, weights: &Arc<dyn Weights>, options: &LoadOptions) -> Result<Box<dyn Executable>, DeviceError>;
}

/// The description of a device.
#[derive(Clone, Debug, Serialize)]
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
    pub facts: BTreeMap<String, String>,
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

/// The plan of [`Device::prepare`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Planned {
    /// Those of the pieces' row counts for which graphs would be compiled.
    pub rows: Vec<usize>,
    /// Where the plan differs from what was requested and why, and its risks.
    pub notes: Vec<String>,
}

/// A file that [`Device::prepare`] wrote.
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
    /// The largest `L` of any call.
    pub max_wanted: usize,
    /// Folder with the files that [`Device::prepare`] wrote.
    pub artifacts: Option<PathBuf>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self { max_rows: 256, max_soft_rows: 256, max_wanted: 1, artifacts: None }
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

/// A loaded program.
pub trait Executable: Send {
    /// The program it runs.
    fn program(&self) -> &Checked;

    /// A fresh state for a session of at most `context` rows.
    fn new_state(&self, context: usize) -> Result<Box<dyn State>, DeviceError>;

    /// Runs one call. Changes to states are provisional until [`State::commit`].
    fn run(&mut self, call: &mut Call<'_>) -> Result<(), DeviceError>;

    /// The data of an output of the last successful call, row-major; `None` for an unknown name. Integers (chosen experts that cross a
    /// cut) are converted to floats.
    fn output(&self, name: &str) -> Option<&[f32]>;

    /// How long the last stage of the program (for text: the output head) took in the last successful call, where the device measures it.
    fn last_stage_time(&self) -> Option<Duration> {
        None
    }

    /// The weights that the last successful call read, where the device counts them.
    fn weights_read(&self) -> Option<WeightsRead<'_>> {
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

    /// Bytes of memory in addition to weights and states (activations, packed panels).
    fn scratch_bytes(&self) -> u64;
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
    /// Bytes of inputs that are passed without a copy: keys and values, experts.
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

/// The weights that a call read.
#[derive(Clone, Copy, Debug)]
pub struct WeightsRead<'a> {
    /// Bytes: only the experts used and the table rows looked up.
    pub bytes: u64,
    /// For each op with experts, in program order: the number of rows per expert.
    pub expert_rows: &'a [Vec<usize>],
}

/// One call of an executable.
pub struct Call<'a> {
    /// `T`, `R` and `L`.
    pub bindings: Bindings,
    /// The inputs, in the program's order.
    pub inputs: &'a [InputData<'a>],
    /// The owners of the rows, in ascending order of `first_row`, without overlap. Rows outside are padding.
    pub segments: &'a mut [Segment<'a>],
    /// The program's epoch: see [`crate::Program::epoch`].
    pub epoch: usize,
    /// Checked between the device's steps; when set, the call ends with [`DeviceError::Cancelled`].
    pub cancel: Option<&'a AtomicBool>,
    /// Receives every stage's tap.
    pub taps: Option<&'a mut dyn FnMut(Tap<'_>)>,
    /// Only the largest value of each output row and its index are wanted (the first of equal ones): a device may skip the others and return −∞ for
    /// them.
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
    /// Number of valid rows.
    pub valid_rows: usize,
}

/// An input's data, row-major.
#[derive(Clone, Copy, Debug)]
pub enum InputData<'a> {
    /// Activations.
    F32(&'a [f32]),
    /// Ids, positions, row indexes.
    I32(&'a [i32]),
}

/// The result of a stage.
#[derive(Clone, Copy, Debug)]
pub struct Tap<'a> {
    /// The stage's name.
    pub stage: &'a str,
    /// Its shape in this call.
    pub shape: &'a [usize],
    /// The data, row-major; rows outside segments have no meaning.
    pub values: &'a [f32],
}

impl Call<'_> {
    /// Checks everything about this call that does not depend on the device: input count, types and lengths, ranges of table and row indexes,
    /// segments, epoch, and room in the states. Devices call it first.
    pub fn check(&self, program: &Checked) -> Result<(), DeviceError> {
        let wrong = |reason: String| Err(DeviceError::Call(format!("program `{}`: {reason}", program.name)));
        let rows = self.bindings.rows;
        if rows == 0 {
            return wrong("a call needs at least one row".into());
        }
        if self.bindings.soft_rows > rows || self.inputs.len() != program.inputs.len() {
            return wrong(format!(
                "found {} inputs and {} soft rows, expected {} inputs and at most {rows} soft rows",
                self.inputs.len(),
                self.bindings.soft_rows,
                program.inputs.len()
            ));
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
                return wrong(format!("input `{}` needs {numbers} values of {:?}, found {length} of {dtype:?}", input.name, input.dtype));
            }
        }
        for &(place, limit) in &program.limits().indexes {
            let limit = limit.bind(&self.bindings).map_err(DeviceError::Call)?;
            if let InputData::I32(numbers) = self.inputs[place]
                && let Some(bad) = numbers.iter().find(|&&i| i < 0 || i as usize >= limit)
            {
                return wrong(format!("input `{}` has {bad}, expected 0 or more and less than {limit}", program.inputs[place].name));
            }
        }
        if self.epoch > program.epochs.len() {
            return wrong(format!("epoch is {}, but there are only {}", self.epoch, program.epochs.len() + 1));
        }
        let (mut next, step) = (0, program.limits().segment_step);
        for segment in self.segments.iter() {
            let end = segment.first_row.saturating_add(segment.valid_rows);
            if segment.first_row < next || end > rows || segment.valid_rows == 0 || segment.first_row % step != 0 {
                return wrong(format!(
                    "segment {}..{end} is not valid in a call of {rows} rows: segments must be in order, apart, not empty and start at a multiple of {step}",
                    segment.first_row
                ));
            }
            next = end;
            match &segment.state {
                None if !program.slots.is_empty() => return wrong("a segment has no state".into()),
                Some(state) if state.len() + segment.valid_rows > state.capacity() => {
                    return wrong(format!(
                        "{} rows and {} more exceed the context of {} rows",
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

    /// Whether cancellation was requested.
    pub fn is_cancelled(&self) -> bool {
        self.cancel.is_some_and(|flag| flag.load(Ordering::Relaxed))
    }
}

/// The slots of one session on one device.
pub trait State: Send {
    /// Committed rows.
    fn len(&self) -> usize;

    /// Whether no rows are committed.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The most rows it can have.
    fn capacity(&self) -> usize;

    /// Commits the first `rows` valid rows of the last call. With recurrent slots it must be all of them.
    fn commit(&mut self, rows: usize) -> Result<(), DeviceError>;

    /// Discards the KV rows from `len` on. Recurrent slots are left as they are: the caller imports their state at `len`.
    fn truncate(&mut self, len: usize) -> Result<(), DeviceError>;

    /// An independent copy of what is committed.
    fn fork(&self) -> Box<dyn State>;

    /// A slot's committed content in canonical form; for a KV slot, the rows from `first` on. It is an error if the state no longer has them all.
    fn export_rows(&self, slot: &str, first: usize) -> Result<SlotData, DeviceError>;

    /// Replaces a slot's content; for a KV slot, the rows from `first` on. They must end where the committed ones end, or follow them: import such
    /// rows for all KV slots, then call [`State::set_len`].
    fn import_rows(&mut self, slot: &str, first: usize, data: &SlotData) -> Result<(), DeviceError>;

    /// A slot's committed content in canonical form.
    fn export(&self, slot: &str) -> Result<SlotData, DeviceError> {
        self.export_rows(slot, 0)
    }

    /// Replaces a slot's content; there must be as many KV rows as are committed (for a fresh state: import all slots, then call [`State::set_len`]).
    fn import(&mut self, slot: &str, data: &SlotData) -> Result<(), DeviceError> {
        self.import_rows(slot, 0, data)
    }

    /// Declares `len` rows as committed after KV slots of that length were imported.
    fn set_len(&mut self, len: usize) -> Result<(), DeviceError>;

    /// Bytes of memory in use.
    fn bytes(&self) -> u64;

    /// For the device that made it.
    fn as_any(&self) -> &dyn Any;

    /// For the device that made it.
    fn as_any_mut(&mut self) -> &mut dyn Any;
}

/// A slot's content, the same on every device.
#[derive(Clone, Debug, PartialEq)]
pub enum SlotData {
    /// Rows `[position, kv_heads, head_dim]`, little-endian.
    Kv {
        /// Element type.
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

//! Messages: a JSON head, which says what it is, and a body of plain bytes.

use qhx_ir::{Bindings, DeviceError, DeviceInfo, Encoding, KvType, LoadOptions, Name, Pause, Phase, RowResult, SlotData, StateBytes};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    io::{self, Read, Write},
    time::Duration,
};

/// What the process is asked to do. States and executables have numbers.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request {
    /// The first message: opens the device that these settings describe.
    Open(serde_json::Value),
    /// The program's JSON is the body.
    Load(Limits),
    /// The answer to [`Reply::Needs`]: parts are the body.
    Tensor {
        encoding: Encoding,
        shape: Vec<usize>,
        parts: [usize; 3],
    },
    /// There is no such weight.
    NoTensor,
    /// [`qhx_ir::Executable::replace_part`]: parts are the body.
    Replace {
        executable: u64,
        weight: String,
        number: usize,
        encoding: Encoding,
        shape: Vec<usize>,
        parts: [usize; 3],
    },
    /// [`qhx_ir::Executable::parts_on_the_way`].
    PartsOnTheWay {
        executable: u64,
    },
    /// The answer to [`Reply::Paused`]: of each input that was given its place, how many numbers and whether they are integers. Inputs are the body.
    Resume(Vec<(usize, usize, bool)>),
    /// The call that paused ends.
    GiveUp,
    NewState {
        executable: u64,
        context: usize,
    },
    /// Inputs are the body.
    Run(Box<Run>),
    Commit {
        state: u64,
        rows: usize,
    },
    Truncate {
        state: u64,
        len: usize,
    },
    SetLen {
        state: u64,
        len: usize,
    },
    Fork {
        state: u64,
    },
    Export {
        state: u64,
        slot: String,
        first: usize,
    },
    /// The content is the body.
    Import {
        state: u64,
        slot: String,
        first: usize,
        data: Content,
    },
    /// There is no reply.
    DropState {
        state: u64,
    },
    /// There is no reply.
    DropExecutable {
        executable: u64,
    },
}

/// What the process replies.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    Opened {
        info: DeviceInfo,
        own_memory: Option<u64>,
    },
    /// A weight is needed; the reply is [`Request::Tensor`] or [`Request::NoTensor`].
    Needs {
        name: String,
    },
    /// Weights are being loaded.
    Progress {
        done: u64,
        total: u64,
    },
    Loaded {
        executable: u64,
        max_segments: usize,
        commits_partly: bool,
        invariant_rows: usize,
        scratch_bytes: u64,
    },
    Replaced,
    OnTheWay(Vec<usize>),
    /// A call waits for the host: the reply is [`Request::Resume`] or [`Request::GiveUp`]. Of each value that it gives, how many numbers; they are the body.
    Paused {
        number: usize,
        given: Vec<usize>,
    },
    State(StateFacts),
    /// A stage's values are the body.
    Tap {
        stage: String,
        shape: Vec<usize>,
    },
    /// Outputs are the body.
    Ran {
        rows: Vec<Row>,
        outputs: Vec<usize>,
        held: Option<StateBytes>,
        last_stage: Option<Duration>,
    },
    /// The content is the body.
    Exported(Content),
    Failed(Failure),
}

/// [`LoadOptions`] without what stays here.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Limits {
    pub(super) rows: usize,
    pub(super) soft_rows: usize,
    pub(super) wanted: usize,
    pub(super) segments: usize,
    pub(super) state_bytes: Option<u64>,
    pub(super) replaceable: Vec<Name>,
    pub(super) pauses: Vec<Pause>,
    pub(super) scratch_group: Option<u64>,
}

impl Limits {
    #[cfg(feature = "gpu")]
    pub(super) fn of(options: &LoadOptions) -> Self {
        Self {
            rows: options.max_rows,
            soft_rows: options.max_soft_rows,
            wanted: options.max_wanted,
            segments: options.max_segments,
            state_bytes: options.max_state_bytes,
            replaceable: options.replaceable.clone(),
            pauses: options.pauses.clone(),
            scratch_group: options.scratch_group,
        }
    }

    pub(super) fn options(self) -> LoadOptions {
        LoadOptions {
            max_rows: self.rows,
            max_soft_rows: self.soft_rows,
            max_wanted: self.wanted,
            max_segments: self.segments,
            max_state_bytes: self.state_bytes,
            replaceable: self.replaceable,
            pauses: self.pauses,
            scratch_group: self.scratch_group,
            ..LoadOptions::default()
        }
    }
}

/// A call.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Run {
    pub(super) executable: u64,
    pub(super) bindings: Bindings,
    pub(super) phase: Phase,
    /// Of each input, its numbers and whether they are integers.
    pub(super) inputs: Vec<(usize, bool)>,
    pub(super) segments: Vec<RunSegment>,
    pub(super) wants: Vec<RunWant>,
    pub(super) taps: bool,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct RunSegment {
    pub(super) state: Option<u64>,
    pub(super) first_row: usize,
    pub(super) valid_rows: usize,
    pub(super) epoch: usize,
    pub(super) partial: bool,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum RunWant {
    Logits,
    Largest,
    /// None where the mask was not given.
    LargestAllowed(Option<Vec<u32>>),
    Top(usize),
    LogProbs {
        target: u32,
        top: usize,
    },
}

/// [`RowResult`] with the bits of its numbers: JSON has no infinities.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Row {
    Logits(usize),
    Largest(u32, u32),
    Top(Vec<(u32, u32)>),
    LogProbs(u32, Vec<(u32, u32)>),
}

impl From<&RowResult> for Row {
    fn from(row: &RowResult) -> Self {
        let bits = |top: &[(u32, f32)]| top.iter().map(|(id, value)| (*id, value.to_bits())).collect();
        match row {
            RowResult::Logits(at) => Self::Logits(*at),
            RowResult::Largest { id, value } => Self::Largest(*id, value.to_bits()),
            RowResult::Top(top) => Self::Top(bits(top)),
            RowResult::LogProbs { target, top } => Self::LogProbs(target.to_bits(), bits(top)),
        }
    }
}

impl From<Row> for RowResult {
    fn from(row: Row) -> Self {
        let numbers = |top: Vec<(u32, u32)>| top.into_iter().map(|(id, value)| (id, f32::from_bits(value))).collect();
        match row {
            Row::Logits(at) => Self::Logits(at),
            Row::Largest(id, value) => Self::Largest { id, value: f32::from_bits(value) },
            Row::Top(top) => Self::Top(numbers(top)),
            Row::LogProbs(target, top) => Self::LogProbs { target: f32::from_bits(target), top: numbers(top) },
        }
    }
}

/// What is known here of a state there.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct StateFacts {
    pub(super) state: u64,
    pub(super) len: usize,
    pub(super) capacity: usize,
    pub(super) bytes: u64,
    /// All states of its executable.
    pub(super) held: Option<StateBytes>,
}

/// The head of [`SlotData`].
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) enum Content {
    Kv { dtype: KvType, rows: usize, key_bytes: usize },
    Recurrent,
}

impl Content {
    /// Head and body of a slot's content.
    pub(super) fn of(data: &SlotData) -> (Self, Vec<u8>) {
        match data {
            SlotData::Kv { dtype, rows, keys, values } => {
                (Self::Kv { dtype: *dtype, rows: *rows, key_bytes: keys.len() }, [&keys[..], values].concat())
            }
            SlotData::Recurrent(numbers) => (Self::Recurrent, bytes(numbers)),
        }
    }

    /// The slot's content; none where head and body do not belong together.
    pub(super) fn with(self, mut body: Vec<u8>) -> Option<SlotData> {
        match self {
            Self::Kv { dtype, rows, key_bytes } => {
                let values = (key_bytes <= body.len()).then(|| body.split_off(key_bytes))?;
                Some(SlotData::Kv { dtype, rows, keys: body, values })
            }
            Self::Recurrent => Some(SlotData::Recurrent(floats(&body))),
        }
    }
}

/// [`DeviceError`].
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Failure {
    Refused { device: String, path: String, reason: String },
    Weight { name: String, reason: String },
    Call(String),
    Cancelled,
    Resources(String),
    StatesFull { needed: u64, limit: u64 },
    Exhausted { device: String, reason: String },
    Absent { device: String, reason: String },
    Lost { device: String, reason: String },
}

impl From<DeviceError> for Failure {
    fn from(error: DeviceError) -> Self {
        match error {
            DeviceError::Refused { device, path, reason } => Self::Refused { device, path: path.to_string(), reason },
            DeviceError::Weight { name, reason } => Self::Weight { name: name.to_string(), reason },
            DeviceError::Program(error) => Self::Call(error.to_string()),
            DeviceError::Call(reason) => Self::Call(reason),
            DeviceError::Cancelled => Self::Cancelled,
            DeviceError::Resources(reason) => Self::Resources(reason),
            DeviceError::StatesFull { needed, limit } => Self::StatesFull { needed, limit },
            DeviceError::Exhausted { device, reason } => Self::Exhausted { device, reason },
            DeviceError::Absent { device, reason } => Self::Absent { device, reason },
            DeviceError::Lost { device, reason } => Self::Lost { device, reason },
        }
    }
}

impl From<Failure> for DeviceError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Refused { device, path, reason } => Self::Refused { device, path: path.as_str().into(), reason },
            Failure::Weight { name, reason } => Self::Weight { name: name.as_str().into(), reason },
            Failure::Call(reason) => Self::Call(reason),
            Failure::Cancelled => Self::Cancelled,
            Failure::Resources(reason) => Self::Resources(reason),
            Failure::StatesFull { needed, limit } => Self::StatesFull { needed, limit },
            Failure::Exhausted { device, reason } => Self::Exhausted { device, reason },
            Failure::Absent { device, reason } => Self::Absent { device, reason },
            Failure::Lost { device, reason } => Self::Lost { device, reason },
        }
    }
}

/// The most bytes of a head: a mask for each of many rows is the largest.
const MAX_HEAD: u32 = 256 << 20;

/// Sends a message.
pub(super) fn send(out: &mut impl Write, head: &impl Serialize, body: &[&[u8]]) -> io::Result<()> {
    let head = serde_json::to_vec(head)?;
    let head_bytes = u32::try_from(head.len()).ok().filter(|&bytes| bytes <= MAX_HEAD).ok_or(io::ErrorKind::InvalidInput)?;
    out.write_all(&head_bytes.to_le_bytes())?;
    out.write_all(&body.iter().map(|part| part.len() as u64).sum::<u64>().to_le_bytes())?;
    out.write_all(&head)?;
    body.iter().try_for_each(|part| out.write_all(part))?;
    out.flush()
}

/// Receives a message. Memory is taken as bytes arrive, not as a length promises.
pub(super) fn receive<T: DeserializeOwned>(input: &mut impl Read) -> io::Result<(T, Vec<u8>)> {
    let (mut head_bytes, mut body_bytes) = ([0; 4], [0; 8]);
    input.read_exact(&mut head_bytes)?;
    input.read_exact(&mut body_bytes)?;
    let head_bytes = u32::from_le_bytes(head_bytes);
    if head_bytes > MAX_HEAD {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let head = read(input, head_bytes.into())?;
    let body = read(input, u64::from_le_bytes(body_bytes))?;
    Ok((serde_json::from_slice(&head)?, body))
}

fn read(input: &mut impl Read, length: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(length.min(1 << 20) as usize);
    input.take(length).read_to_end(&mut bytes)?;
    if bytes.len() as u64 == length { Ok(bytes) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// Numbers as bytes.
pub(super) fn bytes(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

/// Bytes as numbers.
pub(super) fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|four| f32::from_le_bytes(*four)).collect()
}

/// Integers as bytes.
#[cfg(feature = "gpu")]
pub(super) fn integer_bytes(numbers: &[i32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

/// Bytes as integers.
pub(super) fn integers(bytes: &[u8]) -> Vec<i32> {
    bytes.as_chunks().0.iter().map(|four| i32::from_le_bytes(*four)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_whole_or_not_at_all() {
        let mut sent = Vec::new();
        send(&mut sent, &Request::Fork { state: 7 }, &[&[1, 2], &[3]]).unwrap();
        let (head, body): (Request, _) = receive(&mut &sent[..]).unwrap();
        assert!(matches!(head, Request::Fork { state: 7 }) && body == [1, 2, 3]);
        for length in 0..sent.len() {
            assert!(receive::<Request>(&mut &sent[..length]).is_err(), "{length} bytes");
        }
        let (mut long_head, mut long_body) = (sent.clone(), sent.clone());
        long_head[3] = 0xff;
        long_body[11] = 0xff;
        assert!(receive::<Request>(&mut &long_head[..]).is_err() && receive::<Request>(&mut &long_body[..]).is_err());
    }

    #[test]
    fn numbers_keep_their_bits() {
        for value in [f32::NAN, f32::NEG_INFINITY, -0.0, 0.1] {
            let row = Row::from(&RowResult::Largest { id: 3, value });
            let row: Row = serde_json::from_str(&serde_json::to_string(&row).unwrap()).unwrap();
            let RowResult::Largest { id: 3, value: found } = row.into() else { panic!("another row") };
            assert_eq!(found.to_bits(), value.to_bits());
        }
    }
}

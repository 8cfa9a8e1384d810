//! The core of qhx: what a model *is*, independent of its source format and of the device that runs it.
//!
//! A model is a [`Program`]: a short, typed list of operations ([`OpKind`]) over named values, with named weights and named state
//! ([`Slot`]). The forge writes programs; devices ([`Device`]) run them. This crate owns
//!
//! * the language: [`dim`] (symbolic shapes), [`op`] (operations), [`program`], and its checks ([`Checked`]);
//! * [`encoding`] and [`quants`]: how weights are stored, with a plain decoder for every encoding;
//! * [`device`], [`call`], [`want`] and [`state`]: the interface between programs and hardware;
//! * [`mod@reference`]: the plain interpreter that defines the meaning of every op;
//! * [`conformance`]: the test suite that compares any device with it;
//! * [`hadamard`]: the transform that an op and the forge share;
//! * [`random`]: reproducible random numbers.
//!
//! It knows no model family, no file format except the program's own JSON, and no instruction set.

pub mod bytes;
pub mod call;
pub mod check;
pub mod conformance;
pub mod device;
pub mod dim;
pub mod encoding;
mod error;
pub mod hadamard;
pub mod ledger;
pub mod matrix;
pub mod op;
pub mod program;
pub mod quants;
pub mod random;
pub mod reference;
pub mod state;
mod timeline;
pub mod want;

pub use bytes::{ALIGNMENT, AlignedBytes, Bytes};
pub use call::{Call, Host, InputData, Outputs, Paused, Phase, Replace, Segment, Tap};
pub use check::{CheckError, Checked, ValueType};
pub use device::{
    Artifact, Device, DeviceInfo, Executable, ExpertCache, Fact, LoadOptions, LoadProgress, Machine, Pause, Piece, Planned, Profile,
    StateBytes, StepProfile, Target, Ticket, Traffic, Transfer, Weights, WeightsRead, all_rows,
};
pub use dim::{Bindings, Dim, Shape, Symbol};
pub use encoding::{BlockEncoding, Encoding, RowBytes, SCALES_AT_ONCE, ScaleType, WeightTensor};
pub use error::DeviceError;
pub use hadamard::hadamard_row;
pub use ledger::Ledger;
pub use matrix::Matrix;
pub use op::{Activation, ActivationForm, Clip, ExpertBias, KeyValue, Mask, Op, OpKind, Routing};
pub use program::{
    DType, Generator, Input, KvType, Output, PROGRAM_VERSION, Program, Rotary, RotaryVariant, Slot, Stage, Weight, is_under,
};
pub use quants::Quants;
pub use state::{SlotData, State};
pub use timeline::{Span, Timeline};
pub use want::{IdMask, RowResult, Want};

/// A name of a value, weight, slot, stage or op: cheap to clone.
pub type Name = std::sync::Arc<str>;

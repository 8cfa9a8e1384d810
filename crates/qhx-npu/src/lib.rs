//! The Hexagon device: lowers programs to QNN graphs with static shapes, compiles them to context binaries and runs those.
//!
//! Everything unsafe about QNN lives in this crate. [`graph`] is the wall inside it: lowering writes a [`graph::Graph`], a plain value that can be
//! looked at and tested without the library; the bindings turn one into a QNN graph.
//!
//! [`NpuDevice`] is what the runtime sees. It cuts a program into the host's own work and parts that [`lower`] turns into graphs, runs them over the rows of
//! a call and carries the slots.
//!
//! [`Library`] is QNN, loaded at run time. Its [`Device`]s compile graphs and load context binaries; a [`Context`] holds [`ExecGraph`]s. Each keeps
//! alive what it stands on, so that they may be dropped in any order.

mod binary;
pub mod budget;
mod check;
mod compile;
mod context;
mod device;
mod error;
mod ffi;
pub mod graph;
mod library;
mod log;
pub mod lower;
pub mod probe;
mod quiet;
mod run;

pub use binary::{Compiled, Expected, ExpectedGraph, ExpectedTensor, GraphInfo, Metadata, TensorInfo};
pub use compile::CompileOptions;
pub use context::{Context, ExecGraph, Port};
pub use device::{Arch, Device};
pub use error::{CallError, Error, Result};
pub use library::{Build, DIRECTORY_VARIABLE, Library};
pub use run::{ContextFile, Kv, NpuDevice, NpuOnPaper, NpuOptions, Plan as PreparedPlan};

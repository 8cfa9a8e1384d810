//! The Hexagon device: lowers programs to QNN graphs with static shapes, compiles them to context binaries and runs those.
//!
//! All unsafe QNN code lives in this crate. [`graph`] is the boundary inside it: lowering produces a [`graph::Graph`], a plain value that can be
//! inspected and tested without the library; the bindings turn it into a QNN graph.
//!
//! [`NpuDevice`] is what the runtime sees. It splits a program into work for the host and parts that [`lower`] turns into graphs, runs them over the rows of
//! a call and carries the slots.
//!
//! [`Library`] is QNN, loaded at run time. Its [`Device`]s compile graphs and load context binaries; a [`Context`] holds [`ExecGraph`]s. Each keeps
//! alive what it depends on, so they may be dropped in any order.

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
pub use library::{Build, Library};
pub use run::{ContextFile, GraphPlan as PreparedPlan, Kv, NpuDevice, NpuMachine, NpuOptions};

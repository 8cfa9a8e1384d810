//! The NPU as a device of the runtime: splits programs into host work and graphs, compiles or loads graphs on first use, splits and pads calls to the
//! graphs' row counts, and keeps the slots on the host.

mod contexts;
mod device;
mod executable;
mod experts;
mod fill;
mod graphs;
mod host;
mod meter;
mod plan;
mod prepare;
mod state;
mod values;

pub use device::{Kv, NpuDevice, NpuMachine, NpuOptions};
pub use plan::{ContextFile, GraphPlan};

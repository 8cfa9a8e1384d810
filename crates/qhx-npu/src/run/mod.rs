//! The NPU as a device of the runtime: programs cut into the host's work and graphs, graphs compiled or loaded when they are first needed, calls
//! padded and cut to the graphs' rows, slots carried by the host.

mod contexts;
mod device;
mod executable;
mod experts;
mod fill;
mod graphs;
mod host;
mod meter;
mod paper;
mod plan;
mod prepare;
mod state;
mod values;

pub use device::{Kv, NpuDevice, NpuOptions};
pub use paper::NpuOnPaper;
pub use plan::{ContextFile, Plan};

//! The CPU device: the embedded default, which takes every op of every program.
//!
//! [`CpuDevice`] loads a checked program: names are resolved, memory is planned once from the lifetimes of values ([`CpuExecutable`] then runs calls without
//! allocating), kernels are chosen by what the CPU has ([`InstructionSet`]), and weights stay where they are mapped. Work is cut into units by shapes
//! alone; threads only choose who takes a unit, so results are the same for any number of threads.
//!
//! It knows the IR and the machine, and nothing of bundles, tokens or model families.

mod affinity;
mod compile;
mod device;
mod executable;
mod kernels;
mod machine;
mod matrix;
mod memory;
mod ops;
mod plan;
mod pool;
mod state;
mod work;

pub use affinity::CAN_PIN;
pub use device::{CpuDevice, CpuOptions};
pub use executable::CpuExecutable;
pub use kernels::InstructionSet;
pub use machine::measure_bandwidth;

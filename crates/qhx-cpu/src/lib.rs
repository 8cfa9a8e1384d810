//! The CPU device: the embedded default, which takes every op of every program.
//!
//! [`CpuDevice`] loads a checked program: names are resolved, memory is planned once from the lifetimes of values ([`CpuExecutable`] then runs calls without
//! allocating), kernels are chosen by what the CPU has ([`InstructionSet`]), and weights stay where they are mapped. Work is cut into units by shapes
//! alone; threads only choose who takes a unit, so results are the same for any number of threads.
//!
//! # The same bits for any cut
//!
//! On one instruction set, the outputs and states of a session are the same to the last bit, however its rows are cut into calls (token by token, in chunks, a whole
//! prompt at once, drafts) and whatever other sessions are in those calls. Batching, paged keys and drafts rely on it. It holds because no number that a row
//! produces depends on how many rows are computed with it:
//!
//! * a product adds up its terms in one order, for one row as for many: float weights lane by lane in equal pieces of at most 640 numbers; integer weights block by block, exact
//!   integers within a block;
//! * attention cuts keys at absolute indexes into blocks of 64 and runs of 256, folds the runs together in order, and never looks at a key that is masked or beyond
//!   the segment's last row;
//! * the gated delta rule and short convolutions go from row to row, never by chunks of rows;
//! * everything else works on one row at a time.
//!
//! A kernel may choose other tiles, other units or other loads for many rows than for one, but not another order of sums. `tests/suite/cuts.rs` holds every op, encoding and
//! activation form to this on every instruction set. Instruction sets may differ from each other within the conformance suite's bounds.
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
mod pages;
mod plan;
mod pool;
mod product;
mod profile;
mod state;
mod sync;
mod work;

pub use affinity::CAN_PIN;
pub use device::{CpuDevice, CpuMachine, CpuOptions};
pub use executable::CpuExecutable;
pub use kernels::InstructionSet;
pub use machine::measure_bandwidth;

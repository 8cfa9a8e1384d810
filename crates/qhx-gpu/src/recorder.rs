//! From steps to commands, for one shape of a call.

use crate::{
    kernels::Kernel,
    vulkan::{Adapter, Command, Gpu},
};
use qhx_ir::{Bindings, DeviceError, Dim};
use std::{ops::Range, sync::Arc};

/// Something that steps read and write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Resource {
    /// A buffer of the plan.
    Buffer(usize),
    /// A slot of the states.
    Slot(usize),
}

/// Some dispatches that belong together.
pub(crate) struct Step {
    pub(crate) reads: Vec<Resource>,
    pub(crate) writes: Vec<Resource>,
    pub(crate) work: Work,
}

/// Adds the dispatches of a step.
pub(crate) type Work = Box<dyn Fn(&mut Recorder<'_>) -> Result<(), DeviceError> + Send>;

/// Where things are.
#[derive(Clone, Debug, Default)]
pub(crate) struct Addresses {
    /// The parameters of the call.
    pub(crate) call: u64,
    /// First and last address of each buffer of the plan.
    pub(crate) buffers: Vec<Range<u64>>,
}

/// Collects commands.
pub(crate) struct Recorder<'a> {
    gpu: &'a Arc<Gpu>,
    addresses: &'a Addresses,
    pub(crate) bindings: Bindings,
    pub(crate) segments: usize,
    /// The most keys that a row sees, rounded up to a power of two.
    pub(crate) keys: usize,
    commands: Vec<Command>,
    /// What was read and written since the last barrier.
    read: Vec<Range<u64>>,
    written: Vec<Range<u64>>,
}

/// Groups of a dispatch in a dimension, at most: what every device offers.
pub(crate) const MOST_GROUPS: usize = 65535;

impl<'a> Recorder<'a> {
    pub(crate) fn new(gpu: &'a Arc<Gpu>, addresses: &'a Addresses, bindings: Bindings, segments: usize, keys: usize) -> Self {
        Self { gpu, addresses, bindings, segments, keys, commands: Vec::new(), read: Vec::new(), written: Vec::new() }
    }

    /// Adds a step, behind a barrier where it reads what was written, or writes what was read or written.
    pub(crate) fn step(&mut self, step: &Step) -> Result<(), DeviceError> {
        let ranges = |all: &[Resource]| all.iter().map(|&resource| self.range(resource)).collect::<Vec<_>>();
        let (reads, writes) = (ranges(&step.reads), ranges(&step.writes));
        let meet = |a: &[Range<u64>], b: &[Range<u64>]| a.iter().any(|a| b.iter().any(|b| a.start < b.end && b.start < a.end));
        if meet(&reads, &self.written) || meet(&writes, &self.written) || meet(&writes, &self.read) {
            self.barrier();
        }
        self.read.extend(reads);
        self.written.extend(writes);
        (step.work)(self)
    }

    /// What follows sees what was written.
    pub(crate) fn barrier(&mut self) {
        self.read.clear();
        self.written.clear();
        self.commands.push(Command::Barrier);
    }

    /// Between dispatches of a step: the step's own resources stay in use.
    pub(crate) fn inner_barrier(&mut self) {
        self.commands.push(Command::Barrier);
    }

    pub(crate) fn add(&mut self, command: Command) {
        self.commands.push(command);
    }

    pub(crate) fn finish(self) -> Vec<Command> {
        self.commands
    }

    pub(crate) fn adapter(&self) -> &Adapter {
        &self.gpu.adapter
    }

    /// The value of a dimension.
    pub(crate) fn bind(&self, dim: Dim) -> usize {
        bind(dim, &self.bindings)
    }

    /// The product of some dimensions.
    pub(crate) fn volume(&self, shape: &[Dim]) -> usize {
        shape.iter().map(|&dim| self.bind(dim)).product()
    }

    pub(crate) fn address(&self, buffer: usize) -> u64 {
        self.addresses.buffers[buffer].start
    }

    /// The parameters of the call.
    pub(crate) fn call(&self) -> u64 {
        self.addresses.call
    }

    fn range(&self, resource: Resource) -> Range<u64> {
        match resource {
            Resource::Buffer(buffer) => self.addresses.buffers[buffer].clone(),
            // Below all addresses of buffers.
            Resource::Slot(slot) => slot as u64..slot as u64 + 1,
        }
    }

    /// Runs a shader in so many workgroups; in none, nothing is done.
    pub(crate) fn dispatch(
        &mut self,
        kernel: &Kernel,
        constants: &[u32],
        groups: [usize; 3],
        addresses: &[u64],
        numbers: &[u32],
    ) -> Result<(), DeviceError> {
        if groups.contains(&0) {
            return Ok(());
        }
        if let Some(&many) = groups.iter().find(|&&n| n > MOST_GROUPS) {
            return Err(DeviceError::Resources(format!(
                "a dispatch of {many} workgroups is too large: load the program for fewer rows per call"
            )));
        }
        self.commands.push(command(self.gpu, kernel, constants, groups.map(|n| n as u32), addresses, numbers)?);
        Ok(())
    }

    /// Runs a shader that works on `count` numbers or rows, `each` in a workgroup.
    pub(crate) fn flat(
        &mut self,
        kernel: &Kernel,
        constants: &[u32],
        count: usize,
        each: usize,
        addresses: &[u64],
        numbers: &[u32],
    ) -> Result<(), DeviceError> {
        let [x, y] = fold(count.div_ceil(each));
        self.dispatch(kernel, constants, [x, y, 1], addresses, numbers)
    }
}

/// So many groups in two dimensions.
pub(crate) fn fold(groups: usize) -> [usize; 2] {
    match groups <= MOST_GROUPS {
        true => [groups, 1],
        false => [MOST_GROUPS, groups.div_ceil(MOST_GROUPS)],
    }
}

/// A dispatch with its pipeline: addresses come before numbers, as the shaders' arguments do.
pub(crate) fn command(
    gpu: &Gpu,
    kernel: &Kernel,
    constants: &[u32],
    groups: [u32; 3],
    addresses: &[u64],
    numbers: &[u32],
) -> Result<Command, DeviceError> {
    let (name, spirv) = kernel.variant(&gpu.adapter);
    let pipeline = gpu.pipeline(name, spirv, constants)?;
    let arguments = addresses.iter().flat_map(|a| a.to_le_bytes()).chain(numbers.iter().flat_map(|n| n.to_le_bytes())).collect();
    Ok(Command::Dispatch { pipeline, groups, arguments })
}

/// The value of a dimension; a quotient is rounded up (that it has no remainder was checked).
pub(crate) fn bind(dim: Dim, bindings: &Bindings) -> usize {
    match dim {
        Dim::Fixed(n) => n,
        Dim::Symbol(symbol) => bindings.get(symbol),
        Dim::Exact(symbol, n) | Dim::Ceil(symbol, n) => bindings.get(symbol).div_ceil(n),
    }
}

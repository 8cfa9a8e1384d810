//! From steps to commands, for one shape of a call.

use crate::{
    kernels::{Kernel, command},
    stream::{Instruction, Item},
    vulkan::{Adapter, Command, Gpu, PauseEvents, SmallMatrices},
};
use qhx_ir::{Bindings, DeviceError, Dim};
use std::{collections::HashMap, ops::Range, sync::Arc};

/// Something that steps read and write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Resource {
    /// A buffer of the plan.
    Buffer(usize),
    /// A slot of the states.
    Slot(usize),
    /// What pauses come one after the other for.
    Pauses,
}

/// Some dispatches that belong together.
pub(crate) struct Step {
    pub(crate) reads: Vec<Resource>,
    pub(crate) writes: Vec<Resource>,
    pub(crate) work: Work,
    /// Whether it is left out where a step has one row: those that read its results do its work.
    pub(crate) left_out: bool,
    /// The number of the pause that it is.
    pub(crate) pause: Option<usize>,
}

impl Step {
    /// Of a step whose work another one does.
    pub(crate) fn nothing() -> Self {
        Self { reads: Vec::new(), writes: Vec::new(), work: Box::new(|_: &mut Recorder<'_>| Ok(())), left_out: true, pause: None }
    }
}

/// Buffers that are parts of others where a step has one row: which, and from which byte on.
pub(crate) type Aliases = HashMap<usize, (usize, u64)>;

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
    /// Whether the call has drafts.
    pub(crate) drafts: bool,
    /// Where the call has one row and its step is made of instructions.
    aliases: Option<&'a Aliases>,
    /// What pauses wait with; absent where the host waits between submissions.
    pauses: Option<&'a [PauseEvents]>,
    items: Vec<Item>,
    /// What was read and written since the last barrier.
    read: Vec<Range<u64>>,
    written: Vec<Range<u64>>,
}

/// Groups of a dispatch in a dimension, at most: what every device offers.
pub(crate) const MOST_GROUPS: usize = 65535;
/// Rows that come out as they do alone, at most: how keys are split among workgroups is the same for them. Calls of more rows have enough tiles for every processor of a GPU.
pub(crate) const MOST_ALIKE: usize = 64;

impl<'a> Recorder<'a> {
    pub(crate) fn new(gpu: &'a Arc<Gpu>, addresses: &'a Addresses, bindings: Bindings, segments: usize, keys: usize) -> Self {
        Self {
            gpu,
            addresses,
            bindings,
            segments,
            keys,
            drafts: false,
            aliases: None,
            pauses: None,
            items: Vec::new(),
            read: Vec::new(),
            written: Vec::new(),
        }
    }

    /// For a call of one row: steps add instructions where they can.
    pub(crate) fn single(self, aliases: &'a Aliases) -> Self {
        Self { aliases: Some(aliases), ..self }
    }

    /// Pauses are waited for in the middle of the submission.
    pub(crate) fn with_pauses(self, pauses: &'a [PauseEvents]) -> Self {
        Self { pauses: Some(pauses), ..self }
    }

    /// Tells the host of the pause with a number, and waits for it there where it `waits`.
    pub(crate) fn pause(&mut self, number: usize, waits: bool) {
        if let Some(pauses) = self.pauses {
            self.barrier();
            self.add(Command::Pause { events: pauses[number].clone(), waits });
        }
    }

    pub(crate) fn is_single(&self) -> bool {
        self.aliases.is_some()
    }

    /// Adds a step, behind a barrier where it reads what was written, or writes what was read or written.
    pub(crate) fn step(&mut self, step: &Step) -> Result<(), DeviceError> {
        if step.left_out && self.is_single() {
            return Ok(());
        }
        let ranges = |all: &[Resource]| all.iter().map(|&resource| self.range(resource)).collect::<Vec<_>>();
        let (reads, writes) = (ranges(&step.reads), ranges(&step.writes));
        let meet = |a: &[Range<u64>], b: &[Range<u64>]| a.iter().any(|a| b.iter().any(|b| a.start < b.end && b.start < a.end));
        // A pause has a barrier of its own.
        let is_pause = step.pause.is_some() && self.pauses.is_some();
        if !is_pause && (meet(&reads, &self.written) || meet(&writes, &self.written) || meet(&writes, &self.read)) {
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
        self.inner_barrier();
    }

    /// Between dispatches of a step: the step's own resources stay in use.
    pub(crate) fn inner_barrier(&mut self) {
        self.add(Command::Barrier);
    }

    pub(crate) fn add(&mut self, command: Command) {
        self.items.push(Item::Command(command));
    }

    /// Adds an instruction to the step of one row.
    pub(crate) fn instruct(&mut self, instruction: Instruction) {
        self.items.push(Item::Instruction(instruction));
    }

    pub(crate) fn finish(self) -> Vec<Item> {
        self.items
    }

    pub(crate) fn adapter(&self) -> &Adapter {
        &self.gpu.adapter
    }

    /// Whether rows have to come out as they do alone. A device with small matrices computes a few rows so, and more only for the sake of drafts: they are faster.
    pub(crate) fn is_alike(&self) -> bool {
        let is_slower = |matrices: SmallMatrices| self.bindings.rows >= matrices.fewest_rows();
        self.bindings.rows <= MOST_ALIKE && (self.drafts || !self.adapter().cooperative_matrix.is_some_and(is_slower))
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
        let (buffer, offset) = self.aliased(buffer);
        self.addresses.buffers[buffer].start + offset
    }

    /// The buffer that holds a buffer's content, and where.
    fn aliased(&self, buffer: usize) -> (usize, u64) {
        self.aliases.and_then(|aliases| aliases.get(&buffer)).copied().unwrap_or((buffer, 0))
    }

    /// The parameters of the call.
    pub(crate) fn call(&self) -> u64 {
        self.addresses.call
    }

    fn range(&self, resource: Resource) -> Range<u64> {
        match resource {
            Resource::Buffer(buffer) => self.addresses.buffers[self.aliased(buffer).0].clone(),
            // Below all addresses of buffers.
            Resource::Slot(slot) => slot as u64 + 1..slot as u64 + 2,
            Resource::Pauses => 0..1,
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
        self.add(command(self.gpu, kernel, constants, groups.map(|n| n as u32), addresses, numbers)?);
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

/// The value of a dimension; a quotient is rounded up (that it has no remainder was checked).
pub(crate) fn bind(dim: Dim, bindings: &Bindings) -> usize {
    match dim {
        Dim::Fixed(n) => n,
        Dim::Symbol(symbol) => bindings.get(symbol),
        Dim::Exact(symbol, n) | Dim::Ceil(symbol, n) => bindings.get(symbol).div_ceil(n),
    }
}

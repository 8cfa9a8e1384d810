//! The device: what `qhx-cpu` is to the rest.

use crate::{
    affinity::{self, CAN_PIN, Core},
    executable::CpuExecutable,
    kernels::{InstructionSet, Instructions, sketch},
    machine,
    pool::Pool,
    product,
};
use qhx_ir::{Checked, Device, DeviceError, DeviceInfo, Executable, Fact, LoadOptions, Machine, Matrix, Op, Weights};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

/// How the CPU is to be used.
#[derive(Clone, Debug, Default)]
pub struct CpuOptions {
    /// Threads that work, the caller's included; absent: one for each core. Results do not depend on it.
    pub threads: Option<usize>,
    /// The instruction set to use; absent: the best that this CPU has.
    pub instructions: Option<InstructionSet>,
    /// Keep each thread on a core of its own, physical cores first; the calling thread for the time of a call. Only where the system can ([`CAN_PIN`]).
    pub pin: bool,
    /// Output heads of at least so many bytes are not read whole where only the largest number is wanted
    /// ([`qhx_ir::Want::Largest`]), but in a few bits first; absent: where it pays. Answers do not depend on it.
    pub shortlist_from: Option<usize>,
}

/// Smaller heads are read whole in the time that their sketch takes.
const SHORTLIST_FROM: usize = 64 << 20;

/// The CPU. Takes every op; weights stay where they are mapped. Its threads start when it is opened, and end with all that was loaded on it.
///
/// ```
/// use qhx_cpu::{CpuDevice, CpuOptions};
/// use qhx_ir::Device;
/// let device = CpuDevice::new(CpuOptions { threads: Some(2), ..Default::default() })?;
/// assert_eq!(device.open()?.describe().threads, 2);
/// # Ok::<(), qhx_ir::DeviceError>(())
/// ```
pub struct CpuDevice {
    threads: usize,
    pin: bool,
    instructions: Instructions,
    shortlist_from: usize,
    opened: Mutex<Option<Arc<CpuMachine>>>,
}

/// The opened CPU.
pub struct CpuMachine {
    pool: Arc<Pool>,
    instructions: Instructions,
    shortlist_from: usize,
}

/// More threads than any machine has use for: a typing error, not a wish.
const MOST_THREADS: usize = 1024;

impl CpuDevice {
    /// Checks the options; no thread starts before the device is opened.
    pub fn new(options: CpuOptions) -> Result<Self, DeviceError> {
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        let threads = options.threads.unwrap_or_else(cores);
        if threads == 0 || threads > MOST_THREADS {
            return Err(DeviceError::Resources(format!("{threads} threads: use 1 to {MOST_THREADS} (this machine has {} cores)", cores())));
        }
        let instructions = match options.instructions {
            None => Instructions::best(),
            Some(set) => Instructions::new(set).ok_or_else(|| {
                let names: Vec<_> = InstructionSet::available().iter().map(InstructionSet::to_string).collect();
                DeviceError::Resources(format!("this CPU does not have the instruction set {set}; it has {}", names.join(", ")))
            })?,
        };
        let pin = options.pin && CAN_PIN;
        if pin {
            cores_for(threads)?;
        }
        let shortlist_from = options.shortlist_from.unwrap_or(if sketch::pays(instructions) { SHORTLIST_FROM } else { usize::MAX });
        Ok(Self { threads, pin, instructions, shortlist_from, opened: Mutex::default() })
    }

    /// [`Device::open`] with the CPU's own type.
    pub fn machine(&self) -> Result<Arc<CpuMachine>, DeviceError> {
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(machine) = &*opened {
            return Ok(machine.clone());
        }
        let pool = if self.pin { Pool::pinned(cores_for(self.threads)?) } else { Pool::new(self.threads) };
        let pool = pool.map_err(|error| DeviceError::Resources(format!("cannot start {} threads: {error}", self.threads)))?;
        let Self { instructions, shortlist_from, .. } = *self;
        let machine = Arc::new(CpuMachine { pool: Arc::new(pool), instructions, shortlist_from });
        *opened = Some(machine.clone());
        Ok(machine)
    }

    /// [`Device::load`] with the CPU's own type, which can tell what a call read.
    pub fn load_here(&self, program: &Checked, weights: &Arc<dyn Weights>, options: &LoadOptions) -> Result<CpuExecutable, DeviceError> {
        self.machine()?.load_here(program, weights, options)
    }

    /// The instruction set in use.
    pub fn instructions(&self) -> InstructionSet {
        self.instructions.set()
    }
}

impl CpuMachine {
    fn load_here(&self, program: &Checked, weights: &Arc<dyn Weights>, options: &LoadOptions) -> Result<CpuExecutable, DeviceError> {
        CpuExecutable::new(&self.pool, self.instructions, program, weights, options, self.shortlist_from)
    }
}

/// A core for each thread.
fn cores_for(threads: usize) -> Result<Vec<Core>, DeviceError> {
    let mut cores = affinity::cores();
    if cores.len() < threads {
        let found = cores.len();
        return Err(DeviceError::Resources(format!(
            "{threads} threads cannot be kept on cores of their own: this process may use {found}; use as many threads or fewer, or do not pin them"
        )));
    }
    cores.truncate(threads);
    Ok(cores)
}

impl Device for CpuDevice {
    fn name(&self) -> &str {
        "cpu"
    }

    fn accepts(&self, _program: &Checked, _op: &Op) -> Result<(), DeviceError> {
        Ok(())
    }

    fn open(&self) -> Result<Arc<dyn Machine>, DeviceError> {
        Ok(self.machine()?)
    }
}

impl Machine for CpuMachine {
    fn describe(&self) -> DeviceInfo {
        let memory = machine::memory();
        let mut facts = BTreeMap::from([("instructions".into(), Fact::Text(self.instructions.set().to_string()))]);
        if !self.pool.cores().is_empty() {
            facts.insert("pinned_to_cores".into(), Fact::Cores(self.pool.cores().iter().map(|core| core.number()).collect()));
        }
        if let Some(memory) = memory {
            facts.insert("memory_available_bytes".into(), Fact::Bytes(memory.available));
        }
        DeviceInfo {
            name: "cpu".into(),
            description: machine::cpu_name(),
            memory_bytes: memory.map(|memory| memory.total),
            threads: self.pool.threads(),
            facts,
        }
    }

    fn load(&self, program: &Checked, weights: &Arc<dyn Weights>, options: &LoadOptions) -> Result<Box<dyn Executable>, DeviceError> {
        Ok(Box::new(self.load_here(program, weights, options)?))
    }

    fn add_product(&self, left: Matrix<'_>, right: Matrix<'_>, sum: &mut [f32], stride: usize) {
        product::add(&self.pool, self.instructions, left, right, sum, stride);
    }
}

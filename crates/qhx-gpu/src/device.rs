//! The device: what `qhx-gpu` is to the rest.

use crate::{
    executable::GpuExecutable,
    vulkan::{Adapter, Driver, Gpu, Kind, Profile},
};
use qhx_ir::{Checked, Device, DeviceError, DeviceInfo, Executable, Fact, LoadOptions, Machine, Op, OpKind, Weights};
use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

/// How a GPU is to be used.
#[derive(Clone, Debug)]
pub struct GpuOptions {
    /// Which GPU, in the order of [`GpuDevice::list`].
    pub number: usize,
    /// The most bytes of its memory that are used; absent: all of it.
    pub memory_limit: Option<u64>,
    /// How long a submission may take before the GPU counts as lost.
    pub patience: Duration,
    /// Where compiled shaders are kept between starts; absent: nowhere.
    pub cache: Option<PathBuf>,
    /// What may be used of what it offers.
    pub features: Features,
    /// Have every call checked by Vulkan's validation layer: see [`GpuMachine::messages`].
    pub validate: bool,
    /// Time every dispatch: see [`GpuMachine::profile`]. It takes time itself.
    pub profile: bool,
    /// For tests: this submission and all after it fail as if the GPU were lost.
    pub fails_at: Option<u64>,
}

impl Default for GpuOptions {
    fn default() -> Self {
        let (patience, features) = (Duration::from_secs(30), Features::default());
        Self { number: 0, memory_limit: None, patience, cache: None, features, validate: false, profile: false, fails_at: None }
    }
}

/// Features that are used where a GPU offers them. Each can be switched off, to compare or to test the way without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// Sums over subgroups.
    pub subgroups: bool,
    /// Dot products of int8.
    pub integer_dot: bool,
    /// Products of small matrices.
    pub cooperative_matrix: bool,
    /// The most bytes of one buffer; absent: what the GPU takes.
    pub max_buffer: Option<u64>,
}

impl Default for Features {
    fn default() -> Self {
        Self { subgroups: true, integer_dot: true, cooperative_matrix: true, max_buffer: None }
    }
}

/// A GPU. Takes every op of every program.
pub struct GpuDevice {
    /// `gpu`, or `gpu:1` and so on.
    name: String,
    options: GpuOptions,
    opened: Mutex<Option<Arc<GpuMachine>>>,
}

/// An opened GPU.
pub struct GpuMachine {
    gpu: Arc<Gpu>,
    number: usize,
}

impl GpuDevice {
    /// A GPU that is opened when it is needed.
    pub fn new(options: GpuOptions) -> Self {
        Self { name: name(options.number), options, opened: Mutex::default() }
    }

    /// The GPUs of this machine, best first: software on the processor comes last. The error says why there are none.
    pub fn list() -> Result<Vec<DeviceInfo>, DeviceError> {
        let adapters = Driver::open(false).and_then(|driver| driver.adapters()).map_err(absent)?;
        Ok(adapters.iter().enumerate().filter(|(_, adapter)| adapter.lacks.is_none()).map(|(number, a)| describe(number, a)).collect())
    }

    /// [`Device::open`] with the GPU's own type.
    pub fn machine(&self) -> Result<Arc<GpuMachine>, DeviceError> {
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(machine) = &*opened {
            return Ok(machine.clone());
        }
        let GpuOptions { number, memory_limit, patience, cache, features, validate, profile, fails_at } = self.options.clone();
        let driver = Driver::open(validate).map_err(absent)?;
        let adapters = driver.adapters().map_err(absent)?;
        let count = adapters.len();
        let mut adapter =
            adapters.into_iter().nth(number).ok_or_else(|| absent(format!("there is no GPU {number}: Vulkan lists {count}")))?;
        if let Some(reason) = &adapter.lacks {
            return Err(absent(format!("{} cannot be used: {reason}", adapter.name)));
        }
        // Software compiles shaders while it runs them.
        let patience = if adapter.kind == Kind::Software { 10 * patience } else { patience };
        adapter.subgroups &= features.subgroups;
        adapter.integer_dot &= features.integer_dot;
        adapter.cooperative_matrix &= features.cooperative_matrix;
        adapter.max_allocation = adapter.max_allocation.min(features.max_buffer.unwrap_or(u64::MAX));
        let gpu = Gpu::open(&driver, adapter, memory_limit, patience, fails_at, cache, profile)?;
        let machine = Arc::new(GpuMachine { gpu, number });
        *opened = Some(machine.clone());
        Ok(machine)
    }
}

fn absent(reason: String) -> DeviceError {
    DeviceError::Absent { device: "gpu".into(), reason }
}

impl Device for GpuDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn accepts(&self, program: &Checked, op: &Op) -> Result<(), DeviceError> {
        let refuse = |reason: &str| Err(DeviceError::Refused { device: "gpu".into(), path: op.path.clone(), reason: reason.into() });
        match &op.op {
            OpKind::Experts { gate, up, .. } if program.weights[gate].encoding != program.weights[up].encoding => {
                refuse("gate and up have different encodings")
            }
            _ => Ok(()),
        }
    }

    fn open(&self) -> Result<Arc<dyn Machine>, DeviceError> {
        Ok(self.machine()?)
    }
}

impl GpuMachine {
    /// Since the last time it was asked: by shader, how many dispatches there were and how many nanoseconds they took, with what was waited for before each.
    pub fn profile(&self) -> BTreeMap<&'static str, (u64, f64)> {
        let profile: Profile = self.gpu.take_profile();
        profile
    }

    /// What Vulkan's validation layer has said so far.
    pub fn messages(&self) -> Vec<String> {
        self.gpu.messages()
    }
}

impl Machine for GpuMachine {
    fn describe(&self) -> DeviceInfo {
        describe(self.number, &self.gpu.adapter)
    }

    fn load(&self, program: &Checked, weights: &Arc<dyn Weights>, options: &LoadOptions) -> Result<Box<dyn Executable>, DeviceError> {
        self.gpu.check_alive()?;
        Ok(Box::new(GpuExecutable::new(&self.gpu, program, weights, options)?))
    }
}

/// What users call a GPU.
fn name(number: usize) -> String {
    if number == 0 { "gpu".into() } else { format!("gpu:{number}") }
}

fn describe(number: usize, adapter: &Adapter) -> DeviceInfo {
    let kind = match adapter.kind {
        Kind::Discrete => "discrete",
        Kind::Integrated => "integrated",
        Kind::Virtual => "virtual",
        Kind::Software => "software",
        Kind::Other => "other",
    };
    let features = [
        (adapter.subgroups, "subgroup sums"),
        (adapter.integer_dot, "int8 dot products"),
        (adapter.float16, "f16 arithmetic"),
        (adapter.cooperative_matrix, "cooperative matrices"),
        (adapter.unified, "unified memory"),
    ];
    let features: Vec<_> = features.iter().filter(|(there, _)| *there).map(|(_, name)| *name).collect();
    let facts = BTreeMap::from([
        ("type".into(), Fact::from(kind)),
        ("driver".into(), Fact::from(adapter.driver.as_str())),
        ("vulkan".into(), Fact::from(adapter.vulkan.as_str())),
        ("subgroup_size".into(), Fact::Number(adapter.subgroup_size as u64)),
        ("shared_memory_bytes".into(), Fact::Bytes(adapter.shared_memory as u64)),
        ("features".into(), Fact::from(features.join(", "))),
    ]);
    DeviceInfo { name: name(number), description: adapter.name.clone(), memory_bytes: Some(adapter.memory), threads: 1, facts }
}

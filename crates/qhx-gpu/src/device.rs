//! The device: what `qhx-gpu` is to the rest.

use crate::{
    arenas::Arenas,
    executable::GpuExecutable,
    vulkan::{Adapter, Conduct, Driver, Gpu, Injected, Kind, Profile, SmallMatrices},
};
use qhx_ir::{Checked, Device, DeviceError, DeviceInfo, Executable, Fact, LoadOptions, Machine, Op, Weights};
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
    /// For tests: what goes wrong, and when.
    pub fault: Option<(Injected, u64)>,
}

impl Default for GpuOptions {
    fn default() -> Self {
        let (patience, features) = (Duration::from_secs(30), Features::default());
        Self { number: 0, memory_limit: None, patience, cache: None, features, validate: false, profile: false, fault: None }
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
    /// Calls of so many rows use them.
    pub matrix_rows: usize,
    /// Calls of so many rows, from and to, use them for products, with tiles of few rows.
    pub few_rows: [usize; 2],
    /// Weights that lie in memory of the host are read there, where GPU and CPU share memory; else they are copied.
    pub host_memory: bool,
    /// Copies to the GPU on a queue of their own, while it computes.
    pub transfer_queue: bool,
    /// Steps of one row in one dispatch, where that is faster. Absent: not in software, which compiles it for long.
    pub streams: Option<bool>,
    /// The most bytes of one buffer; absent: what the GPU takes.
    pub max_buffer: Option<u64>,
    /// The most bytes of memory that a workgroup shares; absent: what the GPU has.
    pub shared_memory: Option<u32>,
}

impl Default for Features {
    fn default() -> Self {
        Self {
            subgroups: true,
            integer_dot: true,
            cooperative_matrix: true,
            matrix_rows: 17,
            few_rows: [3, 32],
            host_memory: true,
            transfer_queue: true,
            streams: None,
            max_buffer: None,
            shared_memory: None,
        }
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
    arenas: Arenas,
    number: usize,
}

impl GpuDevice {
    /// A GPU that is opened when it is needed.
    pub fn new(options: GpuOptions) -> Self {
        Self { name: name(options.number), options, opened: Mutex::default() }
    }

    /// The GPUs of this machine, best first: software on the processor comes last. The error says why there are none.
    pub fn list() -> Result<Vec<DeviceInfo>, DeviceError> {
        let driver = Driver::open(false).map_err(absent)?;
        let adapters = driver.adapters().map_err(absent)?;
        let usable = adapters.iter().enumerate().filter(|(_, adapter)| adapter.lacks.is_none());
        Ok(usable.map(|(number, adapter)| describe(number, adapter, driver.budget(adapter))).collect())
    }

    /// [`Device::open`] with the GPU's own type.
    pub fn machine(&self) -> Result<Arc<GpuMachine>, DeviceError> {
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(machine) = &*opened {
            return Ok(machine.clone());
        }
        let GpuOptions { number, memory_limit, patience, cache, features, profile, fault, .. } = self.options.clone();
        let (driver, mut adapter) = self.find()?;
        // Software compiles shaders while it runs them.
        let patience = if adapter.kind == Kind::Software { 10 * patience } else { patience };
        adapter.subgroups &= features.subgroups;
        adapter.integer_dot &= features.integer_dot;
        let matrices = adapter.cooperative_matrix.filter(|_| features.cooperative_matrix && adapter.subgroups);
        adapter.cooperative_matrix =
            matrices.map(|matrices| SmallMatrices { from_rows: features.matrix_rows, few_rows: features.few_rows, ..matrices });
        adapter.streams = features.streams.unwrap_or(adapter.streams) && adapter.can_stream();
        adapter.max_allocation = adapter.max_allocation.min(features.max_buffer.unwrap_or(u64::MAX));
        adapter.shared_memory = adapter.shared_memory.min(features.shared_memory.unwrap_or(u32::MAX));
        if !features.transfer_queue {
            adapter.copy_in_turn();
        }
        if !features.host_memory || !adapter.unified {
            adapter.import_alignment = None;
        }
        let conduct = Conduct { memory_limit, patience, fault, cache_folder: cache, profiled: profile };
        let gpu = Gpu::open(&driver, adapter, conduct)?;
        let machine = Arc::new(GpuMachine { gpu, arenas: Arenas::default(), number });
        *opened = Some(machine.clone());
        Ok(machine)
    }

    /// The GPU among those that Vulkan offers.
    fn find(&self) -> Result<(Arc<Driver>, Adapter), DeviceError> {
        let number = self.options.number;
        let driver = Driver::open(self.options.validate).map_err(absent)?;
        let adapters = driver.adapters().map_err(absent)?;
        let count = adapters.len();
        let adapter = adapters.into_iter().nth(number).ok_or_else(|| absent(format!("there is no GPU {number}: Vulkan lists {count}")))?;
        match &adapter.lacks {
            Some(reason) => Err(absent(format!("{} cannot be used: {reason}", adapter.name))),
            None => Ok((driver, adapter)),
        }
    }
}

fn absent(reason: String) -> DeviceError {
    DeviceError::Absent { device: "gpu".into(), reason }
}

impl Device for GpuDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn accepts(&self, _: &Checked, _: &Op) -> Result<(), DeviceError> {
        Ok(())
    }

    fn own_memory(&self) -> Result<Option<u64>, DeviceError> {
        if let Some(machine) = &*self.opened.lock().unwrap_or_else(PoisonError::into_inner) {
            return Ok(Some(machine.gpu.available()));
        }
        // Looking is faster than opening.
        let (driver, adapter) = self.find()?;
        Ok(Some(driver.budget(&adapter).min(self.options.memory_limit.unwrap_or(u64::MAX))))
    }

    fn replaces_weights(&self) -> bool {
        true
    }

    fn open(&self) -> Result<Arc<dyn Machine>, DeviceError> {
        Ok(self.machine()?)
    }
}

impl GpuMachine {
    /// Since the last time it was asked: by shader, how many dispatches there were and how many nanoseconds they took, with what was waited for before each.
    pub fn profile(&self) -> BTreeMap<String, (u64, f64)> {
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
        describe(self.number, &self.gpu.adapter, self.gpu.available())
    }

    fn load(&self, program: &Checked, weights: &Arc<dyn Weights>, options: &LoadOptions) -> Result<Box<dyn Executable>, DeviceError> {
        self.gpu.check_alive()?;
        Ok(Box::new(GpuExecutable::new(&self.gpu, &self.arenas, program, weights, options)?))
    }
}

/// What users call a GPU.
fn name(number: usize) -> String {
    if number == 0 { "gpu".into() } else { format!("gpu:{number}") }
}

fn describe(number: usize, adapter: &Adapter, available: u64) -> DeviceInfo {
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
        (adapter.cooperative_matrix.is_some(), "cooperative matrices"),
        (adapter.unified, "unified memory"),
        (adapter.copies_apart(), "transfer queue"),
    ];
    let features: Vec<_> = features.iter().filter(|(there, _)| *there).map(|(_, name)| *name).collect();
    let facts = BTreeMap::from([
        ("type".into(), Fact::from(kind)),
        ("driver".into(), Fact::from(adapter.driver.as_str())),
        ("vulkan".into(), Fact::from(adapter.vulkan.as_str())),
        ("subgroup_size".into(), Fact::Number(adapter.subgroup_size as u64)),
        ("shared_memory_bytes".into(), Fact::Bytes(adapter.shared_memory as u64)),
        ("memory_available_bytes".into(), Fact::Bytes(available)),
        ("features".into(), Fact::from(features.join(", "))),
    ]);
    DeviceInfo { name: name(number), description: adapter.name.clone(), memory_bytes: Some(adapter.memory), threads: 1, facts }
}

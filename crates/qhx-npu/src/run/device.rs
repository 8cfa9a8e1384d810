//! The NPU's implementation of the device interface.

use super::{
    contexts::Contexts,
    executable::NpuExecutable,
    prepare::{plan, prepare},
};
use crate::{
    Arch, CompileOptions, Library,
    budget::{Budget, Limits},
    lower::{self, Work},
};
use qhx_ir::{
    Artifact, Checked, Device, DeviceError, DeviceInfo, Executable, Fact, LoadOptions, Machine, Name, Op, OpKind, Piece, Planned, Target,
    Weights,
};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kv {
    /// All rows of a session, which ends when the context is full.
    #[default]
    Full,
    /// Only the last rows, in a ring buffer. A session may be longer than the context: attention sees at most the last context's worth of rows, or its own sliding window.
    Ring,
}

/// Options of the NPU device.
#[derive(Clone, Debug)]
pub struct NpuOptions {
    /// The processor for which graphs are compiled.
    pub arch: Arch,
    /// Rows of the prefill graph.
    pub prefill_rows: usize,
    /// The fewest rows for which the prefill graph is used; fewer are processed one by one.
    pub prefill_min_rows: usize,
    /// How keys and values are stored.
    pub kv: Kv,
    /// Rows of keys and values in graphs that are compiled at load; absent: as many as a session may have.
    pub context: Option<usize>,
    /// The most bytes of weights in one graph.
    pub part_bytes: u64,
    /// The target size of a prepared context in bytes of weights; a larger part has a context of its own.
    pub context_bytes: u64,
    /// The most prepared contexts loaded at once, of all programs; beyond it, the least recently used one is released.
    pub most_contexts: usize,
    /// The processor's limits; absent: the known ones of `arch`.
    pub limits: Option<Limits>,
    /// Whether to prepare graphs even if they may exhaust the DSP's heap.
    pub allow_risky: bool,
    /// Optimisation level, 1 to 3.
    pub optimization: u32,
    /// Whether a part's graphs for several row counts go into one context and store their weights once. The emulator cannot load such a context.
    pub share_weights: bool,
}

impl Default for NpuOptions {
    fn default() -> Self {
        Self {
            arch: Arch::V81,
            prefill_rows: 128,
            prefill_min_rows: 4,
            kv: Kv::Full,
            context: None,
            part_bytes: 1 << 30,
            context_bytes: 1 << 30,
            most_contexts: 8,
            limits: None,
            allow_risky: false,
            optimization: CompileOptions::default().optimization,
            share_weights: true,
        }
    }
}

impl NpuOptions {
    /// How graphs are compiled.
    pub(super) fn compile(&self) -> CompileOptions {
        CompileOptions { optimization: self.optimization, ..Default::default() }
    }
}

/// The Hexagon NPU, or on an x86-64 host its emulator. QNN's libraries are needed only to open it.
pub struct NpuDevice {
    library: Box<OpenLibrary>,
    options: NpuOptions,
    opened: Mutex<Option<Arc<NpuMachine>>>,
}

/// Opens QNN's libraries; the error says why they cannot be used.
type OpenLibrary = dyn Fn() -> Result<Library, String> + Send + Sync;

/// The NPU that a library drives.
pub struct NpuMachine {
    contexts: Arc<Contexts>,
    options: NpuOptions,
}

impl NpuDevice {
    /// The NPU that a library drives. Nothing is opened until a graph is needed.
    pub fn new(library: &Library, options: NpuOptions) -> Result<Self, DeviceError> {
        let library = library.clone();
        Self::with_library(move || Ok(library.clone()), options)
    }

    /// The NPU that the library which `open` finds would drive.
    pub fn with_library(
        open: impl Fn() -> Result<Library, String> + Send + Sync + 'static,
        options: NpuOptions,
    ) -> Result<Self, DeviceError> {
        if options.prefill_rows == 0 {
            return Err(DeviceError::Resources("a graph needs at least one row".into()));
        }
        Ok(Self { library: Box::new(open), options, opened: Mutex::default() })
    }

    /// [`Device::open`] with the NPU's own type.
    pub fn machine(&self) -> Result<Arc<NpuMachine>, DeviceError> {
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(machine) = &*opened {
            return Ok(machine.clone());
        }
        let library = (self.library)().map_err(|reason| DeviceError::Absent { device: self.name().into(), reason })?;
        let contexts = Arc::new(Contexts::new(library.device(self.options.arch), self.options.most_contexts));
        let machine = Arc::new(NpuMachine { contexts, options: self.options.clone() });
        *opened = Some(machine.clone());
        Ok(machine)
    }
}

impl Device for NpuDevice {
    fn name(&self) -> &str {
        "npu"
    }

    fn accepts(&self, program: &Checked, op: &Op) -> Result<(), DeviceError> {
        accepts(program, op)
    }

    fn on_host(&self, program: &Checked, op: &Op) -> bool {
        // Experts are computed in a graph: the host only fills in their weights.
        lower::parts::work_of(program, op) == Work::Host && !matches!(op.op, OpKind::Experts { .. })
    }

    fn plan(&self, pieces: &[Piece<'_>], target: &Target) -> Result<Planned, DeviceError> {
        let Budget { rows, notes, .. } = plan(pieces, target, &self.options)?;
        Ok(Planned { rows, notes })
    }

    fn host_weights(&self, program: &Checked) -> Vec<Name> {
        let read = program.ops.iter().filter(|op| lower::parts::work_of(program, op) == Work::Host).flat_map(|op| op.op.weights());
        program.weights.keys().filter(|name| read.clone().any(|read| read == *name)).cloned().collect()
    }

    fn open(&self) -> Result<Arc<dyn Machine>, DeviceError> {
        Ok(self.machine()?)
    }
}

impl NpuMachine {
    /// The number of prepared contexts that are loaded now, of all programs.
    pub fn loaded_contexts(&self) -> usize {
        self.contexts.count()
    }
}

impl Machine for NpuMachine {
    fn describe(&self) -> DeviceInfo {
        let (arch, library, compile) = (self.options.arch, self.contexts.device.library(), self.options.compile());
        let mut facts = BTreeMap::from([
            ("arch".into(), Fact::Text(arch.to_string())),
            ("soc".into(), arch.soc_name().into()),
            ("soc_model".into(), Fact::Number(arch.soc_model().into())),
            ("library".into(), library.build().to_string().into()),
            ("build".into(), library.build().text.clone().into()),
            ("optimization".into(), Fact::Number(compile.optimization.into())),
            ("vtcm_mb".into(), Fact::Number(compile.vtcm_mb.into())),
            ("hvx_threads".into(), Fact::Number(compile.hvx_threads.into())),
            ("dlbc".into(), Fact::Number(compile.dlbc.into())),
        ]);
        // Patch versions of one release can load each other's binaries.
        facts.extend(library.build().release.map(|(major, minor, _)| ("oldest_library".into(), format!("{major}.{minor}").into())));
        let what = if library.emulates() { "Hexagon NPU, emulated" } else { "Hexagon NPU" };
        DeviceInfo { name: "npu".into(), description: format!("{what} ({arch})"), memory_bytes: None, threads: 1, facts }
    }

    fn prepare(&self, pieces: &[Piece<'_>], weights: &Arc<dyn Weights>, target: &Target) -> Result<Vec<Artifact>, DeviceError> {
        let mut ops = pieces.iter().flat_map(|piece| piece.program.ops.iter().map(|op| (piece.program, op)));
        ops.try_for_each(|(program, op)| accepts(program, op))?;
        prepare(&self.contexts.device, pieces, weights, target, &self.options)
    }

    fn load(&self, program: &Checked, weights: &Arc<dyn Weights>, options: &LoadOptions) -> Result<Box<dyn Executable>, DeviceError> {
        program.ops.iter().try_for_each(|op| accepts(program, op))?;
        Ok(Box::new(NpuExecutable::new(self.contexts.clone(), program, weights, options, &self.options)?))
    }
}

fn accepts(program: &Checked, op: &Op) -> Result<(), DeviceError> {
    match lower::refusal(program, op) {
        None => Ok(()),
        Some(reason) => Err(DeviceError::Refused { device: "npu".into(), path: op.path.clone(), reason }),
    }
}

//! The device: what `qhx-npu` is to the rest.

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
    Artifact, Checked, Device, DeviceError, DeviceInfo, Executable, LoadOptions, Name, Op, OpKind, Piece, Planned, Target, Weights,
};
use std::{collections::BTreeMap, sync::Arc};

/// How keys and values are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kv {
    /// All rows of a session: it ends with the context.
    #[default]
    Full,
    /// The last rows only. A session may be longer than the context: attention sees at most the context's last rows, of a sliding window its own.
    Ring,
}

/// How the NPU is to be used.
#[derive(Clone, Debug)]
pub struct NpuOptions {
    /// The processor that graphs are for.
    pub arch: Arch,
    /// Rows of the graph that takes many rows at once.
    pub prefill_rows: usize,
    /// From so many rows on it is used; fewer go one by one.
    pub prefill_min_rows: usize,
    /// How keys and values are kept.
    pub kv: Kv,
    /// Rows of keys and values in graphs that are compiled here; absent: as many as a session may have.
    pub context: Option<usize>,
    /// Most bytes of weights in one graph.
    pub part_bytes: u64,
    /// About so many bytes of weights are prepared as one context, if a part is not larger.
    pub context_bytes: u64,
    /// Prepared contexts held at once, of all programs; beyond it the one that was used least recently is released.
    pub most_contexts: usize,
    /// What the processor can hold; absent: what is known of `arch`.
    pub limits: Option<Limits>,
    /// Whether graphs that may exhaust the DSP's heap are prepared all the same.
    pub allow_risky: bool,
    /// Effort of compiling, 1 to 3.
    pub optimization: u32,
    /// Whether graphs of one part that are prepared for several rows stand in one context and store their weights once. The emulator cannot load such a context.
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

/// The Hexagon NPU, or on an x86-64 host its emulator.
pub struct NpuDevice {
    contexts: Arc<Contexts>,
    options: NpuOptions,
}

impl NpuDevice {
    /// The NPU behind a library. Nothing is opened until a graph is needed.
    pub fn new(library: &Library, options: NpuOptions) -> Result<Self, DeviceError> {
        if options.prefill_rows == 0 {
            return Err(DeviceError::Resources("a graph needs at least one row".into()));
        }
        Ok(Self { contexts: Arc::new(Contexts::new(library.device(options.arch), options.most_contexts)), options })
    }

    /// How many prepared contexts are loaded now, of all programs.
    pub fn loaded_contexts(&self) -> usize {
        self.contexts.count()
    }
}

impl Device for NpuDevice {
    fn describe(&self) -> DeviceInfo {
        let (arch, library, compile) = (self.options.arch, self.contexts.device.library(), self.options.compile());
        let mut facts = BTreeMap::from([
            ("arch".into(), arch.to_string()),
            ("soc".into(), arch.soc_name().into()),
            ("soc_model".into(), arch.soc_model().to_string()),
            ("library".into(), library.build().to_string()),
            ("build".into(), library.build().text.clone()),
            ("optimization".into(), compile.optimization.to_string()),
            ("vtcm_mb".into(), compile.vtcm_mb.to_string()),
            ("hvx_threads".into(), compile.hvx_threads.to_string()),
            ("dlbc".into(), compile.dlbc.to_string()),
        ]);
        // Patches of one release read each other's binaries.
        facts.extend(library.build().release.map(|(major, minor, _)| ("oldest_library".into(), format!("{major}.{minor}"))));
        let what = if library.emulates() { "Hexagon NPU, emulated" } else { "Hexagon NPU" };
        DeviceInfo { name: "npu".into(), description: format!("{what} ({arch})"), memory_bytes: None, threads: 1, facts }
    }

    fn accepts(&self, program: &Checked, op: &Op) -> Result<(), DeviceError> {
        accepts(program, op)
    }

    fn on_host(&self, program: &Checked, op: &Op) -> bool {
        on_host(program, op)
    }

    fn plan(&self, pieces: &[Piece<'_>], target: &Target) -> Result<Planned, DeviceError> {
        let Budget { rows, notes, .. } = plan(pieces, target, &self.options)?;
        Ok(Planned { rows, notes })
    }

    fn prepare(&self, pieces: &[Piece<'_>], weights: &Arc<dyn Weights>, target: &Target) -> Result<Vec<Artifact>, DeviceError> {
        let mut ops = pieces.iter().flat_map(|piece| piece.program.ops.iter().map(|op| (piece.program, op)));
        ops.try_for_each(|(program, op)| self.accepts(program, op))?;
        prepare(&self.contexts.device, pieces, weights, target, &self.options)
    }

    fn host_weights(&self, program: &Checked) -> Vec<Name> {
        host_weights(program)
    }

    fn load(&self, program: &Checked, weights: &Arc<dyn Weights>, options: &LoadOptions) -> Result<Box<dyn Executable>, DeviceError> {
        program.ops.iter().try_for_each(|op| self.accepts(program, op))?;
        Ok(Box::new(NpuExecutable::new(self.contexts.clone(), program, weights, options, &self.options)?))
    }
}

pub(super) fn accepts(program: &Checked, op: &Op) -> Result<(), DeviceError> {
    match lower::refusal(program, op) {
        None => Ok(()),
        Some(reason) => Err(DeviceError::Refused { device: "npu".into(), path: op.path.clone(), reason }),
    }
}

pub(super) fn on_host(program: &Checked, op: &Op) -> bool {
    // What experts compute, they compute in a graph: the host only fills in their weights.
    lower::parts::work_of(program, op) == Work::Host && !matches!(op.op, OpKind::Experts { .. })
}

pub(super) fn host_weights(program: &Checked) -> Vec<Name> {
    let read = program.ops.iter().filter(|op| lower::parts::work_of(program, op) == Work::Host).flat_map(|op| op.op.weights());
    program.weights.keys().filter(|name| read.clone().any(|read| read == *name)).cloned().collect()
}

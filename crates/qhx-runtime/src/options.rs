//! How a model is to be loaded.

use crate::{
    DeviceChoice, Error, Medium,
    placement::Rules,
    registry::{self, CpuSettings, GpuSettings, InstructionSet, NpuSettings},
};
use qhx_bundle::Bundle;
use qhx_ir::{Device, LoadProgress, Timeline};
use std::sync::Arc;

/// The session length that is chosen when nobody asks for one and the model allows it.
pub const DEFAULT_CONTEXT: usize = 4096;
/// Rows per call in prefill when nobody asks for another number.
pub const DEFAULT_CHUNK: usize = 256;
/// The most rows that drafts add to a call.
pub(crate) const MOST_DRAFTS: usize = 7;
/// The most sessions that may share a call.
pub(crate) const MAX_SESSIONS: usize = 256;

/// How a model is to be loaded.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Where it runs.
    pub device: DeviceChoice,
    /// Which stage runs where; absent: all of them where `device` says.
    pub placement: Option<Rules>,
    /// Threads of the processor; absent: the device's own choice.
    pub threads: Option<usize>,
    /// Keep each of them on a core of its own, where the system can: see [`registry::CAN_PIN`].
    pub pin: bool,
    /// The processor's instruction set, for comparisons; absent: the best that it has.
    pub instructions: Option<InstructionSet>,
    /// Longest session; absent: the model's own limit, at most [`DEFAULT_CONTEXT`].
    pub context: Option<usize>,
    /// Rows per call in prefill.
    pub chunk: usize,
    /// The most rows per call whose logits are wanted: 1 for generating, more for checking many rows at once.
    pub wanted: usize,
    /// How many sessions may share a call: answers that an [`crate::engine::Engine`] makes at once.
    pub sessions: usize,
    /// The most bytes that the states of all sessions may have together, where the device counts them; absent: no limit.
    pub state_bytes: Option<u64>,
    /// Load even what does not fit into memory. Weights are mapped, so it may run, slowly, from the disk.
    pub overcommit: bool,
    /// Media that are going to be encoded: what that takes counts in the estimate of memory.
    pub media: Vec<Medium>,
    /// Where QNN is, and what the NPU is to be.
    pub npu: NpuSettings,
    /// How a graphics processor is to be used.
    pub gpu: GpuSettings,
    /// Told how far loading is, where weights are copied to a device.
    pub progress: Option<LoadProgress>,
    /// Where calls are written down: what ran when, on which device.
    pub timeline: Option<Timeline>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            device: DeviceChoice::Auto,
            placement: None,
            threads: None,
            pin: false,
            instructions: None,
            context: None,
            chunk: DEFAULT_CHUNK,
            wanted: 1,
            sessions: 1,
            state_bytes: None,
            overcommit: false,
            media: Vec::new(),
            npu: NpuSettings::default(),
            gpu: GpuSettings::default(),
            progress: None,
            timeline: None,
        }
    }
}

impl LoadOptions {
    /// The devices that they name, the one for everything else first.
    pub fn candidates(&self) -> Result<Vec<Arc<dyn Device>>, Error> {
        registry::candidates_for(self.device, self.placement.as_ref(), self.cpu(), &self.npu, &self.gpu)
    }

    /// How the processor is to be used.
    pub(crate) fn cpu(&self) -> CpuSettings {
        CpuSettings { threads: self.threads, pin: self.pin, instructions: self.instructions }
    }

    /// As they are for a bundle: an arch folder runs on the NPU, on the generation that it is for, and what its manifest places elsewhere there, unless
    /// another placement is asked for.
    pub fn of_bundle(&self, bundle: &Bundle) -> Result<Self, Error> {
        let mut options = self.clone();
        let (Some(plan), Some(arch)) = (&bundle.manifest().plan, &bundle.manifest().model.dsp_arch) else { return Ok(options) };
        options.device = match self.device {
            DeviceChoice::Auto | DeviceChoice::Npu => DeviceChoice::Npu,
            other => return Err(Error::OnlyNpu { bundle: bundle.place().to_owned(), device: other.to_string() }),
        };
        options.npu.arch = Some(arch.clone());
        options.placement = self.placement.clone().or_else(|| bundle.manifest().placement.as_ref().map(Rules::from));
        options.npu.prefill_min_rows = Some(plan.prefill_min_tokens);
        // A call is one execution of the largest graph.
        options.chunk = self.chunk.min(plan.prefill.last().copied().unwrap_or(1));
        Ok(options)
    }
}

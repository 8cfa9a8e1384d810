//! What `auto` means: the GPU or the processor, whichever is faster with this model on this machine.
//!
//! Both are measured when a model is loaded for the first time, and what was found is remembered for the model, the machine, the driver and the version of qhx.
//! Software Vulkan is never chosen.

mod measure;
mod remembered;

pub(crate) use measure::{Trial, measure};

use crate::{DeviceChoice, Error, LoadOptions, registry};
use qhx_ir::{Device, DeviceInfo};
use remembered::Key;
use serde::{Deserialize, Serialize};
use std::{path::PathBuf, sync::Arc};

/// What `auto` chose, and why.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AutoChoice {
    /// The device's name.
    pub device: String,
    /// Why that one.
    pub reason: String,
    /// What was measured; absent where nothing was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured: Option<Measured>,
    /// Whether it was measured just now.
    #[serde(skip)]
    pub is_new: bool,
}

/// How fast GPU and processor are with a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// The GPU; absent where it failed.
    pub gpu: Option<Speed>,
    /// The processor.
    pub cpu: Speed,
    /// How the GPU failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// The speed of a device.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Speed {
    /// Tokens per second of decoding.
    pub decode_tokens_per_second: f64,
    /// Tokens per second of prefill; absent where decoding alone had decided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill_tokens_per_second: Option<f64>,
}

/// A usual request: what is compared is the time that it takes.
const PROMPT_TOKENS: f64 = 256.0;
const ANSWER_TOKENS: f64 = 128.0;

impl Speed {
    /// How long a usual request takes; at least so long where prefill was not measured.
    fn seconds(&self) -> f64 {
        ANSWER_TOKENS / self.decode_tokens_per_second + self.prefill_tokens_per_second.map_or(0.0, |speed| PROMPT_TOKENS / speed)
    }

    fn is_sound(&self) -> bool {
        let sound = |speed: f64| speed.is_finite() && speed > 0.0;
        sound(self.decode_tokens_per_second) && self.prefill_tokens_per_second.is_none_or(sound)
    }
}

impl Measured {
    /// Whether a usual request takes less time on the GPU.
    pub fn prefers_gpu(&self) -> bool {
        self.gpu.is_some_and(|gpu| gpu.seconds() < self.cpu.seconds())
    }

    fn reason(&self) -> String {
        let shown = |name: &str, speed: &Speed| {
            let prefill = speed.prefill_tokens_per_second.map_or_else(String::new, |prefill| format!(" and prefill {prefill:.1} tok/s"));
            format!("{name} decodes {:.1} tok/s{prefill}", speed.decode_tokens_per_second)
        };
        match (&self.gpu, &self.failure) {
            (Some(gpu), _) => format!("measured: {}; {}", shown("gpu", gpu), shown("cpu", &self.cpu)),
            (None, failure) => format!("the GPU failed when it was measured: {}", failure.as_deref().unwrap_or("no reason is known")),
        }
    }
}

/// A GPU and the processor: one of them is to run a model.
pub(crate) struct Contest {
    /// The GPU alone.
    pub(crate) gpu: Vec<Arc<dyn Device>>,
    /// The processor alone.
    pub(crate) cpu: Vec<Arc<dyn Device>>,
    gpu_name: String,
    key: Key,
    folder: Option<PathBuf>,
    again: bool,
}

impl Contest {
    /// For a model that is to be loaded with these options. None where nothing is to be chosen: another device than `auto` is asked for, or there is no GPU.
    pub(crate) fn new(fingerprint: &str, options: &LoadOptions) -> Result<Option<Self>, Error> {
        if options.device != DeviceChoice::Auto || options.placement.is_some() {
            return Ok(None);
        }
        let Some(gpu) = registry::gpu_for_auto(&options.gpu) else { return Ok(None) };
        let only = |device| LoadOptions { device, ..options.clone() }.candidates();
        let Ok(cpu) = only(DeviceChoice::Cpu) else { return Ok(None) };
        let Some(processor) = cpu.first() else { return Ok(None) };
        let key = Key::new(fingerprint, &gpu, &processor.open()?.describe());
        let DeviceInfo { name: gpu_name, .. } = gpu;
        Ok(Some(Self {
            gpu: only(gpu_name.parse()?)?,
            cpu,
            gpu_name,
            key,
            folder: options.gpu.cache.clone(),
            again: options.gpu.measure_again,
        }))
    }

    /// What was measured before.
    pub(crate) fn recall(&self) -> Option<Measured> {
        self.folder.as_deref().filter(|_| !self.again).and_then(|folder| remembered::load(folder, &self.key))
    }

    /// Keeps what was measured; where that fails, the next load measures again.
    pub(crate) fn remember(&self, measured: &Measured) {
        if let Some(folder) = &self.folder {
            remembered::store(folder, &self.key, measured);
        }
    }

    /// The choice that follows from what was measured.
    pub(crate) fn choice(&self, measured: Measured, is_new: bool) -> AutoChoice {
        let device = if measured.prefers_gpu() { self.gpu_name.clone() } else { DeviceChoice::Cpu.to_string() };
        AutoChoice { device, reason: measured.reason(), measured: Some(measured), is_new }
    }

    /// The processor, because the GPU cannot be used.
    pub(crate) fn processor(&self, reason: String) -> AutoChoice {
        AutoChoice { device: DeviceChoice::Cpu.to_string(), reason, measured: None, is_new: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_usual_request_decides() {
        let speed = |decode, prefill| Speed { decode_tokens_per_second: decode, prefill_tokens_per_second: prefill };
        let prefers = |gpu, cpu| Measured { gpu: Some(gpu), cpu, failure: None }.prefers_gpu();
        assert!(prefers(speed(100.0, Some(1000.0)), speed(90.0, Some(900.0))));
        assert!(!prefers(speed(90.0, Some(900.0)), speed(100.0, Some(1000.0))));
        // A GPU that decodes a little slower and reads prompts much faster.
        assert!(prefers(speed(90.0, Some(2000.0)), speed(100.0, Some(100.0))));
        assert!(prefers(speed(100.0, Some(1000.0)), speed(10.0, None)), "decoding alone decides");
        assert!(!Measured { gpu: None, cpu: speed(1.0, None), failure: Some("lost".into()) }.prefers_gpu());
    }
}

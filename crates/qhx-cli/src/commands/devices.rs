//! `qhx devices`: what this machine offers.

use crate::{environment, failure::Failure, output, table::block, units::show_bytes};
use clap::Args;
use qhx_ir::{DeviceInfo, Fact};
use qhx_runtime::{
    DeviceChoice,
    registry::{CpuSettings, GpuSettings, NpuSettings, candidates_with, devices},
};
use serde_json::json;

/// List this machine's devices with the facts that placement uses
#[derive(Args)]
#[command(after_help = "Example:\n  qhx devices\n  qhx devices --json")]
pub(crate) struct Devices {
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

impl Devices {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let (cpu, npu) = (environment::cpu()?, environment::npu()?);
        let (devices, missing) = (devices(cpu, &npu), missing(cpu, &npu));
        if self.json {
            let missing: Vec<_> = missing.iter().map(|(name, reason)| json!({ "name": name, "reason": reason })).collect();
            return output::print_json(&json!({ "devices": devices, "missing": missing }));
        }
        let present = devices.iter().map(|device| block(&title(device), &facts(device)));
        let missing = missing.into_iter().map(|(name, reason)| block(&format!("{name}: not available"), &[("reason".into(), reason)]));
        output::print(&present.chain(missing).collect::<Vec<_>>().join("\n"))
    }
}

/// What it is called.
fn title(device: &DeviceInfo) -> String {
    let kind = if device.is_software() { "gpu (test device)" } else { &device.name };
    format!("{kind}: {}", device.description)
}

fn facts(device: &DeviceInfo) -> Vec<(String, String)> {
    let memory = device.memory_bytes.map(|bytes| ("memory".to_owned(), show_bytes(bytes)));
    let threads = ("threads".to_owned(), device.threads.to_string());
    memory.into_iter().chain([threads]).chain(device.facts.iter().map(|(name, value)| fact(name, value))).collect()
}

/// A fact with its unit.
fn fact(name: &str, fact: &Fact) -> (String, String) {
    let plain = |name: &str| name.replace('_', " ");
    match (fact, name.strip_suffix("_bytes"), name.strip_suffix("_mb")) {
        (Fact::Bytes(bytes), short, _) => (plain(short.unwrap_or(name)), show_bytes(*bytes)),
        (Fact::Number(megabytes), _, Some(short)) => (plain(short), show_bytes(megabytes << 20)),
        (Fact::Number(number), ..) => (plain(name), number.to_string()),
        (Fact::Cores(cores), ..) => (plain(name), cores.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")),
        (Fact::Text(text), ..) if name == "type" && text == "software" => {
            (plain(name), "software: a test device, which computes on the processor".into())
        }
        (Fact::Text(text), ..) => (plain(name), text.clone()),
    }
}

/// The devices that could be asked for and are not there, with the reason.
fn missing(cpu: CpuSettings, npu: &NpuSettings) -> Vec<(String, String)> {
    let asked = [DeviceChoice::Cpu, DeviceChoice::GPU, DeviceChoice::Npu];
    let open =
        |choice| candidates_with(choice, cpu, npu, &GpuSettings::default())?.iter().try_for_each(|device| Ok(device.open().map(drop)?));
    let reason = |choice: DeviceChoice| match open(choice) {
        Err(qhx_runtime::Error::NoDevice { reason, .. }) => Some((choice.to_string(), reason)),
        Err(error) => Some((choice.to_string(), error.to_string())),
        Ok(_) => None,
    };
    asked.into_iter().filter_map(reason).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn software_is_a_test_device() {
        let gpu = |kind: &str| DeviceInfo {
            name: "gpu".into(),
            description: "llvmpipe".into(),
            memory_bytes: None,
            threads: 1,
            facts: [("type".to_owned(), kind.into())].into(),
        };
        assert_eq!([gpu("software"), gpu("integrated")].map(|gpu| title(&gpu)), ["gpu (test device): llvmpipe", "gpu: llvmpipe"]);
        let told = ("type".into(), "software: a test device, which computes on the processor".into());
        assert!(facts(&gpu("software")).contains(&told));
    }

    #[test]
    fn facts_have_their_units() {
        assert_eq!(fact("memory_available_bytes", &Fact::Bytes(1610612736)), ("memory available".into(), "1.5 GiB".into()));
        assert_eq!(fact("vtcm_mb", &Fact::Number(8)), ("vtcm".into(), "8.0 MiB".into()));
        assert_eq!(fact("instructions", &"avx2+fma".into()), ("instructions".into(), "avx2+fma".into()));
        assert_eq!(fact("pinned_to_cores", &Fact::Cores(vec![0, 2])), ("pinned to cores".into(), "0, 2".into()));
    }
}

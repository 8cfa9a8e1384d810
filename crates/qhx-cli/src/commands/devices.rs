//! `qhx devices`: what this machine offers.

use crate::{failure::Failure, output, table::block, units::show_bytes};
use clap::Args;
use qhx_ir::DeviceInfo;
use qhx_runtime::{
    DeviceChoice,
    registry::{candidates, devices},
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
        let (devices, missing) = (devices(), missing());
        if self.json {
            let missing: Vec<_> = missing.iter().map(|(name, reason)| json!({ "name": name, "reason": reason })).collect();
            return output::print_json(&json!({ "devices": devices, "missing": missing }));
        }
        let present = devices.iter().map(|device| block(&format!("{}: {}", device.name, device.description), &facts(device)));
        let missing = missing.into_iter().map(|(name, reason)| block(&format!("{name}: not available"), &[("reason".into(), reason)]));
        output::print(&present.chain(missing).collect::<Vec<_>>().join("\n"))
    }
}

fn facts(device: &DeviceInfo) -> Vec<(String, String)> {
    let memory = device.memory_bytes.map(|bytes| ("memory".to_owned(), show_bytes(bytes)));
    let threads = ("threads".to_owned(), device.threads.to_string());
    memory.into_iter().chain([threads]).chain(device.facts.iter().map(|(name, value)| fact(name, value))).collect()
}

/// A fact with its unit, which the machine-readable name ends in.
fn fact(name: &str, value: &str) -> (String, String) {
    let units = [("_bytes", 0), ("_mb", 20)];
    let sized =
        units.iter().find_map(|(suffix, shift)| Some((name.strip_suffix(suffix)?, value.parse::<u64>().ok()?.checked_shl(*shift)?)));
    match sized {
        Some((name, bytes)) => (name.replace('_', " "), show_bytes(bytes)),
        None => (name.replace('_', " "), value.to_owned()),
    }
}

/// The devices that could be asked for and are not there, with the reason.
fn missing() -> Vec<(String, String)> {
    let asked = [DeviceChoice::Cpu, DeviceChoice::Gpu, DeviceChoice::Npu];
    let reason = |choice: DeviceChoice| match candidates(choice, None) {
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
    fn facts_have_their_units() {
        assert_eq!(fact("memory_available_bytes", "1610612736"), ("memory available".into(), "1.5 GiB".into()));
        assert_eq!(fact("vtcm_mb", "8"), ("vtcm".into(), "8.0 MiB".into()));
        assert_eq!(fact("instructions", "avx2+fma"), ("instructions".into(), "avx2+fma".into()));
    }
}

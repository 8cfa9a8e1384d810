//! `qhx devices`: what this machine offers.

use crate::{
    failure::Failure,
    output,
    table::{Align, Table},
};
use clap::Args;
use qhx_ir::DeviceInfo;
use qhx_runtime::{
    DeviceChoice,
    memory::show_bytes,
    registry::{candidates, devices},
};
use serde_json::json;

/// Show what this machine offers, with the facts that placement uses
#[derive(Args)]
#[command(after_help = "Example:\n  qhx devices --json")]
pub(crate) struct Devices {
    /// Print one JSON object instead of a table
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
        let header =
            [("device", Align::Left), ("what", Align::Left), ("memory", Align::Right), ("threads", Align::Right), ("facts", Align::Left)];
        let mut table = Table::new(header);
        for DeviceInfo { name, description, memory_bytes, threads, facts } in devices {
            let facts: Vec<_> = facts.iter().map(|(fact, value)| format!("{fact}: {value}")).collect();
            table.row([name, description, memory_bytes.map_or("unknown".into(), show_bytes), threads.to_string(), facts.join("; ")]);
        }
        for (name, reason) in missing {
            table.row([name, format!("not there: {reason}"), String::new(), String::new(), String::new()]);
        }
        output::print(&table.render())
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

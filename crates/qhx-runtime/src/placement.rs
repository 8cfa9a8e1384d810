//! Which device runs which stage, and why.
//!
//! Today a program runs whole on one device. A device asked for by name is strict: one stage that it refuses is an error. Under
//! `auto` the first device that takes every stage is chosen, and what the others refused is recorded.

use crate::{Error, registry::DeviceChoice};
use qhx_ir::{Checked, Device, Name, is_under};
use serde::Serialize;
use std::{collections::HashSet, sync::Arc};

/// Where every stage of a program runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Placement {
    /// In the program's order.
    pub stages: Vec<PlacedStage>,
    /// Stages that run elsewhere than was preferred.
    pub fallbacks: Vec<Fallback>,
}

/// One stage and its device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PlacedStage {
    /// The stage's name.
    pub stage: String,
    /// The device's name.
    pub device: String,
    /// Why there.
    pub reason: String,
}

/// A stage that a preferred device refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Fallback {
    /// The stage's name.
    pub stage: String,
    /// The device that refused it.
    pub from: String,
    /// The device that runs it.
    pub to: String,
    /// What the refusing device said.
    pub reason: String,
}

/// Chooses the device for `program` among `candidates` (best first).
pub fn place(program: &Checked, choice: DeviceChoice, candidates: &[Arc<dyn Device>]) -> Result<(Arc<dyn Device>, Placement), Error> {
    let mut refusals = Vec::new();
    for device in candidates {
        let name = device.describe().name;
        let refused = refused_stages(program, &**device);
        if refused.is_empty() {
            let reason = match choice {
                DeviceChoice::Auto => "the first device here that takes every stage".to_owned(),
                _ => format!("asked for by name: {name}"),
            };
            let host = host_stages(program, &**device);
            let stages = program.stages.iter().map(|s| match host.contains(&s.name) {
                true => PlacedStage { stage: s.name.to_string(), device: "host".into(), reason: format!("what the host does for {name}") },
                false => PlacedStage { stage: s.name.to_string(), device: name.clone(), reason: reason.clone() },
            });
            let fallback = |(stage, from, reason)| Fallback { stage, from, to: name.clone(), reason };
            let placement = Placement { stages: stages.collect(), fallbacks: refusals.into_iter().map(fallback).collect() };
            return Ok((device.clone(), placement));
        }
        refusals.extend(refused.into_iter().map(|(stage, reason)| (stage, name.clone(), reason)));
    }
    let listed: Vec<_> = refusals.iter().map(|(stage, device, reason)| format!("stage `{stage}` on {device}: {reason}")).collect();
    Err(Error::NotPlaced { program: program.name.to_string(), device: choice.to_string(), refusals: listed.join("; ") })
}

/// Like [`place`] for a program that encodes media. Its stages are named by [`tower_stage`].
pub fn place_tower(program: &Checked, choice: DeviceChoice, candidates: &[Arc<dyn Device>]) -> Result<(Arc<dyn Device>, Placement), Error> {
    let (device, mut placement) = place(program, choice, candidates)?;
    let stages = placement.stages.iter_mut().map(|s| &mut s.stage).chain(placement.fallbacks.iter_mut().map(|f| &mut f.stage));
    stages.for_each(|stage| *stage = tower_stage(program, stage));
    Ok((device, placement))
}

/// A tower's stage as it is told from those of the text program: `vision.patch_embed`, `vision.3`.
pub fn tower_stage(program: &Checked, stage: &str) -> String {
    if is_under(stage, &program.name) { stage.to_owned() } else { format!("{}.{stage}", program.name) }
}

/// The stages of which the host does everything.
fn host_stages(program: &Checked, device: &dyn Device) -> HashSet<Name> {
    let stages = |host: bool| {
        let ops = program.ops.iter().filter(move |op| device.on_host(program, op) == host);
        ops.filter_map(|op| Some(program.stage_of(&op.path)?.name.clone())).collect::<HashSet<_>>()
    };
    &stages(true) - &stages(false)
}

/// The stages that `device` refuses, each with the first reason.
fn refused_stages(program: &Checked, device: &dyn Device) -> Vec<(String, String)> {
    let mut refused: Vec<(String, String)> = Vec::new();
    for op in &program.ops {
        let stage = program.stage_of(&op.path).map_or_else(|| op.path.to_string(), |s| s.name.to_string());
        if refused.last().is_some_and(|(last, _)| *last == stage) {
            continue;
        }
        if let Err(reason) = device.accepts(program, op) {
            refused.push((stage, reason.to_string()));
        }
    }
    refused
}

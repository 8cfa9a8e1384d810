//! Which device runs which stage, and why.
//!
//! A device asked for by name is strict: one stage that it refuses is an error. Under `auto` and under [`Rules`] a stage that its device refuses goes to the
//! next one that takes it, and what was refused is recorded.

mod rules;

pub use qhx_ir::Phase;
pub use rules::{Overlap, Rules, Together};

use crate::{
    DeviceChoice, Error,
    split::{HotExperts, SlotCopy, SplitDevice, slot_copies},
};
use qhx_ir::{Checked, Device, Name, OpKind, is_under};
use serde::Serialize;
use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

/// Where every stage of a program runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Placement {
    /// In the program's order. A stage of which several devices do something stands there once for each.
    pub stages: Vec<PlacedStage>,
    /// Stages that run elsewhere than was preferred.
    pub fallbacks: Vec<Fallback>,
    /// Slots that are held in more than one place.
    pub copies: Vec<SlotCopy>,
}

impl Placement {
    /// The devices that run something, the host's own work apart.
    pub(crate) fn devices(&self) -> impl Iterator<Item = &str> {
        self.stages.iter().map(|stage| &*stage.device).filter(|device| *device != "host")
    }

    /// Gives all stages that a device runs this reason for being there.
    pub(crate) fn explain(&mut self, reason: &str) {
        self.stages.iter_mut().filter(|stage| stage.device != "host").for_each(|stage| stage.reason = reason.to_owned());
    }
}

/// One stage and its device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PlacedStage {
    /// The stage's name.
    pub stage: String,
    /// The device's name.
    pub device: String,
    /// The phase in which it is so; absent: in both.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    /// Why there.
    pub reason: String,
}

/// A stage that a preferred device refused.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
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

/// Where an op runs, and why.
type Assigned = (usize, String);

/// Chooses devices for `program` among `candidates` (best first; a device that rules name must be there).
pub fn place(
    program: &Checked,
    choice: DeviceChoice,
    rules: Option<&Rules>,
    candidates: &[Arc<dyn Device>],
) -> Result<(Arc<dyn Device>, Placement), Error> {
    rules.map_or(Ok(()), Rules::check_count)?;
    let placing = Placing { program, choice, rules, candidates, names: candidates.iter().map(|d| d.name().to_owned()).collect() };
    let mut fallbacks = Vec::new();
    let [prefill, decode] = [placing.assign(Phase::Prefill, &mut fallbacks)?, placing.assign(Phase::Decode, &mut fallbacks)?];
    let mut placement = Placement { stages: placing.stages(&prefill, &decode), fallbacks, copies: Vec::new() };
    let first = prefill.first().map_or(0, |assigned| assigned.0);
    let has_experts = program.ops.iter().any(|op| matches!(op.op, OpKind::Experts { .. }));
    let hot = rules.and_then(|rules| rules.hot_experts).filter(|_| has_experts);
    if hot.is_none() && prefill.iter().chain(&decode).all(|assigned| assigned.0 == first) {
        return Ok((candidates[first].clone(), placement));
    }
    let places: HashMap<Name, [usize; 2]> =
        program.ops.iter().zip(prefill.iter().zip(&decode)).map(|(op, (p, d))| (op.path.clone(), [p.0, d.0])).collect();
    let split = SplitDevice::new(candidates.to_vec(), move |_, op, phase| places.get(&op.path).map_or(0, |both| both[phase as usize]));
    let split = match rules.and_then(|rules| rules.overlap) {
        Some(Overlap::Whether(false)) => split.halved_from(usize::MAX),
        Some(Overlap::From(rows)) => split.halved_from(rows.get()),
        Some(Overlap::Whether(true)) | None => split,
    };
    let split = match rules.and_then(|rules| rules.together) {
        Some(together) => split.with_bandwidth_tokens(together.into()),
        None => split,
    };
    let split = match hot {
        Some(hot) => placing.with_hot_experts(split, hot)?,
        None => split,
    };
    placement.copies = slot_copies(&split, program, &placing.names)?;
    Ok((Arc::new(split), placement))
}

/// Like [`place`] for a program that encodes media. Its stages are named by [`tower_stage`].
pub fn place_tower(
    program: &Checked,
    choice: DeviceChoice,
    rules: Option<&Rules>,
    candidates: &[Arc<dyn Device>],
) -> Result<(Arc<dyn Device>, Placement), Error> {
    let (device, mut placement) = place(program, choice, rules, candidates)?;
    let stages = placement.stages.iter_mut().map(|s| &mut s.stage).chain(placement.fallbacks.iter_mut().map(|f| &mut f.stage));
    stages.for_each(|stage| *stage = tower_stage(program, stage));
    Ok((device, placement))
}

/// A tower's stage as it is told from those of the text program: `vision.patch_embed`, `vision.3`.
pub fn tower_stage(program: &Checked, stage: &str) -> String {
    if is_under(stage, &program.name) { stage.to_owned() } else { format!("{}.{stage}", program.name) }
}

struct Placing<'a> {
    program: &'a Checked,
    choice: DeviceChoice,
    rules: Option<&'a Rules>,
    candidates: &'a [Arc<dyn Device>],
    /// Of the candidates.
    names: Vec<String>,
}

impl Placing<'_> {
    /// The device of every op in a phase. What is refused is added to `fallbacks`, once for both phases.
    fn assign(&self, phase: Phase, fallbacks: &mut Vec<Fallback>) -> Result<Vec<Assigned>, Error> {
        let program = self.program;
        let mut assigned = program.ops.iter().map(|op| self.preferred(&op.path, phase)).collect::<Result<Vec<_>, _>>()?;
        let mut refusals = Vec::new();
        let known: HashSet<Fallback> = fallbacks.iter().cloned().collect();
        for (place, stage) in program.stages.iter().enumerate() {
            let ops = program.ops_of_stage(place);
            let mut devices: Vec<usize> = ops.iter().map(|&op| assigned[op].0).collect();
            devices.dedup();
            for device in devices {
                let here: Vec<usize> = ops.iter().copied().filter(|&op| assigned[op].0 == device).collect();
                let Some(reason) = self.refusal(device, &here) else { continue };
                let (from, said) = (&self.names[device], reason.clone());
                refusals.push(format!("stage `{}` on {from}: {reason}", stage.name));
                let strict = self.choice != DeviceChoice::Auto && self.rules.is_none();
                let other = (0..self.candidates.len()).filter(|_| !strict).find(|&other| self.refusal(other, &here).is_none());
                let Some(other) = other else { continue };
                refusals.pop();
                let to = &self.names[other];
                here.iter().for_each(|&op| assigned[op] = (other, format!("{from} does not support it")));
                let fallback = Fallback { stage: stage.name.to_string(), from: from.clone(), to: to.clone(), reason: said };
                if phase == Phase::Prefill || !known.contains(&fallback) {
                    fallbacks.push(fallback);
                }
            }
        }
        match refusals.is_empty() {
            true => Ok(assigned),
            false => {
                Err(Error::NotPlaced { program: program.name.to_string(), device: self.choice.to_string(), refusals: refusals.join("; ") })
            }
        }
    }

    /// A split with hot experts on the default device; the error says why they would not be used.
    fn with_hot_experts(&self, split: SplitDevice, hot: HotExperts) -> Result<SplitDevice, Error> {
        let default = self.rules.and_then(|rules| rules.default.as_ref());
        let place = default.and_then(|default| self.names.iter().position(|name| name == default)).unwrap_or(0);
        let name = &self.names[place];
        let wrong = |reason: String| Err(Error::Placement { reason: format!("hot_experts: {reason}") });
        if !self.candidates[place].replaces_weights() {
            return wrong(format!("{name} cannot hold experts that change: let `default` name a GPU"));
        }
        let split = split.with_hot_experts(place, hot);
        match hot.count == 0 || split.shares_experts(self.program) {
            true => Ok(split),
            false => wrong(format!(
                "no op with experts alone stands on another device than {name} for both prefill and decode: name them under [stages], as in \"layers.*.moe.experts\" = \"cpu\""
            )),
        }
    }

    /// Where an op is wished to run.
    fn preferred(&self, path: &str, phase: Phase) -> Result<Assigned, Error> {
        let Some((device, reason)) = self.rules.and_then(|rules| rules.device(self.program, path, phase)) else {
            let reason = match (self.choice, self.names.first()) {
                (DeviceChoice::Auto | DeviceChoice::Split, _) | (_, None) => "the first device here that takes it".to_owned(),
                (_, Some(name)) => format!("asked for by name: {name}"),
            };
            return Ok((0, reason));
        };
        match self.names.iter().position(|name| name == device) {
            Some(place) => Ok((place, reason)),
            None => Err(Error::UnknownDevice { found: device.to_owned(), known: self.names.join(", ") }),
        }
    }

    /// Why a device refuses one of some ops.
    fn refusal(&self, device: usize, ops: &[usize]) -> Option<String> {
        let refuse = |&op: &usize| self.candidates[device].accepts(self.program, &self.program.ops[op]).err();
        ops.iter().find_map(refuse).map(|reason| reason.to_string())
    }

    /// Who does something in each stage; in both phases where they do not differ.
    fn stages(&self, prefill: &[Assigned], decode: &[Assigned]) -> Vec<PlacedStage> {
        let mut stages = Vec::new();
        for (place, stage) in self.program.stages.iter().enumerate() {
            let [many, one] = [prefill, decode].map(|assigned| self.workers(place, assigned));
            let placed = |phase| move |(device, reason)| PlacedStage { stage: stage.name.to_string(), device, phase, reason };
            if many == one {
                stages.extend(many.into_iter().map(placed(None)));
            } else {
                stages.extend(many.into_iter().map(placed(Some(Phase::Prefill))));
                stages.extend(one.into_iter().map(placed(Some(Phase::Decode))));
            }
        }
        stages
    }

    /// The devices that run ops of the stage at a place, each with the reason of its first; `host` where the host does all of it for the device.
    fn workers(&self, stage: usize, assigned: &[Assigned]) -> Vec<(String, String)> {
        let ops = self.program.ops_of_stage(stage);
        let mut devices: Vec<usize> = Vec::new();
        for &op in ops {
            if !devices.contains(&assigned[op].0) {
                devices.push(assigned[op].0);
            }
        }
        let worker = |device: usize| {
            let mut own = ops.iter().filter(|&&op| assigned[op].0 == device);
            let name = &self.names[device];
            let reason = own.clone().next().map_or("", |&op| &assigned[op].1);
            match own.all(|&op| self.candidates[device].on_host(self.program, &self.program.ops[op])) {
                true => ("host".into(), format!("what the host does for {name}")),
                false => (name.clone(), reason.to_owned()),
            }
        };
        devices.into_iter().map(worker).collect()
    }
}

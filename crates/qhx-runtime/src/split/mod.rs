//! Several devices as one: a program whose ops run on different devices, and one that runs elsewhere when it reads a prompt than when it writes.
//!
//! Knows who runs which op; why is the business of [`crate::placement`].

mod halves;
mod hot;
mod interleaved;
mod parts;
mod parts_state;
mod phases;
mod tokens;

pub use hot::HotExperts;
pub(crate) use hot::{AllExperts, all_experts, pool_bytes};
pub use tokens::{BandwidthTokens, Permit};

use crate::recorded::Recorded;
use hot::{Hot, Pool, SharedExperts};
use interleaved::{Interleaved, Pieces};
use parts::Parts;
use phases::Phases;
use qhx_ir::{
    Artifact, CheckError, Checked, Device, DeviceError, DeviceInfo, Executable, LoadOptions, Machine, Name, Op, Phase, Piece, Planned,
    Slot, Target, Weights,
};
use serde::Serialize;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use tokens::Share;

/// Says which device (by its place) runs an op in a phase.
pub type Choose = dyn Fn(&Checked, &Op, Phase) -> usize + Send + Sync;

/// Devices that share the work. Each is opened when something is loaded on it.
#[derive(Clone)]
pub struct SplitDevice {
    devices: Vec<Arc<dyn Device>>,
    choose: Arc<Choose>,
    halved_from: usize,
    hot: Option<Hot>,
    /// How many times as long as one two stages at once take, where they take bandwidth tokens.
    together: Option<f64>,
}

/// Calls of so many rows are cut in two halves, which devices compute side by side, where nothing is known of the devices: fewer may not be worth the second reading of the
/// weights.
const HALVED_FROM: usize = 64;

/// A slot of which a second copy is kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SlotCopy {
    /// The slot's name.
    pub slot: String,
    /// Its home.
    pub from: String,
    /// Where the copy is.
    pub to: String,
    /// Bytes that are copied for each row (of a recurrent slot: for each change of phase).
    pub bytes: u64,
    /// When, and what for.
    pub reason: String,
}

/// Consecutive ops on one device.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OpRange {
    /// The device's place.
    pub device: usize,
    /// The ops' places in the program.
    pub ops: Range<usize>,
}

/// Consecutive ops on one device each, in the program's order, where `place` says which device runs an op.
pub(crate) fn op_ranges(program: &Checked, place: impl Fn(&Op) -> usize) -> Vec<OpRange> {
    let mut runs: Vec<OpRange> = Vec::new();
    for (at, op) in program.ops.iter().enumerate() {
        let device = place(op);
        match runs.last_mut() {
            Some(run) if run.device == device => run.ops.end = at + 1,
            _ => runs.push(OpRange { device, ops: at..at + 1 }),
        }
    }
    runs
}

impl OpRange {
    /// Its ops as a program, named by the places of its ops where it is not all of it.
    pub(crate) fn part(&self, program: &Checked) -> Result<Checked, CheckError> {
        let Range { start, end } = self.ops;
        if start == 0 && end == program.ops.len() {
            return Ok(program.clone());
        }
        Ok(program.cut(start..end)?.renamed(format!("{}-{start}-{end}", program.name)))
    }
}

impl SplitDevice {
    /// `choose` gives a place among `devices`; of a larger one the last is meant.
    pub fn new(devices: Vec<Arc<dyn Device>>, choose: impl Fn(&Checked, &Op, Phase) -> usize + Send + Sync + 'static) -> Self {
        Self { devices, choose: Arc::new(choose), halved_from: HALVED_FROM, hot: None, together: None }
    }

    /// The same with calls in two halves from so many rows on.
    pub fn halved_from(self, rows: usize) -> Self {
        Self { halved_from: rows.max(2), ..self }
    }

    /// The same with the experts that are chosen most often on the device at a place, though their ops are on another: as many as `experts` say. A device that cannot hold
    /// weights that change takes none.
    pub fn with_hot_experts(mut self, device: usize, experts: HotExperts) -> Self {
        let holds = experts.count > 0 && self.devices.get(device).is_some_and(|device| device.replaces_weights());
        self.hot = holds.then_some(Hot { device, experts });
        self
    }

    /// The same with bandwidth tokens: two stages that read at the same time were measured to take so many times as long as one.
    pub fn with_bandwidth_tokens(self, together: f64) -> Self {
        Self { together: Some(together), ..self }
    }

    /// The device that runs an op in a phase.
    fn device(&self, program: &Checked, op: &Op, phase: Phase) -> (usize, &Arc<dyn Device>) {
        let place = (self.choose)(program, op, phase).min(self.devices.len() - 1);
        (place, &self.devices[place])
    }

    /// The runs of a phase, in the program's order.
    pub fn runs(&self, program: &Checked, phase: Phase) -> Vec<OpRange> {
        op_ranges(program, |op| self.device(program, op, phase).0)
    }

    /// Whether there is an op whose experts are shared.
    pub(crate) fn shares_experts(&self, program: &Checked) -> bool {
        !self.shared_ops(program).is_empty()
    }

    /// The places of the ops whose experts are shared: each is all that a device runs between two parts of the accelerator, which makes what it reads, in both phases.
    fn shared_ops(&self, program: &Checked) -> Vec<usize> {
        let Some(hot) = &self.hot else { return Vec::new() };
        let [prefill, decode] = Phase::ALL.map(|phase| self.runs(program, phase));
        let there: BTreeSet<usize> = prefill.iter().filter(|run| run.device == hot.device).flat_map(|run| run.ops.clone()).collect();
        let alone: BTreeSet<usize> =
            prefill.iter().filter(|run| run.ops.len() == 1 && run.device != hot.device).map(|run| run.ops.start).collect();
        let reads = |place: usize| SharedExperts::reads(&program.ops[place]).into_iter().flatten();
        let is_ready = |&place: &usize| reads(place).all(|name| program.maker(name).is_none_or(|maker| there.contains(&maker)));
        hot::expert_ops(program).filter(|place| prefill == decode && alone.contains(place)).filter(is_ready).collect()
    }

    /// The bandwidth tokens of a stage.
    fn share(&self, options: &LoadOptions) -> Option<Share> {
        self.together.map(|together| Share::new(together, options.timeline.clone()))
    }

    fn load_runs(&self, runs: &[OpRange], job: &Job<'_>) -> Result<Box<dyn Executable>, DeviceError> {
        let [only] = runs else {
            let parts = runs.iter().map(|run| self.load_run(run, run.part(job.program)?, job)).collect::<Result<_, _>>()?;
            return Ok(Box::new(Parts::new(job.program, parts, self.halved_from, self.share(job.options))?));
        };
        self.load_run(only, job.program.clone(), job)
    }

    fn load_run(&self, run: &OpRange, part: Checked, job: &Job<'_>) -> Result<Box<dyn Executable>, DeviceError> {
        let (device, Job { weights, options, .. }) = (&self.devices[run.device], job);
        Ok(Recorded::of(device.load(&part, weights, options)?, device.name(), options.timeline.as_ref()))
    }
}

/// What is loaded.
struct Job<'a> {
    program: &'a Checked,
    weights: &'a Arc<dyn Weights>,
    options: &'a LoadOptions,
}

/// What one device prepares: a part of a program, at the rows of the phases in which it runs it.
#[derive(Clone)]
struct Placed {
    /// Its place among the devices.
    device: usize,
    program: Checked,
    rows: Vec<usize>,
}

impl SplitDevice {
    fn pieces(&self, program: &Checked, rows: &[usize]) -> Result<Vec<Placed>, DeviceError> {
        let mut runs: Vec<(OpRange, Vec<usize>)> = Vec::new();
        let mut places: HashMap<OpRange, usize> = HashMap::new();
        for phase in Phase::ALL {
            let own = rows.iter().copied().filter(|&rows| (rows == 1) == (phase == Phase::Decode));
            for run in self.runs(program, phase) {
                let place = *places.entry(run.clone()).or_insert(runs.len());
                if place == runs.len() {
                    runs.push((run, Vec::new()));
                }
                runs[place].1.extend(own.clone());
            }
        }
        let placed = |(run, mut rows): (OpRange, Vec<usize>)| {
            rows.sort_unstable();
            Ok(Placed { device: run.device, program: run.part(program)?, rows })
        };
        runs.into_iter().map(placed).collect()
    }

    /// Hands each device all that it runs of some pieces.
    fn for_each_device(
        &self,
        pieces: &[Piece<'_>],
        mut take: impl FnMut(&dyn Device, &[Piece<'_>]) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let placed = pieces.iter().map(|piece| self.pieces(piece.program, piece.rows)).collect::<Result<Vec<_>, _>>()?.concat();
        for (place, device) in self.devices.iter().enumerate() {
            let own = placed.iter().filter(|placed| placed.device == place);
            let own: Vec<Piece<'_>> = own.map(|placed| Piece { program: &placed.program, rows: &placed.rows }).collect();
            if !own.is_empty() {
                take(&**device, &own)?;
            }
        }
        Ok(())
    }
}

impl Device for SplitDevice {
    fn name(&self) -> &str {
        "split"
    }

    fn accepts(&self, program: &Checked, op: &Op) -> Result<(), DeviceError> {
        Phase::ALL.into_iter().try_for_each(|phase| self.device(program, op, phase).1.accepts(program, op))
    }

    fn on_host(&self, program: &Checked, op: &Op) -> bool {
        Phase::ALL.into_iter().all(|phase| self.device(program, op, phase).1.on_host(program, op))
    }

    fn plan(&self, pieces: &[Piece<'_>], target: &Target) -> Result<Planned, DeviceError> {
        let mut all = Planned::default();
        self.for_each_device(pieces, |device, own| {
            let planned = device.plan(own, target)?;
            all.rows.extend(planned.rows);
            all.notes.extend(planned.notes);
            Ok(())
        })?;
        all.rows.sort_unstable();
        all.rows.dedup();
        Ok(all)
    }

    fn host_weights(&self, program: &Checked) -> Vec<Name> {
        // A program that cannot be cut cannot be loaded either, and says so there.
        let pieces = self.pieces(program, &[]).unwrap_or_default();
        let own: BTreeSet<Name> = pieces.iter().flat_map(|piece| self.devices[piece.device].host_weights(&piece.program)).collect();
        own.into_iter().collect()
    }

    fn open(&self) -> Result<Arc<dyn Machine>, DeviceError> {
        Ok(Arc::new(self.clone()))
    }
}

impl Machine for SplitDevice {
    fn describe(&self) -> DeviceInfo {
        let names: Vec<&str> = self.devices.iter().map(|device| device.name()).collect();
        let described: Vec<_> = self.devices.iter().filter_map(|device| Some(device.open().ok()?.describe())).collect();
        let kind = described.iter().any(DeviceInfo::is_software).then(|| ("type".to_owned(), "software".into()));
        DeviceInfo {
            name: "split".into(),
            description: names.join(" and "),
            memory_bytes: None,
            threads: described.iter().map(|device| device.threads).max().unwrap_or(1),
            facts: kind.into_iter().chain([("devices".to_owned(), names.join(", ").into())]).collect(),
        }
    }

    fn prepare(&self, pieces: &[Piece<'_>], weights: &Arc<dyn Weights>, target: &Target) -> Result<Vec<Artifact>, DeviceError> {
        let mut all = Vec::new();
        self.for_each_device(pieces, |device, own| {
            all.extend(device.open()?.prepare(own, weights, target)?);
            Ok(())
        })?;
        Ok(all)
    }

    fn load(&self, program: &Checked, weights: &Arc<dyn Weights>, options: &LoadOptions) -> Result<Box<dyn Executable>, DeviceError> {
        let [prefill, decode] = Phase::ALL.map(|phase| self.runs(program, phase));
        // Parts that one device runs come one after the other.
        static GROUPS: AtomicU64 = AtomicU64::new(0);
        let options = &LoadOptions { scratch_group: Some(GROUPS.fetch_add(1, Ordering::Relaxed)), ..options.clone() };
        let shared = self.shared_ops(program);
        if let Some(Hot { device, experts }) = self.hot.as_ref().filter(|_| !shared.is_empty()) {
            let pool = Pool::new(*experts, program, &shared, weights, options.history.as_deref())?;
            let (devices, bandwidth) = (&self.devices[..], self.share(options));
            let pieces = Pieces { program, devices, device: *device, runs: &prefill, shared: &shared, pool, bandwidth };
            return Ok(Box::new(Interleaved::load(pieces, weights, options)?));
        }
        let job = Job { program, weights, options };
        let many = self.load_runs(&prefill, &job)?;
        if prefill == decode {
            return Ok(many);
        }
        let LoadOptions { max_soft_rows, max_wanted, .. } = *options;
        // A row for each session.
        let rows = options.max_segments.min(options.max_rows);
        let single =
            LoadOptions { max_rows: rows, max_soft_rows: max_soft_rows.min(rows), max_wanted: max_wanted.min(rows), ..options.clone() };
        let one = self.load_runs(&decode, &Job { options: &single, ..job })?;
        Ok(Box::new(Phases::new(program, many, one)))
    }
}

/// Which slots of a program are held more than once, with the names of the devices.
pub(crate) fn slot_copies(split: &SplitDevice, program: &Checked, names: &[String]) -> Result<Vec<SlotCopy>, DeviceError> {
    let phases = Phase::ALL.map(|phase| split.runs(program, phase));
    let [prefill, decode] = &phases;
    let mut all = Vec::new();
    let mut homes: [BTreeMap<Name, usize>; 2] = Default::default();
    for (number, runs) in phases.iter().enumerate() {
        for run in runs {
            for (name, slot) in &run.part(program)?.slots {
                match homes[number].get(name) {
                    // A program without phases has the same copies twice.
                    Some(_) if number == 1 && prefill == decode => {}
                    Some(&home) => all.push(SlotCopy {
                        slot: name.to_string(),
                        from: names[home].clone(),
                        to: names[run.device].clone(),
                        bytes: row_bytes(slot),
                        reason: "new rows in every call, for stages that share it".into(),
                    }),
                    None => _ = homes[number].insert(name.clone(), run.device),
                }
            }
        }
    }
    if prefill != decode {
        let [prefill, decode] = &homes;
        all.extend(program.slots.iter().filter_map(|(name, slot)| {
            Some(SlotCopy {
                slot: name.to_string(),
                from: names[*prefill.get(name)?].clone(),
                to: names[*decode.get(name)?].clone(),
                bytes: row_bytes(slot),
                reason: "new rows when reading changes to writing, and back".into(),
            })
        }));
    }
    Ok(all)
}

/// Bytes of one row of a KV slot, or of a recurrent slot.
fn row_bytes(slot: &Slot) -> u64 {
    // A recurrent slot is held twice, of which one counts.
    if slot.is_recurrent() { slot.bytes(1) / 2 } else { slot.bytes(1) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use qhx_ir::{conformance::models::tiny, reference::ReferenceDevice};
    use std::collections::HashSet;

    /// What is prepared: each part of a program at the rows of the phases in which it runs, under a name of its own.
    #[test]
    fn pieces_have_the_rows_of_their_phases() {
        let program = &tiny(0)[0].program;
        let devices: Vec<Arc<dyn Device>> = vec![Arc::new(ReferenceDevice), Arc::new(ReferenceDevice)];
        let first: HashSet<Name> = program.ops[..3].iter().map(|op| op.path.clone()).collect();
        let split = SplitDevice::new(devices, move |_, op, phase| usize::from(phase == Phase::Decode && !first.contains(&op.path)));
        let pieces = split.pieces(program, &[32, 1, 8]).unwrap();
        let found: Vec<(&str, &[usize])> = pieces.iter().map(|piece| (&*piece.program.name, &piece.rows[..])).collect();
        let (name, end) = (&program.name, program.ops.len());
        let parts = [format!("{name}-0-3"), format!("{name}-3-{end}")];
        assert_eq!(found, [(&**name, &[8, 32][..]), (&parts[0], &[1]), (&parts[1], &[1])]);
        assert_eq!(split.host_weights(program), program.weights.keys().cloned().collect::<Vec<_>>());
        let whole = Piece { program, rows: &[1, 32] };
        assert_eq!(split.plan(&[whole], &Target::default()).unwrap().rows, [1, 32]);
    }
}

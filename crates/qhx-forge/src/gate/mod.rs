//! Gates: a bundle is compared with the f32 program before it gets its name.
//!
//! The bundle answers a suite of prompts ([`suite`], made with a model on `paper` before anything is written) greedily, as it would for a user. Then one f32 pass over prompts and answers (`teacher`) tells for every token
//! whether it is the f32 program's choice too, which is the same as decoding in f32 and comparing; `judge` compares stages, logits and tokens on the way.
//! Where the gate does not hold, `search` looks for stages that need more. What was measured becomes `parity.json`, the oracle that `verify`
//! replays, and `report` makes a page of it for people. [`limits`] knows how close each class of precision must come; `weights` compares what is stored with the checkpoint.

mod answers;
mod auto;
mod judge;
pub(crate) mod language;
pub mod limits;
mod pace;
mod plain;
mod reference;
mod report;
#[cfg(test)]
mod rotated;
mod search;
pub mod suite;
mod target;
pub(crate) mod teacher;
#[cfg(test)]
mod tests;
mod verdict;
mod weights;
mod whole;

pub use reference::F32Reference;

use crate::{
    ForgeError, ForgeOptions, Material,
    families::Programs,
    mixture,
    pen::Written,
    plan::{Owners, PrecisionPlan, form_of},
    precision::Precision,
    target::{MadeTarget, TargetOrder, check_targets},
};
use judge::{Judge, Measurement, Played, Standard};
use limits::Class;
use qhx_bundle::{
    Bundle, BundlePath, Digest, Manifest, Staged,
    manifest::TEXT_PROGRAM,
    parity::{Choices, Covered, GateKind, Level, Limits, PARITY_PAGE, PARITY_VERSION, Parity, PlainRounding, StageResult},
    write::check_free,
};
use qhx_ir::{Checked, Device, Encoding, Name, OpKind};
use qhx_runtime::{
    Cancel, DeviceChoice,
    memory::tensor_bytes,
    placement::tower_stage,
    registry,
    verify::{centred_stages, row_stages, tower_stages, weight_sums},
};
use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet, HashMap},
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};
use suite::{GivenPrompt, Suite};
use teacher::Teacher;

/// Parameters up to which a gate runs on plain instructions, so that its numbers are the same on every machine.
const REPRODUCIBLE_PARAMETERS: u64 = 64_000_000;
/// Prompts that a mixture must not fail on before it is asked all.
const FIRST_PROMPTS: usize = 4;
/// Bytes of logits of prompts, beside those of answers, that are kept for the f32 pass.
const PROMPT_LOGIT_BYTES: usize = 256 << 20;
/// The class that a mixture of precisions must come as close as, however few bits it has.
const SEARCHED: Class = Class::Int8Both;
/// The share of a budget that goes into answering; the f32 pass takes about the rest.
const ANSWERING_SHARE: f64 = 0.4;

/// How a bundle is to be gated.
pub struct GateOptions<'a> {
    /// Which gate; absent: strict for f32, tolerant otherwise.
    pub kind: Option<GateKind>,
    /// Choose the precision of each stage by the gate.
    pub auto: bool,
    /// The largest share of tokens that may differ from the f32 program's choice; absent: that of the bundle's class of precision.
    pub max_flips: Option<f64>,
    /// The largest mean Kullback-Leibler divergence; absent: that of the bundle's class of precision.
    pub max_kl: Option<f64>,
    /// The suite; absent: the built-in one.
    pub prompts: Option<Vec<GivenPrompt>>,
    /// About how long it may take. It shortens the suite, but one prompt of every kind is always measured. Nothing is chosen by a gate with a budget: the bundle is as planned, however
    /// busy the machine is.
    pub budget: Option<Duration>,
    /// A few short prompts with short answers instead of the whole suite, for somebody who waits.
    pub quick: bool,
    /// Whether a small model is measured on plain instructions, so that its numbers are the same on every machine. A search is not.
    pub reproducible: bool,
    /// Threads; absent: one for each core. Results do not depend on it.
    pub threads: Option<usize>,
    /// Set by somebody who wants to stop.
    pub cancel: Cancel,
    /// Told how far the work is.
    pub progress: &'a mut dyn FnMut(GateProgress<'_>),
}

impl<'a> GateOptions<'a> {
    /// A precision's own gate on the built-in suite, for as long as it takes, with the same numbers on every machine.
    pub fn new(progress: &'a mut dyn FnMut(GateProgress<'_>)) -> Self {
        let cancel = Cancel::new();
        Self {
            kind: None,
            auto: false,
            max_flips: None,
            max_kl: None,
            prompts: None,
            budget: None,
            quick: false,
            reproducible: true,
            threads: None,
            cancel,
            progress,
        }
    }
}

/// How far a gate is.
#[derive(Clone, Copy, Debug)]
pub struct GateProgress<'a> {
    /// What is being done.
    pub what: &'a str,
    /// Steps done.
    pub done: usize,
    /// Steps in all.
    pub total: usize,
    /// About how long the whole measurement will still take, once that can be told.
    pub left: Option<Duration>,
}

impl<'a> GateProgress<'a> {
    /// Steps of something whose time is not told.
    pub(crate) fn new(what: &'a str, done: usize, total: usize) -> Self {
        Self { what, done, total, left: None }
    }
}

/// What stands behind a verdict.
#[derive(Clone, Debug, Default)]
struct Scope {
    /// Why it is not the whole suite.
    limited: Vec<String>,
    covered: Vec<Covered>,
}

/// A bundle whose gate has been measured.
#[derive(Clone, Debug)]
pub struct Gated {
    /// Where it is: under its name, or, if the gate did not hold, with `.rejected` behind it.
    pub path: PathBuf,
    /// Its manifest.
    pub manifest: Manifest,
    /// What was measured; `gate.passed` is the verdict.
    pub parity: Parity,
    /// Its arch folders.
    pub targets: Vec<MadeTarget>,
}

/// Makes a bundle and measures its gate. One that fails is left only under `NAME.rejected`.
pub fn forge_gated(material: &Material, options: &mut ForgeOptions<'_>, gate: GateOptions<'_>) -> Result<Gated, ForgeError> {
    forge_gated_with_targets(material, options, gate, &[])
}

/// The same with arch folders, each gated in the form that its device computes. They are made once the bundle itself has passed.
pub fn forge_gated_with_targets(
    material: &Material,
    options: &mut ForgeOptions<'_>,
    gate: GateOptions<'_>,
    targets: &[TargetOrder],
) -> Result<Gated, ForgeError> {
    // Before minutes of measuring: a place that is taken.
    check_free(options.out, options.replace)?;
    let base = PrecisionPlan::from(options.precision);
    check_targets(material, &base, &material.programs(&base)?, options, targets)?;
    if gate.auto && gate.budget.is_some() {
        return Err(ForgeError::Gate("`auto` cannot have a budget: the choice would depend on how busy the machine is".into()));
    }
    let mut gate = Gate::new(material, options, gate)?;
    options.row_tables |= !targets.is_empty();
    let outcome = match gate.options.auto {
        true => auto::auto(&mut gate, options)?,
        false => {
            let plan = mixture::plan(material, options)?;
            search::fixed(&mut gate, plan, options)?
        }
    };
    let search::Outcome { mut staged, programs, mut measurement, choices } = outcome;
    gate.judge_weights(&staged, &programs, &mut measurement.gate)?;
    gate.tell("summing the weights", 0, 1);
    let parity = gate.parity(&staged, &programs, measurement, choices)?;
    let text = parity.to_json().map_err(ForgeError::Gate)?;
    staged.set_parity(text.as_bytes())?;
    let page = BundlePath::new(PARITY_PAGE).map_err(|e| ForgeError::Gate(e.to_string()))?;
    let bytes = report::BytesPerToken::of(material, &programs)?;
    staged.set_file(&page, report::page(&parity, bytes).as_bytes())?;
    staged.open()?;
    let manifest = staged.manifest().clone();
    if !parity.gate.passed {
        return Ok(Gated { path: staged.reject()?, manifest, parity, targets: Vec::new() });
    }
    let mut made = Vec::new();
    for order in targets {
        let own = gate.measure_target(&staged, &programs, order, options, &parity)?;
        made.push(order.add(&staged, Some(&own), &options.cancel, &mut *gate.options.progress)?);
    }
    Ok(Gated { path: staged.publish()?, manifest, parity, targets: made })
}

/// The gate's own means.
struct Gate<'m, 'o> {
    material: &'m Material,
    options: GateOptions<'o>,
    kind: GateKind,
    device: Arc<dyn Device>,
    /// What was asked for.
    precision: Precision,
    /// The f32 programs.
    f32: Programs,
    /// The encodings in which weights lose nothing of the checkpoint.
    lossless: BTreeMap<Name, Encoding>,
    /// What the bundle says of the model, as far as its precision does not matter.
    manifest: Manifest,
    suite: Suite,
    /// What the model loses by plain rounding, once that had to be known.
    plain: Option<PlainRounding>,
    /// The time by which a budget is spent.
    clock: Box<dyn Fn() -> Duration>,
}

impl<'m, 'o> Gate<'m, 'o> {
    fn new(material: &'m Material, forge: &ForgeOptions<'_>, options: GateOptions<'o>) -> Result<Self, ForgeError> {
        let f32 = material.programs(&PrecisionPlan::from(Precision::F32))?;
        let parameters: u64 = crate::forge::weights(&f32).map(|(_, w, _)| w.shape.iter().map(|&d| d as u64).product::<u64>()).sum();
        // A search measures many times: it takes what is fastest here.
        let device = match options.reproducible && !options.auto {
            true => device_for(parameters, options.threads)?,
            false => fastest(options.threads)?,
        };
        let is_f32 = forge.precision == Precision::F32 && !options.auto;
        let kind = options.kind.unwrap_or(if is_f32 { GateKind::Strict } else { GateKind::Tolerant });
        let (model, manifest) = language::language(material, &f32, forge)?;
        let suite = suite::suite(&model, options.prompts.as_deref())?;
        let suite = if options.quick { suite.quick() } else { suite };
        let native = material.programs(&PrecisionPlan::from(Precision::Native))?;
        let lossless = crate::forge::weights(&native).map(|(name, weight, _)| (name.clone(), weight.encoding)).collect();
        let (precision, began) = (forge.precision, Instant::now());
        let clock = Box::new(move || began.elapsed());
        Ok(Self { material, precision, options, kind, device, f32, lossless, manifest, suite, plain: None, clock })
    }

    fn tell(&mut self, what: &str, done: usize, total: usize) {
        (self.options.progress)(GateProgress::new(what, done, total));
    }

    /// Holds a staged bundle to the gate.
    fn measure(&mut self, staged: &Staged) -> Result<Measurement, ForgeError> {
        self.measure_some(staged, usize::MAX)
    }

    /// The same for a search, to which a mixture that fails is worth little time: one that has failed on the first prompts is not asked more.
    fn try_out(&mut self, staged: &Staged) -> Result<Measurement, ForgeError> {
        let first = self.measure_some(staged, FIRST_PROMPTS.max(self.suite.required()))?;
        if first.gate.passed { self.measure(staged) } else { Ok(first) }
    }

    fn measure_some(&mut self, staged: &Staged, prompts: usize) -> Result<Measurement, ForgeError> {
        let bundle = staged.open()?;
        let program = bundle.program(TEXT_PROGRAM).ok_or_else(|| ForgeError::Gate("the bundle has no text program".into()))?.clone();
        let stages = row_stages(&program);
        let (played, vocabulary, scope) = self.answer(&bundle, &stages, prompts)?;
        let (mut standard, centred) = (self.standard(&bundle, self.kind), centred_stages(bundle.programs().values()));
        let may_be_raised = standard.plain.is_none() && !standard.own_limits && self.kind == GateKind::Tolerant && !self.options.auto;
        let encodings = plain::encodings(bundle.programs().values(), &self.lossless);
        drop(bundle);
        let names = self.all_stages(&played);
        let (progress, started) = (RefCell::new(&mut *self.options.progress), Instant::now());
        let mut tell = |done, total| {
            let left = pace::left_of(done, total, started.elapsed());
            progress.borrow_mut()(GateProgress { what: "comparing with the f32 model", done, total, left });
        };
        let mut judge = Judge::new(&played, vocabulary, &names, centred, &mut tell);
        let teacher = teacher(self.material, self.precision, &self.device, &self.options.cancel);
        whole::run(&teacher, &self.f32, &self.manifest, &played, &[], &mut judge)?;
        if may_be_raised && !encodings.is_empty() && judge.exceeds(&standard) {
            let mut rounded = self.material.programs(&PrecisionPlan::from(Precision::F32))?;
            plain::round(&mut rounded, &encodings);
            let mut tell = |done, total| progress.borrow_mut()(GateProgress::new("measuring plain rounding", done, total));
            let programs = [&self.f32, &rounded];
            let losses = plain::losses(&teacher, programs, &self.manifest, (&played, vocabulary), &standard, &mut tell)?;
            self.plain = Some(losses);
            standard = standard.raised(losses);
        }
        Ok(judge.verdict(&standard, &stages, scope))
    }

    /// What a bundle is held to: the limits of its class, as far as nobody asked for others. A search for a mixture must come as close as int8 does, however few bits it tries.
    fn standard(&self, bundle: &Bundle, kind: GateKind) -> Standard {
        let class = match self.options.auto {
            true => SEARCHED,
            false => Class::of(bundle.programs().values(), &self.lossless, weights::is_calibrated(bundle.manifest())),
        };
        let GateOptions { max_flips, max_kl, .. } = self.options;
        let mut limits = class.limits(self.has_router());
        let own_limits = max_flips.is_some() || max_kl.is_some();
        if own_limits {
            (limits.p99_kl, limits.wide_flips) = (None, None);
        }
        limits.flips = max_flips.unwrap_or(limits.flips);
        limits.mean_kl = max_kl.unwrap_or(limits.mean_kl);
        // Types of a checkpoint that is in floats cost nothing: it keeps the limits of its class.
        let is_given = self.precision == Precision::Native && self.lossless.values().any(|encoding| !encoding.is_float());
        let own_types = is_given && kind == GateKind::Tolerant && !self.options.auto && !own_limits;
        let label = bundle.manifest().precision.clone();
        let standard = Standard { label, kind, class: class.name().into(), limits, tie: class.tie(), own_limits, own_types, plain: None };
        match self.plain {
            Some(plain) => standard.raised(plain),
            None => standard,
        }
    }

    /// Whether the model chooses experts.
    fn has_router(&self) -> bool {
        self.f32.programs.iter().any(|written| written.program.ops.iter().any(|op| matches!(op.op, OpKind::Route { .. })))
    }

    /// What a search looks for.
    fn limits_of_search(&self) -> Limits {
        let limits = SEARCHED.limits(self.has_router());
        Limits { mean_kl: self.options.max_kl.unwrap_or(limits.mean_kl), ..limits }
    }

    /// The stages that are compared, in order: those of towers that have something to read, then those of the text.
    fn all_stages(&self, played: &[Played]) -> Vec<Name> {
        let (text, towers) = self.f32.programs.split_at(1);
        let read = |tower: &&Written| played.iter().flat_map(|p| &p.media).any(|(drawn, _)| drawn.medium.program() == &*tower.program.name);
        let towers = towers.iter().filter(read).flat_map(|tower| tower_stages(&tower.program));
        towers.chain(text.iter().flat_map(|text| text.program.stages.iter().map(|stage| stage.name.clone()))).collect()
    }

    /// Lets the bundle answer the first prompts of the suite; also the number of logits, and how much of the suite that was.
    fn answer(&mut self, bundle: &Bundle, stages: &[Name], prompts: usize) -> Result<(Vec<Played>, usize, Scope), ForgeError> {
        let suite = std::mem::take(&mut self.suite);
        let answered = self.answer_suite(bundle, stages, &suite, prompts);
        let scope = answered.as_ref().map(|(played, ..)| Scope {
            limited: suite.left_out.clone(),
            covered: verdict::coverage(&suite, suite.prompts.iter().take(played.len())),
        });
        let mut scope = scope.unwrap_or_default();
        let all = suite.prompts.len();
        self.suite = suite;
        let (played, vocabulary, cut) = answered?;
        if cut {
            let budget = self.options.budget.unwrap_or_default().as_secs_f64();
            scope.limited.push(format!("a budget of {budget} s: {} of {all} prompts", played.len()));
        } else if played.len() < all {
            scope.limited.push(format!("a search: {} of {all} prompts", played.len()));
        }
        Ok((played, vocabulary, scope))
    }

    /// What becomes `parity.json`.
    fn parity(
        &self,
        staged: &Staged,
        programs: &Programs,
        measurement: Measurement,
        choices: Option<Choices>,
    ) -> Result<Parity, ForgeError> {
        let Measurement { gate, cosines, cases } = measurement;
        let manifest = staged.manifest();
        let measured: BTreeSet<&BundlePath> = manifest.programs.values().map(|p| &p.file).chain(&manifest.weights).collect();
        let config = serde_json::to_string(self.material.config_value()).map_err(|e| ForgeError::Gate(e.to_string()))?;
        let device = self.device.open().map_err(qhx_runtime::Error::from)?.describe();
        Ok(Parity {
            parity_version: PARITY_VERSION,
            qhx: env!("CARGO_PKG_VERSION").into(),
            model: manifest.model.name.clone(),
            precision: manifest.precision.clone(),
            numerics: format!("{}, {}", device.name, device.text("instructions").unwrap_or("plain")),
            level: Level::Whole,
            config: Digest::of(config.as_bytes()),
            files: manifest
                .files
                .iter()
                .filter(|(path, _)| measured.contains(path))
                .map(|(path, entry)| (path.clone(), entry.sha256))
                .collect(),
            gate,
            stages: Stored::of(programs).results(&cosines),
            choices,
            cases,
            weights: weight_sums(&staged.open()?, &self.options.cancel)?,
        })
    }
}

/// What runs a model of so many parameters with the same numbers on every machine, as long as that is affordable.
pub(crate) fn device_for(parameters: u64, threads: Option<usize>) -> Result<Arc<dyn Device>, ForgeError> {
    Ok(if parameters <= REPRODUCIBLE_PARAMETERS { registry::plain(threads)? } else { fastest(threads)? })
}

fn fastest(threads: Option<usize>) -> Result<Arc<dyn Device>, ForgeError> {
    Ok(registry::candidates(DeviceChoice::Cpu, threads)?.remove(0))
}

/// What runs f32 passes, and stages of a bundle of that precision.
fn teacher<'a>(material: &'a Material, precision: Precision, device: &'a Arc<dyn Device>, cancel: &'a Cancel) -> Teacher<'a> {
    Teacher { device, others_on: device, distinct: false, numbers: material.numbers(precision), cancel }
}

/// How the stages of a model are stored.
struct Stored<'p> {
    programs: Vec<(&'p Checked, Owners)>,
    /// The program and the stage by the stage's name, as people call it.
    places: HashMap<String, (usize, usize)>,
}

impl<'p> Stored<'p> {
    fn of(programs: &'p Programs) -> Self {
        let programs: Vec<_> = programs.programs.iter().map(|written| (&written.program, Owners::of(&written.program))).collect();
        let mut places = HashMap::new();
        for (number, (program, _)) in programs.iter().enumerate() {
            for (place, stage) in program.stages.iter().enumerate() {
                let name = if number == 0 { stage.name.to_string() } else { tower_stage(program, &stage.name) };
                places.entry(name).or_insert((number, place));
            }
        }
        Self { programs, places }
    }

    /// Stages with the mean and the lowest cosine of each.
    fn results(&self, cosines: &[(Name, f64, f64)]) -> Vec<StageResult> {
        cosines.iter().map(|(stage, mean, lowest)| self.result(stage, *mean, *lowest)).collect()
    }

    fn result(&self, stage: &str, cosine: f64, min_cosine: f64) -> StageResult {
        let mut encodings: BTreeMap<String, u64> = BTreeMap::new();
        let mut forms: BTreeSet<String> = BTreeSet::new();
        if let Some(&(number, place)) = self.places.get(stage) {
            let (program, owners) = &self.programs[number];
            for weight in owners.weights(place).iter().filter_map(|name| program.weights.get(name)) {
                *encodings.entry(weight.encoding.to_string()).or_default() += tensor_bytes(weight.encoding, &weight.shape);
            }
            let ops = program.ops_of_stage(place).iter().map(|&op| &program.ops[op].op);
            let products = ops.filter(|op| matches!(op, OpKind::Linear { .. } | OpKind::Experts { .. }));
            forms.extend(products.map(|op| form_of(op).to_string()));
        }
        let bytes = encodings.values().sum();
        let mut encodings: Vec<_> = encodings.into_iter().collect();
        encodings.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        StageResult {
            stage: stage.into(),
            cosine,
            min_cosine,
            encodings: encodings.into_iter().map(|(encoding, _)| encoding).collect(),
            activations: forms.into_iter().collect(),
            bytes,
        }
    }
}

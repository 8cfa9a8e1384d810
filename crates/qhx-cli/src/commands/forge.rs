//! `qhx forge`: a checkpoint becomes a bundle.

use super::{compare::Comparison, plan, verify::kind};
use crate::{
    cost::{StoredAs, stored_as},
    environment::places,
    failure::Failure,
    forging::{self, GateOrder, Order},
    interrupt::Interrupt,
    output,
    peak::{Peak, PeakMemory},
    table::{Align, Table, facts},
    targets::{TargetFlags, TargetReport},
    units::{show_bytes, show_count, show_seconds},
};
use clap::{Args, ValueEnum};
use qhx::Source;
use qhx_bundle::{
    Bundle, BundlePath, OpenOptions, Verify,
    manifest::{Calibrated, FileEntry, IgnoredTensors, Manifest, Rounding},
    parity::{Choices, GateKind, GateResult, Parity},
};
use qhx_forge::{
    Calibration, CalibrationTexts, Forged, Gated, MadeTarget, Material, MeanBits, Precision, gate::suite::read as read_prompts,
    write_synthetic_checkpoint,
};
use serde::Serialize;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// Make a bundle from a Hugging Face folder or a GGUF file
///
/// The bundle appears under its name only once it is complete and has passed its gate. A failure or Ctrl-C leaves nothing behind; a bundle that failed its gate is left
/// as DIR.rejected, with its report.
#[derive(Args)]
#[command(
    after_help = "Example:\n  qhx forge ./SmolLM2-135M-Instruct --out smol --precision w8\n  qhx forge ./SmolLM2-135M-Instruct --out smol --precision f16 --target cpu,v79,v81 --context 512\n  qhx forge ./SmolLM2-135M-Instruct --compare f16,w8,w4,4.8"
)]
pub(crate) struct Forge {
    /// The checkpoint: a Hugging Face folder or a GGUF file
    #[arg(value_name = "SRC")]
    source: PathBuf,
    /// The drafter that was published beside the checkpoint, such as gemma-4-E4B-it-assistant: a Hugging Face folder. It becomes a program of the bundle, which `--draft mtp` uses
    #[arg(long, value_name = "DIR", conflicts_with_all = ["compare", "plan"])]
    drafter: Option<PathBuf>,
    /// Compare precisions instead of making one bundle: a table and a page with size, divergence from the checkpoint, perplexity and speed. With --out each bundle is kept as DIR/PRECISION
    #[arg(long, value_name = "P,P", value_delimiter = ',', value_parser = compared, conflicts_with_all = ["precision", "bits", "plan", "gate", "prompts", "max_flips", "max_kl", "gate_budget"])]
    compare: Vec<Precision>,
    /// Text for the perplexity and divergence of --compare, as a UTF-8 file [default: a built-in text]
    #[arg(long, value_name = "FILE", requires = "compare")]
    text: Option<PathBuf>,
    /// Texts by which integer weights are calibrated, instead of the built-in ones: a UTF-8 text, or JSON lines with `messages` as `qhx batch` reads them; none rounds every weight to the nearest value
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
    #[command(flatten)]
    bundle: BundleFlags,
}

/// What `forge` and `synth` have in common.
#[derive(Args)]
pub(crate) struct BundleFlags {
    /// Folder of the bundle; its last component is the model's name
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Weight precision: native (as in the checkpoint; keys and values in f32 for an f32 checkpoint, otherwise in f16), f32, f16, w8, w8-f16head, moe-i8, w4, w4-row, or auto (the smallest mixture that comes as close as int8 does)
    #[arg(long, value_name = "P", default_value = "native", value_parser = precision)]
    precision: PrecisionChoice,
    /// Bits per weight instead of a precision, such as 4.8: the mixture of int4, int6, int8 and f16 that loses least at that size, found by measuring what the model loses by each matrix
    #[arg(long, value_name = "N", value_parser = str::parse::<MeanBits>, allow_negative_numbers = true, conflicts_with = "precision")]
    bits: Option<MeanBits>,
    #[command(flatten)]
    targets: TargetFlags,
    /// Print contexts, graphs, bytes and layers of the NPU targets (without --target: of all) without compiling anything; SRC may be a config.json. At w4 and with --bits it measures the model first, which takes a while
    #[arg(long, help_heading = "NPU targets")]
    plan: bool,
    /// Gate: how closely the bundle must match the f32 program [default: strict for f32, tolerant otherwise; none for synth]
    #[arg(long, value_enum)]
    gate: Option<Gate>,
    /// Largest share of tokens that may differ from the f32 model's choice, such as 0.02 or 2% [default: by precision, see docs/precision.md]
    #[arg(long, value_name = "X", value_parser = share, allow_negative_numbers = true)]
    max_flips: Option<f64>,
    /// Largest mean Kullback-Leibler divergence from the f32 model, in nats per token [default: by precision, see docs/precision.md]
    #[arg(long, value_name = "X", value_parser = divergence, allow_negative_numbers = true)]
    max_kl: Option<f64>,
    /// Approximate time limit of the gate in seconds; with less time it measures fewer prompts, but at least one of every kind (text, image, sound)
    #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true)]
    gate_budget: Option<Duration>,
    /// Prompts for the gate instead of the built-in ones: a JSON list of texts, lists of token ids, or {"user": TEXT}
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,
    /// Replace an existing bundle; a folder that is not a bundle, or holds files that its bundle does not list, is kept
    #[arg(long)]
    force: bool,
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
}

/// The longest gate that can be asked for: a month.
const MAX_BUDGET: Duration = Duration::from_secs(30 * 86_400);

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Gate {
    /// Every token equals the f32 program's
    Strict,
    /// Flips and divergence stay within the limits of the precision's class (docs/precision.md), or within --max-flips and --max-kl
    Tolerant,
    /// No gate: the bundle carries no oracle
    None,
}

/// What `--precision` asks for.
#[derive(Clone, Copy)]
enum PrecisionChoice {
    Fixed(Precision),
    Auto,
}

impl Forge {
    pub(crate) fn run(&self, interrupt: &Interrupt) -> Result<(), Failure> {
        let source = match Source::find(&self.source, &places()) {
            Ok(Source::Checkpoint(checkpoint)) => checkpoint.path,
            Ok(_) => {
                return Err(Failure::work(format!("{} is a bundle already", self.source.display()))
                    .hint("forge from the checkpoint that it was made from"));
            }
            // The forge says what is wrong with a file that is there.
            Err(_) => self.source.clone(),
        };
        if !self.compare.is_empty() {
            self.check_comparison()?;
            let (text, out, calibration) = (self.text.as_deref(), self.bundle.out.as_deref(), self.calibration()?);
            let (replace, json) = (self.bundle.force, self.bundle.json);
            return Comparison { source: &source, precisions: &self.compare, text, calibration, out, replace, json }.run(interrupt);
        }
        self.bundle.check()?;
        if self.bundle.plan {
            let (material, calibration) = (plan::material(&source)?, self.calibration()?);
            if matches!(material, Material::Synthetic { .. }) && calibration.is_some() {
                self.bundle.tell_what_calibration_changes();
            }
            return self.bundle.print_plan(&material, calibration.as_ref(), interrupt);
        }
        if self.bundle.gate == Some(Gate::None) {
            output::note("note: --gate none: the bundle is not checked and carries no oracle, so `qhx verify` cannot replay it");
        }
        let calibration = self.calibration()?;
        let material = match &self.drafter {
            Some(drafter) => Material::open_with_drafter(&source, drafter)?,
            None => Material::open(&source)?,
        };
        self.bundle.make(&material, true, calibration.as_ref(), interrupt)
    }

    /// What can be wrong with the flags of a comparison.
    fn check_comparison(&self) -> Result<(), Failure> {
        let repeated = self.compare.iter().enumerate().find(|(place, precision)| self.compare[..*place].contains(precision));
        if let Some((_, precision)) = repeated {
            return Err(Failure::usage(format!("--compare has {precision} twice")));
        }
        match self.bundle.targets.has_npu() {
            true => Err(Failure::usage("--compare measures on this machine: it makes nothing for --target")),
            false => self.bundle.targets.check(false),
        }
    }

    /// What `--calibration` asks for.
    fn calibration(&self) -> Result<Option<Calibration>, Failure> {
        match &self.calibration {
            Some(path) if path.as_os_str() == "none" => Ok(None),
            Some(path) => {
                let texts = CalibrationTexts::read(path).map_err(|e| Failure::work(format!("--calibration: {e}")))?;
                Ok(Some(Calibration { texts, ..Calibration::default() }))
            }
            None => Ok(Some(Calibration::default())),
        }
    }
}

impl BundleFlags {
    /// What can be wrong with the flags alone.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        let without = |flag: &str| Failure::usage(format!("{flag} needs a gate")).hint("leave out --gate none");
        if !self.plan {
            self.out()?;
        }
        self.targets.check(self.plan)?;
        match (self.gate, self.precision()) {
            (Some(Gate::None), PrecisionChoice::Auto) => Err(without("--precision auto")),
            (_, PrecisionChoice::Auto) if self.gate_budget.is_some() => {
                let message = "--gate-budget cannot be combined with --precision auto: the choice would depend on how busy the machine is";
                Err(Failure::usage(message))
            }
            (Some(Gate::None), _) if self.prompts.is_some() => Err(without("--prompts")),
            (Some(Gate::None), _) if self.gate_budget.is_some() => Err(without("--gate-budget")),
            (Some(Gate::None), _) if self.max_flips.is_some() => Err(without("--max-flips")),
            (Some(Gate::None), _) if self.max_kl.is_some() => Err(without("--max-kl")),
            _ => Ok(()),
        }
    }

    /// What `--precision` or `--bits` asks for.
    fn precision(&self) -> PrecisionChoice {
        self.bits.map_or(self.precision, |bits| PrecisionChoice::Fixed(Precision::Bits(bits)))
    }

    /// The folder that the bundle goes into.
    fn out(&self) -> Result<&Path, Failure> {
        self.out.as_deref().ok_or_else(|| Failure::usage("--out DIR is missing: the folder of the new bundle"))
    }

    /// Whether only the plan is wanted.
    pub(crate) fn is_plan(&self) -> bool {
        self.plan
    }

    /// Says how the plan of a configuration differs from that of a checkpoint, which the forge calibrates.
    fn tell_what_calibration_changes(&self) {
        let PrecisionChoice::Fixed(precision) = self.precision() else { return };
        let differs = match precision {
            Precision::W8 | Precision::W8F16Head | Precision::W4Row => "without rotations",
            Precision::W4 => "without rotations, and with all matrices of layers in 4 bits",
            Precision::Bits(_) => "with a mixture that random weights were measured for",
            _ => return,
        };
        output::note(&format!(
            "note: a configuration has no weights to calibrate: this is the plan {differs}; the plan of the checkpoint is what is forged"
        ));
    }

    /// Prints what would be compiled for the NPU.
    pub(crate) fn print_plan(&self, material: &Material, calibration: Option<&Calibration>, interrupt: &Interrupt) -> Result<(), Failure> {
        let precision = match self.precision() {
            PrecisionChoice::Fixed(precision) => precision,
            PrecisionChoice::Auto => {
                output::note("note: the mixture of --precision auto is chosen when it is forged; this is the plan for w8");
                Precision::W8
            }
        };
        // Nothing is written.
        let order = Order { out: Path::new(""), precision, calibration, replace: false, interrupt };
        plan::run(material, &self.targets, order, self.json)
    }

    /// Makes the bundle, gated if the flags or `by_default` say so, and tells what was made.
    pub(crate) fn make(
        &self,
        material: &Material,
        by_default: bool,
        calibration: Option<&Calibration>,
        interrupt: &Interrupt,
    ) -> Result<(), Failure> {
        let started = Instant::now();
        let peak = PeakMemory::watch();
        let auto = matches!(self.precision(), PrecisionChoice::Auto);
        let precision = match self.precision() {
            PrecisionChoice::Fixed(precision) => precision,
            PrecisionChoice::Auto => Precision::W8,
        };
        let order = Order { out: self.out()?, precision, calibration, replace: self.force, interrupt };
        let limited = self.max_flips.is_some() || self.max_kl.is_some();
        let asked = self.prompts.is_some() || self.gate_budget.is_some() || limited || auto;
        let kind = match self.gate {
            Some(Gate::Strict) => Some(GateKind::Strict),
            Some(Gate::Tolerant) => Some(GateKind::Tolerant),
            Some(Gate::None) | None => None,
        };
        // Before anything is written: libraries that are not there are found at once.
        let targets = self.targets.orders()?;
        let (forged, made, parity) = if self.gate == Some(Gate::None) || self.gate.is_none() && !by_default && !asked {
            let (forged, made) = forging::ungated(material, order, &targets)?;
            (forged, made, None)
        } else {
            let prompts = self.prompts.as_deref().map(read_prompts).transpose().map_err(Failure::work)?;
            let (max_flips, max_kl, budget) = (self.max_flips, self.max_kl, self.gate_budget);
            let gate = GateOrder { kind, auto, max_flips, max_kl, prompts, budget, quick: false, reproducible: true };
            let Gated { path, manifest, parity, targets } = forging::gated(material, order, gate, &targets)?;
            (Forged { path, manifest }, targets, Some(parity))
        };
        for MadeTarget { folder, notes, .. } in &made {
            notes.iter().for_each(|note| output::note(&format!("note: {folder}: {note}")));
        }
        let report = Report::new(&forged, &made, parity.as_ref(), started.elapsed().as_secs_f64(), peak.finish())?;
        if self.json {
            output::print_json(&report)?
        } else {
            output::print(&report.tables())?
        }
        rejected(&made)
    }
}

/// Arch folders that failed their gate are a failure, though the bundle is there.
fn rejected(made: &[MadeTarget]) -> Result<(), Failure> {
    let failed = made.iter().filter_map(|target| Some((target, &target.gate.as_ref()?.1))).filter(|(_, gate)| !gate.passed);
    let told: Vec<String> = failed.map(|(target, gate)| format!("{}: {}", target.folder, gate.result)).collect();
    match told.split_first() {
        None => Ok(()),
        Some((first, others)) => Err(Failure::work(format!("a target failed its gate: {first}"))
            .causes(others.iter().cloned())
            .hint("the bundle itself is there and whole; its parity.json in that folder says which stages differ")),
    }
}

impl BundleFlags {
    /// Writes the checkpoint of a synthetic model.
    pub(crate) fn make_checkpoint(&self, config: &serde_json::Value, seed: u64, interrupt: &Interrupt) -> Result<(), Failure> {
        let order = Order { out: self.out()?, precision: Precision::F32, calibration: None, replace: false, interrupt };
        let path = forging::forge(order, |options| write_synthetic_checkpoint(config, seed, options))?;
        match self.json {
            true => output::print_json(&serde_json::json!({ "checkpoint": path })),
            false => output::print(&facts(&[("checkpoint", path.display().to_string())])),
        }
    }
}

fn precision(text: &str) -> Result<PrecisionChoice, String> {
    match text {
        "auto" => Ok(PrecisionChoice::Auto),
        text => text.parse().map(PrecisionChoice::Fixed).map_err(|e: String| e + ", auto"),
    }
}

/// A precision of a comparison.
fn compared(text: &str) -> Result<Precision, String> {
    match text {
        "auto" => Err("auto is a search for a precision; compare with numbers of bits per weight, such as 4.8".into()),
        text => text.parse(),
    }
}

/// A share of tokens: `0.02`, or `2%`.
fn share(text: &str) -> Result<f64, String> {
    let (number, unit) = text.strip_suffix('%').map_or((text, 1.0), |number| (number, 0.01));
    match number.trim().parse::<f64>() {
        Ok(share) if (0.0..=1.0).contains(&(share * unit)) => Ok(share * unit),
        _ => Err(format!("`{text}`: expected a share from 0 to 1, or from 0% to 100%")),
    }
}

fn divergence(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(kl) if kl.is_finite() && kl >= 0.0 => Ok(kl),
        _ => Err(format!("`{text}`: expected a number of nats, 0 or above")),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("`{text}` is no number of seconds"))?;
    match Duration::try_from_secs_f64(seconds) {
        Ok(time) if !time.is_zero() && time <= MAX_BUDGET => Ok(time),
        _ => Err(format!("`{text}`: expected a number of seconds above 0 and up to {}", MAX_BUDGET.as_secs())),
    }
}

/// What was made.
#[derive(Serialize)]
struct Report<'a> {
    bundle: &'a Path,
    model: &'a str,
    family: &'a str,
    precision: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    rounding: Option<&'a Rounding>,
    parameters: u64,
    synthetic: bool,
    files: &'a BTreeMap<BundlePath, FileEntry>,
    bytes: u64,
    encodings: Vec<StoredAs>,
    ignored_tensors: Option<&'a IgnoredTensors>,
    gate: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    parity: Option<&'a GateResult>,
    #[serde(skip_serializing_if = "Option::is_none")]
    choices: Option<&'a Choices>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    targets: Vec<TargetReport>,
    seconds: f64,
    memory: Peak,
}

impl<'a> Report<'a> {
    fn new(forged: &'a Forged, made: &[MadeTarget], parity: Option<&'a Parity>, seconds: f64, memory: Peak) -> Result<Self, Failure> {
        let manifest: &Manifest = &forged.manifest;
        // No way to stop here: the bundle is there, and saying otherwise would be wrong.
        let options = OpenOptions { verify: Verify::Written, ..OpenOptions::default() };
        let bundle = Bundle::open_with(&forged.path, &options)?;
        Ok(Self {
            bundle: &forged.path,
            model: &manifest.model.name,
            family: &manifest.model.family,
            precision: &manifest.precision,
            rounding: manifest.rounding.as_ref(),
            parameters: manifest.model.parameters,
            synthetic: manifest.model.synthetic.is_some(),
            files: &manifest.files,
            bytes: manifest.files.values().map(|file| file.bytes).sum(),
            encodings: stored_as(&bundle),
            ignored_tensors: manifest.ignored_tensors.as_ref(),
            gate: parity.map_or("none", |parity| kind(parity.gate.kind)),
            parity: parity.map(|parity| &parity.gate),
            choices: parity.and_then(|parity| parity.choices.as_ref()),
            targets: made.iter().map(TargetReport::new).collect(),
            seconds,
            memory,
        })
    }

    fn tables(&self) -> String {
        let mut files = Table::new([("file", Align::Left), ("bytes", Align::Right), ("", Align::Right)]);
        for (file, entry) in self.files {
            files.row([file.to_string(), entry.bytes.to_string(), show_bytes(entry.bytes)]);
        }
        files.row(["all".into(), self.bytes.to_string(), show_bytes(self.bytes)]);
        let ignored = match self.ignored_tensors {
            Some(ignored) => format!("{} tensors, {} ({})", ignored.count, show_bytes(ignored.bytes), ignored.prefixes.join(", ")),
            None => "none".into(),
        };
        let made = facts(&[
            ("bundle", self.bundle.display().to_string()),
            ("model", format!("{} ({}), {} parameters", self.model, self.family, show_count(self.parameters))),
            ("rounding", rounding(self.rounding)),
            ("left out", ignored),
            ("gate", self.parity.map_or("none".into(), |gate| format!("passed ({}): {}", self.gate, gate.result))),
            ("measured", self.parity.map_or("nothing".into(), measured)),
            ("choices", self.choices.map_or("as asked".into(), |choices| choices.note.clone())),
            ("time", show_seconds(self.seconds)),
            (
                "memory",
                format!("{} own at the peak, {} of files mapped", show_bytes(self.memory.own_bytes), show_bytes(self.memory.file_bytes)),
            ),
        ]);
        let targets: String = self.targets.iter().map(|target| format!("{}\n", target.line())).collect();
        format!("{}\n{}\n{made}{targets}", files.render(), encodings_table(&self.encodings))
    }
}

fn rounding(rounding: Option<&Rounding>) -> String {
    match rounding {
        None => "none needed".into(),
        Some(Rounding::Plain) => "to the nearest value".into(),
        Some(Rounding::Calibrated(Calibrated { texts, tokens, .. })) => {
            format!("calibrated on {} tokens ({texts})", show_count(*tokens as u64))
        }
    }
}

fn measured(gate: &GateResult) -> String {
    let covered = gate.coverage().map_or(format!("{} prompts", gate.prompts), |covered| covered);
    let incomplete = gate.incomplete().map_or(String::new(), |incomplete| format!(" ({incomplete})"));
    format!(
        "{covered}{incomplete}; mean KL {:.1e}, largest logit error {:.2e}, lowest cosine of a stage {:.6} ({})",
        gate.mean_kl, gate.max_logit_error, gate.worst_cosine, gate.worst_stage
    )
}

/// Bytes by encoding, for people.
pub(crate) fn encodings_table(encodings: &[StoredAs]) -> String {
    let header =
        [("stored as", Align::Left), ("weights", Align::Right), ("numbers", Align::Right), ("bytes", Align::Right), ("", Align::Right)];
    let mut table = Table::new(header);
    for stored in encodings {
        let StoredAs { encoding, weights, numbers, bytes } = stored;
        table.row([encoding.clone(), weights.to_string(), show_count(*numbers), bytes.to_string(), show_bytes(*bytes)]);
    }
    table.render()
}

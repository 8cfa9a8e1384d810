//! `qhx inspect`: what a model is, what it costs, and where it would run.

use super::{forge::encodings_table, placement_plan, plan::per_token};
use crate::{
    cost::{StoredAs, active_parameters, flops, stored_as},
    failure::Failure,
    flags::ExecutionFlags,
    interrupt::Interrupt,
    load::load_model,
    open::open_model,
    output,
    table::{Align, Table, facts},
    units::{show_bytes, show_count},
};
use clap::Args;
use qhx_bundle::{
    Bundle, BundlePath, files,
    manifest::{ChatMode, DraftEntry, FileEntry, IgnoredTensors, Manifest, ModelFacts, SuggestedSampling, TEXT_PROGRAM},
    media::{AudioFrontEnd, ImageFrontEnd, Media, Patches, Resize},
    parity::GateResult,
};
use qhx_forge::plan::form_of;
use qhx_ir::{Checked, OpKind};
use qhx_npu::{ContextFile, PreparedPlan};
use qhx_runtime::{
    LoadOptions, LoadPlan,
    auto::AutoChoice,
    memory::{MemoryEstimate, state_bytes, tensor_bytes, weight_bytes, weight_bytes_per_token},
    placement::{Fallback, Phase, PlacedStage, place_tower, tower_stage},
    split::SlotCopy,
    verify::{choices, verdict},
};
use serde::Serialize;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

/// Show a model's size, precision, cost per token, and the device of each stage
#[derive(Args)]
#[command(after_help = "Example:\n  qhx inspect smol --context 2048")]
pub(crate) struct Inspect {
    /// A bundle, a Hugging Face folder or a GGUF file (forged once into the user's cache)
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    #[command(flatten)]
    execution: ExecutionFlags,
    /// Show which ways there are to place the model on GPU and CPU, what was predicted and measured of each, and draw the one that is chosen; measures if that was not done yet
    #[arg(long)]
    plan: bool,
    /// Write what runs where as a file for --placement
    #[arg(long, value_name = "FILE.toml")]
    save_placement: Option<PathBuf>,
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report<'a> {
    bundle: &'a str,
    fingerprint: String,
    model: &'a ModelFacts,
    precision: &'a str,
    chat: ChatMode,
    /// What the checkpoint's makers suggest; greedy decoding is the default all the same.
    #[serde(skip_serializing_if = "Option::is_none")]
    suggested_sampling: Option<&'a SuggestedSampling>,
    gated: bool,
    /// The gate's verdict: what the precision costs.
    #[serde(skip_serializing_if = "Option::is_none")]
    verdict: Option<String>,
    /// That the gate measured less than its whole suite, and why.
    #[serde(skip_serializing_if = "Option::is_none")]
    incomplete: Option<String>,
    /// How the precisions of stages were chosen.
    #[serde(skip_serializing_if = "Option::is_none")]
    choices: Option<String>,
    /// How many products take their input in each form: `f32`, `i8_row`, `i8_block32` …
    activations: BTreeMap<String, usize>,
    active_parameters: u64,
    per_token: PerToken,
    state: StateSize,
    memory: MemoryEstimate,
    encodings: Vec<StoredAs>,
    stages: Vec<StageReport>,
    fallbacks: Vec<Fallback>,
    /// What `auto` chose, where there is a GPU to choose.
    #[serde(skip_serializing_if = "Option::is_none")]
    auto: Option<AutoChoice>,
    copies: Vec<SlotCopy>,
    media: &'a Media,
    towers: Vec<TowerReport>,
    /// The program with which the model drafts for itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    draft: Option<DraftReport<'a>>,
    ignored_tensors: Option<&'a IgnoredTensors>,
    /// What was prepared for the NPU, by program.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    npu: BTreeMap<String, PreparedPlan>,
    files: &'a BTreeMap<BundlePath, FileEntry>,
    bytes: u64,
}

/// What computing one token takes.
#[derive(Serialize)]
struct PerToken {
    weight_bytes: u64,
    /// Without attention.
    flops: u64,
    /// Of attention, with `context` rows to look at.
    attention_flops: u64,
    context: usize,
}

/// What a session holds.
#[derive(Serialize)]
struct StateSize {
    context: usize,
    bytes: u64,
    /// What each further token adds.
    bytes_per_token: u64,
}

#[derive(Serialize)]
struct StageReport {
    stage: String,
    device: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    phase: Option<Phase>,
    reason: String,
    weight_bytes: u64,
    /// For one token, attention with the context's rows included.
    flops: u64,
}

/// A program that drafts.
#[derive(Serialize)]
struct DraftReport<'a> {
    program: &'a str,
    /// The stage of the text program that feeds it.
    stage: &'a str,
    /// Without those that it shares with other programs.
    parameters: u64,
    /// Likewise.
    weight_bytes: u64,
}

impl<'a> DraftReport<'a> {
    fn of(bundle: &'a Bundle) -> Option<Self> {
        let DraftEntry { program, stage } = bundle.manifest().draft.as_ref()?;
        let others = bundle.programs().iter().filter(|(name, _)| *name != program);
        let shared: BTreeSet<_> = others.flat_map(|(_, other)| other.weights.keys()).collect();
        let own: Vec<_> = bundle.program(program)?.weights.iter().filter(|(name, _)| !shared.contains(name)).map(|(_, w)| w).collect();
        Some(Self {
            program,
            stage,
            parameters: own.iter().map(|weight| weight.shape.iter().map(|&d| d as u64).product::<u64>()).sum(),
            weight_bytes: own.iter().map(|weight| tensor_bytes(weight.encoding, &weight.shape)).sum(),
        })
    }
}

/// A program that encodes media.
#[derive(Serialize)]
struct TowerReport {
    program: String,
    parameters: u64,
    weight_bytes: u64,
    stages: Vec<TowerStage>,
    fallbacks: Vec<Fallback>,
}

#[derive(Serialize)]
struct TowerStage {
    stage: String,
    device: String,
    reason: String,
    weight_bytes: u64,
}

impl Inspect {
    pub(crate) fn run(&self, interrupt: &Interrupt) -> Result<(), Failure> {
        let options = self.execution.load_options()?;
        let bundle = open_model(Some(&self.model), options.device, interrupt)?.bundle;
        let options = options.of_bundle(&bundle)?;
        let manifest = bundle.manifest();
        let program = bundle.program(TEXT_PROGRAM).ok_or_else(|| Failure::work("the bundle has no text program"))?;
        if let Some(rules) = &options.placement {
            rules.check(bundle.programs().values())?;
        }
        if self.plan && LoadPlan::of(&bundle, &options)?.choice.is_some_and(|choice| choice.way.is_none()) {
            // Loading measures, and remembers.
            load_model(&bundle, &options)?;
        }
        let plan = LoadPlan::of(&bundle, &options)?;
        if let Some(path) = &self.save_placement {
            let rules = placement_plan::rules(&plan, options.placement.as_ref());
            files::write(path, |out| out.write_all(rules.to_toml().as_bytes()))?;
        }
        if self.plan && !self.json {
            return output::print(&placement_plan::tables(program, &plan));
        }
        let towers = towers(&bundle, &options, &plan)?;
        let report = Report { npu: prepared(&bundle)?, ..Report::new(&bundle, manifest, program, plan, towers) };
        if self.json { output::print_json(&report) } else { output::print(&report.tables()) }
    }
}

/// In which form products of a program take their input, and how many do.
fn activations(program: &Checked) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for op in program.ops.iter().filter(|op| matches!(op.op, OpKind::Linear { .. } | OpKind::Experts { .. })) {
        *counts.entry(form_of(&op.op).to_string()).or_default() += 1;
    }
    counts
}

impl<'a> Report<'a> {
    fn new(bundle: &'a Bundle, manifest: &'a Manifest, program: &Checked, plan: LoadPlan, towers: Vec<TowerReport>) -> Self {
        let context = plan.memory.context;
        let is_attention = |op: &&qhx_ir::Op| matches!(op.op, OpKind::Attend { .. });
        let attention_flops = program.ops.iter().filter(is_attention).map(|op| flops(program, op, context)).sum::<u64>();
        let flops = program.ops.iter().map(|op| flops(program, op, context)).sum::<u64>() - attention_flops;
        let gate = verdict(bundle).ok().flatten();
        Self {
            bundle: bundle.place(),
            fingerprint: bundle.fingerprint().to_string(),
            model: &manifest.model,
            precision: &manifest.precision,
            chat: manifest.chat.mode,
            suggested_sampling: manifest.generation.as_ref(),
            gated: manifest.parity.is_some(),
            incomplete: gate.as_ref().and_then(GateResult::incomplete),
            choices: choices(bundle).ok().flatten(),
            verdict: gate.map(|gate| gate.result),
            activations: activations(program),
            active_parameters: active_parameters(program),
            per_token: PerToken { weight_bytes: weight_bytes_per_token(program), flops, attention_flops, context },
            state: StateSize {
                context,
                bytes: state_bytes(program, context),
                bytes_per_token: state_bytes(program, 1).saturating_sub(state_bytes(program, 0)),
            },
            memory: plan.memory,
            encodings: stored_as(bundle),
            stages: stages(program, &plan.placement.stages, context),
            fallbacks: plan.placement.fallbacks,
            auto: plan.choice,
            copies: plan.placement.copies,
            media: &manifest.media,
            towers,
            draft: DraftReport::of(bundle),
            npu: BTreeMap::new(),
            ignored_tensors: manifest.ignored_tensors.as_ref(),
            files: &manifest.files,
            bytes: manifest.files.values().map(|file| file.bytes).sum(),
        }
    }

    /// What the gate found, how much of its suite stands behind that, and what was chosen by it.
    fn parity(&self) -> String {
        let Some(verdict) = &self.verdict else { return "not gated".to_owned() };
        let incomplete = self.incomplete.as_ref().map_or(String::new(), |incomplete| format!(" ({incomplete})"));
        let choices = self.choices.as_ref().map_or(String::new(), |choices| format!("; {choices}"));
        format!("{verdict}{incomplete}{choices}")
    }

    fn tables(&self) -> String {
        let Report { model, per_token, state, memory, .. } = self;
        let mut kind =
            format!("{} ({}), made from {}", model.family, model.architecture.as_deref().unwrap_or("no architecture named"), source(model));
        if let Some(synthetic) = model.synthetic {
            kind += &format!(": synthetic weights, seed {}", synthetic.seed);
        }
        let active = if self.active_parameters < model.parameters {
            format!(", {} active per token", show_count(self.active_parameters))
        } else {
            String::new()
        };
        let ignored = match self.ignored_tensors {
            Some(ignored) => format!("{} tensors, {} ({})", ignored.count, show_bytes(ignored.bytes), ignored.prefixes.join(", ")),
            None => "nothing".into(),
        };
        let drafts = match &self.draft {
            Some(DraftReport { program, parameters, weight_bytes, .. }) => format!(
                "multi-token prediction by program `{program}`, {} parameters of its own, {}",
                show_count(*parameters),
                show_bytes(*weight_bytes)
            ),
            None => "no program of its own".into(),
        };
        let about = facts(&[
            ("bundle", self.bundle.to_owned()),
            ("model", model.name.clone()),
            ("kind", kind),
            ("precision", self.precision.to_owned()),
            ("parameters", format!("{}{active}", show_count(model.parameters))),
            ("vocabulary", format!("{}, hidden size {}", model.vocab_size, model.hidden_size)),
            ("context", format!("up to {} tokens", model.context_length)),
            ("chat", if self.chat == ChatMode::Template { "by its template".into() } else { "none, it is a completion model".to_owned() }),
            ("suggested sampling", self.suggested_sampling.map_or_else(|| "none".to_owned(), sampling)),
            (
                "activations",
                self.activations.iter().map(|(form, count)| format!("{form} for {count} products")).collect::<Vec<_>>().join(", "),
            ),
            ("parity", self.parity()),
            ("images", self.media.image.as_ref().map_or_else(|| "none".to_owned(), images)),
            ("sound", self.media.audio.as_ref().map_or_else(|| "none".to_owned(), sound)),
            ("drafts", drafts),
            ("left out", ignored),
        ]);
        let context = per_token.context;
        let auto = self.auto.iter().map(|choice| ("auto", format!("{} ({})", choice.device, choice.reason)));
        let cost: Vec<_> = [
            ("one token reads", format!("{} of weights", show_bytes(per_token.weight_bytes))),
            ("one token computes", format!("{} FLOPs", show_count(per_token.flops))),
            ("its attention", format!("{} FLOPs over {context} rows", show_count(per_token.attention_flops))),
            (
                "a session holds",
                format!("{} for a context of {context}, {} per token", show_bytes(state.bytes), show_bytes(state.bytes_per_token)),
            ),
            ("memory", memory.to_string()),
            ("", if memory.fits() { "it fits".into() } else { "it does not fit: qhx would refuse to load it".to_owned() }),
        ]
        .into_iter()
        .chain(auto)
        .collect();
        let cost = facts(&cost);
        let mut files = Table::new([("file", Align::Left), ("bytes", Align::Right), ("", Align::Right)]);
        for (file, entry) in self.files {
            files.row([file.to_string(), entry.bytes.to_string(), show_bytes(entry.bytes)]);
        }
        files.row(["all".into(), self.bytes.to_string(), show_bytes(self.bytes)]);
        let fallbacks: String = self.fallbacks.iter().map(|f| format!("{} does not support {}: {}\n", f.from, f.stage, f.reason)).collect();
        let mut parts = vec![about, cost, encodings_table(&self.encodings), files.render(), stages_table(&self.stages) + &fallbacks];
        if !self.copies.is_empty() {
            parts.push(copies_table(&self.copies));
        }
        if !self.towers.is_empty() {
            parts.push(towers_table(&self.towers));
        }
        if !self.npu.is_empty() {
            parts.push(contexts_table(&self.npu));
        }
        parts.join("\n")
    }
}

/// The flags that follow the suggestion.
fn sampling(suggested: &SuggestedSampling) -> String {
    let SuggestedSampling { temperature, top_k, top_p, min_p, repetition_penalty } = suggested;
    let flag = |name: &str, value: Option<String>| value.map(|value| format!("--{name} {value}"));
    let number = |value: &Option<f64>| value.map(|value| value.to_string());
    let flags = [
        flag("temperature", number(temperature)),
        flag("top-k", top_k.map(|k| k.to_string())),
        flag("top-p", number(top_p)),
        flag("min-p", number(min_p)),
        flag("repetition-penalty", number(repetition_penalty)),
    ];
    flags.into_iter().flatten().collect::<Vec<_>>().join(" ")
}

fn source(model: &ModelFacts) -> &'static str {
    match model.source_format {
        qhx_bundle::manifest::SourceFormat::Safetensors => "safetensors",
        qhx_bundle::manifest::SourceFormat::Gguf => "a GGUF file",
        qhx_bundle::manifest::SourceFormat::Config => "a configuration",
    }
}

fn stages(program: &Checked, placed: &[PlacedStage], context: usize) -> Vec<StageReport> {
    let report = |stage: &PlacedStage| {
        let place = program.stage_place(&stage.stage);
        let ops = place.map_or(&[][..], |place| program.ops_of_stage(place)).iter().map(|&op| &program.ops[op]);
        StageReport {
            stage: stage.stage.clone(),
            device: stage.device.clone(),
            phase: stage.phase,
            reason: stage.reason.clone(),
            weight_bytes: place.map_or(0, |place| stage_bytes(program, place)),
            flops: ops.map(|op| flops(program, op, context)).sum(),
        }
    };
    placed.iter().map(report).collect()
}

/// The programs that encode media, and where they would run.
fn towers(bundle: &Bundle, options: &LoadOptions, plan: &LoadPlan) -> Result<Vec<TowerReport>, Failure> {
    let media = &bundle.manifest().media;
    let names = media.image.iter().map(|i| &i.program).chain(media.audio.iter().map(|a| &a.program));
    // Towers run where the text program does, unless a placement says more.
    let candidates = if plan.choice.is_some() { vec![plan.device.clone()] } else { options.candidates()? };
    let report = |program: &Checked| {
        let (_, placement) = place_tower(program, options.device, options.placement.as_ref(), &candidates)?;
        let places = program.stages.iter().enumerate().map(|(place, stage)| (tower_stage(program, &stage.name), place));
        let places: BTreeMap<String, usize> = places.collect();
        let stage = |placed: PlacedStage| TowerStage {
            weight_bytes: places.get(&placed.stage).map_or(0, |&place| stage_bytes(program, place)),
            stage: placed.stage,
            device: placed.device,
            reason: placed.reason,
        };
        Ok(TowerReport {
            program: program.name.to_string(),
            parameters: program.weights.values().map(|w| w.shape.iter().map(|&d| d as u64).product::<u64>()).sum(),
            weight_bytes: weight_bytes(program),
            stages: placement.stages.into_iter().map(stage).collect(),
            fallbacks: placement.fallbacks,
        })
    };
    names.filter_map(|name| bundle.program(name)).map(report).collect()
}

/// What was prepared for the NPU: the plans beside the manifest.
fn prepared(bundle: &Bundle) -> Result<BTreeMap<String, PreparedPlan>, Failure> {
    let (Some(plan), Some(folder)) = (&bundle.manifest().plan, bundle.folder()) else { return Ok(BTreeMap::new()) };
    let mut all = BTreeMap::new();
    for file in plan.programs.values().flat_map(|program| &program.graphs) {
        let plan = PreparedPlan::read_file(&folder.join(file.to_relative())).map_err(qhx_runtime::Error::from)?;
        all.insert(file.as_str().trim_end_matches(".npu.json").to_owned(), plan);
    }
    Ok(all)
}

/// Context binaries, and what a token takes of them.
fn contexts_table(plans: &BTreeMap<String, PreparedPlan>) -> String {
    let columns =
        [("context", Align::Left), ("stages", Align::Left), ("layers", Align::Right), ("graphs", Align::Right), ("bytes", Align::Right)];
    let mut table = Table::new(columns);
    let mut files: BTreeMap<&str, (&ContextFile, BTreeSet<&str>)> = BTreeMap::new();
    for context in plans.values().flat_map(|plan| &plan.contexts) {
        // Pieces of one program share contexts.
        let (_, graphs) = files.entry(&context.file).or_insert((context, BTreeSet::new()));
        graphs.extend(context.graphs.iter().map(String::as_str));
    }
    for (ContextFile { file, stages: [first, last], layers, bytes, .. }, graphs) in files.into_values() {
        let stages = if first == last { first.clone() } else { format!("{first} to {last}") };
        table.row([file.clone(), stages, layers.to_string(), graphs.len().to_string(), show_bytes(*bytes)]);
    }
    let token = plans.values().filter_map(|plan| plan.per_token).reduce(|all, piece| all + piece);
    let token: Vec<(&str, String)> = token.iter().flat_map(per_token).collect();
    let notes: BTreeSet<&String> = plans.values().flat_map(|plan| &plan.notes).collect();
    let notes: String = notes.into_iter().map(|note| format!("note: {note}\n")).collect();
    format!("{}\n{}{notes}", table.render(), facts(&token))
}

/// Stored bytes of the weights that the stage at a place uses.
fn stage_bytes(program: &Checked, stage: usize) -> u64 {
    let weights: BTreeSet<_> = program.ops_of_stage(stage).iter().flat_map(|&op| program.ops[op].op.weights()).collect();
    weights.iter().filter_map(|&name| program.weights.get(name)).map(|w| tensor_bytes(w.encoding, &w.shape)).sum()
}

/// What becomes of an image.
fn images(front_end: &ImageFrontEnd) -> String {
    let Patches { size, block, .. } = front_end.patches;
    let rule = match front_end.resize {
        Resize::Area { min_pixels, max_pixels, .. } => format!("scaled to {} to {} pixels", show_count(min_pixels), show_count(max_pixels)),
        Resize::Budget { max_soft_rows } => format!("scaled to at most {max_soft_rows} tokens"),
        Resize::Fixed { height, width } => format!("scaled to {height} x {width} pixels"),
    };
    format!("program `{}`: {rule}, a token for {side} x {side} pixels", front_end.program, side = size * block)
}

/// What becomes of a sound.
fn sound(front_end: &AudioFrontEnd) -> String {
    let rate = f64::from(front_end.sampling_rate);
    let (seconds, hop) = (front_end.max_samples as f64 / rate, front_end.hop_length as f64 / rate * 1e3);
    let program = &front_end.program;
    format!("program `{program}`: {rate} Hz, up to {seconds:.0} s, {} mel bins every {hop:.0} ms", front_end.bins)
}

fn towers_table(towers: &[TowerReport]) -> String {
    let mut table = Table::new([
        ("tower stage", Align::Left),
        ("times", Align::Right),
        ("weights", Align::Right),
        ("device", Align::Left),
        ("why", Align::Left),
    ]);
    for tower in towers {
        let key = |stage: &TowerStage| [numberless(&stage.stage), stage.device.clone(), stage.reason.clone()];
        for ([name, device, reason], list) in grouped(&tower.stages, key) {
            let bytes = list.iter().map(|stage| stage.weight_bytes).sum();
            table.row([name, list.len().to_string(), show_bytes(bytes), device, reason]);
        }
        let all = format!("{} in all, {} parameters", tower.program, show_count(tower.parameters));
        table.row([all, String::new(), show_bytes(tower.weight_bytes), String::new(), String::new()]);
    }
    let refused = towers.iter().flat_map(|tower| &tower.fallbacks);
    table.render() + &refused.map(|f| format!("{} does not support {}: {}\n", f.from, f.stage, f.reason)).collect::<String>()
}

/// `layers.7.attn` as `layers.N.attn`.
fn numberless(stage: &str) -> String {
    stage.split('.').map(|part| if part.parse::<u32>().is_ok() { "N" } else { part }).collect::<Vec<_>>().join(".")
}

/// Items that have one key, in the order in which the keys come first.
fn grouped<T, K: Clone + Ord>(items: &[T], key: impl Fn(&T) -> K) -> Vec<(K, Vec<&T>)> {
    let mut groups: Vec<(K, Vec<&T>)> = Vec::new();
    let mut places: BTreeMap<K, usize> = BTreeMap::new();
    for item in items {
        let key = key(item);
        let place = *places.entry(key.clone()).or_insert(groups.len());
        if place == groups.len() {
            groups.push((key, Vec::new()));
        }
        groups[place].1.push(item);
    }
    groups
}

/// The stages, those that differ only in their number together.
fn stages_table(stages: &[StageReport]) -> String {
    let key = |stage: &StageReport| (numberless(&stage.stage), stage.device.clone(), stage.phase, stage.reason.clone());
    let mut table = Table::new([
        ("stage", Align::Left),
        ("times", Align::Right),
        ("weights", Align::Right),
        ("FLOPs per token", Align::Right),
        ("device", Align::Left),
        ("why", Align::Left),
    ]);
    for ((name, device, phase, reason), list) in grouped(stages, key) {
        let bytes = list.iter().map(|stage| stage.weight_bytes).sum();
        let flops = list.iter().map(|stage| stage.flops).sum();
        let device = match phase {
            None => device,
            Some(Phase::Prefill) => format!("{device} (prefill)"),
            Some(Phase::Decode) => format!("{device} (decode)"),
        };
        table.row([name, list.len().to_string(), show_bytes(bytes), show_count(flops), device, reason]);
    }
    table.render()
}

/// Slots that are held twice, those that differ only in their number together.
fn copies_table(copies: &[SlotCopy]) -> String {
    let key = |copy: &SlotCopy| [numberless(&copy.slot), copy.from.clone(), copy.to.clone(), copy.reason.clone()];
    let columns = [("slot", Align::Left), ("times", Align::Right), ("bytes", Align::Right), ("copied", Align::Left), ("when", Align::Left)];
    let mut table = Table::new(columns);
    for ([slot, from, to, reason], list) in grouped(copies, key) {
        let bytes = list.iter().map(|copy| copy.bytes).sum();
        table.row([slot, list.len().to_string(), show_bytes(bytes), format!("from {from} to {to}"), reason]);
    }
    table.render()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_that_differ_only_in_number_stand_together() {
        let stage = |name: &str, device: &str| StageReport {
            stage: name.into(),
            device: device.into(),
            phase: None,
            reason: "because".into(),
            weight_bytes: 1024,
            flops: 10,
        };
        let stages = [stage("embed", "cpu"), stage("layers.0.attn", "cpu"), stage("layers.1.attn", "cpu"), stage("layers.2.attn", "gpu")];
        let text = stages_table(&stages);
        assert!(text.contains("| layers.N.attn |     2 | 2.0 KiB |              20 | cpu    | because |"), "{text}");
        assert_eq!(text.lines().count(), 5, "{text}");
    }
}

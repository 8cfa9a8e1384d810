//! `qhx forge`: a checkpoint becomes a bundle.

use crate::{
    cost::{StoredAs, stored_as},
    failure::Failure,
    forging::{self, Order},
    interrupt::Interrupt,
    model_ref::{ModelKind, kind_of},
    output::{self, show_count, show_seconds},
    table::{Align, Table, facts},
};
use clap::{Args, ValueEnum};
use qhx_bundle::{
    Bundle, BundlePath, OpenOptions, Verify,
    manifest::{FileEntry, IgnoredTensors, Manifest},
};
use qhx_forge::{Forged, Precision, forge_checkpoint};
use qhx_runtime::memory::show_bytes;
use serde::Serialize;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Instant,
};

/// Make a bundle from a Hugging Face folder or a GGUF file
///
/// The bundle appears under its name only when it is complete; a failure or Ctrl-C leaves nothing behind.
#[derive(Args)]
#[command(after_help = "Example:\n  qhx forge ./SmolLM2-135M-Instruct --out smol --precision w8")]
pub(crate) struct Forge {
    /// The checkpoint: a Hugging Face folder or a GGUF file
    #[arg(value_name = "SRC")]
    source: PathBuf,
    #[command(flatten)]
    bundle: BundleFlags,
    /// How the bundle is held to the checkpoint
    #[arg(long, value_enum)]
    gate: Option<Gate>,
}

/// What `forge` and `synth` have in common.
#[derive(Args)]
pub(crate) struct BundleFlags {
    /// The bundle's folder; its last part is the model's name
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// How weights are stored: native (as the checkpoint has them), f32, f16, w8, w8-f16head, moe-i8 or w4
    #[arg(long, value_name = "P", default_value = "native", value_parser = precision)]
    precision: Precision,
    /// What it is made for, separated by commas
    #[arg(long, value_name = "T", default_value = "cpu", value_delimiter = ',', value_parser = target)]
    target: Vec<String>,
    /// Replace a bundle that is there already
    #[arg(long)]
    force: bool,
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Gate {
    Strict,
    Tolerant,
    None,
}

impl Forge {
    pub(crate) fn run(&self, interrupt: &Interrupt) -> Result<(), Failure> {
        if kind_of(&self.source) == Some(ModelKind::Bundle) {
            return Err(Failure::work(format!("{} is a bundle already", self.source.display()))
                .hint("forge from the checkpoint that it was made from"));
        }
        match self.gate {
            Some(Gate::Strict | Gate::Tolerant) => {
                return Err(Failure::usage("--gate: this build of qhx has no gates yet, so it cannot hold the bundle to one")
                    .hint("leave it out, or say --gate none"));
            }
            Some(Gate::None) => {}
            None => output::note("note: the bundle is not gated: this build of qhx has no gates yet"),
        }
        self.bundle.make(|order| forging::forge(order, interrupt, |options| forge_checkpoint(&self.source, options)))
    }
}

impl BundleFlags {
    /// Makes the bundle and tells what was made.
    pub(crate) fn make(&self, work: impl FnOnce(Order<'_>) -> Result<Forged, Failure>) -> Result<(), Failure> {
        let started = Instant::now();
        let forged = work(Order { out: &self.out, precision: self.precision, replace: self.force })?;
        let report = Report::new(&forged, started.elapsed().as_secs_f64())?;
        if self.json { output::print_json(&report) } else { output::print(&report.tables()) }
    }
}

fn precision(text: &str) -> Result<Precision, String> {
    match text {
        "auto" => Err("choosing the precision by the gates is not available yet; name one".into()),
        text => text.parse(),
    }
}

fn target(text: &str) -> Result<String, String> {
    match text {
        "cpu" => Ok(text.into()),
        "gpu" | "v79" | "v81" => Err(format!("this build of qhx cannot prepare bundles for `{text}` yet; it prepares for cpu")),
        _ => Err(format!("there is no target `{text}`; expected cpu, gpu, v79 or v81")),
    }
}

/// What was made.
#[derive(Serialize)]
struct Report<'a> {
    bundle: &'a Path,
    model: &'a str,
    family: &'a str,
    precision: &'a str,
    parameters: u64,
    synthetic: bool,
    files: &'a BTreeMap<BundlePath, FileEntry>,
    bytes: u64,
    encodings: Vec<StoredAs>,
    ignored_tensors: Option<&'a IgnoredTensors>,
    gate: &'static str,
    seconds: f64,
}

impl<'a> Report<'a> {
    fn new(forged: &'a Forged, seconds: f64) -> Result<Self, Failure> {
        let manifest: &Manifest = &forged.manifest;
        // No way to stop here: the bundle is there, and saying otherwise would be wrong.
        let options = OpenOptions { verify: Verify::Written, ..OpenOptions::default() };
        let bundle = Bundle::open_with(&forged.path, &options)?;
        Ok(Self {
            bundle: &forged.path,
            model: &manifest.model.name,
            family: &manifest.model.family,
            precision: &manifest.precision,
            parameters: manifest.model.parameters,
            synthetic: manifest.model.synthetic.is_some(),
            files: &manifest.files,
            bytes: manifest.files.values().map(|file| file.bytes).sum(),
            encodings: stored_as(&bundle),
            ignored_tensors: manifest.ignored_tensors.as_ref(),
            gate: "none",
            seconds,
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
        let made = facts([
            ("bundle", self.bundle.display().to_string()),
            ("model", format!("{} ({}), {} parameters", self.model, self.family, show_count(self.parameters))),
            ("left out", ignored),
            ("time", show_seconds(self.seconds)),
        ]);
        format!("{}\n{}\n{made}", files.render(), encodings_table(&self.encodings))
    }
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

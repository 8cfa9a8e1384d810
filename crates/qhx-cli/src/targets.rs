//! `--target` and what goes with it: which arch folders a bundle gets, and for which sizes.

use crate::{
    environment,
    failure::Failure,
    flags::{MAX_TOKENS, count},
    hints::TARGET_FLAGS,
    units::show_bytes,
};
use clap::{Args, ValueEnum};
use qhx_bundle::target::{KvForm, MadeFor};
use qhx_forge::{
    MadeTarget, TargetOrder, TargetPlacement,
    target::{DEFAULT_CONTEXT, DEFAULT_PREFILL, NO_IMAGES, NO_SOUND, session_length},
};
use qhx_npu::Arch;
use qhx_runtime::{
    DeviceChoice,
    placement::Rules,
    registry::{NpuLibraries, NpuSettings, candidates_for},
};
use serde::Serialize;
use std::path::PathBuf;

/// The most sizes of prefill graphs: each is compiled, stored and loaded.
const MAX_PREFILL_SIZES: usize = 16;
/// The longest sound in one piece: a day.
const MAX_AUDIO_SECONDS: f64 = 86_400.0;

/// What a bundle is made for.
#[derive(Args)]
pub(crate) struct TargetFlags {
    /// Targets, separated by commas: cpu (always included), and v79, v81: folders with context binaries for that generation of the Hexagon NPU
    #[arg(long, value_name = "T", default_value = "cpu", value_delimiter = ',', value_parser = target)]
    target: Vec<String>,
    /// Where the context binaries will be loaded: phones take graphs that share their weights, the emulator does not
    #[arg(long = "for", value_enum, value_name = "WHERE", help_heading = "NPU targets")]
    made_for: Option<Place>,
    /// Context length of an NPU target in tokens [default: the model's own limit, at most 1024]
    #[arg(long, value_name = "N", value_parser = count(MAX_TOKENS), help_heading = "NPU targets")]
    context: Option<usize>,
    /// Rows of the prefill graphs, separated by commas; none: prefill runs row by row [default: 128]
    #[arg(long, value_name = "N,M", help_heading = "NPU targets")]
    prefill: Option<String>,
    /// How the KV cache is kept
    #[arg(long, value_enum, value_name = "KV", help_heading = "NPU targets")]
    kv: Option<Kv>,
    /// The size to which pictures are scaled [default: the size that the model was trained on, where the checkpoint says one; else a square that the
    /// model's own rule allows: of at most 512x512, or for a budget of rows the largest within it]
    #[arg(long, value_name = "HxW", value_parser = image_size, help_heading = "NPU targets")]
    image_size: Option<ImageSize>,
    /// Longest sound in seconds [default: the model's own limit]
    #[arg(long, value_name = "S", value_parser = audio_seconds, help_heading = "NPU targets")]
    audio_seconds: Option<f64>,
    /// Make all graphs that were asked for, though they may exhaust the DSP's heap, which restarts the phone; otherwise only the decode graphs are made
    #[arg(long, help_heading = "NPU targets")]
    allow_risky: bool,
    /// Compiler effort, 1 to 3: lower compiles far faster, towers above all, and may give slower graphs [default: 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=3), help_heading = "NPU targets")]
    optimize: Option<u32>,
    /// Stages of an NPU target that run elsewhere, as a TOML file (see `qhx generate --help`); recorded in its manifests, with the weights for it in its folder
    #[arg(long, value_name = "FILE.toml", help_heading = "NPU targets")]
    placement: Option<PathBuf>,
    /// Folder with QNN's libraries [default: QHX_QNN_DIR, then the system's library folders]
    #[arg(long, value_name = "DIR", help_heading = "NPU targets")]
    qnn_dir: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Place {
    /// Phones: the graphs of a part share one copy of their weights
    Phone,
    /// QNN's emulator on a PC, and phones: every graph has its own copy of its weights
    Emulator,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kv {
    /// All rows: a session ends when the context is full
    Full,
    /// The latest rows: a session may be longer than the context, and attention sees only the latest rows
    Ring,
}

/// Height and width.
#[derive(Clone, Copy, Debug, PartialEq)]
struct ImageSize([usize; 2]);

impl TargetFlags {
    /// What can be wrong with the flags alone.
    pub(crate) fn check(&self, is_plan: bool) -> Result<(), Failure> {
        let flags = [
            ("--for", self.made_for.is_some()),
            ("--context", self.context.is_some()),
            ("--prefill", self.prefill.is_some()),
            ("--kv", self.kv.is_some()),
            ("--image-size", self.image_size.is_some()),
            ("--audio-seconds", self.audio_seconds.is_some()),
            ("--allow-risky", self.allow_risky),
            ("--optimize", self.optimize.is_some()),
            ("--placement", self.placement.is_some()),
            ("--qnn-dir", self.qnn_dir.is_some()),
        ];
        // A plan is for all generations where none is named.
        if let (false, Some((flag, _))) = (self.has_npu() || is_plan, flags.iter().find(|(_, given)| *given)) {
            return Err(Failure::usage(format!("{flag} is for targets with static shapes")).hint("add --target v79, v81 or both"));
        }
        if is_plan && self.placement.is_some() {
            let whole = Failure::usage("--plan lays out the whole model on the NPU, --placement moves parts of it elsewhere");
            return Err(whole.hint("leave out --placement: with it there is less to lay out"));
        }
        self.prefill_rows().map(drop)
    }

    /// Whether there is an arch folder to make.
    pub(crate) fn has_npu(&self) -> bool {
        self.target.iter().any(|target| is_arch(target))
    }

    /// The generations that are asked for; all where none is.
    pub(crate) fn arches(&self) -> Result<Vec<Arch>, Failure> {
        let named: Result<Vec<Arch>, _> = self.named_arches().into_iter().map(|arch| arch.parse()).collect();
        let named = named.map_err(Failure::usage)?;
        Ok(if named.is_empty() { Arch::ALL.to_vec() } else { named })
    }

    /// The arch folders to make, each once.
    pub(crate) fn orders(&self) -> Result<Vec<TargetOrder>, Failure> {
        let prefill = self.prefill_rows()?;
        let made_for = self.made_for();
        let rules = self.placement.as_deref().map(Rules::read).transpose()?;
        let order = |arch: &String| {
            let settings = NpuSettings { arch: Some(arch.clone()), ..self.settings()? };
            let devices = candidates_for(DeviceChoice::Npu, rules.as_ref(), environment::cpu()?, &settings, &environment::gpu())?;
            let own = devices.iter().find(|device| device.name() == DeviceChoice::Npu.name()).cloned();
            let nothing =
                || Failure::usage("--placement leaves nothing to the NPU").hint("name `npu` for something, or leave out --target");
            Ok(TargetOrder {
                device: own.ok_or_else(nothing)?,
                placement: rules.clone().map(|rules| TargetPlacement { rules, devices }),
                made_for,
                context: self.context,
                prefill: prefill.clone(),
                kv: if self.kv == Some(Kv::Ring) { KvForm::Ring } else { KvForm::Full },
                image_size: self.image_size.map(|size| size.0),
                audio_seconds: self.audio_seconds,
            })
        };
        self.named_arches().into_iter().map(order).collect()
    }

    /// The names of the generations, each once.
    fn named_arches(&self) -> Vec<&String> {
        let mut arches: Vec<&String> = self.target.iter().filter(|target| is_arch(target)).collect();
        arches.sort();
        arches.dedup();
        arches
    }

    /// Refuses sizes of media that a model with these programs does not take.
    pub(crate) fn check_media(&self, has: impl Fn(&str) -> bool) -> Result<(), Failure> {
        if self.image_size.is_some() && !has("vision") {
            return Err(Failure::work(NO_IMAGES).hint(TARGET_FLAGS));
        }
        if self.audio_seconds.is_some() && !has("audio") {
            return Err(Failure::work(NO_SOUND).hint(TARGET_FLAGS));
        }
        Ok(())
    }

    fn made_for(&self) -> MadeFor {
        match self.made_for {
            Some(Place::Emulator) => MadeFor::Emulator,
            Some(Place::Phone) | None => MadeFor::Phone,
        }
    }

    /// What the NPU is to be.
    pub(crate) fn settings(&self) -> Result<NpuSettings, Failure> {
        let own = environment::npu()?;
        Ok(NpuSettings {
            libraries: self.qnn_dir.clone().map(NpuLibraries::Folder).or(own.libraries),
            here: own.here,
            arch: None,
            share_weights: self.made_for() == MadeFor::Phone,
            prefill_rows: Some(self.prefill_rows()?.last().copied().unwrap_or(1)),
            prefill_min_rows: None,
            ring: self.kv == Some(Kv::Ring),
            allow_risky: self.allow_risky,
            optimization: self.optimize,
        })
    }

    /// The longest session, of a model made for `limit` tokens.
    pub(crate) fn context(&self, limit: usize) -> Result<usize, Failure> {
        Ok(session_length(self.context, limit)?)
    }

    pub(crate) fn prefill_rows(&self) -> Result<Vec<usize>, Failure> {
        let wrong =
            |text: &str| Failure::usage(format!("--prefill: `{text}` is not a number of rows")).hint("give 128, or 32,128, or none");
        match self.prefill.as_deref() {
            None => Ok(vec![DEFAULT_PREFILL]),
            Some("none" | "0") => Ok(Vec::new()),
            Some(text) => {
                let rows = text
                    .split(',')
                    .map(|part| part.trim().parse().ok().filter(|rows| (1..=1 << 16).contains(rows)).ok_or_else(|| wrong(part)));
                let mut rows = rows.collect::<Result<Vec<usize>, _>>()?;
                rows.sort_unstable();
                rows.dedup();
                match rows.len() {
                    ..=MAX_PREFILL_SIZES => Ok(rows),
                    found => Err(Failure::usage(format!("--prefill: found {found} sizes, at most {MAX_PREFILL_SIZES} are compiled"))),
                }
            }
        }
    }
}

/// Whether a target has a folder of its own; CPUs and GPUs run the bundle as it is.
fn is_arch(target: &str) -> bool {
    !matches!(target, "cpu" | "gpu")
}

fn target(text: &str) -> Result<String, String> {
    match text {
        "cpu" | "gpu" | "v79" | "v81" => Ok(text.into()),
        _ => Err(format!("there is no target `{text}`; expected cpu, gpu, v79 or v81")),
    }
}

fn image_size(text: &str) -> Result<ImageSize, String> {
    let parsed = text.split_once(['x', 'X']).and_then(|(height, width)| Some([height.parse().ok()?, width.parse().ok()?]));
    let sane = parsed.filter(|size: &[usize; 2]| size.iter().all(|side| (1..=1 << 14).contains(side)));
    sane.map(ImageSize).ok_or_else(|| format!("`{text}` is not a size; expected HEIGHTxWIDTH, as in 512x512"))
}

fn audio_seconds(text: &str) -> Result<f64, String> {
    let sane = text.parse().ok().filter(|seconds: &f64| *seconds > 0.0 && *seconds <= MAX_AUDIO_SECONDS);
    sane.ok_or_else(|| format!("`{text}` is not a number of seconds above 0 and up to {MAX_AUDIO_SECONDS}"))
}

/// An arch folder, for reports.
#[derive(Serialize)]
pub(crate) struct TargetReport {
    folder: String,
    manifests: Vec<String>,
    contexts: usize,
    bytes: u64,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    notes: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    level: Option<qhx_bundle::parity::Level>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gate: Option<qhx_bundle::parity::GateResult>,
}

impl TargetReport {
    pub(crate) fn new(made: &MadeTarget) -> Self {
        let MadeTarget { folder, manifests, contexts, bytes, notes, gate } = made.clone();
        let (level, gate) = gate.unzip();
        Self { folder, manifests, contexts, bytes, notes, level, gate }
    }

    /// For people.
    pub(crate) fn line(&self) -> String {
        let level = self.level.map_or("", |level| match level {
            qhx_bundle::parity::Level::Whole => "whole model",
            qhx_bundle::parity::Level::Stages => "stages alone",
        });
        let gate = self.gate.as_ref().map_or("not gated".into(), |gate| {
            let (verdict, covered) = (if gate.passed { "passed" } else { "failed" }, gate.coverage());
            let covered = covered.map_or(String::new(), |covered| format!(" ({covered})"));
            format!("gate {verdict} on the {level}{covered}: {}", gate.result)
        });
        format!("{}: {} contexts, {}, {gate}", self.folder, self.contexts, show_bytes(self.bytes))
    }
}

/// The longest session that help texts name.
const _: () = assert!(DEFAULT_CONTEXT == 1024 && DEFAULT_PREFILL == 128);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_or_refused() {
        assert_eq!(image_size("512x256"), Ok(ImageSize([512, 256])));
        for text in ["512", "0x5", "ax5", "5x", "99999x1"] {
            assert!(image_size(text).is_err(), "{text}");
        }
        assert!(
            audio_seconds("0").is_err()
                && audio_seconds("nan").is_err()
                && audio_seconds("1e300").is_err()
                && audio_seconds("2.5") == Ok(2.5)
        );
        assert!(target("toaster").is_err() && target("v81").is_ok());
    }
}

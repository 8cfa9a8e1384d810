//! Flags that several commands share, and what they become for the libraries.

use crate::{
    commands,
    draft::DraftChoice,
    environment,
    failure::Failure,
    output,
    texts::{read_json, read_text},
    units::read_bytes,
};
use clap::{Args, builder::RangedU64ValueParser};
use qhx_bundle::files;
use qhx_ir::Timeline;
use qhx_runtime::{
    Constraint, DEFAULT_CHUNK, DeviceChoice, GenerateOptions, LoadOptions,
    placement::Rules,
    registry::{CAN_PIN, GpuSettings},
    sample::SamplerConfig,
};
use serde_json::{Value, json};
use std::path::PathBuf;

/// More threads than any machine has cores.
pub(crate) const MAX_THREADS: u64 = 1024;
/// More tokens than any session has.
pub(crate) const MAX_TOKENS: u64 = 1 << 30;
/// The most prompt tokens per chunk.
pub(crate) const MAX_CHUNK: u64 = 1 << 20;

/// For counts from 1 to `most`.
pub(crate) fn count(most: u64) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=most)
}

/// For counts from 0 to `most`.
pub(crate) fn count_or_none(most: u64) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(0..=most)
}

/// Where a model runs.
#[derive(Args)]
pub(crate) struct MachineFlags {
    /// Device to run on: auto, cpu, gpu (gpu:1 is the second), npu, split, or reference (slow and plain, for verification)
    #[arg(long, default_value = "auto", value_name = "DEVICE")]
    pub(crate) device: DeviceChoice,
    #[command(flatten)]
    hardware: HardwareFlags,
}

impl MachineFlags {
    pub(crate) fn load_options(&self) -> Result<LoadOptions, Failure> {
        self.hardware.load_options(self.device)
    }
}

/// How a device is used, whichever it is.
#[derive(Args)]
pub(crate) struct HardwareFlags {
    /// CPU threads [default: one for each core]
    #[arg(long, value_name = "N", value_parser = count(MAX_THREADS))]
    threads: Option<usize>,
    #[command(flatten)]
    pin: PinFlag,
    #[command(flatten)]
    gpu: GpuFlags,
    #[command(flatten)]
    placement: PlacementFlag,
    /// Prompt tokens per prefill chunk
    #[arg(long, value_name = "N", default_value_t = DEFAULT_CHUNK, value_parser = count(MAX_CHUNK))]
    chunk: usize,
}

impl HardwareFlags {
    pub(crate) fn load_options(&self, device: DeviceChoice) -> Result<LoadOptions, Failure> {
        Ok(LoadOptions {
            device,
            placement: self.placement.read()?,
            threads: self.threads,
            pin: self.pin.read(),
            chunk: self.chunk,
            instructions: environment::instructions()?,
            npu: environment::npu()?,
            gpu: self.gpu.settings()?,
            ..LoadOptions::default()
        })
    }
}

/// Where and how a model runs.
#[derive(Args)]
#[command(next_help_heading = "Execution")]
pub(crate) struct ExecutionFlags {
    #[command(flatten)]
    pub(crate) machine: MachineFlags,
    /// Context length in tokens [default: the model's own limit, at most 4096]
    #[arg(long, value_name = "N", value_parser = count(MAX_TOKENS))]
    pub(crate) context: Option<usize>,
    /// Load the model even if it does not fit into memory: it may run, slowly, from disk
    #[arg(long)]
    overcommit: bool,
}

impl ExecutionFlags {
    pub(crate) fn load_options(&self) -> Result<LoadOptions, Failure> {
        Ok(LoadOptions { context: self.context, overcommit: self.overcommit, ..self.machine.load_options()? })
    }
}

/// Whether what runs is written down.
#[derive(Args)]
#[command(next_help_heading = "Execution")]
pub(crate) struct TimelineFlag {
    /// Write what ran when, on which device, to a file for Perfetto or Chrome's trace viewer
    #[arg(long, value_name = "FILE.json")]
    trace: Option<PathBuf>,
}

impl TimelineFlag {
    pub(crate) fn begin(&self) -> Option<Timeline> {
        self.trace.as_ref().map(|_| Timeline::default())
    }

    pub(crate) fn write(&self, timeline: Option<&Timeline>) -> Result<(), Failure> {
        let (Some(path), Some(timeline)) = (&self.trace, timeline) else { return Ok(()) };
        let text = timeline.to_json().to_string();
        Ok(files::write(path, |out| out.write_all(text.as_bytes()))?)
    }
}

/// Whether threads keep to their cores.
#[derive(Args)]
#[command(next_help_heading = "Execution")]
pub(crate) struct PinFlag {
    /// Pin each thread to a core of its own (Linux): steadier on an idle machine, slower beside other busy processes
    #[arg(long)]
    pin: bool,
}

impl PinFlag {
    pub(crate) fn read(&self) -> bool {
        if self.pin && !CAN_PIN {
            output::note("note: --pin has no effect: threads cannot be pinned to cores on this system");
        }
        self.pin
    }
}

/// How a GPU is used.
#[derive(Args)]
#[command(next_help_heading = "Execution")]
pub(crate) struct GpuFlags {
    /// GPU memory to use at most, such as 2GiB or 900MiB [default: what is free]
    #[arg(long, value_name = "SIZE", value_parser = read_bytes)]
    gpu_memory: Option<u64>,
    /// Run the GPU's driver in a process of its own, and with `serve` the server too: what crashes is started again, or the GPU's work continued on the CPU, and the answer goes on
    #[arg(long)]
    isolate: bool,
    /// Measure again what runs fastest where, for --device auto and split
    #[arg(long)]
    remeasure: bool,
}

impl GpuFlags {
    fn settings(&self) -> Result<GpuSettings, Failure> {
        let isolate = if self.isolate { Some(commands::worker::command()?) } else { None };
        Ok(GpuSettings { memory_limit: self.gpu_memory, isolate, measure_again: self.remeasure, ..environment::gpu() })
    }
}

/// Which stage runs where.
#[derive(Args)]
#[command(next_help_heading = "Execution")]
pub(crate) struct PlacementFlag {
    /// Device of each stage, as a TOML file: `default = "npu"`, `prefill = …`, `decode = …`, and in the table `stages` lines such as `"layers.3.ffn.down_proj" = "cpu"`
    #[arg(long, value_name = "FILE.toml")]
    placement: Option<PathBuf>,
}

impl PlacementFlag {
    pub(crate) fn read(&self) -> Result<Option<Rules>, Failure> {
        Ok(self.placement.as_deref().map(Rules::read).transpose()?)
    }
}

/// How tokens are chosen and when an answer ends.
#[derive(Args)]
#[command(next_help_heading = "Decoding")]
pub(crate) struct DecodingFlags {
    /// Sampling temperature: 0 is greedy; the larger, the more random
    #[arg(long, default_value_t = 0.0, value_name = "X", allow_negative_numbers = true)]
    temperature: f32,
    /// Sample from this many of the most probable tokens; 0: from all
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = count_or_none(MAX_TOKENS))]
    top_k: usize,
    /// Sample from the most probable tokens that together reach this probability
    #[arg(long, default_value_t = 1.0, value_name = "X", allow_negative_numbers = true)]
    top_p: f32,
    /// Sample from the tokens at least this fraction as probable as the most probable one
    #[arg(long, default_value_t = 0.0, value_name = "X", allow_negative_numbers = true)]
    min_p: f32,
    /// Make tokens that already occurred less likely; 1: off
    #[arg(long, default_value_t = 1.0, value_name = "X", allow_negative_numbers = true)]
    repetition_penalty: f32,
    /// Number of latest tokens that the repetition penalty covers [default: all]
    #[arg(long, value_name = "N", value_parser = count_or_none(MAX_TOKENS))]
    repetition_window: Option<usize>,
    /// Random seed: the same seed gives the same text
    #[arg(long, default_value_t = 0, value_name = "N")]
    seed: u64,
    /// Stop at this text, which is not part of the answer; may be repeated
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Do not stop at end-of-sequence tokens
    #[arg(long, conflicts_with_all = ["json_schema", "grammar"])]
    ignore_eos: bool,
    /// Answer with JSON that follows this schema
    #[arg(long, value_name = "FILE.json", conflicts_with = "grammar")]
    json_schema: Option<PathBuf>,
    /// Answer with text that follows this grammar, in llguidance's variant of Lark; `start: /REGEX/` for a regular expression
    #[arg(long, value_name = "FILE.lark")]
    grammar: Option<PathBuf>,
    /// Where guesses at the next tokens come from, which are computed together where that is faster and never change an answer: `lookup` (what followed the same words before),
    /// `mtp` (multi-token prediction or a drafter, where the bundle has it), `auto` (both), `none`, or a smaller model with the same tokenizer
    #[arg(long, value_name = "SOURCE", default_value = "auto")]
    pub(crate) draft: DraftChoice,
}

impl DecodingFlags {
    pub(crate) fn generate_options(&self, max_new: usize) -> Result<GenerateOptions, Failure> {
        let sampler = SamplerConfig {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            repetition_window: self.repetition_window,
            seed: self.seed,
        };
        sampler.validate().map_err(qhx_runtime::Error::from)?;
        let mut options =
            GenerateOptions { max_new, ignore_eos: self.ignore_eos, stop: self.stop.clone(), sampler, ..GenerateOptions::default() };
        options.structure.constraint = self.constraint()?;
        Ok(options)
    }

    /// The same as fields of a request to a server.
    pub(crate) fn request_fields(&self, max_new: usize) -> Result<Value, Failure> {
        // What is wrong is said here, as without a server.
        self.generate_options(max_new)?;
        let mut fields = json!({
            "max_completion_tokens": max_new,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "seed": self.seed,
            "ignore_eos": self.ignore_eos,
        });
        if !self.stop.is_empty() {
            fields["stop"] = json!(self.stop);
        }
        if let Some(file) = &self.json_schema {
            let schema: Value = read_json(file)?;
            fields["response_format"] =
                json!({ "type": "json_schema", "json_schema": { "name": "answer", "schema": schema, "strict": true } });
        }
        Ok(fields)
    }

    /// What answers follow.
    fn constraint(&self) -> Result<Option<Constraint>, Failure> {
        if let Some(file) = &self.json_schema {
            return Ok(Some(Constraint::JsonSchema(read_json(file)?)));
        }
        self.grammar.as_deref().map(|file| Ok(Constraint::Lark(read_text(file)?))).transpose()
    }
}

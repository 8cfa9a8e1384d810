//! `qhx batch`: many prompts from a file, many at once.

use crate::{
    failure::Failure,
    flags::{DecodingFlags, ExecutionFlags, MAX_TOKENS, count, count_or_none},
    interrupt::Interrupt,
    load::load_model,
    open::open_model,
    output,
    progress::BatchBar,
};
use clap::Args;
use qhx::batch::{Batch as Work, BatchError};
use qhx_runtime::{
    LoadOptions,
    engine::{Engine, EngineOptions},
};
use serde_json::json;
use std::{path::PathBuf, time::Instant};

/// The most prompts at once.
const MAX_PARALLEL: u64 = 256;

/// Answer many prompts from a file
///
/// Each line of the input is a JSON object: {"id": …, "messages": […]} with OpenAI messages, {"id": …, "ids": […]} or {"id": …, "prompt": "…"}, and optionally max_new, temperature,
/// top_k, top_p, min_p, repetition_penalty, seed and stop. Each line of the output is {"id": …, "ids": […], "text": …, "finish_reason": …} or {"id": …, "error": {…}},
/// in the order of the input. Run again with the same files, it resumes where it stopped.
#[derive(Args)]
#[command(after_help = "Example:\n  qhx batch smol --in prompts.jsonl --out answers.jsonl --parallel 8")]
pub(crate) struct Batch {
    /// A bundle, a Hugging Face folder or a GGUF file (forged once into the user's cache)
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// The prompts, one JSON object per line
    #[arg(long = "in", value_name = "FILE.jsonl")]
    input: PathBuf,
    /// The answers, one JSON object per line
    #[arg(long = "out", value_name = "FILE.jsonl")]
    output: PathBuf,
    /// How many prompts are answered at once
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = count(MAX_PARALLEL))]
    parallel: usize,
    /// The most tokens to generate for lines without max_new
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = count_or_none(MAX_TOKENS), help_heading = "Decoding")]
    max_new: usize,
    #[command(flatten)]
    decoding: DecodingFlags,
    #[command(flatten)]
    execution: ExecutionFlags,
    /// Print one JSON object about the batch to stdout
    #[arg(long)]
    json: bool,
}

impl Batch {
    pub(crate) fn run(&self, interrupt: &Interrupt) -> Result<(), Failure> {
        let mut options = self.decoding.generate_options(self.max_new)?;
        let load = LoadOptions { sessions: self.parallel, ..self.execution.load_options()? };
        let bundle = open_model(Some(&self.model), self.execution.machine.device, interrupt)?.bundle;
        let model = load_model(&bundle, &load)?;
        options.draft = self.decoding.draft.source(&model, &load, interrupt)?;
        let engine = Engine::start(model, EngineOptions::default())?;
        let mut work = Work::new(&engine, &bundle);
        (work.options, work.cancel) = (options, interrupt.cancel().clone());
        let (started, bar) = (Instant::now(), BatchBar::new());
        let result = work.run(&self.input, &self.output, &mut |report| bar.update(report));
        drop(bar);
        let report = result.map_err(|error| match error {
            BatchError::Cancelled { .. } => Failure::work(error.to_string()).hint("run the same command again to go on from there"),
            BatchError::OtherInput { .. } => Failure::work(error.to_string()).hint("name another file with --out, or remove this one"),
            error => Failure::work(error.to_string()),
        })?;
        let seconds = started.elapsed().as_secs_f64();
        let rate = report.generated_tokens as f64 / seconds.max(1e-9);
        output::dim_note(&format!(
            "{} lines: {} answered, {} of them with an error, {} answered before; {} prompt tokens, {} generated in {seconds:.1} s ({rate:.1} tok/s)",
            report.lines, report.answered, report.errors, report.skipped, report.prompt_tokens, report.generated_tokens
        ));
        match self.json {
            true => output::print_json(&json!({
                "lines": report.lines,
                "skipped": report.skipped,
                "answered": report.answered,
                "errors": report.errors,
                "prompt_tokens": report.prompt_tokens,
                "generated_tokens": report.generated_tokens,
                "seconds": seconds,
                "tokens_per_second": rate,
            })),
            false => Ok(()),
        }
    }
}

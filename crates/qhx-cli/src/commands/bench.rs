//! `qhx bench`: how fast a bundle reads and writes here.

use crate::{
    failure::Failure,
    flags::{MAX_CHUNK, MAX_THREADS, MAX_TOKENS, PinFlag, PlacementFlag, count, count_or_none},
    interrupt::Interrupt,
    load::{load_model, open_for},
    output::{self, show_count},
    table::{Align, Table, facts},
};
use clap::Args;
use qhx_bundle::Bundle;
use qhx_runtime::{
    DEFAULT_CHUNK, DeviceChoice, LoadOptions,
    bench::{BenchOptions, BenchReport, ExpertUse, MAX_REPEATS, bench},
    memory::show_bytes,
};
use std::path::PathBuf;

/// The most tests of one call.
const MAX_TESTS: usize = 64;

/// Measure how fast a bundle reads prompts (pp) and writes tokens (tg)
///
/// Gives tokens per second as mean ± standard deviation, the peak memory, the bytes of weights read per token, and which share of the memory bandwidth, measured
/// here as well, that is; for a mixture of experts also how many of them were used.
#[derive(Args)]
#[command(after_help = "Example:\n  qhx bench smol -p 512 -n 64 -r 5 --threads 2")]
pub(crate) struct Bench {
    /// The bundle
    bundle: PathBuf,
    /// Prompt lengths to read, separated by commas; 0 for none
    #[arg(short = 'p', long = "prompt", value_name = "N", default_value = "512", value_delimiter = ',', value_parser = count_or_none(MAX_TOKENS))]
    prompt: Vec<usize>,
    /// Numbers of tokens to write, separated by commas; 0 for none
    #[arg(short = 'n', long = "generate", value_name = "N", default_value = "64", value_delimiter = ',', value_parser = count_or_none(MAX_TOKENS))]
    generate: Vec<usize>,
    /// Measured runs of each
    #[arg(short = 'r', long = "repeats", value_name = "N", default_value = "3", value_parser = count(MAX_REPEATS as u64))]
    repeats: usize,
    /// Where it runs: auto, cpu, gpu, npu, split, or reference
    #[arg(long, default_value = "auto", value_name = "DEVICE")]
    device: DeviceChoice,
    #[command(flatten)]
    placement: PlacementFlag,
    /// Threads of the processor [default: one for each core]
    #[arg(long, value_name = "N", value_parser = count(MAX_THREADS))]
    threads: Option<usize>,
    #[command(flatten)]
    pin: PinFlag,
    /// Tokens of the prompt read at a time
    #[arg(long, value_name = "N", default_value_t = DEFAULT_CHUNK, value_parser = count(MAX_CHUNK))]
    chunk: usize,
    /// Compute all logits of each token, as sampling needs them; greedy answers need the largest only
    #[arg(long)]
    all_logits: bool,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

impl Bench {
    pub(crate) fn run(&self, interrupt: &Interrupt) -> Result<(), Failure> {
        let longest = self.prompt.iter().chain(&self.generate).copied().max().unwrap_or(0);
        let tests = self.prompt.len() + self.generate.len();
        if tests > MAX_TESTS {
            return Err(Failure::usage(format!("-p and -n name {tests} tests, at most {MAX_TESTS} are run")));
        }
        if longest == 0 {
            return Err(Failure::usage("there is nothing to measure").hint("give -p or -n a number above 0"));
        }
        let bundle = open_for(&self.bundle, self.device, interrupt)?;
        let load = LoadOptions {
            device: self.device,
            placement: self.placement.read()?,
            threads: self.threads,
            pin: self.pin.read(),
            context: Some(longest),
            chunk: self.chunk,
            ..LoadOptions::default()
        };
        let model = load_model(&bundle, &load)?;
        let options = BenchOptions {
            prompt: self.prompt.clone(),
            generate: self.generate.clone(),
            repeats: self.repeats,
            all_logits: self.all_logits,
        };
        let precision = &bundle.manifest().precision;
        let mut told = |result: &qhx_runtime::bench::BenchResult| {
            output::dim_note(&format!("{}: {:.2} ± {:.2} tokens/s", result.test, result.mean, result.sd));
        };
        let report = bench(&model, precision, &options, interrupt.cancel(), &mut told)?;
        if self.json { output::print_json(&report) } else { output::print(&tables(&report, &bundle)) }
    }
}

fn tables(report: &BenchReport, bundle: &Bundle) -> String {
    let size: u64 = bundle.manifest().weights.iter().filter_map(|file| bundle.manifest().files.get(file)).map(|file| file.bytes).sum();
    let mut table = Table::new([
        ("model", Align::Left),
        ("size", Align::Right),
        ("params", Align::Right),
        ("device", Align::Left),
        ("threads", Align::Right),
        ("test", Align::Right),
        ("t/s", Align::Right),
    ]);
    for result in &report.results {
        table.row([
            format!("{} {}", report.bundle, report.precision),
            show_bytes(size),
            show_count(bundle.manifest().model.parameters),
            report.device.clone(),
            report.threads.to_string(),
            result.test.clone(),
            format!("{:.2} ± {:.2}", result.mean, result.sd),
        ]);
    }
    let share = if report.bandwidth_share > 0.0 { format!("{:.0} %", 100.0 * report.bandwidth_share) } else { "no tg test was run".into() };
    let mut measured = vec![
        ("peak memory", show_bytes(report.peak_rss_bytes)),
        ("weights read per token", show_bytes(report.weight_bytes_per_token)),
        ("memory bandwidth", format!("{}/s", show_bytes(report.read_bandwidth_bytes_per_s as u64))),
        ("share of it used", share),
    ];
    if let Some(ExpertUse { tokens, of, used }) = &report.experts {
        let mean = used.iter().sum::<usize>() as f64 / used.len() as f64;
        let least = used.iter().min().unwrap_or(&0);
        measured.push(("experts used", format!("{mean:.1} of {of} in each layer (at least {least}) over {tokens} tokens")));
    }
    let measured = facts(&measured);
    format!("{}\n{measured}", table.render())
}

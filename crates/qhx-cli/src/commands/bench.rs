//! `qhx bench`: how fast a model runs here.

use crate::{
    failure::Failure,
    flags::{MAX_TOKENS, MachineFlags, count, count_or_none},
    interrupt::Interrupt,
    load::load_model,
    open::open_model,
    output,
    table::{Align, Table, facts},
    units::{show_bandwidth, show_bytes, show_count},
};
use clap::Args;
use qhx_bundle::Bundle;
use qhx_runtime::{
    LoadOptions,
    bench::{BenchOptions, BenchReport, ExpertUse, MAX_REPEATS, bench},
};
use std::path::PathBuf;

/// The most tests of one call.
const MAX_TESTS: usize = 64;

/// Measure prefill (pp) and decode (tg) speed
///
/// Prints tokens per second as mean ± standard deviation, peak memory, the weight bytes read per token and their share of the memory bandwidth, which is measured
/// too; for a mixture of experts also how many experts were used.
#[derive(Args)]
#[command(after_help = "Example:\n  qhx bench smol -p 512 -n 64 -r 5 --threads 2")]
pub(crate) struct Bench {
    /// A bundle, a Hugging Face folder or a GGUF file (forged once into the user's cache)
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// Prompt lengths for prefill, separated by commas; 0 for none
    #[arg(short = 'p', long = "prompt", value_name = "N", default_value = "512", value_delimiter = ',', value_parser = count_or_none(MAX_TOKENS))]
    prompt: Vec<usize>,
    /// Numbers of tokens to decode, separated by commas; 0 for none
    #[arg(short = 'n', long = "generate", value_name = "N", default_value = "64", value_delimiter = ',', value_parser = count_or_none(MAX_TOKENS))]
    generate: Vec<usize>,
    /// Numbers of concurrent sessions, separated by commas: each -n test is repeated for each of them, and named like tg64x8 for 8 sessions
    #[arg(long, value_name = "N", default_value = "1", value_delimiter = ',', value_parser = count(256))]
    sessions: Vec<usize>,
    /// Tokens in the cache before a test, separated by commas: each test is repeated for each of them, and named like tg64@d2000
    #[arg(short = 'd', long = "depth", value_name = "N", default_value = "0", value_delimiter = ',', value_parser = count_or_none(MAX_TOKENS))]
    depth: Vec<usize>,
    /// Measured runs of each test
    #[arg(short = 'r', long = "repeats", value_name = "N", default_value = "3", value_parser = count(MAX_REPEATS as u64))]
    repeats: usize,
    #[command(flatten)]
    machine: MachineFlags,
    /// Compute all logits of each token, as sampling needs them; greedy decoding needs only the largest
    #[arg(long)]
    all_logits: bool,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

impl Bench {
    pub(crate) fn run(&self, interrupt: &Interrupt) -> Result<(), Failure> {
        let longest = self.prompt.iter().chain(&self.generate).copied().max().unwrap_or(0);
        let tests = (self.prompt.len() + self.generate.len() * self.sessions.len()) * self.depth.len();
        let deepest = self.depth.iter().copied().max().unwrap_or(0);
        if tests > MAX_TESTS {
            return Err(Failure::usage(format!("-p and -n name {tests} tests, at most {MAX_TESTS} are run")));
        }
        if longest == 0 {
            return Err(Failure::usage("there is nothing to measure").hint("give -p or -n a number above 0"));
        }
        let bundle = open_model(Some(&self.model), self.machine.device, interrupt)?.bundle;
        let sessions = self.sessions.iter().copied().max().unwrap_or(1);
        let load = LoadOptions { context: Some(longest.saturating_add(deepest)), sessions, ..self.machine.load_options()? };
        let model = load_model(&bundle, &load)?;
        let options = BenchOptions {
            prompt: self.prompt.clone(),
            generate: self.generate.clone(),
            repeats: self.repeats,
            sessions: self.sessions.clone(),
            depth: self.depth.clone(),
            all_logits: self.all_logits,
        };
        let precision = &bundle.manifest().precision;
        let mut told = |result: &qhx_runtime::bench::BenchResult| {
            output::dim_note(&format!("{}: {:.2} ± {:.2} tok/s", result.test, result.mean, result.sd));
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
        ("tok/s", Align::Right),
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
    let share = if report.bandwidth_share > 0.0 {
        format!("{:.0} %", 100.0 * report.bandwidth_share)
    } else {
        "unknown: no tg test was run, or the device has memory of its own".into()
    };
    let mut measured = vec![
        ("peak memory", show_bytes(report.peak_rss_bytes)),
        ("weights read per token", show_bytes(report.weight_bytes_per_token)),
        ("memory bandwidth", show_bandwidth(report.read_bandwidth_bytes_per_s)),
        ("bandwidth used", share),
    ];
    if let Some(ExpertUse { tokens, of, used }) = &report.experts {
        let mean = used.iter().sum::<usize>() as f64 / used.len() as f64;
        let least = used.iter().min().unwrap_or(&0);
        measured.push(("experts used", format!("{mean:.1} of {of} per layer on average, at least {least}, over {tokens} tokens")));
    }
    let measured = facts(&measured);
    format!("{}\n{measured}", table.render())
}

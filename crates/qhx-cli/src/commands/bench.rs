//! `qhx bench`: how fast a model runs here.

use super::synthetic;
use crate::{
    draft::DraftChoice,
    environment,
    failure::Failure,
    flags::{HardwareFlags, MAX_TOKENS, TimelineFlag, count, count_or_none},
    interrupt::Interrupt,
    load::{load_model, tell},
    open::open_model,
    output,
    table::{Align, Table, facts},
    units::{show_bandwidth, show_bytes, show_count},
};
use clap::Args;
use qhx_bundle::{Bundle, files};
use qhx_ir::ExpertCache;
use qhx_runtime::{
    DeviceChoice, LoadOptions,
    auto::AutoChoice,
    bench::{BenchOptions, BenchReport, BenchResult, DraftCounts, ExpertUse, MAX_REPEATS, TestProfile, bench},
    registry::devices,
};
use serde::Serialize;
use serde_json::json;
use std::path::{Path, PathBuf};

/// The most tests of one call.
const MAX_TESTS: usize = 64;

/// Measure prefill (pp) and decode (tg) speed
///
/// Prints tokens per second as mean ± standard deviation, peak memory, the weight bytes read per token and their share of the memory bandwidth, which is measured
/// too; for a mixture of experts also how many experts were used.
#[derive(Args)]
#[command(
    after_help = "Examples:\n  qhx bench smol -p 512 -n 64 -r 5 --threads 2\n  qhx bench phi --device cpu,gpu,split --report laptop.json"
)]
pub(crate) struct Bench {
    /// A bundle, a Hugging Face folder or a GGUF file (forged once into the user's cache); or the name of a model of which a copy with random weights is made: phi, qwen3.5, qwen3-vl, gemma4
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
    /// Devices to measure, separated by commas: auto, cpu, gpu (gpu:1 is the second), npu, split, or reference
    #[arg(long, default_value = "auto", value_name = "DEVICE", value_delimiter = ',', help_heading = "Execution")]
    device: Vec<DeviceChoice>,
    #[command(flatten)]
    hardware: HardwareFlags,
    #[command(flatten)]
    timeline: TimelineFlag,
    /// Also write everything to a file that can be sent to others: results, devices, what was predicted and measured of each way to place the model
    #[arg(long, value_name = "FILE.json")]
    report: Option<PathBuf>,
    /// Decode greedy answers with drafts from `lookup`, `mtp`, `auto`, `none` or a smaller model, and report how many were right [default: decode given tokens one by one]
    #[arg(long, value_name = "SOURCE")]
    draft: Option<DraftChoice>,
    /// Compute all logits of each token, as sampling needs them; greedy decoding needs only the largest
    #[arg(long)]
    all_logits: bool,
    /// Also show where the time of each test goes, in one more run of it: by kind of step, with waiting for other threads (CPU only)
    #[arg(long, conflicts_with = "draft")]
    profile: bool,
    /// Print one JSON object instead of a table, or a list of them for several devices
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
        let synthetic = synthetic::of_name(&self.model, interrupt)?;
        let model = synthetic.as_deref().unwrap_or(&self.model);
        let mut runs = Vec::new();
        // One record for all devices.
        let timeline = self.timeline.begin();
        for &device in &self.device {
            let bundle = open_model(Some(model), device, interrupt)?.bundle;
            let sessions = self.sessions.iter().copied().max().unwrap_or(1);
            // An answer with drafts has a prompt of one token.
            let prompt = usize::from(self.draft.is_some());
            let context = Some(longest.saturating_add(deepest).saturating_add(prompt));
            let load = LoadOptions { context, sessions, timeline: timeline.clone(), ..self.hardware.load_options(device)? };
            let model = load_model(&bundle, &load)?;
            let told = model.placement().fallbacks.clone();
            let options = BenchOptions {
                prompt: self.prompt.clone(),
                generate: self.generate.clone(),
                repeats: self.repeats,
                sessions: self.sessions.clone(),
                depth: self.depth.clone(),
                all_logits: self.all_logits,
                profile: self.profile,
                draft: self.draft.as_ref().map(|draft| draft.source(&model, &load, interrupt)).transpose()?,
            };
            let mut show = |result: &BenchResult| {
                output::dim_note(&format!("{}: {:.2} ± {:.2} tok/s{}", result.test, result.mean, result.sd, drafts(result)));
            };
            let report = bench(&model, &bundle.manifest().precision, &options, interrupt.cancel(), &mut show)?;
            if report.fallbacks != told {
                tell(&report.fallbacks);
            }
            runs.push(Run {
                device: device.to_string(),
                report,
                choice: model.choice().cloned(),
                size: size(&bundle),
                parameters: bundle.manifest().model.parameters,
            });
        }
        self.timeline.write(timeline.as_ref())?;
        if let Some(path) = &self.report {
            write_report(path, &runs)?;
        }
        match (self.json, &runs[..]) {
            (false, _) => output::print(&runs.iter().map(tables).collect::<Vec<_>>().join("\n")),
            (true, [run]) => output::print_json(&run.report),
            (true, runs) => output::print_json(&runs.iter().map(|run| &run.report).collect::<Vec<_>>()),
        }
    }
}

/// What was measured on one device.
#[derive(Serialize)]
struct Run {
    /// As it was asked for.
    device: String,
    report: BenchReport,
    /// What `auto` or `split` chose.
    #[serde(skip_serializing_if = "Option::is_none")]
    choice: Option<AutoChoice>,
    /// Bytes of the weights' files.
    size: u64,
    parameters: u64,
}

fn size(bundle: &Bundle) -> u64 {
    bundle.manifest().weights.iter().filter_map(|file| bundle.manifest().files.get(file)).map(|file| file.bytes).sum()
}

/// How many drafts were right, where there were any.
fn drafts(result: &BenchResult) -> String {
    let Some(DraftCounts { drafted, accepted }) = result.drafts else { return String::new() };
    format!(" ({accepted} of {drafted} drafts right)")
}

/// One file for others to read.
fn write_report(path: &Path, runs: &[Run]) -> Result<(), Failure> {
    let devices = devices(environment::cpu()?, &environment::npu()?);
    let all = json!({ "qhx": env!("CARGO_PKG_VERSION"), "system": std::env::consts::OS, "arch": std::env::consts::ARCH, "devices": devices, "runs": runs });
    let text = serde_json::to_vec_pretty(&all).map_err(|error| Failure::work(format!("cannot write JSON: {error}")))?;
    files::write(path, |out| out.write_all(&text))?;
    output::dim_note(&format!("written to {}", path.display()));
    Ok(())
}

fn tables(run: &Run) -> String {
    let Run { report, size, parameters, .. } = run;
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
            show_bytes(*size),
            show_count(*parameters),
            report.device.clone(),
            report.threads.to_string(),
            result.test.clone(),
            format!("{:.2} ± {:.2}{}", result.mean, result.sd, drafts(result)),
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
    if let Some(cache) = &report.expert_cache {
        let ExpertCache { hits, fetched, misses, transfers, transferred_bytes } = cache.counts;
        let choices = hits + fetched + misses;
        measured.push(("chosen experts on the GPU", format!("{:.1} % of {choices}", 100.0 * cache.hit_rate)));
        measured.push(("computed on the CPU", format!("{:.1} %", 100.0 * misses as f64 / choices.max(1) as f64)));
        measured.push(("experts transferred", format!("{transfers}, {}", show_bytes(transferred_bytes))));
    }
    let measured = facts(&measured);
    let profiles: String = report.profiles.iter().map(|profile| format!("\n{}", profile_table(profile))).collect();
    format!("{}\n{measured}{profiles}", table.render())
}

/// Where the time of a test went, in microseconds of each of its calls.
fn profile_table(profile: &TestProfile) -> String {
    let TestProfile { test, seconds, calls } = profile;
    let mut table = Table::new([
        (&*format!("{test}, each of {} calls", calls.calls), Align::Left),
        ("runs", Align::Right),
        ("µs", Align::Right),
        ("share", Align::Right),
        ("GB/s", Align::Right),
        ("barriers", Align::Right),
        ("µs before work", Align::Right),
        ("working", Align::Right),
        ("waiting", Align::Right),
    ]);
    let each = |number: f64| number / calls.calls.max(1) as f64;
    let micros = |seconds: f64| format!("{:.0}", 1e6 * each(seconds));
    let share = |part: f64| format!("{:.1} %", 100.0 * part / seconds);
    for step in &calls.steps {
        let speed = step.weight_bytes as f64 / step.seconds / 1e9;
        let waiting = step.shared_seconds - step.late_seconds - step.busy_seconds;
        let of_threads =
            [step.late_seconds, step.busy_seconds, waiting].map(|part| if step.barriers > 0 { micros(part) } else { String::new() });
        let [late, busy, waiting] = of_threads;
        table.row([
            step.step.clone(),
            format!("{:.0}", each(step.runs as f64)),
            micros(step.seconds),
            share(step.seconds),
            if step.weight_bytes > 0 { format!("{speed:.1}") } else { String::new() },
            format!("{:.0}", each(step.barriers as f64)),
            late,
            busy,
            waiting,
        ]);
    }
    let in_steps: f64 = calls.steps.iter().map(|step| step.seconds).sum();
    for (name, rest) in [("between steps", calls.seconds - in_steps), ("between calls", seconds - calls.seconds)] {
        let nothing = String::new;
        table.row([name.to_owned(), nothing(), micros(rest), share(rest), nothing(), nothing(), nothing(), nothing(), nothing()]);
    }
    table.render()
}

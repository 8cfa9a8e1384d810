//! How fast a model reads and writes, in the usual notation: `pp512` reads a prompt of 512 tokens, `tg64` writes 64 one by one.

use crate::{Cancel, Error, Model, Session, memory, sample::random::uniform};
use serde::Serialize;
use std::time::{Duration, Instant};

/// What to measure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BenchOptions {
    /// Prompt lengths (`pp`).
    pub prompt: Vec<usize>,
    /// Numbers of written tokens (`tg`).
    pub generate: Vec<usize>,
    /// Measured runs of each; one more before them warms up.
    pub repeats: usize,
    /// Compute all logits of a token, as sampling needs them, not only the largest.
    pub all_logits: bool,
}

impl Default for BenchOptions {
    fn default() -> Self {
        Self { prompt: vec![512], generate: vec![64], repeats: 5, all_logits: false }
    }
}

/// Tokens per second of one test.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BenchResult {
    /// `pp512`, `tg64` …
    pub test: String,
    /// Mean of the runs.
    pub mean: f64,
    /// Standard deviation of the runs (of a sample: 0 for one run).
    pub sd: f64,
    /// Each run.
    pub runs: Vec<f64>,
}

impl BenchResult {
    /// The figures of a test from its runs.
    pub fn new(test: String, runs: Vec<f64>) -> Self {
        let count = runs.len() as f64;
        let mean = runs.iter().sum::<f64>() / count.max(1.0);
        let variance = runs.iter().map(|run| (run - mean).powi(2)).sum::<f64>() / (count - 1.0).max(1.0);
        Self { test, mean, sd: variance.sqrt(), runs }
    }
}

/// Everything that `bench --json` prints about one model on one device.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BenchReport {
    /// The bundle, as people call it.
    pub bundle: String,
    /// The label of its precision.
    pub precision: String,
    /// The device.
    pub device: String,
    /// Threads it worked with.
    pub threads: usize,
    /// One entry per test.
    pub results: Vec<BenchResult>,
    /// The most memory that this process has held.
    pub peak_rss_bytes: u64,
    /// Bytes of weights that one decode step reads: counted over the longest `tg` test, or reckoned where there is none or the device does not count.
    pub weight_bytes_per_token: u64,
    /// What this machine can read from memory, measured here; 0 where that cannot be done.
    pub read_bandwidth_bytes_per_s: f64,
    /// The share of it that the fastest `tg` test used; 0 where either is not known.
    pub bandwidth_share: f64,
    /// Which experts were used; none where the model has none, no `tg` test was run, or the device does not count.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts: Option<ExpertUse>,
}

/// Which experts the tokens of a test chose.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ExpertUse {
    /// Tokens written.
    pub tokens: usize,
    /// Experts of a layer.
    pub of: usize,
    /// For each layer, how many of them were used at least once.
    pub used: Vec<usize>,
}

/// The most runs of a test.
pub const MAX_REPEATS: usize = 1000;

/// Runs the tests on `model`. Each result is shown as soon as it is there.
pub fn bench(
    model: &Model,
    precision: &str,
    options: &BenchOptions,
    cancel: &Cancel,
    on_result: &mut dyn FnMut(&BenchResult),
) -> Result<BenchReport, Error> {
    let tests = options.prompt.iter().map(|&n| (Test::Prompt, n)).chain(options.generate.iter().map(|&n| (Test::Generate, n)));
    let tests: Vec<_> = tests.filter(|&(_, tokens)| tokens > 0).collect();
    if !(1..=MAX_REPEATS).contains(&options.repeats) {
        return Err(Error::Option { option: "repeats", found: options.repeats.to_string(), expected: format!("1 to {MAX_REPEATS}") });
    }
    if let Some(&(_, longest)) = tests.iter().max_by_key(|(_, tokens)| tokens)
        && longest > model.context()
    {
        return Err(Error::PromptTooLong { prompt: longest, context: model.context(), limit: model.context_limit() });
    }
    let mut session = model.session()?;
    session.want_largest_only(!options.all_logits);
    let mut results = Vec::new();
    let mut reading = Reading::default();
    for (test, tokens) in tests {
        let ids = some_ids(model, tokens);
        test.run(&mut session, &ids, cancel, &mut || ())?;
        let mut runs = Vec::with_capacity(options.repeats);
        // What is read is the same in all runs once they are warm.
        let mut counted = Reading::default();
        for _ in 0..options.repeats {
            counted = Reading::default();
            let time = test.run(&mut session, &ids, cancel, &mut || counted.add(model))?;
            runs.push(tokens as f64 / time.as_secs_f64());
        }
        if counted.tokens > reading.tokens {
            reading = counted;
        }
        let result = BenchResult::new(format!("{}{tokens}", test.name()), runs);
        on_result(&result);
        results.push(result);
    }
    let threads = model.device().threads;
    let reckoned = || memory::weight_bytes_per_token(model.program());
    let weight_bytes_per_token = reading.bytes.checked_div(reading.tokens as u64).unwrap_or_else(reckoned);
    // Before the bandwidth is measured: that takes memory of its own.
    let peak_rss_bytes = memory::peak_rss_bytes();
    let read_bandwidth = read_bandwidth(threads);
    let fastest = results.iter().filter(|r| r.test.starts_with("tg")).map(|r| r.mean).fold(0.0, f64::max);
    Ok(BenchReport {
        bundle: model.name().to_owned(),
        precision: precision.to_owned(),
        device: model.device().name.clone(),
        threads,
        results,
        peak_rss_bytes,
        weight_bytes_per_token,
        read_bandwidth_bytes_per_s: read_bandwidth,
        bandwidth_share: if read_bandwidth > 0.0 { fastest * weight_bytes_per_token as f64 / read_bandwidth } else { 0.0 },
        experts: reading.experts(),
    })
}

/// What tokens, written one by one, read of the weights.
#[derive(Default)]
struct Reading {
    tokens: usize,
    bytes: u64,
    /// For each layer with experts, which were used.
    used: Vec<Vec<bool>>,
}

impl Reading {
    /// Counts what the last call read.
    fn add(&mut self, model: &Model) {
        let runner = model.runner();
        let Some(read) = runner.executable.weights_read() else { return };
        self.tokens += 1;
        self.bytes += read.bytes;
        self.used.resize(read.expert_rows.len(), Vec::new());
        for (used, rows) in self.used.iter_mut().zip(read.expert_rows) {
            used.resize(rows.len(), false);
            used.iter_mut().zip(rows).for_each(|(used, &rows)| *used |= rows > 0);
        }
    }

    fn experts(&self) -> Option<ExpertUse> {
        let of = self.used.first()?.len();
        let used = self.used.iter().map(|layer| layer.iter().filter(|used| **used).count()).collect();
        Some(ExpertUse { tokens: self.tokens, of, used })
    }
}

#[derive(Clone, Copy)]
enum Test {
    Prompt,
    Generate,
}

impl Test {
    fn name(self) -> &'static str {
        match self {
            Self::Prompt => "pp",
            Self::Generate => "tg",
        }
    }

    /// How long the test takes; `written` is called after each token of a `tg` test.
    fn run(self, session: &mut Session, ids: &[u32], cancel: &Cancel, written: &mut dyn FnMut()) -> Result<Duration, Error> {
        session.reset();
        let started = Instant::now();
        match self {
            Self::Prompt => drop(session.append(ids, cancel)?),
            Self::Generate => {
                for &id in ids {
                    session.append(&[id], cancel)?;
                    written();
                }
            }
        }
        Ok(started.elapsed())
    }
}

/// Ids from all over the vocabulary, the same each time.
fn some_ids(model: &Model, count: usize) -> Vec<u32> {
    let vocabulary = model.vocabulary().ids as f64;
    (0..count as u64).map(|n| (uniform(1, n) * vocabulary) as u32).collect()
}

/// Bytes per second that `threads` threads of the processor read from memory; 0 where that cannot be measured.
#[cfg(feature = "cpu")]
fn read_bandwidth(threads: usize) -> f64 {
    qhx_cpu::measure_bandwidth(threads).unwrap_or(0.0)
}

#[cfg(not(feature = "cpu"))]
fn read_bandwidth(_: usize) -> f64 {
    0.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mean_and_deviation() {
        let result = BenchResult::new("tg8".into(), vec![2.0, 4.0, 6.0]);
        assert_eq!((result.mean, result.sd), (4.0, 2.0));
        assert_eq!(BenchResult::new("tg8".into(), vec![3.0]).sd, 0.0);
    }
}

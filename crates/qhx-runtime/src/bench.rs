//! How fast a model reads and writes, in the usual notation: `pp512` reads a prompt of 512 tokens, `tg64` writes 64 one by one.

use crate::{
    Cancel, Error, GenerateOptions, Generation, Model, Prompt, Session, Wanted,
    draft::DraftSource,
    engine::{Engine, EngineOptions, Request},
    generate, memory,
    placement::Fallback,
    sample::random::uniform,
    timing::ExpertCacheUse,
};
use qhx_ir::{ExpertCache, Profile};
use serde::Serialize;
use std::time::{Duration, Instant};

/// What to measure.
#[derive(Clone, Debug, PartialEq)]
pub struct BenchOptions {
    /// Prompt lengths (`pp`).
    pub prompt: Vec<usize>,
    /// Numbers of written tokens (`tg`).
    pub generate: Vec<usize>,
    /// Measured runs of each; one more before them warms up.
    pub repeats: usize,
    /// Sessions that decode at once: each `tg` test is repeated for every number. More than one needs a model that was loaded for as many.
    pub sessions: Vec<usize>,
    /// Tokens that are in the cache before a test begins: each test is repeated for every number.
    pub depth: Vec<usize>,
    /// Compute all logits of a token, as sampling needs them, not only the largest.
    pub all_logits: bool,
    /// `tg` tests are greedy answers, with drafts from here; absent: tokens that are given, one by one.
    pub draft: Option<DraftSource>,
    /// Run each test of one session once more, and measure where its time goes.
    pub profile: bool,
}

impl Default for BenchOptions {
    fn default() -> Self {
        Self {
            prompt: vec![512],
            generate: vec![64],
            repeats: 5,
            sessions: vec![1],
            depth: vec![0],
            all_logits: false,
            draft: None,
            profile: false,
        }
    }
}

/// Tokens per second of one test.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BenchResult {
    /// `pp512`, `tg64`, with 2,000 tokens in the cache `tg64@d2000` …
    pub test: String,
    /// Mean of the runs.
    pub mean: f64,
    /// Standard deviation of the runs (of a sample: 0 for one run).
    pub sd: f64,
    /// Each run.
    pub runs: Vec<f64>,
    /// What became of drafts, where there could be any.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub drafts: Option<DraftCounts>,
}

/// The drafts of all runs of a test.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DraftCounts {
    /// Tokens that were guessed and computed.
    pub drafted: usize,
    /// Those of them that were right.
    pub accepted: usize,
}

impl BenchResult {
    /// The figures of a test from its runs.
    pub fn new(test: String, runs: Vec<f64>) -> Self {
        let count = runs.len() as f64;
        let mean = runs.iter().sum::<f64>() / count.max(1.0);
        let variance = runs.iter().map(|run| (run - mean).powi(2)).sum::<f64>() / (count - 1.0).max(1.0);
        Self { test, mean, sd: variance.sqrt(), runs, drafts: None }
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
    /// What became of chosen experts in the measured runs, where only some of them lie on the device with the rest of the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expert_cache: Option<ExpertCacheUse>,
    /// Where the time of tests went, where that was wanted and the device measures it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub profiles: Vec<TestProfile>,
    /// What ran elsewhere than it was placed: results are those of the device that took its place.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub fallbacks: Vec<Fallback>,
}

/// Where the time of a test went. The measurement itself takes time, too: a little for every step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TestProfile {
    /// As in its result.
    pub test: String,
    /// How long it took.
    pub seconds: f64,
    /// What its calls did in that time.
    #[serde(flatten)]
    pub calls: Profile,
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
    let decode = options.generate.iter().flat_map(|&n| options.sessions.iter().map(move |&sessions| (Test::Generate(sessions), n)));
    let tests: Vec<_> = options.prompt.iter().map(|&n| (Test::Prompt, n)).chain(decode).filter(|&(_, tokens)| tokens > 0).collect();
    let tests: Vec<_> = options.depth.iter().flat_map(|&depth| tests.iter().map(move |&(test, tokens)| (test, tokens, depth))).collect();
    if let Some(&sessions) = options.sessions.iter().find(|sessions| !(1..=model.sessions()).contains(sessions)) {
        let expected = format!("1 to {}, as many as the model was loaded for", model.sessions());
        return Err(Error::Option { option: "sessions", found: sessions.to_string(), expected });
    }
    if !(1..=MAX_REPEATS).contains(&options.repeats) {
        return Err(Error::Option { option: "repeats", found: options.repeats.to_string(), expected: format!("1 to {MAX_REPEATS}") });
    }
    if let Some(longest) = tests.iter().map(|(_, tokens, depth)| tokens.saturating_add(*depth)).max()
        && longest > model.context()
    {
        return Err(Error::PromptTooLong { prompt: longest, context: model.context(), limit: model.context_limit() });
    }
    let most = options.sessions.iter().copied().max().unwrap_or(1);
    let mut sessions = (0..most).map(|_| model.session()).collect::<Result<Vec<_>, _>>()?;
    sessions.iter_mut().for_each(|session| session.want(if options.all_logits { Wanted::Logits } else { Wanted::Largest }));
    let mut results = Vec::new();
    let mut reading = Reading::default();
    let mut cache = ExpertCache::default();
    let mut profiles = Vec::new();
    for (test, tokens, depth) in tests {
        let ids = some_ids(model, tokens);
        let before = some_ids(model, depth);
        for session in &mut sessions[..test.sessions()] {
            session.reset();
            if !before.is_empty() {
                session.append(&before, cancel)?;
                session.checkpoint()?;
            }
        }
        let mut runs = Vec::with_capacity(options.repeats);
        // What is read is the same in all runs once they are warm.
        let mut counted = Reading::default();
        let mut drafts = None;
        match (test, &options.draft) {
            (Test::Generate(_), Some(source)) => {
                let work = Drafted { source, all_logits: options.all_logits, depth, tokens };
                work.run(test, &mut sessions, cancel)?;
                let counts = drafts.insert(DraftCounts::default());
                for _ in 0..options.repeats {
                    let (time, answers) = work.run(test, &mut sessions, cancel)?;
                    runs.push((tokens * test.sessions()) as f64 / time.as_secs_f64());
                    counts.drafted += answers.iter().map(|answer| answer.timing.drafted).sum::<usize>();
                    counts.accepted += answers.iter().map(|answer| answer.timing.accepted).sum::<usize>();
                }
            }
            _ => {
                test.run(&mut sessions, depth, &ids, cancel, &mut || ())?;
                // Calls of several sessions count once: all of them are in each.
                let chosen = sessions[0].work().experts;
                for _ in 0..options.repeats {
                    counted = Reading::default();
                    let time = test.run(&mut sessions, depth, &ids, cancel, &mut || counted.add(model))?;
                    runs.push((tokens * test.sessions()) as f64 / time.as_secs_f64());
                }
                cache = cache + sessions[0].work().experts.since(&chosen);
                if options.profile && test.sessions() == 1 {
                    model.runner().executable.begin_profile();
                    let time = test.run(&mut sessions, depth, &ids, cancel, &mut || ());
                    let calls = model.runner().executable.take_profile();
                    let (test, seconds) = (test.name(tokens, depth), time?.as_secs_f64());
                    profiles.extend(calls.map(|calls| TestProfile { test, seconds, calls }));
                }
            }
        }
        if counted.tokens > reading.tokens && test.sessions() == 1 {
            reading = counted;
        }
        let result = BenchResult { drafts, ..BenchResult::new(test.name(tokens, depth), runs) };
        on_result(&result);
        results.push(result);
    }
    let threads = model.device().threads;
    let reckoned = || memory::weight_bytes_per_token(model.program());
    let weight_bytes_per_token = reading.bytes.checked_div(reading.tokens as u64).unwrap_or_else(reckoned);
    // Before the bandwidth is measured: that takes memory of its own.
    let peak_rss_bytes = memory::peak_rss_bytes();
    // The processor's bandwidth says nothing about a device with memory of its own.
    let read_bandwidth = if model.memory().device.is_some() { 0.0 } else { read_bandwidth(threads) };
    let fastest = results.iter().filter(|r| r.test.starts_with("tg") && !r.test.contains('x')).map(|r| r.mean).fold(0.0, f64::max);
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
        expert_cache: ExpertCacheUse::of(cache),
        profiles,
        fallbacks: model.placement().fallbacks.clone(),
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
    /// By so many sessions at once.
    Generate(usize),
}

impl Test {
    /// In the usual notation; with several sessions, their number behind it, then what is in the cache.
    fn name(self, tokens: usize, depth: usize) -> String {
        let depth = if depth == 0 { String::new() } else { format!("@d{depth}") };
        match self {
            Self::Prompt => format!("pp{tokens}{depth}"),
            Self::Generate(1) => format!("tg{tokens}{depth}"),
            Self::Generate(sessions) => format!("tg{tokens}x{sessions}{depth}"),
        }
    }

    fn sessions(self) -> usize {
        match self {
            Self::Prompt => 1,
            Self::Generate(sessions) => sessions,
        }
    }

    /// How long the test takes after the first `depth` rows of the sessions; `decoded` is called after each step of a `tg` test.
    fn run(
        self,
        sessions: &mut [Session],
        depth: usize,
        ids: &[u32],
        cancel: &Cancel,
        decoded: &mut dyn FnMut(),
    ) -> Result<Duration, Error> {
        let sessions = &mut sessions[..self.sessions()];
        sessions.iter_mut().try_for_each(|session| session.rollback(depth))?;
        let started = Instant::now();
        match (self, &mut *sessions) {
            (Self::Prompt, [session, ..]) => drop(session.append(ids, cancel)?),
            (Self::Generate(1), [session, ..]) => {
                for &id in ids {
                    session.append(&[id], cancel)?;
                    decoded();
                }
            }
            _ => {
                let mut sessions: Vec<&mut Session> = sessions.iter_mut().collect();
                for step in 0..ids.len() {
                    // Not the same token for all: that would be kind to a mixture of experts.
                    let next: Vec<u32> = (0..sessions.len()).map(|session| ids[(step + 7 * session) % ids.len()]).collect();
                    Session::append_together(&mut sessions, &next, cancel, None)?;
                    decoded();
                }
            }
        }
        Ok(started.elapsed())
    }
}

/// Answers with drafts. Each has as many steps as a `tg` test where nothing is drafted: one for the prompt's last token, and one for each further token.
struct Drafted<'a> {
    source: &'a DraftSource,
    all_logits: bool,
    depth: usize,
    tokens: usize,
}

impl Drafted<'_> {
    fn run(&self, test: Test, sessions: &mut [Session], cancel: &Cancel) -> Result<(Duration, Vec<Generation>), Error> {
        let sessions = &mut sessions[..test.sessions()];
        let Some(model) = sessions.first().map(|session| session.model().clone()) else { return Ok((Duration::ZERO, Vec::new())) };
        let (draft, max_new) = (self.source.clone(), self.tokens);
        let options = GenerateOptions { draft, max_new, ignore_eos: true, keep_logits: self.all_logits, ..GenerateOptions::default() };
        let before = some_ids(&model, self.depth);
        // Behind what is in the cache a token of its own for each session.
        let prompt = |number: usize| Prompt::from_ids([&before[..], &some_ids(&model, number + 1)[number..]].concat());
        if let [session] = sessions {
            session.rollback(self.depth)?;
            let started = Instant::now();
            let answer = generate(session, &prompt(0), &options, cancel, &mut |_| ())?;
            return Ok((started.elapsed(), vec![answer]));
        }
        let engine = Engine::start(model.clone(), EngineOptions::default())?;
        if !before.is_empty() {
            engine.keep(engine.session(&Prompt::from_ids(before.clone()), cancel)?);
        }
        let request = |number| Request { cancel: cancel.clone(), ..Request::new(prompt(number)).with_options(options.clone()) };
        let started = Instant::now();
        let answers = (0..sessions.len()).map(|number| engine.submit(request(number))).collect::<Result<Vec<_>, _>>()?;
        let answers = answers.into_iter().map(|answer| answer.finish()).collect::<Result<_, _>>()?;
        Ok((started.elapsed(), answers))
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

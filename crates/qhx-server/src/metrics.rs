//! What the server has done, in numbers, as Prometheus reads them. Names are vLLM's, so that existing dashboards show them.

use crate::models::Models;
use qhx::{FinishReason, Generation};
use std::{
    collections::BTreeMap,
    fmt::Write,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// Seconds up to which an answer counts in each bucket: of whole answers, of first tokens …
const LONG: [f64; 13] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0];
/// … and of single tokens.
const SHORT: [f64; 13] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5];

/// What the server has done.
#[derive(Default)]
pub(crate) struct Metrics(Mutex<BTreeMap<String, Numbers>>);

/// Of one model.
#[derive(Clone, Debug, Default)]
pub(crate) struct Numbers {
    pub(crate) prompt_tokens: u64,
    pub(crate) generated_tokens: u64,
    pub(crate) cached_tokens: u64,
    stop: u64,
    length: u64,
    abort: u64,
    first_token: Histogram,
    between_tokens: Histogram,
    whole: Histogram,
    queue: Histogram,
    prefill: Histogram,
    decode: Histogram,
}

#[derive(Clone, Debug, Default)]
struct Histogram {
    /// Beyond the last bound, too.
    buckets: [u64; LONG.len() + 1],
    sum: f64,
    count: u64,
}

impl Histogram {
    fn add(&mut self, bounds: &[f64], seconds: f64, times: u64) {
        let bucket = bounds.iter().position(|bound| seconds <= *bound).unwrap_or(bounds.len());
        self.buckets[bucket] += times;
        self.sum += seconds * times as f64;
        self.count += times;
    }

    fn write(&self, bounds: &[f64], name: &str, label: &str, text: &mut String) {
        let mut up_to = 0;
        for (bucket, count) in self.buckets.iter().enumerate() {
            up_to += count;
            let bound = bounds.get(bucket).map_or("+Inf".to_owned(), f64::to_string);
            let _ = writeln!(text, "{name}_bucket{{{label},le=\"{bound}\"}} {up_to}");
        }
        let _ = writeln!(text, "{name}_sum{{{label}}} {}\n{name}_count{{{label}}} {}", self.sum, self.count);
    }
}

/// A name, what it counts, and the number.
type Counter = (&'static str, &'static str, fn(&Numbers) -> u64);
/// A name, what it measures, the bounds of its buckets, and the times.
type Times = (&'static str, &'static str, &'static [f64], fn(&Numbers) -> &Histogram);

impl Metrics {
    fn numbers(&self) -> MutexGuard<'_, BTreeMap<String, Numbers>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An answer of a model has ended.
    pub(crate) fn finished(&self, model: &str, generation: &Generation) {
        let timing = &generation.timing;
        let mut all = self.numbers();
        let numbers = all.entry(model.to_owned()).or_default();
        numbers.prompt_tokens += generation.prompt_ids.len() as u64;
        numbers.cached_tokens += generation.kept_rows as u64;
        numbers.generated_tokens += generation.ids.len() as u64;
        match generation.finish_reason {
            FinishReason::Stop => numbers.stop += 1,
            FinishReason::Length => numbers.length += 1,
            _ => numbers.abort += 1,
        }
        let seconds = |milliseconds: f64| milliseconds / 1000.0;
        if !generation.ids.is_empty() {
            numbers.first_token.add(&LONG, seconds(timing.ttft_ms), 1);
            let queue = timing.ttft_ms - timing.prefill_ms - timing.encode_ms;
            numbers.queue.add(&LONG, seconds(queue.max(0.0)), 1);
            numbers.prefill.add(&LONG, seconds(timing.prefill_ms), 1);
            numbers.decode.add(&LONG, seconds(timing.decode_ms), 1);
        }
        let between = generation.ids.len().saturating_sub(1);
        if between > 0 {
            numbers.between_tokens.add(&SHORT, seconds(timing.decode_ms) / between as f64, between as u64);
        }
        numbers.whole.add(&LONG, seconds(timing.ttft_ms + timing.decode_ms), 1);
    }

    /// So many answers were given up because their clients have gone.
    pub(crate) fn aborted(&self, model: &str, answers: usize) {
        if answers > 0 {
            self.numbers().entry(model.to_owned()).or_default().abort += answers as u64;
        }
    }

    /// All numbers in Prometheus' text format.
    pub(crate) fn text(&self, models: &Models) -> String {
        let all = self.numbers().clone();
        let mut text = String::new();
        let mut family = |name: &str, kind: &str, help: &str, write: &mut dyn FnMut(&str, &mut String)| {
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
            write(name, &mut text);
        };
        let label = |model: &str| format!("model_name=\"{}\"", model.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n"));
        let mut of_engines = |name: &str, help: &str, kind: &str, number: &dyn Fn(&qhx::engine::EngineStats, u64) -> f64| {
            family(name, kind, help, &mut |name, text| {
                for entry in models.entries() {
                    let Some(engine) = entry.status().model.and_then(|model| model.engine().ok()) else { continue };
                    let value = number(&engine.stats(), engine.prefix_bytes());
                    let _ = writeln!(text, "{name}{{{}}} {value}", label(&entry.name));
                }
            });
        };
        of_engines("vllm:num_requests_running", "Answers that are being made.", "gauge", &|stats, _| stats.active as f64);
        of_engines("vllm:num_requests_waiting", "Requests that wait.", "gauge", &|stats, _| stats.waiting as f64);
        of_engines("vllm:kv_cache_usage_perc", "Part of the cache that is used, 1 is all.", "gauge", &|stats, most| {
            (stats.kv_bytes + stats.recurrent_bytes) as f64 / most.max(1) as f64
        });
        let counters: [Counter; 4] = [
            ("vllm:prefix_cache_queries_total", "Prompt tokens that were looked up in the cache.", |numbers| numbers.prompt_tokens),
            ("vllm:prefix_cache_hits_total", "Prompt tokens that were found there.", |numbers| numbers.cached_tokens),
            ("vllm:prompt_tokens_total", "Tokens of prompts.", |numbers| numbers.prompt_tokens),
            ("vllm:generation_tokens_total", "Tokens generated.", |numbers| numbers.generated_tokens),
        ];
        for (name, help, number) in counters {
            family(name, "counter", help, &mut |name, text| {
                for (model, numbers) in &all {
                    let _ = writeln!(text, "{name}{{{}}} {}", label(model), number(numbers));
                }
            });
        }
        family("vllm:request_success_total", "counter", "Requests by how they ended.", &mut |name, text| {
            for (model, numbers) in &all {
                for (reason, count) in [("stop", numbers.stop), ("length", numbers.length), ("abort", numbers.abort)] {
                    let _ = writeln!(text, "{name}{{{},finished_reason=\"{reason}\"}} {count}", label(model));
                }
            }
        });
        let histograms: [Times; 6] = [
            ("vllm:time_to_first_token_seconds", "From the request to its first token.", &LONG, |numbers| &numbers.first_token),
            ("vllm:inter_token_latency_seconds", "From one token to the next.", &SHORT, |numbers| &numbers.between_tokens),
            ("vllm:e2e_request_latency_seconds", "From the request to its last token.", &LONG, |numbers| &numbers.whole),
            ("vllm:request_queue_time_seconds", "Waiting for a place.", &LONG, |numbers| &numbers.queue),
            ("vllm:request_prefill_time_seconds", "Reading the prompt.", &LONG, |numbers| &numbers.prefill),
            ("vllm:request_decode_time_seconds", "Writing the answer.", &LONG, |numbers| &numbers.decode),
        ];
        for (name, help, bounds, histogram) in histograms {
            family(name, "histogram", help, &mut |name, text| {
                for (model, numbers) in &all {
                    histogram(numbers).write(bounds, name, &label(model), text);
                }
            });
        }
        text
    }
}

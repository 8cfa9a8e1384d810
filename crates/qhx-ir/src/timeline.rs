//! What ran when, on which device: for people who look at it in a viewer of traces (Perfetto, Chrome).

use serde_json::{Value, json};
use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// The most spans that are kept.
const MOST: usize = 1 << 20;

/// A record of spans of time. Clones share it.
#[derive(Clone)]
pub struct Timeline(Arc<Inner>);

struct Inner {
    start: Instant,
    spans: Mutex<Vec<Span>>,
}

/// Something that took time.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// The device, or whatever else does one thing after the other.
    pub lane: String,
    /// What was done.
    pub name: String,
    /// Since the record was begun.
    pub start: Duration,
    /// How long it took.
    pub length: Duration,
    /// Numbers that say more: rows, bytes.
    pub facts: Vec<(&'static str, u64)>,
}

impl Default for Timeline {
    fn default() -> Self {
        Self(Arc::new(Inner { start: Instant::now(), spans: Mutex::default() }))
    }
}

impl Timeline {
    /// Adds what began at `started` and ends now.
    pub fn add(&self, lane: &str, name: &str, started: Instant, facts: Vec<(&'static str, u64)>) {
        self.add_ended(lane, name, (started, Instant::now()), facts);
    }

    /// Adds what began and ended at these times.
    pub fn add_ended(&self, lane: &str, name: &str, (started, ended): (Instant, Instant), facts: Vec<(&'static str, u64)>) {
        let (start, length) = (started.saturating_duration_since(self.0.start), ended.saturating_duration_since(started));
        let mut spans = self.0.spans.lock().unwrap_or_else(PoisonError::into_inner);
        if spans.len() < MOST {
            spans.push(Span { lane: lane.to_owned(), name: name.to_owned(), start, length, facts });
        }
    }

    /// All spans so far.
    pub fn spans(&self) -> Vec<Span> {
        self.0.spans.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// As viewers of traces read it: the format of Chrome's trace events.
    pub fn to_json(&self) -> Value {
        let spans = self.spans();
        let mut lanes: Vec<&str> = Vec::new();
        for span in &spans {
            if !lanes.contains(&span.lane.as_str()) {
                lanes.push(&span.lane);
            }
        }
        let named = lanes
            .iter()
            .enumerate()
            .map(|(lane, name)| json!({ "ph": "M", "name": "thread_name", "pid": 1, "tid": lane, "args": { "name": name } }));
        let microseconds = |time: Duration| time.as_secs_f64() * 1e6;
        let events = spans.iter().map(|Span { lane, name, start, length, facts }| {
            let lane = lanes.iter().position(|own| own == lane);
            let facts: serde_json::Map<String, Value> = facts.iter().map(|&(name, number)| (name.to_owned(), number.into())).collect();
            json!({ "ph": "X", "name": name, "pid": 1, "tid": lane, "ts": microseconds(*start), "dur": microseconds(*length), "args": facts })
        });
        json!({ "displayTimeUnit": "ms", "traceEvents": named.chain(events).collect::<Vec<_>>() })
    }
}

impl fmt::Debug for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Timeline")
    }
}

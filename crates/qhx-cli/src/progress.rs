//! The progress of forging and of gates, on stderr. Hidden where stderr is no terminal.

use crate::{
    bar::{Bar, State},
    foreign::shown_in_line,
    output,
    units::{show_bytes, show_count},
};
use qhx::batch::BatchReport;
use qhx_forge::{GateProgress, Progress};
use qhx_ir::LoadProgress;
use std::{
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// A time left, and when that was said.
#[derive(Clone, Default)]
struct Estimate(Arc<Mutex<Option<(Duration, Instant)>>>);

impl Estimate {
    /// Keeps what is told until there is something newer.
    fn tell(&self, left: Option<Duration>) {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if told.map(|(left, _)| left) != left {
            *told = left.map(|left| (left, Instant::now()));
        }
    }

    /// The time left: what was told, or else what the bar reckons.
    fn left(&self, state: &State) -> String {
        let told = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        show_left(told.map_or_else(|| state.left(), |(left, at)| left.saturating_sub(at.elapsed())))
    }
}

/// A bar with rate and time left.
pub(crate) struct ForgeBar {
    bar: Bar,
    /// The time left as the forge itself tells it, while it does.
    told: Estimate,
}

impl ForgeBar {
    pub(crate) fn new() -> Self {
        let told = Estimate::default();
        let estimate = told.clone();
        let bar = Bar::new(move |state| {
            let (bar, message, left) = (state.bar(), &state.message, estimate.left(state));
            let [done, total, rate] = [state.done, state.total, state.rate() as u64].map(show_count);
            format!("{bar} {done} of {total}  {rate}/s  {left} left  {message}")
        });
        bar.update(|state| state.message = "reading the checkpoint".into());
        Self { bar, told }
    }

    /// What the forge reports.
    pub(crate) fn update(&self, progress: Progress<'_>) {
        self.told.tell(progress.left);
        let weight = shown_in_line(progress.weight);
        let message = match (progress.done >= progress.total, progress.left) {
            (true, _) => "writing to disk and computing checksums".to_owned(),
            (false, Some(_)) => format!("calibrating {weight}"),
            (false, None) => weight.into_owned(),
        };
        self.bar.update(|state| (state.done, state.total, state.message) = (progress.done, progress.total, message));
    }

    /// Writes a line above the bar.
    fn note(&self, line: &str) {
        self.bar.above(|| output::dim_note(line));
    }
}

impl Drop for ForgeBar {
    fn drop(&mut self) {
        self.bar.end();
    }
}

/// The weights that a GPU has.
pub(crate) struct LoadBar(Bar);

impl LoadBar {
    /// Nothing is shown before something is told.
    pub(crate) fn new() -> Self {
        Self(Bar::new(|state| {
            let [done, total] = [state.done, state.total].map(show_bytes);
            format!("{} {done} of {total} to the GPU", state.bar())
        }))
    }

    /// Tells it how far loading is.
    pub(crate) fn progress(&self) -> LoadProgress {
        let bar = self.0.clone();
        LoadProgress::new(move |done, total| {
            if done < total {
                bar.update(|state| (state.done, state.total) = (done, total));
            }
        })
    }
}

impl Drop for LoadBar {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// Counts the lines of a batch.
pub(crate) struct BatchBar(Bar);

impl BatchBar {
    pub(crate) fn new() -> Self {
        Self(Bar::new(|state| format!("{} lines answered  {}", state.done, state.message)))
    }

    pub(crate) fn update(&self, report: &BatchReport) {
        let message = format!("{} tokens, {} errors", show_count(report.generated_tokens as u64), report.errors);
        self.0.update(|state| (state.done, state.message) = ((report.skipped + report.answered) as u64, message));
    }
}

impl Drop for BatchBar {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// A bar for gates and for replaying oracles: steps done, and the time left.
pub(crate) struct GateBar {
    bar: Bar,
    /// The time left as the gate itself tells it.
    told: Estimate,
}

impl GateBar {
    pub(crate) fn new() -> Self {
        let told = Estimate::default();
        let estimate = told.clone();
        let bar = Bar::new(move |state| {
            let (bar, left) = (state.bar(), estimate.left(state));
            format!("{bar} {} of {}  {left} left  {}", state.done, state.total, state.message)
        });
        Self { bar, told }
    }

    /// What a gate reports.
    pub(crate) fn follow(&self, progress: GateProgress<'_>) {
        // The gate's estimate counts all that is to come.
        self.told.tell(progress.left);
        self.update(progress.what, progress.done, progress.total);
    }

    /// `done` steps of `total` of `what`.
    pub(crate) fn update(&self, what: &str, done: usize, total: usize) {
        let what = shown_in_line(what);
        self.bar.update(|state| {
            (state.done, state.total) = (done as u64, total as u64);
            if state.message != what {
                state.message = what.into_owned();
                state.restart();
            }
        });
    }
}

impl Drop for GateBar {
    fn drop(&mut self) {
        self.bar.end();
    }
}

/// What a person sees while another process forges: a line, and on a terminal the time that has passed.
pub(crate) struct Waiting(Bar);

impl Waiting {
    pub(crate) fn new(place: &Path) -> Self {
        let name = place.file_name().unwrap_or_default().to_string_lossy();
        output::dim_note(&format!("another qhx process is forging {name}: waiting for it"));
        let bar = Bar::new(|state| format!("{} s", state.since.elapsed().as_secs()));
        bar.tick();
        Self(bar)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// Gates that take less begin without a word.
const WORTH_TELLING: Duration = Duration::from_secs(5);

/// What has been said about a bundle that is being made.
#[derive(Default)]
pub(crate) struct Told {
    calibration: bool,
}

impl Told {
    /// Says once how long calibration will take, where somebody has to wait for it.
    pub(crate) fn calibration(&mut self, progress: &Progress<'_>, bar: Option<&ForgeBar>) {
        let Some(left) = progress.left.filter(|left| *left >= WORTH_TELLING && !self.calibration) else { return };
        self.calibration = true;
        let line = format!("calibrating the weights: about {} (--calibration none rounds without it)", show_left(left));
        match bar {
            Some(bar) => bar.note(&line),
            None => output::dim_note(&line),
        }
    }
}

/// Says how long the gate will take, where somebody has to wait for it.
pub(crate) fn tell_time(left: Duration) {
    if left >= WORTH_TELLING {
        output::dim_note(&format!("comparing the bundle with the f32 model: about {}", show_left(left)));
    }
}

/// A time for people, rounded up.
pub(crate) fn show_left(time: Duration) -> String {
    match time.as_secs() {
        s if s < 100 => format!("{s} s"),
        s if s < 6000 => format!("{} min", s.div_ceil(60)),
        s => format!("{} h", s.div_ceil(3600)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_rounded_up() {
        assert_eq!([3, 101, 7000].map(|s| show_left(Duration::from_secs(s))), ["3 s", "2 min", "2 h"]);
    }
}

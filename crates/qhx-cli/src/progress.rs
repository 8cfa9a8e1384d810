//! The progress of forging and of gates, on stderr. Hidden where stderr is no terminal.

use crate::{foreign::shown_in_line, output, units::show_count};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use qhx::batch::BatchReport;
use qhx_forge::{GateProgress, Progress};
use qhx_ir::LoadProgress;
use std::{
    fmt::Write,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

const TEMPLATE: &str = "{spinner} {percent:>3} % {bar:30} {numbers}  {rate}  {left}  {wide_msg}";

const GATE_TEMPLATE: &str = "{spinner} {percent:>3} % {bar:30} {pos} of {len}  {left}  {wide_msg}";

const LOAD_TEMPLATE: &str = "{spinner} {percent:>3} % {bar:30} {binary_bytes} of {binary_total_bytes} to the GPU";

/// A bar with rate and time left.
pub(crate) struct ForgeBar {
    bar: ProgressBar,
    /// The time left as the forge itself tells it, while it does, with the moment at which it did.
    told: Estimate,
}

/// A time left, and when that was said.
type Estimate = Arc<Mutex<Option<(Duration, Instant)>>>;

/// Writes the time left: what was told, or else what the bar reckons.
fn left_of(told: &Estimate) -> impl Fn(&ProgressState, &mut dyn Write) + Clone + Send + Sync + 'static {
    let told = told.clone();
    move |state: &ProgressState, text: &mut dyn Write| {
        let told = *told.lock().unwrap_or_else(PoisonError::into_inner);
        let left = told.map_or_else(|| state.eta(), |(left, at)| left.saturating_sub(at.elapsed()));
        _ = write!(text, "{} left", show_left(left));
    }
}

/// Keeps what is told until there is something newer.
fn tell(told: &Estimate, left: Option<Duration>) {
    let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
    if told.map(|(left, _)| left) != left {
        *told = left.map(|left| (left, Instant::now()));
    }
}

impl ForgeBar {
    pub(crate) fn new() -> Self {
        let rate = |state: &ProgressState, text: &mut dyn Write| _ = write!(text, "{}/s", show_count(state.per_sec() as u64));
        let told = Estimate::default();
        let numbers = |state: &ProgressState, text: &mut dyn Write| {
            _ = write!(text, "{} of {}", show_count(state.pos()), show_count(state.len().unwrap_or(0)));
        };
        // The template is a constant; a wrong one only looks plainer.
        let style = ProgressStyle::with_template(TEMPLATE).unwrap_or_else(|_| ProgressStyle::default_bar());
        let style = style.with_key("rate", rate).with_key("left", left_of(&told)).with_key("numbers", numbers);
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(10)).with_style(style);
        bar.set_message("reading the checkpoint");
        Self { bar, told }
    }

    /// What the forge reports.
    pub(crate) fn update(&self, progress: Progress<'_>) {
        tell(&self.told, progress.left);
        self.bar.set_length(progress.total);
        self.bar.set_position(progress.done);
        let weight = shown_in_line(progress.weight);
        self.bar.set_message(match (progress.done >= progress.total, progress.left) {
            (true, _) => "writing to disk and computing checksums".to_owned(),
            (false, Some(_)) => format!("calibrating {weight}"),
            (false, None) => weight.into_owned(),
        });
    }

    /// Writes a line above the bar.
    fn note(&self, line: &str) {
        self.bar.suspend(|| output::dim_note(line));
    }
}

impl Drop for ForgeBar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// The weights that a GPU has.
pub(crate) struct LoadBar(ProgressBar);

impl LoadBar {
    /// Nothing is shown before something is told.
    pub(crate) fn new() -> Self {
        let style = ProgressStyle::with_template(LOAD_TEMPLATE).unwrap_or_else(|_| ProgressStyle::default_bar());
        Self(ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden()).with_style(style))
    }

    /// Tells it how far loading is.
    pub(crate) fn progress(&self) -> LoadProgress {
        let bar = self.0.clone();
        LoadProgress::new(move |done, total| {
            if bar.is_hidden() && done < total {
                bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(10));
            }
            bar.set_length(total);
            bar.set_position(done);
        })
    }
}

impl Drop for LoadBar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// Counts the lines of a batch.
pub(crate) struct BatchBar(ProgressBar);

impl BatchBar {
    pub(crate) fn new() -> Self {
        let style =
            ProgressStyle::with_template("{spinner} {pos} lines answered  {wide_msg}").unwrap_or_else(|_| ProgressStyle::default_spinner());
        Self(ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(10)).with_style(style))
    }

    pub(crate) fn update(&self, report: &BatchReport) {
        self.0.set_position((report.skipped + report.answered) as u64);
        self.0.set_message(format!("{} tokens, {} errors", show_count(report.generated_tokens as u64), report.errors));
    }
}

impl Drop for BatchBar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// A bar for gates and for replaying oracles: steps done, and the time left.
pub(crate) struct GateBar {
    bar: ProgressBar,
    /// The time left as the gate itself tells it, with the moment at which it did.
    told: Estimate,
}

impl GateBar {
    pub(crate) fn new() -> Self {
        let told = Estimate::default();
        let style = ProgressStyle::with_template(GATE_TEMPLATE).unwrap_or_else(|_| ProgressStyle::default_bar());
        let style = style.with_key("left", left_of(&told));
        Self { bar: ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(10)).with_style(style), told }
    }

    /// What a gate reports.
    pub(crate) fn follow(&self, progress: GateProgress<'_>) {
        // The gate's estimate counts all that is to come.
        tell(&self.told, progress.left);
        self.update(progress.what, progress.done, progress.total);
    }

    /// `done` steps of `total` of `what`.
    pub(crate) fn update(&self, what: &str, done: usize, total: usize) {
        let what = shown_in_line(what);
        if self.bar.message() != what {
            self.bar.set_message(what.into_owned());
            self.bar.reset_eta();
        }
        self.bar.set_length(total as u64);
        self.bar.set_position(done as u64);
    }
}

impl Drop for GateBar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// What a person sees while another process forges: a line, and on a terminal the time that has passed.
pub(crate) struct Waiting(ProgressBar);

impl Waiting {
    pub(crate) fn new(place: &Path) -> Self {
        let name = place.file_name().unwrap_or_default().to_string_lossy();
        output::dim_note(&format!("another qhx process is forging {name}: waiting for it"));
        let style = ProgressStyle::with_template("{spinner} {elapsed}").unwrap_or_else(|_| ProgressStyle::default_spinner());
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(10)).with_style(style);
        bar.enable_steady_tick(Duration::from_millis(100));
        Self(bar)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.finish_and_clear();
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
    fn the_template_is_right() {
        ProgressStyle::with_template(TEMPLATE).unwrap();
        ProgressStyle::with_template(GATE_TEMPLATE).unwrap();
        ProgressStyle::with_template(LOAD_TEMPLATE).unwrap();
        assert_eq!([3, 101, 7000].map(|s| show_left(Duration::from_secs(s))), ["3 s", "2 min", "2 h"]);
    }
}

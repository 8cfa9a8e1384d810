//! The conformance suite, which compares every device with the [`mod@crate::reference`].
//!
//! Cases are small random programs, one op each with the smallest companions it needs, then whole tiny models. Each case is run as a script of
//! calls: prefill and decode, padded, in several segments, interleaved with calls that are cancelled, discarded, undone or moved to another
//! state. Results must agree within the bounds of one table (`compare.rs`).
//!
//! A case is named `GROUP/NUMBER` and depends only on [`Options::seed`] and its name: [`Options::only`] runs it again.
//!
//! ```
//! use qhx_ir::{conformance, reference::ReferenceDevice};
//!
//! let options = conformance::Options { only: Some("add".into()), ..Default::default() };
//! let summary = conformance::run(&ReferenceDevice, &options, &mut |case| println!("{case}"));
//! assert!(summary.failed.is_empty(), "{summary}");
//! ```

mod build;
mod cases;
mod company;
mod compare;
#[cfg(test)]
mod coverage;
mod cuts;
mod judge;
pub mod models;
mod plan;
mod refusals;
mod rng;
mod session;
mod weights;

use crate::{ActivationForm, Device, OpKind};
use build::Case;
use rng::Rng;
use std::{collections::BTreeMap, fmt};

/// [`Options::cases`] of a test that is not extended: enough for every form of every op (`coverage.rs`).
const FEW: usize = 4;

/// Options of the suite.
#[derive(Clone, Debug)]
pub struct Options {
    /// The random seed of all cases.
    pub seed: u64,
    /// Cases for an op of ordinary variety; products and attention have several times as many.
    pub cases: usize,
    /// Of each group, only each so-manieth case.
    pub every: usize,
    /// Only cases whose name is this, or starts with it and a slash: `attend`, `linear/17`.
    pub only: Option<String>,
    /// Whether a refusal is a failure.
    pub strict: bool,
    /// The most segments a call may have.
    pub max_segments: usize,
    /// Whether the device commits a part of a call's rows with recurrent slots too.
    pub partial_commits: bool,
    /// Widens every bound, for a device that computes in a coarser form than the programs state.
    pub tolerance_factor: f64,
    /// Whether the device always computes in f16: the reference then also rounds rows that enter products to f16, and bounds are those of
    /// f16.
    pub half: bool,
    /// Whether a call that is made again gives the same bits.
    pub repeats: bool,
}

impl Default for Options {
    fn default() -> Self {
        let (seed, cases, every, only, strict, max_segments) = (1, 24, 1, None, false, 16);
        Self { seed, cases, every, only, strict, max_segments, partial_commits: true, tolerance_factor: 1.0, half: false, repeats: true }
    }
}

impl Options {
    /// What a test runs: few cases of each kind, but every form of every op, or with `QHX_EXTENDED` the default. `QHX_CONFORMANCE_SEED`,
    /// `QHX_CONFORMANCE_CASES` and `QHX_CONFORMANCE_ONLY` take precedence: running one case again needs no recompilation.
    pub fn from_environment() -> Self {
        let number = |name: &str| std::env::var(name).ok().and_then(|v| v.parse::<u64>().ok());
        let (default, extended) = (Self::default(), std::env::var_os("QHX_EXTENDED").is_some());
        Self {
            seed: number("QHX_CONFORMANCE_SEED").unwrap_or(default.seed),
            cases: number("QHX_CONFORMANCE_CASES").map_or(if extended { default.cases } else { FEW }, |n| n as usize),
            only: std::env::var("QHX_CONFORMANCE_ONLY").ok(),
            ..default
        }
    }

    /// A case's tolerance for this device.
    fn tolerance(&self, case: &Case) -> f64 {
        let stated = if self.half { compare::tolerance::half(case.tolerance) } else { case.tolerance };
        stated * self.tolerance_factor
    }

    fn wants(&self, group: &str, number: usize) -> bool {
        self.only.as_ref().is_none_or(|only| only == group || *only == format!("{group}/{number}"))
    }
}

/// The outcome of a case.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// All results agree.
    Passed {
        /// The largest difference, relative to its row's scale.
        worst: f64,
    },
    /// The device does not support one of its ops.
    Refused(String),
    /// What is wrong.
    Failed(String),
}

/// A case and its outcome.
#[derive(Clone, Debug)]
pub struct CaseResult {
    /// `GROUP/NUMBER`.
    pub name: String,
    /// The seed of the run.
    pub seed: u64,
    /// Shapes, forms and calls.
    pub what: String,
    /// The outcome.
    pub outcome: Outcome,
}

impl fmt::Display for CaseResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (seed {}; {}): ", self.name, self.seed, self.what)?;
        match &self.outcome {
            Outcome::Passed { worst } => write!(f, "passed, worst {worst:.1e}"),
            Outcome::Refused(reason) => write!(f, "refused: {reason}"),
            Outcome::Failed(reason) => write!(f, "FAILED: {reason}"),
        }
    }
}

/// All outcomes.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Cases that passed, and the worst difference, by group.
    pub passed: BTreeMap<String, (usize, f64)>,
    /// Refusals, by group and reason.
    pub refused: BTreeMap<(String, String), usize>,
    /// Cases that failed (with [`Options::strict`] also the refused ones).
    pub failed: Vec<CaseResult>,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (group, (count, worst)) in &self.passed {
            writeln!(f, "{group:20} {count:5} passed, worst difference {worst:.1e}")?;
        }
        for ((group, reason), count) in &self.refused {
            writeln!(f, "{group:20} {count:5} refused: {reason}")?;
        }
        for failed in &self.failed {
            writeln!(f, "{failed}")?;
        }
        let passed: usize = self.passed.values().map(|p| p.0).sum();
        write!(f, "{passed} passed, {} refused, {} failed", self.refused.values().sum::<usize>(), self.failed.len())
    }
}

/// Compares `device` with the reference; `report` is called for every finished case.
pub fn run(device: &dyn Device, options: &Options, report: &mut dyn FnMut(&CaseResult)) -> Summary {
    let mut summary = Summary::default();
    refusals::run(device, options, &mut |result| {
        report(&result);
        summary.add("refusals", result, options.strict);
    });
    all(options, &mut summary, report, &mut |case, rng, calls| judge::judge(device, case, rng, options, calls));
    summary
}

/// Holds `device` to a promise that not every device makes: the outputs, taps and states of a session are the same to the last bit, however its rows are cut into calls
/// and whatever other sessions are in them. The cases are those of [`run`].
pub fn same_bits_for_any_cut(device: &dyn Device, options: &Options, report: &mut dyn FnMut(&CaseResult)) -> Summary {
    let mut summary = Summary::default();
    all(options, &mut summary, report, &mut |case, rng, calls| cuts::judge(device, case, rng, calls));
    summary
}

/// Holds `device` to what it says of itself ([`crate::Executable::invariant_rows`]): in calls of so many rows, and with drafts beside them, a row has the same bits as alone. The cases are those of [`run`], with
/// states of many lengths.
pub fn same_bits_in_company(device: &dyn Device, options: &Options, report: &mut dyn FnMut(&CaseResult)) -> Summary {
    let mut summary = Summary::default();
    all(options, &mut summary, report, &mut |case, rng, calls| company::judge(device, case, rng, calls));
    summary
}

/// Draws the cases of all groups and has them judged.
fn all(
    options: &Options,
    summary: &mut Summary,
    report: &mut dyn FnMut(&CaseResult),
    judge: &mut dyn FnMut(&Case, &mut Rng, &mut String) -> Outcome,
) {
    for group in cases::GROUPS.iter().chain(models::GROUPS) {
        for number in (0..group.count(options.cases)).step_by(options.every).filter(|&number| options.wants(group.name, number)) {
            let result = one(options, group, number, judge);
            report(&result);
            summary.add(group.name, result, options.strict);
        }
    }
}

impl Summary {
    fn add(&mut self, group: &str, result: CaseResult, strict: bool) {
        match &result.outcome {
            Outcome::Passed { worst } => {
                let entry = self.passed.entry(group.into()).or_default();
                *entry = (entry.0 + 1, entry.1.max(*worst));
            }
            Outcome::Refused(reason) if !strict => *self.refused.entry((group.into(), reason.clone())).or_default() += 1,
            _ => self.failed.push(result),
        }
    }
}

/// A kind of case.
struct Group {
    name: &'static str,
    /// Quarters of [`Options::cases`].
    weight: usize,
    /// The minimum number of cases, where each covers another form.
    least: usize,
    draw: fn(Rng, usize) -> Case,
}

impl Group {
    /// Its cases, where an op of ordinary variety has `cases`.
    fn count(&self, cases: usize) -> usize {
        (cases * self.weight).div_ceil(4).max(self.least)
    }

    fn case(&self, seed: u64, number: usize) -> Case {
        (self.draw)(self.rng(seed, number, 0), number)
    }

    fn rng(&self, seed: u64, number: usize, part: u64) -> Rng {
        Rng::new(&[seed, rng::hash(self.name), number as u64, part])
    }
}

fn one(options: &Options, group: &Group, number: usize, judge: &mut dyn FnMut(&Case, &mut Rng, &mut String) -> Outcome) -> CaseResult {
    let mut case = group.case(options.seed, number);
    if options.half {
        for op in &mut case.program.ops {
            if let OpKind::Linear { activation: form, .. } | OpKind::Experts { form, .. } = &mut op.op {
                *form = ActivationForm::F16;
            }
            if matches!(op.op, OpKind::Route { .. }) {
                case.flips = Some(compare::tolerance::OTHER_EXPERT);
            }
        }
    }
    let mut calls = String::new();
    let outcome = guard(|| judge(&case, &mut group.rng(options.seed, number, 1), &mut calls));
    CaseResult { name: format!("{}/{number}", group.name), seed: options.seed, what: format!("{}; {calls}", case.what), outcome }
}

/// A panic is a failure of the case, not the end of the suite.
fn guard(case: impl FnOnce() -> Outcome) -> Outcome {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(case)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        Outcome::Failed(format!("panicked: {}", text.unwrap_or("(no text)")))
    })
}

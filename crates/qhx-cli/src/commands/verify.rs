//! `qhx verify`: whether a bundle still gives its recorded results on this machine.

use crate::{
    failure::Failure, flags::ExecutionFlags, interrupt::Interrupt, load::load_model, open::open_model, output, progress::GateBar,
    table::facts,
};
use clap::Args;
use qhx_bundle::Bundle;
use qhx_runtime::{
    LoadOptions,
    verify::{Difference, VerifyError, golden, oracle, replay, verdict},
};
use std::path::PathBuf;

/// Replay a bundle's oracle on this machine: pass or fail
///
/// Checks the checksum of every file, reads every weight, answers the oracle's prompts again, and compares tokens, logits and stage outputs. Exit code 0: pass;
/// 1: fail.
#[derive(Args)]
#[command(after_help = "Example:\n  qhx verify smol --device cpu\n  qhx verify smol --golden ./oracle-from-transformers")]
pub(crate) struct Verify {
    /// A bundle, a Hugging Face folder or a GGUF file (forged once into the user's cache)
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// Compare with the oracle in this folder (oracle.json, oracle.safetensors) instead of the bundle's own
    #[arg(long, value_name = "DIR")]
    golden: Option<PathBuf>,
    #[command(flatten)]
    execution: ExecutionFlags,
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
}

impl Verify {
    pub(crate) fn run(&self, interrupt: &Interrupt) -> Result<(), Failure> {
        let options = self.execution.load_options()?;
        let bundle = open_model(Some(&self.model), options.device, interrupt)?.bundle;
        bundle.verify_all(Some(&interrupt.flag()))?;
        match &self.golden {
            Some(folder) => self.outside(&bundle, folder, &options, interrupt),
            None => self.inside(&bundle, options, interrupt),
        }
    }

    fn inside(&self, bundle: &Bundle, mut options: LoadOptions, interrupt: &Interrupt) -> Result<(), Failure> {
        let parity = oracle(bundle).map_err(explain)?;
        let rows = parity.cases.iter().map(|case| case.prompt_ids.len() + case.ids.len()).max().unwrap_or(1);
        options.context = options.context.or(Some(rows.min(bundle.manifest().model.context_length)));
        let model = load_model(bundle, &options)?;
        let bar = GateBar::new();
        let report = replay(bundle, &model, interrupt.cancel(), &mut |done, all| bar.update("replaying the oracle", done, all));
        drop(bar);
        let report = report.map_err(explain)?;
        if self.json {
            output::print_json(&report)?;
        } else {
            let worst = report.worst_stage.as_ref();
            let shown = facts(&[
                ("bundle", bundle.place().to_string()),
                ("device", report.device.clone()),
                (
                    "gate",
                    format!(
                        "{} ({}): {}",
                        if parity.gate.passed { "passed" } else { "failed" },
                        kind(parity.gate.kind),
                        parity.gate.result
                    ),
                ),
                ("weights", format!("{} read, {} damaged", report.weights, report.damaged_weights.len())),
                (
                    "prompts",
                    format!(
                        "{} with {} images and sounds, {} tokens, {} differ",
                        report.prompts,
                        report.media,
                        report.tokens,
                        report.differences.len()
                    ),
                ),
                ("first difference", report.differences.first().map_or("none".into(), shown_difference)),
                ("worst stage", worst.map_or("none".into(), |w| format!("{}, {:.2e} (at most {:.0e})", w.stage, w.error, w.tolerance))),
                ("result", report.result.clone()),
            ]);
            output::print(&shown)?;
        }
        outcome(report.passed, &report.result, &report.problems)
    }

    fn outside(&self, bundle: &Bundle, folder: &std::path::Path, options: &LoadOptions, interrupt: &Interrupt) -> Result<(), Failure> {
        let model = load_model(bundle, options)?;
        let bar = GateBar::new();
        // A bundle without a gate, or of an earlier version, says nothing of its limits.
        let limits = verdict(bundle).ok().flatten().and_then(|gate| Some(gate.closeness?.limits));
        let mut progress = |done, all| bar.update("replaying the oracle", done, all);
        let report = golden::golden(&model, folder, limits.as_ref(), interrupt.cancel(), &mut progress);
        drop(bar);
        let report = report.map_err(explain)?;
        if self.json {
            output::print_json(&report)?;
        } else {
            let shown = facts(&[
                ("bundle", bundle.place().to_string()),
                ("oracle", folder.display().to_string()),
                (
                    "rule",
                    match (report.strict, limits) {
                        (true, _) => "strict: f32 throughout".into(),
                        (false, Some(limits)) => format!("at most {:.1} % of tokens may differ", 100.0 * limits.flips),
                        (false, None) => "tolerant".into(),
                    },
                ),
                (
                    "prompts",
                    format!(
                        "{} ({} too long), {} tokens, {} differ",
                        report.prompts,
                        report.left_out,
                        report.tokens,
                        report.differences.len()
                    ),
                ),
                ("first difference", report.differences.first().map_or("none".into(), shown_difference)),
                (
                    "worst stage",
                    report.worst_stage.as_ref().map_or("none given".into(), |(stage, cosine)| format!("{stage}, cosine {cosine:.7}")),
                ),
                ("result", report.result.clone()),
            ]);
            output::print(&shown)?;
        }
        outcome(report.passed, &report.result, &report.problems)
    }
}

fn outcome(passed: bool, result: &str, problems: &[String]) -> Result<(), Failure> {
    match passed {
        true => Ok(()),
        false => Err(Failure::work(format!("verification failed: {}", problems.first().map_or(result, String::as_str)))
            .causes(problems.iter().skip(1).take(8).cloned())
            .hint("the bundle is damaged or this device computes wrongly: fetch or forge the bundle again, or verify on another device")),
    }
}

fn explain(error: VerifyError) -> Failure {
    match &error {
        VerifyError::NoOracle { .. } => {
            Failure::from(error).hint("forge it again with a gate (--gate tolerant), or compare with an external oracle: --golden DIR")
        }
        VerifyError::Run(qhx_runtime::Error::Cancelled) => Failure::work("cancelled"),
        _ => error.into(),
    }
}

fn shown_difference(d: &Difference) -> String {
    let accepted = if d.accepted { ", within the rule" } else { "" };
    format!(
        "`{}`, token {}: expected {} (margin {:.4}), found {} (margin {:.4}){accepted}",
        d.case, d.step, d.expected, d.expected_margin, d.found, d.found_margin
    )
}

/// A gate as users write it.
pub(crate) fn kind(kind: qhx_bundle::parity::GateKind) -> &'static str {
    match kind {
        qhx_bundle::parity::GateKind::Strict => "strict",
        qhx_bundle::parity::GateKind::Tolerant => "tolerant",
    }
}

//! `qhx eval`: how well a model predicts a text, and how far it is from another model.

use crate::{
    environment::places,
    failure::Failure,
    flags::{MAX_TOKENS, MachineFlags, count},
    interrupt::Interrupt,
    load::warn_of_failed_gate,
    open::{open_for, open_model},
    output,
    progress::GateBar,
    table::facts,
};
use clap::Args;
use qhx::{
    Source,
    eval::{Against, Divergence, EvalOptions, Evaluation, evaluate, read_text},
};
use qhx_bundle::Bundle;
use qhx_forge::Material;
use std::path::{Path, PathBuf};

/// Measure the perplexity of a text, and the divergence from another model
///
/// The text is cut into windows. Each is read from an empty context, and every token but its first is scored. With --against, both models read the same tokens: KL is the Kullback-Leibler
/// divergence of MODEL's next-token distribution from the other's, a flip is a token at which the most probable next token differs.
#[derive(Args)]
#[command(
    after_help = "Example:\n  qhx eval smol-w8 --text notes.txt\n  qhx eval smol-w8 --text notes.txt --against ./SmolLM2-135M-Instruct"
)]
pub(crate) struct Eval {
    /// A bundle, a Hugging Face folder or a GGUF file (forged once into the user's cache)
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// The text, as a UTF-8 file; - for stdin
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// Compare with this model: a checkpoint (Hugging Face folder or GGUF file), computed in f32, or another bundle
    #[arg(long, value_name = "CHECKPOINT|BUNDLE")]
    against: Option<PathBuf>,
    /// Tokens per window [default: 512, or the model's context if that is smaller]
    #[arg(long, value_name = "N", value_parser = count(MAX_TOKENS))]
    window: Option<usize>,
    #[command(flatten)]
    machine: MachineFlags,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

/// The other model, opened.
enum Other {
    Checkpoint(Material),
    Bundle(Box<Bundle>),
}

impl Eval {
    pub(crate) fn run(&self, interrupt: &Interrupt) -> Result<(), Failure> {
        let text = read_text(&self.text)?;
        let other = self.against.as_ref().map(|path| self.other(path, interrupt)).transpose()?;
        let bundle = open_model(Some(&self.model), self.machine.device, interrupt)?.bundle;
        warn_of_failed_gate(&bundle);
        let bar = GateBar::new();
        let mut progress = |what: &str, done, all| bar.update(what, done, all);
        let options = EvalOptions {
            against: other.as_ref().map(|other| match other {
                Other::Checkpoint(material) => Against::Checkpoint(material),
                Other::Bundle(bundle) => Against::Bundle(bundle),
            }),
            window: self.window,
            load: self.machine.load_options()?,
            cancel: interrupt.cancel().clone(),
            progress: Some(&mut progress),
        };
        let found = evaluate(&bundle, &text, options);
        drop(bar);
        let found = found.map_err(|error| if error.is_cancelled() { Failure::work("cancelled") } else { error.into() })?;
        if self.json { output::print_json(&found) } else { output::print(&self.table(&bundle, &found)) }
    }

    fn other(&self, path: &Path, interrupt: &Interrupt) -> Result<Other, Failure> {
        Ok(match Source::find(path, &places())? {
            Source::Checkpoint(checkpoint) => Other::Checkpoint(Material::open(&checkpoint.path)?),
            _ => Other::Bundle(Box::new(open_for(path, self.machine.device, interrupt)?)),
        })
    }

    fn table(&self, bundle: &Bundle, found: &Evaluation) -> String {
        let Evaluation { scores, bits_per_weight, window, windows } = found;
        let mut lines = vec![
            ("model", format!("{}, {bits_per_weight:.2} bits per weight", bundle.manifest().model.name)),
            ("text", format!("{} tokens scored, in {windows} windows of up to {window}", scores.tokens)),
            ("perplexity", format!("{:.4} ± {:.4}", scores.perplexity, scores.perplexity_error)),
        ];
        if let (Some(against), Some(other)) = (&scores.against, &self.against) {
            lines.push(("against", other.display().to_string()));
            lines.extend(divergence(against));
        }
        facts(&lines)
    }
}

fn divergence(found: &Divergence) -> [(&'static str, String); 8] {
    [
        ("its perplexity", format!("{:.4}", found.reference_perplexity)),
        ("mean KL", format!("{} ± {}", small(found.kl_mean), small(found.kl_mean_error))),
        ("median KL", small(found.kl_median)),
        ("99 % KL", small(found.kl_p99)),
        ("99.9 % KL", format!("{}, largest {}", small(found.kl_p999), small(found.kl_max))),
        ("flips", format!("{:.2} %", 100.0 * found.flips)),
        ("same top", format!("{:.2} %", 100.0 * found.same_top)),
        ("Δp", format!("mean {:+.3} %, root mean square {:.3} %", found.delta_p_mean, found.delta_p_rms)),
    ]
}

/// A divergence for people.
fn small(x: f64) -> String {
    if x != 0.0 && x.abs() < 1e-4 { format!("{x:.1e}") } else { format!("{x:.5}") }
}

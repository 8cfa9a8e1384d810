//! Several precisions of one checkpoint side by side: size, closeness to the checkpoint, perplexity, and speed on this machine.

use crate::{
    Error,
    eval::{Against, EvalOptions, evaluate},
};
use qhx_bundle::{Bundle, OpenOptions, Verify, files, parity::GateResult, write::check_free};
use qhx_forge::{Calibration, ForgeOptions, GateOptions, Gated, Material, Precision, forge_gated, gate::suite::built_in_text};
use qhx_runtime::{
    Cancel, LoadOptions, Model,
    bench::{BenchOptions, bench},
    eval::Divergence,
};
use serde::Serialize;
use std::{
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

/// Tokens that are read, and written, to measure speed.
const PROMPT_TOKENS: usize = 256;
const NEW_TOKENS: usize = 32;
/// Runs of each.
const REPEATS: usize = 2;

/// What is compared, and how.
pub struct CompareOptions<'a> {
    /// The precisions, in the order of the table.
    pub precisions: &'a [Precision],
    /// The text for perplexity and divergence; absent: a built-in one.
    pub text: Option<&'a str>,
    /// The folder in which the bundles are made, each under the name of its precision.
    pub folder: &'a Path,
    /// How weights that become integers are rounded; absent: each number to the nearest.
    pub calibration: Option<Calibration>,
    /// Whether bundles of those names are replaced.
    pub replace: bool,
    /// CPU threads; absent: one for each core.
    pub threads: Option<usize>,
    /// Lets another thread stop it.
    pub cancel: Cancel,
    /// Told what is being done, and how many steps of how many are done.
    pub progress: &'a mut dyn FnMut(&str, usize, usize),
}

/// A precision beside the others.
#[derive(Clone, Debug, Serialize)]
pub struct Compared {
    /// Its name.
    pub precision: String,
    /// Where the bundle is; under `NAME.rejected` where it failed its gate.
    pub bundle: PathBuf,
    /// Bytes of all weights.
    pub bytes: u64,
    /// Bits for each number, scales included.
    pub bits_per_weight: f64,
    /// What its gate said.
    pub gate: GateResult,
    /// Tokens of the text that were scored.
    pub tokens: usize,
    /// Perplexity of the text.
    pub perplexity: f64,
    /// How far it is from the checkpoint in f32 on that text.
    #[serde(flatten)]
    pub against: Divergence,
    /// Prompt tokens per second on this machine.
    pub prefill_tokens_per_second: f64,
    /// Tokens per second, one after the other.
    pub decode_tokens_per_second: f64,
}

/// Makes a bundle of each precision, measures its gate, evaluates it on a text beside the checkpoint, and measures its speed.
pub fn compare(material: &Material, options: CompareOptions<'_>) -> Result<Vec<Compared>, Error> {
    let CompareOptions { precisions, text, folder, calibration, replace, threads, cancel, progress } = options;
    // Before the first one is made: names that are taken.
    let place = |precision: &Precision| folder.join(precision.to_string());
    precisions.iter().try_for_each(|precision| check_free(&place(precision), replace))?;
    fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
    let built_in = built_in_text();
    let text = text.unwrap_or(&built_in);
    let mut compared = Vec::new();
    for &precision in precisions {
        let name = |what: &str| format!("{precision}: {what}");
        let Gated { path, manifest, parity, .. } = {
            let mut measured = |at: qhx_forge::GateProgress<'_>| progress(&name(at.what), at.done, at.total);
            let out = place(&precision);
            let mut forge =
                ForgeOptions { replace, calibration: calibration.clone(), cancel: cancel.shared(), ..ForgeOptions::new(&out, precision) };
            forge_gated(material, &mut forge, GateOptions { cancel: cancel.clone(), threads, ..GateOptions::new(&mut measured) })?
        };
        let bundle = Bundle::open_with(&path, &OpenOptions { verify: Verify::Written, ..OpenOptions::default() })?;
        let load = LoadOptions { threads, ..LoadOptions::default() };
        let mut evaluated = |what: &str, done, all| progress(&name(what), done, all);
        let evaluation = evaluate(
            &bundle,
            text,
            EvalOptions {
                against: Some(Against::Checkpoint(material)),
                window: None,
                load: load.clone(),
                cancel: cancel.clone(),
                progress: Some(&mut evaluated),
            },
        )?;
        progress(&name("measuring its speed"), 0, 1);
        let context = manifest.model.context_length;
        let tests = BenchOptions {
            prompt: vec![PROMPT_TOKENS.min(context)],
            generate: vec![NEW_TOKENS.min(context)],
            repeats: REPEATS,
            ..BenchOptions::default()
        };
        let model = Model::load(&bundle, &LoadOptions { context: Some(PROMPT_TOKENS.min(context)), ..load })?;
        let speed = bench(&model, &manifest.precision, &tests, &cancel, &mut |_| {})?;
        let speed_of = |test: usize| speed.results.get(test).map_or(0.0, |result| result.mean);
        let weights = manifest.weights.iter().filter_map(|file| manifest.files.get(file));
        let scores = evaluation.scores;
        let Some(against) = scores.against else { continue };
        compared.push(Compared {
            precision: precision.to_string(),
            bundle: path,
            bytes: weights.map(|file| file.bytes).sum(),
            bits_per_weight: evaluation.bits_per_weight,
            gate: parity.gate,
            tokens: scores.tokens,
            perplexity: scores.perplexity,
            against,
            prefill_tokens_per_second: speed_of(0),
            decode_tokens_per_second: speed_of(1),
        });
    }
    Ok(compared)
}

/// Writes the table as a page that needs nothing but itself.
pub fn write_page(path: &Path, model: &str, compared: &[Compared]) -> Result<(), Error> {
    files::write(path, |to| to.write_all(page(model, compared).as_bytes())).map_err(Error::io("write", path))
}

fn page(model: &str, compared: &[Compared]) -> String {
    let model = escape(model);
    let reference = compared.first().map_or(0.0, |row| row.against.reference_perplexity);
    let tokens = compared.first().map_or(0, |row| row.tokens);
    let mut rows = String::new();
    for row in compared {
        let (class, gate) = if row.gate.passed { ("good", "passed") } else { ("bad", "failed") };
        let _ = write!(
            rows,
            "<tr><th>{}</th><td>{:.1}</td><td>{:.2}</td><td>{:.5}</td><td>{:.5}</td><td>{:.2} %</td><td>{:.3}</td><td>{:.0}</td><td>{:.1}</td><td class=\"{class}\" title=\"{}\">{gate}</td></tr>",
            escape(&row.precision),
            row.bytes as f64 / f64::from(1 << 20),
            row.bits_per_weight,
            row.against.kl_mean,
            row.against.kl_p99,
            100.0 * row.against.flips,
            row.perplexity,
            row.prefill_tokens_per_second,
            row.decode_tokens_per_second,
            escape(&row.gate.result)
        );
    }
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"><title>{model} · precisions</title><style>{STYLE}</style></head><body><main>\
<h1>{model}</h1><p>Its precisions on this machine, and how far each is from the checkpoint in f32 ({tokens} tokens of text, perplexity {reference:.3} in f32).</p>\
<div class=\"scroll\"><table><tr><th>precision</th><th>MiB</th><th>bits per weight</th><th>mean KL</th><th>99 % KL</th><th>flips</th><th>perplexity</th><th>prefill, tok/s</th><th>decode, tok/s</th><th>gate</th></tr>{rows}</table></div>\
<p>KL: Kullback-Leibler divergence of the next-token distribution from the f32 model's, in nats. Flips: tokens at which the most probable next token differs.</p></main></body></html>\n"
    )
}

const STYLE: &str = "\
:root{--back:#fbfaf7;--ink:#22252b;--soft:#6b7280;--line:#e4e1d8;--good:#2e7d4f;--bad:#c0392b}\
@media(prefers-color-scheme:dark){:root{--back:#15171b;--ink:#e7e5df;--soft:#9aa1ab;--line:#31353c;--good:#6fc48f;--bad:#ef7a6c}}\
body{margin:0;background:var(--back);color:var(--ink);font:16px/1.55 system-ui,sans-serif}main{max-width:64rem;margin:0 auto;padding:2.5rem 1.25rem}\
p{color:var(--soft)}.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}\
th,td{padding:.35rem .7rem .35rem 0;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}th:first-child{text-align:left}.good{color:var(--good)}.bad{color:var(--bad)}";

/// Names come from files.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

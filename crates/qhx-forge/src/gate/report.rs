//! `parity.html`: what was measured, as a page that needs nothing but itself.

use super::limits::percent;
use crate::{ForgeError, Material, families::Programs, plan::PrecisionPlan, precision::Precision};
use qhx_bundle::parity::{Case, Choices, GateKind, Parity, StageResult};
use qhx_runtime::memory::weight_bytes_per_token;
use std::{collections::BTreeSet, fmt::Write, ops::RangeInclusive};

/// Bytes of weights that one token reads, of experts the chosen ones.
#[derive(Clone, Copy, Debug)]
pub(super) struct BytesPerToken {
    own: u64,
    f16: u64,
}

impl BytesPerToken {
    /// Those of a bundle's text program, and of the same model in f16.
    pub(super) fn of(material: &Material, programs: &Programs) -> Result<Self, ForgeError> {
        let text = |programs: &Programs| weight_bytes_per_token(&programs.programs[0].program);
        Ok(Self { own: text(programs), f16: text(&material.programs(&PrecisionPlan::from(Precision::F16))?) })
    }
}

/// The page.
pub(super) fn page(parity: &Parity, bytes: BytesPerToken) -> String {
    let gate = &parity.gate;
    let (word, class) = if gate.passed { ("passed", "good") } else { ("not passed", "bad") };
    let kind = match gate.kind {
        GateKind::Strict => "strict",
        GateKind::Tolerant => "tolerant",
    };
    let mut body = String::new();
    let _ = write!(
        body,
        "<header><p class=\"eyebrow\">parity report</p><h1>{}</h1><p class=\"lead\"><span class=\"pill {class}\">{kind} gate {word}</span> {}</p></header>",
        escape(&parity.model),
        escape(&gate.incomplete().unwrap_or_default())
    );
    body += "<dl class=\"plot\">";
    for (question, answer) in questions(parity, bytes) {
        let _ = write!(body, "<dt>{question}</dt><dd>{}</dd>", escape(&answer));
    }
    body += "</dl>";
    // Files of the first version tell of answers alone.
    let closeness = gate.closeness.as_ref();
    let share = closeness.map_or(gate.flips as f64 / gate.tokens.max(1) as f64, |c| c.counted() as f64 / c.tokens.max(1) as f64);
    let differ = percent(share);
    let differ_note = closeness.map_or(String::new(), |c| {
        let limit = if c.own_types { String::new() } else { format!(", limit {}", percent(c.limits.flips)) };
        let ties = match c.ties {
            0 => String::new(),
            ties => format!("; not counted: {ties} at ties, where f32 has two equally good choices"),
        };
        format!("of {} compared{limit}{ties}", c.tokens)
    });
    let kl_note = closeness.map_or("from the f32 distribution".to_owned(), |c| {
        let limit = if c.own_types { String::new() } else { format!("limit {}; ", number(c.limits.mean_kl)) };
        format!("{limit}99 % of tokens are below {}", number(c.p99_kl))
    });
    let cosine_note = format!("of {}; 1 means the same direction as in f32", gate.worst_stage);
    let tiles = [
        ("precision", parity.precision.clone(), "how weights are stored"),
        ("prompts exact", format!("{} / {}", gate.exact_prompts, gate.prompts), "all tokens as in f32"),
        ("tokens", format!("{} / {}", gate.tokens - gate.flips, gate.tokens), "as in f32"),
        ("mean KL", number(gate.mean_kl), kl_note.as_str()),
        ("tokens that differ", differ, differ_note.as_str()),
        ("largest logit error", number(f64::from(gate.max_logit_error)), "of any token"),
        ("lowest cosine", format!("{:.6}", gate.worst_cosine), cosine_note.as_str()),
    ];
    body += "<section class=\"tiles\">";
    for (label, value, note) in tiles {
        let _ = write!(body, "<div class=\"tile\"><b>{}</b><span>{label}</span><small>{}</small></div>", escape(&value), escape(note));
    }
    body += "</section>";
    section(
        &mut body,
        "Stages",
        "How far each stage's result turns away from the f32 program's: 1 − cosine of the angle between them, on a logarithmic scale. Dots are the mean over rows, lines reach to the worst row.",
        &stages(&parity.stages),
    );
    section(
        &mut body,
        "Margins",
        "A margin is how far the f32 program's best logit is above its second: how decided it was. Every token of every answer, by its margin and the largest logit error of the step. In the shaded region errors are large enough to turn the choice.",
        &margins(&parity.cases),
    );
    section(
        &mut body,
        "Tokens",
        "A row for each prompt, a cell for each token of its answer. Pale cells are the f32 program's own choice; the darker, the closer it was to undecided.",
        &tokens(&parity.cases),
    );
    if let Some(choices) = &parity.choices {
        let text = format!("How the gate chose for each stage. {}.", escape(&choices.note));
        section(&mut body, "Choices", &text, &choice_tables(choices));
    }
    section(&mut body, "Numbers", "", &stage_table(&parity.stages));
    let _ = write!(
        body,
        "<footer>qhx {}, measured on {}. The numbers are in <code>parity.json</code> beside this page; <code>qhx verify</code> replays them.</footer>",
        escape(&parity.qhx),
        escape(&parity.numerics)
    );
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"><title>{} · parity</title><style>{STYLE}</style></head><body><main>{body}</main></body></html>\n",
        escape(&parity.model)
    )
}

/// What people ask first. The terms that the page uses are explained where they first stand.
fn questions(parity: &Parity, bytes: BytesPerToken) -> [(&'static str, String); 4] {
    let gate = &parity.gate;
    let own_types = gate.closeness.as_ref().is_some_and(|closeness| closeness.own_types);
    let good = format!(
        "{} {}. The model gives each possible next token a score, its logit, and chooses the highest. A flip is a token where the bundle chooses another than the f32 model. KL (Kullback-Leibler divergence) measures how far apart their probabilities are: 0 is equal, 0.01 hardly shows in a text, 0.5 does.",
        match (gate.passed, own_types) {
            (true, _) => "Yes.",
            (false, false) => "No: this precision can do better.",
            (false, true) => "No.",
        },
        gate.result
    );
    let mut compared =
        "With the same model computed in f32 throughout, the precision in which it matches Hugging Face transformers".to_owned();
    if let Some(covered) = gate.coverage() {
        let _ = write!(compared, ", on {covered}");
    }
    if let Some(incomplete) = gate.incomplete() {
        let _ = write!(compared, ". The measurement is {incomplete}");
    }
    let BytesPerToken { own, f16 } = bytes;
    let fast = format!(
        "Each token reads {:.1} MB of weights (of experts only the chosen ones), {:.2} times as much as in f16. Where memory sets the pace, half the bytes generate up to twice as fast. `qhx bench` measures speed on your machine.",
        own as f64 / 1e6,
        own as f64 / f16.max(1) as f64
    );
    let decided = match &parity.choices {
        Some(choices) => format!("{}. Below is what was chosen for each stage.", choices.note),
        None if own_types => of_the_file(&parity.stages),
        None => format!("Nothing: all stages are stored and computed as `{}` says.", parity.precision),
    };
    [("Is it good?", good), ("Compared with what?", compared + "."), ("Is it fast?", fast), ("What was decided, and why?", decided)]
}

/// What the types of the checkpoint decided.
fn of_the_file(stages: &[StageResult]) -> String {
    let names = |of: fn(&StageResult) -> &Vec<String>| {
        let mut seen = BTreeSet::new();
        let names = stages.iter().flat_map(of).filter(|name| seen.insert(*name)).map(|name| format!("`{name}`"));
        names.collect::<Vec<_>>().join(", ")
    };
    let (encodings, activations) = (names(|stage| &stage.encodings), names(|stage| &stage.activations));
    format!(
        "Nothing by this gate: the types in the checkpoint decide. Its weights are kept as {encodings}, and activations follow from them as the makers of these types mean it: {activations}."
    )
}

const STYLE: &str = "\
:root{--back:#fbfaf7;--card:#fff;--ink:#22252b;--soft:#6b7280;--line:#e4e1d8;--accent:#2f6f8f;--pale:#e3edf1;--good:#2e7d4f;--warn:#d08a1d;--bad:#c0392b;--shade:#f6e9d0}\
@media(prefers-color-scheme:dark){:root{--back:#15171b;--card:#1d2025;--ink:#e7e5df;--soft:#9aa1ab;--line:#31353c;--accent:#7fbcd6;--pale:#26343c;--good:#6fc48f;--warn:#e3ad55;--bad:#ef7a6c;--shade:#3a3020}}\
*{box-sizing:border-box}body{margin:0;background:var(--back);color:var(--ink);font:16px/1.55 system-ui,sans-serif}\
main{max-width:60rem;margin:0 auto;padding:2.5rem 1.25rem 4rem}h1{font-size:2rem;margin:.1rem 0 .6rem;letter-spacing:-.02em}h2{font-size:1.2rem;margin:0 0 .3rem}\
.eyebrow{margin:0;color:var(--soft);text-transform:uppercase;letter-spacing:.12em;font-size:.75rem}.lead{margin:0;font-size:1.05rem}\
.pill{display:inline-block;padding:.1rem .7rem;border-radius:1rem;color:#fff;font-size:.9rem;margin-right:.4rem}.pill.good{background:#2e7d4f}.pill.bad{background:#b23425}\
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9rem,1fr));gap:.75rem;margin:1.6rem 0}.tile{background:var(--card);border:1px solid var(--line);border-radius:.6rem;padding:.8rem .9rem}\
.tile b{display:block;font-size:1.25rem;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}.tile span{display:block;font-size:.85rem}.tile small{color:var(--soft)}\
section.plot{background:var(--card);border:1px solid var(--line);border-radius:.6rem;padding:1.1rem 1.2rem;margin:1rem 0}section.plot>p{margin:.1rem 0 .8rem;color:var(--soft);font-size:.9rem}\
svg{display:block;width:100%;height:auto}svg text{fill:var(--soft);font:11px system-ui,sans-serif}.axis{stroke:var(--line)}.dot{fill:var(--accent)}.reach{stroke:var(--accent);opacity:.45}\
.shade{fill:var(--shade)}.flip{fill:var(--warn)}.wrong{fill:var(--bad)}.cell{fill:var(--accent)}.note{color:var(--warn)}\
dl.plot{background:var(--card);border:1px solid var(--line);border-radius:.6rem;padding:.6rem 1.2rem;margin:1.6rem 0 0}dt{font-weight:600;margin-top:.6rem}dd{margin:0 0 .6rem}\
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem;width:100%;font-variant-numeric:tabular-nums;margin:.4rem 0 1rem}th{color:var(--soft);font-weight:500;text-align:left}td,th{padding:.22rem .6rem .22rem 0;border-bottom:1px solid var(--line);white-space:nowrap}\
td.r,th.r{text-align:right}footer{color:var(--soft);font-size:.85rem;margin-top:2rem}code{font-size:.9em}.key{font-size:.85rem;color:var(--soft);margin:.5rem 0 0}.key i{display:inline-block;width:.8em;height:.8em;border-radius:.2em;margin:0 .35em 0 .9em;vertical-align:-.05em}";

fn section(body: &mut String, title: &str, text: &str, content: &str) {
    let _ = write!(body, "<section class=\"plot\"><h2>{title}</h2><p>{text}</p>{content}</section>");
}

/// `1 − cosine` by stage, on a logarithmic scale.
fn stages(stages: &[StageResult]) -> String {
    let label = |stage: &StageResult| stage.stage.replace("layers.", "");
    // Slanted labels hang below the plot.
    let longest = stages.iter().map(|stage| label(stage).len()).max().unwrap_or(0);
    let bottom = (20.0 + 4.6 * longest as f64).max(64.0);
    let (width, height, left) = (900.0, 196.0 + bottom, 52.0);
    let floor = 1e-9f64;
    let distance = |cosine: f64| (1.0 - cosine).clamp(floor, 1.0).log10();
    let lowest = stages.iter().map(|s| distance(s.cosine)).fold(0.0, f64::min).floor().max(-9.0);
    let highest = (stages.iter().map(|s| distance(s.min_cosine)).fold(lowest, f64::max).ceil()).max(lowest + 2.0).min(0.0);
    let y = |log: f64| 8.0 + (highest - log) / (highest - lowest) * (height - bottom - 8.0);
    let step = (width - left - 10.0) / stages.len().max(1) as f64;
    let mut svg = open(width, height);
    powers(&mut svg, lowest as i32..=highest as i32, [left, width], y);
    let every = (stages.len() / 24).max(1);
    for (i, stage) in stages.iter().enumerate() {
        let x = left + step * (i as f64 + 0.5);
        let (mean, worst) = (y(distance(stage.cosine).max(lowest)), y(distance(stage.min_cosine).max(lowest)));
        let _ = write!(
            svg,
            "<g><title>{}: cosine {:.8}, worst row {:.8}</title><line class=\"reach\" stroke-width=\"2\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{mean:.1}\" y2=\"{worst:.1}\"/><circle class=\"dot\" cx=\"{x:.1}\" cy=\"{mean:.1}\" r=\"3.4\"/></g>",
            escape(&stage.stage),
            stage.cosine,
            stage.min_cosine
        );
        if i % every == 0 || i + 1 == stages.len() {
            let (tx, ty) = (x + 3.0, height - bottom + 14.0);
            let _ = write!(
                svg,
                "<text x=\"{tx:.1}\" y=\"{ty:.1}\" text-anchor=\"end\" transform=\"rotate(-45 {tx:.1} {ty:.1})\">{}</text>",
                escape(&label(stage))
            );
        }
    }
    svg + "</svg>"
}

/// f32 margins against logit errors, both on logarithmic scales.
fn margins(cases: &[Case]) -> String {
    let (width, height, left, bottom) = (900.0, 320.0, 52.0, 40.0);
    let log = |x: f32| f64::from(x).clamp(1e-6, 1e2).log10();
    let range = |list: &mut dyn Iterator<Item = f32>| {
        let (low, high) = list.map(log).fold((2.0f64, -6.0f64), |(low, high), x| (low.min(x), high.max(x)));
        (low.floor().min(high - 1.0), high.ceil())
    };
    let (x_low, x_high) = range(&mut cases.iter().flat_map(|case| case.logit_errors.iter().copied()));
    let (y_low, y_high) = range(&mut cases.iter().flat_map(|case| case.f32_margins.iter().copied()));
    let x = |v: f64| left + (v - x_low) / (x_high - x_low) * (width - left - 10.0);
    let y = |v: f64| 8.0 + (y_high - v.clamp(y_low, y_high)) / (y_high - y_low) * (height - bottom - 8.0);
    let mut svg = open(width, height);
    // Below min(0.5, 2 · error).
    let edge = (0..=100).map(|i| x_low + f64::from(i) / 100.0 * (x_high - x_low));
    let edge: Vec<_> = edge.map(|v| format!("{:.1},{:.1}", x(v), y((v + 2f64.log10()).min(0.5f64.log10())))).collect();
    let floor = y(y_low);
    let _ = write!(svg, "<polygon class=\"shade\" points=\"{:.1},{floor:.1} {} {:.1},{floor:.1}\"/>", x(x_low), edge.join(" "), x(x_high));
    powers(&mut svg, y_low as i32..=y_high as i32, [left, width], y);
    for power in x_low as i32..=x_high as i32 {
        let _ = write!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">1e{power}</text>",
            x(f64::from(power)),
            height - bottom + 16.0
        );
    }
    let _ = write!(
        svg,
        "<text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"middle\">largest logit error</text><text x=\"{}\" y=\"20\">f32 margin</text>",
        width / 2.0,
        height - 6.0,
        left + 6.0
    );
    let mut flips = String::new();
    for case in cases {
        for (step, (&margin, &error)) in case.f32_margins.iter().zip(&case.logit_errors).enumerate() {
            let (cx, cy) = (x(log(error)), y(log(margin)));
            match case.flips.iter().find(|flip| flip.step == step) {
                None => _ = write!(svg, "<circle class=\"dot\" cx=\"{cx:.1}\" cy=\"{cy:.1}\" r=\"2\" opacity=\".45\"/>"),
                Some(flip) => {
                    let class = if flip.accepted { "flip" } else { "wrong" };
                    let title = format!(
                        "{}, token {step}: {} instead of {}, margin {margin:.4}, logit error {error:.4}",
                        escape(&case.name),
                        flip.id,
                        flip.f32_id
                    );
                    let _ =
                        write!(flips, "<circle class=\"{class}\" cx=\"{cx:.1}\" cy=\"{cy:.1}\" r=\"4.5\"><title>{title}</title></circle>");
                }
            }
        }
    }
    svg + &flips + "</svg>" + KEY
}

const KEY: &str = "<p class=\"key\"><i style=\"background:var(--accent);opacity:.5\"></i>as in f32<i style=\"background:var(--warn)\"></i>differs, accepted<i style=\"background:var(--bad)\"></i>differs, not accepted</p>";

/// A row of cells for each case.
fn tokens(cases: &[Case]) -> String {
    let most = cases.iter().map(|case| case.ids.len()).max().unwrap_or(1);
    let (left, size) = (92.0, 12.5);
    let width = left + most as f64 * size + 8.0;
    let mut svg = open(width, cases.len() as f64 * (size + 4.0) + 6.0);
    for (row, case) in cases.iter().enumerate() {
        let y = 4.0 + row as f64 * (size + 4.0);
        let _ = write!(svg, "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>", left - 8.0, y + size - 2.5, escape(&case.name));
        for (step, margin) in case.f32_margins.iter().enumerate() {
            let flip = case.flips.iter().find(|flip| flip.step == step);
            let (class, opacity) = match flip {
                Some(flip) if flip.accepted => ("flip", 1.0),
                Some(_) => ("wrong", 1.0),
                None => ("cell", (0.75 - 0.2 * f64::from(*margin).max(1e-3).log10()).clamp(0.18, 0.8)),
            };
            let title = match flip {
                Some(flip) => format!("token {step}: {} instead of {}, margin {margin:.4}", flip.id, flip.f32_id),
                None => format!("token {step}: {}, margin {margin:.4}", case.ids[step]),
            };
            let x = left + step as f64 * size;
            let _ = write!(
                svg,
                "<rect class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{0:.1}\" height=\"{0:.1}\" rx=\"2\" opacity=\"{opacity:.2}\"><title>{title}</title></rect>",
                size - 1.5
            );
        }
    }
    svg + "</svg>" + KEY
}

fn choice_tables(choices: &Choices) -> String {
    let mut html =
        String::from("<div class=\"scroll\"><table><tr><th>tried</th><th class=\"r\">bytes</th><th>gate</th><th>result</th></tr>");
    for tried in &choices.tried {
        let passed = if tried.passed { "passed" } else { "no" };
        let _ = write!(
            html,
            "<tr><td>{}</td><td class=\"r\">{}</td><td>{passed}</td><td>{}</td></tr>",
            escape(&tried.mixture),
            tried.bytes,
            escape(&tried.result)
        );
    }
    html += "</table><table><tr><th>stage</th><th>chosen</th><th class=\"r\">bytes</th><th>error by alternative</th></tr>";
    for stage in &choices.stages {
        let errors: Vec<_> = stage.errors.iter().map(|(level, error)| format!("{} {}", escape(level), number(*error))).collect();
        let _ = write!(
            html,
            "<tr><td>{}</td><td>{}</td><td class=\"r\">{}</td><td>{}</td></tr>",
            escape(&stage.stage),
            escape(&stage.chosen),
            stage.bytes,
            errors.join(" · ")
        );
    }
    html + "</table></div>"
}

fn stage_table(stages: &[StageResult]) -> String {
    let mut html = String::from(
        "<div class=\"scroll\"><table><tr><th>stage</th><th class=\"r\">cosine</th><th class=\"r\">worst row</th><th>weights</th><th>activations</th><th class=\"r\">bytes</th></tr>",
    );
    for s in stages {
        let _ = write!(
            html,
            "<tr><td>{}</td><td class=\"r\">{:.7}</td><td class=\"r\">{:.7}</td><td>{}</td><td>{}</td><td class=\"r\">{}</td></tr>",
            escape(&s.stage),
            s.cosine,
            s.min_cosine,
            escape(&s.encodings.join(", ")),
            escape(&s.activations.join(", ")),
            s.bytes
        );
    }
    html + "</table></div>"
}

fn open(width: f64, height: f64) -> String {
    format!("<svg viewBox=\"0 0 {width:.0} {height:.0}\" role=\"img\">")
}

/// A line across the plot for each power of ten, from left to right, with its name before it.
fn powers(svg: &mut String, powers: RangeInclusive<i32>, [left, right]: [f64; 2], y: impl Fn(f64) -> f64) {
    for power in powers {
        let at = y(f64::from(power));
        let _ = write!(
            svg,
            "<line class=\"axis\" x1=\"{left}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/><text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">1e{power}</text>",
            left - 6.0,
            at + 4.0
        );
    }
}

/// A small number for people.
fn number(x: f64) -> String {
    match x.abs() {
        0.0 => "0".into(),
        a if a < 1e-3 => format!("{x:.1e}"),
        a if a < 1.0 => format!("{x:.4}"),
        _ => format!("{x:.2}"),
    }
}

/// Names come from files.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::{super::limits::Class, *};
    use qhx_bundle::{
        Digest,
        parity::{Closeness, GateResult, Level, PARITY_VERSION},
    };
    use std::collections::BTreeMap;

    const BYTES: BytesPerToken = BytesPerToken { own: 5_000_000, f16: 9_500_000 };

    fn closeness(class: Class, flips: usize, ties: usize) -> Closeness {
        Closeness {
            class: class.name().into(),
            tokens: 1000,
            flips,
            ties,
            wide_flips: 0,
            mean_kl: 0.0013,
            mean_kl_error: 1e-5,
            p99_kl: 0.01,
            above_p99: 0,
            limits: class.limits(false),
            own_types: false,
            plain: None,
        }
    }

    fn parity(precision: &str, closeness: Closeness) -> Parity {
        let stage = |name: &str, encodings: &[&str], activation: &str| StageResult {
            stage: name.into(),
            cosine: 0.9999,
            min_cosine: 0.999,
            encodings: encodings.iter().map(|&encoding| encoding.into()).collect(),
            activations: vec![activation.into()],
            bytes: 1000,
        };
        Parity {
            parity_version: PARITY_VERSION,
            qhx: "0".into(),
            model: "tiny".into(),
            precision: precision.into(),
            numerics: "cpu, portable".into(),
            level: Level::Whole,
            config: Digest::of(b""),
            files: BTreeMap::new(),
            gate: GateResult {
                kind: GateKind::Tolerant,
                passed: true,
                result: format!("{precision}: what was measured"),
                prompts: 16,
                exact_prompts: 12,
                tokens: 100,
                flips: 4,
                worst_accepted_margin: None,
                max_logit_error: 0.1,
                mean_kl: 0.0013,
                max_kl: 0.1,
                worst_stage: "layers.0.ffn".into(),
                worst_cosine: 0.999,
                closeness: Some(closeness),
                limited: None,
                covered: vec![],
            },
            stages: vec![
                stage("layers.0.attn", &["i8_block32"], "i8_block32"),
                stage("layers.0.ffn", &["i4_block32", "i8_block32"], "i8_block32"),
            ],
            choices: None,
            cases: vec![],
            weights: vec![],
        }
    }

    /// What a person sees.
    fn shown(parity: &Parity) -> String {
        let page = page(parity, BYTES);
        page[page.find("<body>").unwrap()..].to_owned()
    }

    #[test]
    fn the_page_begins_with_what_people_ask() {
        let body = shown(&parity("w8", closeness(Class::Int8, 19, 0)));
        let asked = ["Is it good?", "Compared with what?", "Is it fast?", "What was decided, and why?", "class=\"tile\"", "<svg"];
        let places = asked.map(|text| body.find(text).unwrap_or_else(|| panic!("{text}")));
        assert!(places.is_sorted(), "{places:?}");
        assert!(body.contains("Yes. w8: what was measured.") && !body.contains("incomplete"), "{body}");
        assert!(body.contains("matches Hugging Face transformers") && body.contains("5.0 MB of weights"), "{body}");
        assert!(body.contains("0.53 times as much as in f16") && body.contains("`qhx bench` measures speed"), "{body}");
        assert!(body.contains("<b>1.9 %</b>") && body.contains("of 1000 compared, limit 4 %"), "{body}");
        assert!(body.contains("Nothing: all stages are stored and computed as `w8` says."), "{body}");
    }

    #[test]
    fn terms_are_explained_where_they_first_stand() {
        let body = shown(&parity("w8", closeness(Class::Int8, 19, 0))).to_lowercase();
        for (term, explanation) in [
            ("logit", "a score, its logit"),
            ("flip", "a flip is a token where"),
            ("kl ", "kl (kullback-leibler divergence) measures"),
            ("cosine", "1 means the same direction"),
            ("margin", "a margin is how far"),
        ] {
            let (first, explained) = (body.find(term).unwrap(), body.find(explanation).unwrap_or_else(|| panic!("{explanation}")));
            assert!(explained < first + 200, "{term} stands at {first} and is explained at {explained}");
        }
    }

    #[test]
    fn a_quick_gate_is_incomplete_and_a_failure_says_no() {
        let mut quick = parity("w8", closeness(Class::Int8, 19, 0));
        quick.gate.limited = Some("a quick gate: 8 of 16 prompts".into());
        let body = shown(&quick);
        let lead = &body[..body.find("</header>").unwrap()];
        assert!(lead.contains("tolerant gate passed") && lead.contains("incomplete: a quick gate: 8 of 16 prompts"), "{lead}");
        let mut failed = parity("w8", closeness(Class::Int8, 400, 0));
        failed.gate.passed = false;
        let body = shown(&failed);
        assert!(body.contains("No: this precision can do better. w8:") && body.contains("gate not passed"), "{body}");
    }

    #[test]
    fn ties_are_told_apart() {
        let body = shown(&parity("f16", closeness(Class::F16, 3, 3)));
        assert!(body.contains("<b>0 %</b>") && body.contains("of 1000 compared, limit 0.1 %; not counted: 3 at ties"), "{body}");
        assert!(shown(&parity("f16", closeness(Class::F16, 5, 3))).contains("<b>0.2 %</b>"));
    }

    #[test]
    fn types_of_the_file_are_named_and_have_no_limit() {
        let own = Closeness { own_types: true, ..closeness(Class::Int8Activations, 31, 0) };
        let body = shown(&parity("native", own));
        let decided = &body[body.find("What was decided").unwrap()..body.find("</dl>").unwrap()];
        assert!(decided.contains("the types in the checkpoint decide"), "{decided}");
        assert!(decided.contains("kept as `i8_block32`, `i4_block32`") && decided.contains("mean it: `i8_block32`."), "{decided}");
        assert!(body.contains("<b>3.1 %</b>") && !body.contains("limit"), "{body}");
    }
}

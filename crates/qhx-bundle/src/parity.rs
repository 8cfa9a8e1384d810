//! `parity.json`: what the gates measured when a bundle was made, and the oracle that `verify` replays.
//!
//! This module owns the types and the checks that need no other file. It knows nothing of how the numbers were made: `docs/parity.md` tells that.

use crate::{BundlePath, Digest};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The version of the format that this code writes. It reads this one and all before it.
pub const PARITY_VERSION: u32 = 2;
/// The file that holds it.
pub const PARITY_FILE: &str = "parity.json";
/// The same for people.
pub const PARITY_PAGE: &str = "parity.html";
/// Stands behind the name of a folder whose bundle failed its gate.
pub const REJECTED: &str = ".rejected";
/// The longest file that is read.
pub const MAX_PARITY_BYTES: u64 = 256 << 20;

/// Everything that was measured. The same material gives the same file, byte for byte: no times, no machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parity {
    /// [`PARITY_VERSION`].
    pub parity_version: u32,
    /// The version of qhx that measured.
    pub qhx: String,
    /// The model's name.
    pub model: String,
    /// The bundle's precision.
    pub precision: String,
    /// What ran the bundle and the f32 program: the device and its instruction set.
    pub numerics: String,
    /// How much of the model was run.
    pub level: Level,
    /// Sum of the checkpoint's configuration.
    pub config: Digest,
    /// Sums of the programs and weight files that were measured.
    pub files: BTreeMap<BundlePath, Digest>,
    /// The verdict.
    pub gate: GateResult,
    /// How each stage compares with the f32 program, in order.
    pub stages: Vec<StageResult>,
    /// How precisions and activation forms were chosen; absent where there was nothing to choose.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub choices: Option<Choices>,
    /// The prompts with their answers: the oracle.
    pub cases: Vec<Case>,
    /// Sums over the numbers of every weight.
    pub weights: Vec<WeightSum>,
}

/// How much of the model was run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// The whole model answered the prompts.
    Whole,
    /// Each stage alone, on the f32 program's inputs.
    Stages,
}

/// How closely a bundle must match the f32 program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GateKind {
    /// Every token is the f32 program's.
    Strict,
    /// Flips and divergence stay within the limits of the bundle's class of precision.
    Tolerant,
}

/// The verdict of a gate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GateResult {
    /// Which gate.
    pub kind: GateKind,
    /// Whether the bundle passed.
    pub passed: bool,
    /// The verdict for people: what was compared, how many tokens differ, and what the limit is.
    pub result: String,
    /// Prompts.
    pub prompts: usize,
    /// Prompts all of whose tokens are the f32 program's.
    pub exact_prompts: usize,
    /// Tokens chosen.
    pub tokens: usize,
    /// Tokens that differ from the f32 program's.
    pub flips: usize,
    /// The largest f32 margin among the flips that the gate accepts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worst_accepted_margin: Option<f32>,
    /// The largest difference of two logits.
    pub max_logit_error: f32,
    /// Kullback-Leibler divergence of the bundle's next-token distribution from the f32 program's: mean over all tokens.
    pub mean_kl: f64,
    /// Its largest value.
    pub max_kl: f64,
    /// The stage whose cosine is lowest.
    pub worst_stage: String,
    /// That cosine.
    pub worst_cosine: f64,
    /// How close all compared tokens are, of prompts and answers, and what the limits are. Absent in files of version 1, and where only stages were run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub closeness: Option<Closeness>,
    /// Why fewer prompts or tokens than the suite has were measured; absent: all were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limited: Option<String>,
    /// How many prompts of each kind stand behind the verdict. Empty in files that do not tell.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub covered: Vec<Covered>,
}

/// How close a bundle's predictions are to the f32 program's on the same tokens, those of prompts and answers, and what they were held to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Closeness {
    /// The class of precision whose limits these are.
    pub class: String,
    /// Tokens compared.
    pub tokens: usize,
    /// Tokens at which the most probable next token is not the f32 program's.
    pub flips: usize,
    /// Flips at which the f32 program's best two logits were as good as equal: they are not counted against [`Limits::flips`].
    #[serde(default, skip_serializing_if = "is_zero")]
    pub ties: usize,
    /// Flips at which the f32 program's best logit was more than [`WideFlips::margin`] above its second.
    pub wide_flips: usize,
    /// Mean Kullback-Leibler divergence …
    pub mean_kl: f64,
    /// … and its standard error.
    pub mean_kl_error: f64,
    /// The divergence that 99 % of tokens do not exceed.
    pub p99_kl: f64,
    /// Tokens whose divergence is above [`Limits::p99_kl`].
    pub above_p99: usize,
    /// What the bundle was held to. Where the file's own types decided: the limits of their class, or twice what was measured.
    pub limits: Limits,
    /// Whether the types of the checkpoint decided how the bundle computes: the gate measured what they cost, and would have failed only what is broken.
    #[serde(default, skip_serializing_if = "is_false")]
    pub own_types: bool,
    /// What the same weights lose on the same tokens by plain rounding, where the class's limits were raised for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plain: Option<PlainRounding>,
}

impl Closeness {
    /// The flips that count: those that are no ties.
    pub fn counted(&self) -> usize {
        self.flips.saturating_sub(self.ties)
    }
}

fn is_zero(count: &usize) -> bool {
    *count == 0
}

fn is_false(flag: &bool) -> bool {
    !flag
}

/// What a model loses if each number of its weights becomes the nearest that the bundle's encodings have, and everything is computed in f32.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlainRounding {
    /// The share of tokens that are flips.
    pub flips: f64,
    /// The share that are flips above the class's margin: see [`WideFlips`].
    pub wide_flips: f64,
    /// Mean Kullback-Leibler divergence.
    pub mean_kl: f64,
    /// The divergence that 99 % of tokens do not exceed.
    pub p99_kl: f64,
}

/// What a bundle must keep to.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// The share of tokens that may be flips.
    pub flips: f64,
    /// Mean Kullback-Leibler divergence.
    pub mean_kl: f64,
    /// The divergence that 1 % of tokens may exceed; absent where somebody set limits of their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p99_kl: Option<f64>,
    /// How many tokens may differ where the f32 program was decided; absent where somebody set limits of their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wide_flips: Option<WideFlips>,
}

/// The quantile of the normal distribution for one-sided 95 % confidence.
pub const CONFIDENCE: f64 = 1.645;

/// Whether `count` of `of` tokens are a larger share than `limit`, and chance is no explanation: the lower end of Wilson's one-sided 95 % confidence interval is above it.
pub fn is_above(count: usize, of: usize, limit: f64) -> bool {
    if count == 0 || of == 0 {
        return false;
    }
    let (n, p, z) = (of as f64, count as f64 / of as f64, CONFIDENCE);
    let spread = z * (p * (1.0 - p) / n + z * z / (4.0 * n * n)).sqrt();
    (p + z * z / (2.0 * n) - spread) / (1.0 + z * z / n) > limit
}

/// Flips where the f32 program was decided.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WideFlips {
    /// It was decided where its best logit is more than this above its second.
    pub margin: f32,
    /// The share of tokens that may be such.
    pub share: f64,
}

/// How much of one kind of prompts was measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Covered {
    /// `text`, `image`, `sound`, `image and sound`.
    pub kind: String,
    /// Prompts that were measured …
    pub prompts: usize,
    /// … of so many in the suite.
    pub of: usize,
}

impl GateResult {
    /// What was covered, for people: `text 4 of 16 prompts, image 1 of 2`. None where the file does not tell.
    pub fn coverage(&self) -> Option<String> {
        let shown = |(i, covered): (usize, &Covered)| {
            let Covered { kind, prompts, of } = covered;
            format!("{kind} {prompts} of {of}{}", if i == 0 { " prompts" } else { "" })
        };
        (!self.covered.is_empty()).then(|| self.covered.iter().enumerate().map(shown).collect::<Vec<_>>().join(", "))
    }

    /// That less than the whole suite was measured, and why: `incomplete: a quick gate: 8 of 16 prompts`. None where all of it was.
    pub fn incomplete(&self) -> Option<String> {
        self.limited.as_ref().map(|reason| format!("incomplete: {reason}"))
    }
}

/// The verdict alone, where the rest of the file is not wanted.
#[derive(Deserialize)]
struct VerdictOnly {
    gate: GateResult,
}

/// The choices alone, likewise.
#[derive(Deserialize)]
struct ChoicesOnly {
    choices: Option<Choices>,
}

/// A stage beside the f32 program's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageResult {
    /// The stage.
    pub stage: String,
    /// Cosine of its tap with the f32 program's, row by row: the mean …
    pub cosine: f64,
    /// … and the lowest.
    pub min_cosine: f64,
    /// How its matrices are stored, most bytes first.
    pub encodings: Vec<String>,
    /// How rows enter its products.
    pub activations: Vec<String>,
    /// Bytes of its weights.
    pub bytes: u64,
}

/// How precisions and activation forms were chosen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Choices {
    /// Each stage with what it got and what was measured for the alternatives.
    pub stages: Vec<StageChoice>,
    /// The mixtures whose gate was measured, in order.
    pub tried: Vec<Tried>,
    /// What a person should know of the outcome.
    pub note: String,
}

/// What a stage got.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageChoice {
    /// The stage.
    pub stage: String,
    /// What was chosen.
    pub chosen: String,
    /// Bytes of its weights as chosen.
    pub bytes: u64,
    /// Relative error of the stage's result on the f32 program's inputs, by alternative.
    pub errors: BTreeMap<String, f64>,
}

/// A mixture whose gate was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tried {
    /// What it was: `w4, 3 stages raised`.
    pub mixture: String,
    /// Bytes of all weights.
    pub bytes: u64,
    /// Whether it was through.
    pub passed: bool,
    /// The gate's sentence.
    pub result: String,
}

/// What kind of input a case has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CaseKind {
    /// Token ids alone.
    Text,
    /// Pictures or sounds among them.
    Media,
}

/// A picture or a sound that is made by code, from these numbers alone and with whole numbers only: the same on every machine. `docs/parity.md` tells how.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind", deny_unknown_fields)]
pub enum Drawing {
    /// A picture.
    Image {
        /// Columns of pixels.
        width: usize,
        /// Rows of pixels.
        height: usize,
        /// What is on it.
        seed: u64,
    },
    /// A sound.
    Audio {
        /// Samples per second.
        rate: u32,
        /// How many there are.
        samples: usize,
        /// What is heard.
        seed: u64,
    },
}

/// The longest side of a drawn picture, in pixels.
pub const MAX_DRAWN_SIDE: usize = 1 << 12;
/// The most samples of a drawn sound.
pub const MAX_DRAWN_SAMPLES: usize = 1 << 22;

/// A picture or a sound of a case. Where its soft rows stand, the prompt's placeholders say.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CaseMedium {
    /// What it is.
    pub drawing: Drawing,
    /// Sum of its pixels (RGB, row by row) or samples (signed 16 bits, little-endian).
    pub sha256: Digest,
    /// The rows of the tower's call (patches, frames) of which stages were noted. A stage with fewer rows shows the one at the same share of them.
    pub rows: Vec<usize>,
    /// What every stage of the tower made of these rows.
    pub stages: Vec<StageCheck>,
}

/// A prompt with its answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// What kind of input it has.
    pub kind: CaseKind,
    /// A name for people.
    pub name: String,
    /// The prompt.
    pub prompt_ids: Vec<u32>,
    /// Its pictures and sounds, those of a kind in the order of their placeholders.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub media: Vec<CaseMedium>,
    /// The answer: greedy, end-of-answer ids treated as any other.
    pub ids: Vec<u32>,
    /// For each token of the answer the ids of the bundle's largest logits, falling …
    pub top_ids: Vec<Vec<u32>>,
    /// … and these logits.
    pub top_logits: Vec<Vec<f32>>,
    /// For each token how far the f32 program's best logit is above its second.
    pub f32_margins: Vec<f32>,
    /// For each token the largest difference of two logits, the bundle's and the f32 program's.
    pub logit_errors: Vec<f32>,
    /// Mean Kullback-Leibler divergence.
    pub mean_kl: f64,
    /// Tokens that are not the f32 program's.
    pub flips: Vec<Flip>,
    /// The rows (of prompt and answer) of which stages were noted.
    pub rows: Vec<usize>,
    /// What every stage made of these rows.
    pub stages: Vec<StageCheck>,
}

/// A token that is not the f32 program's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Flip {
    /// Its place in the answer.
    pub step: usize,
    /// The bundle's choice.
    pub id: u32,
    /// The f32 program's.
    pub f32_id: u32,
    /// How far the f32 program's best logit is above its second.
    pub margin: f32,
    /// The largest difference of two logits at this step.
    pub logit_error: f32,
    /// Whether the gate accepts it.
    pub accepted: bool,
}

/// What a stage made of a case's rows, in few numbers: for each row its norm and two sums over it with fixed random signs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageCheck {
    /// The stage.
    pub stage: String,
    /// Three numbers for each row.
    pub numbers: Vec<f32>,
}

/// Two sums over all numbers of a weight, in f64 and in a fixed order: equal on every machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WeightSum {
    /// The weight.
    pub weight: String,
    /// The stages that use it.
    pub stages: Vec<String>,
    /// With fixed random signs.
    pub sum: f64,
    /// Of the squares.
    pub squares: f64,
}

impl Drawing {
    fn is_sane(&self) -> bool {
        match *self {
            Self::Image { width, height, .. } => [width, height].iter().all(|side| (1..=MAX_DRAWN_SIDE).contains(side)),
            Self::Audio { rate, samples, .. } => rate > 0 && (1..=MAX_DRAWN_SAMPLES).contains(&samples),
        }
    }
}

impl Parity {
    /// The file's text: a line for each case, stage and weight.
    pub fn to_json(&self) -> Result<String, String> {
        use serde_json::Value;
        let Value::Object(fields) = serde_json::to_value(self).map_err(|e| e.to_string())? else { return Err("no object".into()) };
        let lines = fields.iter().map(|(name, value)| match value {
            Value::Array(items) if items.iter().any(Value::is_object) => {
                let items: Vec<_> = items.iter().map(|item| format!("    {item}")).collect();
                format!("  {}: [\n{}\n  ]", Value::from(name.as_str()), items.join(",\n"))
            }
            value => format!("  {}: {value}", Value::from(name.as_str())),
        });
        Ok(format!("{{\n{}\n}}\n", lines.collect::<Vec<_>>().join(",\n")))
    }

    /// Reads and checks a file's text.
    pub fn from_json(text: &str) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Version {
            parity_version: u32,
        }
        let Version { parity_version } = serde_json::from_str(text).map_err(|e| format!("not a parity file: {e}"))?;
        if !(1..=PARITY_VERSION).contains(&parity_version) {
            return Err(format!(
                "parity_version {parity_version} is not one of 1 to {PARITY_VERSION}, which this qhx reads: forge the bundle again or update qhx"
            ));
        }
        let parity: Self = serde_json::from_str(text).map_err(|e| format!("not a parity file: {e}"))?;
        parity.check()?;
        Ok(parity)
    }

    /// The verdict in a file's text, without a look at the rest.
    pub fn verdict_in(text: &str) -> Result<GateResult, String> {
        serde_json::from_str::<VerdictOnly>(text).map(|verdict| verdict.gate).map_err(|e| format!("not a parity file: {e}"))
    }

    /// How precisions and activation forms were chosen, in a sentence; none where there was nothing to choose.
    pub fn choices_note_in(text: &str) -> Result<Option<String>, String> {
        let read = serde_json::from_str::<ChoicesOnly>(text).map_err(|e| format!("not a parity file: {e}"))?;
        Ok(read.choices.map(|choices| choices.note))
    }

    /// Every check that needs no other file.
    fn check(&self) -> Result<(), String> {
        if self.cases.is_empty() || self.weights.is_empty() {
            return Err("it has no cases or no weights, so there is nothing to replay".into());
        }
        for (i, case) in self.cases.iter().enumerate() {
            let wrong = |reason: &str| Err(format!("cases[{i}] (`{}`): {reason}", case.name));
            let tokens = case.ids.len();
            if case.prompt_ids.is_empty() || tokens == 0 {
                return wrong("a case needs a prompt and an answer");
            }
            if [case.top_ids.len(), case.top_logits.len(), case.f32_margins.len(), case.logit_errors.len()] != [tokens; 4] {
                return wrong("there must be one entry for each token of the answer");
            }
            if case.top_ids.iter().zip(&case.top_logits).any(|(ids, logits)| ids.is_empty() || ids.len() != logits.len()) {
                return wrong("there must be as many top logits as ids, and at least one");
            }
            // The last token of an answer is chosen, never put in.
            if case.rows.iter().any(|&row| row >= case.prompt_ids.len() + tokens - 1) || case.rows.windows(2).any(|w| w[0] >= w[1]) {
                return wrong("`rows` must rise and lie within prompt and answer");
            }
            let checks = case.media.iter().map(|medium| (&medium.stages, &medium.rows)).chain([(&case.stages, &case.rows)]);
            if checks.into_iter().any(|(stages, rows)| stages.iter().any(|stage| stage.numbers.len() != 3 * rows.len())) {
                return wrong("a stage must have three numbers for each row");
            }
            if (case.kind == CaseKind::Media) == case.media.is_empty() {
                return wrong("a media case has media, and no other has");
            }
            if !case.media.iter().all(|medium| medium.drawing.is_sane()) {
                return wrong("a drawing must have sides or samples within reason");
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Parity {
        let case = Case {
            kind: CaseKind::Text,
            name: "len2".into(),
            prompt_ids: vec![1, 2],
            media: vec![],
            ids: vec![3, 4],
            top_ids: vec![vec![3, 5], vec![4, 3]],
            top_logits: vec![vec![0.1, -2.5e-7], vec![1.0 / 3.0, 0.0]],
            f32_margins: vec![0.5, 0.25],
            logit_errors: vec![0.0, 0.0],
            mean_kl: 1e-9,
            flips: vec![],
            rows: vec![0, 2],
            stages: vec![StageCheck { stage: "embed".into(), numbers: vec![1.0; 6] }],
        };
        Parity {
            parity_version: PARITY_VERSION,
            qhx: "0".into(),
            model: "m".into(),
            precision: "w8".into(),
            numerics: "cpu, portable".into(),
            level: Level::Whole,
            config: Digest::of(b""),
            files: BTreeMap::new(),
            gate: GateResult {
                kind: GateKind::Tolerant,
                passed: true,
                result: "w8: all 2 tokens are the f32 model's choice".into(),
                prompts: 1,
                exact_prompts: 1,
                tokens: 2,
                flips: 0,
                worst_accepted_margin: None,
                max_logit_error: 0.0,
                mean_kl: 0.0,
                max_kl: 0.0,
                worst_stage: "embed".into(),
                worst_cosine: 1.0,
                closeness: None,
                limited: None,
                covered: vec![],
            },
            stages: vec![],
            choices: None,
            cases: vec![case],
            weights: vec![WeightSum { weight: "w".into(), stages: vec!["embed".into()], sum: 0.1 + 0.2, squares: 1.0 / 3.0 }],
        }
    }

    fn with_medium(mut parity: Parity) -> Parity {
        let drawing = Drawing::Audio { rate: 16_000, samples: 800, seed: 1 << 60 };
        let stages = vec![StageCheck { stage: "audio.0".into(), numbers: vec![0.5; 3] }];
        parity.cases[0].kind = CaseKind::Media;
        parity.cases[0].media = vec![CaseMedium { drawing, sha256: Digest::of(b""), rows: vec![4], stages }];
        parity
    }

    #[test]
    fn the_file_is_read_as_it_was_written() {
        let text = example().to_json().unwrap();
        assert_eq!(Parity::from_json(&text).unwrap(), example());
        assert!(text.lines().count() > 15, "{text}");
        assert_eq!(Parity::verdict_in(&text).unwrap(), example().gate);
        assert_eq!((Parity::choices_note_in(&text).unwrap(), example().gate.incomplete()), (None, None));
        let choices = Some(Choices { stages: vec![], tried: vec![], note: "4.2 bits per weight".into() });
        let gate = GateResult { limited: Some("a quick gate: 8 of 16 prompts".into()), ..example().gate };
        let chosen = Parity { choices, gate, ..example() };
        assert_eq!(Parity::choices_note_in(&chosen.to_json().unwrap()).unwrap().unwrap(), "4.2 bits per weight");
        assert_eq!(chosen.gate.incomplete().unwrap(), "incomplete: a quick gate: 8 of 16 prompts");
        let mut counted = example();
        assert_eq!((counted.gate.coverage(), text.contains("covered")), (None, false), "absent where nothing is told");
        let covered = |kind: &str, prompts, of| Covered { kind: kind.into(), prompts, of };
        counted.gate.covered = vec![covered("text", 4, 16), covered("image", 1, 2)];
        assert_eq!(Parity::from_json(&counted.to_json().unwrap()).unwrap(), counted);
        assert_eq!(counted.gate.coverage().unwrap(), "text 4 of 16 prompts, image 1 of 2");
        let limits = Limits { flips: 0.04, mean_kl: 0.006, p99_kl: None, wide_flips: Some(WideFlips { margin: 0.5, share: 0.003 }) };
        let (mean_kl, p99_kl) = (0.001, 0.01);
        let (tokens, flips, wide_flips, mean_kl_error, above_p99) = (9, 1, 0, 1e-4, 0);
        for plain in [None, Some(PlainRounding { flips: 0.2, wide_flips: 0.0, mean_kl, p99_kl })] {
            let class = String::from("int8");
            let (ties, own_types) = (0, false);
            let closeness =
                Closeness { class, tokens, flips, ties, wide_flips, mean_kl, mean_kl_error, p99_kl, above_p99, limits, own_types, plain };
            counted.gate.closeness = Some(closeness);
            let text = counted.to_json().unwrap();
            assert_eq!((Parity::from_json(&text).unwrap(), text.contains("plain")), (counted.clone(), plain.is_some()));
            assert!(!text.contains("\"ties\"") && !text.contains("own_types"), "absent where there is nothing to tell: {text}");
        }
        // A file of the first version tells nothing of it.
        let old = Parity { parity_version: 1, ..example() }.to_json().unwrap();
        assert!(!old.contains("closeness") && Parity::from_json(&old).is_ok(), "{old}");
        let heard = with_medium(example());
        assert_eq!(Parity::from_json(&heard.to_json().unwrap()).unwrap(), heard);
    }

    #[test]
    fn a_share_is_above_a_limit_where_chance_is_no_explanation() {
        assert!(!is_above(2, 100, 0.01) && is_above(200, 10_000, 0.01), "2 % may be 0.65 % of 100 tokens, but not of 10,000");
        assert!(is_above(5, 100, 0.02) && !is_above(5, 100, 0.03), "5 of 100 are 2.5 % at least");
        assert!(!is_above(0, 0, 0.0) && !is_above(0, 9, 0.0) && is_above(1, 9, 0.0));
    }

    #[test]
    fn wrong_files_say_what_is_wrong() {
        let error_of = |mut parity: Parity, change: fn(&mut Parity)| {
            change(&mut parity);
            Parity::from_json(&parity.to_json().unwrap()).unwrap_err()
        };
        let error = |change| error_of(example(), change);
        let heard = |change| error_of(with_medium(example()), change);
        assert!(error(|p| p.parity_version = 3).contains("parity_version 3 is not one of 1 to 2"));
        assert!(error(|p| p.parity_version = 0).contains("parity_version 0 is not"));
        assert!(error(|p| p.cases.clear()).contains("nothing to replay"));
        assert!(error(|p| p.cases[0].ids.clear()).contains("cases[0] (`len2`): a case needs"));
        assert!(error(|p| p.cases[0].f32_margins.clear()).contains("one entry for each token"));
        assert!(error(|p| p.cases[0].top_logits[1].clear()).contains("as many top logits"));
        assert!(error(|p| p.cases[0].rows[1] = 3).contains("`rows` must rise"));
        assert!(error(|p| p.cases[0].stages[0].numbers.clear()).contains("three numbers"));
        assert!(error(|p| p.cases[0].kind = CaseKind::Media).contains("a media case has media"));
        assert!(heard(|p| p.cases[0].kind = CaseKind::Text).contains("and no other has"));
        assert!(heard(|p| p.cases[0].media[0].rows.clear()).contains("three numbers"));
        assert!(
            heard(|p| p.cases[0].media[0].drawing = Drawing::Image { width: usize::MAX, height: 1, seed: 0 }).contains("within reason")
        );
        for text in ["", "{}", "[1]", "{\"parity_version\": 1}"] {
            assert!(Parity::from_json(text).unwrap_err().starts_with("not a parity file"), "{text}");
        }
    }
}

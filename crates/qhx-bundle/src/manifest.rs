//! The manifest, `qhx.json`: what a bundle is and which files it has.
//!
//! This module owns the types and every check that needs no other file. It knows nothing of folders, mappings or programs.

pub use crate::error::SCHEMA_VERSION;

use crate::{
    BundlePath, Digest, ManifestError, json,
    media::Media,
    target::{PlacementRules, TargetPlan},
};
#[cfg(feature = "schema")]
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The manifest's file name in a bundle's folder.
pub const MANIFEST_FILE: &str = "qhx.json";
/// The program that every bundle has.
pub const TEXT_PROGRAM: &str = "text";
/// The largest manifest that is read, in bytes.
pub const MAX_MANIFEST_BYTES: u64 = 4 << 20;

/// A bundle's manifest. [`Manifest::from_json`] gives only checked ones.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(deny_unknown_fields)]
#[cfg_attr(
    feature = "schema",
    schemars(title = "qhx bundle manifest", description = "`qhx.json`: what a bundle is and which files it has.")
)]
pub struct Manifest {
    /// The version of this format: 1. Stands first, so that readers can tell before anything else.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 1)))]
    pub schema_version: u32,
    /// What the model is.
    pub model: ModelFacts,
    /// What was prepared for the processor that `model.dsp_arch` names. In arch folders only: they hold those weights that the host reads, and no others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<TargetPlan>,
    /// Which stage of an arch folder runs elsewhere than on its processor, unless somebody says otherwise. The weights for that are in the folder too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<PlacementRules>,
    /// A label for the precision of the weights: `f32`, `f16`, `w8`, `native` … The programs say how each weight is stored.
    pub precision: String,
    /// How weights became integers; absent where none did, or where the checkpoint has these very integers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rounding: Option<Rounding>,
    /// How a conversation becomes text.
    pub chat: Chat,
    /// Token ids with a meaning to the generate loop.
    pub tokens: Tokens,
    /// What the checkpoint's makers suggest for sampling: shown, and there for programs to apply. Greedy decoding is the default all the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<SuggestedSampling>,
    /// What the model can take beside text, and how that becomes the inputs of its towers.
    #[serde(default, skip_serializing_if = "Media::is_empty")]
    pub media: Media,
    /// The tokenizer in the `tokenizers` JSON format. A bundle without one takes token ids only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<BundlePath>,
    /// The programs by name. `text` is always there.
    #[serde(deserialize_with = "json::unique_map")]
    pub programs: BTreeMap<String, ProgramEntry>,
    /// The program that guesses the tokens after the next one, where the model has one. Guesses are checked, so it changes speed and never an answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft: Option<DraftEntry>,
    /// The weight files (safetensors). A weight and its scales stand in one file.
    pub weights: Vec<BundlePath>,
    /// Tensors of the checkpoint that no program uses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ignored_tensors: Option<IgnoredTensors>,
    /// What the gates measured when this bundle was made, and the oracle that `verify` replays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parity: Option<BundlePath>,
    /// Folder, inside the bundle, with what encoders made of media, so that a decoder can be tried without them: `0.safetensors` for a prompt's first medium
    /// (`soft_rows`, f32, rows by width; `deepstack.N` likewise; and for an image `grid`, two numbers), and so on. Its files are not listed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fixture_dir: Option<BundlePath>,
    /// Every file of the bundle but the manifest itself.
    #[serde(deserialize_with = "json::unique_map")]
    pub files: BTreeMap<BundlePath, FileEntry>,
}

/// What the model is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ModelFacts {
    /// What people call it.
    pub name: String,
    /// The family that the forge took it for. For information: nothing depends on it.
    pub family: String,
    /// The architecture as the checkpoint names it. For information.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub architecture: Option<String>,
    /// What the bundle was made from.
    pub source_format: SourceFormat,
    /// The generation of the Hexagon processor that an arch folder is for: `v79`, `v81`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dsp_arch: Option<String>,
    /// The chip that stands for the generation, by QNN's number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub soc_model: Option<u32>,
    /// Parameters of all programs together.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub parameters: u64,
    /// The longest session that the model was made for, in tokens.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub context_length: usize,
    /// Number of token ids: rows of the embedding and of the logits.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub vocab_size: usize,
    /// Width of the residual stream.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub hidden_size: usize,
    /// There when the weights are random numbers made for benchmarks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub synthetic: Option<Synthetic>,
}

/// What a bundle was made from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum SourceFormat {
    /// A folder with `config.json` and safetensors.
    Safetensors,
    /// A GGUF file.
    Gguf,
    /// A configuration alone: the weights are synthetic.
    Config,
}

/// How weights became integers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Rounding {
    /// Each number by itself, to the nearest.
    Plain,
    /// By the inputs that they met while the model read some texts.
    Calibrated(Calibrated),
}

/// What a model read while its weights were rounded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Calibrated {
    /// `built-in`, or the name of the file.
    pub texts: String,
    /// Of the texts.
    pub sha256: Digest,
    /// Tokens that were read.
    pub tokens: usize,
}

/// How synthetic weights were made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Synthetic {
    /// The seed of the random numbers.
    pub seed: u64,
}

/// How a conversation becomes text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Chat {
    /// Whether the model talks or completes.
    pub mode: ChatMode,
    /// The Jinja template; needed in mode `template`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<BundlePath>,
    /// What the template sees as `bos_token`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bos_token: Option<String>,
    /// What the template sees as `eos_token`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eos_token: Option<String>,
    /// Further variables that the template sees unless the caller sets them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "json::unique_map")]
    pub template_arguments: BTreeMap<String, serde_json::Value>,
}

/// Whether a model talks or completes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ChatMode {
    /// Messages are rendered by the chat template.
    Template,
    /// The prompt is continued as it stands.
    Completion,
}

/// Token ids with a meaning to the generate loop. Whether a tokenizer adds any of them is the tokenizer file's business.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Tokens {
    /// Begins a text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bos: Option<u32>,
    /// Each of these ends an answer.
    pub eos: Vec<u32>,
    /// Fills rows without meaning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pad: Option<u32>,
}

/// Sampling as the model's makers suggest it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct SuggestedSampling {
    /// Divides the logits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f64>,
    /// Keeps the most likely tokens, this many.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_k: Option<u32>,
    /// Keeps the most likely tokens up to this share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f64>,
    /// Keeps tokens at least this likely, relative to the most likely one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_p: Option<f64>,
    /// Makes tokens that were there less likely.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repetition_penalty: Option<f64>,
}

/// A program of the bundle.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ProgramEntry {
    /// Its JSON file.
    pub file: BundlePath,
}

/// The program that guesses tokens, and what feeds it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct DraftEntry {
    /// Its name in `programs`.
    pub program: String,
    /// The stage of the program `text` whose rows are its hidden rows.
    pub stage: String,
}

/// Tensors of the checkpoint that no program uses: left out of the bundle, but counted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct IgnoredTensors {
    /// How many.
    pub count: u64,
    /// Their bytes in the checkpoint.
    pub bytes: u64,
    /// What their names start with.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prefixes: Vec<String>,
}

/// What a file must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Its length.
    pub bytes: u64,
    /// Its sum.
    pub sha256: Digest,
}

impl Manifest {
    /// Reads and checks a manifest. A newer version is told before anything else that may be strange about it.
    pub fn from_json(text: &str) -> Result<Self, ManifestError> {
        #[derive(Deserialize)]
        struct Version {
            schema_version: u32,
        }
        if text.len() as u64 > MAX_MANIFEST_BYTES {
            return Err(ManifestError::NotAManifest(format!("it has {} bytes, more than the limit of {MAX_MANIFEST_BYTES}", text.len())));
        }
        let Version { schema_version } = serde_json::from_str(text).map_err(|e| ManifestError::NotAManifest(e.to_string()))?;
        if schema_version > SCHEMA_VERSION {
            return Err(ManifestError::NewerSchema { found: schema_version });
        }
        let manifest: Self = serde_json::from_str(text).map_err(|e| match of_other_runtime(text) {
            Some(field) => ManifestError::OtherRuntime { field },
            None => ManifestError::Field { field: json::field_of(text, &e), reason: e.to_string() },
        })?;
        manifest.check()?;
        Ok(manifest)
    }

    /// The readable form; an error where it would be too long to be read again.
    pub fn to_json(&self) -> Result<String, ManifestError> {
        let text = serde_json::to_string_pretty(self).map_err(|e| ManifestError::NotAManifest(e.to_string()))? + "\n";
        if text.len() as u64 > MAX_MANIFEST_BYTES {
            return Err(ManifestError::NotAManifest(format!("it would have {} bytes, more than can be read back", text.len())));
        }
        Ok(text)
    }

    /// Every check that needs no other file.
    pub fn check(&self) -> Result<(), ManifestError> {
        let wrong = |field: &str, reason: String| Err(ManifestError::Field { field: field.into(), reason });
        if self.schema_version != SCHEMA_VERSION {
            return wrong("schema_version", format!("must be {SCHEMA_VERSION}, found {}", self.schema_version));
        }
        let model = &self.model;
        for (field, text) in [("model.name", &model.name), ("model.family", &model.family), ("precision", &self.precision)] {
            if text.is_empty() || text.len() > 256 || text.contains(char::is_control) {
                return wrong(field, "must be short text without control characters".into());
            }
        }
        for (field, number) in [
            ("model.parameters", model.parameters),
            ("model.context_length", model.context_length as u64),
            ("model.vocab_size", model.vocab_size as u64),
            ("model.hidden_size", model.hidden_size as u64),
        ] {
            if number == 0 {
                return wrong(field, "must be at least 1".into());
            }
        }
        let ids = self.tokens.bos.iter().map(|id| ("tokens.bos", id));
        let ids = ids.chain(self.tokens.eos.iter().map(|id| ("tokens.eos", id))).chain(self.tokens.pad.iter().map(|id| ("tokens.pad", id)));
        for (field, &id) in ids {
            if id as usize >= model.vocab_size {
                return wrong(field, format!("token {id} is not in the vocabulary of {}", model.vocab_size));
            }
        }
        self.media.check(&self.programs, model.vocab_size)?;
        if let Some(plan) = &self.plan {
            plan.check(&self.programs, self.placement.is_some())?;
        }
        if self.placement.is_some() && self.plan.is_none() {
            return wrong("placement", "must be given together with `plan`".into());
        }
        if self.plan.is_some() != model.dsp_arch.is_some() {
            return wrong("model.dsp_arch", "must be given together with `plan`".into());
        }
        if self.chat.mode == ChatMode::Template {
            if self.chat.template.is_none() {
                return wrong("chat.template", "must name the template file, since chat.mode is `template`".into());
            }
            if self.tokenizer.is_none() {
                return wrong("tokenizer", "must name the tokenizer file, since chat.mode is `template`".into());
            }
        }
        if !self.programs.contains_key(TEXT_PROGRAM) {
            return wrong("programs", format!("must have the program `{TEXT_PROGRAM}`"));
        }
        if let Some(DraftEntry { program, .. }) = &self.draft
            && (program == TEXT_PROGRAM || !self.programs.contains_key(program))
        {
            return wrong(
                "draft.program",
                format!("names the program `{program}`, which is not one of `programs` beside `{TEXT_PROGRAM}`"),
            );
        }
        for (i, file) in self.weights.iter().enumerate() {
            if self.weights[..i].contains(file) {
                return wrong(&format!("weights[{i}]"), format!("`{file}` appears twice"));
            }
        }
        for (field, file) in self.named_files() {
            if !self.files.contains_key(file) {
                return wrong(&field, format!("names `{file}`, which `files` does not list"));
            }
        }
        Ok(())
    }

    /// Every file that a field names, with that field.
    pub fn named_files(&self) -> impl Iterator<Item = (String, &BundlePath)> {
        let programs = self.programs.iter().map(|(name, program)| (format!("programs.{name}.file"), &program.file));
        let weights = self.weights.iter().enumerate().map(|(i, file)| (format!("weights[{i}]"), file));
        let single = [("tokenizer", &self.tokenizer), ("chat.template", &self.chat.template), ("parity", &self.parity)];
        let single = single.into_iter().filter_map(|(field, file)| Some((field.to_string(), file.as_ref()?)));
        programs.chain(weights).chain(single).chain(self.plan.iter().flat_map(TargetPlan::named_files))
    }

    /// What this bundle's files are, in one sum: equal for equal files, so that saved sessions know their model again.
    pub fn fingerprint(&self) -> Digest {
        let lines: String = self.files.iter().map(|(path, entry)| format!("{path}\t{}\t{}\n", entry.bytes, entry.sha256)).collect();
        Digest::of(lines.as_bytes())
    }
}

/// The field by which published manifests of QHexRT are known, whose versions are counted like ours.
fn of_other_runtime(text: &str) -> Option<&'static str> {
    let manifest: serde_json::Value = serde_json::from_str(text).ok()?;
    let is_there = |pointer: &str| manifest.pointer(pointer).is_some();
    [("/model/tokenizer_pre", "model.tokenizer_pre"), ("/artifacts", "artifacts"), ("/plan/steps", "plan.steps")]
        .into_iter()
        .find_map(|(pointer, field)| is_there(pointer).then_some(field))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn example() -> Value {
        let file = json!({"bytes": 3, "sha256": Digest::of(b"abc").to_string()});
        json!({
            "schema_version": 1,
            "model": {
                "name": "tiny", "family": "plain", "source_format": "safetensors", "parameters": 1000, "context_length": 64,
                "vocab_size": 32, "hidden_size": 8
            },
            "precision": "f32",
            "chat": {"mode": "template", "template": "chat_template.jinja", "eos_token": "</s>", "template_arguments": {"thinking": false}},
            "tokens": {"bos": 1, "eos": [2, 3]},
            "tokenizer": "tokenizer.json",
            "programs": {"text": {"file": "programs/text.json"}},
            "weights": ["weights/a.safetensors"],
            "files": {
                "programs/text.json": file, "weights/a.safetensors": file, "tokenizer.json": file, "chat_template.jinja": file
            }
        })
    }

    #[test]
    fn a_drafting_program_is_one_of_the_others() {
        for program in ["text", "mtp"] {
            let error = error_after(|value| value["draft"] = json!({"program": program, "stage": "layers.0.ffn"}));
            assert!(error.contains("field `draft.program`") && error.contains(&format!("the program `{program}`")), "{error}");
        }
        let mut value = example();
        value["programs"]["mtp"] = value["programs"]["text"].clone();
        value["draft"] = json!({"program": "mtp", "stage": "layers.0.ffn"});
        let manifest = Manifest::from_json(&value.to_string()).unwrap();
        assert_eq!(manifest.draft, Some(DraftEntry { program: "mtp".into(), stage: "layers.0.ffn".into() }));
    }

    fn image(change: fn(&mut Value)) -> Value {
        let mut value = json!({
            "program": "text", "placeholder": {"token": 5}, "resize": {"fixed": {"height": 64, "width": 32}}, "rescale": 0.00392,
            "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "patches": {"size": 16, "block": 2, "temporal": 2, "order": "channel_first"}
        });
        change(&mut value);
        value
    }

    fn audio(change: fn(&mut Value)) -> Value {
        let mut value = json!({
            "program": "text", "placeholder": {"token": 5, "begin": 6, "end": 7}, "sampling_rate": 16000, "max_samples": 480000,
            "frame_length": 320, "hop_length": 160, "fft_length": 512, "bins": 128, "min_frequency": 0.0,
            "max_frequency": 8000.0, "mel_floor": 0.001, "input_scale": 1.0
        });
        change(&mut value);
        value
    }

    fn error_after(change: impl FnOnce(&mut Value)) -> String {
        let mut value = example();
        change(&mut value);
        Manifest::from_json(&serde_json::to_string_pretty(&value).unwrap()).unwrap_err().to_string()
    }

    #[test]
    fn round_trip_with_the_version_in_front() {
        let manifest = Manifest::from_json(&example().to_string()).unwrap();
        let text = manifest.to_json().unwrap();
        assert!(text.starts_with("{\n  \"schema_version\": 1,\n"), "{text}");
        assert_eq!(Manifest::from_json(&text).unwrap(), manifest);
        assert_eq!(manifest.named_files().count(), 4);
    }

    #[test]
    fn manifests_of_another_runtime_are_told_as_that() {
        let published = json!({
            "schema_version": 1,
            "model": { "name": "lfm2-5-230m", "family": "llm", "dsp_arch": "v79", "soc_model": 69, "tokenizer_pre": "lfm" },
            "artifacts": { "contexts": { "shared": { "bin": "lfm_shared.bin" } }, "embed": "embed.bin", "tokenizer": "tokenizer.json" },
        });
        let error = Manifest::from_json(&published.to_string()).unwrap_err().to_string();
        assert!(error.contains("another runtime") && error.contains("`model.tokenizer_pre`"), "{error}");
        let damaged = Manifest::from_json(&example().to_string().replace("vocab_size", "size")).unwrap_err().to_string();
        assert!(!damaged.contains("runtime"), "{damaged}");
    }

    #[test]
    fn errors_name_the_field() {
        type Change = fn(&mut Value);
        let cases: [(Change, &str, &str); 23] = [
            (|v| v["extra"] = 1.into(), "field `extra`", "unknown field"),
            (|v| v["model"]["wings"] = 2.into(), "field `model.wings`", "unknown field"),
            (|v| drop(v["model"].as_object_mut().unwrap().remove("vocab_size")), "field `model.vocab_size`", "missing field"),
            (|v| drop(v.as_object_mut().unwrap().remove("files")), "field `files`", "missing field"),
            (|v| v["programs"]["text"]["file"] = "../../etc/passwd".into(), "field `programs.text.file`", "`../../etc/passwd`"),
            (|v| v["weights"] = json!(["weights/a.safetensors", "/etc/passwd"]), "field `weights[1]`", "is absolute"),
            (|v| v["files"]["a/../b"] = json!({}), "field `files.a/../b`", "may lead out"),
            (|v| v["files"]["tokenizer.json"]["sha256"] = "ABC".into(), "field `files.tokenizer.json.sha256`", "64 lower-case"),
            (|v| v["chat"]["mode"] = "shout".into(), "field `chat.mode`", "unknown variant"),
            (|v| drop(v["chat"].as_object_mut().unwrap().remove("template")), "field `chat.template`", "chat.mode"),
            (|v| drop(v.as_object_mut().unwrap().remove("tokenizer")), "field `tokenizer`", "chat.mode"),
            (|v| v["tokens"]["eos"] = json!([2, 32]), "field `tokens.eos`", "token 32"),
            (|v| v["tokens"]["eos"] = json!([2, -1]), "field `tokens.eos[1]`", "-1"),
            (|v| v["model"]["hidden_size"] = 0.into(), "field `model.hidden_size`", "at least 1"),
            (|v| v["programs"] = json!({"vision": {"file": "programs/text.json"}}), "field `programs`", "`text`"),
            (|v| v["parity"] = "parity.json".into(), "field `parity`", "does not list"),
            (|v| v["weights"] = json!(["weights/a.safetensors", "weights/a.safetensors"]), "field `weights[1]`", "twice"),
            (|v| v["media"] = json!({"smell": {}}), "field `media.smell`", "unknown field"),
            (|v| v["media"]["audio"] = audio(|a| a["program"] = "audio".into()), "field `media.audio.program`", "`audio`"),
            (|v| v["media"]["audio"] = audio(|a| a["placeholder"]["end"] = 32.into()), "field `media.audio.placeholder`", "token 32"),
            (|v| v["media"]["audio"] = audio(|a| a["hop_length"] = 0.into()), "field `media.audio.hop_length`", "found 0"),
            (|v| v["media"]["image"] = image(|i| i["std"][1] = 0.into()), "field `media.image.mean`", "above 0"),
            (|v| v["media"]["image"] = image(|i| i["resize"]["fixed"]["width"] = 48.into()), "field `media.image.resize`", "multiples"),
        ];
        for media in [json!({"image": image(|_| {})}), json!({"audio": audio(|_| {})})] {
            let mut value = example();
            value["media"] = media;
            Manifest::from_json(&value.to_string()).unwrap();
        }
        for (change, field, reason) in cases {
            let error = error_after(change);
            assert!(error.contains(field) && error.contains(reason), "expected {field} … {reason}, found: {error}");
        }
    }

    #[test]
    fn a_newer_version_is_told_before_unknown_fields() {
        let error = error_after(|v| {
            v["schema_version"] = 2.into();
            v["from_the_future"] = true.into();
        });
        assert!(error.contains("schema_version 2 is newer than 1") && error.contains("update"), "{error}");
        assert!(error_after(|v| v["schema_version"] = 0.into()).contains("must be 1, found 0"));
        assert!(Manifest::from_json("[]").unwrap_err().to_string().contains("not a bundle manifest"));
        assert!(Manifest::from_json("").unwrap_err().to_string().contains("not a bundle manifest"));
        let huge = " ".repeat(MAX_MANIFEST_BYTES as usize + 1);
        assert!(Manifest::from_json(&huge).unwrap_err().to_string().contains("more than"));
    }

    #[test]
    fn a_key_given_twice_is_refused() {
        let text = example().to_string();
        let twice = text.replace(r#""programs":{"#, r#""programs":{"text":{"file":"programs/other.json"},"#);
        assert!(Manifest::from_json(&twice).unwrap_err().to_string().contains("`text` appears twice"));
        let twice = text.replace(r#""precision":"f32""#, r#""precision":"f32","precision":"f16""#);
        assert!(Manifest::from_json(&twice).unwrap_err().to_string().contains("duplicate field `precision`"));
    }

    #[test]
    fn the_fingerprint_follows_the_files() {
        let a = Manifest::from_json(&example().to_string()).unwrap();
        let mut b = a.clone();
        b.model.name = "other".into();
        assert_eq!(a.fingerprint(), b.fingerprint());
        b.files.values_mut().next().unwrap().bytes += 1;
        assert_ne!(a.fingerprint(), b.fingerprint());
    }
}

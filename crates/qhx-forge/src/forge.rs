//! From a checkpoint, or from a bare configuration, to a bundle: the whole run.
//!
//! Everything that can be wrong with the configuration and the tensors' shapes is found before a byte is written. Weights are then streamed: a few
//! rows at a time are read, encoded on all cores and written, so that memory stays small whatever the model's size. The bundle gets
//! its name only when it is complete.

use crate::{
    Calibration, Config, ForgeError,
    calibrate::CalibrationRun,
    encode::EncodedRows,
    families::{self, Family, Programs},
    media::MediaFiles,
    mixture,
    numbers::{Numbers, Origin, weight_rows},
    pen::Recipe,
    plan::PrecisionPlan,
    precision::Precision,
    read::{Checkpoint, TensorInfo, TensorSource},
    skew,
};
use qhx_bundle::{
    BundlePath, BundleWriter, Staged, TensorSpec, WriteOptions,
    layout::Part,
    manifest::{
        Chat, ChatMode, IgnoredTensors, Manifest, ModelFacts, Rounding, SCHEMA_VERSION, SourceFormat, SuggestedSampling, Synthetic, Tokens,
    },
    write::check_free,
};
use qhx_ir::{Checked, Name, Weight};
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

/// How a bundle is to be made.
pub struct ForgeOptions<'a> {
    /// The bundle's folder; its last part is the model's name.
    pub out: &'a Path,
    /// How weights are stored.
    pub precision: Precision,
    /// How weights that become integers are rounded: by what they are multiplied with, or if absent each number to the nearest. Needs a checkpoint with a tokenizer.
    pub calibration: Option<Calibration>,
    /// Whether tables and output heads that become integers are int8 with a scale per row, whatever the precision: NPUs multiply by no other int8. Implied by arch folders.
    pub row_tables: bool,
    /// Whether an existing bundle of that name may be replaced.
    pub replace: bool,
    /// Set by somebody who wants to stop.
    pub cancel: Arc<AtomicBool>,
    /// Told how far the work is.
    pub progress: Option<&'a mut dyn FnMut(Progress<'_>)>,
}

impl<'a> ForgeOptions<'a> {
    /// A new bundle, every weight rounded to the nearest.
    pub fn new(out: &'a Path, precision: Precision) -> Self {
        Self { out, precision, calibration: None, row_tables: false, replace: false, cancel: Arc::default(), progress: None }
    }

    pub(crate) fn tell(&mut self, progress: Progress<'_>) {
        if let Some(told) = &mut self.progress {
            told(progress);
        }
    }
}

/// How far the work is.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// Numbers written.
    pub done: u64,
    /// Numbers in all.
    pub total: u64,
    /// The weight at hand.
    pub weight: &'a str,
    /// About how long calibration will still take, while it runs.
    pub left: Option<Duration>,
}

/// What was made.
#[derive(Clone, Debug)]
pub struct Forged {
    /// Where it is.
    pub path: PathBuf,
    /// Its manifest.
    pub manifest: Manifest,
}

/// Makes a bundle from a Hugging Face folder or a GGUF file. No gate is applied: see [`crate::gate`].
pub fn forge_checkpoint(source: &Path, options: &mut ForgeOptions<'_>) -> Result<Forged, ForgeError> {
    Material::open(source)?.forge(options)
}

/// Makes a bundle of a configuration with seeded random weights, for benchmarks.
pub fn forge_synthetic(config: &Value, seed: u64, options: &mut ForgeOptions<'_>) -> Result<Forged, ForgeError> {
    Material::Synthetic { config: config.clone(), seed }.forge(options)
}

/// What a bundle is made from: the same material can be written at any precision, again and again.
pub enum Material {
    /// A checkpoint.
    Checkpoint(Box<Checkpoint>),
    /// A configuration alone, with seeded random weights.
    Synthetic {
        /// As in `config.json`.
        config: Value,
        /// Of the random numbers.
        seed: u64,
    },
}

impl Material {
    /// A Hugging Face folder or a GGUF file.
    pub fn open(source: &Path) -> Result<Self, ForgeError> {
        Ok(Self::Checkpoint(Box::new(Checkpoint::open(source)?)))
    }

    /// The same with the drafter that was published beside it, a small checkpoint that guesses tokens from what the model makes of its rows.
    pub fn open_with_drafter(source: &Path, drafter: &Path) -> Result<Self, ForgeError> {
        Ok(Self::Checkpoint(Box::new(Checkpoint::open(source)?.with_drafter(drafter)?)))
    }

    /// Makes a bundle of it. No gate is applied.
    pub fn forge(&self, options: &mut ForgeOptions<'_>) -> Result<Forged, ForgeError> {
        check_free(options.out, options.replace)?;
        let plan = mixture::plan(self, options)?;
        let staged = self.stage(&plan, &self.programs(&plan)?, options)?;
        let manifest = staged.manifest().clone();
        Ok(Forged { path: staged.publish()?, manifest })
    }

    /// The configuration as it was read.
    pub(crate) fn config_value(&self) -> &Value {
        match self {
            Self::Checkpoint(checkpoint) => &checkpoint.config,
            Self::Synthetic { config, .. } => config,
        }
    }

    fn config(&self) -> Config<'_> {
        Config::new(self.config_value())
    }

    /// The numbers of its weights, for bundles of that precision.
    pub(crate) fn numbers(&self, precision: Precision) -> Numbers<'_> {
        let origin = match self {
            Self::Checkpoint(checkpoint) => Origin::Checkpoint(&checkpoint.tensors),
            Self::Synthetic { seed, .. } => Origin::Seeded(*seed),
        };
        Numbers { origin, scales: precision.scales() }
    }

    fn media_files(&self) -> Result<MediaFiles, ForgeError> {
        match self {
            Self::Checkpoint(checkpoint) => Ok(MediaFiles::read(checkpoint)?),
            Self::Synthetic { .. } => Ok(MediaFiles::default()),
        }
    }

    /// Whether it can read texts: without, nothing is calibrated.
    pub(crate) fn has_tokenizer(&self) -> bool {
        matches!(self, Self::Checkpoint(checkpoint) if checkpoint.tokenizer_json.is_some())
    }

    /// Whether its weights are random.
    pub(crate) fn is_synthetic(&self) -> bool {
        matches!(self, Self::Synthetic { .. })
    }

    /// The programs as `plan` wants them, checked against the checkpoint's tensors.
    pub(crate) fn programs(&self, plan: &PrecisionPlan) -> Result<Programs, ForgeError> {
        let config = self.config();
        let family = families::of(config)?;
        match self {
            Self::Checkpoint(checkpoint) => {
                let programs = plan.write(family, config, &checkpoint.tensors)?;
                check_tensors(&programs, &checkpoint.tensors)?;
                Ok(programs)
            }
            Self::Synthetic { .. } => plan.write_prepared(family, config, &(), |programs| skew::skew_routers(programs, config)),
        }
    }

    /// The f32 programs, rotated as others are: their stages take the same rows.
    pub(crate) fn f32_programs_like(&self, programs: &Programs) -> Result<Programs, ForgeError> {
        self.programs(&PrecisionPlan { rotations: programs.rotations, ..PrecisionPlan::from(Precision::F32) })
    }

    /// The programs at a precision, text first, without weights; and the longest text that the model was made for.
    pub fn checked_programs(&self, precision: Precision) -> Result<(Vec<Checked>, usize), ForgeError> {
        let Programs { programs, context, .. } = self.programs(&PrecisionPlan::from(precision))?;
        Ok((programs.into_iter().map(|written| written.program).collect(), context))
    }

    /// The programs that would be forged for an NPU with these options.
    pub fn programs_for_targets(&self, options: &mut ForgeOptions<'_>) -> Result<(Vec<Checked>, usize), ForgeError> {
        options.row_tables = true;
        let Programs { programs, context, draft, .. } = self.programs(&mixture::plan(self, options)?)?;
        let programs = programs.into_iter().map(|written| written.program);
        // Nothing is drafted there.
        let drafts = |program: &Checked| draft.as_ref().is_some_and(|draft| *draft.program == *program.name);
        Ok((programs.filter(|program| !drafts(program)).collect(), context))
    }

    /// Writes a complete bundle under a temporary name.
    pub(crate) fn stage(&self, plan: &PrecisionPlan, programs: &Programs, options: &mut ForgeOptions<'_>) -> Result<Staged, ForgeError> {
        if let Self::Checkpoint(checkpoint) = self
            && let Some(tokenizer) = &checkpoint.tokenizer_json
        {
            // A bundle that cannot be loaded is not made, gated or not.
            qhx_runtime::text::Tokenizer::from_bytes(tokenizer).map_err(qhx_runtime::Error::from)?;
        }
        let (mut manifest, files) = self.describe(plan, programs, options)?;
        let numbers = self.numbers(plan.base);
        let cancel = options.cancel.clone();
        let prepared = CalibrationRun::new(self, &numbers, programs, options, &cancel)?;
        let is_rounded = weights(programs).any(|(_, weight, recipe)| !weight.encoding.is_float() && !numbers.is_lossless(weight, recipe));
        manifest.rounding = is_rounded.then(|| prepared.as_ref().map_or(Rounding::Plain, CalibrationRun::rounding));
        write_bundle(programs, &numbers, prepared, manifest, &files, options)
    }

    /// What a bundle says of the model, and its files beside programs and weights.
    pub(crate) fn describe(
        &self,
        plan: &PrecisionPlan,
        programs: &Programs,
        options: &ForgeOptions<'_>,
    ) -> Result<Described<'_>, ForgeError> {
        let config = self.config();
        let family = families::of(config)?;
        let mut manifest = manifest(family, programs, config, &plan.label(), options)?;
        manifest.media = (family.media)(config, &self.media_files()?, programs)?;
        let checkpoint = match self {
            Self::Synthetic { seed, .. } => {
                manifest.model.synthetic = Some(Synthetic { seed: *seed });
                return Ok((manifest, Vec::new()));
            }
            Self::Checkpoint(checkpoint) => checkpoint,
        };
        let ignored = ignored_tensors(programs, &checkpoint.tensors)?;
        manifest.model.source_format = if checkpoint.path.is_file() { SourceFormat::Gguf } else { SourceFormat::Safetensors };
        manifest.ignored_tensors = (ignored.count > 0).then_some(ignored);
        manifest.tokens = tokens(checkpoint);
        manifest.generation = checkpoint.generation_config.as_ref().and_then(suggested_sampling);
        let mut files = Vec::new();
        if let Some(tokenizer) = &checkpoint.tokenizer_json {
            manifest.tokenizer = Some(bundle_path("tokenizer.json")?);
            files.push((bundle_path("tokenizer.json")?, tokenizer.as_slice()));
        }
        if let (Some(template), Some(_)) = (&checkpoint.chat_template, &manifest.tokenizer) {
            manifest.chat.mode = ChatMode::Template;
            manifest.chat.template = Some(bundle_path("chat_template.jinja")?);
            files.push((bundle_path("chat_template.jinja")?, template.as_bytes()));
        }
        let special = |field| checkpoint.tokenizer_config.as_ref().and_then(|c| token_text(c.get(field)?));
        (manifest.chat.bos_token, manifest.chat.eos_token) = (special("bos_token"), special("eos_token"));
        Ok((manifest, files))
    }
}

/// A manifest, and files with their content.
type Described<'a> = (Manifest, Vec<(BundlePath, &'a [u8])>);

/// Every tensor that a recipe names must be there, in the right shape.
fn check_tensors(programs: &Programs, tensors: &TensorSource) -> Result<(), ForgeError> {
    for (name, weight, recipe) in weights(programs) {
        for (index, tensor) in recipe.tensors().iter().enumerate() {
            let found = &tensors.tensor(tensor)?.info().shape.clone();
            if let Some(expected) = recipe.mismatch(index, found, &weight.shape) {
                let reason = format!("has shape {found:?}, but the configuration asks for {expected:?} (as weight `{name}`)");
                return Err(ForgeError::Tensor { tensor: tensor.to_string(), reason });
            }
        }
    }
    Ok(())
}

/// Counts the tensors that are left out on purpose; one that is left out otherwise is an error, for the model would be another.
fn ignored_tensors(programs: &Programs, tensors: &TensorSource) -> Result<IgnoredTensors, ForgeError> {
    let mut used: BTreeSet<&String> = weights(programs).flat_map(|(_, _, recipe)| recipe.tensors()).collect();
    used.extend(programs.programs.iter().flat_map(|written| written.constants.iter().map(|(tensor, _)| tensor)));
    let mut ignored = IgnoredTensors::default();
    let mut prefixes = BTreeSet::new();
    for tensor in tensors.tensors().filter(|t| !used.contains(&t.name)) {
        if !(programs.ignored)(&tensor.name) {
            let reason = "is in the checkpoint, but this family has no use for it: the configuration and the weights do not belong together, or the variant is not supported";
            return Err(ForgeError::Tensor { tensor: tensor.name.clone(), reason: reason.into() });
        }
        ignored.count += 1;
        ignored.bytes += stored_bytes(tensor);
        prefixes.insert(tensor.name.split('.').take(2).collect::<Vec<_>>().join("."));
    }
    ignored.prefixes = prefixes.into_iter().take(8).collect();
    Ok(ignored)
}

fn stored_bytes(tensor: &TensorInfo) -> u64 {
    (tensor.rows() * tensor.source_type.row_bytes(tensor.columns()).unwrap_or(0)) as u64
}

/// All weights once, with their recipes.
pub(crate) fn weights(programs: &Programs) -> impl Iterator<Item = (&Name, &Weight, &Recipe)> {
    let mut seen = BTreeSet::new();
    programs
        .programs
        .iter()
        .flat_map(|written| written.program.weights.iter().map(move |(name, weight)| (name, weight, &written.recipes[name])))
        .filter(move |(name, ..)| seen.insert((*name).clone()))
}

fn manifest(
    family: &Family,
    programs: &Programs,
    config: Config<'_>,
    precision: &str,
    options: &ForgeOptions<'_>,
) -> Result<Manifest, ForgeError> {
    let name = options.out.file_name().map_or("model".into(), |name| name.to_string_lossy().into_owned());
    let architectures = config.texts_if_any("architectures")?.unwrap_or_default();
    let numbers = |(_, weight, _): (&Name, &Weight, &Recipe)| weight.shape.iter().map(|&d| d as u64).product::<u64>();
    Ok(Manifest {
        schema_version: SCHEMA_VERSION,
        model: ModelFacts {
            name,
            family: family.name.into(),
            architecture: architectures.first().map(|a| a.to_string()),
            source_format: SourceFormat::Config,
            dsp_arch: None,
            soc_model: None,
            parameters: weights(programs).map(numbers).sum(),
            context_length: programs.context,
            vocab_size: programs.vocabulary,
            hidden_size: programs.hidden,
            synthetic: None,
        },
        plan: None,
        placement: None,
        precision: precision.into(),
        rounding: None,
        chat: Chat { mode: ChatMode::Completion, template: None, bos_token: None, eos_token: None, template_arguments: BTreeMap::new() },
        tokens: Tokens::default(),
        generation: None,
        media: Default::default(),
        tokenizer: None,
        programs: BTreeMap::new(),
        draft: programs.draft.clone(),
        weights: Vec::new(),
        ignored_tensors: None,
        parity: None,
        fixture_dir: None,
        files: BTreeMap::new(),
    })
}

/// Special ids: the generation configuration goes before the configuration and its text section.
fn tokens(checkpoint: &Checkpoint) -> Tokens {
    let config = &checkpoint.config;
    let places = [checkpoint.generation_config.as_ref(), Some(config), config.get("text_config")];
    let id = |field: &str| places.iter().flatten().find_map(|place| place.get(field)?.as_u64()).and_then(|id| u32::try_from(id).ok());
    Tokens { bos: id("bos_token_id"), eos: checkpoint.eos_ids.clone(), pad: id("pad_token_id") }
}

fn suggested_sampling(config: &Value) -> Option<SuggestedSampling> {
    let number = |field: &str| config.get(field).and_then(Value::as_f64);
    let suggested = SuggestedSampling {
        temperature: number("temperature"),
        top_k: config.get("top_k").and_then(Value::as_u64).and_then(|k| u32::try_from(k).ok()),
        top_p: number("top_p"),
        min_p: number("min_p"),
        repetition_penalty: number("repetition_penalty"),
    };
    (suggested != SuggestedSampling::default()).then_some(suggested)
}

/// A special token in `tokenizer_config.json`: text, or an object with `content`.
fn token_text(value: &Value) -> Option<String> {
    value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_string)
}

fn write_bundle(
    programs: &Programs,
    numbers: &Numbers<'_>,
    calibration: Option<CalibrationRun<'_>>,
    manifest: Manifest,
    files: &[(BundlePath, &[u8])],
    options: &mut ForgeOptions<'_>,
) -> Result<Staged, ForgeError> {
    let cancel = Some(options.cancel.clone());
    let mut writer = BundleWriter::create(options.out, WriteOptions { replace: options.replace, cancel, ..Default::default() })?;
    programs.programs.iter().try_for_each(|written| writer.add_program(&written.program))?;
    files.iter().try_for_each(|(path, bytes)| writer.add_file(path, bytes))?;
    let total = weights(programs).map(|(_, w, _)| w.shape.iter().map(|&d| d as u64).product::<u64>()).sum();
    writer.declare_weights(TensorSpec::of_programs(programs.programs.iter().map(|written| &*written.program)))?;
    let pace = calibration.as_ref().map(|calibration| calibration.pace(numbers, programs)).transpose()?;
    if let Some(pace) = &pace {
        options.tell(Progress { done: 0, total, weight: "", left: Some(pace.left()) });
    }
    let all: BTreeMap<&Name, &Weight> = weights(programs).map(|(name, weight, _)| (name, weight)).collect();
    let mut done = 0;
    let mut take = |name: &Name, rows: Range<usize>, encoded: &EncodedRows, left: Option<Duration>| {
        for (part, bytes) in [(Part::Data, &encoded.data), (Part::Scale, &encoded.scale), (Part::Min, &encoded.min)] {
            if !bytes.is_empty() {
                writer.write_rows(name, part, rows.start, bytes)?;
            }
        }
        done += (rows.len() * all[name].shape.last().copied().unwrap_or(0)) as u64;
        options.tell(Progress { done, total, weight: name, left });
        Ok(())
    };
    let rounded = match calibration.zip(pace) {
        Some((calibration, pace)) => calibration.run(numbers, programs, &pace, &mut take)?,
        None => BTreeSet::new(),
    };
    for (name, weight, recipe) in weights(programs).filter(|(name, ..)| !rounded.contains(*name)) {
        numbers.encode(weight, recipe, 0..weight_rows(weight), &mut |rows, encoded| take(name, rows, &encoded, None))?;
    }
    let staged = writer.stage(manifest)?;
    staged.open()?;
    Ok(staged)
}

fn bundle_path(name: &str) -> Result<BundlePath, ForgeError> {
    BundlePath::new(name).map_err(|e| ForgeError::Tensor { tensor: name.into(), reason: e.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_tokenizer_that_cannot_be_loaded_is_refused_without_a_gate() {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/llama");
        let folder = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(fixture).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
        }
        let out = folder.path().join("bundle");
        for (tokenizer, problem) in [("", "it is empty"), ("{}", "missing field `model`")] {
            fs::write(folder.path().join("tokenizer.json"), tokenizer).unwrap();
            let mut options = ForgeOptions::new(&out, Precision::F32);
            let error = forge_checkpoint(folder.path(), &mut options).unwrap_err().to_string();
            assert!(error.starts_with("the tokenizer file cannot be used: ") && error.contains(problem), "{error}");
            assert!(!out.exists());
        }
    }
}

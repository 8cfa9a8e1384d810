//! From a checkpoint, or from a bare configuration, to a bundle: the whole run.
//!
//! Everything that can be wrong with the configuration and the tensors' shapes is found before a byte is written. Weights are then streamed: a few
//! rows at a time are read, encoded on all cores and written, so that memory stays small whatever the model's size. The bundle gets
//! its name only when it is complete.

use crate::{
    Config, ForgeError,
    encode::{EncodedRows, encode, put},
    families::{self, Family, Programs},
    model::Recipe,
    precision::{Precision, StoredTensors},
    read::{Checkpoint, SourceType, TensorInfo, TensorSource},
    synth::TensorNumbers,
};
use qhx_bundle::{
    BundlePath, BundleWriter, TensorSpec, WriteOptions,
    layout::Part,
    manifest::{Chat, ChatMode, Generation, IgnoredTensors, Manifest, Model, SCHEMA_VERSION, SourceFormat, Synthetic, Tokens},
};
use qhx_ir::{Encoding, Name, Weight};
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicBool},
};

/// f32 numbers that one thread encodes at a time.
const NUMBERS_PER_PIECE: usize = 1 << 20;

/// How a bundle is to be made.
pub struct ForgeOptions<'a> {
    /// The bundle's folder; its last part is the model's name.
    pub out: &'a Path,
    /// How weights are stored.
    pub precision: Precision,
    /// Whether an existing bundle of that name may be replaced.
    pub replace: bool,
    /// Set by somebody who wants to stop.
    pub cancel: Arc<AtomicBool>,
    /// Told how far the work is.
    pub progress: &'a mut dyn FnMut(Progress<'_>),
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
}

/// What was made.
#[derive(Clone, Debug)]
pub struct Forged {
    /// Where it is.
    pub path: PathBuf,
    /// Its manifest.
    pub manifest: Manifest,
}

/// Makes a bundle from a Hugging Face folder or a GGUF file.
pub fn forge_checkpoint(source: &Path, options: &mut ForgeOptions<'_>) -> Result<Forged, ForgeError> {
    let checkpoint = Checkpoint::open(source)?;
    let config = Config::new(&checkpoint.config);
    let family = families::of(config)?;
    let programs = (family.write)(config, options.precision, &checkpoint.tensors)?;
    check_tensors(&programs, &checkpoint.tensors)?;
    let ignored = ignored_tensors(&programs, &checkpoint.tensors)?;
    let is_gguf = source.is_file();
    let mut manifest = manifest(family, &programs, config, options)?;
    manifest.model.source_format = if is_gguf { SourceFormat::Gguf } else { SourceFormat::Safetensors };
    manifest.ignored_tensors = (ignored.count > 0).then_some(ignored);
    manifest.tokens = tokens(&checkpoint);
    manifest.generation = checkpoint.generation_config.as_ref().and_then(generation_defaults);
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
    write_bundle(&programs, &Numbers::Checkpoint(&checkpoint.tensors), manifest, &files, options)
}

/// Makes a bundle of a configuration with seeded random weights, for benchmarks.
pub fn forge_synthetic(config: &Value, seed: u64, options: &mut ForgeOptions<'_>) -> Result<Forged, ForgeError> {
    let config = Config::new(config);
    let family = families::of(config)?;
    let programs = (family.write)(config, options.precision, &())?;
    let mut manifest = manifest(family, &programs, config, options)?;
    manifest.model.synthetic = Some(Synthetic { seed });
    write_bundle(&programs, &Numbers::Seeded(seed), manifest, &[], options)
}

/// Where the numbers come from.
enum Numbers<'a> {
    Checkpoint(&'a TensorSource),
    Seeded(u64),
}

impl StoredTensors for TensorSource {
    fn encoding(&self, tensor: &str) -> Option<Encoding> {
        let tensor = self.find(tensor)?;
        Some(match tensor.source_type {
            SourceType::F16 => Encoding::F16,
            SourceType::Bf16 => Encoding::Bf16,
            source_type => crate::read::gguf_blocks::encoding(source_type).map_or(Encoding::F32, Encoding::Block),
        })
    }
}

/// Every tensor that a recipe names must be there, in the right shape.
fn check_tensors(programs: &Programs, tensors: &TensorSource) -> Result<(), ForgeError> {
    for (name, weight, recipe) in weights(programs) {
        let expected = match recipe {
            Recipe::Stack(_) => &weight.shape[1..],
            Recipe::Copy(_) | Recipe::PlusOne(_) => &weight.shape,
        };
        for tensor in recipe.tensors() {
            let found = tensors.tensor(tensor)?.info().shape.clone();
            let real = |shape: &[usize]| shape.iter().copied().filter(|&d| d != 1).collect::<Vec<_>>();
            if real(&found) != real(expected) || found.last().copied().unwrap_or(1) != weight.shape[weight.shape.len() - 1] {
                let reason = format!("has shape {found:?}, but the configuration asks for {expected:?} (as weight `{name}`)");
                return Err(ForgeError::Tensor { tensor: tensor.clone(), reason });
            }
        }
    }
    Ok(())
}

/// Counts the tensors that are left out on purpose; one that is left out otherwise is an error, for the model would be another.
fn ignored_tensors(programs: &Programs, tensors: &TensorSource) -> Result<IgnoredTensors, ForgeError> {
    let used: BTreeSet<&String> = weights(programs).flat_map(|(_, _, recipe)| recipe.tensors()).collect();
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
fn weights(programs: &Programs) -> impl Iterator<Item = (&Name, &Weight, &Recipe)> {
    let mut seen = BTreeSet::new();
    programs
        .programs
        .iter()
        .flat_map(|written| written.program.weights.iter().map(move |(name, weight)| (name, weight, &written.recipes[name])))
        .filter(move |(name, ..)| seen.insert((*name).clone()))
}

fn manifest(family: &Family, programs: &Programs, config: Config<'_>, options: &ForgeOptions<'_>) -> Result<Manifest, ForgeError> {
    let name = options.out.file_name().map_or("model".into(), |name| name.to_string_lossy().into_owned());
    let architectures = config.texts_if_any("architectures")?.unwrap_or_default();
    let numbers = |(_, weight, _): (&Name, &Weight, &Recipe)| weight.shape.iter().map(|&d| d as u64).product::<u64>();
    Ok(Manifest {
        schema_version: SCHEMA_VERSION,
        model: Model {
            name,
            family: family.name.into(),
            architecture: architectures.first().map(|a| a.to_string()),
            source_format: SourceFormat::Config,
            parameters: weights(programs).map(numbers).sum(),
            context_length: programs.context,
            vocab_size: programs.vocabulary,
            hidden_size: programs.hidden,
            synthetic: None,
        },
        precision: options.precision.to_string(),
        chat: Chat { mode: ChatMode::Completion, template: None, bos_token: None, eos_token: None, template_arguments: BTreeMap::new() },
        tokens: Tokens::default(),
        generation: None,
        media: Default::default(),
        tokenizer: None,
        programs: BTreeMap::new(),
        weights: Vec::new(),
        ignored_tensors: None,
        parity: None,
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

fn generation_defaults(config: &Value) -> Option<Generation> {
    let number = |field: &str| config.get(field).and_then(Value::as_f64);
    let defaults = Generation {
        temperature: number("temperature"),
        top_k: config.get("top_k").and_then(Value::as_u64).and_then(|k| u32::try_from(k).ok()),
        top_p: number("top_p"),
        min_p: number("min_p"),
        repetition_penalty: number("repetition_penalty"),
    };
    (defaults != Generation::default()).then_some(defaults)
}

/// A special token in `tokenizer_config.json`: text, or an object with `content`.
fn token_text(value: &Value) -> Option<String> {
    value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_string)
}

fn write_bundle(
    programs: &Programs,
    numbers: &Numbers<'_>,
    manifest: Manifest,
    files: &[(BundlePath, &[u8])],
    options: &mut ForgeOptions<'_>,
) -> Result<Forged, ForgeError> {
    let cancel = Some(options.cancel.clone());
    let mut writer = BundleWriter::create(options.out, WriteOptions { replace: options.replace, cancel, ..Default::default() })?;
    programs.programs.iter().try_for_each(|written| writer.add_program(&written.program))?;
    files.iter().try_for_each(|(path, bytes)| writer.add_file(path, bytes))?;
    let total = weights(programs).map(|(_, w, _)| w.shape.iter().map(|&d| d as u64).product::<u64>()).sum();
    writer.declare_weights(TensorSpec::of_programs(programs.programs.iter().map(|written| &*written.program)))?;
    let mut done = 0;
    for (name, weight, recipe) in weights(programs) {
        let columns = weight.shape[weight.shape.len() - 1];
        let rows: usize = weight.shape[..weight.shape.len() - 1].iter().product();
        let piece = (NUMBERS_PER_PIECE / columns).max(1);
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
        for first in (0..rows).step_by(piece * threads) {
            let end = rows.min(first + piece * threads);
            let pieces: Vec<Range<usize>> = (first..end).step_by(piece).map(|r| r..end.min(r + piece)).collect();
            for (range, encoded) in pieces.iter().zip(encode_pieces(numbers, weight, recipe, &pieces)?) {
                for (part, bytes) in [(Part::Data, &encoded.data), (Part::Scale, &encoded.scale), (Part::Min, &encoded.min)] {
                    if !bytes.is_empty() {
                        writer.write_rows(name, part, range.start, bytes)?;
                    }
                }
                done += (range.len() * columns) as u64;
            }
            (options.progress)(Progress { done, total, weight: name });
        }
    }
    let staged = writer.stage(manifest)?;
    staged.open()?;
    let manifest = staged.manifest().clone();
    Ok(Forged { path: staged.publish()?, manifest })
}

/// Reads and encodes pieces side by side, one thread each.
fn encode_pieces(numbers: &Numbers<'_>, weight: &Weight, recipe: &Recipe, pieces: &[Range<usize>]) -> Result<Vec<EncodedRows>, ForgeError> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = pieces.iter().map(|rows| scope.spawn(move || encode_piece(numbers, weight, recipe, rows.clone()))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

fn encode_piece(numbers: &Numbers<'_>, weight: &Weight, recipe: &Recipe, rows: Range<usize>) -> Result<EncodedRows, ForgeError> {
    let columns = weight.shape[weight.shape.len() - 1];
    let rows_per_tensor = match recipe {
        Recipe::Stack(_) => weight.shape[1..weight.shape.len() - 1].iter().product(),
        Recipe::Copy(_) | Recipe::PlusOne(_) => usize::MAX,
    };
    let row_bytes = weight.encoding.row_bytes(columns).ok_or_else(|| too_large(recipe))?;
    let mut out = EncodedRows::zeroed(row_bytes, 0);
    let mut values = Vec::new();
    let mut row = rows.start;
    while row < rows.end {
        let (index, first) = (row / rows_per_tensor, row % rows_per_tensor);
        let count = (rows.end - row).min(rows_per_tensor - first);
        let name = &recipe.tensors()[index];
        let encoded = match numbers {
            Numbers::Checkpoint(tensors) if stored_in_blocks(tensors, name, weight.encoding) => {
                split_blocks(tensors, name, weight, first..first + count)?
            }
            _ => {
                values.resize(count * columns, 0.0);
                match numbers {
                    Numbers::Checkpoint(tensors) => tensors.read_f32(name, first..first + count, &mut values)?,
                    Numbers::Seeded(seed) => {
                        let zero_centred = matches!(recipe, Recipe::PlusOne(_));
                        let tensor = TensorNumbers::new(*seed, name, weight.shape.len(), columns, zero_centred);
                        tensor.fill((first * columns) as u64, &mut values);
                    }
                }
                if let Recipe::PlusOne(_) = recipe {
                    values.iter_mut().for_each(|x| *x += 1.0);
                }
                check_numbers(name, weight.encoding, &values)?;
                encode(weight.encoding, columns, row_bytes, &values)
            }
        };
        out.data.extend_from_slice(&encoded.data);
        out.scale.extend_from_slice(&encoded.scale);
        out.min.extend_from_slice(&encoded.min);
        row += count;
    }
    Ok(out)
}

fn stored_in_blocks(tensors: &TensorSource, name: &str, encoding: Encoding) -> bool {
    matches!(encoding, Encoding::Block(_)) && tensors.encoding(name) == Some(encoding)
}

/// Blocks of a GGUF file in the bundle's form: no number changes.
fn split_blocks(tensors: &TensorSource, name: &str, weight: &Weight, rows: Range<usize>) -> Result<EncodedRows, ForgeError> {
    let tensor = tensors.tensor(name)?;
    let columns = weight.shape[weight.shape.len() - 1];
    let (Encoding::Block(encoding), Some(row_bytes)) = (weight.encoding, weight.encoding.row_bytes(columns)) else {
        return Err(ForgeError::Tensor { tensor: name.into(), reason: "is not stored in blocks".into() });
    };
    let (quants, scales, minima) = crate::read::gguf_blocks::split_lengths(encoding, columns);
    let mut out = EncodedRows::zeroed(row_bytes, rows.len());
    let (mut scale_row, mut min_row) = (vec![0.0; scales], vec![0.0; minima]);
    for (i, row) in rows.enumerate() {
        tensor.split_row(row, &mut out.data[i * row_bytes.data..][..quants], &mut scale_row, &mut min_row)?;
        for (stored, size, numbers) in [(&mut out.scale, row_bytes.scale, &scale_row), (&mut out.min, row_bytes.min, &min_row)] {
            let stored = &mut stored[i * size..][..size];
            numbers.iter().enumerate().for_each(|(b, &x)| _ = put(encoding.scale, stored, b, x));
        }
        check_numbers(name, Encoding::F32, &scale_row)?;
        check_numbers(name, Encoding::F32, &min_row)?;
    }
    Ok(out)
}

fn check_numbers(tensor: &str, encoding: Encoding, values: &[f32]) -> Result<(), ForgeError> {
    let limit = if encoding == Encoding::F16 { 65504.0 } else { f32::MAX };
    match values.iter().find(|x| x.is_nan() || x.abs() > limit) {
        None => Ok(()),
        Some(x) if x.is_finite() => {
            Err(ForgeError::Tensor { tensor: tensor.into(), reason: format!("holds {x}, which f16 cannot: use another precision") })
        }
        Some(x) => Err(ForgeError::Tensor { tensor: tensor.into(), reason: format!("holds {x}: the checkpoint is damaged") }),
    }
}

fn too_large(recipe: &Recipe) -> ForgeError {
    ForgeError::Tensor { tensor: recipe.tensors()[0].clone(), reason: "is too large".into() }
}

fn bundle_path(name: &str) -> Result<BundlePath, ForgeError> {
    BundlePath::new(name).map_err(|e| ForgeError::Tensor { tensor: name.into(), reason: e.to_string() })
}

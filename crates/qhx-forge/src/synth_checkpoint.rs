//! Seeded random weights as a Hugging Face folder in bf16, for measuring the forge itself at full size.
//!
//! The numbers are those of [`crate::synth`], rounded to bf16. A few rows are made at a time, so memory stays small whatever the model's size.

use crate::{
    Config, ForgeError, ForgeOptions, Progress, families, forge::weights, pen::Recipe, precision::Precision, synth::TensorNumbers,
};
use half::bf16;
use qhx_bundle::{BundleError, TemporaryFolder, files};
use serde_json::{Map, Value, json};
use std::{
    fs::File,
    io::{BufWriter, Write},
    path::{Path, PathBuf},
    sync::atomic::Ordering,
    thread,
};

/// Bytes of numbers in one file, unless a tensor is larger.
const SHARD_BYTES: u64 = 4 << 30;
/// Numbers that one thread makes at a time.
const PIECE: usize = 1 << 20;

struct Tensor {
    name: String,
    shape: Vec<usize>,
    numbers: Numbers,
}

/// What a tensor holds.
#[derive(Clone, Copy)]
enum Numbers {
    Random(TensorNumbers),
    /// A constant of a program.
    One(f32),
}

impl Tensor {
    fn count(&self) -> u64 {
        self.shape.iter().map(|&d| d as u64).product()
    }
}

/// Writes the folder `options.out`, which must not be there yet; a failure leaves nothing.
pub fn write_synthetic_checkpoint(config: &Value, seed: u64, options: &mut ForgeOptions<'_>) -> Result<PathBuf, ForgeError> {
    let parsed = Config::new(config);
    let programs = (families::of(parsed)?.write)(parsed, Precision::F32, &())?;
    let mut tensors: Vec<Tensor> = Vec::new();
    for (_, weight, recipe) in weights(&programs) {
        let (rank, columns) = (weight.shape.len(), weight.shape[weight.shape.len() - 1]);
        for (i, name) in recipe.tensors().iter().enumerate() {
            let (shape, zero_centred) = match recipe {
                Recipe::Stack(_) => (&weight.shape[1..], false),
                Recipe::PlusOne(_) => (&weight.shape[..], true),
                Recipe::Copy(_) => (&weight.shape[..], false),
                Recipe::Part { shape, .. } => (&shape[..], false),
                Recipe::Computed { shapes, .. } => (&shapes[i][..], false),
                Recipe::Rotated(_) | Recipe::Folded(_) | Recipe::Rounded(..) => unreachable!("no family writes such weights"),
            };
            let numbers = match recipe {
                Recipe::Computed { .. } => TensorNumbers::new(seed, name, shape.len(), shape[1..].iter().product(), false),
                _ => TensorNumbers::new(seed, name, rank, columns, zero_centred),
            };
            if !tensors.iter().any(|tensor| tensor.name == **name) {
                tensors.push(Tensor { name: name.to_string(), shape: shape.to_vec(), numbers: Numbers::Random(numbers) });
            }
        }
    }
    let constants = programs.programs.iter().flat_map(|written| &written.constants);
    tensors.extend(constants.map(|(name, number)| Tensor { name: name.clone(), shape: Vec::new(), numbers: Numbers::One(*number) }));
    let folder = TemporaryFolder::create(options.out, false)?;
    write_all(config, &tensors, folder.path(), options)?;
    Ok(folder.publish()?)
}

fn write_all(config: &Value, tensors: &[Tensor], out: &Path, options: &mut ForgeOptions<'_>) -> Result<(), ForgeError> {
    let mut shards: Vec<Vec<&Tensor>> = vec![Vec::new()];
    let mut bytes = 0;
    for tensor in tensors {
        if bytes > 0 && bytes + 2 * tensor.count() > SHARD_BYTES {
            shards.push(Vec::new());
            bytes = 0;
        }
        bytes += 2 * tensor.count();
        shards[..].last_mut().into_iter().for_each(|shard| shard.push(tensor));
    }
    let total = tensors.iter().map(Tensor::count).sum();
    let (mut done, mut map) = (0, Map::new());
    for (i, shard) in shards.iter().enumerate() {
        let file = format!("model-{:05}-of-{:05}.safetensors", i + 1, shards.len());
        shard.iter().for_each(|tensor| _ = map.insert(tensor.name.clone(), file.clone().into()));
        write_shard(&out.join(file), shard, &mut |numbers, weight| {
            done += numbers;
            options.tell(Progress { done, total, weight, left: None });
            if options.cancel.load(Ordering::Relaxed) { Err(BundleError::Cancelled.into()) } else { Ok(()) }
        })?;
    }
    let index = json!({ "metadata": { "total_size": 2 * total }, "weight_map": map });
    for (name, value) in [("model.safetensors.index.json", &index), ("config.json", config)] {
        let place = out.join(name);
        files::write(&place, |file| file.write_all(value.to_string().as_bytes())).map_err(io("write", &place))?;
    }
    Ok(())
}

fn write_shard(path: &Path, tensors: &[&Tensor], progress: &mut dyn FnMut(u64, &str) -> Result<(), ForgeError>) -> Result<(), ForgeError> {
    let (mut header, mut offset) = (Map::new(), 0);
    for tensor in tensors {
        let end = offset + 2 * tensor.count();
        header.insert(tensor.name.clone(), json!({ "dtype": "BF16", "shape": tensor.shape, "data_offsets": [offset, end] }));
        offset = end;
    }
    let mut header = Value::from(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = BufWriter::new(File::create_new(path).map_err(io("create", path))?);
    file.write_all(&(header.len() as u64).to_le_bytes()).and_then(|()| file.write_all(&header)).map_err(io("write", path))?;
    let threads = thread::available_parallelism().map_or(1, usize::from);
    for tensor in tensors {
        let count = tensor.count();
        for first in (0..count).step_by(PIECE * threads) {
            let ends = count.min(first + (PIECE * threads) as u64);
            let pieces: Vec<_> = (first..ends).step_by(PIECE).map(|start| (start, ends.min(start + PIECE as u64))).collect();
            let made: Vec<Vec<u8>> = thread::scope(|scope| {
                let numbers = tensor.numbers;
                let threads: Vec<_> = pieces.iter().map(|&(start, end)| scope.spawn(move || piece(numbers, start, end))).collect();
                threads.into_iter().map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
            });
            made.iter().try_for_each(|bytes| file.write_all(bytes)).map_err(io("write", path))?;
            progress(ends - first, &tensor.name)?;
        }
    }
    file.flush().map_err(io("write", path))
}

fn piece(numbers: Numbers, start: u64, end: u64) -> Vec<u8> {
    let mut values = vec![0.0; (end - start) as usize];
    match numbers {
        Numbers::Random(numbers) => numbers.fill(start, &mut values),
        Numbers::One(number) => values.fill(number),
    }
    values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect()
}

fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> ForgeError {
    let path = path.to_path_buf();
    move |source| BundleError::Io { doing: action, path, source }.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Material, forge_checkpoint, forge_synthetic};
    use qhx_bundle::Bundle;

    #[test]
    fn the_folder_has_the_numbers_of_the_synthetic_bundle() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["phimoe", "qwen3_5", "gemma4"] {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name).join("config.json");
            let config: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
            let [checkpoint, a, b] = ["checkpoint", "a", "b"].map(|part| folder.path().join(format!("{name}-{part}")));
            let mut options = ForgeOptions::new(&checkpoint, Precision::F32);
            write_synthetic_checkpoint(&config, 3, &mut options).unwrap();
            options.out = &a;
            forge_checkpoint(&checkpoint, &mut options).unwrap();
            options.out = &b;
            forge_synthetic(&config, 3, &mut options).unwrap();
            let (a, b) = (Bundle::open(&a).unwrap(), Bundle::open(&b).unwrap());
            let programs = ["text", "vision", "audio"].into_iter().filter_map(|program| a.program(program));
            for weight in programs.flat_map(|program| program.weights.keys()) {
                let (a, b) = (a.weights().tensor(weight).unwrap(), b.weights().tensor(weight).unwrap());
                let (mut x, mut y) = (vec![0.0; a.columns()], vec![0.0; a.columns()]);
                for row in 0..a.rows() {
                    a.decode_row(row, &mut x);
                    b.decode_row(row, &mut y);
                    // Of the row's largest: some weights are sums of rounded numbers.
                    let largest = y.iter().fold(0f32, |m, y| m.max(y.abs()));
                    assert!(x.iter().zip(&y).all(|(x, y)| (x - y).abs() <= largest / 64.0), "{name} {weight}");
                }
            }
            drop(Material::open(&checkpoint).unwrap());
        }
    }
}

//! The numbers behind weights: read from a checkpoint or made from a seed, and put into the stored form of an encoding, some rows at a time.

use crate::{
    ForgeError,
    encode::{EncodedRows, Scales, encode, put},
    pen::Recipe,
    precision::StoredTensors,
    read::{SourceType, TensorSource},
    rows::{rows_of_a_part, side_by_side},
    synth::TensorNumbers,
};
use qhx_ir::{AlignedBytes, Encoding, Weight, WeightTensor};
use std::ops::Range;

/// f32 numbers that one thread encodes at a time.
pub(crate) const NUMBERS_PER_PIECE: usize = 1 << 20;

/// Where the numbers come from, and what shares a scale where they become integers.
#[derive(Clone, Copy)]
pub(crate) struct Numbers<'a> {
    pub(crate) origin: Origin<'a>,
    pub(crate) scales: Scales,
}

#[derive(Clone, Copy)]
pub(crate) enum Origin<'a> {
    Checkpoint(&'a TensorSource),
    Seeded(u64),
}

impl Numbers<'_> {
    /// Encodes the rows `rows` of a weight, a few at a time and on all cores; `take` gets each piece with its first row.
    pub(crate) fn encode(
        &self,
        weight: &Weight,
        recipe: &Recipe,
        rows: Range<usize>,
        take: &mut dyn FnMut(Range<usize>, EncodedRows) -> Result<(), ForgeError>,
    ) -> Result<(), ForgeError> {
        if recipe.is_derived() {
            return self.encode_derived(weight, recipe, rows, take);
        }
        let columns = weight.shape[weight.shape.len() - 1];
        let piece = (NUMBERS_PER_PIECE / columns).max(1);
        for first in rows.clone().step_by(piece * threads()) {
            let end = rows.end.min(first + piece * threads());
            let pieces: Vec<Range<usize>> = (first..end).step_by(piece).map(|r| r..end.min(r + piece)).collect();
            for (range, encoded) in pieces.iter().zip(side_by_side(pieces.iter(), |rows| encode_piece(self, weight, recipe, rows.clone())))
            {
                take(range.clone(), encoded?)?;
            }
        }
        Ok(())
    }

    /// Some rows of a weight (counted through all leading dimensions) as a tensor `[rows, columns]` in memory; all rows in the weight's own shape.
    pub(crate) fn tensor(&self, weight: &Weight, recipe: &Recipe, rows: Range<usize>) -> Result<WeightTensor, ForgeError> {
        let (all, columns) = (weight_rows(weight), weight.shape[weight.shape.len() - 1]);
        let row_bytes = weight.encoding.row_bytes(columns).ok_or_else(|| too_large(recipe))?;
        let sizes = [row_bytes.data, row_bytes.scale, row_bytes.min];
        let mut parts = sizes.map(|size| AlignedBytes::zeroed(size * rows.len()));
        self.encode(weight, recipe, rows.clone(), &mut |range, encoded| {
            for ((part, size), bytes) in parts.iter_mut().zip(sizes).zip([encoded.data, encoded.scale, encoded.min]) {
                part.as_mut()[(range.start - rows.start) * size..][..bytes.len()].copy_from_slice(&bytes);
            }
            Ok(())
        })?;
        let shape = if rows.len() == all { weight.shape.clone() } else { vec![rows.len(), columns] };
        let [data, scale, min] = parts;
        let part = |bytes: AlignedBytes, size: usize| (size > 0).then(|| bytes.into());
        WeightTensor::new(weight.encoding, shape, data.into(), part(scale, sizes[1]), part(min, sizes[2]))
            .map_err(|reason| ForgeError::Tensor { tensor: recipe.tensors()[0].clone(), reason })
    }

    /// Some rows of a weight as f32 numbers, without gaps, on all cores.
    pub(crate) fn floats(&self, weight: &Weight, recipe: &Recipe, rows: Range<usize>) -> Result<Vec<f32>, ForgeError> {
        let columns = weight.shape[weight.shape.len() - 1];
        if recipe.is_derived() {
            let numbers = self.derived(weight, recipe, rows)?;
            check_numbers(recipe.tensors()[0], Encoding::F32, &numbers)?;
            return Ok(numbers);
        }
        let mut numbers = vec![0.0; rows.len() * columns];
        let share = rows_of_a_part(numbers.len(), columns, threads());
        let parts = numbers.chunks_mut(share * columns).enumerate();
        let read = side_by_side(parts, |(number, part)| {
            let first = rows.start + number * share;
            for_each_tensor(weight, recipe, first..first + part.len() / columns, &mut |index, own, at| {
                self.read_rows(weight, recipe, index, own.clone(), &mut part[at * columns..][..own.len() * columns])
            })
        });
        read.into_iter().collect::<Result<(), _>>()?;
        Ok(numbers)
    }

    /// Whether the checkpoint stores the very integers and scales that the weight has.
    pub(crate) fn is_lossless(&self, weight: &Weight, recipe: &Recipe) -> bool {
        let (Origin::Checkpoint(tensors), false) = (self.origin, recipe.is_derived()) else { return false };
        self.scales == Scales::Block && recipe.tensors().iter().all(|name| stored_in_blocks(tensors, name, weight.encoding))
    }

    /// Some rows of one of the tensors of a weight that is made of no other, as they enter it.
    fn read_rows(&self, weight: &Weight, recipe: &Recipe, index: usize, rows: Range<usize>, out: &mut [f32]) -> Result<(), ForgeError> {
        let (name, columns) = (recipe.tensors()[index], weight.shape[weight.shape.len() - 1]);
        let first = rows.start * columns;
        match recipe {
            Recipe::Computed { shapes, formula, .. } => {
                let whole = |(name, shape): (&&String, &Vec<usize>)| self.whole(name, shape);
                let tensors = recipe.tensors().iter().zip(shapes).map(whole).collect::<Result<Vec<_>, _>>()?;
                out.copy_from_slice(&formula.compute(shapes, &tensors)[first..][..out.len()]);
            }
            Recipe::Part { first: start, .. } => self.read(name, weight, false, start + first, out)?,
            Recipe::Copy(_) | Recipe::Stack(_) => self.read(name, weight, false, first, out)?,
            Recipe::PlusOne(_) => {
                self.read(name, weight, true, first, out)?;
                out.iter_mut().for_each(|x| *x += 1.0);
            }
            Recipe::Rotated(_) | Recipe::Folded(_) | Recipe::Rounded(..) => unreachable!("such weights are made by `derived`"),
        }
        check_numbers(name, weight.encoding, out)
    }

    /// Numbers of a tensor from number `first` on, which starts a row of the file.
    fn read(&self, name: &str, weight: &Weight, zero_centred: bool, first: usize, out: &mut [f32]) -> Result<(), ForgeError> {
        match self.origin {
            Origin::Checkpoint(tensors) => {
                let tensor = tensors.tensor(name)?;
                let columns = tensor.info().columns().max(1);
                tensor.read_f32(first / columns..(first + out.len()) / columns, out)?;
            }
            Origin::Seeded(seed) => {
                let (rank, columns) = (weight.shape.len(), weight.shape[weight.shape.len() - 1]);
                TensorNumbers::new(seed, name, rank, columns, zero_centred).fill(first as u64, out);
            }
        }
        Ok(())
    }

    /// All numbers of a small tensor.
    fn whole(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ForgeError> {
        let mut out = vec![0.0; shape.iter().product()];
        match self.origin {
            Origin::Checkpoint(tensors) => {
                let tensor = tensors.tensor(name)?;
                tensor.read_f32(0..tensor.info().rows(), &mut out)?;
            }
            Origin::Seeded(seed) => TensorNumbers::new(seed, name, shape.len(), shape[1..].iter().product(), false).fill(0, &mut out),
        }
        Ok(out)
    }
}

/// Threads for work beside the device's.
pub(crate) fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Rows of a weight: the product of all dimensions but the last.
pub(crate) fn weight_rows(weight: &Weight) -> usize {
    weight.shape[..weight.shape.len() - 1].iter().product()
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

    fn has(&self, tensor: &str) -> bool {
        self.find(tensor).is_some()
    }

    fn numbers(&self, tensor: &str, most: usize) -> Result<Option<Vec<f32>>, ForgeError> {
        let open = self.tensor(tensor)?;
        let (rows, columns) = (open.info().rows(), open.info().columns());
        if rows.saturating_mul(columns) > most {
            let reason = format!("has shape {:?}, but at most {most} numbers were expected", open.info().shape);
            return Err(ForgeError::Tensor { tensor: tensor.into(), reason });
        }
        let mut numbers = vec![0.0; rows * columns];
        open.read_f32(0..rows, &mut numbers)?;
        Ok(Some(numbers))
    }
}

fn encode_piece(numbers: &Numbers<'_>, weight: &Weight, recipe: &Recipe, rows: Range<usize>) -> Result<EncodedRows, ForgeError> {
    let columns = weight.shape[weight.shape.len() - 1];
    let row_bytes = weight.encoding.row_bytes(columns).ok_or_else(|| too_large(recipe))?;
    let mut out = EncodedRows::zeroed(row_bytes, 0);
    let mut values = Vec::new();
    for_each_tensor(weight, recipe, rows, &mut |index, own, _| {
        let name = recipe.tensors()[index];
        let encoded = match numbers.origin {
            Origin::Checkpoint(tensors) if numbers.scales == Scales::Block && stored_in_blocks(tensors, name, weight.encoding) => {
                split_blocks(tensors, name, weight, own)?
            }
            _ => {
                values.resize(own.len() * columns, 0.0);
                numbers.read_rows(weight, recipe, index, own, &mut values)?;
                encode(weight.encoding, numbers.scales, columns, row_bytes, &values)
            }
        };
        out.add(&encoded);
        Ok(())
    })?;
    Ok(out)
}

/// Calls `take` with the number of each tensor that some rows of a weight come from, its own rows, and the place of their first among all.
fn for_each_tensor(
    weight: &Weight,
    recipe: &Recipe,
    rows: Range<usize>,
    take: &mut dyn FnMut(usize, Range<usize>, usize) -> Result<(), ForgeError>,
) -> Result<(), ForgeError> {
    let rows_per_tensor = match recipe {
        Recipe::Stack(_) => weight.shape[1..weight.shape.len() - 1].iter().product(),
        _ => usize::MAX,
    };
    let mut row = rows.start;
    while row < rows.end {
        let (index, first) = (row / rows_per_tensor, row % rows_per_tensor);
        let count = (rows.end - row).min(rows_per_tensor - first);
        take(index, first..first + count, row - rows.start)?;
        row += count;
    }
    Ok(())
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

pub(crate) fn check_numbers(tensor: &str, encoding: Encoding, values: &[f32]) -> Result<(), ForgeError> {
    let limit = if encoding == Encoding::F16 { 65504.0 } else { f32::MAX };
    match values.iter().find(|x| x.is_nan() || x.abs() > limit) {
        None => Ok(()),
        Some(x) if x.is_finite() => {
            Err(ForgeError::Tensor { tensor: tensor.into(), reason: format!("holds {x}, which f16 cannot: use another precision") })
        }
        Some(x) => Err(ForgeError::Tensor { tensor: tensor.into(), reason: format!("holds {x}: the checkpoint is damaged") }),
    }
}

pub(crate) fn too_large(recipe: &Recipe) -> ForgeError {
    ForgeError::Tensor { tensor: recipe.tensors()[0].clone(), reason: "is too large".into() }
}

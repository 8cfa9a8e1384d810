//! The run: the f32 program and the bundle's side by side, part after part, each part's weights rounded by the inputs that it gets.

use super::{
    experts,
    factor::Factor,
    moments::{Moments, Shift, away},
    multiply::Multiplier,
    parts::{Part, Product, parts},
    round::{can_round, round},
    work::{self, Pace},
};
use crate::{
    ForgeError,
    encode::{EncodedRows, encode},
    gate::teacher::{Pass, Piece, Runner, Values, used_ids, without_kv_slots},
    numbers::{Numbers, weight_rows},
    pen::{Recipe, Written},
    rows::{for_each_part, rows_of_a_part, side_by_side},
};
use qhx_ir::{ActivationForm, AlignedBytes, Checked, Clip, Device, Matrix, Name, OpKind, Program, Weight, WeightTensor};
use std::{
    borrow::Cow,
    collections::HashMap,
    ops::Range,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

/// What is added to the diagonal of moments, as a share of its mean.
const DAMPING: f64 = 0.01;
/// One row in so many is kept back, to see what holds for rows that nothing was computed from.
const KEPT_BACK: usize = 10;
/// Rows that are compared at most.
const COMPARED: usize = 64;
/// Fewer rows than this say nothing about a product.
const FEWEST_ROWS: usize = 32;
/// The widest product that is rounded by moments: its moments take 512 MiB.
const WIDEST: usize = 11_585;
/// Numbers of a matrix that are rounded at a time.
const NUMBERS_AT_ONCE: usize = 32 << 20;
/// Numbers whose errors are in memory at a time.
const COMPARED_AT_ONCE: usize = 4 << 20;

/// Takes rounded rows of a weight, and about how long all the others will take.
pub(crate) type Taken<'t> = dyn FnMut(&Name, Range<usize>, &EncodedRows, Option<Duration>) -> Result<(), ForgeError> + 't;

/// What rounds the weights of programs.
pub(crate) struct Calibrator<'a> {
    pub(crate) device: &'a Arc<dyn Device>,
    pub(crate) numbers: Numbers<'a>,
    pub(crate) cancel: &'a AtomicBool,
    pub(crate) threads: usize,
    pub(crate) pace: &'a Pace,
}

/// The rows that enter a product: as the bundle's program gives them, and as the f32 program does.
pub(super) struct Inputs<'v> {
    pub(super) columns: usize,
    stored: Vec<Cow<'v, [f32]>>,
    exact: Vec<Cow<'v, [f32]>>,
}

/// What a product is rounded by.
pub(super) struct Guide<'a> {
    factor: Factor,
    /// How far the bundle's rows are from the f32 program's.
    shift: Shift<'a>,
    /// Rows that were kept back, one after the other: the bundle's, and how far they are from the f32 program's.
    kept_back: [Vec<f32>; 2],
}

impl Calibrator<'_> {
    /// Rounds the weights of a program by what enters its products on some passes; `take` gets every row of every weight that `is_rounded` names.
    pub(crate) fn run(
        &self,
        exact: &Written,
        stored: &Written,
        passes: &[Pass],
        is_rounded: &dyn Fn(&Name) -> bool,
        take: &mut Taken<'_>,
    ) -> Result<(), ForgeError> {
        let exact_program = Checked::new(without_kv_slots(&exact.program))?;
        let program = Checked::new(with_fine_activations(without_kv_slots(&stored.program)))?;
        let used = used_ids(passes);
        let runner = Runner { device: self.device, numbers: self.numbers, cancel: self.cancel, used: &used };
        let parts = parts(&program, is_rounded);
        let last_reads: HashMap<&Name, usize> = parts
            .iter()
            .enumerate()
            .flat_map(|(i, part)| part.ops.iter().flat_map(|&op| program.ops[op].op.inputs()).map(move |name| (name, i)))
            .collect();
        let rows = passes.iter().map(|pass| pass.rows).sum();
        let (mut exact_values, mut values) = (vec![Values::new(); passes.len()], vec![Values::new(); passes.len()]);
        for (i, part) in parts.iter().enumerate() {
            let rounded = self.round_part(stored, part, [&exact_values, &values], take)?;
            self.pace.add(work::rounding(&program, part, rows));
            if part.is_last {
                break;
            }
            let piece = |program, recipes, made| Piece { program, recipes, ops: &part.ops, rows: None, made };
            let sides = [
                (piece(&exact_program, &exact.recipes, None), &mut exact_values),
                (piece(&program, &stored.recipes, Some(&rounded)), &mut values),
            ];
            for (piece, values) in sides {
                for (made, values) in runner.run(piece, passes, values)?.into_iter().zip(values.iter_mut()) {
                    values.extend(made.outputs);
                    values.retain(|name, _| last_reads.get(name).is_some_and(|&last| last > i));
                }
            }
            self.pace.add(work::running(&program, part, rows));
        }
        Ok(())
    }

    /// Rounds the weights that a part begins with.
    fn round_part(
        &self,
        stored: &Written,
        part: &Part,
        [exact_values, values]: [&[Values]; 2],
        take: &mut Taken<'_>,
    ) -> Result<HashMap<Name, WeightTensor>, ForgeError> {
        let mut rounded = HashMap::new();
        for product in &part.products {
            let (x, clip, weights) = match product {
                Product::Experts(op) => {
                    rounded.extend(experts::round(self, stored, op, [exact_values, values], take)?);
                    continue;
                }
                Product::Linear { x, clip, weights } => (x, *clip, weights),
            };
            let columns = stored.program.weights[&weights[0]].shape[1];
            let inputs = Inputs::of(x, clip, columns, exact_values, values)?;
            let rows = weights.iter().map(|name| weight_rows(&stored.program.weights[name])).sum();
            let guide = self.guide(&inputs, rows, None)?;
            for name in weights {
                let weight = &stored.program.weights[name];
                let mut kept = EncodedRows::default();
                self.round_weight(stored, name, 0..weight_rows(weight), guide.as_ref(), take, (!part.is_last).then_some(&mut kept))?;
                if !part.is_last {
                    rounded.insert(name.clone(), tensor_of(&kept, weight)?);
                }
            }
        }
        Ok(rounded)
    }

    pub(super) fn multiplier(&self) -> Multiplier<'_> {
        Multiplier { device: self.device, cancel: self.cancel, threads: self.threads }
    }

    /// What to round so many rows of weights by; none where there is too little to go by. `towards`: moments of others that stand in for so many rows.
    pub(super) fn guide<'v>(
        &self,
        inputs: &'v Inputs<'_>,
        weight_rows: usize,
        towards: Option<(&Moments, f32)>,
    ) -> Result<Option<Guide<'v>>, ForgeError> {
        let all = inputs.rows();
        if all.len() < FEWEST_ROWS {
            return Ok(None);
        }
        let kept = |row: &usize| row % KEPT_BACK == KEPT_BACK - 1;
        let rows = |which: &dyn Fn(&usize) -> bool| -> (Vec<&'v [f32]>, Vec<&'v [f32]>) {
            all.iter().enumerate().filter(|(row, _)| which(row)).map(|(_, rows)| *rows).unzip()
        };
        let (x, exact) = rows(&|row| !kept(row));
        let mut kept_back = rows(&kept);
        thin_out(&mut kept_back.0);
        thin_out(&mut kept_back.1);
        let multiplier = self.multiplier();
        let mut moments = Moments::of(&multiplier, inputs.columns, &x)?;
        if let Some((others, weight)) = towards {
            moments.shrink_towards(others, weight);
        }
        let Some(factor) = Factor::new(&multiplier, moments.second, inputs.columns, DAMPING)? else { return Ok(None) };
        let shift = Shift::of(&multiplier, inputs.columns, (x, exact), weight_rows)?;
        let kept_back = [kept_back.0.concat(), away(&kept_back.0, &kept_back.1)];
        Ok(Some(Guide { factor, shift, kept_back }))
    }

    /// Rounds some rows of a weight, plainly where there is nothing to go by; `kept` gets them too.
    pub(super) fn round_weight(
        &self,
        stored: &Written,
        name: &Name,
        rows: Range<usize>,
        guide: Option<&Guide<'_>>,
        take: &mut Taken<'_>,
        mut kept: Option<&mut EncodedRows>,
    ) -> Result<(), ForgeError> {
        let (weight, recipe) = (&stored.program.weights[name], &stored.recipes[name]);
        let piece = (NUMBERS_AT_ONCE / weight.shape[weight.shape.len() - 1]).max(1);
        for first in rows.clone().step_by(piece) {
            let range = first..rows.end.min(first + piece);
            let encoded = self.round_rows(weight, recipe, range.clone(), guide)?;
            take(name, range, &encoded, Some(self.pace.left()))?;
            if let Some(kept) = &mut kept {
                kept.add(&encoded);
            }
        }
        Ok(())
    }

    /// Rounds rows by moments and plainly, and keeps what changes products with the rows that were kept back least.
    fn round_rows(
        &self,
        weight: &Weight,
        recipe: &Recipe,
        rows: Range<usize>,
        guide: Option<&Guide<'_>>,
    ) -> Result<EncodedRows, ForgeError> {
        let (columns, scales) = (weight.shape[weight.shape.len() - 1], self.numbers.scales);
        let row_bytes = weight.encoding.row_bytes(columns).ok_or_else(|| ForgeError::Calibration("a row is too long".into()))?;
        let mut wanted = self.numbers.floats(weight, recipe, rows)?;
        let parts = wanted.chunks(columns * rows_of_a_part(wanted.len(), columns, self.threads));
        let plain = EncodedRows::concat(side_by_side(parts, |part| encode(weight.encoding, scales, columns, row_bytes, part)));
        let Some(guide) = guide else { return Ok(plain) };
        self.correct(guide, &mut wanted)?;
        let calibrated = round(&self.multiplier(), &guide.factor, weight.encoding, scales, row_bytes, &wanted)?;
        let (by_moments, plain) = (self.compared(guide, weight, calibrated, &wanted)?, self.compared(guide, weight, plain, &wanted)?);
        Ok(if by_moments.error < plain.error { by_moments.rows } else { plain.rows })
    }

    /// How much products with the rows that were kept back change where `rows` stand for the numbers wanted.
    fn compared(&self, guide: &Guide<'_>, weight: &Weight, rows: EncodedRows, wanted: &[f32]) -> Result<Compared, ForgeError> {
        let columns = guide.factor.columns();
        let kept_back = Matrix::dense(&guide.kept_back[0], columns);
        let tensor = tensor_of(&rows, &Weight { encoding: weight.encoding, shape: vec![wanted.len() / columns, columns] })?;
        let at_once = (COMPARED_AT_ONCE / columns).max(1);
        let mut error = 0.0;
        for (number, wanted) in wanted.chunks(at_once * columns).enumerate() {
            let mut lost = vec![0.0; wanted.len()];
            for_each_part(&mut lost, columns, self.threads, |first, lost| {
                for (i, (lost, wanted)) in lost.chunks_exact_mut(columns).zip(wanted[first * columns..].chunks_exact(columns)).enumerate() {
                    tensor.decode_row(number * at_once + first + i, lost);
                    lost.iter_mut().zip(wanted).for_each(|(lost, wanted)| *lost -= wanted);
                }
            });
            error += squares(&self.multiplier().product(kept_back, Matrix::dense(&lost, columns))?);
        }
        Ok(Compared { rows, error })
    }

    /// Moves weights so that they make up for what the bundle's rows have lost so far: by as much of what the moments say as holds for the rows that were kept back.
    fn correct(&self, guide: &Guide<'_>, weights: &mut [f32]) -> Result<(), ForgeError> {
        let (columns, multiplier) = (guide.factor.columns(), self.multiplier());
        let mut moved = guide.shift.of_weights(&multiplier, columns, weights)?;
        guide.factor.solve(&multiplier, &mut moved)?;
        let [x, away] = &guide.kept_back;
        let lost = multiplier.product(Matrix::dense(away, columns), Matrix::dense(weights, columns))?;
        let made_up = multiplier.product(Matrix::dense(x, columns), Matrix::dense(&moved, columns))?;
        let both: f64 = lost.iter().zip(&made_up).map(|(lost, made)| f64::from(*lost) * f64::from(*made)).sum();
        let share = (both / squares(&made_up)).clamp(0.0, 1.0) as f32;
        // Where nothing was lost there is nothing to make up for.
        let share = if share.is_finite() { share } else { 0.0 };
        weights.iter_mut().zip(&moved).for_each(|(weight, moved)| *weight += share * moved);
        Ok(())
    }
}

/// Rounded rows, and how much they change products.
struct Compared {
    rows: EncodedRows,
    error: f64,
}

fn squares(numbers: &[f32]) -> f64 {
    numbers.iter().map(|&x| f64::from(x) * f64::from(x)).sum()
}

/// The program with a scale for every 32 activations where it has one for a whole row. The noise of the latter drowns what weights have lost, and the gate may yet choose finer ones.
fn with_fine_activations(mut program: Program) -> Program {
    for op in &mut program.ops {
        if let OpKind::Linear { activation: form, .. } | OpKind::Experts { form, .. } = &mut op.op
            && *form == ActivationForm::I8Row
        {
            *form = ActivationForm::I8Block32;
        }
    }
    program
}

/// Whether a weight becomes integers that are chosen here: not where the checkpoint has these very integers, nor where the moments would take too much memory.
pub(super) fn is_rounded(numbers: &Numbers<'_>, weight: &Weight, recipe: &Recipe) -> bool {
    let columns = weight.shape[weight.shape.len() - 1];
    can_round(weight.encoding) && columns <= WIDEST && !numbers.is_lossless(weight, recipe)
}

/// Keeps [`COMPARED`] rows, evenly spread.
fn thin_out(rows: &mut Vec<&[f32]>) {
    let step = rows.len().div_ceil(COMPARED).max(1);
    *rows = rows.iter().step_by(step).copied().collect();
}

impl<'v> Inputs<'v> {
    /// The rows of a value in all passes.
    pub(super) fn of(x: &Name, clip: Option<Clip>, columns: usize, exact: &'v [Values], stored: &'v [Values]) -> Result<Self, ForgeError> {
        let missing = || ForgeError::Calibration(format!("the value `{x}` is read before it is made"));
        let clipped = |values: &'v Values| -> Result<Cow<'v, [f32]>, ForgeError> {
            let numbers = values.get(x).ok_or_else(missing)?;
            Ok(match clip {
                None => numbers.into(),
                Some(Clip { input: [low, high], .. }) => numbers.iter().map(|x| x.clamp(low, high)).collect::<Vec<_>>().into(),
            })
        };
        let all = |values: &'v [Values]| values.iter().map(clipped).collect::<Result<Vec<_>, _>>();
        Ok(Self { columns, stored: all(stored)?, exact: all(exact)? })
    }

    /// Rows that were computed apart.
    pub(super) fn made(columns: usize, stored: Vec<f32>, exact: Vec<f32>) -> Self {
        Self { columns, stored: vec![stored.into()], exact: vec![exact.into()] }
    }

    /// Each row as the bundle's program has it and as the f32 program does.
    pub(super) fn rows(&self) -> Vec<(&[f32], &[f32])> {
        self.stored.iter().zip(&self.exact).flat_map(|(a, b)| a.chunks_exact(self.columns).zip(b.chunks_exact(self.columns))).collect()
    }
}

/// Rows as a weight that has them alone.
pub(super) fn tensor_of(rows: &EncodedRows, weight: &Weight) -> Result<WeightTensor, ForgeError> {
    let part = |bytes: &[u8]| (!bytes.is_empty()).then(|| AlignedBytes::copy_of(bytes).into());
    let data = AlignedBytes::copy_of(&rows.data).into();
    WeightTensor::new(weight.encoding, weight.shape.clone(), data, part(&rows.scale), part(&rows.min)).map_err(ForgeError::Calibration)
}

//! What a whole model loses by each of its matrices.
//!
//! The f32 program reads a few texts, stage after stage. Beside it go variants: of each stage one that had all matrices of that stage in int4 and is f32 from there on. Their logits tell what the model
//! loses by the stage. A matrix answers for the share of it that its own errors have in the stage's result.
//!
//! Divergence grows with the square of errors as long as they are small, so what is measured at int4 tells what other encodings lose.

use crate::{
    ForgeError, ForgeOptions, Material, Progress,
    calibrate::{Calibration, texts::MOST_TOKENS},
    families::Programs,
    gate::{
        device_for,
        language::language,
        teacher::{Made, Part, Pass, Piece, Runner, Values, last_reads, parts, text_pass, used_ids, without_kv_slots},
    },
    pen::Written,
    precision::Precision,
};
use qhx_ir::{ActivationForm, Checked, Encoding, Name, OpKind, Program};
use qhx_runtime::{Language, WholeInputs, eval::RowDivergence};
use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
};

/// Sequences that are read, and tokens of each.
const SEQUENCES: usize = 2;
const TOKENS: usize = 96;

/// For each matrix of the text program that becomes integers: the mean divergence from the f32 model that int4 would cost. Towers are not measured.
pub(super) fn measure(material: &Material, programs: &Programs, options: &mut ForgeOptions<'_>) -> Result<BTreeMap<Name, f64>, ForgeError> {
    let exact = material.f32_programs_like(programs)?;
    let (model, manifest) = language(material, &exact, options)?;
    let calibration = options.calibration.clone().unwrap_or_default();
    let text = &exact.programs[0].program;
    let pass = |(case, ids): (usize, &Vec<u32>)| {
        text_pass(text, case, ids.len(), WholeInputs::new(text, &manifest.media, manifest.tokens.pad, ids, &[]))
    };
    let passes: Vec<Pass> = sequences(&model, &calibration)?.iter().enumerate().map(pass).collect();
    let device = device_for(manifest.model.parameters, calibration.threads)?;
    let used = used_ids(&passes);
    let cancel = options.cancel.clone();
    let runner = Runner { device: &device, numbers: material.numbers(Precision::W4), cancel: &cancel, used: &used };
    let rounded = &programs.programs[0].program.weights;
    let is_rounded = |name: &Name| rounded.get(name).is_some_and(|weight| !weight.encoding.is_float());
    let mut measurement = Measurement::new(&runner, &exact.programs[0], &passes)?;
    measurement.run(&is_rounded, &mut |done, total| {
        options.tell(Progress { done, total, weight: "measuring what each matrix costs", left: None });
    })?;
    Ok(measurement.losses())
}

/// The beginnings of some of the texts; without a tokenizer, ids that follow from each other by chance.
fn sequences(model: &Language, calibration: &Calibration) -> Result<Vec<Vec<u32>>, ForgeError> {
    let length = TOKENS.min(model.context_limit());
    if model.tokenizer().is_none() {
        let ids = model.vocabulary().ids.max(1) as u64;
        let any = |i: u64| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33) % ids;
        return Ok((0..SEQUENCES as u64).map(|s| (0..length as u64).map(|i| any(1 + s * length as u64 + i) as u32).collect()).collect());
    }
    let texts = calibration.texts.sequences(model, MOST_TOKENS)?;
    let step = (texts.len() / SEQUENCES).max(1);
    Ok(texts.iter().step_by(step).take(SEQUENCES).map(|ids| ids[..ids.len().min(length)].to_vec()).collect())
}

/// The measurement of a program.
struct Measurement<'a> {
    runner: &'a Runner<'a>,
    written: &'a Written,
    program: Checked,
    passes: &'a [Pass],
    /// The values of each pass: in f32, and then of each variant.
    values: Vec<Values>,
    variants: Vec<Variant>,
}

/// The program with the matrices of one stage in int4.
struct Variant {
    /// The matrices, and the squares of their own errors in the stage's result.
    errors: Vec<(Name, f64)>,
    /// The mean divergence of its logits.
    loss: f64,
}

impl<'a> Measurement<'a> {
    fn new(runner: &'a Runner<'a>, written: &'a Written, passes: &'a [Pass]) -> Result<Self, ForgeError> {
        let program = Checked::new(without_kv_slots(&written.program))?;
        Ok(Self { runner, written, program, passes, values: vec![Values::new(); passes.len()], variants: Vec::new() })
    }

    fn run(&mut self, is_rounded: &dyn Fn(&Name) -> bool, progress: &mut dyn FnMut(u64, u64)) -> Result<(), ForgeError> {
        let program = self.program.clone();
        let parts = parts(&program);
        let last_reads: HashMap<Name, usize> = last_reads(&program, &parts).into_iter().map(|(name, last)| (name.clone(), last)).collect();
        let Some((head, before)) = parts.split_last() else { return Ok(()) };
        for (i, part) in before.iter().enumerate() {
            progress(i as u64, parts.len() as u64);
            let made = self.part(&program, &part.ops, None, self.variants.len() + 1)?;
            let matrices = matrices(&program, &part.ops, is_rounded);
            let mut new = None;
            if !matrices.is_empty() {
                let in_f32 = &made[..self.passes.len()];
                let mut errors = Vec::new();
                for &name in &matrices {
                    let alone = self.part(&in_int4(&program, &[name])?, &part.ops, None, 1)?;
                    errors.push((name.clone(), alone.iter().zip(in_f32).map(|(found, expected)| squared_error(found, expected)).sum()));
                }
                let all = self.part(&in_int4(&program, &matrices)?, &part.ops, None, 1)?;
                new = Some((Variant { errors, loss: 0.0 }, all));
            }
            // A variant starts from the values that the f32 program had before its stage.
            let before_stage = self.values[..self.passes.len()].to_vec();
            extend(&mut self.values, made);
            if let Some((variant, made)) = new {
                let mut own = before_stage;
                extend(&mut own, made);
                self.values.extend(own);
                self.variants.push(variant);
            }
            self.values.iter_mut().for_each(|values| values.retain(|name, _| last_reads.get(name).is_some_and(|&last| last > i)));
        }
        self.heads(&program, head, is_rounded)?;
        progress(parts.len() as u64, parts.len() as u64);
        Ok(())
    }

    /// The logits of all variants, and of the head in int4, a block of ids at a time.
    fn heads(&mut self, program: &Checked, head: &Part, is_rounded: &dyn Fn(&Name) -> bool) -> Result<(), ForgeError> {
        let matrices = matrices(program, &head.ops, is_rounded);
        let in_int4 = in_int4(program, &matrices)?;
        let rows = self.passes.iter().map(|pass| pass.rows).sum::<usize>();
        let mut divergences = vec![vec![RowDivergence::new(0); rows]; self.variants.len() + 1];
        for block in head.blocks(program) {
            let first_id = block.as_ref().map_or(0, |ids| ids.start);
            let mut made = self.part(program, &head.ops, block.as_ref(), self.variants.len() + 1)?;
            let found = made.split_off(self.passes.len());
            let of_head = if matrices.is_empty() { Vec::new() } else { self.part(&in_int4, &head.ops, block.as_ref(), 1)? };
            let all: Vec<&[Made]> = found.chunks(self.passes.len()).chain((!of_head.is_empty()).then_some(&of_head[..])).collect();
            for (divergences, found) in divergences.iter_mut().zip(all) {
                let mut divergences = divergences.iter_mut();
                for ((pass, expected), found) in self.passes.iter().zip(&made).zip(found) {
                    let logits = |made: &'_ Made| made.outputs.get("logits").cloned().unwrap_or_default();
                    let (expected, found) = (logits(expected), logits(found));
                    let width = (expected.len() / pass.rows).max(1);
                    let pairs = expected.chunks_exact(width).zip(found.chunks_exact(width));
                    pairs.zip(&mut divergences).for_each(|((expected, found), divergence)| divergence.add(first_id, expected, found));
                }
            }
        }
        if !matrices.is_empty() {
            self.variants.push(Variant { errors: matrices.into_iter().map(|name| (name.clone(), 1.0)).collect(), loss: 0.0 });
        }
        for (variant, divergences) in self.variants.iter_mut().zip(divergences) {
            variant.loss = divergences.iter().map(RowDivergence::kl).sum::<f64>() / rows.max(1) as f64;
        }
        Ok(())
    }

    /// Runs a part on the values of the first `sets` of variants.
    fn part(&self, program: &Checked, ops: &[usize], rows: Option<&Range<usize>>, sets: usize) -> Result<Vec<Made>, ForgeError> {
        let passes: Vec<Pass> = (0..sets).flat_map(|_| self.passes.iter().cloned()).collect();
        let piece = Piece { program, recipes: &self.written.recipes, ops, rows, made: None };
        self.runner.run(piece, &passes, &self.values[..passes.len()])
    }

    /// By matrix: what its stages lose, as far as it answers for it. A table that is also the head answers for both.
    fn losses(&self) -> BTreeMap<Name, f64> {
        let mut losses = BTreeMap::new();
        for Variant { errors, loss } in &self.variants {
            let all: f64 = errors.iter().map(|(_, error)| error).sum();
            for (name, error) in errors {
                let share = if all > 0.0 { error / all } else { 1.0 / errors.len() as f64 };
                *losses.entry(name.clone()).or_insert(0.0) += (share * loss).max(0.0);
            }
        }
        losses
    }
}

fn extend(values: &mut [Values], made: Vec<Made>) {
    values.iter_mut().zip(made).for_each(|(values, made)| values.extend(made.outputs));
}

/// The matrices of some ops that become integers.
fn matrices<'p>(program: &'p Program, ops: &[usize], is_rounded: &dyn Fn(&Name) -> bool) -> Vec<&'p Name> {
    let mut matrices: Vec<&Name> = ops.iter().flat_map(|&op| program.ops[op].op.weights()).filter(|name| is_rounded(name)).collect();
    matrices.sort();
    matrices.dedup();
    matrices
}

/// A program with some matrices in int4, and all activations in f32.
fn in_int4(program: &Checked, matrices: &[&Name]) -> Result<Checked, ForgeError> {
    let mut program = Program::clone(program);
    for &name in matrices {
        if let Some(weight) = program.weights.get_mut(name) {
            weight.encoding = Encoding::I4_BLOCK32;
        }
    }
    for op in &mut program.ops {
        if let OpKind::Linear { activation: form, .. } | OpKind::Experts { form, .. } = &mut op.op {
            *form = ActivationForm::F32;
        }
    }
    Ok(Checked::new(program)?)
}

/// Of everything that a part makes.
fn squared_error(found: &Made, expected: &Made) -> f64 {
    let error = |(name, expected): (&Name, &Vec<f32>)| -> f64 {
        let found = found.outputs.get(name).map_or(&[][..], |found| &found[..]);
        found.iter().zip(expected).map(|(found, expected)| f64::from(found - expected).powi(2)).sum()
    };
    expected.outputs.iter().map(error).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::PrecisionPlan;
    use std::{path::Path, sync::atomic::AtomicBool};

    /// What is put down to a matrix is about what the model loses by that matrix alone.
    #[test]
    fn a_matrix_answers_for_what_it_costs_alone() {
        for name in ["llama", "phimoe", "gemma4"] {
            let material = Material::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)).unwrap();
            let exact = material.programs(&PrecisionPlan::from(Precision::F32)).unwrap();
            let options = ForgeOptions::new(Path::new("unused"), Precision::W4);
            let (model, manifest) = language(&material, &exact, &options).unwrap();
            let text = &exact.programs[0].program;
            let ids: Vec<u32> = sequences(&model, &Calibration::default()).unwrap()[0][..24].to_vec();
            let inputs = WholeInputs::new(text, &manifest.media, manifest.tokens.pad, &ids, &[]);
            let passes = [text_pass(text, 0, ids.len(), inputs)];
            let (device, used, cancel) = (device_for(1, Some(1)).unwrap(), used_ids(&passes), AtomicBool::new(false));
            let runner = Runner { device: &device, numbers: material.numbers(Precision::W4), cancel: &cancel, used: &used };
            let losses = |is_rounded: &dyn Fn(&Name) -> bool| {
                let mut measurement = Measurement::new(&runner, &exact.programs[0], &passes).unwrap();
                measurement.run(is_rounded, &mut |_, _| {}).unwrap();
                measurement.losses()
            };
            let rounded = material.programs(&PrecisionPlan::from(Precision::W4)).unwrap();
            let is_rounded = |name: &Name| rounded.programs[0].program.weights.get(name).is_some_and(|weight| !weight.encoding.is_float());
            let all = losses(&is_rounded);
            let matrices = exact.programs[0].program.weights.keys().filter(|name| is_rounded(name)).count();
            assert_eq!(all.len(), matrices, "{name}: every matrix has its share");
            assert!(all.values().all(|loss| loss.is_finite() && *loss >= 0.0), "{name}: {all:?}");
            // Other experts are chosen after the slightest change: a router's model loses by leaps.
            for (matrix, loss) in all.iter().step_by(3).filter(|_| name != "phimoe") {
                let alone = losses(&|other| other == matrix)[matrix];
                println!("{name} {matrix}: {loss:.2e}, alone {alone:.2e}");
                // Only small losses add up.
                let is_close = *loss < 4.0 * alone + 1e-6 && alone < 4.0 * loss + 1e-6;
                assert!(is_close || alone > 0.1, "{name} {matrix}: {loss}, alone {alone}");
            }
        }
    }
}

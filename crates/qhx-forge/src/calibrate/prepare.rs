//! Everything that calibration needs before the first weight is written: what is wrong with the texts or the model is found here.

use super::{
    multiply::Multiplier,
    parts::{Part, kept_numbers, parts},
    run::{Calibrator, Taken, is_rounded},
    texts::MOST_TOKENS,
    work::{self, Pace},
};
use crate::{
    ForgeError, ForgeOptions, Material,
    families::Programs,
    gate::{
        device_for,
        language::language,
        suite,
        teacher::{Pass, medium_pass, text_pass},
    },
    numbers::Numbers,
    pen::Written,
};
use qhx_bundle::manifest::{Calibrated, Rounding};
use qhx_ir::{Device, Name};
use qhx_runtime::WholeInputs;
use std::{
    collections::BTreeSet,
    sync::{Arc, atomic::AtomicBool},
};

/// Tokens that are read for each column of the widest product.
const TOKENS_PER_COLUMN: usize = 3;
/// The fewest tokens that are read, if the texts have as many.
const LEAST_TOKENS: usize = 1024;
/// What all activations between two parts may take: longer texts are cut.
const ACTIVATION_BYTES: usize = 1 << 30;

/// A model that is ready to be calibrated.
pub(crate) struct CalibrationRun<'a> {
    device: Arc<dyn Device>,
    cancel: &'a AtomicBool,
    threads: usize,
    /// The f32 programs, text first, and what each reads.
    exact: Programs,
    passes: Vec<Vec<Pass>>,
    calibrated: Calibrated,
}

impl<'a> CalibrationRun<'a> {
    /// None where nothing is to be calibrated, or nothing can be: without a tokenizer no text can be read.
    pub(crate) fn new(
        material: &Material,
        numbers: &Numbers<'_>,
        programs: &Programs,
        options: &ForgeOptions<'_>,
        cancel: &'a AtomicBool,
    ) -> Result<Option<Self>, ForgeError> {
        let (Some(calibration), Material::Checkpoint(_)) = (&options.calibration, material) else { return Ok(None) };
        let rounded = crate::forge::weights(programs).filter(|(_, weight, recipe)| is_rounded(numbers, weight, recipe));
        let Some(widest) = rounded.filter_map(|(_, weight, _)| weight.shape.last().copied()).max() else { return Ok(None) };
        let exact = material.f32_programs_like(programs)?;
        let (model, manifest) = language(material, &exact, options)?;
        if model.tokenizer().is_none() {
            return Ok(None);
        }
        let stored = &programs.programs[0];
        let kept = kept_numbers(&stored.program, &parts_of(numbers, stored));
        // Both programs keep theirs, in f32.
        let fitting = ACTIVATION_BYTES / (8 * kept.max(1));
        let most = (TOKENS_PER_COLUMN * widest).clamp(LEAST_TOKENS, MOST_TOKENS).min(fitting.max(LEAST_TOKENS));
        let sequences = calibration.texts.sequences(&model, most)?;
        let text = &exact.programs[0].program;
        let text_passes = sequences.iter().enumerate().map(|(case, ids)| {
            let inputs = WholeInputs::new(text, &manifest.media, manifest.tokens.pad, ids, &[]);
            text_pass(text, case, ids.len(), inputs)
        });
        let mut passes = vec![text_passes.collect::<Vec<_>>()];
        let media = suite::media(&model)?;
        for tower in &exact.programs[1..] {
            let own = media.iter().filter(|medium| *medium.program() == *tower.program.name);
            passes.push(own.enumerate().map(|(case, medium)| medium_pass(case, 0, medium)).collect());
        }
        let parameters = manifest.model.parameters;
        let calibrated = Calibrated {
            texts: calibration.texts.name.clone(),
            sha256: calibration.texts.sha256,
            tokens: sequences.iter().map(Vec::len).sum(),
        };
        let threads = calibration.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
        Ok(Some(Self { device: device_for(parameters, calibration.threads)?, cancel, threads, exact, passes, calibrated }))
    }

    /// What the manifest says.
    pub(crate) fn rounding(&self) -> Rounding {
        Rounding::Calibrated(self.calibrated.clone())
    }

    /// How much there is to do.
    pub(crate) fn pace(&self, numbers: &Numbers<'_>, programs: &Programs) -> Result<Pace, ForgeError> {
        let work = |(stored, passes): (&Written, &Vec<Pass>)| -> f64 {
            let rows = passes.iter().map(|pass| pass.rows).sum();
            let part = |part: &Part| work::rounding(&stored.program, part, rows) + work::running(&stored.program, part, rows);
            parts_of(numbers, stored).iter().map(part).sum()
        };
        let total = programs.programs.iter().zip(&self.passes).map(work).sum();
        Pace::new(&Multiplier { device: &self.device, cancel: self.cancel, threads: self.threads }, total)
    }

    /// Rounds the weights of all programs. Gives those that were rounded: all their rows have been taken.
    pub(crate) fn run(
        self,
        numbers: &Numbers<'_>,
        programs: &Programs,
        pace: &Pace,
        take: &mut Taken<'_>,
    ) -> Result<BTreeSet<Name>, ForgeError> {
        let calibrator = Calibrator { device: &self.device, numbers: *numbers, cancel: self.cancel, threads: self.threads, pace };
        let mut rounded = BTreeSet::new();
        for ((stored, exact), passes) in programs.programs.iter().zip(&self.exact.programs).zip(&self.passes) {
            if passes.is_empty() {
                continue;
            }
            let mut own = BTreeSet::new();
            let mut take_own = |name: &Name, rows, encoded: &_, left| {
                own.insert(name.clone());
                take(name, rows, encoded, left)
            };
            // A weight that two programs share is rounded once.
            let is_new = |name: &Name| !rounded.contains(name) && is_rounded(numbers, &stored.program.weights[name], &stored.recipes[name]);
            calibrator.run(exact, stored, passes, &is_new, &mut take_own)?;
            rounded.extend(own);
        }
        Ok(rounded)
    }
}

fn parts_of(numbers: &Numbers<'_>, stored: &Written) -> Vec<Part> {
    parts(&stored.program, &|name| is_rounded(numbers, &stored.program.weights[name], &stored.recipes[name]))
}

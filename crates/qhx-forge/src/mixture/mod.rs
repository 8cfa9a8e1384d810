//! Mixtures: encodings for the weights of a model, such that it loses least for the bits that they take.
//!
//! [`sensitivity`] measures what the whole model loses by each matrix; [`choice`] spends bits where they save most.

mod choice;
mod sensitivity;

pub(crate) use choice::{Choice, Chosen, Mixer};

use crate::{
    ForgeError, ForgeOptions, Material,
    plan::{PrecisionPlan, tables},
    precision::Precision,
    rotate::Rotations,
};
use qhx_ir::Encoding;

/// Bits for each number of a layer's matrices that `w4` spends on the most sensitive of them.
const SPARE_BITS: f64 = 0.3;

/// What options ask for: the rotations that pay, and where the precision is a mixture, the one that was measured to lose least.
pub(crate) fn plan(material: &Material, options: &mut ForgeOptions<'_>) -> Result<PrecisionPlan, ForgeError> {
    let precision = options.precision;
    let is_calibrated = options.calibration.is_some() && material.has_tokenizer();
    // Random weights stand for those of a checkpoint that is calibrated. NPUs get what `--plan` promises of a configuration.
    let stands_for_calibrated = material.is_synthetic() && !options.row_tables;
    let rotations = Rotations::for_precision(precision, is_calibrated || stands_for_calibrated);
    let mut plan = PrecisionPlan { rotations, ..PrecisionPlan::from(precision) };
    match precision {
        Precision::W4 if is_calibrated || stands_for_calibrated => {
            let mut mixer = if is_calibrated { Mixer::measure(material, &plan, options)? } else { Mixer::even(material, &plan)? };
            mixer.keep_tables();
            let bits = mixer.least_bits() + SPARE_BITS * mixer.share();
            plan.encodings = mixer.within(bits)?.encodings();
        }
        Precision::Bits(bits) => plan.encodings = Mixer::measure(material, &plan, options)?.within(bits.get())?.encodings(),
        _ => {}
    }
    if options.row_tables {
        with_row_tables(material, &mut plan)?;
    }
    Ok(plan)
}

/// Stores tables and heads that are integers in int8 with a scale per row.
pub(crate) fn with_row_tables(material: &Material, plan: &mut PrecisionPlan) -> Result<(), ForgeError> {
    let programs = material.programs(plan)?;
    let tables = programs.programs.iter().flat_map(|written| tables(&written.program));
    plan.encodings.extend(tables.filter(|(_, encoding)| !encoding.is_float()).map(|(name, _)| (name, Encoding::I8Row)));
    Ok(())
}

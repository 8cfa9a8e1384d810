//! The language side of a model before its bundle is written, so that prompts can be made and checked first.

use crate::{ForgeError, ForgeOptions, Material, families::Programs, plan::PrecisionPlan};
use qhx_bundle::{BundlePath, Manifest};
use qhx_ir::{Checked, WeightTensor};
use qhx_runtime::{Language, ModelParts};
use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

/// That of the model which `programs` describe, and its manifest.
pub(crate) fn language(material: &Material, programs: &Programs, options: &ForgeOptions<'_>) -> Result<(Language, Manifest), ForgeError> {
    language_with(material, programs, options, &|_| {})
}

/// The same with a manifest that is changed first.
pub(super) fn language_with(
    material: &Material,
    programs: &Programs,
    options: &ForgeOptions<'_>,
    change: &dyn Fn(&mut Manifest),
) -> Result<(Language, Manifest), ForgeError> {
    let (mut manifest, files) = material.describe(&PrecisionPlan::from(options.precision), programs, options)?;
    change(&mut manifest);
    let named: BTreeMap<String, Checked> =
        programs.programs.iter().map(|written| (written.program.name.to_string(), written.program.clone())).collect();
    let read = |path: &BundlePath| {
        let found = files.iter().find(|(name, _)| name == path).map(|(_, bytes)| bytes.to_vec());
        Ok(found.unwrap_or_default())
    };
    let weights: HashMap<String, WeightTensor> = HashMap::new();
    let parts = ModelParts::described(&manifest, &named, Arc::new(weights), "", &read)?;
    Ok((Language::new(&parts)?, manifest))
}

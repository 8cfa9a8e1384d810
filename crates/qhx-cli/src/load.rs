//! From an open bundle to a model that is ready, with everything that can be said on the way.

use crate::{failure::Failure, output, progress::LoadBar};
use qhx_bundle::{Bundle, manifest::TEXT_PROGRAM, parity::REJECTED};
use qhx_runtime::{LoadOptions, LoadPlan, Model, placement::Fallback, verify::verdict};
use std::path::Path;

/// Loads a bundle's text program. What it will need is told before, what runs elsewhere than preferred after.
pub(crate) fn load_model(bundle: &Bundle, options: &LoadOptions) -> Result<Model, Failure> {
    warn_of_failed_gate(bundle);
    if bundle.program(TEXT_PROGRAM).is_some() {
        let plan = LoadPlan::of(bundle, options)?.counting(bundle.programs(), &options.media);
        output::dim_note(&format!("memory: {}", plan.memory));
    }
    let bar = LoadBar::new();
    let model = Model::load(bundle, &LoadOptions { progress: Some(bar.progress()), ..options.clone() })?;
    drop(bar);
    if let Some(choice) = model.choice().filter(|choice| choice.is_new || choice.measured.is_none()) {
        output::dim_note(&format!("{}: {} ({})", options.device, choice.device, choice.reason));
    }
    if let Some(cost) = model.choice().and_then(|choice| choice.cost.as_ref()) {
        output::note(&format!("note: {cost}"));
    }
    tell(&model.placement().fallbacks);
    Ok(model)
}

/// What runs elsewhere than preferred, a line for each stage.
pub(crate) fn tell(fallbacks: &[Fallback]) {
    for Fallback { stage, from, to, reason } in fallbacks {
        output::note(&format!("fallback: stage {stage} runs on {to} instead of {from}: {reason}"));
    }
}

/// One line where the bundle failed its gate when it was made: by its own verdict, or by the name of the folder that a failed one is left in.
pub(crate) fn warn_of_failed_gate(bundle: &Bundle) {
    let place = bundle.place();
    let is_named_so = bundle.folder().and_then(Path::file_name).is_some_and(|name| name.to_string_lossy().ends_with(REJECTED));
    let warning = match verdict(bundle) {
        Ok(Some(gate)) if !gate.passed => format!("failed its gate when it was made, and its answers may be wrong: {}", gate.result),
        Ok(_) if is_named_so => "has the name of a bundle that failed its gate, and its answers may be wrong".into(),
        Ok(_) => return,
        Err(error) => format!("may have failed its gate: {error}"),
    };
    output::note(&format!("warning: {place} {warning}"));
}

//! From a path to a model that is ready, with everything that can be said on the way.

use crate::{
    builtin,
    failure::Failure,
    interrupt::Interrupt,
    model_ref::{ModelKind, kind_of},
    output,
};
use qhx_bundle::{
    Bundle, BundleError, OpenOptions,
    manifest::{MANIFEST_FILE, TEXT_PROGRAM},
    manifest_in,
    parity::REJECTED,
    target::MadeFor,
};
use qhx_runtime::{DeviceChoice, LoadOptions, LoadPlan, Model, registry, verify::verdict};
use std::path::Path;

/// Opens a bundle; what else the path may be is told.
pub(crate) fn open_bundle(path: &Path, interrupt: &Interrupt) -> Result<Bundle, Failure> {
    if builtin::is_meant(path) {
        return builtin::open();
    }
    let options = OpenOptions { cancel: Some(interrupt.flag()), ..OpenOptions::default() };
    Bundle::open_with(path, &options).map_err(|error| match (&error, kind_of(path)) {
        (BundleError::NotABundle { .. }, Some(ModelKind::Folder | ModelKind::Gguf)) => {
            let message = format!("{} is a checkpoint, not a bundle", path.display());
            Failure::work(message).hint(format!("forge it first: qhx forge {} --out BUNDLE", path.display()))
        }
        (BundleError::NotABundle { .. }, _) => {
            Failure::from(error).hint("a bundle is a folder with a qhx.json; `qhx forge SRC --out DIR` makes one")
        }
        _ => error.into(),
    })
}

/// Opens what a device runs of a bundle: for the NPU the folder of its generation, where there is one that it can load.
pub(crate) fn open_for(path: &Path, device: DeviceChoice, interrupt: &Interrupt) -> Result<Bundle, Failure> {
    if device != DeviceChoice::Npu || !path.join(MANIFEST_FILE).is_file() {
        return open_bundle(path, interrupt);
    }
    let arches = registry::npu_arch()?.map_or_else(|| vec!["v81".to_owned(), "v79".to_owned()], |arch| vec![arch]);
    // Folders with a precision behind the generation are for those who ask for them.
    for folder in arches.iter().map(|arch| path.join(arch)).filter(|folder| manifest_in(folder).is_some()) {
        let bundle = open_bundle(&folder, interrupt)?;
        let for_phones = bundle.manifest().plan.as_ref().is_some_and(|plan| plan.made_for == MadeFor::Phone);
        if !(for_phones && registry::npu_is_emulated()) {
            return Ok(bundle);
        }
        output::dim_note(&format!("{} is made for phones: the emulator compiles the bundle instead", folder.display()));
    }
    open_bundle(path, interrupt)
}

/// Loads a bundle's text program. What it will need is told before, what runs elsewhere than preferred after.
pub(crate) fn load_model(bundle: &Bundle, options: &LoadOptions) -> Result<Model, Failure> {
    warn_of_failed_gate(bundle);
    if let Some(program) = bundle.program(TEXT_PROGRAM) {
        let options = &options.of_bundle(bundle)?;
        let plan = LoadPlan::new(program, bundle.manifest().model.context_length, options)?.counting(bundle.programs(), &options.media);
        output::dim_note(&format!("memory: {}", plan.memory));
    }
    let model = Model::load(bundle, options)?;
    for fallback in &model.placement().fallbacks {
        let (stage, from, to, reason) = (&fallback.stage, &fallback.from, &fallback.to, &fallback.reason);
        output::note(&format!("fallback: stage {stage} runs on {to} instead of {from}: {reason}"));
    }
    Ok(model)
}

/// One line where the bundle failed its gate when it was made: by its own verdict, or by the name of the folder that a failed one is left in.
fn warn_of_failed_gate(bundle: &Bundle) {
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

//! From a bundle, or its parts, to a loaded model: on the device that is asked for, or under `auto` on the one that is faster.

use crate::{
    Error, LoadOptions, Model, ModelParts,
    auto::{self, Contest, Measured, Speed, Trial},
    check_processor,
    sequence::Sequence,
};
use qhx_bundle::Bundle;
use qhx_ir::{Device, DeviceError};
use std::{path::Path, sync::Arc, time::Instant};

impl Model {
    /// Opens the bundle at `path` and loads its text program.
    pub fn open(path: impl AsRef<Path>, options: &LoadOptions) -> Result<Self, Error> {
        let started = Instant::now();
        load_since(&Bundle::open(path)?, options, started)
    }

    /// Loads the text program of an open bundle.
    pub fn load(bundle: &Bundle, options: &LoadOptions) -> Result<Self, Error> {
        load_since(bundle, options, Instant::now())
    }

    /// Loads a model from its parts onto the device that `options` ask for.
    pub fn from_parts(parts: ModelParts, options: &LoadOptions) -> Result<Self, Error> {
        load_parts(parts, options, Instant::now())
    }

    /// Loads a model from its parts onto a device of the caller's own.
    pub fn on_device(parts: ModelParts, device: Arc<dyn Device>, options: &LoadOptions) -> Result<Self, Error> {
        Self::load_among(parts, options, &[device], Instant::now())
    }

    /// Loads a model from its parts onto several devices of the caller's own: the first for what the placement of `options` does not name.
    pub fn on_devices(parts: ModelParts, devices: &[Arc<dyn Device>], options: &LoadOptions) -> Result<Self, Error> {
        Self::load_among(parts, options, devices, Instant::now())
    }
}

fn load_since(bundle: &Bundle, options: &LoadOptions, started: Instant) -> Result<Model, Error> {
    let options = &options.of_bundle(bundle)?;
    check_processor(bundle, &options.npu)?;
    load_parts(ModelParts::of(bundle)?, options, started).map_err(|error| match error {
        Error::Device(DeviceError::Weight { name, .. }) if bundle.manifest().plan.is_some() && bundle.weights().tensor(&name).is_none() => {
            Error::OnlyOwnPlacement { bundle: bundle.place().to_owned(), weight: name.to_string() }
        }
        other => other,
    })
}

fn load_parts(parts: ModelParts, options: &LoadOptions, started: Instant) -> Result<Model, Error> {
    match Contest::new(&parts.fingerprint, options)? {
        Some(contest) => load_faster(parts, options, &contest, started),
        None => Model::load_among(parts, options, &options.candidates()?, started),
    }
}

/// Loads a model onto the GPU or the processor: whichever was faster when it was first loaded. A GPU that cannot load it leaves it to the processor.
fn load_faster(parts: ModelParts, options: &LoadOptions, contest: &Contest, started: Instant) -> Result<Model, Error> {
    let on_cpu = |parts| Model::load_among(parts, options, &contest.cpu, started);
    let known = contest.recall();
    if let Some(measured) = known.as_ref().filter(|measured| !measured.prefers_gpu()) {
        return Ok(on_cpu(parts)?.chosen(contest.choice(measured.clone(), false)));
    }
    let on_gpu = match (Model::load_among(parts.clone(), options, &contest.gpu, started), known) {
        (Err(error), _) => return Ok(on_cpu(parts)?.chosen(contest.processor(error.to_string()))),
        (Ok(model), Some(measured)) => return Ok(model.chosen(contest.choice(measured, false))),
        (Ok(model), None) => model,
    };
    let gpu = speed(&on_gpu, None);
    let on_cpu = on_cpu(parts)?;
    let cpu = speed(&on_cpu, gpu.as_ref().ok().copied())?;
    let failure = gpu.as_ref().err().map(Error::to_string);
    let measured = Measured { gpu: gpu.ok(), cpu, failure };
    contest.remember(&measured);
    let faster = if measured.prefers_gpu() { on_gpu } else { on_cpu };
    Ok(faster.chosen(contest.choice(measured, true)))
}

/// How fast a loaded model is; `rival` is what it is compared with.
fn speed(model: &Model, rival: Option<Speed>) -> Result<Speed, Error> {
    let (state, _) = model.new_state()?;
    let (context, vocabulary) = (model.context(), model.vocabulary());
    let sequence = Sequence::new(state, context, vocabulary.logits);
    auto::measure(&mut model.runner(), Trial { sequence, context, chunk: model.chunk(), vocabulary: vocabulary.ids, rival })
}

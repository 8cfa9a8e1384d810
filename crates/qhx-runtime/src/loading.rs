//! From a bundle, or its parts, to a loaded model: on the device that is asked for, or under `auto` and `split` in the way that is fastest.

use crate::{
    Error, LoadOptions, LoadPlan, Model, ModelParts,
    auto::{self, Contest, Measured, Speed, Trial, Tried},
    check_processor,
    options::MOST_DRAFTS,
    planner::{Clock, Extent, Pair, Way},
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

    /// Loads a model from its parts onto an accelerator and a processor of the caller's own, in the way that is fastest: see [`crate::auto`].
    pub fn on_pair(parts: ModelParts, pair: Pair, options: &LoadOptions) -> Result<Self, Error> {
        let contest = Contest::of_pair(&parts.fingerprint, pair, options)?;
        load_fastest(parts, options, &contest, Instant::now())
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
        Some(contest) => load_fastest(parts, options, &contest, started),
        None => Model::load_among(parts, options, &options.candidates()?, started),
    }
}

/// Loads a model in the way that was fastest when it was first loaded. Where the GPU cannot be used, that is the processor.
fn load_fastest(parts: ModelParts, options: &LoadOptions, contest: &Contest, started: Instant) -> Result<Model, Error> {
    let load = |way: &Way| Model::load_among(parts.clone(), &contest.options(way, options), &contest.devices(way), started);
    let processor = |reason: Error| -> Result<Model, Error> {
        let reason = contest.refuse(reason)?;
        Ok(load(&Way::alone(contest.pair.processor.name()))?.chosen(contest.processor(reason.to_string())))
    };
    if let Some(known) = contest.recall()
        && let Some(best) = contest.best(&known).cloned()
    {
        return match load(&best.way) {
            Ok(model) => Ok(model.chosen(contest.choice(known, &best, false))),
            Err(error) => processor(error),
        };
    }
    let mut measured = match plan(&parts, options, contest) {
        Ok(measured) => measured,
        Err(error) => return processor(error),
    };
    let mut worth = contest.worth_trying(&measured.ways);
    // The one that is expected to be the best comes last, and stays.
    worth.reverse();
    let mut loaded: Option<(Way, Model)> = None;
    for place in worth {
        // Not two at once in the GPU's memory.
        drop(loaded.take());
        let Tried { way, speed, failure, .. } = &mut measured.ways[place];
        let run = |way: &Way| load(way).and_then(|model| Ok((time(&model, &*contest.pair.clock)?, model)));
        let mut done = run(way);
        // How many experts or layers fit is an estimate.
        let less = |way: &Way| way.with_less(contest.pair.accelerator.name());
        while let (Err(Error::Device(DeviceError::Exhausted { .. })), Some(less)) = (&done, less(way)) {
            *way = less;
            done = run(way);
        }
        match done {
            Ok((found, model)) => (*speed, loaded) = (Some(found), Some((way.clone(), model))),
            Err(error) => *failure = Some(error.to_string()),
        }
    }
    let Some(best) = contest.best(&measured).cloned() else {
        return processor(Error::absent(options.device.to_string(), measured.failures()));
    };
    contest.remember(&measured);
    let model = match loaded {
        Some((way, model)) if way == best.way => model,
        other => {
            drop(other);
            load(&best.way)?
        }
    };
    Ok(model.chosen(contest.choice(measured, &best, true)))
}

/// The ways to place a model, with what is expected of them; the GPU alone is among them even where it has too little memory, with that as its failure.
fn plan(parts: &ModelParts, options: &LoadOptions, contest: &Contest) -> Result<Measured, Error> {
    let Pair { accelerator, processor, .. } = &contest.pair;
    let on = |device: &Arc<dyn Device>| LoadPlan::among(&parts.program, parts.context_limit, options, std::slice::from_ref(device));
    if !contest.pair.has_room()? {
        return Err(Error::DoesNotFit(Box::new(on(accelerator)?.memory)));
    }
    let memory = on(processor)?.memory;
    let extent = Extent { context: memory.context, chunk: memory.chunk, wanted: options.wanted.max(options.sessions + MOST_DRAFTS) };
    let mut measured = contest.plan(&parts.program, extent)?;
    let alone = Way::alone(accelerator.name());
    if !measured.ways.iter().any(|tried| tried.way == alone) {
        let failure = match on(accelerator) {
            Ok(plan) => Error::DoesNotFit(Box::new(plan.memory)),
            Err(error) => error,
        };
        measured.ways.push(Tried { way: alone, predicted: None, speed: None, failure: Some(failure.to_string()) });
    }
    Ok(measured)
}

/// How fast a loaded model is.
fn time(model: &Model, clock: &dyn Clock) -> Result<Speed, Error> {
    let (state, _) = model.new_state()?;
    let (context, vocabulary) = (model.context(), model.vocabulary());
    let sequence = Sequence::new(state, context, vocabulary.logits);
    auto::measure(&mut model.runner(), Trial { sequence, context, chunk: model.chunk(), vocabulary: vocabulary.ids }, clock)
}

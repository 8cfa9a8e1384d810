//! A model that is loaded and ready for sessions.
//!
//! Puts together what a bundle brings (program, weights, tokenizer, template, ids with a meaning) and a device from the registry. Knows no
//! model family: everything that differs between models is data of the bundle.

use crate::{
    Cancel, DeviceChoice, Encoded, Error, Language, LoadOptions, Medium, ModelParts, PlacedMedium, Prompt,
    auto::{AutoChoice, Contest},
    draft_program::{DraftProgram, LoadedDraft},
    encoder::Encoders,
    memory::{MemoryEstimate, TowerNeed},
    options::{DEFAULT_CONTEXT, MAX_SESSIONS, MOST_DRAFTS},
    placement::{self, Fallback, Placement},
    planner::Way,
    recorded::Recorded,
    registry::{self, CpuSettings, GpuSettings, NpuSettings},
    runner::Runner,
    soft_rows::soft_row_width,
};
use qhx_bundle::{Bundle, Digest, manifest::TEXT_PROGRAM, target::MadeFor};
use qhx_ir::{Checked, Device, DeviceError, DeviceInfo, Executable, State, Tap, Weights};
use qhx_media::MediaKind;
use std::{
    collections::BTreeMap,
    ops::Deref,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::{Duration, Instant},
};

/// A loaded model. Clones share it.
#[derive(Clone)]
pub struct Model(Arc<Loaded>);

struct Loaded {
    language: Language,
    program: Checked,
    runner: Mutex<Runner>,
    origin: Origin,
    device: DeviceInfo,
    placement: Placement,
    /// Where the stages run since the device was lost.
    moved: OnceLock<Placement>,
    choice: Option<AutoChoice>,
    memory: MemoryEstimate,
    wanted: usize,
    draft: Option<DraftProgram>,
    sessions: usize,
    fingerprint: String,
    encoders: Encoders,
    prefill_min_rows: usize,
    load_time: Duration,
}

/// What the text program was loaded from, for the case that its device is lost.
struct Origin {
    /// What it runs on, which may be several devices as one.
    device: Arc<dyn Device>,
    devices: Vec<Arc<dyn Device>>,
    /// The processor takes the place of what is lost.
    cpu: CpuSettings,
    weights: Arc<dyn Weights>,
    options: qhx_ir::LoadOptions,
}

/// A loaded program and its device.
type LoadedOn = (Arc<dyn Device>, Box<dyn Executable>);

/// What loading would do: the choices and numbers that `inspect` shows, made without allocating anything.
#[derive(Clone)]
pub struct LoadPlan {
    /// Where each stage goes.
    pub placement: Placement,
    /// What it needs and what there is.
    pub memory: MemoryEstimate,
    /// The device itself.
    pub device: Arc<dyn Device>,
    /// What `auto` chose, where there was something to choose.
    pub choice: Option<AutoChoice>,
}

impl LoadPlan {
    /// Chooses device, context and chunk for a program.
    pub fn new(program: &Checked, context_limit: usize, options: &LoadOptions) -> Result<Self, Error> {
        Self::among(program, context_limit, options, &options.candidates()?)
    }

    /// What loading the text program of a bundle would do. Nothing is measured: before `auto` has measured a model, it is said to run on the processor.
    pub fn of(bundle: &Bundle, options: &LoadOptions) -> Result<Self, Error> {
        let options = options.of_bundle(bundle)?;
        let no_text = || Error::NotText { program: TEXT_PROGRAM.into(), reason: "the bundle has none".into() };
        let (program, limit) = (bundle.program(TEXT_PROGRAM).ok_or_else(no_text)?, bundle.manifest().model.context_length);
        let Some(contest) = Contest::new(&bundle.fingerprint().to_string(), &options)? else {
            return Self::new(program, limit, &options);
        };
        let on = |way: &Way| Self::among(program, limit, &contest.options(way, &options), &contest.devices(way));
        let choice = match contest.recall().and_then(|known| Some((contest.best(&known)?.clone(), known))) {
            None => contest.processor("not measured yet: the first load measures GPU and processor".into()),
            Some((best, known)) => match on(&best.way) {
                Ok(plan) if plan.memory.fits() || options.overcommit => return Ok(plan.chosen(contest.choice(known, &best, false))),
                Ok(plan) => contest.processor(Error::DoesNotFit(Box::new(plan.memory)).to_string()),
                Err(error) => contest.processor(error.to_string()),
            },
        };
        Ok(on(&Way::alone(contest.pair.processor.name()))?.chosen(choice))
    }

    fn chosen(mut self, choice: AutoChoice) -> Self {
        self.placement.explain(&choice.reason);
        self.choice = Some(choice);
        self
    }

    /// The same with what encoding `media` takes.
    pub fn counting(mut self, towers: &BTreeMap<String, Checked>, media: &[Medium]) -> Self {
        let needs = media.iter().filter_map(|medium| Some(TowerNeed { program: towers.get(medium.program())?, rows: medium.rows() }));
        self.memory = self.memory.with_towers(needs);
        self
    }

    pub(crate) fn among(
        program: &Checked,
        context_limit: usize,
        options: &LoadOptions,
        candidates: &[Arc<dyn Device>],
    ) -> Result<Self, Error> {
        let between = |option, found: usize, most: usize| match (1..=most).contains(&found) {
            true => Ok(found),
            false => Err(Error::Option { option, found: found.to_string(), expected: format!("1 to {most}") }),
        };
        let context = between("context", options.context.unwrap_or(DEFAULT_CONTEXT.min(context_limit)), context_limit)?;
        let chunk = between("chunk", options.chunk, 1 << 20)?.min(context);
        let sessions = between("sessions", options.sessions, MAX_SESSIONS)?;
        let wanted = between("wanted", options.wanted, 1 << 20)?.max(sessions + MOST_DRAFTS).min(chunk);
        let memory = MemoryEstimate::of(program, context, chunk, wanted);
        let (device, placement) = placement::place(program, options.device, options.placement.as_ref(), candidates)?;
        let mut memory = memory.with_copies(program, placement.copies.iter().map(|copy| &*copy.slot));
        // A device that is not there says so when it is loaded.
        if let Ok(Some(available)) = device.own_memory() {
            memory = memory.on_device(device.name(), available);
        }
        Ok(Self { memory, placement, device, choice: None })
    }
}

/// Whether a bundle that was prepared for an NPU is for this machine's.
pub fn check_processor(bundle: &Bundle, npu: &NpuSettings) -> Result<(), Error> {
    let Some(plan) = &bundle.manifest().plan else { return Ok(()) };
    if plan.made_for == MadeFor::Phone && registry::npu_is_emulated() {
        return Err(Error::OnlyPhones { bundle: bundle.place().to_owned() });
    }
    match (&bundle.manifest().model.dsp_arch, registry::npu_arch(npu)?) {
        (Some(asked), Some(here)) if *asked != here => Err(Error::OtherArch { asked: asked.clone(), here }),
        _ => Ok(()),
    }
}

impl Deref for Model {
    type Target = Language;

    fn deref(&self) -> &Language {
        &self.0.language
    }
}

impl Model {
    /// Loads a model from its parts onto some devices: the first for what the placement of `options` does not name.
    pub(crate) fn load_among(
        parts: ModelParts,
        options: &LoadOptions,
        candidates: &[Arc<dyn Device>],
        started: Instant,
    ) -> Result<Self, Error> {
        if let Some(rules) = &options.placement {
            rules.check(std::iter::once(&parts.program).chain(parts.towers.values()))?;
        }
        let plan = LoadPlan::among(&parts.program, parts.context_limit, options, candidates)?;
        let LoadPlan { placement, memory, device, .. } = plan.counting(&parts.towers, &options.media);
        let language = Language::with_context(&parts, memory.context)?;
        let ModelParts { program, weights, fingerprint, prepared, draft, .. } = parts;
        let draft = draft.map(|draft| DraftProgram::new(draft, &program, language.vocabulary().logits)).transpose()?;
        if !memory.fits() && !options.overcommit {
            return Err(Error::DoesNotFit(Box::new(memory)));
        }
        let sessions = options.sessions.min(memory.chunk);
        let wanted = options.wanted.max(sessions).min(memory.chunk);
        let max_soft_rows = if soft_row_width(&program).is_some() { memory.chunk } else { 0 };
        let (prefill_min_rows, artifacts) = prepared.map_or((0, None), |p| (p.prefill_min_rows, Some(p.folder)));
        let history = options.gpu.cache.as_ref().map(|folder| folder.join(format!("experts-{}.json", Digest::of(fingerprint.as_bytes()))));
        let load = qhx_ir::LoadOptions {
            max_rows: memory.chunk,
            max_soft_rows,
            max_wanted: wanted.max(sessions + MOST_DRAFTS).min(memory.chunk),
            max_segments: sessions,
            max_state_bytes: options.state_bytes,
            replaceable: Vec::new(),
            pauses: Vec::new(),
            scratch_group: None,
            history,
            artifacts: artifacts.clone(),
            progress: options.progress.clone(),
            timeline: options.timeline.clone(),
        };
        let opened = || -> Result<_, DeviceError> {
            let machine = device.open()?;
            let executable = machine.load(&program, &weights, &load)?;
            Ok((machine, executable))
        };
        // One that was lost on the way is tried once more: by then its process, if it has one of its own, is started again.
        let (machine, executable) = match opened() {
            Err(DeviceError::Lost { .. }) => opened()?,
            other => other?,
        };
        let executable = Recorded::of_device(executable, &*device, load.timeline.as_ref());
        let runner = Runner::new(executable, program.clone(), language.placeholders().clone(), language.vocabulary().logits);
        let runner = Mutex::new(match draft.as_ref().filter(|_| runner.invariant_rows() > 0) {
            Some(draft) => runner.showing(&draft.stage, draft.width),
            None => runner,
        });
        let again = qhx_ir::LoadOptions { progress: None, ..load };
        let origin =
            Origin { device: device.clone(), devices: candidates.to_vec(), cpu: options.cpu(), weights: weights.clone(), options: again };
        let encoders = Encoders::new(language.towers.clone(), weights, candidates.to_vec(), artifacts, options);
        Ok(Self(Arc::new(Loaded {
            language,
            program,
            runner,
            origin,
            device: machine.describe(),
            placement,
            moved: OnceLock::new(),
            choice: None,
            memory,
            wanted,
            draft,
            sessions,
            fingerprint,
            encoders,
            prefill_min_rows,
            load_time: started.elapsed(),
        })))
    }

    /// The text program.
    pub fn program(&self) -> &Checked {
        &self.0.program
    }

    /// Where each stage runs.
    pub fn placement(&self) -> &Placement {
        self.0.moved.get().unwrap_or(&self.0.placement)
    }

    /// What `auto` chose, where there was something to choose.
    pub fn choice(&self) -> Option<&AutoChoice> {
        self.0.choice.as_ref()
    }

    /// The same model, which nobody shares yet, with what `auto` chose.
    pub(crate) fn chosen(mut self, choice: AutoChoice) -> Self {
        if let Some(loaded) = Arc::get_mut(&mut self.0) {
            loaded.placement.explain(&choice.reason);
            loaded.choice = Some(choice);
        }
        self
    }

    /// What it needs, as estimated before it was loaded.
    pub fn memory(&self) -> &MemoryEstimate {
        &self.0.memory
    }

    /// The device that runs it.
    pub fn device(&self) -> &DeviceInfo {
        &self.0.device
    }

    /// Bytes that the device holds beside weights and sessions.
    pub fn scratch_bytes(&self) -> u64 {
        self.runner().executable.scratch_bytes()
    }

    /// Rows per call in prefill.
    pub fn chunk(&self) -> usize {
        self.0.memory.chunk
    }

    /// Rows of the next call in prefill, where `left` are to be read.
    pub(crate) fn chunk_of(&self, left: usize) -> usize {
        if left < self.0.prefill_min_rows { 1 } else { self.chunk() }
    }

    /// The most rows per call whose logits are wanted.
    pub fn wanted(&self) -> usize {
        self.0.wanted
    }

    /// Whether drafts may be computed beside other rows: a row must be the same, bit by bit, whatever else is in its call.
    pub(crate) fn can_draft(&self) -> bool {
        self.runner().invariant_rows() > 0
    }

    /// Drafts for which there is room in a call with so many answers, which has so many rows without them.
    pub(crate) fn room_for_drafts(&self, answers: usize, rows: usize) -> usize {
        match rows <= self.runner().invariant_rows() {
            true => MOST_DRAFTS.min(self.chunk().saturating_sub(answers)),
            false => 0,
        }
    }

    /// The program with which it drafts for itself.
    pub(crate) fn draft_program(&self) -> Option<&DraftProgram> {
        self.0.draft.as_ref()
    }

    /// The same, loaded where the text program is, with [`Runner::loads`].
    pub(crate) fn loaded_draft<'d>(&self, draft: &'d DraftProgram) -> Result<(MutexGuard<'d, LoadedDraft>, u64), Error> {
        let (mut loaded, loads) = (draft.lock(), self.runner().loads);
        if !loaded.is_loaded(loads) {
            let (_, executable) = self.load_somewhere(&draft.program, &DraftProgram::load_options(), self.0.origin.devices.iter())?;
            loaded.put(executable, loads);
            loaded.warm_up()?;
        }
        Ok((loaded, loads))
    }

    /// Loads a program on the first of some devices that takes it, or else on the processor.
    fn load_somewhere<'d>(
        &self,
        program: &Checked,
        options: &qhx_ir::LoadOptions,
        devices: impl Iterator<Item = &'d Arc<dyn Device>>,
    ) -> Result<LoadedOn, DeviceError> {
        let Origin { cpu, weights, .. } = &self.0.origin;
        let processor = registry::candidates_with(DeviceChoice::Cpu, *cpu, &NpuSettings::default(), &GpuSettings::default());
        let mut problem = DeviceError::Call("there is no device".into());
        for device in devices.cloned().chain(processor.unwrap_or_default()) {
            match device.load(program, weights, options) {
                Ok(executable) => return Ok((device, executable)),
                Err(error) => problem = error,
            }
        }
        Err(problem)
    }

    /// Whether two are the same loaded model.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// How many sessions may share a call.
    pub fn sessions(&self) -> usize {
        self.0.sessions
    }

    /// The soft rows of a medium. What was made lately is not made again.
    pub fn encode(&self, medium: &Medium, cancel: &Cancel) -> Result<Arc<Encoded>, Error> {
        Ok(self.encode_counted(medium, cancel)?.0)
    }

    /// The same, and whether a tower had to be run.
    pub(crate) fn encode_counted(&self, medium: &Medium, cancel: &Cancel) -> Result<(Arc<Encoded>, bool), Error> {
        self.0.encoders.encode(self.name(), medium, cancel)
    }

    /// Whether media of a prompt are yet to be encoded, and that would happen beside the text program: on another device.
    pub(crate) fn encodes_beside_text(&self, prompt: &Prompt) -> Result<bool, Error> {
        let media = prompt.media().iter().map(PlacedMedium::medium);
        self.0.encoders.work_beside(self.name(), media, self.placement())
    }

    /// The soft rows of a medium, made in any case, with what every stage of the tower made on the way.
    pub fn encode_traced(&self, medium: &Medium, cancel: &Cancel, taps: &mut dyn FnMut(Tap<'_>)) -> Result<Arc<Encoded>, Error> {
        self.0.encoders.encode_traced(self.name(), medium, cancel, taps)
    }

    /// Where the stages of a tower run; none before it has been used.
    pub fn tower_placement(&self, kind: MediaKind) -> Option<Placement> {
        self.0.encoders.placement(kind)
    }

    /// What ties saved sessions to this model.
    pub fn fingerprint(&self) -> &str {
        &self.0.fingerprint
    }

    /// How long loading took.
    pub fn load_time(&self) -> Duration {
        self.0.load_time
    }

    /// The loaded program; calls of several sessions take turns. A device that panicked in a call is used again: what it computes is checked, and
    /// a session's rows do not live in it.
    pub(crate) fn runner(&self) -> MutexGuard<'_, Runner> {
        self.0.runner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A fresh state, and [`Runner::loads`].
    pub(crate) fn new_state(&self) -> Result<(Box<dyn State>, u64), Error> {
        let runner = self.runner();
        Ok((runner.executable.new_state(self.context())?, runner.loads))
    }

    /// The device of the text program cannot go on: loads it anew, where it was if that can be started again, or else on the first of the model's devices or the processor that takes it. Sessions compute their
    /// states again from their rows. The error is why the device was given up, where nothing takes its place.
    pub(crate) fn recover(&self, lost: DeviceError) -> Result<(), Error> {
        let Origin { device: same, devices, options, .. } = &self.0.origin;
        // A device without memory would have none for a second copy either.
        let is_full = matches!(lost, DeviceError::Exhausted { .. });
        let own = std::iter::once(same).chain(devices).filter(|_| !is_full);
        let Ok((device, executable)) = self.load_somewhere(self.program(), options, own) else { return Err(lost.into()) };
        // Stages stay where they are on what was started again.
        let moved = !Arc::ptr_eq(&device, same);
        if moved && let Ok((_, mut placement)) = placement::place(self.program(), DeviceChoice::Auto, None, std::slice::from_ref(&device)) {
            let (from, to) = (lost.left_device().unwrap_or_default().to_owned(), device.name().to_owned());
            placement.explain(&format!("{from} was given up"));
            placement.fallbacks.push(Fallback { stage: self.program().name.to_string(), from, to, reason: lost.to_string() });
            // Of several moves the first is told.
            let _ = self.0.moved.set(placement);
        }
        self.runner().replace(executable, format!("{lost}; the answer was continued on {}", device.name()));
        Ok(())
    }
}

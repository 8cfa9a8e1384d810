//! A model that is loaded and ready for sessions.
//!
//! Puts together what a bundle brings (program, weights, tokenizer, template, ids with a meaning) and a device from the registry. Knows no
//! model family: everything that differs between models is data of the bundle.

use crate::{
    Cancel, Error, Language, Session,
    encoder::{Encoded, Encoders},
    inputs,
    medium::{MediaKind, Medium},
    memory::{MemoryEstimate, TowerNeed},
    placement::{self, Placement, Rules},
    registry::{self, CpuSettings, DeviceChoice, InstructionSet, NpuSettings},
    runner::Runner,
    text::{ChatTemplate, Tokenizer},
};
use qhx_bundle::{
    Bundle, BundlePath, Manifest,
    manifest::{ChatMode, TEXT_PROGRAM},
    media::Media,
    target::MadeFor,
};
use qhx_ir::{Checked, Device, DeviceError, DeviceInfo, State, Tap, Weights};
use std::{
    collections::BTreeMap,
    ops::Deref,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// The session length that is chosen when nobody asks for one and the model allows it.
pub const DEFAULT_CONTEXT: usize = 4096;
/// Rows per call in prefill when nobody asks for another number.
pub const DEFAULT_CHUNK: usize = 256;
/// The most sessions that may share a call.
pub(crate) const MAX_SESSIONS: usize = 256;

/// How a model is to be loaded.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Where it runs.
    pub device: DeviceChoice,
    /// Which stage runs where; absent: all of them where `device` says.
    pub placement: Option<Rules>,
    /// Threads of the processor; absent: the device's own choice.
    pub threads: Option<usize>,
    /// Keep each of them on a core of its own, where the system can: see [`registry::CAN_PIN`].
    pub pin: bool,
    /// The processor's instruction set, for comparisons; absent: the best that it has.
    pub instructions: Option<InstructionSet>,
    /// Longest session; absent: the model's own limit, at most [`DEFAULT_CONTEXT`].
    pub context: Option<usize>,
    /// Rows per call in prefill.
    pub chunk: usize,
    /// The most rows per call whose logits are wanted: 1 for generating, more for checking many rows at once.
    pub wanted: usize,
    /// How many sessions may share a call: answers that an [`crate::engine::Engine`] makes at once.
    pub sessions: usize,
    /// The most bytes that the states of all sessions may have together, where the device counts them; absent: no limit.
    pub state_bytes: Option<u64>,
    /// Load even what does not fit into memory. Weights are mapped, so it may run, slowly, from the disk.
    pub overcommit: bool,
    /// Media that are going to be encoded: what that takes counts in the estimate of memory.
    pub media: Vec<Medium>,
    /// Where QNN is, and what the NPU is to be.
    pub npu: NpuSettings,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            device: DeviceChoice::Auto,
            placement: None,
            threads: None,
            pin: false,
            instructions: None,
            context: None,
            chunk: DEFAULT_CHUNK,
            wanted: 1,
            sessions: 1,
            state_bytes: None,
            overcommit: false,
            media: Vec::new(),
            npu: NpuSettings::default(),
        }
    }
}

impl LoadOptions {
    /// The devices that they name, the one for everything else first.
    pub fn candidates(&self) -> Result<Vec<Arc<dyn Device>>, Error> {
        let cpu = CpuSettings { threads: self.threads, pin: self.pin, instructions: self.instructions };
        registry::candidates_for(self.device, self.placement.as_ref(), cpu, &self.npu)
    }

    /// As they are for a bundle: an arch folder runs on the NPU, on the generation that it is for, and what its manifest places elsewhere there, unless
    /// another placement is asked for.
    pub fn of_bundle(&self, bundle: &Bundle) -> Result<Self, Error> {
        let mut options = self.clone();
        let (Some(plan), Some(arch)) = (&bundle.manifest().plan, &bundle.manifest().model.dsp_arch) else { return Ok(options) };
        options.device = match self.device {
            DeviceChoice::Auto | DeviceChoice::Npu => DeviceChoice::Npu,
            other => return Err(Error::OnlyNpu { bundle: bundle.place().to_owned(), device: other.to_string() }),
        };
        options.npu.arch = Some(arch.clone());
        options.placement = self.placement.clone().or_else(|| bundle.manifest().placement.as_ref().map(Rules::from));
        options.npu.prefill_min_rows = Some(plan.prefill_min_tokens);
        // A call is one execution of the largest graph.
        options.chunk = self.chunk.min(plan.prefill.last().copied().unwrap_or(1));
        Ok(options)
    }
}

/// Everything a model is made from, apart from a device.
#[derive(Clone)]
pub struct ModelParts {
    /// What people call it.
    pub name: String,
    /// The text program.
    pub program: Checked,
    /// Its weights.
    pub weights: Arc<dyn Weights>,
    /// The longest session that the model was made for.
    pub context_limit: usize,
    /// Ids that end an answer.
    pub eos: Vec<u32>,
    /// Text to ids and back; a model without one takes ids only.
    pub tokenizer: Option<Tokenizer>,
    /// How a conversation becomes text; absent: the model only continues texts.
    pub template: Option<ModelTemplate>,
    /// What ties saved sessions to this model.
    pub fingerprint: String,
    /// What it takes beside text.
    pub media: Media,
    /// The programs that `media` names.
    pub towers: BTreeMap<String, Checked>,
    /// The id that takes the place of media placeholders where a program asks for that.
    pub pad: Option<u32>,
    /// What was prepared ahead of time.
    pub prepared: Option<Prepared>,
}

/// What was prepared ahead of time for a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prepared {
    /// Where it is.
    pub folder: PathBuf,
    /// Fewer rows than this are read one by one.
    pub prefill_min_rows: usize,
}

/// A model's chat template.
#[derive(Clone)]
pub struct ModelTemplate {
    /// The template itself.
    pub template: Arc<ChatTemplate>,
    /// Variables that it sees unless a conversation sets them.
    pub defaults: serde_json::Map<String, serde_json::Value>,
}

impl ModelParts {
    /// The parts of a bundle.
    pub fn of(bundle: &Bundle) -> Result<Self, Error> {
        let template = bundle.manifest().chat.template.as_ref();
        let read = |file: &BundlePath| match template == Some(file) {
            true => Ok(bundle.read_text(file)?.into_bytes()),
            false => Ok(bundle.read(file)?),
        };
        let manifest = bundle.manifest();
        let mut parts = Self::described(manifest, bundle.programs(), bundle.weights(), &bundle.fingerprint().to_string(), &read)?;
        parts.prepared = manifest
            .plan
            .as_ref()
            .and_then(|plan| Some(Prepared { folder: bundle.folder()?.to_path_buf(), prefill_min_rows: plan.prefill_min_tokens }));
        Ok(parts)
    }

    /// The parts of what a manifest describes, its files read by `read`.
    pub fn described(
        manifest: &Manifest,
        programs: &BTreeMap<String, Checked>,
        weights: Arc<dyn Weights>,
        fingerprint: &str,
        read: &dyn Fn(&BundlePath) -> Result<Vec<u8>, Error>,
    ) -> Result<Self, Error> {
        let missing = || Error::NotText { program: TEXT_PROGRAM.into(), reason: "the bundle has no such program".into() };
        let tokenizer = match &manifest.tokenizer {
            Some(file) => Some(Tokenizer::from_bytes(&read(file)?)?),
            None => None,
        };
        let template = match (manifest.chat.mode, &manifest.chat.template) {
            (ChatMode::Template, Some(file)) => {
                let tokens = [("bos_token", &manifest.chat.bos_token), ("eos_token", &manifest.chat.eos_token)];
                let tokens = tokens.into_iter().filter_map(|(name, text)| Some((name, text.as_deref()?)));
                Some(ModelTemplate {
                    template: Arc::new(ChatTemplate::new(&String::from_utf8_lossy(&read(file)?), tokens)?),
                    defaults: manifest.chat.template_arguments.clone().into_iter().collect(),
                })
            }
            _ => None,
        };
        Ok(Self {
            name: manifest.model.name.clone(),
            program: programs.get(TEXT_PROGRAM).ok_or_else(missing)?.clone(),
            weights,
            context_limit: manifest.model.context_length,
            eos: manifest.tokens.eos.clone(),
            tokenizer,
            template,
            fingerprint: fingerprint.to_owned(),
            media: manifest.media.clone(),
            towers: programs.iter().filter(|(name, _)| *name != TEXT_PROGRAM).map(|(n, p)| (n.clone(), p.clone())).collect(),
            pad: manifest.tokens.pad,
            prepared: None,
        })
    }
}

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
    memory: MemoryEstimate,
    wanted: usize,
    sessions: usize,
    fingerprint: String,
    encoders: Encoders,
    prefill_min_rows: usize,
    load_time: Duration,
}

/// What the text program was loaded from, for the case that its device is lost.
struct Origin {
    devices: Vec<Arc<dyn Device>>,
    weights: Arc<dyn Weights>,
    options: qhx_ir::LoadOptions,
}

/// What loading would do: the choices and numbers that `inspect` shows, made without allocating anything.
#[derive(Clone)]
pub struct LoadPlan {
    /// Where each stage goes.
    pub placement: Placement,
    /// What it needs and what there is.
    pub memory: MemoryEstimate,
    /// The device itself.
    pub device: Arc<dyn Device>,
}

impl LoadPlan {
    /// Chooses device, context and chunk for a program.
    pub fn new(program: &Checked, context_limit: usize, options: &LoadOptions) -> Result<Self, Error> {
        Self::among(program, context_limit, options, &options.candidates()?)
    }

    /// The same with what encoding `media` takes.
    pub fn counting(mut self, towers: &BTreeMap<String, Checked>, media: &[Medium]) -> Self {
        let needs = media.iter().filter_map(|medium| Some(TowerNeed { program: towers.get(medium.program())?, rows: medium.rows() }));
        self.memory = self.memory.with_towers(needs);
        self
    }

    fn among(program: &Checked, context_limit: usize, options: &LoadOptions, candidates: &[Arc<dyn Device>]) -> Result<Self, Error> {
        let between = |option, found: usize, most: usize| match (1..=most).contains(&found) {
            true => Ok(found),
            false => Err(Error::Option { option, found: found.to_string(), expected: format!("1 to {most}") }),
        };
        let context = between("context", options.context.unwrap_or(DEFAULT_CONTEXT.min(context_limit)), context_limit)?;
        let chunk = between("chunk", options.chunk, 1 << 20)?.min(context);
        let sessions = between("sessions", options.sessions, MAX_SESSIONS)?;
        let wanted = between("wanted", options.wanted, 1 << 20)?.max(sessions).min(chunk);
        let memory = MemoryEstimate::of(program, context, chunk, wanted);
        let (device, placement) = placement::place(program, options.device, options.placement.as_ref(), candidates)?;
        Ok(Self { memory: memory.with_copies(program, &placement.copies), placement, device })
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
    /// Opens the bundle at `path` and loads its text program.
    pub fn open(path: impl AsRef<Path>, options: &LoadOptions) -> Result<Self, Error> {
        let started = Instant::now();
        Self::load_since(&Bundle::open(path)?, options, started)
    }

    /// Loads the text program of an open bundle.
    pub fn load(bundle: &Bundle, options: &LoadOptions) -> Result<Self, Error> {
        Self::load_since(bundle, options, Instant::now())
    }

    fn load_since(bundle: &Bundle, options: &LoadOptions, started: Instant) -> Result<Self, Error> {
        let options = &options.of_bundle(bundle)?;
        check_processor(bundle, &options.npu)?;
        let loaded = Self::load_among(ModelParts::of(bundle)?, options, &options.candidates()?, started);
        loaded.map_err(|error| match error {
            Error::Device(DeviceError::Weight { name, .. })
                if bundle.manifest().plan.is_some() && bundle.weights().tensor(&name).is_none() =>
            {
                Error::OnlyOwnPlacement { bundle: bundle.place().to_owned(), weight: name.to_string() }
            }
            other => other,
        })
    }

    /// Loads a model from its parts onto the device that `options` ask for.
    pub fn from_parts(parts: ModelParts, options: &LoadOptions) -> Result<Self, Error> {
        Self::load_among(parts, options, &options.candidates()?, Instant::now())
    }

    /// Loads a model from its parts onto a device of the caller's own.
    pub fn on_device(parts: ModelParts, device: Arc<dyn Device>, options: &LoadOptions) -> Result<Self, Error> {
        Self::load_among(parts, options, &[device], Instant::now())
    }

    /// Loads a model from its parts onto several devices of the caller's own: the first for what the placement of `options` does not name.
    pub fn on_devices(parts: ModelParts, devices: &[Arc<dyn Device>], options: &LoadOptions) -> Result<Self, Error> {
        Self::load_among(parts, options, devices, Instant::now())
    }

    fn load_among(parts: ModelParts, options: &LoadOptions, candidates: &[Arc<dyn Device>], started: Instant) -> Result<Self, Error> {
        if let Some(rules) = &options.placement {
            rules.check(std::iter::once(&parts.program).chain(parts.towers.values()))?;
        }
        let plan = LoadPlan::among(&parts.program, parts.context_limit, options, candidates)?;
        let LoadPlan { placement, memory, device } = plan.counting(&parts.towers, &options.media);
        let language = Language::with_context(&parts, memory.context)?;
        let ModelParts { program, weights, fingerprint, prepared, .. } = parts;
        if !memory.fits() && !options.overcommit {
            return Err(Error::DoesNotFit(Box::new(memory)));
        }
        let sessions = options.sessions.min(memory.chunk);
        let wanted = options.wanted.max(sessions).min(memory.chunk);
        let max_soft_rows = if inputs::soft_row_width(&program).is_some() { memory.chunk } else { 0 };
        let (prefill_min_rows, artifacts) = prepared.map_or((0, None), |p| (p.prefill_min_rows, Some(p.folder)));
        let load = qhx_ir::LoadOptions {
            max_rows: memory.chunk,
            max_soft_rows,
            max_wanted: wanted,
            max_segments: sessions,
            max_state_bytes: options.state_bytes,
            artifacts: artifacts.clone(),
        };
        let machine = device.open()?;
        let runner = Mutex::new(Runner::new(machine.load(&program, &weights, &load)?));
        let origin = Origin { devices: candidates.to_vec(), weights: weights.clone(), options: load };
        let encoders = Encoders::new(language.towers.clone(), weights, candidates.to_vec(), artifacts, options);
        Ok(Self(Arc::new(Loaded {
            language,
            program,
            runner,
            origin,
            device: machine.describe(),
            placement,
            memory,
            wanted,
            sessions,
            fingerprint,
            encoders,
            prefill_min_rows,
            load_time: started.elapsed(),
        })))
    }

    /// A fresh session.
    pub fn session(&self) -> Result<Session, Error> {
        Session::new(self.clone())
    }

    /// The text program.
    pub fn program(&self) -> &Checked {
        &self.0.program
    }

    /// Where each stage runs.
    pub fn placement(&self) -> &Placement {
        &self.0.placement
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

    /// The device of the text program is gone: loads it anew, on the first of the model's devices or else on the processor that takes it. Sessions compute their states again
    /// from their rows. The error is why the device was lost, where nothing takes its place.
    pub(crate) fn recover(&self, lost: DeviceError) -> Result<(), Error> {
        let Origin { devices, weights, options } = &self.0.origin;
        let processor = registry::candidates(DeviceChoice::Cpu, None).unwrap_or_default();
        let loaded =
            devices.iter().chain(&processor).find_map(|device| Some((device, device.load(self.program(), weights, options).ok()?)));
        let Some((device, executable)) = loaded else { return Err(lost.into()) };
        self.runner().replace(executable, format!("{lost}; the answer was continued on {}", device.name()));
        Ok(())
    }

    pub(crate) fn wrong_output(&self, rows: usize, found: Option<usize>) -> Error {
        let (name, width) = (&self.0.device.name, self.vocabulary().logits);
        Error::Device(DeviceError::Call(match found {
            Some(found) => format!("device {name} gave {found} logits for {rows} rows of {width}"),
            None => format!("device {name} gave no output `logits`"),
        }))
    }
}

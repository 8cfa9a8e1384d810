//! A model that is loaded, and how it is to be loaded.

use crate::{Error, OpenEvent, Opener, Places, messages};
use qhx_bundle::Bundle;
use qhx_runtime::{
    Cancel, DeviceChoice, LoadOptions, MediaKind, Medium, TokenLogProbs,
    engine::{Engine, EngineOptions},
    placement::Rules,
    registry::{GpuSettings, NpuSettings},
    sample::SamplerConfig,
    text::{SpecialTokens, reply::ReplyFormat},
    verify,
};
use std::{
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

/// A loaded model. Clones share it, and any number of threads may use it.
///
/// ```
/// # fn main() -> Result<(), qhx::Error> {
/// let model = qhx::Model::open("builtin")?;
/// assert_eq!(model.chat().ask("What is the capital of Portugal?")?.text, "The capital of Portugal is Lisbon.");
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Model {
    loaded: qhx_runtime::Model,
    bundle: Arc<Bundle>,
    /// Started when it is first needed.
    engine: Arc<Mutex<Option<Engine>>>,
    engine_options: EngineOptions,
}

impl Model {
    /// Opens and loads the model that `reference` names, on the best device, with default settings; [`Model::options`] has the others.
    ///
    /// A reference is the path of a bundle, of a Hugging Face folder or of a GGUF file; `org/name` for a repository in the Hugging Face cache; or
    /// `builtin`. A checkpoint is forged into the user's cache the first time, which takes a while, and found there from then on.
    pub fn open(reference: impl AsRef<Path>) -> Result<Self, Error> {
        Self::options().open(reference)
    }

    /// How a model is to be opened and loaded.
    pub fn options<'a>() -> ModelOptions<'a> {
        ModelOptions::default()
    }

    /// How the checkpoint's makers suggest that tokens are sampled, for [`GenerateOptions::sampler`](crate::GenerateOptions); none where they do not. Without it answers are greedy.
    pub fn suggested_sampling(&self) -> Option<SamplerConfig> {
        let suggested = self.bundle.manifest().generation.as_ref()?;
        let plain = SamplerConfig::default();
        let number = |value: Option<f64>, absent: f32| value.map_or(absent, |value| value as f32);
        let config = SamplerConfig {
            // Greedy is what nobody has to suggest: where only filters are named, they are meant for sampling as it is.
            temperature: number(suggested.temperature, 1.0),
            top_k: suggested.top_k.map_or(plain.top_k, |k| k as usize),
            top_p: number(suggested.top_p, plain.top_p),
            min_p: number(suggested.min_p, plain.min_p),
            repetition_penalty: number(suggested.repetition_penalty, plain.repetition_penalty),
            ..plain
        };
        config.validate().is_ok().then_some(config)
    }

    /// What people call it.
    pub fn name(&self) -> &str {
        self.loaded.name()
    }

    /// What it takes, in words: `text and images`.
    pub fn takes(&self) -> String {
        self.loaded.takes()
    }

    /// Tokens that a conversation can have, its answers included.
    pub fn context(&self) -> usize {
        self.loaded.context()
    }

    /// The ids of a text, with the special tokens that the tokenizer adds by itself. Special tokens that are written out in the text stay text.
    ///
    /// ```
    /// # fn main() -> Result<(), qhx::Error> {
    /// let model = qhx::Model::open("builtin")?;
    /// let ids = model.tokenize("The capital of Portugal")?;
    /// assert_eq!(model.detokenize(&ids)?, "The capital of Portugal");
    /// # Ok(()) }
    /// ```
    pub fn tokenize(&self, text: &str) -> Result<Vec<u32>, Error> {
        let tokenizer = self.loaded.tokenizer().ok_or(qhx_runtime::Error::NoTokenizer { what: "a text" })?;
        Ok(tokenizer.encode(text, true, SpecialTokens::AsText).map_err(qhx_runtime::Error::from)?)
    }

    /// The text of ids, without special tokens.
    pub fn detokenize(&self, ids: &[u32]) -> Result<String, Error> {
        let tokenizer = self.loaded.tokenizer().ok_or(qhx_runtime::Error::NoTokenizer { what: "a text" })?;
        Ok(tokenizer.decode(ids, true).map_err(qhx_runtime::Error::from)?)
    }

    /// Reads an image file (PNG, JPEG, WebP, GIF) for this model.
    pub fn image(&self, path: impl AsRef<Path>) -> Result<Medium, Error> {
        Ok(messages::open_medium(MediaKind::Image, path.as_ref(), &self.bundle)?)
    }

    /// Reads a sound file (WAV, FLAC, MP3, Ogg Vorbis) for this model. One longer than the model takes at once is an error: see [`windows`](crate::windows).
    pub fn sound(&self, path: impl AsRef<Path>) -> Result<Medium, Error> {
        Ok(messages::open_medium(MediaKind::Audio, path.as_ref(), &self.bundle)?)
    }

    /// Decodes the bytes of an image file. `name` is for errors.
    pub fn image_from_bytes(&self, name: &str, bytes: &[u8]) -> Result<Medium, Error> {
        Ok(Medium::decode(MediaKind::Image, name, bytes.to_vec(), self.name(), self.loaded.media())?)
    }

    /// Decodes the bytes of a sound file. `name` is for errors.
    pub fn sound_from_bytes(&self, name: &str, bytes: Vec<u8>) -> Result<Medium, Error> {
        Ok(Medium::decode(MediaKind::Audio, name, bytes, self.name(), self.loaded.media())?)
    }

    /// Answers the prompts of the oracle that the bundle carries and compares tokens, logits and stages with what was recorded when it was made.
    ///
    /// ```
    /// # fn main() -> Result<(), qhx::Error> {
    /// # #[cfg(feature = "cpu")] {
    /// let report = qhx::Model::open("builtin")?.verify()?;
    /// assert!(report.passed, "{}", report.result);
    /// # }
    /// # Ok(()) }
    /// ```
    pub fn verify(&self) -> Result<verify::Report, Error> {
        Ok(verify::replay(&self.bundle, &self.loaded, &Cancel::new(), &mut |_, _| {})?)
    }

    /// What answers many requests at once on this model: [`Model::complete`] and [`Model::completion`] use it. It starts when it is first asked for.
    pub fn engine(&self) -> Result<Engine, Error> {
        let mut engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(engine) = &*engine {
            return Ok(engine.clone());
        }
        let started = Engine::start(self.loaded.clone(), self.engine_options.clone())?;
        Ok(engine.insert(started).clone())
    }

    /// How it writes reasoning and tool calls: found out from its chat template.
    pub fn reply_format(&self) -> &ReplyFormat {
        self.loaded.reply_format()
    }

    /// How probable each of some ids is behind those before it, with the `top` most probable at its place: of all but the first.
    ///
    /// ```
    /// # fn main() -> Result<(), qhx::Error> {
    /// let model = qhx::Model::open("builtin")?;
    /// let ids = model.tokenize("The capital of Portugal")?;
    /// let scores = model.score(&ids, 1)?;
    /// assert!(scores.len() == ids.len() - 1 && scores.iter().all(|score| score.log_prob <= score.top[0].1));
    /// # Ok(()) }
    /// ```
    pub fn score(&self, ids: &[u32], top: usize) -> Result<Vec<TokenLogProbs>, Error> {
        Ok(self.loaded.score(ids, top, &Cancel::new())?)
    }

    /// The bundle that it was loaded from.
    pub fn bundle(&self) -> &Bundle {
        &self.bundle
    }

    /// The model as the runtime knows it: sessions, logits, placement, memory.
    pub fn runtime(&self) -> &qhx_runtime::Model {
        &self.loaded
    }
}

/// Answers that share the work where nobody asks for another number.
const DEFAULT_SESSIONS: usize = 8;

/// How a model is to be opened and loaded. What is not set is chosen for the model and the machine.
///
/// ```
/// # fn main() -> Result<(), qhx::Error> {
/// let model = qhx::Model::options().threads(2).context(512).open("builtin")?;
/// assert_eq!(model.context(), 512);
/// # Ok(()) }
/// ```
#[must_use]
pub struct ModelOptions<'a> {
    load: LoadOptions,
    opener: Opener<'a>,
    engine: EngineOptions,
}

impl Default for ModelOptions<'_> {
    fn default() -> Self {
        Self {
            load: LoadOptions { sessions: DEFAULT_SESSIONS, ..LoadOptions::default() },
            opener: Opener::new(Places::default()),
            engine: EngineOptions::default(),
        }
    }
}

impl<'a> ModelOptions<'a> {
    /// Where it runs.
    pub fn device(self, device: DeviceChoice) -> Self {
        Self { load: LoadOptions { device, ..self.load }, opener: self.opener.device(device), ..self }
    }

    /// CPU threads.
    pub fn threads(mut self, threads: usize) -> Self {
        self.load.threads = Some(threads);
        self
    }

    /// The longest conversation, in tokens. The default is the model's own limit, at most 4,096: memory grows with it.
    pub fn context(mut self, tokens: usize) -> Self {
        self.load.context = Some(tokens);
        self
    }

    /// How many answers are made at once; further ones wait for their turn.
    pub fn sessions(mut self, sessions: usize) -> Self {
        self.load.sessions = sessions;
        self
    }

    /// How requests that run at the same time are served.
    pub fn engine(mut self, options: EngineOptions) -> Self {
        self.engine = options;
        self
    }

    /// All settings of loading at once.
    pub fn load_options(mut self, options: LoadOptions) -> Self {
        self.opener = self.opener.device(options.device).npu(options.npu.clone());
        self.load = options;
        self
    }

    /// Prompt tokens per call.
    pub fn chunk(mut self, tokens: usize) -> Self {
        self.load.chunk = tokens;
        self
    }

    /// Which stage runs where.
    pub fn placement(mut self, rules: Rules) -> Self {
        self.load.placement = Some(rules);
        self
    }

    /// Loads the model even if it does not fit into memory: it may run, slowly, from the disk.
    pub fn overcommit(mut self) -> Self {
        self.load.overcommit = true;
        self
    }

    /// Where QNN's libraries are, and what the NPU is to be.
    pub fn npu(self, settings: NpuSettings) -> Self {
        Self { load: LoadOptions { npu: settings.clone(), ..self.load }, opener: self.opener.npu(settings), ..self }
    }

    /// How a graphics processor is to be used.
    pub fn gpu(mut self, settings: GpuSettings) -> Self {
        self.load.gpu = settings;
        self
    }

    /// Where models are looked for and kept.
    pub fn places(self, places: Places) -> Self {
        Self { opener: self.opener.places(places), ..self }
    }

    /// Lets another thread stop the opening.
    pub fn cancel(self, cancel: Cancel) -> Self {
        Self { opener: self.opener.cancel(cancel), ..self }
    }

    /// Tells what is done on the way, with the progress of forging.
    pub fn on_event(self, on_event: impl FnMut(OpenEvent<'_>) + 'a) -> Self {
        Self { opener: self.opener.on_event(on_event), ..self }
    }

    /// Opens and loads the model that `reference` names: see [`Model::open`].
    pub fn open(mut self, reference: impl AsRef<Path>) -> Result<Model, Error> {
        let bundle = self.opener.open(reference)?.bundle;
        self.load(bundle)
    }

    /// Loads a bundle that is open.
    pub fn load(self, bundle: Bundle) -> Result<Model, Error> {
        let loaded = qhx_runtime::Model::load(&bundle, &self.load)?;
        Ok(Model { loaded, bundle: Arc::new(bundle), engine: Arc::default(), engine_options: self.engine })
    }
}

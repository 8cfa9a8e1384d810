//! The models of a server: loaded when they are first asked for, as many at a time as the memory budget holds.

use crate::{
    ServerOptions,
    error::{ApiError, without_folders},
};
use axum::http::StatusCode;
use qhx::{
    Cancel, Error, Model, OpenEvent, Opener,
    bundle::{Bundle, manifest::TEXT_PROGRAM},
    runtime::LoadPlan,
};
use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant, SystemTime},
};

/// A model that failed to load is tried again after so long.
const TRY_AGAIN: Duration = Duration::from_secs(10);

/// The models.
pub(crate) struct Models {
    entries: Vec<Arc<Entry>>,
    options: ServerOptions,
    /// Models are loaded one after the other, so that each sees what memory there is.
    loading: Mutex<()>,
    cancel: Cancel,
}

/// A model that is served.
pub(crate) struct Entry {
    /// What clients call it.
    pub(crate) name: String,
    reference: PathBuf,
    pub(crate) since: SystemTime,
    state: Mutex<State>,
}

enum State {
    Unloaded,
    /// What is being done.
    Loading(String),
    Ready(Ready),
    Failed {
        message: String,
        at: Instant,
    },
}

struct Ready {
    model: Model,
    bytes: u64,
    last_used: Instant,
    keep_alive: Option<Duration>,
    /// A clone for each request.
    users: Arc<()>,
}

impl Ready {
    fn is_idle(&self) -> bool {
        Arc::strong_count(&self.users) == 1
    }
}

/// A loaded model that is not unloaded while this lives.
#[derive(Clone)]
pub(crate) struct InUse {
    pub(crate) model: Model,
    pub(crate) entry: Arc<Entry>,
    _user: Arc<()>,
}

/// What is known of a model without loading it.
pub(crate) struct Status {
    /// `unloaded`, `loading`, `ready`, `failed`.
    pub(crate) state: &'static str,
    /// What is being done, or went wrong.
    pub(crate) about: Option<String>,
    pub(crate) model: Option<Model>,
    pub(crate) bytes: u64,
    pub(crate) is_idle: bool,
    pub(crate) last_used: Option<Instant>,
    pub(crate) keep_alive: Option<Duration>,
}

impl Entry {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn status(&self) -> Status {
        let status = |state, about| Status { state, about, model: None, bytes: 0, is_idle: true, last_used: None, keep_alive: None };
        match &*self.state() {
            State::Unloaded => status("unloaded", None),
            State::Loading(doing) => status("loading", Some(doing.clone())),
            State::Failed { message, .. } => status("failed", Some(message.clone())),
            State::Ready(ready) => Status {
                model: Some(ready.model.clone()),
                bytes: ready.bytes,
                is_idle: ready.is_idle(),
                last_used: Some(ready.last_used),
                keep_alive: ready.keep_alive,
                ..status("ready", None)
            },
        }
    }

    /// Unloads it `after` so long without requests, or at once if that is zero and nobody uses it.
    pub(crate) fn keep_alive(&self, after: Option<Duration>) {
        if let State::Ready(ready) = &mut *self.state() {
            ready.keep_alive = after;
        }
    }

    /// Takes the model out, if it is loaded and nobody uses it.
    fn unload_if(&self, condition: impl FnOnce(&Ready) -> bool) -> bool {
        let mut state = self.state();
        match &*state {
            State::Ready(ready) if ready.is_idle() && condition(ready) => {
                let before = std::mem::replace(&mut *state, State::Unloaded);
                drop(state);
                // Ends its engine's thread.
                drop(before);
                true
            }
            _ => false,
        }
    }
}

impl Models {
    pub(crate) fn new(options: &ServerOptions, cancel: Cancel) -> Self {
        let mut names: Vec<String> = Vec::new();
        for reference in &options.models {
            let base = name_of(reference);
            let taken = |name: &String| names.contains(name);
            let name = Some(base.clone()).filter(|name| !taken(name));
            let name = name.or_else(|| (2..).map(|number| format!("{base}-{number}")).find(|name| !taken(name)));
            names.extend(name);
        }
        let entry = |(name, reference): (String, &PathBuf)| {
            Arc::new(Entry { name, reference: reference.clone(), since: SystemTime::now(), state: Mutex::new(State::Unloaded) })
        };
        let entries = names.into_iter().zip(&options.models).map(entry).collect();
        Self { entries, options: options.clone(), loading: Mutex::new(()), cancel }
    }

    pub(crate) fn entries(&self) -> &[Arc<Entry>] {
        &self.entries
    }

    /// The model of a name; the first where none is given.
    pub(crate) fn find(&self, name: Option<&str>) -> Result<&Arc<Entry>, ApiError> {
        let found = match name {
            None => self.entries.first(),
            Some(name) => {
                let plain = name.strip_suffix(":latest").unwrap_or(name);
                let is_it = |entry: &&Arc<Entry>| entry.name == name || entry.name == plain || entry.reference.as_os_str() == name;
                self.entries.iter().find(is_it)
            }
        };
        found.ok_or_else(|| {
            let names: Vec<&str> = self.entries.iter().map(|entry| entry.name.as_str()).collect();
            let message = format!("there is no model `{}` here; there is {}", name.unwrap_or_default(), names.join(", "));
            ApiError { param: Some("model".to_owned()), ..ApiError::new(StatusCode::NOT_FOUND, message) }.code("model_not_found")
        })
    }

    /// A model, ready. One that is not loaded begins to load, and the request is to come again.
    pub(crate) fn get(self: &Arc<Self>, name: Option<&str>) -> Result<InUse, ApiError> {
        let entry = self.find(name)?;
        let loading = |name: &str, doing: &str| {
            let message = format!("the model `{name}` is being loaded: {doing}");
            ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).code("model_loading").retry_after(2)
        };
        let mut state = entry.state();
        match &mut *state {
            State::Ready(ready) => {
                ready.last_used = Instant::now();
                return Ok(InUse { model: ready.model.clone(), entry: entry.clone(), _user: ready.users.clone() });
            }
            State::Loading(doing) => return Err(loading(&entry.name, doing)),
            State::Failed { message, at } if at.elapsed() < TRY_AGAIN => {
                let message = format!("the model `{}` cannot be loaded: {message}", entry.name);
                return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).code("model_failed").retry_after(TRY_AGAIN.as_secs()));
            }
            State::Unloaded | State::Failed { .. } => {}
        }
        *state = State::Loading("waiting".to_owned());
        drop(state);
        let (models, begun) = (self.clone(), entry.clone());
        let started = thread::Builder::new().name("qhx-load".into()).spawn(move || models.load(&begun));
        if let Err(error) = started {
            *entry.state() = State::Unloaded;
            return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, format!("cannot start a thread: {error}")).retry_after(1));
        }
        Err(loading(&entry.name, "it was not in memory"))
    }

    /// Loads a model on this thread, and says what went wrong.
    pub(crate) fn load(&self, entry: &Entry) -> Option<String> {
        let _one_at_a_time = self.loading.lock().unwrap_or_else(PoisonError::into_inner);
        let began = Instant::now();
        let tell = |doing: String| *entry.state() = State::Loading(doing);
        tell("opening".to_owned());
        let loaded = self.try_load(entry, &tell);
        let (state, problem) = match loaded {
            Ok((model, bytes)) => {
                tracing::info!(model = entry.name, seconds = began.elapsed().as_secs_f64(), bytes, "loaded");
                let (last_used, users) = (Instant::now(), Arc::new(()));
                (State::Ready(Ready { model, bytes, last_used, keep_alive: self.options.keep_alive, users }), None)
            }
            Err(error) => {
                tracing::warn!(model = entry.name, error = %error, "cannot be loaded");
                (State::Failed { message: without_folders(&error.to_string()), at: Instant::now() }, Some(error.to_string()))
            }
        };
        *entry.state() = state;
        problem
    }

    fn try_load(&self, entry: &Entry, tell: &dyn Fn(String)) -> Result<(Model, u64), Error> {
        let ServerOptions { load, engine, places, .. } = &self.options;
        let mut opener = Opener::new(places.clone()).device(load.device).npu(load.npu.clone()).cancel(self.cancel.clone());
        opener = opener.on_event(|event| match event {
            OpenEvent::Forging { .. } => tell("forging the checkpoint into a bundle".to_owned()),
            OpenEvent::Writing(progress) => tell(format!("writing the bundle: {} of {} bytes", progress.done, progress.total)),
            OpenEvent::Gating(_) => tell("running the gate".to_owned()),
            _ => {}
        });
        let bundle = opener.open(&entry.reference)?.bundle;
        let bytes = self.needs(&bundle)?;
        tell("making room".to_owned());
        self.make_room(bytes)?;
        tell("loading".to_owned());
        let model = Model::options().load_options(load.clone()).engine(engine.clone()).load(bundle)?;
        // Its thread is there before the first request.
        model.engine()?;
        Ok((model, bytes))
    }

    /// Bytes that a model takes once it is loaded.
    fn needs(&self, bundle: &Bundle) -> Result<u64, Error> {
        let Some(program) = bundle.program(TEXT_PROGRAM) else { return Ok(0) };
        let options = self.options.load.of_bundle(bundle)?;
        Ok(LoadPlan::new(program, bundle.manifest().model.context_length, &options)?.memory.total_bytes)
    }

    /// Unloads idle models, the least recently used first, until so many bytes are free.
    fn make_room(&self, bytes: u64) -> Result<(), Error> {
        let Some(budget) = self.options.memory_budget else { return Ok(()) };
        loop {
            let loaded: Vec<(&Arc<Entry>, Status)> =
                self.entries.iter().map(|entry| (entry, entry.status())).filter(|(_, status)| status.model.is_some()).collect();
            let held: u64 = loaded.iter().map(|(_, status)| status.bytes).sum();
            if held + bytes <= budget {
                return Ok(());
            }
            let oldest = loaded.iter().filter(|(_, status)| status.is_idle).min_by_key(|(_, status)| status.last_used);
            let Some((entry, _)) = oldest else {
                let found = format!("{held} bytes of other models in use, and {bytes} more");
                let expected = format!("no more than the memory budget of {budget} bytes");
                return Err(qhx::runtime::Error::Option { option: "memory", found, expected }.into());
            };
            // The status keeps a model alive.
            let entry = (*entry).clone();
            drop(loaded);
            if entry.unload_if(|_| true) {
                tracing::info!(model = entry.name, "unloaded to make room");
            }
        }
    }

    /// Unloads what nobody has used for long enough.
    pub(crate) fn unload_idle(&self) {
        for entry in &self.entries {
            let is_due = |ready: &Ready| ready.keep_alive.is_some_and(|after| ready.last_used.elapsed() >= after);
            if entry.unload_if(is_due) {
                tracing::info!(model = entry.name, "unloaded: nobody used it");
            }
        }
    }
}

/// What clients call a model: a repository's name, or that of the file or folder.
fn name_of(reference: &Path) -> String {
    let text = reference.to_string_lossy();
    if qhx::is_repository(&text) && !reference.exists() {
        return text.into_owned();
    }
    let name = reference.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_else(|| text.into_owned());
    name.strip_suffix(".gguf").unwrap_or(&name).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_have_names_of_their_own() {
        let options =
            ServerOptions { models: ["builtin", "a/x.gguf", "b/x", "/models/c/"].map(PathBuf::from).to_vec(), ..Default::default() };
        let models = Models::new(&options, Cancel::new());
        let names: Vec<&str> = models.entries().iter().map(|entry| entry.name.as_str()).collect();
        assert_eq!(names[0], "builtin");
        assert_eq!(names[3], "c");
        assert!(names[1] != names[2], "{names:?}");
        assert_eq!(models.find(None).unwrap().name, "builtin");
        assert_eq!(models.find(Some("c:latest")).unwrap().name, "c");
        assert_eq!(models.find(Some("a/x.gguf")).unwrap().name, names[1]);
        let missing = models.find(Some("gpt-4")).err().unwrap();
        assert!(missing.status == 404 && missing.message.contains("`gpt-4`") && missing.message.contains("builtin"), "{missing:?}");
    }
}

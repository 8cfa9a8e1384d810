//! How a server is to work.

use qhx::{Places, engine::EngineOptions, runtime::LoadOptions};
use std::{path::PathBuf, time::Duration};

/// How a server is to work.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ServerOptions {
    /// The models that are served: what [`qhx::Model::open`] takes. The first is meant where a request names none.
    pub models: Vec<PathBuf>,
    /// How each is loaded.
    pub load: LoadOptions,
    /// How each answers.
    pub engine: EngineOptions,
    /// Where models are looked for and kept.
    pub places: Places,
    /// Keys of which a request must bring one; none: everybody may ask.
    pub keys: Vec<String>,
    /// Let requests with different keys share what was computed for the same beginning. How long an answer takes then tells whether somebody else asked the same.
    pub share_prefixes: bool,
    /// Bytes that the body of a request may have.
    pub body_bytes: usize,
    /// Connections at a time.
    pub connections: usize,
    /// The folder of which messages may name image and sound files; none: media come with the messages.
    pub media_folder: Option<PathBuf>,
    /// Hosts that images and sounds may be fetched from: `HOST`, or `HOST:PORT`; none: nothing is fetched.
    pub media_hosts: Vec<String>,
    /// Bytes that all loaded models may take together; none: as much as there is.
    pub memory_budget: Option<u64>,
    /// A model that nobody has used for so long is unloaded; none: it stays until its memory is needed.
    pub keep_alive: Option<Duration>,
    /// How long running answers may take to finish when the server is asked to stop.
    pub drain: Duration,
    /// Called soon after a large request: what it freed may be given back to the system here, for that is a matter of the process's allocator.
    pub give_back: fn(),
    /// Log what is asked and answered.
    pub log_prompts: bool,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            models: Vec::new(),
            load: LoadOptions { sessions: 8, wanted: 32, ..LoadOptions::default() },
            engine: EngineOptions::default(),
            places: Places::default(),
            keys: Vec::new(),
            share_prefixes: false,
            body_bytes: 32 << 20,
            connections: 512,
            media_folder: None,
            media_hosts: Vec::new(),
            memory_budget: None,
            keep_alive: None,
            drain: Duration::from_secs(30),
            give_back: || {},
            log_prompts: false,
        }
    }
}

//! Folders of this machine in which models are looked for and kept.

use std::{env, path::PathBuf};

/// Where models are looked for and kept.
///
/// The default is in the user's home folder, wherever the system says that is. Variables such as `QHX_CACHE_DIR` and `HF_HOME` are not looked at: a program that
/// follows them, as the command line does, sets these fields.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Places {
    /// Keeps bundles that were forged from checkpoints, and remembers which files were found whole. Without it, checkpoints cannot be opened, and large
    /// files are hashed each time.
    pub cache: Option<PathBuf>,
    /// The cache of the Hugging Face hub, with folders such as `models--org--name`. Without it, `org/name` is not looked up.
    pub hub: Option<PathBuf>,
}

impl Default for Places {
    fn default() -> Self {
        let home = env::home_dir().filter(|home| home.is_absolute());
        let cache = if cfg!(windows) { "AppData/Local/qhx/cache" } else { ".cache/qhx" };
        Self { cache: home.as_ref().map(|home| home.join(cache)), hub: home.map(|home| home.join(".cache/huggingface/hub")) }
    }
}

impl Places {
    /// No folder at all: nothing is kept or looked up.
    pub fn none() -> Self {
        Self { cache: None, hub: None }
    }

    /// The same with another cache.
    pub fn with_cache(self, cache: impl Into<Option<PathBuf>>) -> Self {
        Self { cache: cache.into(), ..self }
    }

    /// The same with another cache of the Hugging Face hub.
    pub fn with_hub(self, hub: impl Into<Option<PathBuf>>) -> Self {
        Self { hub: hub.into(), ..self }
    }
}

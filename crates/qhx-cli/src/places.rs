//! Where models are looked for and kept: what the environment says, else the user's own folders.

use qhx::Places;
use std::{env, path::PathBuf};

/// `QHX_CACHE_DIR` or `qhx` in the user's cache folder, and the cache of the Hugging Face hub: `HF_HUB_CACHE`, or `hub` in `HF_HOME`.
pub(crate) fn places() -> Places {
    let own = Places::default();
    let user = folder("XDG_CACHE_HOME");
    let cache = folder("QHX_CACHE_DIR")
        .or_else(|| user.as_ref().map(|path| path.join("qhx")))
        .or_else(|| folder("LOCALAPPDATA").map(|path| path.join("qhx").join("cache")))
        .or_else(|| own.cache.clone());
    let hub = folder("HF_HUB_CACHE")
        .or_else(|| folder("HF_HOME").map(|path| path.join("hub")))
        .or_else(|| user.map(|path| path.join("huggingface").join("hub")))
        .or_else(|| own.hub.clone());
    own.with_cache(cache).with_hub(hub)
}

fn folder(variable: &str) -> Option<PathBuf> {
    env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute())
}

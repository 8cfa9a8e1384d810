//! Models by name, for benchmarks: the real size and architecture with random weights at w8, made once in the user's cache. Nothing is downloaded.

use crate::{
    environment,
    failure::Failure,
    forging::{self, Order},
    interrupt::Interrupt,
    output,
};
use qhx_forge::{Material, Precision};
use std::path::{Path, PathBuf};

/// Names and configurations.
const MODELS: [(&str, &str); 4] = [
    ("phi", include_str!("../../../../configs/phi-tiny-moe.json")),
    ("qwen3.5", include_str!("../../../../configs/qwen3.5-0.8b.json")),
    ("qwen3-vl", include_str!("../../../../configs/qwen3-vl-2b.json")),
    ("gemma4", include_str!("../../../../configs/gemma-4-e4b.json")),
];

/// The bundle of a model that is named, made if it is not there; none where there is a file or folder of that name, or no such model.
pub(crate) fn of_name(name: &Path, interrupt: &Interrupt) -> Result<Option<PathBuf>, Failure> {
    let Some((name, config)) = MODELS.iter().find(|(known, _)| !name.exists() && name == Path::new(known)) else { return Ok(None) };
    let no_cache = || Failure::work(format!("there is no cache folder to make {name} in")).hint("QHX_CACHE_DIR names one");
    let folder = environment::places().cache.ok_or_else(no_cache)?.join("synthetic");
    let out = folder.join(format!("{name}-w8-{}", env!("CARGO_PKG_VERSION")));
    if !out.exists() {
        output::note(&format!("making {name} with random weights in {} (once)", out.display()));
        let config = serde_json::from_str(config).map_err(|error| Failure::work(format!("the configuration of {name}: {error}")))?;
        let order = Order { out: &out, precision: Precision::W8, calibration: None, replace: false, interrupt };
        forging::ungated(&Material::Synthetic { config, seed: 0 }, order, &[])?;
    }
    Ok(Some(out))
}

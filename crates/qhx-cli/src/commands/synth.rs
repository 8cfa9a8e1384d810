//! `qhx synth`: a configuration becomes a bundle with seeded random weights.

use super::forge::BundleFlags;
use crate::{failure::Failure, interrupt::Interrupt};
use clap::Args;
use qhx_bundle::files::read_given;
use qhx_forge::{Material, ROUTER_SKEW};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The longest configuration that is read.
const MAX_CONFIG_BYTES: u64 = 32 << 20;

/// Make a bundle with random weights from a configuration, for benchmarks
///
/// The same seed gives the same weights on every machine. The manifest marks the bundle as synthetic. Its programs are those that `qhx forge` makes of a checkpoint with that configuration (without
/// --target): rotated at integer precisions, and at w4 with some matrices in more bits.
#[derive(Args)]
#[command(after_help = "Example:\n  qhx synth ./Qwen3-4B/config.json --out synthetic-4b --precision w8 --seed 7")]
pub(crate) struct Synth {
    /// Configuration, as in a Hugging Face folder
    #[arg(value_name = "CONFIG.json")]
    config: PathBuf,
    #[command(flatten)]
    bundle: BundleFlags,
    /// Random seed
    #[arg(long, default_value_t = 0, value_name = "N")]
    seed: u64,
    /// Let routers of a mixture choose some experts more often than others, about as often as 1 / rank^S: 1 is Zipf's law, 0 is even
    #[arg(long, value_name = "S", conflicts_with = "as_checkpoint")]
    router_skew: Option<f64>,
    /// Write a Hugging Face folder in bf16 instead of a bundle, as input for the forge
    #[arg(long)]
    as_checkpoint: bool,
}

impl Synth {
    pub(crate) fn run(&self, interrupt: &Interrupt) -> Result<(), Failure> {
        self.bundle.check()?;
        let mut config = read_config(&self.config)?;
        if let (Some(skew), Some(fields)) = (self.router_skew, config.as_object_mut()) {
            fields.insert(ROUTER_SKEW.to_owned(), skew.into());
        }
        if self.bundle.is_plan() {
            return self.bundle.print_plan(&Material::Synthetic { config, seed: self.seed }, None, interrupt);
        }
        if self.as_checkpoint {
            return self.bundle.make_checkpoint(&config, self.seed, interrupt);
        }
        self.bundle.make(&Material::Synthetic { config, seed: self.seed }, false, None, interrupt)
    }
}

/// A configuration, as in a Hugging Face folder.
pub(crate) fn read_config(path: &Path) -> Result<Value, Failure> {
    let place = path.display();
    let text = read_given(path, MAX_CONFIG_BYTES).map_err(|error| Failure::from(error).hint("give the config.json of a model"))?;
    serde_json::from_slice(&text).map_err(|error| Failure::work(format!("{place} is not valid JSON: {error}")))
}

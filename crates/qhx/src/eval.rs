//! How well a model predicts a text, and how far its predictions are from those of another model or of the checkpoint it was made from.
//!
//! ```
//! # fn main() -> Result<(), qhx::Error> {
//! # #[cfg(all(feature = "builtin", feature = "cpu"))] {
//! let model = qhx::Opener::new(qhx::Places::none()).open("builtin")?.bundle;
//! let found = qhx::eval::evaluate(&model, "The capital of Portugal is Lisbon.", qhx::eval::EvalOptions::default())?;
//! println!("{:.2}", found.scores.perplexity);
//! # }
//! # Ok(()) }
//! ```

use crate::Error;
use qhx_bundle::{Bundle, files::read_given};
use qhx_forge::{F32Reference, Material};
pub use qhx_runtime::eval::{DEFAULT_WINDOW, Divergence, EvalError, Scores};
use qhx_runtime::{
    Cancel, Language, LoadOptions, Model, ModelParts,
    eval::{ModelReference, Reference, check_tokens, compare, load_options, perplexity, window_length, windows},
    memory::bits_per_weight,
};
use serde::Serialize;
use std::{cell::RefCell, path::Path};

/// The longest text that is read from a file.
const MAX_TEXT_BYTES: u64 = 64 << 20;

/// Takes what is being done, and how many steps of how many are done.
pub type Progress<'a> = dyn FnMut(&str, usize, usize) + 'a;

/// How a text is evaluated.
#[derive(Default)]
pub struct EvalOptions<'a> {
    /// What to compare with; absent: only the perplexity is measured.
    pub against: Option<Against<'a>>,
    /// Tokens of a window; absent: [`DEFAULT_WINDOW`], or the model's context if that is smaller.
    pub window: Option<usize>,
    /// Where and how the model runs. Context and chunk are chosen for the windows.
    pub load: LoadOptions,
    /// Lets another thread stop it.
    pub cancel: Cancel,
    /// Told what is being done, and how many steps of how many are done.
    pub progress: Option<&'a mut Progress<'a>>,
}

/// What a model is compared with.
#[derive(Clone, Copy)]
pub enum Against<'a> {
    /// A checkpoint: its weights in f32, stage by stage.
    Checkpoint(&'a Material),
    /// Another bundle.
    Bundle(&'a Bundle),
}

/// What was measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Evaluation {
    /// Perplexity, and how far it is from the reference.
    #[serde(flatten)]
    pub scores: Scores,
    /// Bits that the bundle's weights take for each of their numbers, scales included.
    pub bits_per_weight: f64,
    /// Tokens of a window.
    pub window: usize,
    /// How many windows were read.
    pub windows: usize,
}

/// Evaluates a bundle on a text: see [`qhx_runtime::eval`] for what is scored.
pub fn evaluate(bundle: &Bundle, text: &str, options: EvalOptions<'_>) -> Result<Evaluation, Error> {
    let EvalOptions { against, window, load, cancel, progress } = options;
    let language = Language::new(&ModelParts::of(bundle)?)?;
    let length = window_length(&language, window).map_err(qhx_runtime::Error::from)?;
    let windows = windows(&language, text, length)?;
    let load = |bundle: &Bundle| {
        let options = load_options(load.clone(), bundle.manifest().model.vocab_size, length);
        Model::load(bundle, &options)
    };
    // Reading with the reference and scoring take turns.
    let progress = RefCell::new(progress);
    let tell = |what: &str, done: usize, all: usize| {
        if let Some(progress) = &mut *progress.borrow_mut() {
            progress(what, done, all);
        }
    };
    let mut scored = |done, all| tell("scoring tokens", done, all);
    let scores = match against {
        None => perplexity(&load(bundle)?, &windows, &cancel, &mut scored)?,
        Some(Against::Bundle(other)) => {
            let reference = load(other)?;
            let mut reference = ModelReference::new(&reference, &cancel)?;
            check_same_tokens(&language, &windows, Reference::language(&reference), text, length)?;
            compare(&load(bundle)?, &mut reference, &windows, &cancel, &mut scored)?
        }
        Some(Against::Checkpoint(material)) => {
            let read = |done, all| tell("reading the text with the f32 model", done, all);
            let mut reference = F32Reference::new(material, None, &cancel, read)?;
            check_same_tokens(&language, &windows, Reference::language(&reference), text, length)?;
            compare(&load(bundle)?, &mut reference, &windows, &cancel, &mut scored)?
        }
    };
    Ok(Evaluation { scores, bits_per_weight: bits_per_weight(bundle.programs().values()), window: length, windows: windows.len() })
}

/// Reads a text to evaluate on; `-` is stdin.
pub fn read_text(path: &Path) -> Result<String, Error> {
    let bytes = read_given(path, MAX_TEXT_BYTES)?;
    match String::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => Ok(text),
        _ => Err(Error::NotText { path: path.to_path_buf() }),
    }
}

fn check_same_tokens(
    model: &Language,
    windows_of_model: &[Vec<u32>],
    reference: &Language,
    text: &str,
    length: usize,
) -> Result<(), qhx_runtime::Error> {
    // A context that is too short shows itself when the windows are read.
    Ok(check_tokens(model, windows_of_model, reference, &windows(reference, text, length)?)?)
}

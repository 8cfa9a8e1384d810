//! Everything a model is made from, apart from a device.

use crate::Error;
use qhx_bundle::{
    Bundle, BundlePath, Manifest,
    manifest::{ChatMode, TEXT_PROGRAM},
    media::Media,
};
use qhx_ir::{Checked, Weights};
use qhx_text::{ChatTemplate, Tokenizer};
use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

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
    /// The program with which it drafts for itself, where it has one.
    pub draft: Option<DraftParts>,
    /// The id that takes the place of media placeholders where a program asks for that.
    pub pad: Option<u32>,
    /// What was prepared ahead of time.
    pub prepared: Option<PreparedFiles>,
}

/// The program with which a model drafts for itself.
#[derive(Clone)]
pub struct DraftParts {
    /// The program.
    pub program: Checked,
    /// The stage of the text program whose rows feed it.
    pub stage: String,
}

/// What was prepared ahead of time for a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PreparedFiles {
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
            .and_then(|plan| Some(PreparedFiles { folder: bundle.folder()?.to_path_buf(), prefill_min_rows: plan.prefill_min_tokens }));
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
        let draft = manifest.draft.as_ref();
        let is_tower = |name: &str| name != TEXT_PROGRAM && draft.is_none_or(|draft| draft.program != name);
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
            towers: programs.iter().filter(|(name, _)| is_tower(name)).map(|(n, p)| (n.clone(), p.clone())).collect(),
            draft: draft.and_then(|draft| Some(DraftParts { program: programs.get(&draft.program)?.clone(), stage: draft.stage.clone() })),
            pad: manifest.tokens.pad,
            prepared: None,
        })
    }
}

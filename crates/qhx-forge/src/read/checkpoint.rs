//! A checkpoint: a Hugging Face folder or a GGUF file, seen the same way.

use super::{Mapping, Problem, ReadError, TensorSource, gguf, gguf_model, gguf_tokenizer, safetensors};
use qhx_bundle::files;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// The longest configuration file that is read.
const MAX_CONFIG: u64 = 32 << 20;
/// The longest `tokenizer.json` that is read; the largest real ones have about 35 MB.
const MAX_TOKENIZER: u64 = 512 << 20;

/// The section of a configuration that is the one of a drafter, and the name before those of its tensors.
pub(crate) const DRAFTER: &str = "drafter";

/// Everything that the forge takes from a checkpoint, in the Hugging Face spelling whatever the file was.
#[derive(Debug)]
pub struct Checkpoint {
    /// The folder or file that was opened.
    pub path: PathBuf,
    /// `config.json`; for a GGUF file, what it would be.
    pub config: Value,
    /// The weights.
    pub tensors: TensorSource,
    /// `tokenizer.json`, if there is one.
    pub tokenizer_json: Option<Vec<u8>>,
    /// `tokenizer_config.json`, if there is one.
    pub tokenizer_config: Option<Value>,
    /// The Jinja template of conversations; a model without one only completes.
    pub chat_template: Option<String>,
    /// `generation_config.json`, if there is one.
    pub generation_config: Option<Value>,
    /// The tokens that end an answer, from the generation configuration, else from the configuration.
    pub eos_ids: Vec<u32>,
    /// The folder, for the files that only some families need; none for a GGUF file.
    folder: Option<PathBuf>,
}

impl Checkpoint {
    /// Opens a Hugging Face folder or a GGUF file. Weights are mapped and not read yet.
    pub fn open(path: &Path) -> Result<Self, ReadError> {
        let about = std::fs::metadata(path).map_err(|source| ReadError::Io { path: path.to_path_buf(), source })?;
        if about.is_dir() {
            return Self::open_folder(path);
        }
        match path.extension().and_then(|e| e.to_str()) {
            Some("safetensors" | "json") => {
                Err(unsupported(path, "this is one file of a Hugging Face checkpoint; give the folder that it is in"))
            }
            Some("bin" | "pt" | "pth" | "onnx") => {
                Err(unsupported(path, "qhx reads Hugging Face folders with safetensors, and GGUF files"))
            }
            _ => Self::from_gguf(Mapping::open(path)?),
        }
    }

    /// The same with the drafter that was published beside it, a checkpoint of its own: its configuration becomes the section `drafter` of this one, and its tensors are named `drafter.…`.
    pub fn with_drafter(mut self, path: &Path) -> Result<Self, ReadError> {
        let drafter = Self::open(path)?;
        self.config[DRAFTER] = drafter.config;
        self.tensors = self.tensors.with(drafter.tensors, &format!("{DRAFTER}."));
        Ok(self)
    }

    /// Reads a GGUF file that is already mapped.
    pub fn from_gguf(file: Mapping) -> Result<Self, ReadError> {
        let path = file.path().to_path_buf();
        let problem = |problem: Problem| problem.at(&path, "GGUF file");
        let parsed = gguf::parse(file.bytes()).map_err(problem)?;
        let tokenizer = gguf_tokenizer::build(&parsed.metadata).map_err(problem)?;
        let (config, tensors) = gguf_model::read(&parsed, &tokenizer, file).map_err(problem)?;
        let generation_config = json!({ "bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos });
        Ok(Self {
            path,
            config,
            tensors,
            tokenizer_json: Some(tokenizer.tokenizer_json),
            tokenizer_config: Some(tokenizer.tokenizer_config),
            chat_template: tokenizer.chat_template,
            generation_config: Some(generation_config),
            eos_ids: tokenizer.eos,
            folder: None,
        })
    }

    fn open_folder(folder: &Path) -> Result<Self, ReadError> {
        let Some(config) = optional_json(folder, "config.json")? else {
            return Err(unsupported(folder, &without_config(folder)));
        };
        let tokenizer_config = optional_json(folder, "tokenizer_config.json")?;
        let generation_config = optional_json(folder, "generation_config.json")?;
        let chat_template = chat_template(folder, tokenizer_config.as_ref())?;
        let eos_ids = eos_ids(folder, &config, generation_config.as_ref())?;
        let tokenizer_json = optional(folder, "tokenizer.json", MAX_TOKENIZER)?;
        let tensors = safetensors::open_folder(folder)?;
        Ok(Self {
            path: folder.to_path_buf(),
            config,
            tensors,
            tokenizer_json,
            tokenizer_config,
            chat_template,
            generation_config,
            eos_ids,
            folder: Some(folder.to_path_buf()),
        })
    }

    /// A further JSON file of the checkpoint (`preprocessor_config.json` …), if it has it. `name` is the plain name of a file.
    pub fn json_file(&self, name: &str) -> Result<Option<Value>, ReadError> {
        self.folder.as_deref().map_or(Ok(None), |folder| optional_json(folder, name))
    }
}

/// Reads a whole file that must not be longer than `limit`.
pub(super) fn read_limited(path: &Path, limit: u64) -> Result<Vec<u8>, ReadError> {
    files::read(path, limit).map_err(ReadError::of_file)
}

fn optional(folder: &Path, name: &str, limit: u64) -> Result<Option<Vec<u8>>, ReadError> {
    match read_limited(&folder.join(name), limit) {
        Err(ReadError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

fn optional_json(folder: &Path, name: &str) -> Result<Option<Value>, ReadError> {
    let Some(bytes) = optional(folder, name, MAX_CONFIG)? else { return Ok(None) };
    let problem = |reason| Problem::Malformed(reason).at(&folder.join(name), "JSON file");
    match serde_json::from_slice(&bytes) {
        Ok(value @ Value::Object(_)) => Ok(Some(value)),
        Ok(_) => Err(problem("it should be an object".to_string())),
        Err(error) => Err(problem(error.to_string())),
    }
}

/// The template has its own file in newer checkpoints, and is a field of the tokenizer's (or processor's) configuration in older ones.
fn chat_template(folder: &Path, tokenizer_config: Option<&Value>) -> Result<Option<String>, ReadError> {
    if let Some(bytes) = optional(folder, "chat_template.jinja", MAX_CONFIG)? {
        let path = folder.join("chat_template.jinja");
        let text =
            String::from_utf8(bytes).map_err(|_| Problem::Malformed("it is not valid UTF-8".to_string()).at(&path, "chat template"))?;
        return Ok(Some(text));
    }
    let field = |config: &Value| match config.get("chat_template") {
        Some(Value::String(template)) => Some(template.clone()),
        // Several, by name.
        Some(Value::Array(templates)) => {
            let default = templates.iter().find(|t| t["name"] == "default").or(templates.first());
            default.and_then(|t| t["template"].as_str()).map(str::to_string)
        }
        _ => None,
    };
    match tokenizer_config.and_then(field) {
        Some(template) => Ok(Some(template)),
        None => Ok(optional_json(folder, "chat_template.json")?.as_ref().and_then(field)),
    }
}

fn eos_ids(folder: &Path, config: &Value, generation_config: Option<&Value>) -> Result<Vec<u32>, ReadError> {
    let places = [
        (generation_config.map(|g| &g["eos_token_id"]), "generation_config.json"),
        (Some(&config["eos_token_id"]), "config.json"),
        (Some(&config["text_config"]["eos_token_id"]), "config.json"),
    ];
    let Some((value, file)) = places.into_iter().find_map(|(v, file)| v.filter(|v| !v.is_null()).map(|v| (v, file))) else {
        return Ok(Vec::new());
    };
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    let ids = match value {
        Value::Array(ids) => ids.iter().map(id).collect(),
        one => id(one).map(|id| vec![id]),
    };
    let reason = || format!("`eos_token_id` should be a token id or a list of them, but is {}", super::shown(&value.to_string()));
    ids.ok_or_else(|| Problem::Malformed(reason()).at(&folder.join(file), "model configuration"))
}

/// What to say of a folder that is not a checkpoint: the usual mistake is to give the folder of a GGUF file.
fn without_config(folder: &Path) -> String {
    let gguf = std::fs::read_dir(folder).ok().and_then(|items| {
        let paths = items.filter_map(|item| Some(item.ok()?.path()));
        paths.filter(|path| path.extension().is_some_and(|e| e == "gguf")).min()
    });
    match gguf {
        Some(file) => format!("this folder has no config.json but a GGUF file; give `{}` itself", file.display()),
        None => "this folder has no config.json, so it is not a Hugging Face checkpoint".to_string(),
    }
}

fn unsupported(path: &Path, reason: &str) -> ReadError {
    ReadError::Unsupported { path: path.to_path_buf(), reason: reason.to_string() }
}

#[cfg(test)]
mod tests;

//! The good files that mutations and fuzzers begin with: fixtures, demo models, `fuzz/seeds`, and bundles forged from the fixtures.

use crate::files::{Files, read_folder, repository};
use qhx_forge::{ForgeOptions, Precision, forge_checkpoint};
use std::{fs, io, path::Path};

/// Everything that a class may start from.
pub(crate) struct Seeds {
    /// Hugging Face folders, small.
    pub(crate) checkpoints: Vec<Files>,
    /// GGUF files: two of a few kilobytes, two whole models.
    pub(crate) gguf: Vec<Vec<u8>>,
    /// Safetensors files alone.
    pub(crate) safetensors: Vec<Vec<u8>>,
    /// Configurations of published size.
    pub(crate) configs: Vec<Vec<u8>>,
    /// Bundles of every family, at several precisions.
    pub(crate) bundles: Vec<Files>,
    /// Real chat templates.
    pub(crate) templates: Vec<String>,
    /// Images and sounds in every format.
    pub(crate) media: Vec<Vec<u8>>,
    /// Forms, each after a line with its content type.
    pub(crate) forms: Vec<Vec<u8>>,
}

/// What bundles are forged from, and how.
const BUNDLES: [(&str, Precision); 9] = [
    ("fixtures/llama", Precision::F32),
    ("fixtures/llama-gguf/model.gguf", Precision::Native),
    ("fixtures/qwen3", Precision::W4),
    ("fixtures/qwen3-gguf/model.gguf", Precision::Native),
    ("fixtures/qwen3_vl", Precision::W8),
    ("fixtures/phimoe", Precision::MoeI8),
    ("fixtures/phimoe_longrope", Precision::F32),
    ("fixtures/qwen3_5", Precision::W4Row),
    ("fixtures/gemma4", Precision::F16),
];

const CHECKPOINTS: [&str; 7] = ["llama", "qwen3", "qwen3_vl", "phimoe", "phimoe_longrope", "qwen3_5", "gemma4"];

/// Forges the bundles of [`Seeds::bundles`] into a folder, once for all workers.
pub(crate) fn forge_bundles(folder: &Path) -> Result<(), String> {
    for (source, precision) in BUNDLES {
        let out = folder.join(name_of(source));
        let mut options = ForgeOptions { replace: true, ..ForgeOptions::new(&out, precision) };
        forge_checkpoint(&repository().join(source), &mut options).map_err(|error| format!("{source}: {error}"))?;
    }
    Ok(())
}

impl Seeds {
    /// Reads them all; `bundles` is where [`forge_bundles`] put its own.
    pub(crate) fn read(bundles: &Path) -> io::Result<Self> {
        let root = repository();
        let all = |_: &str| true;
        let contents = |folder: &Path| Ok::<_, io::Error>(read_folder(folder, &all)?.into_values().collect::<Vec<_>>());
        let fixtures = root.join("fixtures");
        let checkpoints: Vec<Files> =
            CHECKPOINTS.iter().map(|name| read_folder(&fixtures.join(name), &is_of_checkpoint)).collect::<io::Result<_>>()?;
        let mut gguf = contents(&root.join("fuzz/seeds/gguf"))?;
        for model in ["llama-gguf", "qwen3-gguf"] {
            gguf.push(fs::read(fixtures.join(model).join("model.gguf"))?);
        }
        let mut safetensors = contents(&root.join("fuzz/seeds/safetensors_header"))?;
        safetensors.push(fs::read(fixtures.join("phimoe/int8.safetensors"))?);
        let bundles: Vec<Files> =
            BUNDLES.iter().map(|(source, _)| read_folder(&bundles.join(name_of(source)), &all)).collect::<io::Result<_>>()?;
        let is_template = |name: &str| name.ends_with("chat_template.jinja");
        let templates = [read_folder(&fixtures, &is_template)?, read_folder(&root.join("demo"), &is_template)?];
        let templates = templates.into_iter().flat_map(|files| files.into_values());
        let sound = fs::read(fixtures.join("media/files/s16.wav"))?;
        Ok(Self {
            checkpoints,
            gguf,
            safetensors,
            configs: contents(&root.join("configs"))?,
            bundles,
            templates: templates.map(|text| String::from_utf8_lossy(&text).into_owned()).collect(),
            media: contents(&fixtures.join("media/files"))?,
            forms: vec![form("edge", "file", &sound), form("\"--a b\"; charset=utf-8", "prompt", b"Say it.\r\n--")],
        })
    }
}

/// A form of two fields.
fn form(boundary: &str, name: &str, value: &[u8]) -> Vec<u8> {
    let edge = boundary.split(';').next().unwrap_or_default().trim_matches('"');
    let field = |name: &str| format!("--{edge}\r\nContent-Disposition: form-data; name=\"{name}\"; filename=\"a.wav\"\r\n\r\n");
    let kind = format!("multipart/form-data; boundary={boundary}\n");
    [(kind + &field("response_format") + "text\r\n" + &field(name)).as_bytes(), value, format!("\r\n--{edge}--\r\n").as_bytes()].concat()
}

/// The fixture's name.
fn name_of(source: &str) -> &str {
    source.split('/').nth(1).unwrap_or(source)
}

/// Whether a file of a fixture belongs to the checkpoint, and not to the oracle beside it.
fn is_of_checkpoint(name: &str) -> bool {
    let oracle = ["oracle", "media", "int8", "ring", "tokenizer_cases"];
    !oracle.iter().any(|beginning| name.starts_with(beginning))
}

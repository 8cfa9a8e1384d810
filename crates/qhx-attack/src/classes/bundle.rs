//! Bundles whose files were changed and whose checksums were made to agree: integrity passes, and everything behind it must hold.

use super::{Bench, Case, Outcome, refused, safetensors::mutate_safetensors, template};
use crate::{files::Files, mutate::mutate_json, random::Random, seeds::Seeds};
use qhx_attack::probes;
use qhx_bundle::{Bundle, BundlePath, Digest, OpenOptions, Verify, manifest::MANIFEST_FILE};
use qhx_ir::{AlignedBytes, Bytes};
use qhx_runtime::{
    Cancel, DeviceChoice, GenerateOptions, LoadOptions, MediaKind, Medium, Model, Prompt, generate,
    media::{Image, Sound},
    text::{Chat, Message},
};
use serde_json::{Value, json};
use std::path::Path;

const COMMANDS: [&str; 6] = [
    "generate {case} --ids 1,2,3 --max-new 2 --context 32 --json",
    "inspect {case} --json",
    "verify {case} --json",
    "doctor {case} --json",
    "trace {case} --ids 1,2,3 --out {out} --json",
    "bench {case} -p 4 -n 2 -r 1 --json",
];

pub(super) fn make(seeds: &Seeds, random: &mut Random) -> Case {
    let mut files = random.pick(&seeds.bundles).clone();
    let names: Vec<String> = files.keys().cloned().collect();
    for _ in 0..1 + random.below(2) {
        // The manifest comes last: see below.
        let name = random.pick(&names);
        if let Some(content) = files.get_mut(name).filter(|_| name != MANIFEST_FILE) {
            change(name, content, seeds, random);
        }
    }
    rehash(&mut files);
    if random.one_in(2) {
        let manifest = files.entry(MANIFEST_FILE.into()).or_default();
        *manifest = mutate_json(manifest, random);
    }
    Case { files, ..Case::default() }.command(random.word(&COMMANDS))
}

/// As [`make`], with changes to programs alone.
pub(super) fn make_program(seeds: &Seeds, random: &mut Random) -> Case {
    let mut files = random.pick(&seeds.bundles).clone();
    let programs: Vec<String> = files.keys().filter(|name| name.starts_with("programs/")).cloned().collect();
    if let Some(content) = files.get_mut(random.pick(&programs)) {
        *content = mutate_json(content, random);
    }
    rehash(&mut files);
    Case { files, ..Case::default() }.command(random.word(&COMMANDS))
}

/// Changes a file of a bundle, as its kind can be.
fn change(name: &str, content: &mut Vec<u8>, seeds: &Seeds, random: &mut Random) {
    match name {
        name if name.ends_with(".safetensors") && random.one_in(2) => spoil_numbers(content, random),
        name if name.ends_with(".safetensors") => mutate_safetensors(content, random),
        name if name.ends_with(".jinja") => *content = template::hostile(seeds, random).into_bytes(),
        _ => *content = mutate_json(content, random),
    }
}

/// Puts numbers that are none, or far too large, among the weights.
fn spoil_numbers(file: &mut [u8], random: &mut Random) {
    const DATA: usize = 4096;
    for _ in 0..random.length(1000) {
        if file.len() < DATA + 4 {
            return;
        }
        let at = (DATA + random.below(file.len() - DATA)) / 4 * 4;
        let number = random.pick(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE, -0.0]).to_le_bytes();
        let end = (at + 4).min(file.len());
        file[at..end].copy_from_slice(&number[..end - at]);
    }
}

/// Makes the manifest agree with the files, as somebody who forges a bundle would.
pub(super) fn rehash(files: &mut Files) {
    let Some(Ok(mut manifest)) = files.get(MANIFEST_FILE).map(|text| serde_json::from_slice::<Value>(text)) else { return };
    if let Some(listed) = manifest.get_mut("files").and_then(Value::as_object_mut) {
        for (name, entry) in listed {
            if let Some(content) = files.get(name) {
                *entry = json!({ "bytes": content.len(), "sha256": Digest::of(content).to_string() });
            }
        }
    }
    files.insert(MANIFEST_FILE.into(), manifest.to_string().into_bytes());
}

pub(super) fn attempt(case: &Case, _: &Bench) -> Outcome {
    probes::manifest(case.file(MANIFEST_FILE))?;
    run(&in_memory(&case.files)?)
}

/// A bundle of files in memory.
pub(super) fn in_memory(files: &Files) -> Result<Bundle, String> {
    let files = files.iter().map(|(name, content)| {
        let path = BundlePath::new(name.as_str()).map_err(refused)?;
        Ok::<_, String>((path, Bytes::from(AlignedBytes::copy_of(content))))
    });
    Bundle::from_memory(files.collect::<Result<Vec<_>, _>>()?).map_err(refused)
}

/// A bundle on disk, opened and run.
pub(super) fn open_and_run(path: &Path) -> Outcome {
    let options = OpenOptions { verify: Verify::Always, cache_dir: None, cancel: None };
    run(&Bundle::open_with(path, &options).map_err(refused)?)
}

/// How cases load models: quickly.
pub(super) fn load_options(bundle: &Bundle) -> LoadOptions {
    let context = bundle.manifest().model.context_length.min(64);
    LoadOptions { device: DeviceChoice::Cpu, threads: Some(1), context: Some(context), chunk: 16, ..LoadOptions::default() }
}

/// Loads a bundle and lets it do everything once: answer ids, answer a message, look, hear.
fn run(bundle: &Bundle) -> Outcome {
    let model = Model::load(bundle, &load_options(bundle)).map_err(refused)?;
    let known = model.vocabulary().ids as u32;
    let ids = [1, 5, 300, 2, 7].map(|id: u32| id % known.max(1));
    let mut told = answer(&model, &Prompt::from_ids(ids.to_vec()))?;
    if model.template().is_ok() {
        // A template may refuse; what it does while it thinks is what matters.
        let prompt = Prompt::chat(&model, &Chat::new(vec![Message::new("user", "Hello there!")]));
        told += &prompt.map_err(refused).and_then(|prompt| answer(&model, &prompt)).unwrap_or_else(|reason| reason);
    }
    for kind in [MediaKind::Image, MediaKind::Audio] {
        if let Some(medium) = medium(&model, kind) {
            let soft_rows = medium.and_then(|medium| model.encode(&medium, &Cancel::default()).map_err(refused));
            told += &soft_rows.map_or_else(|reason| reason, |encoded| format!(" {kind}: {} rows", encoded.rows()));
        }
    }
    Ok(told)
}

fn answer(model: &Model, prompt: &Prompt) -> Outcome {
    let options = GenerateOptions { max_new: 3, ..GenerateOptions::default() };
    let mut session = model.session().map_err(refused)?;
    let generation = generate(&mut session, prompt, &options, &Cancel::default(), &mut |_| ()).map_err(refused)?;
    Ok(format!("{:?} {:?}", generation.ids, generation.text))
}

/// A small picture or a short sound, by the model's own front end; none where it does not take them.
fn medium(model: &Model, kind: MediaKind) -> Option<Result<Medium, String>> {
    match kind {
        MediaKind::Image => model.media().image.as_ref().map(|front_end| {
            let picture = qhx_runtime::media::Picture::from_rgb("grey", 40, 24, vec![127; 40 * 24 * 3]).map_err(refused)?;
            Ok(Medium::image("grey", Image::from_picture("grey", &picture, front_end).map_err(refused)?, front_end))
        }),
        MediaKind::Audio => model.media().audio.as_ref().map(|front_end| {
            let samples = (0..4000).map(|place| (place as f32 * 0.1).sin()).collect();
            let sound = Sound::from_samples("tone", 16_000, samples, front_end).map_err(refused)?;
            Medium::sound("tone".to_owned(), &sound, front_end).map_err(refused)
        }),
    }
}

//! Safetensors files: alone, for both readers, and as the weights of a checkpoint.

use super::{Bench, Case, Outcome, gguf::forge, refused};
use crate::{
    files::write_folder,
    mutate::{Json, NASTY_INTEGERS, mutate_bytes, mutate_json},
    random::Random,
    seeds::Seeds,
};
use qhx_attack::probes;
use qhx_forge::Material;
use serde_json::Value;

const FILE: &str = "a.safetensors";

pub(super) fn make(seeds: &Seeds, random: &mut Random) -> Case {
    if random.one_in(3) {
        let mut files = random.pick(&seeds.checkpoints).clone();
        let weights: Vec<String> = files.keys().filter(|name| name.contains("safetensors")).cloned().collect();
        let name = random.pick(&weights);
        if let Some(content) = files.get_mut(name) {
            match name.ends_with(".json") {
                true => *content = mutate_json(content, random),
                false => mutate_safetensors(content, random),
            }
        }
        let deep = random.one_in(6);
        return Case { files, deep, ..Case::default() }.command("forge {case} --out {out} --gate none --json");
    }
    let mut file = random.pick(&seeds.safetensors).clone();
    mutate_safetensors(&mut file, random);
    Case::of(FILE, file).command("diff {case}/a.safetensors {case}/a.safetensors --json")
}

/// Changes a header, what is said of its length, or any bytes.
pub(super) fn mutate_safetensors(file: &mut Vec<u8>, random: &mut Random) {
    let length = file.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes) as usize);
    let data = 8usize.saturating_add(length).min(file.len());
    match random.below(6) {
        0 => mutate_bytes(file, data, b"", random),
        1 => {
            let other = [*random.pick(&NASTY_INTEGERS), length as u64 + 1, (length as u64).wrapping_sub(1), file.len() as u64];
            file[..8].copy_from_slice(&random.pick(&other).to_le_bytes());
        }
        2 => file.truncate(random.below(file.len())),
        _ => {
            let Ok(value) = serde_json::from_slice::<Value>(&file[8..data]) else { return };
            let mut header = Json::from(&value);
            for _ in 0..1 + random.below(3) {
                header.mutate(random);
            }
            // Padded as the header was, so that the data stays where it must be.
            let mut header = header.to_string().into_bytes();
            header.resize(header.len().max(length), b' ');
            let whole = [&(header.len() as u64).to_le_bytes()[..], &header, &file[data..]].concat();
            *file = whole;
        }
    }
}

pub(super) fn attempt(case: &Case, bench: &Bench) -> Outcome {
    if case.files.contains_key("config.json") {
        let folder = bench.scratch.join("checkpoint");
        write_folder(&folder, &case.files).map_err(refused)?;
        return forge(&Material::open(&folder).map_err(refused)?, case, &bench.scratch.join("forged"));
    }
    probes::safetensors_header(case.file(FILE))
}

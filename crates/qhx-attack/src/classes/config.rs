//! The settings of a checkpoint: `config.json` and the JSON files beside it.

use super::{Bench, Case, Outcome, gguf::forge, refused};
use crate::{files::write_folder, mutate::mutate_json, random::Random, seeds::Seeds};
use qhx_forge::{Material, Precision};

const BARE: &str = "bare.json";

pub(super) fn make(seeds: &Seeds, random: &mut Random) -> Case {
    if random.one_in(4) {
        let config = mutate_json(random.pick(&seeds.configs).as_slice(), random);
        return Case::of(BARE, config).command("forge {case}/bare.json --plan --json");
    }
    let mut files = random.pick(&seeds.checkpoints).clone();
    let is_setting = |name: &&String| name.ends_with(".json") && *name != "tokenizer.json" && !name.contains("safetensors");
    let settings: Vec<String> = files.keys().filter(is_setting).cloned().collect();
    for _ in 0..1 + random.below(2) {
        let name = if random.one_in(2) { "config.json" } else { random.pick(&settings) };
        if let Some(content) = files.get_mut(name) {
            *content = mutate_json(content, random);
        }
    }
    let deep = random.one_in(4);
    Case { files, deep, ..Case::default() }.command("forge {case} --out {out} --gate none --json")
}

pub(super) fn attempt(case: &Case, bench: &Bench) -> Outcome {
    if let Some(config) = case.files.get(BARE) {
        let material = Material::Synthetic { config: serde_json::from_slice(config).map_err(refused)?, seed: 1 };
        let (programs, context) = material.checked_programs(Precision::W8).map_err(refused)?;
        return Ok(format!("{} programs, context {context}", programs.len()));
    }
    let folder = bench.scratch.join("checkpoint");
    write_folder(&folder, &case.files).map_err(refused)?;
    forge(&Material::open(&folder).map_err(refused)?, case, &bench.scratch.join("forged"))
}

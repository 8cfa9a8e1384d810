//! GGUF files: the container, its tokenizer and configuration, every number of every tensor, and the bundle that would be forged.

use super::{Bench, Case, Outcome, bundle, refused};
use crate::{
    mutate::{attack_fields, mutate_bytes},
    random::Random,
    seeds::Seeds,
};
use qhx_attack::probes;
use qhx_forge::{
    ForgeOptions, Material, Precision,
    read::{Checkpoint, Mapping},
};
use std::path::Path;

const FILE: &str = "model.gguf";
/// Most of what can be wrong stands in a file's first bytes.
const HEADER: usize = 24 << 10;

pub(super) fn make(seeds: &Seeds, random: &mut Random) -> Case {
    let mut file = random.pick(&seeds.gguf).clone();
    if random.one_in(2) {
        attack_fields(&mut file, random);
    } else {
        let within = if random.one_in(4) { file.len() } else { HEADER };
        mutate_bytes(&mut file, within, &seeds.gguf[0], random);
    }
    let precision = random.word(&["native", "w8", "f16"]);
    let deep = random.one_in(8);
    Case { deep, ..Case::of(FILE, file) }
        .command(&format!("forge {{case}}/{FILE} --out {{out}} --gate none --precision {precision} --json"))
}

pub(super) fn attempt(case: &Case, bench: &Bench) -> Outcome {
    let file = case.file(FILE);
    probes::gguf(file)?;
    let checkpoint = Checkpoint::from_gguf(Mapping::from_bytes(FILE, file.to_vec())).map_err(refused)?;
    let material = Material::Checkpoint(Box::new(checkpoint));
    forge(&material, case, &bench.scratch.join("forged"))
}

/// The programs of a checkpoint and, for a deep case, its bundle, opened and run.
pub(super) fn forge(material: &Material, case: &Case, out: &Path) -> Outcome {
    let (programs, context) = material.checked_programs(Precision::Native).map_err(refused)?;
    let shape = format!("{} programs, context {context}", programs.len());
    if !case.deep {
        return Ok(shape);
    }
    let mut options = ForgeOptions { replace: true, ..ForgeOptions::new(out, Precision::Native) };
    let forged = material.forge(&mut options).map_err(refused)?;
    let ran = bundle::open_and_run(&forged.path);
    std::fs::remove_dir_all(&forged.path).map_err(refused)?;
    ran
}

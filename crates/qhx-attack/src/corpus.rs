//! The seeds of each probe as files: what `cargo fuzz` starts from.

use crate::{files::write_folder, seeds::Seeds};
use qhx_attack::probes::PROBES;
use std::{io, path::Path};

/// The file of a tokenizer, and of a manifest.
const NAMES: [(&str, &str); 2] = [("tokenizer", "tokenizer.json"), ("manifest", "qhx.json")];

/// Writes a folder for each probe.
pub(crate) fn write(seeds: &Seeds, folder: &Path) -> io::Result<()> {
    PROBES.iter().try_for_each(|(probe, _)| {
        let files = of_probe(seeds, probe).into_iter().enumerate().map(|(number, file)| (number.to_string(), file.to_vec()));
        write_folder(&folder.join(probe), &files.collect())
    })
}

/// The good inputs of a probe.
fn of_probe<'s>(seeds: &'s Seeds, probe: &str) -> Vec<&'s [u8]> {
    let all = |files: &'s [Vec<u8>]| files.iter().map(Vec::as_slice).collect();
    match probe {
        "gguf" => all(&seeds.gguf),
        "image" | "sound" => all(&seeds.media),
        "multipart" => all(&seeds.forms),
        "safetensors_header" => all(&seeds.safetensors),
        "template" => seeds.templates.iter().map(String::as_bytes).collect(),
        _ => {
            let name = NAMES.iter().find(|(of, _)| *of == probe).map_or("", |(_, name)| name);
            seeds.bundles.iter().filter_map(|files| files.get(name)).map(Vec::as_slice).collect()
        }
    }
}

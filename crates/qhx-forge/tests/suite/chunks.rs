//! Every family and every demo model on the CPU: the logits of all rows of a prompt are the same to the last bit, however the prompt is cut into calls.

use qhx_bundle::Bundle;
use qhx_forge::{ForgeOptions, Precision, forge_checkpoint};
use qhx_runtime::{Cancel, DeviceChoice, LoadOptions, Model};
use std::path::{Path, PathBuf};

/// More than the 256 keys of a run of attention, and more than any window of these models.
const ROWS: usize = 270;

/// Ordinary tokens of all vocabularies.
fn ids() -> Vec<u32> {
    (0..ROWS as u32).map(|i| 40 + (7 * i * i + 3 * i) % 250).collect()
}

/// The logits of all rows, read in chunks, then those of some more rows that are read one by one.
fn logits(bundle: &Bundle, chunk: usize) -> Vec<u32> {
    let options = LoadOptions {
        device: DeviceChoice::Cpu,
        threads: Some(2),
        context: Some(ROWS + 8),
        chunk,
        // Logits are wanted of whole chunks, so that these are not cut further.
        wanted: chunk,
        ..LoadOptions::default()
    };
    let mut session = Model::load(bundle, &options).unwrap().session().unwrap();
    let mut bits = Vec::new();
    session.append_showing(&ids(), ROWS, &Cancel::new(), &mut |_, logits| bits.extend(logits.iter().map(|x| x.to_bits()))).unwrap();
    for id in 50..54 {
        bits.extend(session.append(&[id], &Cancel::new()).unwrap().iter().map(|x| x.to_bits()));
    }
    bits
}

fn check(source: &Path, precision: Precision) {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("bundle");
    let mut options = ForgeOptions::new(&out, precision);
    forge_checkpoint(source, &mut options).unwrap_or_else(|e| panic!("{}: {e}", source.display()));
    let bundle = Bundle::open(&out).unwrap();
    let whole = logits(&bundle, ROWS);
    assert!(whole.iter().any(|&bits| bits != whole[0]));
    for chunk in [1, 3, 64, 256] {
        let same = logits(&bundle, chunk) == whole;
        assert!(same, "{} at {precision:?}: chunks of {chunk} rows give other logits than one call", source.display());
    }
}

fn checkpoints(folder: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(folder);
    let folders = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
    folders.filter(|folder| folder.join("config.json").exists()).collect()
}

#[test]
fn every_fixture() {
    let folders = checkpoints("fixtures");
    assert!(folders.len() >= 7, "{folders:?}");
    for folder in folders {
        [Precision::F32, Precision::F16, Precision::W8, Precision::W4].into_iter().for_each(|precision| check(&folder, precision));
    }
    for name in ["llama-gguf", "qwen3-gguf"] {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name).join("model.gguf");
        check(&file, Precision::Native);
    }
}

#[test]
fn every_demo_model() {
    let folders = checkpoints("demo");
    assert!(folders.len() >= 4, "{folders:?}");
    let precisions = [Precision::W8, Precision::W4, Precision::Native];
    for (number, folder) in folders.iter().enumerate() {
        let wanted = if crate::extended() { &precisions[..] } else { &precisions[number % 2..][..1] };
        wanted.iter().for_each(|precision| check(folder, *precision));
    }
}

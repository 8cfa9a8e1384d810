//! The integrity rule: small files always, large files once for each version of them, everything on demand.

use crate::fixture::*;
use qhx_bundle::{files::Identity, *};
use qhx_ir::Encoding;
use std::{
    fs::{self, OpenOptions as FileOptions},
    io::{Seek, SeekFrom, Write},
    path::Path,
    sync::{Arc, atomic::AtomicBool},
    thread,
    time::{Duration, Instant, SystemTime},
};

/// A bundle whose weight file is large enough to be remembered.
fn write_large(place: &Path) {
    let large = program("text", &[("table", Encoding::F32, vec![600, 600])]);
    let (writer, _) = write(place, &[large], WriteOptions::default(), &mut Random(7));
    writer.finish(manifest()).unwrap();
}

/// Changes a byte of the weights, then sets the time of the last change.
fn damage(place: &Path, modified: SystemTime) {
    let mut file = FileOptions::new().write(true).open(place.join(WEIGHTS)).unwrap();
    file.seek(SeekFrom::Start(500_000)).unwrap();
    file.write_all(b"damage").unwrap();
    file.set_modified(modified).unwrap();
}

#[test]
fn large_files_are_checked_once_for_each_version() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("model");
    write_large(&place);
    let options = |verify, cache: &str| OpenOptions { verify, cache_dir: Some(dir.path().join(cache)), cancel: None };
    let open = |verify, cache: &str| Bundle::open_with(&place, &options(verify, cache));
    let memory = dir.path().join("cache/verified.txt");
    let weights = place.join(WEIGHTS);
    let identity = || Identity::of(&weights.metadata().unwrap(), &weights);
    // A file that has just been written is not remembered, but soon.
    let (began, mut bundle) = (Instant::now(), open(Verify::Once, "cache").unwrap());
    assert!(!memory.exists());
    while !memory.exists() {
        assert!(began.elapsed() < Duration::from_secs(20), "it is never remembered");
        thread::sleep(Duration::from_millis(100));
        bundle = open(Verify::Once, "cache").unwrap();
    }
    let sum = bundle.manifest().files[&path(WEIGHTS)].sha256;
    assert_eq!(fs::read_to_string(&memory).unwrap(), format!("{} {sum}\n", identity()));

    // A change that hides behind the old time of writing is found all the same.
    let old = weights.metadata().unwrap().modified().unwrap();
    damage(&place, old);
    assert_eq!(weights.metadata().unwrap().modified().unwrap(), old);
    assert!(matches!(open(Verify::Once, "cache"), Err(BundleError::Sum { .. })));
    assert!(matches!(open(Verify::Once, "cache"), Err(BundleError::Sum { .. })), "a failed check is not remembered");

    // What is remembered is not hashed again, unless somebody asks for it.
    fs::write(&memory, format!("{} {sum}\n", identity())).unwrap();
    let bundle = open(Verify::Once, "cache").unwrap();
    assert!(matches!(bundle.verify_all(None), Err(BundleError::Sum { .. })));
    assert!(matches!(open(Verify::Always, "cache"), Err(BundleError::Sum { .. })));
    assert!(matches!(open(Verify::Once, "other cache"), Err(BundleError::Sum { .. })));
}

#[test]
fn a_file_changed_a_moment_ago_is_not_remembered() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("model");
    write_large(&place);
    let options = OpenOptions { verify: Verify::Once, cache_dir: Some(dir.path().join("cache")), cancel: None };
    Bundle::open_with(&place, &options).unwrap();
    let modified = place.join(WEIGHTS).metadata().unwrap().modified().unwrap();
    damage(&place, modified);
    assert!(matches!(Bundle::open_with(&place, &options), Err(BundleError::Sum { .. })));
}

#[test]
fn hashing_can_be_cancelled() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("model");
    write_large(&place);
    let stop = Arc::new(AtomicBool::new(true));
    let options = OpenOptions { verify: Verify::Once, cache_dir: None, cancel: Some(stop.clone()) };
    assert!(matches!(Bundle::open_with(&place, &options), Err(BundleError::Cancelled)));
    assert!(matches!(open(&place).unwrap().verify_all(Some(&stop)), Err(BundleError::Cancelled)));
}

#[test]
fn reading_checks_what_it_reads() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("model");
    write_usual(&place);
    let bundle = open(&place).unwrap();
    assert_eq!(bundle.read(&path("tokenizer.json")).unwrap(), b"{}");
    std::fs::write(place.join("tokenizer.json"), "[]").unwrap();
    assert!(matches!(bundle.read(&path("tokenizer.json")), Err(BundleError::Sum { .. })));
    let error = bundle.read(&path("qhx.json")).unwrap_err().to_string();
    assert!(error.contains("not listed"), "{error}");
}

/// Whatever a file is called and is for, and however large it is: contexts of a processor, graphs, tokenizers, templates.
#[test]
fn large_files_of_every_kind_are_checked() {
    const SMALL: usize = 1 << 20;
    let dir = tempfile::tempdir().unwrap();
    let folder = crate::targets::write_target(&dir.path().join("model"));
    let manifest_file = folder.join("tiny-vlm.json");
    let manifest = Manifest::from_json(&fs::read_to_string(&manifest_file).unwrap()).unwrap();
    let is_program = |file: &BundlePath| manifest.programs.values().any(|program| program.file == *file);
    // Programs and weights have a content that is read at once; weights are damaged above.
    let files: Vec<BundlePath> =
        manifest.files.keys().filter(|file| !is_program(file) && !manifest.weights.contains(file)).cloned().collect();
    assert!(files.iter().any(|file| file.as_str().ends_with(".bin")), "{files:?}");
    for file in &files {
        let place = folder.join(file.as_str());
        let before = fs::read(&place).unwrap();
        for size in [SMALL - 1, SMALL, SMALL + 1, 2 * SMALL + 1] {
            let mut content = Random(size as u64).bytes(size);
            let mut large = manifest.clone();
            large.files.insert(file.clone(), manifest::FileEntry { bytes: size as u64, sha256: Digest::of(&content) });
            fs::write(&manifest_file, large.to_json().unwrap()).unwrap();
            let mut open = |change: Option<usize>, verify| {
                change.into_iter().for_each(|at| content[at] ^= 1);
                fs::write(&place, &content).unwrap();
                change.into_iter().for_each(|at| content[at] ^= 1);
                Bundle::open_with(&manifest_file, &OpenOptions { verify, cache_dir: None, cancel: None }).map(drop)
            };
            open(None, Verify::Once).unwrap();
            for (at, verify) in [(0, Verify::Once), (size / 2, Verify::Always), (size - 1, Verify::Once)] {
                let found = open(Some(at), verify);
                let told = matches!(&found, Err(BundleError::Sum { file: damaged, .. }) if damaged == file.as_str());
                assert!(told, "byte {at} of {size} of {file}, {verify:?}: {found:?}");
            }
        }
        fs::write(&place, before).unwrap();
    }
}

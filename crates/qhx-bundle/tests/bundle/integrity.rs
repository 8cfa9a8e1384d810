//! The integrity rule: small files always, large files once for each version of them, everything on demand.

use crate::fixture::*;
use qhx_bundle::*;
use qhx_ir::Encoding;
use std::{
    fs::OpenOptions as FileOptions,
    io::{Seek, SeekFrom, Write},
    path::Path,
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, SystemTime},
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
    let old = SystemTime::now() - Duration::from_secs(3600);
    FileOptions::new().write(true).open(place.join(WEIGHTS)).unwrap().set_modified(old).unwrap();
    let options = |verify, cache: &str| OpenOptions { verify, cache_dir: Some(dir.path().join(cache)), cancel: None };
    let open = |verify, cache: &str| Bundle::open_with(&place, &options(verify, cache));
    open(Verify::Once, "cache").unwrap();

    // A change that hides behind the old time shows that the first check is remembered, and who still finds it.
    damage(&place, old);
    let bundle = open(Verify::Once, "cache").unwrap();
    assert!(matches!(bundle.verify_all(None), Err(BundleError::Sum { .. })));
    assert!(matches!(open(Verify::Always, "cache"), Err(BundleError::Sum { .. })));
    assert!(matches!(open(Verify::Once, "other cache"), Err(BundleError::Sum { .. })));
    let error = open(Verify::Once, "other cache").unwrap_err();
    assert!(matches!(error, BundleError::Sum { .. }), "a failed check is not remembered: {error}");

    // An honest one has another time.
    damage(&place, old + Duration::from_secs(1));
    assert!(matches!(open(Verify::Once, "cache"), Err(BundleError::Sum { .. })));
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

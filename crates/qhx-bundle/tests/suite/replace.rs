//! What may be replaced: bundles, and nothing that somebody put among their files.

use crate::{fixture::*, targets::write_target};
use qhx_bundle::*;
use std::{fs, path::Path};

/// Writes another bundle over `place`.
fn replace(place: &Path) -> Result<(), BundleError> {
    // The check comes before any work.
    drop(BundleWriter::create(place, WriteOptions { replace: true, ..WriteOptions::default() })?);
    let (writer, _) = write(place, &[usual_program()], WriteOptions { replace: true, ..WriteOptions::default() }, &mut Random(8));
    writer.finish(manifest()).map(drop)
}

/// Replacing must fail, name each of these, and change nothing.
fn refused(place: &Path, named: &[&str]) {
    let before = open(place).ok().map(|bundle| bundle.fingerprint());
    let error = replace(place).unwrap_err().to_string();
    assert!(named.iter().all(|name| error.contains(name)), "{error}");
    assert_eq!(open(place).ok().map(|bundle| bundle.fingerprint()), before);
}

#[test]
fn a_bundle_is_replaced_even_when_damaged() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("model");
    write_usual(&place);
    fs::write(place.join("tokenizer.json"), "[]").unwrap();
    fs::remove_file(place.join("chat_template.jinja")).unwrap();
    assert!(open(&place).is_err());
    replace(&place).unwrap();
    open(&place).unwrap();
}

#[test]
fn what_somebody_put_into_a_bundle_is_named_and_kept() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("model");
    write_usual(&place);
    fs::write(place.join("letter.txt"), "dear").unwrap();
    fs::write(place.join("weights/mine.txt"), "mine").unwrap();
    fs::create_dir_all(place.join("photos/2024")).unwrap();
    refused(&place, &["letter.txt", "weights/mine.txt", "photos/", "does not list"]);
    fs::remove_file(place.join("letter.txt")).unwrap();
    fs::remove_file(place.join("weights/mine.txt")).unwrap();
    refused(&place, &["photos/"]);
    fs::remove_dir_all(place.join("photos")).unwrap();
    replace(&place).unwrap();
    // Of very many, the first are named.
    (0..100).for_each(|i| fs::write(place.join(format!("note-{i:03}")), "").unwrap());
    let error = replace(&place).unwrap_err().to_string();
    assert!(error.contains("note-000, note-001") && error.contains('…') && error.len() < 1000, "{error}");
}

#[test]
fn a_folder_that_merely_has_a_manifest_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("model");
    fs::create_dir(&place).unwrap();
    for text in ["{}", "", "{\"schema_version\": 1}", "{\"schema_version\": 99}", "\u{fffd}"] {
        fs::write(place.join("qhx.json"), text).unwrap();
        refused(&place, &["not a bundle", "qhx.json"]);
        assert_eq!(fs::read_to_string(place.join("qhx.json")).unwrap(), text);
    }
}

#[test]
fn arch_folders_are_of_the_bundle() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("model");
    let folder = write_target(&place);
    fs::write(folder.join("mine.bin"), "mine").unwrap();
    refused(&place, &["v81/mine.bin"]);
    fs::remove_file(folder.join("mine.bin")).unwrap();
    // A copy of it under a name that is no processor's is somebody's own.
    fs::rename(&folder, place.join("backup")).unwrap();
    refused(&place, &["backup/"]);
    fs::rename(place.join("backup"), place.join("v81-w8.rejected")).unwrap();
    replace(&place).unwrap();
}

#[test]
fn a_rejected_bundle_is_replaced_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let (place, rejected) = (dir.path().join("model"), dir.path().join("model.rejected"));
    let reject = |seed| {
        let (writer, _) = write(&place, &[usual_program()], WriteOptions::default(), &mut Random(seed));
        writer.stage(manifest()).unwrap().reject()
    };
    reject(1).unwrap();
    let first = open(&rejected).unwrap().fingerprint();
    reject(2).unwrap();
    assert_ne!(open(&rejected).unwrap().fingerprint(), first);
    fs::write(rejected.join("notes.txt"), "why it failed").unwrap();
    let error = reject(3).unwrap_err().to_string();
    assert!(error.contains("notes.txt"), "{error}");
    assert!(rejected.join("notes.txt").exists() && !place.exists());
}

#[cfg(unix)]
#[test]
fn links_are_not_followed() {
    use std::os::unix::fs::symlink;
    let dir = tempfile::tempdir().unwrap();
    let (place, outside) = (dir.path().join("model"), dir.path().join("outside"));
    write_usual(&place);
    fs::create_dir(&outside).unwrap();
    fs::rename(place.join("weights"), outside.join("weights")).unwrap();
    symlink(outside.join("weights"), place.join("weights")).unwrap();
    refused(&place, &["weights"]);
    fs::remove_file(place.join("weights")).unwrap();
    fs::rename(place.join("tokenizer.json"), outside.join("tokenizer.json")).unwrap();
    symlink(outside.join("tokenizer.json"), place.join("tokenizer.json")).unwrap();
    // A link in a listed file's place is the bundle's; what it leads to is not.
    replace(&place).unwrap();
    assert!(outside.join("tokenizer.json").exists());
}

//! The model inside the binary: it is what the forge makes of `demo/qwen3_5`, and it answers where there is nothing else.

use crate::{
    common::{self, DEVICE, qhx, ran, scratch, succeed},
    extended,
};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Every file below a folder, by its path there.
fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let name = PathBuf::from(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => found.extend(files(&entry.path()).into_iter().map(|(path, bytes)| (name.join(path), bytes))),
            false => drop(found.insert(name, fs::read(entry.path()).unwrap())),
        }
    }
    found
}

#[test]
#[cfg(feature = "cpu")]
fn it_is_what_the_forge_makes() {
    let folder = scratch();
    let out = folder.path().join("builtin");
    let source = repository().join("demo/qwen3_5");
    let gate: &[&str] = if extended() { &[] } else { &["--gate", "none"] };
    succeed(["forge", source.to_str().unwrap(), "--out", out.to_str().unwrap(), "--precision", "w8"].iter().chain(gate));
    let (mut made, mut kept) = (files(&out), files(&repository().join("crates/qhx/builtin")));
    if !extended() {
        // A gate takes a minute; it leaves its record, which the manifest names.
        for files in [&mut made, &mut kept] {
            files.retain(|path, _| !["qhx.json", "parity.json", "parity.html"].iter().any(|name| path.ends_with(name)));
        }
        assert!(made.len() > 3, "{:?}", made.keys());
    }
    assert_eq!(made.keys().collect::<Vec<_>>(), kept.keys().collect::<Vec<_>>());
    for (path, bytes) in made {
        assert!(bytes == kept[&path], "{} has changed: run `cargo xtask builtin`", path.display());
    }
}

#[test]
fn it_answers_with_nothing_else_there() {
    let place = scratch();
    let answer = |arguments: &[&str]| {
        let found = ran(qhx(arguments).args(["--device", DEVICE]).current_dir(place.path()).output().unwrap());
        assert_eq!(found.code, Some(0), "{found:?}");
        found
    };
    let found = answer(&["run", "How are you?"]);
    assert!(!found.stdout.trim().is_empty(), "{found:?}");
    assert_eq!(found.stderr.matches("built-in demo model").count(), 1, "{found:?}");
    assert!(found.stderr.contains("qhx run MODEL"), "{found:?}");
    // Nothing that is called like it comes in its way.
    fs::create_dir(place.path().join("builtin")).unwrap();
    assert_eq!(answer(&["run", "How are you?"]).stdout, found.stdout);
    fs::remove_dir(place.path().join("builtin")).unwrap();
    let by_name = answer(&["run", "builtin", "How are you?"]);
    assert_eq!(by_name.stdout, found.stdout);
    assert!(!by_name.stderr.contains("built-in demo model"), "who names it knows it: {by_name:?}");
    assert!(answer(&["verify", "builtin"]).stdout.contains("pass"));
    let chat = common::with_stdin(qhx(["chat", "--device", DEVICE]), b"How are you?\n");
    assert_eq!(chat.stdout.trim(), found.stdout.trim());
}

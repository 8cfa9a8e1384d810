//! How many crates of others our builds compile, and what one of them costs.

use crate::{
    Failure,
    graph::{self, Id},
    timings,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    fs,
    path::Path,
};

/// What is linked or runs during a build on this machine, without tests.
const BUILT: [&str; 2] = ["--edges", "normal,build"];

/// A build, and how many crates of others it may compile. A commit that raises a number says why, with what `cargo xtask deps NAME` prints.
const BUILDS: [(&str, &[&str], usize); 2] = [
    ("cargo build --release", &["--package", "qhx-cli"], 220),
    ("cargo build -p qhx --no-default-features --features cpu", &["--package", "qhx", "--no-default-features", "--features", "cpu"], 90),
];

/// Counts the crates of others.
pub(crate) fn check() -> Result<(), Failure> {
    let packages = graph::packages()?;
    for (build, selection, most) in BUILDS {
        let tree = graph::tree(&[&BUILT, selection].concat())?;
        let others = tree.keys().filter(|id| packages.get(*id).is_some_and(|package| package.source.is_some())).count();
        if others > most {
            return Err(format!("`{build}` compiles {others} crates of others; at most {most} are allowed (BUILDS in xtask/src/deps.rs)"));
        }
    }
    Ok(())
}

/// Prints what a dependency of the binary costs: the crates that nothing else needs, the time they take, their source.
pub(crate) fn deps(name: &str) -> Result<(), Failure> {
    let packages = graph::packages()?;
    let tree = graph::tree(&[&BUILT, BUILDS[0].1].concat())?;
    let versions: Vec<&Id> = tree.keys().filter(|id| id.0 == name).collect();
    if versions.is_empty() {
        return Err(format!("the binary does not depend on `{name}`"));
    }
    let root = tree.keys().find(|id| id.0 == "qhx-cli").ok_or("there is no package qhx-cli")?;
    let without = reached(&tree, root, name);
    let alone: Vec<&Id> = tree.keys().filter(|id| !without.contains(id)).collect();
    let seconds = timings::latest();
    let mut sums = (0.0, 0);
    println!("{:<40} {:>9} {:>11}", "crate", "seconds", "source kB");
    for id in &alone {
        let took = seconds.as_ref().and_then(|all| all.get(&id.0)).copied();
        let bytes = packages.get(id).map_or(0, |package| source_bytes(&package.folder));
        sums = (sums.0 + took.unwrap_or(0.0), sums.1 + bytes);
        let took = took.map_or("?".to_owned(), |took| format!("{took:.1}"));
        println!("{:<40} {took:>9} {:>11}", format!("{} {}", id.0, id.1), bytes / 1000);
    }
    println!("{:<40} {:>9.1} {:>11}", format!("{} crates", alone.len()), sums.0, sums.1 / 1000);
    if seconds.is_none() {
        println!("`cargo xtask timings` measures the seconds");
    }
    Ok(())
}

/// What is needed without those of a name.
fn reached<'a>(tree: &'a BTreeMap<Id, BTreeSet<Id>>, root: &'a Id, left_out: &str) -> BTreeSet<&'a Id> {
    let mut reached = BTreeSet::new();
    let mut next = vec![root];
    while let Some(id) = next.pop() {
        if id.0 != left_out && reached.insert(id) {
            next.extend(tree.get(id).into_iter().flatten());
        }
    }
    reached
}

/// Bytes of Rust, C and assembly below a folder.
fn source_bytes(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let of = |path: &Path| match path.extension().and_then(OsStr::to_str) {
        Some("rs" | "c" | "h" | "cc" | "cpp" | "S" | "asm") => path.metadata().map_or(0, |file| file.len()),
        _ => 0,
    };
    entries.map(|entry| entry.path()).map(|path| if path.is_dir() { source_bytes(&path) } else { of(&path) }).sum()
}

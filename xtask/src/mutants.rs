//! Mutation tests of guards: `cargo mutants` makes one mistake at a time in what keeps strangers, large requests and wrong numbers out, and the tests of the crate must notice it.

use crate::{Failure, assets, graph, programs::PROFILE, root, target};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// The version of `cargo mutants` that is fetched.
const CARGO_MUTANTS: &str = "27.1.0";

/// Where mistakes are made. Each crate is tested with its own unit tests, then with its `suite`.
const GUARDS: [&str; 14] = [
    "crates/qhx-bundle/src/hash.rs",
    "crates/qhx-bundle/src/path.rs",
    "crates/qhx-bundle/src/verified.rs",
    "crates/qhx-forge/src/gate/limits.rs",
    "crates/qhx-runtime/src/engine/prefixes.rs",
    "crates/qhx-runtime/src/sample/config.rs",
    "crates/qhx-runtime/src/sample/filter.rs",
    "crates/qhx-runtime/src/sample/mod.rs",
    "crates/qhx-runtime/src/sample/random.rs",
    "crates/qhx-server/src/access.rs",
    "crates/qhx-server/src/body.rs",
    "crates/qhx-server/src/json_size.rs",
    "crates/qhx-server/src/multipart.rs",
    "crates/qhx/src/batch.rs",
];

/// All of them: hours.
pub(crate) fn all() -> Result<(), Failure> {
    test(&[])
}

/// Those in the files whose paths end so, or all. A mutant that survives must be in `xtask/mutants.txt` with its reason, and no other.
pub(crate) fn test(names: &[&str]) -> Result<(), Failure> {
    if let Some(name) = names.iter().find(|name| GUARDS.iter().all(|file| !file.ends_with(**name))) {
        return Err(format!("no file ends with `{name}`; there are\n{}", GUARDS.join("\n")));
    }
    let files = GUARDS.iter().filter(|file| names.is_empty() || names.iter().any(|name| file.ends_with(name)));
    let mut packages: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for file in files {
        packages.entry(file.split('/').nth(1).unwrap_or_default()).or_default().push(file);
    }
    let (program, tree, explained) = (assets::cargo_tool("cargo-mutants", CARGO_MUTANTS)?, copy()?, explained()?);
    let mut problems = Vec::new();
    for (package, files) in packages {
        let out = target().join("mutants").join(package);
        let _ = fs::remove_dir_all(&out);
        // Unit tests are built in a fraction of the time, and catch most.
        let mut units = order(&program, &tree, package, &files, &out);
        run_mutants(units.args(["--", "--lib"]))?;
        let mut suite = order(&program, &tree, package, &files, &out);
        run_mutants(suite.args(["--iterate", "--", "--test", "suite"]))?;
        for file in files {
            let survived = mutants(&out, "missed", file);
            let listed = explained.iter().filter(|mutant| mutant.starts_with(&format!("{file}: ")));
            println!("{file}: {} survive", survived.len());
            problems.extend(survived.iter().filter(|mutant| !explained.contains(*mutant)).map(|mutant| format!("survived: {mutant}")));
            problems
                .extend(listed.filter(|mutant| !survived.contains(mutant)).map(|mutant| format!("listed, and does not survive: {mutant}")));
        }
    }
    match problems.is_empty() {
        true => Ok(()),
        false => Err(format!("mutants (xtask/mutants.txt):\n{}", problems.join("\n"))),
    }
}

/// A test of the mutants of some files of a package, which leaves lists of them in a folder.
fn order(program: &Path, tree: &Path, package: &str, files: &[&str], out: &Path) -> Command {
    // Of the crate that is compiled again for every mutant, compiling takes longer than its tests.
    let cheap = format!("--config=profile.test-opt.package.{package}.opt-level=0");
    let mut mutants = Command::new(program);
    mutants.args(["mutants", "--package", package, "--in-place", "--no-shuffle", "--colors", "never", "--minimum-test-timeout", "120"]);
    mutants.arg("--dir").arg(tree).arg("--output").arg(out).args(PROFILE).args(["--cargo-arg", &cheap]);
    // Left out of the tests of a crate alone, and guards nothing.
    mutants.args(["--exclude-re", "JsonSchema for"]);
    files.iter().for_each(|file| _ = mutants.args(["--file", file]));
    mutants.env("CARGO_TARGET_DIR", target().join("mutants/build"));
    mutants
}

fn run_mutants(command: &mut Command) -> Result<(), Failure> {
    let status = command.status().map_err(|e| format!("cannot start {command:?}: {e}"))?;
    match status.code() {
        // All were caught, some survived, some took too long.
        Some(0 | 2 | 3) => Ok(()),
        _ => Err(format!("{command:?} ended with {status}")),
    }
}

/// The mutants of a file in one of the lists, without the lines at which they are.
fn mutants(out: &Path, kind: &str, file: &str) -> Vec<String> {
    let list = fs::read_to_string(out.join("mutants.out").join(kind).with_extension("txt")).unwrap_or_default();
    let mutant = |line: &str| {
        let (place, what) = line.split_once(": ")?;
        (place.split(':').next() == Some(file)).then(|| format!("{file}: {what}"))
    };
    list.lines().filter_map(mutant).collect()
}

/// The mutants that may survive. Each is a line, with lines below it that say why and begin with spaces.
fn explained() -> Result<BTreeSet<String>, Failure> {
    let text = fs::read_to_string(root().join("xtask/mutants.txt")).map_err(|e| format!("xtask/mutants.txt: {e}"))?;
    let lines: Vec<&str> = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    let mut explained = BTreeSet::new();
    for (at, line) in lines.iter().enumerate().filter(|(_, line)| !line.starts_with(' ')) {
        if lines.get(at + 1).is_none_or(|reason| !reason.starts_with(' ')) {
            return Err(format!("xtask/mutants.txt: no reason below `{line}`"));
        }
        explained.insert((*line).to_owned());
    }
    Ok(explained)
}

/// A copy of what git tracks, for the mistakes. Files that are as they were keep their times, so that little is compiled again.
fn copy() -> Result<PathBuf, Failure> {
    let tree = target().join("mutants/tree");
    let listed = graph::output(Command::new("git").args(["ls-files", "-z"]).current_dir(root()))?;
    for file in listed.split_terminator('\0') {
        // One that is deleted and not committed yet is no part of it.
        let Ok(bytes) = fs::read(root().join(file)) else { continue };
        let place = tree.join(file);
        if fs::read(&place).is_ok_and(|there| there == bytes) {
            continue;
        }
        let failed = |e: std::io::Error| format!("{}: {e}", place.display());
        fs::create_dir_all(place.parent().unwrap_or(&tree)).map_err(failed)?;
        fs::write(&place, bytes).map_err(failed)?;
    }
    Ok(tree)
}

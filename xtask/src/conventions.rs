//! How tests are organised: which suite runs them, which have a process of their own, and which let time pass. docs/testing.md says why.

use crate::{Failure, programs::OWN_PROCESS, root, suites};
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// Test files that sleep, and what they wait for or let pass. Everything else waits for an event.
const SLEEPS: [(&str, &str); 19] = [
    ("crates/qhx-bundle/tests/suite/integrity.rs", "the clock of the file system ticks: polls until a deadline"),
    ("crates/qhx-cli/src/peak.rs", "a peak of memory is seen: polls until a deadline"),
    ("crates/qhx-cli/tests/suite/common/mod.rs", "another process does something: polls until a deadline"),
    ("crates/qhx-cli/tests/suite/gpu.rs", "a process is killed at sixteenths of the time to its first output"),
    ("crates/qhx-cli/tests/suite/safe_files.rs", "a command ends: polls until a deadline, then kills it"),
    ("crates/qhx-cpu/src/pool.rs", "units that take time, and pauses between jobs"),
    ("crates/qhx-cpu/tests/idle.rs", "a pool is idle while its CPU time is measured"),
    ("crates/qhx-forge/tests/gate_memory.rs", "memory is measured every millisecond"),
    ("crates/qhx-forge/tests/suite/engine.rs", "an engine comes to rest: polls until a deadline"),
    ("crates/qhx-runtime/src/split/tokens.rs", "stages that take time"),
    ("crates/qhx-runtime/tests/suite/common/devices.rs", "a slow device, and one that waits until a test lets it go on"),
    ("crates/qhx-runtime/tests/suite/common/mod.rs", "an engine or a device reaches a state: polls until a deadline"),
    ("crates/qhx-server/tests/suite/common/mod.rs", "a server reaches a state: polls until a deadline"),
    ("crates/qhx-server/tests/suite/hostile.rs", "a poll every two milliseconds"),
    ("crates/qhx-server/tests/suite/limits.rs", "bad clients leave after a random time"),
    ("tests/judges/chaos.py", "bad clients leave after a random time"),
    ("tests/judges/fleet.py", "servers reach a state: polls until a deadline"),
    ("tests/judges/load.py", "bad clients leave after a random time; a server reaches a state: polls until a deadline"),
    ("tests/judges/serving.py", "a server comes to rest: polls until a deadline"),
];

/// Checks all of it.
pub(crate) fn check() -> Result<(), Failure> {
    let problems = [packages()?, own_processes()?, sleeps()?].concat();
    match problems.is_empty() {
        true => Ok(()),
        false => Err(format!("tests:\n{}", problems.join("\n"))),
    }
}

/// Packages with tests that no suite runs.
fn packages() -> Result<Vec<String>, Failure> {
    let mut problems = Vec::new();
    for package in entries(&root().join("crates"))?.into_iter().chain([root().join("xtask")]) {
        let (name, tests) = (name(&package), tests_below(&package)?);
        if tests.iter().any(|(_, text)| text.contains("#[test]")) && !suites::of_crates().any(|suite| suite == name) {
            problems.push(format!("{name} has tests, and no suite runs them (SUITES in xtask/src/suites.rs)"));
        }
    }
    Ok(problems)
}

/// Checks the test programs other than `suite` against the list of those that need their own process.
fn own_processes() -> Result<Vec<String>, Failure> {
    let mut found = BTreeSet::new();
    for package in entries(&root().join("crates"))? {
        let tests = package.join("tests");
        let programs: Vec<PathBuf> = entries(&tests)?.into_iter().filter(|file| has_extension(file, "rs")).collect();
        // A crate's only program needs no reason.
        if tests.join("suite/main.rs").exists() || programs.len() > 1 {
            found.extend(programs.iter().map(|file| (name(&package), file.file_stem().unwrap_or_default().to_string_lossy().into_owned())));
        }
    }
    let listed: BTreeSet<_> = OWN_PROCESS.iter().map(|(package, name, _)| ((*package).to_owned(), (*name).to_owned())).collect();
    let unlisted = found.difference(&listed).map(|(package, name)| {
        format!("crates/{package}/tests/{name}.rs: make it a module of the crate's `suite`, or give a reason (OWN_PROCESS in xtask/src/programs.rs)")
    });
    let gone = listed.difference(&found).map(|(package, name)| format!("OWN_PROCESS lists {package}'s {name}, which is not there"));
    Ok(unlisted.chain(gone).collect())
}

/// Tests that sleep, against the list.
fn sleeps() -> Result<Vec<String>, Failure> {
    let mut all = tests_below(&root().join("tests/judges"))?;
    for package in entries(&root().join("crates"))? {
        all.extend(tests_below(&package)?);
    }
    let found: BTreeSet<String> = all.into_iter().filter(|(_, text)| text.contains("sleep(")).map(|(path, _)| path).collect();
    let unlisted = found
        .iter()
        .filter(|path| SLEEPS.iter().all(|(listed, _)| listed != path))
        .map(|path| format!("{path} sleeps: wait for an event, or say what it lets pass (SLEEPS in xtask/src/conventions.rs)"));
    let gone =
        SLEEPS.iter().filter(|(path, _)| !found.contains(*path)).map(|(path, _)| format!("SLEEPS lists {path}, which does not sleep"));
    Ok(unlisted.chain(gone).collect())
}

/// The files with tests below a folder, by their path in the workspace, and the tests in them.
fn tests_below(folder: &Path) -> Result<Vec<(String, String)>, Failure> {
    let (mut found, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(folder) = folders.pop() {
        let (inner, files): (Vec<_>, Vec<_>) = entries(&folder)?.into_iter().partition(|path| path.is_dir());
        folders.extend(inner);
        for file in files.iter().filter(|file| has_extension(file, "rs") || has_extension(file, "py")) {
            let text = fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
            let path = file.strip_prefix(root()).unwrap_or(file).to_string_lossy().replace('\\', "/");
            let tests = of_tests(&path, &text).to_owned();
            found.push((path, tests));
        }
    }
    Ok(found)
}

/// The part of a file that is tests: all of it, or a module at its end.
fn of_tests<'a>(path: &str, text: &'a str) -> &'a str {
    match text.find("#[cfg(test)]") {
        _ if path.contains("tests/") => text,
        Some(start) => &text[start..],
        None if text.contains("#[test]") => text,
        None => "",
    }
}

fn has_extension(file: &Path, extension: &str) -> bool {
    file.extension().is_some_and(|found| found == extension)
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// What is in a folder, sorted; nothing if there is none.
fn entries(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    if !folder.exists() {
        return Ok(Vec::new());
    }
    let failed = |e: std::io::Error| format!("{}: {e}", folder.display());
    let entries = fs::read_dir(folder).map_err(failed)?.map(|entry| entry.map(|entry| entry.path()));
    let mut entries: Vec<_> = entries.collect::<Result<_, _>>().map_err(failed)?;
    entries.sort();
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_package_with_tests_has_a_suite() {
        assert_eq!(packages().unwrap(), [""; 0]);
    }

    #[test]
    fn programs_beside_a_suite_have_a_reason() {
        assert_eq!(own_processes().unwrap(), [""; 0]);
    }

    #[test]
    fn tests_that_sleep_say_why() {
        assert_eq!(sleeps().unwrap(), [""; 0]);
        let source = "fn work() { sleep(A) }\n#[cfg(test)]\nmod tests { fn rest() {} }";
        assert!(!of_tests("crates/x/src/lib.rs", source).contains("sleep("));
        assert!(of_tests("crates/x/src/lib.rs", &source.replace("rest", "sleep")).contains("sleep("));
        assert!(of_tests("crates/x/src/tests.rs", "#[test]\nfn wait() { sleep(A) }").contains("sleep("));
        assert!(of_tests("crates/x/tests/suite/a.rs", source).contains("sleep("));
        assert!(of_tests("tests/judges/a.py", "time.sleep(1)").contains("sleep("));
    }
}

//! What differs from a commit.

use crate::{Failure, root};
use std::{collections::BTreeSet, process::Command};

pub(crate) struct Changed {
    /// Crates of the workspace.
    pub(crate) crates: Vec<String>,
    /// Other files.
    pub(crate) elsewhere: Vec<String>,
}

/// The files that differ from `commit`, new ones too.
pub(crate) fn since(commit: &str) -> Result<Changed, Failure> {
    let lists = [git(&["diff", "--name-only", commit, "--"])?, git(&["ls-files", "--others", "--exclude-standard"])?];
    let (mut crates, mut elsewhere) = (BTreeSet::new(), BTreeSet::new());
    for path in lists.iter().flat_map(|list| list.lines()) {
        match path.strip_prefix("crates/").and_then(|rest| rest.split_once('/')) {
            Some((name, _)) if root().join("crates").join(name).is_dir() => _ = crates.insert(name.to_owned()),
            _ if path.starts_with("xtask/") => _ = crates.insert("xtask".to_owned()),
            // The tests of the command line read the documents.
            _ if path.ends_with(".md") => _ = crates.insert("qhx-cli".to_owned()),
            _ => _ = elsewhere.insert(path.to_owned()),
        }
    }
    Ok(Changed { crates: crates.into_iter().collect(), elsewhere: elsewhere.into_iter().collect() })
}

fn git(arguments: &[&str]) -> Result<String, Failure> {
    let mut git = Command::new("git");
    let output = git.args(arguments).current_dir(root()).output().map_err(|e| format!("cannot start {git:?}: {e}"))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(format!("{git:?} ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim())),
    }
}

//! The packages that cargo resolves, and which of them a build compiles.

use crate::{Failure, cargo};
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    process::Command,
};

/// A name and a version.
pub(crate) type Id = (String, String);

/// A package of Cargo.lock.
pub(crate) struct Package {
    pub(crate) license: String,
    /// Where it comes from; `None`: it is one of ours.
    pub(crate) source: Option<String>,
    pub(crate) folder: PathBuf,
    pub(crate) authors: Vec<String>,
    pub(crate) features: Vec<String>,
}

/// All packages of Cargo.lock, for all systems, those of tests too.
pub(crate) fn packages() -> Result<BTreeMap<Id, Package>, Failure> {
    let text = output(cargo().args(["metadata", "--format-version", "1", "--locked"]))?;
    let metadata: Value = serde_json::from_str(&text).map_err(|e| format!("`cargo metadata` printed no JSON: {e}"))?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let package = |package: &Value| {
        let manifest = PathBuf::from(text(&package["manifest_path"]));
        let of = Package {
            license: text(&package["license"]),
            source: package["source"].as_str().map(str::to_owned),
            folder: manifest.parent().map(PathBuf::from).unwrap_or_default(),
            authors: package["authors"].as_array().into_iter().flatten().map(text).collect(),
            features: package["features"].as_object().into_iter().flat_map(|all| all.keys().cloned()).collect(),
        };
        ((text(&package["name"]), text(&package["version"])), of)
    };
    Ok(metadata["packages"].as_array().into_iter().flatten().map(package).collect())
}

/// Which packages a build compiles, and which of them each needs. `selection` is what `cargo tree` takes.
pub(crate) fn tree(selection: &[&str]) -> Result<BTreeMap<Id, BTreeSet<Id>>, Failure> {
    let text = output(cargo().args(["tree", "--locked", "--prefix", "depth"]).args(selection))?;
    let mut needs: BTreeMap<Id, BTreeSet<Id>> = BTreeMap::new();
    let mut above: Vec<Id> = Vec::new();
    // `2serde v1.0.229 (*)`: what stands below it was listed before. Several roots or targets have empty lines between them.
    for line in text.lines().filter(|line| !line.is_empty()) {
        let digits = line.find(|c: char| !c.is_ascii_digit()).unwrap_or(0);
        let mut words = line[digits..].split(' ');
        let (Ok(depth), Some(name), Some(version)) = (line[..digits].parse(), words.next(), words.next()) else {
            return Err(format!("`cargo tree` printed an unexpected line: {line}"));
        };
        let id = (name.to_owned(), version.trim_start_matches('v').to_owned());
        above.truncate(depth);
        if let Some(parent) = above.last() {
            needs.entry(parent.clone()).or_default().insert(id.clone());
        }
        needs.entry(id.clone()).or_default();
        above.push(id);
    }
    Ok(needs)
}

/// What a command prints.
pub(crate) fn output(command: &mut Command) -> Result<String, Failure> {
    let shown = format!("{command:?}");
    let output = command.output().map_err(|e| format!("cannot start {shown}: {e}"))?;
    match output.status.success() {
        true => String::from_utf8(output.stdout).map_err(|e| format!("{shown} printed what is not UTF-8: {e}")),
        false => Err(format!("{shown} ended with {}:\n{}", output.status, String::from_utf8_lossy(&output.stderr).trim_end())),
    }
}

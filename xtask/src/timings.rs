//! What a release build takes, crate by crate.

use crate::{Failure, cargo, graph, run, target};
use serde_json::Value;
use std::{collections::BTreeMap, fs, path::PathBuf};

/// How many crates are listed.
const LISTED: usize = 10;

/// Builds the binary anew, in a folder of its own, and prints the crates that take longest.
///
/// One job: then a crate's time is the CPU time of its compilation.
pub(crate) fn timings() -> Result<(), Failure> {
    let folder = folder();
    let _ = fs::remove_dir_all(&folder);
    run(cargo().args(["build", "--release", "--package", "qhx-cli", "--timings", "--jobs", "1", "--target-dir"]).arg(&folder))?;
    let all = read()?;
    let packages = graph::packages()?;
    let ours = |name: &str| packages.iter().any(|(id, package)| id.0 == name && package.source.is_none());
    for (title, of_ours) in [("ours", true), ("of others", false)] {
        let mut some: Vec<(&String, &f64)> = all.iter().filter(|(name, _)| ours(name) == of_ours).collect();
        some.sort_by(|a, b| b.1.total_cmp(a.1));
        let sum: f64 = some.iter().map(|(_, seconds)| *seconds).sum();
        println!("{:<32} {:>9}", format!("{} crates {title}", some.len()), "seconds");
        some.iter().take(LISTED).for_each(|(name, seconds)| println!("{name:<32} {seconds:>9.1}"));
        println!("{:<32} {sum:>9.1}\n", "all of them");
    }
    println!("{:<32} {:>9.1}", "the whole build", all.values().sum::<f64>());
    Ok(())
}

/// The seconds of each crate in the latest such build, if there was one.
pub(crate) fn latest() -> Option<BTreeMap<String, f64>> {
    read().ok()
}

fn folder() -> PathBuf {
    target().join("timings")
}

/// Reads cargo's own report: a page with the times as JSON in it.
fn read() -> Result<BTreeMap<String, f64>, Failure> {
    let page = folder().join("cargo-timings/cargo-timing.html");
    let wrong = |what: &str| format!("{}: {what}", page.display());
    let text = fs::read_to_string(&page).map_err(|e| wrong(&e.to_string()))?;
    let (_, data) = text.split_once("UNIT_DATA = ").ok_or_else(|| wrong("there is no UNIT_DATA: has cargo changed it?"))?;
    let units = serde_json::Deserializer::from_str(data).into_iter::<Vec<Value>>().next();
    let units = units.and_then(Result::ok).ok_or_else(|| wrong("UNIT_DATA is no JSON: has cargo changed it?"))?;
    let mut seconds = BTreeMap::new();
    for unit in units {
        let (Some(name), Some(took)) = (unit["name"].as_str(), unit["duration"].as_f64()) else {
            return Err(wrong("a unit has no name or no duration: has cargo changed it?"));
        };
        *seconds.entry(name.to_owned()).or_default() += took;
    }
    Ok(seconds)
}

//! The library and the binary with each of their features alone, and each crate with its tests alone: what a build leaves out must not be needed.

use crate::{Failure, cargo, graph, run, target};

/// Checks all of these builds, without a warning.
pub(crate) fn features() -> Result<(), Failure> {
    let packages = graph::packages()?;
    let ours = || packages.iter().filter(|(_, package)| package.source.is_none());
    for ((name, _), _) in ours() {
        println!("{name}, with its tests");
        check(&["--package", name, "--all-targets"])?;
    }
    for ((name, _), package) in ours().filter(|((name, _), _)| name == "qhx" || name == "qhx-cli") {
        let each = package.features.iter().map(String::as_str).filter(|feature| *feature != "default");
        for feature in [""].into_iter().chain(each) {
            println!("{name}, features: {}", if feature.is_empty() { "none" } else { feature });
            check(&["--package", name, "--no-default-features", "--features", feature])?;
        }
    }
    Ok(())
}

fn check(selection: &[&str]) -> Result<(), Failure> {
    let mut check = cargo();
    check.args(["check", "--quiet"]).args(selection);
    // A folder of its own: the flags would make other builds start anew.
    run(check.env("CARGO_TARGET_DIR", target().join("features")).env("RUSTFLAGS", "-D warnings"))
}

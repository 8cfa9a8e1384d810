//! The library with each of its features alone: what a program leaves out must not be needed.

use crate::{Failure, cargo, graph, run, target};

/// Checks `qhx` without features and with each of them, without a warning.
pub(crate) fn features() -> Result<(), Failure> {
    let packages = graph::packages()?;
    let qhx = packages.iter().find(|(id, _)| id.0 == "qhx").ok_or("there is no package qhx")?.1;
    let each = qhx.features.iter().map(String::as_str).filter(|feature| *feature != "default");
    for feature in [""].into_iter().chain(each) {
        println!("qhx, features: {}", if feature.is_empty() { "none" } else { feature });
        // A folder of its own: the flags would make other builds start anew.
        let mut check = cargo();
        check.args(["check", "--quiet", "--package", "qhx", "--no-default-features", "--features", feature]);
        run(check.env("CARGO_TARGET_DIR", target().join("features")).env("RUSTFLAGS", "-D warnings"))?;
    }
    Ok(())
}

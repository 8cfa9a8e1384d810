//! The library and the binary with each of their features alone: what a program leaves out must not be needed.

use crate::{Failure, cargo, graph, run, target};

/// Checks `qhx` and `qhx-cli` without features and with each of them, without a warning.
pub(crate) fn features() -> Result<(), Failure> {
    let packages = graph::packages()?;
    for name in ["qhx", "qhx-cli"] {
        let package = packages.iter().find(|(id, _)| id.0 == name).ok_or_else(|| format!("there is no package {name}"))?.1;
        let each = package.features.iter().map(String::as_str).filter(|feature| *feature != "default");
        for feature in [""].into_iter().chain(each) {
            println!("{name}, features: {}", if feature.is_empty() { "none" } else { feature });
            // A folder of its own: the flags would make other builds start anew.
            let mut check = cargo();
            check.args(["check", "--quiet", "--package", name, "--no-default-features", "--features", feature]);
            run(check.env("CARGO_TARGET_DIR", target().join("features")).env("RUSTFLAGS", "-D warnings"))?;
        }
    }
    Ok(())
}

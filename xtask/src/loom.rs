//! The CPU's thread pool in a checker of orders: `tests/loom`, which has dependencies of its own.

use crate::{Failure, cargo, root, run, target};
use std::process::Command;

/// Runs all models.
pub(crate) fn models() -> Result<(), Failure> {
    run(command("run").args(["--quiet", "--release", "--offline"]))
}

/// Fetches what they are built from.
pub(crate) fn fetch() -> Result<(), Failure> {
    run(command("fetch").arg("--quiet"))
}

fn command(name: &str) -> Command {
    let mut command = cargo();
    command.current_dir(root().join("tests/loom")).args([name, "--locked"]).env("CARGO_TARGET_DIR", target().join("loom"));
    command
}

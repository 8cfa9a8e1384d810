//! Hostile inputs against the libraries and the binary. The work is done by the crate `qhx-attack`; here it is built, with the binary that it attacks.

use crate::{Failure, cargo, run, target};
use std::process::Command;

/// Runs the classes that the arguments name.
pub(crate) fn attack(arguments: &[&str]) -> Result<(), Failure> {
    // Of the whole workspace, as the tests are: else dependencies would be built anew with other features.
    run(cargo().args(["build", "--workspace", "--bins", "--profile", "test-opt"]))?;
    run(Command::new(target().join("test-opt/qhx-attack")).args(arguments))
}

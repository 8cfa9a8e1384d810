//! Hostile inputs against the libraries and the binary. The work is done by the crate `qhx-attack`; here it is built, with the binary that it attacks.

use crate::{Failure, cargo, programs::PROFILE, run, suites::Tier, target};
use std::process::Command;

/// Runs the classes that the arguments name.
pub(crate) fn attack(arguments: &[&str]) -> Result<(), Failure> {
    // Of the whole workspace, as the tests are: else dependencies would be built anew with other features.
    run(cargo().args(["build", "--quiet", "--workspace", "--bins"]).args(PROFILE))?;
    run(Command::new(target().join("test-opt/qhx-attack")).args(arguments))
}

/// A moment for each class of hostile input, or an hour for all of them. The seed is fixed, so that the cases are the same every time.
pub(crate) fn test(tier: Tier) -> Result<(), Failure> {
    attack(&["--seconds", if tier == Tier::Extended { "300" } else { "2" }, "--seed", "1"])
}

//! Hostile inputs against the libraries and the binary. The work is done by the crate `qhx-attack`.

use crate::{Failure, programs, run, suites::Tier};
use std::process::Command;

/// Runs the classes that the arguments name.
pub(crate) fn attack(arguments: &[&str]) -> Result<(), Failure> {
    run(Command::new(programs::binary("qhx-attack")).args(arguments))
}

/// A moment for each class of hostile input, or an hour for all of them. The seed is fixed, so that the cases are the same every time.
pub(crate) fn test(tier: Tier) -> Result<(), Failure> {
    attack(&["--seconds", if tier == Tier::Extended { "300" } else { "1" }, "--seed", "1"])
}

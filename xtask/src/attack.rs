//! Hostile input against the libraries, the binary and a server. The work is done by the crate `qhx-attack`.

use crate::{Failure, programs, run, suites::Tier};
use std::process::Command;

/// Runs the classes that the arguments name.
pub(crate) fn attack(arguments: &[&str]) -> Result<(), Failure> {
    run(Command::new(programs::binary("qhx-attack")).args(arguments))
}

/// A second for each class of hostile input, or five minutes. The seed is fixed, so that the cases are the same every time.
pub(crate) fn test(tier: Tier) -> Result<(), Failure> {
    match tier {
        Tier::Default => attack(&["--seconds", "1", "--seed", "1", "--jobs", "1"]),
        Tier::Extended => attack(&["--seconds", "300", "--seed", "1"]),
    }
}

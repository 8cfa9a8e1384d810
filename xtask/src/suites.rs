//! The test suites, their set-up and their times.

use crate::{Failure, assets, cargo, run};
use std::{env, process::Command, time::Instant};

/// All suites. In CI a suite that cannot run is a failure; elsewhere it is named and passed over.
pub(crate) fn test() -> Result<(), Failure> {
    let mut table = Vec::new();
    let in_ci = env::var("CI").is_ok_and(|v| v == "true" || v == "1");
    let mut suite = |name: &'static str, work: &mut dyn FnMut() -> Result<(), Failure>| {
        let start = Instant::now();
        println!("── {name}");
        let done = work();
        table.push((name, if done.is_ok() { "ok" } else { "FAILED" }, start.elapsed().as_secs_f64()));
        done
    };
    let result = (|| {
        suite("lint", &mut lint)?;
        suite("unit", &mut || run(cargo_test().args(["--lib", "--bins"])))?;
        suite("integration", &mut || run(cargo_test().args(["--test", "*"])))?;
        suite("documentation", &mut || run(cargo_test().arg("--doc")))?;
        match assets::smollm2() {
            Ok(model) => suite("real model", &mut || {
                run(cargo_test().args(["--package", "qhx-cli", "--test", "smollm2", "--", "--ignored"]).env("QHX_SMOLLM2", &model))
            }),
            Err(e) if in_ci => Err(e),
            Err(e) => {
                eprintln!("not run: the suite `real model`: {e}");
                Ok(())
            }
        }
    })();
    println!("\n{:<16} {:>8} {:>9}", "suite", "result", "seconds");
    for (name, outcome, seconds) in table {
        println!("{name:<16} {outcome:>8} {seconds:>9.1}");
    }
    result
}

/// Formatting, lints and documentation, without a warning.
pub(crate) fn lint() -> Result<(), Failure> {
    run(cargo().args(["fmt", "--all", "--", "--check"]))?;
    run(cargo().args(["clippy", "--workspace", "--all-targets", "--profile", "test-opt", "--", "-D", "warnings"]))?;
    run(cargo().args(["doc", "--workspace", "--no-deps", "--document-private-items"]).env("RUSTDOCFLAGS", "-D warnings"))
}

/// One optimised build with all checks on serves every suite.
fn cargo_test() -> Command {
    let mut command = cargo();
    command.args(["test", "--workspace", "--profile", "test-opt"]);
    command
}

//! The test suites, their set-up and their times.

use crate::{Failure, aarch64, assets, attack, cargo, deps, gpu, gpu::DeviceTest, judges, licenses, package, policy, run, size, target};
use std::{env, path::PathBuf, process::Command, time::Instant};

/// A suite on fetched files: the ignored tests of some test binaries.
struct Fetched {
    name: &'static str,
    fetch: fn() -> Result<PathBuf, Failure>,
    tests: &'static [&'static str],
    /// The variable that names the files to the tests.
    variable: &'static str,
}

const FETCHED: [Fetched; 3] = [
    Fetched { name: "real model", fetch: assets::smollm2, tests: &["smollm2"], variable: "QHX_SMOLLM2" },
    Fetched { name: "real tokenizers", fetch: assets::real_tokenizers, tests: &["text_real"], variable: "QHX_REAL_TOKENIZERS" },
    Fetched {
        name: "NPU emulator",
        fetch: assets::qnn,
        tests: &["conformance", "device", "doctor", "emulator", "npu"],
        variable: "QHX_QNN_DIR",
    },
];

/// All suites. In CI a suite that cannot run is a failure; elsewhere it is named and passed over.
pub(crate) fn test() -> Result<(), Failure> {
    let mut table = Vec::new();
    let in_ci = env::var("CI").is_ok_and(|v| v == "true" || v == "1");
    let cannot_run = |name: &str, e: Failure| match in_ci {
        true => Err(format!("the suite `{name}` cannot run: {e}")),
        false => {
            eprintln!("not run: the suite `{name}`: {e}");
            Ok(())
        }
    };
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
        suite("package", &mut package::package)?;
        // A few seconds of each class of hostile input; the seed is fixed, so that the cases are the same every time.
        suite("attack", &mut || attack::attack(&["--seconds", "3", "--seed", "1"]))?;
        for fetched in FETCHED {
            match (fetched.fetch)() {
                Ok(files) => suite(fetched.name, &mut || {
                    // Of the whole workspace, whatever is wanted of it: else dependencies would be built anew with other features.
                    let mut test = cargo_test();
                    for name in fetched.tests {
                        test.args(["--test", name]);
                    }
                    test.args(["--", "--ignored"]);
                    run(test.env(fetched.variable, &files))
                })?,
                Err(e) => cannot_run(fetched.name, e)?,
            }
        }
        match judges::python() {
            Ok(python) => suite("judges", &mut || judges::judge(&python))?,
            Err(e) => cannot_run("judges", e)?,
        }
        match gpu::driver() {
            Ok(driver) => suite("GPU", &mut || gpu(&driver))?,
            Err(e) => cannot_run("GPU", e)?,
        }
        // On such a machine the suites above have run these tests.
        if cfg!(target_arch = "aarch64") {
            return Ok(());
        }
        match aarch64::tools() {
            Ok(tools) => suite("aarch64", &mut || aarch64::test(&tools)),
            Err(e) => cannot_run("aarch64", e),
        }
    })();
    println!("\n{:<16} {:>8} {:>9}", "suite", "result", "seconds");
    for (name, outcome, seconds) in table {
        println!("{name:<16} {outcome:>8} {seconds:>9.1}");
    }
    result
}

/// The GPU device on software Vulkan, and whether shaders and SPIR-V agree.
pub(crate) fn gpu(driver: &[(&'static str, PathBuf)]) -> Result<(), Failure> {
    gpu::check_shaders()?;
    let mut test = cargo_test();
    test.args(["--test", "gpu", "--", "--ignored"]);
    // With QNN's emulator, sessions also move between GPU and NPU.
    if let Ok(qnn) = assets::qnn() {
        test.env("QHX_QNN_DIR", qnn);
    }
    run(test.envs(driver.iter().map(|(name, value)| (name, value))))?;
    let program = DeviceTest::build(cargo_test())?;
    let older = || {
        let mut command = Command::new(&program);
        // Software Vulkan is slow: fewer cases of each kind.
        command.env("QHX_CONFORMANCE_CASES", "8").envs(driver.iter().map(|(name, value)| (name, value)));
        command
    };
    let (driver, [starter, libraries]) = gpu::newer_driver()?;
    let newer = || {
        let mut command = Command::new(&starter);
        command.arg("--library-path").arg(&libraries).arg(&program).envs(driver.iter().map(|(name, value)| (name, value)));
        command
    };
    let mut tests = DeviceTest::all(newer, |name| name.starts_with(COOPERATIVE))?;
    tests.extend(DeviceTest::all(older, |name| !name.starts_with(COOPERATIVE))?);
    DeviceTest::run_all(tests)
}

/// How the tests begin that need cooperative matrices, which the older Mesa does not have.
const COOPERATIVE: &str = "cooperative_matrices";

/// Models of full size against the oracle: all, or those named (with commas between).
pub(crate) fn fullsize(names: &str) -> Result<(), Failure> {
    let mut test = cargo_test();
    test.args(["--package", "qhx-cli", "--test", "fullsize", "--", "--ignored", "--nocapture"]);
    run(test.env("QHX_FULLSIZE", names).env("QHX_FULLSIZE_DIR", target().join("assets/fullsize")))
}

/// Formatting, lints and documentation, without a warning.
pub(crate) fn lint() -> Result<(), Failure> {
    run(cargo().args(["fmt", "--all", "--", "--check"]))?;
    size::check()?;
    deps::check()?;
    policy::check()?;
    licenses::check()?;
    run(cargo().args(["clippy", "--workspace", "--all-targets", "--profile", "test-opt", "--", "-D", "warnings"]))?;
    run(cargo()
        .args(["doc", "--workspace", "--no-deps", "--document-private-items", "--profile", "test-opt"])
        .env("RUSTDOCFLAGS", "-D warnings"))
}

/// One optimised build with all checks on serves every suite.
fn cargo_test() -> Command {
    let mut command = cargo();
    command.args(["test", "--workspace", "--profile", "test-opt"]);
    // Tests see the NPU in the suite that fetches its library, and nowhere else.
    command.env_remove("QHX_QNN_DIR");
    command
}

//! The programs that hold the tests: built once, then run by whichever suites need them.

use crate::{Failure, cargo, root, shown, target};
use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// The profile of all tests: one build with every check on serves all suites.
pub(crate) const PROFILE: [&str; 2] = ["--profile", "test-opt"];

/// Tests that measure or change their whole process, each a program of its own, and what it is. All others are modules of their crate's `suite`.
pub(crate) const OWN_PROCESS: [(&str, &str, &str); 8] = [
    ("qhx-cpu", "idle", "measures CPU time"),
    ("qhx-cpu", "no_alloc", "counts allocations"),
    ("qhx-forge", "gate_memory", "measures memory"),
    ("qhx-forge", "memory", "measures memory"),
    ("qhx-runtime", "decode_allocations", "counts allocations"),
    ("qhx-runtime", "text_sampler", "counts allocations"),
    ("qhx-text", "text_hostile", "measures allocated memory"),
    ("qhx-text", "text_quiet", "sets the panic hook"),
];

/// A program with tests.
#[derive(Clone)]
pub(crate) struct Program {
    pub(crate) package: String,
    /// `lib`, the name of a binary, or of a file or folder in `tests`.
    pub(crate) name: String,
    path: PathBuf,
}

/// Builds the programs of some packages, or of all, and notes where they are for [`all`].
pub(crate) fn build(packages: &[&str]) -> Result<(), Failure> {
    let mut build = cargo();
    build.args(["test", "--lib", "--bins", "--tests"]).args(PROFILE);
    match packages {
        // Of the whole workspace even where a part would do: else dependencies would be built again with other features.
        [] => _ = build.arg("--workspace"),
        some => some.iter().for_each(|name| _ = build.args(["--package", name])),
    }
    let list = built(build)?.into_iter().map(|program| format!("{}\t{}\t{}\n", program.package, program.name, program.path.display()));
    fs::write(place(), list.collect::<String>()).map_err(|e| format!("{}: {e}", place().display()))
}

/// The programs that a `cargo test` would run: they are built.
pub(crate) fn built(mut build: Command) -> Result<Vec<Program>, Failure> {
    build.args(["--no-run", "--message-format", "json-render-diagnostics"]);
    let output = build.stderr(Stdio::inherit()).output().map_err(|e| format!("cannot start {build:?}: {e}"))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).lines().filter_map(listed).collect()),
        false => Err(format!("{} ended with {}", shown(&build), output.status)),
    }
}

/// Where [`build`] leaves its list: a line each, with tabs.
fn place() -> PathBuf {
    target().join("test-programs.txt")
}

/// What a message of cargo's says was built.
fn listed(message: &str) -> Option<Program> {
    let message: Value = serde_json::from_str(message).ok()?;
    let path = message["executable"].as_str().filter(|_| message["profile"]["test"] == true)?;
    let package = Path::new(message["manifest_path"].as_str()?).parent()?.file_name()?.to_str()?;
    let target = &message["target"];
    let name = if target["kind"] == serde_json::json!(["lib"]) { "lib" } else { target["name"].as_str()? };
    Some(Program { package: package.into(), name: name.into(), path: path.into() })
}

/// The programs that were built last.
pub(crate) fn all() -> Result<Vec<Program>, Failure> {
    let list = fs::read_to_string(place()).map_err(|e| format!("{}: {e}: nothing was built", place().display()))?;
    let program = |line: &str| {
        let (package, rest) = line.split_once('\t')?;
        let (name, path) = rest.split_once('\t')?;
        Some(Program { package: package.into(), name: name.into(), path: path.into() })
    };
    Ok(list.lines().filter_map(program).collect())
}

/// The program with the integration tests of a package.
pub(crate) fn suite(package: &str) -> Result<Program, Failure> {
    one(package, "suite")
}

pub(crate) fn one(package: &str, name: &str) -> Result<Program, Failure> {
    let found = all()?.into_iter().find(|program| program.package == package && program.name == name);
    found.ok_or_else(|| format!("the tests `{name}` of {package} were not built"))
}

/// A program of the workspace, as [`build`] has built it for the tests of it. `cargo build` would build it anew, with other features of its dependencies.
pub(crate) fn binary(name: &str) -> PathBuf {
    target().join("test-opt").join(name)
}

impl Program {
    pub(crate) fn command(&self) -> Command {
        self.prepare(Command::new(&self.path))
    }

    /// The same, started by another program: an emulator, a loader.
    pub(crate) fn started_by(&self, mut starter: Command) -> Command {
        starter.arg(&self.path);
        self.prepare(starter)
    }

    fn prepare(&self, mut command: Command) -> Command {
        command.current_dir(root().join(if self.package == "xtask" { "" } else { "crates" }).join(&self.package));
        // Tests see the NPU in the suites that fetch its library, and nowhere else.
        command.env_remove("QHX_QNN_DIR");
        command
    }

    /// Runs the tests whose names have one of `filters` in them, or all; `choice` is what else the program is told, `--ignored` for example.
    pub(crate) fn run(&self, choice: &[&str], filters: &[&str]) -> Result<(), Failure> {
        let mut command = self.command();
        command.args(choice).args(filters);
        run(&format!("{} {}", self.package, self.name), &mut command)
    }
}

/// Tests and how many seconds each took.
static TIMES: Mutex<Vec<(f64, String)>> = Mutex::new(Vec::new());

/// Runs a program with tests: a line if it passes, all that it printed if not.
pub(crate) fn run(name: &str, command: &mut Command) -> Result<(), Failure> {
    let start = Instant::now();
    judge(name, &timed(command)?, start.elapsed())
}

/// Runs a program with tests, which tells what each test took.
pub(crate) fn timed(command: &mut Command) -> Result<Output, Failure> {
    // Stable Rust keeps this to those who ask for what may change. If it does, only the times are lost.
    const TELL: [&str; 2] = ["-Zunstable-options", "--report-time"];
    // A command may be run again.
    if command.get_args().all(|argument| argument != TELL[0]) {
        command.args(TELL);
    }
    command.env("RUSTC_BOOTSTRAP", "1").stdin(Stdio::null());
    command.output().map_err(|e| format!("cannot start {command:?}: {e}"))
}

/// A line for a program that passed; all that it printed, and an error, for another.
pub(crate) fn judge(name: &str, output: &Output, wall: Duration) -> Result<(), Failure> {
    let printed = String::from_utf8_lossy(&output.stdout);
    match note(name, &printed).filter(|_| output.status.success()) {
        Some(counts) => {
            println!("  {name}: {counts} in {:.1} s", wall.as_secs_f64());
            Ok(())
        }
        None => {
            println!("{printed}{}", String::from_utf8_lossy(&output.stderr));
            Err(format!("{name} ended with {}", output.status))
        }
    }
}

/// Notes the times of tests. Gives how many passed, and how many were left out.
fn note(program: &str, printed: &str) -> Option<String> {
    let mut times = TIMES.lock().unwrap_or_else(PoisonError::into_inner);
    let test = |line: &str| {
        let (rest, seconds) = line.strip_suffix("s>")?.rsplit_once(" <")?;
        let name = rest.strip_prefix("test ")?.split(" ... ").next()?;
        Some((seconds.parse().ok()?, format!("{program} {name}")))
    };
    times.extend(printed.lines().filter_map(test));
    let result = printed.lines().rev().find_map(|line| line.strip_prefix("test result: ok. "))?;
    let counts =
        result.split("; ").filter(|count| ["passed", "ignored"].iter().any(|kind| count.ends_with(kind)) && !count.starts_with("0 "));
    Some(counts.collect::<Vec<_>>().join(", "))
}

/// Prints the ten tests that took longest.
pub(crate) fn print_slowest() {
    let mut times = TIMES.lock().unwrap_or_else(PoisonError::into_inner);
    times.sort_by(|a, b| b.0.total_cmp(&a.0));
    for (seconds, name) in times.iter().take(10).filter(|(seconds, _)| *seconds >= 0.1) {
        println!("  {seconds:7.1} s  {name}");
    }
}

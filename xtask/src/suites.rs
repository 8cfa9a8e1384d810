//! The test suites: what each does, what it may cost, and the three ways to run them.

use crate::{
    Failure, aarch64, assets, attack, cargo, changed, conventions, deps, features, fuzz, gpu, judges, licenses, loom, measure, mutants,
    package, policy, programs, programs::PROFILE, run, size, target,
};
use std::{
    env,
    fs::{self, File},
    process::Command,
    sync::{Mutex, PoisonError},
    thread,
};

/// A suite.
struct Suite {
    name: &'static str,
    /// CPU seconds that it takes once everything is built, by default and extended, on a core of 2024. None: it is not in that tier.
    budget: [Option<u32>; 2],
    /// What it fetches first.
    assets: &'static [Asset],
    work: Work,
}

enum Work {
    /// All tests of the crate of the suite's name that need nothing fetched.
    Crate,
    /// Runs programs with tests.
    Programs(fn(Tier) -> Result<(), Failure>),
    /// Needs none of them.
    Sources(fn() -> Result<(), Failure>),
}

/// Files of others, by the suites' names for them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Asset {
    SmolLm2,
    Tokenizers,
    Qnn,
    Vulkan,
    NewerVulkan,
    Aarch64,
    Judges,
    Loom,
}

impl Asset {
    fn fetch(self) -> Result<(), Failure> {
        match self {
            Self::SmolLm2 => assets::smollm2().map(drop),
            Self::Tokenizers => assets::real_tokenizers().map(drop),
            Self::Qnn => assets::qnn().map(drop),
            Self::Vulkan => gpu::driver().and_then(|_| gpu::compiler()).map(drop),
            Self::NewerVulkan => gpu::newer_driver().map(drop),
            Self::Aarch64 => aarch64::tools().map(drop),
            Self::Judges => judges::python().map(drop),
            Self::Loom => loom::fetch(),
        }
    }
}

/// How much is tested.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tier {
    Default,
    Extended,
}

/// A suite fails beyond so many times its budget: machines differ, and twice as slow is no news.
const PATIENCE: f64 = 3.0;

/// All suites, the longest first where they run side by side; those that call cargo apart from each other, for it lets one build wait for another.
const SUITES: [Suite; 29] = {
    use Asset::*;
    use Work::{Crate, Programs, Sources};
    const fn suite(name: &'static str, budget: [Option<u32>; 2], assets: &'static [Asset], work: Work) -> Suite {
        Suite { name, budget, assets, work }
    }
    [
        suite("gpu", [Some(130), Some(900)], &[Vulkan, NewerVulkan, Qnn], Programs(gpu::test)),
        suite("aarch64", [Some(100), Some(900)], &[Aarch64], Programs(aarch64::test)),
        suite("package", [Some(60), Some(60)], &[], Sources(package::package)),
        suite("npu", [Some(160), Some(400)], &[Qnn], Programs(npu)),
        suite("qhx-forge", [Some(80), Some(600)], &[], Crate),
        suite("gates", [Some(80), Some(400)], &[], Programs(gates)),
        suite("qhx-cli", [Some(30), Some(40)], &[], Crate),
        suite("qhx-cpu", [Some(25), Some(300)], &[], Crate),
        suite("qhx-runtime", [Some(15), Some(60)], &[], Crate),
        suite("qhx-server", [Some(10), Some(40)], &[], Crate),
        suite("qhx-npu", [Some(5), Some(5)], &[], Crate),
        suite("qhx-gpu", [Some(5), Some(5)], &[], Crate),
        suite("qhx-ir", [Some(10), Some(30)], &[], Crate),
        suite("qhx-bundle", [Some(10), Some(10)], &[], Crate),
        suite("qhx-text", [Some(10), Some(10)], &[], Crate),
        suite("qhx-media", [Some(10), Some(10)], &[], Crate),
        suite("qhx", [Some(10), Some(10)], &[], Crate),
        suite("qhx-attack", [Some(10), Some(10)], &[], Crate),
        suite("xtask", [Some(2), Some(2)], &[], Crate),
        suite("judges", [Some(40), Some(400)], &[Judges], Programs(judges::test)),
        suite("attack", [Some(30), Some(8000)], &[], Programs(attack::test)),
        suite("doctest", [Some(60), Some(60)], &[], Sources(doctest)),
        suite("smollm2", [Some(35), Some(35)], &[SmolLm2], Programs(smollm2)),
        suite("tokenizers", [Some(10), Some(10)], &[Tokenizers], Programs(tokenizers)),
        suite("features", [None, Some(200)], &[], Sources(features::features)),
        suite("fuzz", [None, Some(1200)], &[], Programs(fuzz::test)),
        suite("loom", [None, Some(60)], &[Loom], Sources(loom::models)),
        suite("mutants", [None, Some(10_000)], &[], Sources(mutants::all)),
        suite("dependencies", [None, Some(60)], &[], Sources(policy::deny)),
    ]
};

/// The crates whose tests are a suite.
pub(crate) fn of_crates() -> impl Iterator<Item = &'static str> {
    SUITES.iter().filter(|suite| matches!(suite.work, Work::Crate)).map(|suite| suite.name)
}

fn find(name: &str) -> Result<&'static Suite, Failure> {
    SUITES.iter().find(|suite| suite.name == name).ok_or_else(|| {
        let names: Vec<_> = SUITES.iter().map(|suite| suite.name).collect();
        format!("no suite is named `{name}`; there are {}", names.join(", "))
    })
}

/// `cargo xtask test` with its arguments.
pub(crate) fn test(arguments: &[&str]) -> Result<(), Failure> {
    match arguments {
        ["--quick"] => quick("HEAD"),
        ["--quick", commit] => quick(commit),
        ["--extended", names @ ..] => tests(Tier::Extended, names),
        names => match names.iter().find(|name| name.starts_with('-')) {
            Some(flag) => Err(format!("`{flag}` is none of the flags of `cargo xtask test`: --quick [COMMIT], --extended [SUITE…]")),
            None => tests(Tier::Default, names),
        },
    }
}

/// Lints, builds and runs the suites of these names, or all of a tier.
fn tests(tier: Tier, names: &[&str]) -> Result<(), Failure> {
    let suites = match names {
        [] => SUITES.iter().filter(|suite| suite.budget[tier as usize].is_some()).collect(),
        names => names.iter().map(|name| find(name)).collect::<Result<Vec<_>, _>>()?,
    };
    let fetching = Fetching::start(&suites);
    let mut table = Table::default();
    let result = (|| {
        if names.is_empty() {
            table.step("lint", || measure::run(own().arg("lint")))?;
        }
        if suites.iter().any(|suite| !matches!(suite.work, Work::Sources(_))) {
            table.step("build", || measure::run(own().arg("build-tests")))?;
        }
        let suites = fetching.wait(suites)?;
        side_by_side(tier, &suites, &mut table)
    })();
    table.print();
    result
}

/// Fetches all that the suites of a tier need, to test without a network later.
pub(crate) fn fetch() -> Result<(), Failure> {
    Fetching::start(&SUITES.iter().collect::<Vec<_>>()).wait(Vec::new()).map(drop)
}

/// Unit tests and suites of the crates that changed against a commit.
fn quick(commit: &str) -> Result<(), Failure> {
    let changed = changed::since(commit)?;
    if changed.crates.is_empty() {
        println!("no crate differs from {commit}: nothing to test");
        return Ok(());
    }
    let suites: Vec<_> = SUITES.iter().filter(|suite| changed.crates.iter().any(|name| name == suite.name)).collect();
    let mut table = Table::default();
    let result = (|| {
        table.step("build", || measure::run(own().arg("build-tests").args(suites.iter().map(|suite| suite.name))))?;
        side_by_side(Tier::Default, &suites, &mut table)
    })();
    table.print();
    println!("Not tested: crates that depend on {}, devices that need something fetched, lints.", changed.crates.join(", "));
    if !changed.elsewhere.is_empty() {
        println!("Changed outside of the crates and not tested either: {}.", changed.elsewhere.join(", "));
    }
    result
}

/// Assets on their way while something else is done.
struct Fetching(Vec<(Asset, thread::JoinHandle<Result<(), Failure>>)>);

impl Fetching {
    fn start(suites: &[&Suite]) -> Self {
        let mut wanted: Vec<Asset> = Vec::new();
        for asset in suites.iter().flat_map(|suite| suite.assets) {
            if !wanted.contains(asset) {
                wanted.push(*asset);
            }
        }
        Self(wanted.into_iter().map(|asset| (asset, thread::spawn(move || asset.fetch()))).collect())
    }

    /// The suites that can run. In CI (CI=true) one that cannot is a failure; elsewhere it is named and left out.
    fn wait(self, mut suites: Vec<&'static Suite>) -> Result<Vec<&'static Suite>, Failure> {
        for (asset, fetch) in self.0 {
            let Err(e) = fetch.join().unwrap_or_else(|_| Err("its thread ended early".into())) else { continue };
            if in_ci() {
                return Err(format!("cannot fetch {asset:?}: {e}"));
            }
            let without: Vec<&Suite>;
            (without, suites) = suites.into_iter().partition(|suite| suite.assets.contains(&asset));
            let names: Vec<_> = without.iter().map(|suite| suite.name).collect();
            eprintln!("not run: {}: cannot fetch {asset:?}: {e}", names.join(", "));
        }
        Ok(suites)
    }
}

/// Runs suites, each in a process of its own, as many at a time as there are cores: many a suite waits for a single thread.
fn side_by_side(tier: Tier, suites: &[&Suite], table: &mut Table) -> Result<(), Failure> {
    let logs = target().join("test-logs");
    fs::create_dir_all(&logs).map_err(|e| format!("{}: {e}", logs.display()))?;
    let (queue, table) = (Mutex::new(suites.iter()), Mutex::new(table));
    let failed = Mutex::new(Vec::new());
    let worker = || {
        while let Some(suite) = { queue.lock().unwrap_or_else(PoisonError::into_inner).next() } {
            let log = logs.join(format!("{}.txt", suite.name));
            let measured = File::create(&log).and_then(|file| Ok((file.try_clone()?, file))).map_err(|e| format!("{}: {e}", log.display()));
            let measured = measured.and_then(|(out, err)| {
                let mut command = own();
                command.args(["suite", suite.name]).stdout(out).stderr(err);
                if tier == Tier::Extended {
                    command.env(EXTENDED, "1");
                }
                measure::run(&mut command)
            });
            let mut table = table.lock().unwrap_or_else(PoisonError::into_inner);
            let printed = fs::read(&log).unwrap_or_default();
            println!("── {}\n{}", suite.name, String::from_utf8_lossy(&printed).trim_end());
            if let Err(e) = measured.and_then(|measured| table.add(suite.name, measured, suite.budget[tier as usize])) {
                failed.lock().unwrap_or_else(PoisonError::into_inner).push(e);
            }
        }
    };
    let lanes = thread::available_parallelism().map_or(2, usize::from);
    thread::scope(|scope| (0..lanes).for_each(|_| _ = scope.spawn(worker)));
    let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    if failed.is_empty() { Ok(()) } else { Err(failed.join("\nerror: ")) }
}

/// Whether what cannot be tested is a failure.
pub(crate) fn in_ci() -> bool {
    env::var("CI").is_ok_and(|v| v == "true" || v == "1")
}

/// Says to tests that they test all that they can, and not only an instance of it.
const EXTENDED: &str = "QHX_EXTENDED";

/// A suite in this process.
pub(crate) fn one(name: &str) -> Result<(), Failure> {
    let tier = if env::var_os(EXTENDED).is_some() { Tier::Extended } else { Tier::Default };
    let suite = find(name)?;
    let result = match suite.work {
        Work::Crate => of_crate(suite.name, tier),
        Work::Programs(work) => work(tier),
        Work::Sources(work) => work(),
    };
    programs::print_slowest();
    result
}

/// All tests of a crate that need nothing fetched; extended also those that are named so.
fn of_crate(name: &str, tier: Tier) -> Result<(), Failure> {
    let programs = programs::all()?.into_iter().filter(|program| program.package == name);
    programs.into_iter().try_for_each(|program| {
        // What forges and gates whole models is a suite of its own.
        let others = if name == "qhx-cli" { GATES.map(|module| ["--skip", module]).concat() } else { Vec::new() };
        program.run(&others, &[])?;
        if tier == Tier::Extended && program.name == "suite" {
            program.run(&[&["--ignored"], &others[..]].concat(), &["extended"])
        } else {
            Ok(())
        }
    })
}

/// The modules of the binary's tests that forge whole models with their gates.
const GATES: [&str; 2] = ["gates::", "demo::"];

fn gates(tier: Tier) -> Result<(), Failure> {
    let program = programs::suite("qhx-cli")?;
    program.run(&[], &GATES)?;
    if tier == Tier::Extended { program.run(&["--ignored"], &["demo::extended", "gates::extended"]) } else { Ok(()) }
}

/// What runs in QNN's emulator.
fn npu(_: Tier) -> Result<(), Failure> {
    let qnn = assets::qnn()?;
    for (package, filters) in [("qhx-npu", &[][..]), ("qhx-forge", &["npu::"]), ("qhx-cli", &["npu::", "doctor::"])] {
        let mut command = programs::suite(package)?.started_by(on_one_core());
        command.arg("--ignored").args(filters).env("QHX_QNN_DIR", &qnn);
        programs::run(&format!("{package} suite"), &mut command)?;
    }
    Ok(())
}

/// What starts a program on one core: the emulator's threads spin for each other, and there take three quarters of the CPU time.
fn on_one_core() -> Command {
    let facts = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let allowed = facts.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let first = allowed.and_then(|list| list.trim().split([',', '-']).next()).unwrap_or("0").to_owned();
    let mut command = Command::new("taskset");
    command.args(["--cpu-list", &first]);
    command
}

fn smollm2(_: Tier) -> Result<(), Failure> {
    let mut command = programs::suite("qhx-cli")?.command();
    programs::run("qhx-cli suite", command.args(["--ignored", "smollm2::"]).env("QHX_SMOLLM2", assets::smollm2()?))
}

fn tokenizers(_: Tier) -> Result<(), Failure> {
    let mut command = programs::suite("qhx-text")?.command();
    programs::run("qhx-text suite", command.args(["--ignored", "real::"]).env("QHX_REAL_TOKENIZERS", assets::real_tokenizers()?))
}

fn doctest() -> Result<(), Failure> {
    run(cargo().args(["test", "--quiet", "--workspace", "--doc"]).args(PROFILE))
}

/// Models of full size against the oracle: all, or those named (with commas between).
pub(crate) fn fullsize(names: &str) -> Result<(), Failure> {
    let mut test = cargo();
    test.args(["test", "--workspace", "--test", "suite"]).args(PROFILE).args(["fullsize::", "--", "--ignored", "--nocapture"]);
    run(test.env("QHX_FULLSIZE", names).env("QHX_FULLSIZE_DIR", assets::place("fullsize")))
}

/// Formatting, lints and documentation, without a warning.
pub(crate) fn lint() -> Result<(), Failure> {
    run(cargo().args(["fmt", "--all", "--", "--check"]))?;
    size::check()?;
    deps::check()?;
    policy::check()?;
    licenses::check()?;
    conventions::check()?;
    run(cargo().args(["clippy", "--workspace", "--all-targets"]).args(PROFILE).args(["--", "-D", "warnings"]))?;
    run(cargo().args(["doc", "--workspace", "--no-deps", "--document-private-items"]).args(PROFILE).env("RUSTDOCFLAGS", "-D warnings"))
}

/// This program, for a process whose time is measured.
fn own() -> Command {
    Command::new(env::current_exe().unwrap_or_else(|_| env::args_os().next().unwrap_or_default().into()))
}

/// What the suites took.
#[derive(Default)]
struct Table(Vec<String>);

impl Table {
    /// Does something on which all else depends.
    fn step(&mut self, name: &str, work: impl FnOnce() -> Result<measure::Measured, Failure>) -> Result<(), Failure> {
        println!("── {name}");
        work().and_then(|measured| self.add(name, measured, None))
    }

    /// Adds a line. An error if the suite failed or took much too long.
    fn add(&mut self, name: &str, measured: measure::Measured, budget: Option<u32>) -> Result<(), Failure> {
        let (wall, cpu) = (measured.wall.as_secs_f64(), measured.cpu.as_secs_f64());
        let too_long = budget.is_some_and(|budget| cpu > PATIENCE * f64::from(budget));
        let result = if !measured.status.success() {
            "FAILED"
        } else if too_long {
            "TOO LONG"
        } else {
            "ok"
        };
        let shown = budget.map_or_else(String::new, |budget| budget.to_string());
        self.0.push(format!("{name:<14} {result:>8} {wall:>9.1} {cpu:>12.1} {shown:>8}"));
        match result {
            "ok" => Ok(()),
            "FAILED" => Err(format!("the suite {name} failed")),
            _ => Err(format!("the suite {name} took {cpu:.0} CPU seconds, more than {PATIENCE} times its budget of {shown}")),
        }
    }

    fn print(&self) {
        println!("\n{:<14} {:>8} {:>9} {:>12} {:>8}", "suite", "result", "seconds", "CPU seconds", "budget");
        self.0.iter().for_each(|line| println!("{line}"));
    }
}

//! Tests many times over, to find those that fail now and then.

use crate::{Failure, cargo, programs, programs::PROFILE, programs::Program, target};
use std::{
    collections::BTreeMap,
    fs,
    process::Stdio,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Instant,
};

const USAGE: &str = "expected: cargo xtask repeat N [--beside-build] [--skip TEST]… CRATE[:TEST]…";

/// What the arguments ask for.
struct Order<'a> {
    times: usize,
    beside_build: bool,
    skip: Vec<&'a str>,
    /// Crates, each with a part of its tests' names, or all.
    crates: Vec<(&'a str, &'a str)>,
}

/// Runs tests N times and prints which of them failed how often.
pub(crate) fn repeat(arguments: &[&str]) -> Result<(), Failure> {
    let order = read(arguments)?;
    programs::build(&[])?;
    let all = programs::all()?;
    let runs: Vec<(&Program, &str)> = order
        .crates
        .iter()
        .flat_map(|(package, test)| all.iter().filter(move |program| program.package == *package).map(move |program| (program, *test)))
        .collect();
    if let Some((package, _)) = order.crates.iter().find(|(package, _)| runs.iter().all(|(program, _)| program.package != *package)) {
        return Err(format!("{package} has no tests"));
    }
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        if order.beside_build {
            scope.spawn(|| keep_building(&ended));
        }
        let result = runs.iter().map(|(program, test)| times(program, test, &order)).collect::<Result<Vec<_>, _>>();
        ended.store(true, Ordering::Relaxed);
        match result?.iter().sum() {
            0 => Ok(()),
            failures => Err(format!("{failures} failures: what they printed is in {}", log().display())),
        }
    })
}

fn read<'a>(arguments: &[&'a str]) -> Result<Order<'a>, Failure> {
    let (times, mut rest) = arguments.split_first().ok_or(USAGE)?;
    let mut order = Order { times: times.parse().map_err(|_| USAGE)?, beside_build: false, skip: Vec::new(), crates: Vec::new() };
    loop {
        rest = match rest {
            [] if order.crates.is_empty() => return Err(USAGE.into()),
            [] => return Ok(order),
            ["--beside-build", rest @ ..] => {
                order.beside_build = true;
                rest
            }
            ["--skip", test, rest @ ..] => {
                order.skip.push(test);
                rest
            }
            [flag, ..] if flag.starts_with('-') => return Err(USAGE.into()),
            [name, rest @ ..] => {
                order.crates.push(name.split_once(':').unwrap_or((name, "")));
                rest
            }
        };
    }
}

/// Runs a program N times. Gives the number of failures.
fn times(program: &Program, test: &str, order: &Order<'_>) -> Result<usize, Failure> {
    let (mut failures, mut passed, start) = (BTreeMap::<String, usize>::new(), 0, Instant::now());
    for _ in 0..order.times {
        let mut command = program.command();
        command.args(order.skip.iter().flat_map(|test| ["--skip", test])).arg(test);
        let output = programs::timed(&mut command)?;
        let printed = String::from_utf8_lossy(&output.stdout);
        passed = passed.max(results(&printed, "ok").count());
        let mut failed: Vec<&str> = results(&printed, "FAILED").collect();
        if failed.is_empty() && !output.status.success() {
            failed.push("(the program)");
        }
        if !failed.is_empty() {
            let text = format!("{printed}{}", String::from_utf8_lossy(&output.stderr));
            fs::write(log(), text).map_err(|e| format!("{}: {e}", log().display()))?;
        }
        failed.into_iter().for_each(|name| *failures.entry(name.to_owned()).or_default() += 1);
    }
    if passed > 0 || !failures.is_empty() {
        let (name, seconds) = (format!("{} {}", program.package, program.name), start.elapsed().as_secs_f64());
        println!("{name:<32} {passed:>4} tests, {} times in {seconds:.0} s, {} failures", order.times, failures.values().sum::<usize>());
        failures.iter().for_each(|(name, count)| println!("  {count:>3} of {:<3} {name}", order.times));
    }
    Ok(failures.values().sum())
}

/// The tests of which this is said.
fn results<'a>(printed: &'a str, result: &'a str) -> impl Iterator<Item = &'a str> {
    let tests = printed.lines().filter_map(|line| line.strip_prefix("test ")?.split_once(" ... "));
    tests.filter(move |(_, said)| said.starts_with(result)).map(|(name, _)| name)
}

/// What the last failure printed.
fn log() -> std::path::PathBuf {
    target().join("repeat.txt")
}

/// Builds `qhx-ir` with its dependencies from nothing, on all cores, again and again.
fn keep_building(ended: &AtomicBool) {
    let folder = target().join("repeat");
    while !ended.load(Ordering::Relaxed) {
        let _ = fs::remove_dir_all(&folder);
        let mut build = cargo();
        build.args(["build", "--quiet", "--offline", "--package", "qhx-ir", "--target-dir"]).arg(&folder).args(PROFILE);
        if !build.stdin(Stdio::null()).status().is_ok_and(|status| status.success()) {
            eprintln!("the build beside the tests failed: from here on they run alone");
            return;
        }
    }
}

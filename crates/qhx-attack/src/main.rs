//! Hostile input against the libraries, the binary and a server, for a given time: `cargo xtask attack`.
//!
//! Each class of input has a maker of cases and a way into the libraries ([`classes`]). Workers are processes of their own with limits of memory and
//! time ([`worker`], [`supervise`], [`limits`]), so that a crash or a hang is a result and not an end. A case follows from its class, the seed and its
//! number alone.

mod classes;
mod command;
mod corpus;
mod ending;
mod files;
mod http;
mod limits;
mod mutate;
mod options;
mod random;
mod report;
mod seeds;
mod server;
mod supervise;
mod worker;

use options::{HELP, Options};
use seeds::Seeds;
use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::{self, ExitCode},
    time::{Duration, Instant},
};
use worker::Order;

fn main() -> ExitCode {
    let arguments: Vec<OsString> = env::args_os().skip(1).collect();
    let done = match arguments.split_first() {
        Some((first, order)) if first == "--worker" => {
            Order::from_arguments(order).ok_or("a worker got no order".into()).and_then(worker::work).map(|()| true)
        }
        Some((first, [folder])) if first == "corpus" => Prepared::new().and_then(|prepared| {
            let folder = Path::new(folder);
            corpus::write(&prepared.seeds, folder).map_err(|error| format!("{}: {error}", folder.display())).map(|()| true)
        }),
        _ => match Options::read(arguments.into_iter().map(|argument| argument.to_string_lossy().into_owned())) {
            Ok(Some(options)) => attack(&options),
            Ok(None) => {
                println!("{HELP}");
                return ExitCode::SUCCESS;
            }
            Err(problem) => {
                eprintln!("error: {problem}\n\n{HELP}");
                return ExitCode::from(2);
            }
        },
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(problem) => {
            eprintln!("error: {problem}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the classes one after the other; true where nothing failed.
fn attack(options: &Options) -> Result<bool, String> {
    let Prepared { program, folder, scratch, bundles, seeds } = Prepared::new()?;
    let mut results = Vec::new();
    for &class in &options.classes {
        let order = Order {
            class,
            seed: options.seed,
            first: options.case.unwrap_or(0),
            step: 1,
            count: options.case.map_or(options.cases, |_| 1),
            time: options.case.map_or(options.time, |_| Duration::from_secs(3600)),
            limit: options.limit,
            bundles: bundles.clone(),
            scratch: scratch.0.clone(),
            qhx: program.with_file_name("qhx"),
        };
        let began = Instant::now();
        let tally = supervise::run(&order, options.case.map_or(options.jobs, |_| 1))?;
        let seconds = began.elapsed().as_secs_f64();
        let cannot = |error| format!("{}: {error}", folder.display());
        let places = match options.case {
            Some(number) if tally.failures.is_empty() => {
                vec![report::keep_one(&order, number, "nothing wrong", &seeds, &folder.join("cases")).map_err(cannot)?]
            }
            _ => report::keep(&order, &tally.failures, &seeds, &folder.join("failures")).map_err(cannot)?,
        };
        for (failure, place) in tally.failures.iter().zip(&places) {
            eprintln!("{} {}: {}\n  kept in {}", class.name, failure.number, failure.problem, place.display());
        }
        results.push(report::Result { class, tally, seconds });
    }
    match options.json {
        true => println!("{}", report::as_json(options.seed, &results)),
        false => print!("{}", report::table(&results)),
    }
    Ok(results.iter().all(|result| result.tally.failures.is_empty()))
}

/// What all classes begin with.
struct Prepared {
    program: PathBuf,
    /// Where failures are kept.
    folder: PathBuf,
    scratch: Scratch,
    bundles: PathBuf,
    seeds: Seeds,
}

impl Prepared {
    fn new() -> Result<Self, String> {
        let program = env::current_exe().map_err(|error| error.to_string())?;
        let folder = program.ancestors().nth(2).unwrap_or(Path::new(".")).join("attack");
        let scratch = Scratch(folder.join(format!("run-{}", process::id())));
        let bundles = scratch.0.join("bundles");
        fs::create_dir_all(&bundles).map_err(|error| format!("{}: {error}", bundles.display()))?;
        seeds::forge_bundles(&bundles)?;
        let seeds = Seeds::read(&bundles).map_err(|error| format!("the seeds cannot be read: {error}"))?;
        Ok(Self { program, folder, scratch, bundles, seeds })
    }
}

/// A folder that goes when it is no longer needed.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

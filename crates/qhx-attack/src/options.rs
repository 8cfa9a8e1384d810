//! The command line.

use crate::classes::{Class, class, classes};
use std::time::Duration;

/// What `--help` says.
pub(crate) const HELP: &str = "cargo xtask attack [CLASS…] [--seconds N] [--seed S] [--jobs N] [--json]
cargo xtask attack CLASS --seed S --case N
cargo xtask attack corpus FOLDER

Turns good input of each class into hostile input.

Files go to the libraries and, one case in 16, to the `qhx` binary. A case fails if it panics, is killed by a signal, exits with a code other than 0, 1 or 2,
needs more than 4 GiB of memory or 5 s of CPU time, ends differently when repeated, prints control characters or more than 64 KiB on stderr, or leaves a file.

Requests go to a `qhx serve` that lives through all cases of a worker. A case fails if the server ends, panics, answers with 500 or not at all, keeps more than
1 GiB of memory, answers a known question differently, or takes a second for `/health`.

Commands are given special files, or get a signal at a random moment. A case fails if the command does not end, or if anything half written remains.

  CLASS…       default: all
               files:    gguf safetensors config bundle program template tokenizer media chat toml
               requests: grammar schema forced body http keys mediafolder
               commands: batch kill
  --seconds N  time for each class (default 60)
  --cases N    at most N cases of each class
  --seed S     a different seed gives different cases (default 1)
  --case N     only case N of the class, as numbered in a failure report; keeps its files
  --limit N    CPU seconds allowed for a case (default 5)
  --jobs N     worker processes (default: one per core)
  --json       print one JSON object on stdout

`corpus` writes the good input of each fuzz target into a folder. Failing cases are kept in target/attack/failures, each with the command that repeats it. The exit code is 1 if any case failed.";

/// What to run.
pub(crate) struct Options {
    /// The classes, in order.
    pub(crate) classes: Vec<&'static Class>,
    /// Time for each class.
    pub(crate) time: Duration,
    /// Seed of the random numbers.
    pub(crate) seed: u64,
    /// The most cases of each class.
    pub(crate) cases: u64,
    /// Run only this case.
    pub(crate) case: Option<u64>,
    /// CPU time allowed for a case.
    pub(crate) limit: Duration,
    /// Worker processes.
    pub(crate) jobs: u64,
    /// Print the result as JSON.
    pub(crate) json: bool,
}

impl Options {
    /// Parses the arguments; `None` asks for help.
    pub(crate) fn read(arguments: impl IntoIterator<Item = String>) -> Result<Option<Self>, String> {
        let jobs = std::thread::available_parallelism().map_or(1, |threads| threads.get() as u64);
        let mut options = Self {
            classes: Vec::new(),
            time: Duration::from_secs(60),
            seed: 1,
            cases: u64::MAX,
            case: None,
            limit: Duration::from_secs(5),
            jobs,
            json: false,
        };
        let mut arguments = arguments.into_iter();
        while let Some(argument) = arguments.next() {
            let mut number = || {
                let value = arguments.next().ok_or_else(|| format!("{argument} needs a number"))?;
                value.parse::<u64>().map_err(|_| format!("{argument} needs a number, found {value:?}"))
            };
            match argument.as_str() {
                "--seconds" => options.time = Duration::from_secs(at_least_one(&argument, number()?)?),
                "--seed" => options.seed = number()?,
                "--cases" => options.cases = number()?.max(1),
                "--case" => options.case = Some(number()?),
                "--limit" => options.limit = Duration::from_secs(at_least_one(&argument, number()?)?),
                "--jobs" => options.jobs = at_least_one(&argument, number()?)?,
                "--json" => options.json = true,
                "--help" | "-h" => return Ok(None),
                name => options.classes.push(class(name).ok_or_else(|| format!("there is no class {name:?}"))?),
            }
        }
        if options.case.is_some() && options.classes.len() != 1 {
            return Err("--case needs the one class that the case is of".into());
        }
        if options.classes.is_empty() {
            options.classes = classes().collect();
        }
        Ok(Some(options))
    }
}

fn at_least_one(flag: &str, number: u64) -> Result<u64, String> {
    match number {
        1..=86_400 => Ok(number),
        _ => Err(format!("{flag} must be 1 to 86400, found {number}")),
    }
}

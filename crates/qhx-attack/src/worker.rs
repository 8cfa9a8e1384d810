//! The process that runs the cases. It may crash, hang or run out of memory: the last line that it printed says in which case.

use crate::{
    classes::{Bench, Case, Class, Outcome, class},
    command,
    random::Random,
    seeds::Seeds,
};
use std::{
    ffi::OsString,
    fs,
    io::{self, Write},
    panic::{self, AssertUnwindSafe},
    path::PathBuf,
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

/// One case in so many goes to the binary, the others to the libraries.
const TO_THE_BINARY: u64 = 16;
/// One case in so many is run twice, and must end the same way.
const TWICE: u64 = 8;

/// What a worker is to do.
#[derive(Clone)]
pub(crate) struct Order {
    /// The class of the cases.
    pub(crate) class: &'static Class,
    /// The seed of their random numbers.
    pub(crate) seed: u64,
    /// The number of the first case.
    pub(crate) first: u64,
    /// From one case to the next.
    pub(crate) step: u64,
    /// How many cases at most.
    pub(crate) count: u64,
    /// For how long.
    pub(crate) time: Duration,
    /// CPU time allowed for a case.
    pub(crate) limit: Duration,
    /// The folder of good bundles.
    pub(crate) bundles: PathBuf,
    /// The worker's own folder.
    pub(crate) scratch: PathBuf,
    /// The binary.
    pub(crate) qhx: PathBuf,
}

impl Order {
    /// As arguments of a worker: what [`Order::from_arguments`] reads.
    pub(crate) fn to_arguments(&self) -> Vec<OsString> {
        let numbers = [self.seed, self.first, self.step, self.count, self.time.as_millis() as u64, self.limit.as_millis() as u64];
        let mut arguments: Vec<OsString> = vec![self.class.name.into()];
        arguments.extend(numbers.map(|number| number.to_string().into()));
        arguments.extend([&self.bundles, &self.scratch, &self.qhx].map(|path| path.clone().into_os_string()));
        arguments
    }

    /// Reads the arguments of a worker.
    pub(crate) fn from_arguments(arguments: &[OsString]) -> Option<Self> {
        let number = |place: usize| arguments.get(place)?.to_str()?.parse::<u64>().ok();
        let path = |place: usize| arguments.get(place).map(PathBuf::from);
        Some(Self {
            class: class(arguments.first()?.to_str()?)?,
            seed: number(1)?,
            first: number(2)?,
            step: number(3)?,
            count: number(4)?,
            time: Duration::from_millis(number(5)?),
            limit: Duration::from_millis(number(6)?),
            bundles: path(7)?,
            scratch: path(8)?,
            qhx: path(9)?,
        })
    }

    /// The case of a number.
    pub(crate) fn case(&self, seeds: &Seeds, number: u64) -> Case {
        (self.class.make)(seeds, &mut Random::of_case(self.seed, self.class.name, number))
    }
}

/// Whether a case goes to the binary.
pub(crate) fn is_for_the_binary(case: &Case, number: u64) -> bool {
    !case.arguments.is_empty() && number % TO_THE_BINARY == TO_THE_BINARY - 1
}

/// How a case ended, as a worker reports it to its parent.
pub(crate) enum Verdict {
    /// It was accepted.
    Accepted,
    /// It was refused.
    Refused,
    /// It failed.
    Failed(String),
}

/// Runs cases until the time is up, on a thread with the usual 2 MiB of stack.
pub(crate) fn work(order: Order) -> Result<(), String> {
    fs::create_dir_all(&order.scratch).map_err(|error| format!("{}: {error}", order.scratch.display()))?;
    panic::set_hook(Box::new(|about| {
        *LAST_PANIC.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = about.to_string();
    }));
    let worker = thread::Builder::new().stack_size(2 << 20).spawn(move || run_all(&order)).map_err(|error| error.to_string())?;
    worker.join().map_err(|_| format!("the harness itself panicked: {}", last_panic()))?
}

/// What the last panic said.
static LAST_PANIC: Mutex<String> = Mutex::new(String::new());

fn last_panic() -> String {
    LAST_PANIC.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
}

fn run_all(order: &Order) -> Result<(), String> {
    let began = Instant::now();
    let seeds = Seeds::read(&order.bundles).map_err(|error| format!("the seeds cannot be read: {error}"))?;
    let (bundles, scratch, qhx) = (order.bundles.clone(), order.scratch.clone(), order.qhx.clone());
    let bench = Bench { seeds, bundles, scratch, qhx, limit: order.limit };
    for place in 0..order.count {
        if began.elapsed() >= order.time {
            break;
        }
        let number = order.first + place * order.step;
        let case = order.case(&bench.seeds, number);
        let for_the_binary = is_for_the_binary(&case, number);
        if for_the_binary && !order.qhx.is_file() {
            return Err(format!("there is no {}: `cargo xtask attack` builds it", order.qhx.display()));
        }
        say(&format!("{} {number}", if for_the_binary { "binary" } else { "library" }))?;
        let verdict = match for_the_binary {
            true => command::run(&case, &bench).map_or_else(Verdict::Failed, |outcome| verdict_of(&outcome)),
            false => run(order.class, &case, &bench, number),
        };
        say(&match verdict {
            Verdict::Accepted => "accepted".to_owned(),
            Verdict::Refused => "refused".to_owned(),
            Verdict::Failed(problem) => format!("failed {}", problem.escape_debug()),
        })?;
    }
    Ok(())
}

/// Runs a case against the libraries.
fn run(class: &Class, case: &Case, bench: &Bench, number: u64) -> Verdict {
    let attempt = || panic::catch_unwind(AssertUnwindSafe(|| (class.attempt)(case, bench))).map_err(|_| last_panic());
    let outcome = match attempt() {
        Ok(outcome) => outcome,
        Err(panic) => return Verdict::Failed(panic),
    };
    if number % TWICE == 0 {
        match attempt() {
            Ok(again) if without_memory(&again) == without_memory(&outcome) => {}
            Ok(again) => return Verdict::Failed(format!("ended in two ways: {}, then {}", shown(&outcome), shown(&again))),
            Err(panic) => return Verdict::Failed(format!("panicked the second time: {panic}")),
        }
    }
    verdict_of(&outcome)
}

fn verdict_of(outcome: &Outcome) -> Verdict {
    if outcome.is_ok() { Verdict::Accepted } else { Verdict::Refused }
}

/// What must be equal of two attempts: how much memory is free, which a refusal tells, changes all the time.
fn without_memory(outcome: &Outcome) -> Outcome {
    match outcome {
        Err(message) if message.contains("memory") => Err("too little memory".into()),
        other => other.clone(),
    }
}

fn shown(outcome: &Outcome) -> String {
    let text = format!("{outcome:?}");
    text.chars().take(1000).collect()
}

fn say(line: &str) -> Result<(), String> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).map_err(|error| error.to_string())
}

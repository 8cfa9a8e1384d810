//! The parent of the workers: starts them, collects their results, kills those that take too long, and restarts them after a case that crashed one.

use crate::{
    limits::{Watch, limited},
    worker::Order,
};
use std::{
    env,
    fs::{self, File},
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

/// Counts of a class.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    /// Cases that were run.
    pub(crate) cases: u64,
    /// Those accepted.
    pub(crate) accepted: u64,
    /// Those refused.
    pub(crate) refused: u64,
    /// Those that failed.
    pub(crate) failures: Vec<Failure>,
}

/// A case that failed.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    /// Its number.
    pub(crate) number: u64,
    /// What happened.
    pub(crate) problem: String,
}

/// Runs several workers until the time is up; the cases are dealt out among them.
pub(crate) fn run(order: &Order, jobs: u64) -> Result<Tally, String> {
    let workers: Vec<_> = (0..jobs)
        .map(|job| {
            let scratch = order.scratch.join(format!("worker-{job}"));
            let count = order.count.saturating_sub(job).div_ceil(jobs);
            let order = Order { first: order.first + job, step: jobs, count, scratch, ..order.clone() };
            thread::spawn(move || keep_running(order))
        })
        .collect();
    let mut whole = Tally::default();
    for worker in workers {
        let part = worker.join().map_err(|_| "a thread of the harness panicked")??;
        whole.cases += part.cases;
        whole.accepted += part.accepted;
        whole.refused += part.refused;
        whole.failures.extend(part.failures);
    }
    whole.failures.sort_by_key(|failure| failure.number);
    Ok(whole)
}

/// Runs a worker, and a new one after each case that crashes it.
fn keep_running(mut order: Order) -> Result<Tally, String> {
    let began = Instant::now();
    let whole_time = order.time;
    let mut tally = Tally::default();
    fs::create_dir_all(&order.scratch).map_err(|error| format!("{}: {error}", order.scratch.display()))?;
    while let Some(ended_by) = run_one(&order, &mut tally)? {
        order.count = order.count.saturating_sub((ended_by - order.first) / order.step + 1);
        order.first = ended_by + order.step;
        order.time = whole_time.saturating_sub(began.elapsed());
        if order.time.is_zero() || order.count == 0 {
            break;
        }
    }
    Ok(tally)
}

/// Runs a worker until it is done. If a case crashes it, returns the number of that case.
fn run_one(order: &Order, tally: &mut Tally) -> Result<Option<u64>, String> {
    let program = env::current_exe().map_err(|error| error.to_string())?;
    let stderr = order.scratch.join("worker-stderr");
    let errors = File::create(&stderr).map_err(|error| format!("{}: {error}", stderr.display()))?;
    let mut command = limited(&program);
    command.arg("--worker").args(order.to_arguments()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(errors);
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let mut child = command.spawn().map_err(|error| format!("a worker cannot be started: {error}"))?;
    let (to_parent, lines) = mpsc::channel();
    let stdout = child.stdout.take().ok_or("a worker has no stdout")?;
    thread::spawn(move || BufReader::new(stdout).lines().map_while(Result::ok).try_for_each(|line| to_parent.send(line)));

    let mut current: Option<(u64, Watch)> = None;
    let problem = loop {
        match lines.recv_timeout(Duration::from_millis(50)) {
            Ok(line) => match line.split_once(' ').unwrap_or((&line, "")) {
                (kind @ ("library" | "binary"), number) => {
                    // The binary is watched by the worker, which has to be there when it ends it.
                    let limit = if kind == "library" { order.limit } else { order.limit * 2 };
                    current = number.parse().ok().map(|number| (number, Watch::new(child.id(), limit)));
                }
                (verdict, problem) => {
                    tally.cases += 1;
                    match (verdict, current.take()) {
                        ("accepted", _) => tally.accepted += 1,
                        ("refused", _) => tally.refused += 1,
                        ("failed", Some((number, _))) => tally.failures.push(Failure { number, problem: problem.to_owned() }),
                        _ => return Err(format!("a worker said {line:?}")),
                    }
                }
            },
            Err(RecvTimeoutError::Timeout) => {
                if let Some(overdue) = current.as_ref().and_then(|(_, watch)| watch.overdue()) {
                    break Some(overdue);
                }
            }
            Err(RecvTimeoutError::Disconnected) => break None,
        }
    };
    // With all that it has started.
    if cfg!(unix) {
        let group = format!("-{}", child.id());
        let _ = Command::new("kill").args(["-KILL", "--", &group]).stderr(Stdio::null()).status();
    }
    let _ = child.kill();
    let status = child.wait().map_err(|error| error.to_string())?;
    let Some((number, _)) = current else {
        return if status.success() { Ok(None) } else { Err(format!("a worker ended with {status}: {}", last_words(&stderr))) };
    };
    let problem = problem.unwrap_or_else(|| format!("ended with {status}: {}", last_words(&stderr)));
    tally.cases += 1;
    tally.failures.push(Failure { number, problem });
    Ok(Some(number))
}

/// What a process said before its end.
fn last_words(file: &Path) -> String {
    let said = fs::read(file).unwrap_or_default();
    String::from_utf8_lossy(&said[said.len().saturating_sub(600)..]).trim().escape_debug().to_string()
}

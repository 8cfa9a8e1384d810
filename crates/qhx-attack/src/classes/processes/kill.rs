//! Commands that get a signal at any moment: they end in time, nothing half made has a final name, and the same command then does all of it.

use super::{INPUT, assert_answered, batch, prepare, run};
use crate::{
    classes::{Bench, Case, Outcome},
    ending::is_output,
    files::{names_in, repository},
    http::post,
    limits::{Watch, contained, wait},
    random::Random,
    seeds::Seeds,
    server::{Client, Server},
};
use qhx_bundle::{Bundle, OpenOptions, Verify};
use serde_json::json;
use std::{
    process::{Command, ExitStatus, Stdio},
    thread,
    time::Duration,
};

/// What is run, when it gets a signal, and which.
const VICTIM: &str = "victim";
/// CPU time that a command may take to end.
const TO_END: Duration = Duration::from_secs(2);

pub(super) fn make(_: &Seeds, random: &mut Random) -> Case {
    let lines = (0..20).map(|id| json!({ "id": id, "prompt": "Once upon a", "max_new": 20 }).to_string() + "\n").collect::<String>();
    let (victim, most) = *random.pick(&[("forge", 400), ("batch", 600), ("serve", 300)]);
    let about = format!("{victim} {} {}", random.below(most), random.word(&["TERM", "INT", "KILL"]));
    let mut case = Case::of(VICTIM, about.into_bytes());
    case.files.insert(INPUT.to_owned(), lines.into_bytes());
    case
}

pub(super) fn attempt(case: &Case, bench: &Bench) -> Outcome {
    prepare(case, bench);
    let about = case.text(VICTIM);
    let mut words = about.split(' ');
    let (victim, wait, signal) = (words.next(), words.next().and_then(|number| number.parse().ok()), words.next());
    let (victim, moment, signal) =
        (victim.unwrap_or_default(), Duration::from_millis(wait.unwrap_or_default()), signal.unwrap_or_default());
    match victim {
        "serve" => serve(bench, moment, signal),
        "batch" => {
            let output = bench.scratch.join("out/answers.jsonl");
            let command = || {
                let mut command = contained(&bench.qhx, &bench.scratch);
                batch(&mut command, bench, &output);
                command
            };
            end(&mut command(), moment, signal);
            // Goes on where it was.
            if let Err(problem) = run(&mut command(), bench) {
                panic!("a batch that was ended does not go on: {problem}");
            }
            assert_answered(case, &output);
        }
        _ => forge(bench, moment, signal),
    }
    Ok(format!("{victim} ended"))
}

fn forge(bench: &Bench, moment: Duration, signal: &str) {
    let folder = bench.scratch.join("out");
    let made = folder.join("made");
    let command = || {
        let mut command = contained(&bench.qhx, &bench.scratch);
        command.arg("forge").arg(repository().join("fixtures/qwen3")).args(["--precision", "w8", "--force", "--out"]).arg(&made);
        command
    };
    let check = |what: &str, must_be_there: bool| {
        if must_be_there || made.exists() {
            let options = OpenOptions { verify: Verify::Always, cache_dir: None, cancel: None };
            Bundle::open_with(&made, &options).unwrap_or_else(|error| panic!("{what} left a bundle that is not whole: {error}"));
        }
    };
    let nothing_left = |what: &str| {
        let names = names_in(&folder).unwrap_or_default();
        let left: Vec<_> = names.iter().filter(|name| *name != INPUT && !is_output(name)).collect();
        assert!(left.is_empty(), "{what} left {left:?}");
    };
    end(&mut command(), moment, signal);
    check(signal, false);
    if signal != "KILL" {
        nothing_left(signal);
    }
    if let Err(problem) = run(&mut command(), bench) {
        panic!("a forge after one that was ended: {problem}");
    }
    check("forge", true);
    nothing_left("forge");
}

fn serve(bench: &Bench, moment: Duration, signal: &str) {
    let server = Server::start(&bench.qhx, &bench.scratch, &["builtin".as_ref()], "", bench.limit);
    let server = server.unwrap_or_else(|problem| panic!("{problem}"));
    // An answer that goes on beyond the time for leaving, whose client stays.
    let long = json!({ "prompt": "Once", "max_tokens": 400, "n": 8, "ignore_eos": true, "stream": true, "temperature": 1 });
    let connection = server.send(&post("/v1/completions", &long), Client::Waits).unwrap_or_else(|problem| panic!("{problem}"));
    thread::sleep(moment);
    kill(server.id(), signal);
    let status = server.ended(TO_END).unwrap_or_else(|problem| panic!("after {signal} the server {problem}"));
    assert_ended("serve", status, signal);
    drop(connection);
}

/// Starts a command, and sends it a signal after a moment. It must end in time.
fn end(command: &mut Command, moment: Duration, signal: &str) {
    let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let mut child = child.unwrap_or_else(|error| panic!("the binary cannot be started: {error}"));
    thread::sleep(moment);
    kill(child.id(), signal);
    let watch = Watch::new(child.id(), TO_END);
    let status = wait(&mut child, &watch).unwrap_or_else(|problem| panic!("after {signal} it {problem}"));
    assert_ended("it", status, signal);
}

fn kill(process: u32, signal: &str) {
    let _ = Command::new("kill").args(["-s", signal, &process.to_string()]).stderr(Stdio::null()).status();
}

/// A command ends with a code of its own, or by the signal if it has not listened for it yet.
fn assert_ended(what: &str, status: ExitStatus, signal: &str) {
    match status.code() {
        Some(code) => assert!([0, 1, 2, 130].contains(&code), "{what} ended with {status} after {signal}"),
        None => assert!(is_by(status, signal), "{what} ended with {status} after {signal}"),
    }
}

#[cfg(unix)]
fn is_by(status: ExitStatus, signal: &str) -> bool {
    let number = match signal {
        "INT" => 2,
        "KILL" => 9,
        _ => 15,
    };
    std::os::unix::process::ExitStatusExt::signal(&status) == Some(number)
}

#[cfg(not(unix))]
fn is_by(_: ExitStatus, _: &str) -> bool {
    true
}

//! Commands whose outputs are special files, full or torn, and commands that are ended in the middle.

mod batch;
mod kill;

use super::{Bench, Case, Class, Outcome};
use crate::{ending::run_to_its_end, files::empty_folder, limits::FOLDERS};
use serde_json::Value;
use std::{fs, path::Path, process::Command};

/// All classes of commands.
pub(super) const CLASSES: [Class; 2] =
    [Class { name: "batch", make: batch::make, attempt: batch::attempt }, Class { name: "kill", make: kill::make, attempt: kill::attempt }];

/// The lines that `qhx batch` answers.
const INPUT: &str = "in.jsonl";

/// Empties the worker's folders, and writes the input of a batch.
fn prepare(case: &Case, bench: &Bench) {
    let made = FOLDERS.iter().chain(&["out"]).try_for_each(|name| empty_folder(&bench.scratch.join(name)));
    let written = made.and_then(|()| fs::write(bench.scratch.join("out").join(INPUT), case.file(INPUT)));
    written.unwrap_or_else(|error| panic!("the harness cannot work with its files: {error}"));
}

/// Arguments of a batch that writes to `output`.
fn batch(command: &mut Command, bench: &Bench, output: &Path) {
    command.args(["batch", "builtin", "--threads", "1", "--context", "128", "--parallel", "4", "--max-new", "4", "--in"]);
    command.arg(bench.scratch.join("out").join(INPUT)).arg("--out").arg(output);
}

/// Runs a command to its end. What is wrong with how it behaves is a panic, as in a library.
fn run(command: &mut Command, bench: &Bench) -> Outcome {
    run_to_its_end(command, &bench.scratch, bench.limit, false).unwrap_or_else(|problem| panic!("{problem}")).0
}

/// Panics unless a batch has a whole answer for each line of its input.
fn assert_answered(case: &Case, output: &Path) {
    let is_blank = |line: &[u8]| str::from_utf8(line).is_ok_and(|line| line.trim().is_empty());
    let asked: Vec<&[u8]> = case.file(INPUT).split(|byte| *byte == b'\n').filter(|line| !is_blank(line)).collect();
    let text = fs::read_to_string(output).unwrap_or_else(|error| panic!("no answers: {error}"));
    assert!(text.is_empty() || text.ends_with('\n'), "the last answer is torn");
    let answers: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("an answer is no JSON: {error}: {line}")))
        .collect();
    assert_eq!(answers.len(), asked.len(), "as many answers as lines");
    for (number, (line, answer)) in asked.iter().zip(&answers).enumerate() {
        let id = serde_json::from_slice::<Value>(line).ok().and_then(|line| line.get("id").cloned());
        assert_eq!(answer.get("id"), Some(&id.unwrap_or((number + 1).into())), "answers are in the order of their lines");
        assert!(answer.get("ids").is_some() != answer.get("error").is_some(), "an answer or an error: {answer}");
    }
}

//! What a batch reads and where it writes: lines that are no requests, answers that are torn, pipes, devices, full disks.

use super::{INPUT, assert_answered, batch, prepare, run};
use crate::{
    classes::{Bench, Case, Outcome},
    limits::contained,
    mutate::{mutate_bytes, mutate_json},
    random::Random,
    seeds::Seeds,
};
use serde_json::{Value, json};
use std::{ffi::OsStr, fs, path::PathBuf, process::Command};

/// What stands in the file of the answers before, if it is there.
const BEFORE: &str = "before";
/// Where answers go.
const OUTPUT: &str = "output";
const OUTPUTS: [&str; 11] =
    ["file", "file", "file", "small", "small", "/dev/full", "/dev/null", "pipe", "folder", "link", "no/such/folder/file"];

pub(super) fn make(_: &Seeds, random: &mut Random) -> Case {
    let good = [
        json!({ "id": "a", "prompt": "Once upon", "max_new": 3, "temperature": 0.5, "top_k": 4, "seed": 1, "stop": ["x"] }),
        json!({ "id": 7, "ids": [1, 2, 3] }),
        json!({ "id": { "x": [1, null] }, "messages": [{ "role": "user", "content": "Hi" }], "max_new": 2 }),
        json!({ "prompt": "The" }),
    ];
    let mut lines: Vec<Vec<u8>> = Vec::new();
    for _ in 0..random.length(6) {
        let line = random.pick(&good).to_string().into_bytes();
        lines.push(if random.one_in(2) { line } else { mutate_json(&line, random) });
    }
    let mut input = lines.join(&b'\n');
    let answer = |line: &Vec<u8>| {
        let id = serde_json::from_slice::<Value>(line).map(|line| line["id"].clone()).unwrap_or_default();
        json!({ "id": id, "ids": [5], "text": "a", "finish_reason": "length" }).to_string() + "\n"
    };
    let mut before = lines.iter().take(random.below(lines.len() + 1)).map(answer).collect::<String>().into_bytes();
    match random.below(4) {
        0 => before.truncate(random.below(before.len() + 1)),
        1 => mutate_bytes(&mut before, usize::MAX, b"{\"id\":1}\n\n{}", random),
        _ => {}
    }
    if random.one_in(8) {
        mutate_bytes(&mut input, usize::MAX, b"\n\r\n\n", random);
    }
    let mut case = Case::of(INPUT, input);
    case.files.insert(OUTPUT.to_owned(), random.word(&OUTPUTS).as_bytes().to_vec());
    if random.one_in(2) {
        case.files.insert(BEFORE.to_owned(), before);
    }
    case
}

pub(super) fn attempt(case: &Case, bench: &Bench) -> Outcome {
    prepare(case, bench);
    let folder = bench.scratch.join("out");
    let (kind, file) = (case.text(OUTPUT), folder.join("file"));
    let harness = |result: std::io::Result<()>| result.unwrap_or_else(|error| panic!("the harness cannot work with its files: {error}"));
    let place: PathBuf = match kind.as_str() {
        "file" | "small" => file.clone(),
        "link" => {
            harness(Command::new("ln").args(["-s", "file"]).arg(folder.join("link")).status().map(drop));
            folder.join("link")
        }
        "pipe" => {
            harness(Command::new("mkfifo").arg(folder.join("pipe")).status().map(drop));
            folder.join("pipe")
        }
        "folder" => folder.clone(),
        other => folder.join(other),
    };
    if let Some(before) = case.files.get(BEFORE) {
        harness(fs::write(&file, before));
    }
    let whole = || {
        let mut command = contained(&bench.qhx, &bench.scratch);
        batch(&mut command, bench, &place);
        run(&mut command, bench)
    };
    if kind == "small" {
        // A file of one block at most: the signal for more must not be the end.
        let mut command = contained(OsStr::new("sh").as_ref(), &bench.scratch);
        command.args(["-c", "ulimit -f 1; exec \"$0\" \"$@\""]).arg(&bench.qhx);
        batch(&mut command, bench, &place);
        let _ = run(&mut command, bench);
    }
    let outcome = whole();
    let is_other = |problem: &String| problem.contains("another input");
    match kind.as_str() {
        "file" | "small" | "link" => match &outcome {
            // Answers of another input are kept, and told of.
            Err(problem) => assert!(case.files.contains_key(BEFORE) && is_other(problem), "not answered: {problem}"),
            Ok(_) => assert_answered(case, &file),
        },
        _ => assert!(outcome.is_err(), "answers went to {kind}"),
    }
    outcome
}

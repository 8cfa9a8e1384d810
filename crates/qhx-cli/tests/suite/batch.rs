//! `qhx batch`: many prompts from a file.

use crate::common::{self, DEVICE, bundle, fail, ids, json, qhx, read_json, scratch, text, wait_until};
use serde_json::{Value, json};
use std::{fs, path::Path};

/// The fixture's prompts as lines, and the greedy answers that the oracle gave.
fn prompts(family: &str) -> (Vec<String>, Vec<Value>) {
    let oracle = read_json(&common::fixture(family).join("oracle.json"));
    let all = oracle["prompts"].as_array().unwrap();
    let line = |(number, prompt): (usize, &Value)| {
        json!({ "id": format!("p{number}"), "ids": prompt["ids"], "max_new": prompt["greedy"].as_array().unwrap().len() }).to_string()
    };
    (all.iter().enumerate().map(line).collect(), all.iter().map(|prompt| prompt["greedy"].clone()).collect())
}

fn batch(model: &Path, input: &Path, output: &Path) -> Vec<String> {
    let arguments =
        ["batch", text(model), "--in", text(input), "--out", text(output), "--ignore-eos", "--device", DEVICE, "--parallel", "4"];
    arguments.map(str::to_owned).to_vec()
}

fn answers(path: &Path) -> Vec<Value> {
    fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn every_line_is_answered_in_order_and_a_bad_one_stops_nothing() {
    let folder = scratch();
    let (input, output) = (folder.path().join("in.jsonl"), folder.path().join("out.jsonl"));
    for family in ["qwen3_5", "gemma4"] {
        let (mut lines, greedy) = prompts(family);
        let good = lines.len();
        lines.push("this is no JSON".into());
        lines.push(json!({ "id": 7, "ids": [0], "temprature": 1 }).to_string());
        lines.push(json!({ "id": [1, 2], "ids": [4_000_000_000u32] }).to_string());
        lines.push(String::new());
        lines.push(json!({ "id": "both", "ids": [1], "prompt": "x" }).to_string());
        fs::write(&input, lines.join("\n")).unwrap();
        let _ = fs::remove_file(&output);
        let report = json(batch(&bundle(family), &input, &output).into_iter().chain(["--json".into()]));
        assert_eq!((&report["lines"], &report["answered"], &report["errors"]), (&json!(good + 4), &json!(good + 4), &json!(4)), "{report}");
        let answers = answers(&output);
        for (number, (answer, greedy)) in answers.iter().zip(&greedy).enumerate() {
            assert_eq!((&answer["id"], &answer["ids"]), (&json!(format!("p{number}")), greedy), "{family}");
            assert!(answer["text"].is_string() && answer["finish_reason"] == "length", "{answer}");
        }
        let wrong: Vec<(&Value, &str)> = answers[good..].iter().map(|a| (&a["id"], a["error"]["message"].as_str().unwrap())).collect();
        assert_eq!(wrong.iter().map(|w| w.0).collect::<Vec<_>>(), [&json!(good + 1), &json!(7), &json!([1, 2]), &json!("both")]);
        let expected = ["not a request", "unknown field `temprature`", "4000000000", "exactly one of"];
        assert!(wrong.iter().zip(expected).all(|(found, expected)| found.1.contains(expected)), "{wrong:?}");
    }
}

#[test]
fn a_killed_batch_goes_on_where_it_was() {
    let folder = scratch();
    let (input, output) = (folder.path().join("in.jsonl"), folder.path().join("out.jsonl"));
    let (lines, greedy) = prompts("qwen3");
    let many: Vec<String> = lines.iter().cycle().take(10 * lines.len()).cloned().collect();
    fs::write(&input, many.join("\n") + "\n").unwrap();
    let arguments = batch(&bundle("qwen3"), &input, &output);
    let mut child = qhx(&arguments).spawn().unwrap();
    wait_until("three lines are written", || {
        assert!(child.try_wait().unwrap().is_none_or(|status| status.success()));
        fs::read(&output).map_or(0, |bytes| bytes.iter().filter(|byte| **byte == b'\n').count()) >= 3
    });
    child.kill().unwrap();
    child.wait().unwrap();
    // As if it had been killed in the middle of a line.
    let done = fs::read_to_string(&output).unwrap();
    fs::write(&output, done.clone() + "{\"id\": \"p0\", \"ids\": [1, 2").unwrap();
    let done = done.lines().count();
    let report = json(arguments.iter().cloned().chain(["--json".into()]));
    assert_eq!(report["skipped"], json!(done), "{report}");
    assert_eq!(report["answered"], json!(many.len() - done), "{report}");
    let answers = answers(&output);
    assert_eq!(answers.len(), many.len());
    assert!(answers.iter().zip(greedy.iter().cycle()).all(|(answer, greedy)| answer["ids"] == *greedy));
    // Once more there is nothing to do; with another input these are the wrong answers.
    assert_eq!(json(arguments.iter().cloned().chain(["--json".into()]))["answered"], 0);
    fs::write(&input, many[1..].join("\n")).unwrap();
    fail(&arguments, 1, &["another input", "--out"]);
    assert_eq!(fs::read_to_string(&output).unwrap().lines().count(), many.len(), "nothing was lost");
}

#[test]
fn lines_may_say_how_they_are_sampled() {
    let folder = scratch();
    let (input, output) = (folder.path().join("in.jsonl"), folder.path().join("out.jsonl"));
    let model = bundle("llama");
    let line = |seed: u64| json!({ "ids": [1, 2, 3], "max_new": 12, "temperature": 1.5, "seed": seed }).to_string();
    fs::write(&input, [line(1), line(2), line(1)].join("\n")).unwrap();
    common::succeed(batch(&model, &input, &output));
    let found: Vec<Value> = answers(&output).iter().map(|answer| answer["ids"].clone()).collect();
    assert!(found[0] == found[2] && found[0] != found[1], "{found:?}");
    let alone = json([
        "generate",
        text(&model),
        "--ids",
        "1,2,3",
        "--max-new",
        "12",
        "--temperature",
        "1.5",
        "--seed",
        "2",
        "--ignore-eos",
        "--device",
        DEVICE,
        "--json",
    ]);
    assert_eq!(ids(&alone["ids"]), ids(&found[1]), "as alone");
}

//! The GPU from the command line, on the one that Vulkan offers: in CI, Mesa's software Vulkan. Run by `cargo xtask test gpu`.
#![cfg(unix)]

use crate::common::{bundle, child_of, failed, json, qhx, ran, read_json, succeed};
use serde_json::Value;
use std::{
    collections::BTreeSet,
    fs,
    io::Read,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::Instant,
};

const QUESTION: &str = "What is the capital of Portugal?";

/// A command that counts software Vulkan as a GPU under `auto`.
fn with_software(arguments: &[&str]) -> Command {
    let mut command = qhx(arguments);
    command.env("QHX_GPU_SOFTWARE", "1");
    command
}

/// The built-in model answers on the GPU, also in a process of its own, what it answers on the CPU.
#[test]
#[ignore = "needs Vulkan: cargo xtask test gpu"]
fn the_built_in_model_answers_on_the_gpu() {
    let answer = |flags: &[&str]| json([&["run", QUESTION, "--max-new", "12", "--json"], flags].concat());
    let expected = answer(&["--device", "cpu"]);
    for flags in [&["--device", "gpu"][..], &["--device", "gpu", "--isolate"]] {
        let found = answer(flags);
        assert_eq!((&found["ids"], &found["fallbacks"]), (&expected["ids"], &Value::Array(vec![])), "{flags:?}: {found}");
        assert!(found["stages"].as_array().unwrap().iter().all(|stage| stage["device"] == "gpu"), "{flags:?}: {found}");
    }
}

/// Software Vulkan is named as what it is.
#[test]
#[ignore = "needs Vulkan: cargo xtask test gpu"]
fn software_is_called_a_test_device() {
    assert!(succeed(["devices"]).contains("gpu (test device): "));
    let report = json(["doctor", "--json"]);
    let gpu = report["devices"].as_array().unwrap().iter().find(|device| device["device"] == "gpu").unwrap();
    assert!(gpu["findings"][0]["advice"].as_str().unwrap().contains("test device"), "{report}");
}

/// A process of the GPU that is killed in the middle of an answer is started again, and the answer is the same; killed again, the answer goes on on the CPU.
#[test]
#[ignore = "needs Vulkan: cargo xtask test gpu"]
fn an_answer_outlives_the_process_of_its_gpu() {
    let folder = tempfile::tempdir().unwrap();
    let hot = folder.path().join("hot.toml");
    let rules = "default = \"gpu\"\n[stages]\n\"layers.*.moe.experts\" = \"cpu\"\n[hot_experts]\ncount = 9\ntransfer_from = 1\n";
    fs::write(&hot, rules).unwrap();
    let whole = ["--device", "gpu"];
    let (qwen, phimoe) = (bundle("qwen3"), bundle("phimoe"));
    let mut isolated = Vec::new();
    for (model, placed) in [(&phimoe, ["--placement", hot.to_str().unwrap()]), (&qwen, whole)] {
        let model = model.to_str().unwrap();
        let arguments = ["run", model, "hello there", "--max-new", "400", "--ignore-eos", "--context", "512"];
        let expected = succeed([&arguments[..], &["--device", "cpu"]].concat());
        isolated = [&arguments[..], &placed, &["--isolate"]].concat();
        // Extended, both of both.
        for deaths in [1, 2].into_iter().filter(|deaths| crate::extended() || (*deaths == 1) == (placed == whole)) {
            let mut child = qhx(&isolated).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
            // The answer has begun.
            let (mut answer, mut output) = (vec![0; 20], child.stdout.take().unwrap());
            output.read_exact(&mut answer).unwrap();
            let mut dead = String::new();
            for _ in 0..deaths {
                let worker = loop {
                    let worker = child_of(&child);
                    if worker != dead {
                        break worker;
                    }
                };
                assert!(Command::new("kill").args(["-9", &worker]).status().unwrap().success());
                dead = worker;
            }
            output.read_to_end(&mut answer).unwrap();
            let found = ran(child.wait_with_output().unwrap());
            assert_eq!(found.code, Some(0), "{found:?}");
            assert_eq!(String::from_utf8(answer).unwrap(), expected);
            let place = match (deaths, placed == whole) {
                (2, _) => "cpu",
                (_, true) => "gpu",
                (_, false) => "split",
            };
            let told = format!("continued on {place}");
            assert!(found.stderr.contains("gpu was lost: its process is gone") && found.stderr.contains(&told), "{}", found.stderr);
        }
    }
    // A process that ends well takes its worker with it.
    let mut child = qhx(&isolated).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut [0; 20]).unwrap();
    let worker = child_of(&child);
    assert!(child.wait_with_output().unwrap().status.success());
    assert!(!fs::exists(format!("/proc/{worker}/status")).unwrap(), "the worker is gone");
}

/// The same where it is killed before the first token, whether it starts, weights are on their way, or the prompt is being computed.
#[test]
#[ignore = "needs Vulkan: cargo xtask test gpu"]
fn a_prompt_outlives_the_process_of_its_gpu() {
    let (model, prompt) = (bundle("qwen3"), "hello there ".repeat(60));
    let arguments = ["run", model.to_str().unwrap(), &prompt, "--max-new", "8", "--ignore-eos", "--context", "1024"];
    let expected = succeed([&arguments[..], &["--device", "cpu"]].concat());
    let start = || {
        let mut isolated = qhx([&arguments[..], &["--device", "gpu", "--isolate"]].concat());
        isolated.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let began = Instant::now();
    let mut undisturbed = start();
    undisturbed.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    let first_output = began.elapsed();
    assert!(undisturbed.wait_with_output().unwrap().status.success());
    // Later and later on the way to the first output: the first ones die early, and one dies in the prompt.
    let killed_in_prompt = (1..16).cycle().take(45).any(|part| {
        let mut child = start();
        let mut output = child.stdout.take().unwrap();
        let reader = thread::spawn(move || {
            let mut first = [0];
            let begun = output.read(&mut first).unwrap();
            let (at, mut answer) = (Instant::now(), first[..begun].to_vec());
            output.read_to_end(&mut answer).unwrap();
            (at, String::from_utf8(answer).unwrap())
        });
        thread::sleep(first_output * part / 16);
        let (worker, killed) = (child_of(&child), Instant::now());
        Command::new("kill").args(["-9", &worker]).status().unwrap();
        let (begun, answer) = reader.join().unwrap();
        let found = ran(child.wait_with_output().unwrap());
        assert_eq!((found.code, &answer), (Some(0), &expected), "killed after {part}/16 of {first_output:?}: {found:?}");
        begun > killed && found.stderr.contains("gpu was lost: its process is gone")
    });
    assert!(killed_in_prompt, "no process was killed between loading and the first token");
}

/// What `auto` measured is shown by `inspect`, and measured again when asked for.
#[test]
#[ignore = "needs Vulkan: cargo xtask test gpu"]
fn inspect_shows_what_auto_chose() {
    let llama = bundle("llama");
    let llama = llama.to_str().unwrap();
    let inspect =
        || -> Value { serde_json::from_str(&ran(with_software(&["inspect", llama, "--json"]).output().unwrap()).stdout).unwrap() };
    let run =
        |flags: &[&str]| ran(with_software(&[&["run", llama, "hello there", "--max-new", "2"], flags].concat()).output().unwrap()).stderr;
    assert_eq!(inspect()["auto"]["device"], "cpu");
    assert!(inspect()["auto"]["reason"].as_str().unwrap().contains("not measured yet"));
    assert!(run(&[]).contains("auto: "), "the first load measures");
    let shown = inspect();
    let ways = shown["auto"]["measured"]["ways"].as_array().unwrap();
    let decode = |name: &str| {
        let tried = ways.iter().find(|tried| tried["way"]["name"] == name).unwrap();
        tried["speed"]["decode_tokens_per_second"].as_f64().unwrap()
    };
    assert!(decode("gpu") > 0.0 && decode("cpu") > 0.0, "{shown}");
    assert!(!run(&[]).contains("auto: "), "the second does not");
    assert!(run(&["--remeasure"]).contains("auto: "));
    assert!(run(&["--device", "cpu"]).lines().all(|line| !line.contains("auto: ")));
    assert_eq!(json(["inspect", llama, "--json"])["auto"], Value::Null, "software is no choice by itself");
}

/// The ways to place a model, and the one that is chosen as a file that says the same.
#[test]
#[ignore = "needs Vulkan: cargo xtask test gpu"]
fn a_plan_can_be_looked_at_and_kept() {
    let phimoe = bundle("phimoe");
    let phimoe = phimoe.to_str().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("split.toml");
    let file = file.to_str().unwrap();
    let plan = ran(with_software(&["inspect", phimoe, "--plan", "--device", "split", "--save-placement", file]).output().unwrap());
    assert!(plan.code == Some(0), "{plan:?}");
    for shown in ["experts on cpu", "prefill on gpu, decode on cpu", "→", "gpu █", "cpu ·", "both at once"] {
        assert!(
            plan.stdout.contains(shown) || plan.stdout.replace('·', "█").contains(&shown.replace('·', "█")),
            "{shown}: {}",
            plan.stdout
        );
    }
    let run = |flags: &[&str]| {
        ran(with_software(&[&["generate", phimoe, "--ids", "1,2,3,4,5", "--max-new", "8"], flags].concat()).output().unwrap())
    };
    let (split, placed, cpu) = (run(&["--device", "split"]), run(&["--placement", file]), run(&["--device", "cpu"]));
    assert!(split.code == Some(0) && split.stdout == cpu.stdout && placed.stdout == cpu.stdout, "{split:?} {placed:?} {cpu:?}");
    let trace = folder.path().join("trace.json");
    let traced = run(&["--device", "split", "--trace", trace.to_str().unwrap()]);
    assert_eq!(traced.stdout, cpu.stdout);
    let (lanes, spans) = lanes(&trace);
    assert!(lanes.contains("cpu") && lanes.contains("gpu") && spans.len() >= 8, "{lanes:?}");
}

/// What `--trace` wrote: the names of its lanes, and its spans.
fn lanes(file: &Path) -> (BTreeSet<String>, Vec<Value>) {
    let trace: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    let (named, spans): (Vec<Value>, Vec<Value>) =
        trace["traceEvents"].as_array().unwrap().iter().cloned().partition(|event| event["ph"] == "M");
    (named.iter().map(|lane| lane["args"]["name"].as_str().unwrap().to_owned()).collect(), spans)
}

/// A trace has a span for each call, with its rows, one after the other.
#[test]
fn a_trace_says_what_ran() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.json");
    let phimoe = bundle("phimoe");
    let traced = |command: &str, arguments: &[&str]| {
        let common = [command, phimoe.to_str().unwrap(), "--device", "cpu", "--trace", trace.to_str().unwrap()];
        let done = ran(qhx([&common[..], arguments].concat()).output().unwrap());
        assert_eq!(done.code, Some(0), "{done:?}");
        let (lanes, spans) = lanes(&trace);
        assert_eq!((lanes.len(), lanes.contains("cpu")), (1, true), "{command}: {lanes:?}");
        let ends = |span: &Value| span["ts"].as_f64().unwrap() + span["dur"].as_f64().unwrap();
        assert!(spans.windows(2).all(|pair| ends(&pair[0]) <= pair[1]["ts"].as_f64().unwrap() + 1.0), "{command}: {spans:?}");
        spans.iter().map(|span| span["args"]["rows"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    let answer = ["--max-new", "4", "--ignore-eos", "--draft", "none"];
    assert_eq!(traced("generate", &[&["--ids", "1,2,3,4,5"], &answer[..]].concat()), [5, 1, 1, 1]);
    let run = traced("run", &[&["hello there"], &answer[..]].concat());
    assert!(run[0] > 1 && run[1..] == [1, 1, 1], "{run:?}");
    let bench = traced("bench", &["-p", "8", "-n", "4", "-r", "1"]);
    assert!(bench.contains(&8) && bench.iter().filter(|&&rows| rows == 1).count() >= 4, "{bench:?}");
}

/// What an owner of a laptop sends: every device's speed, what there is, and what was predicted and measured of every way.
#[test]
#[ignore = "needs Vulkan: cargo xtask test gpu"]
fn a_report_has_every_device() {
    let folder = tempfile::tempdir().unwrap();
    let (report, trace) = (folder.path().join("laptop.json"), folder.path().join("trace.json"));
    let phimoe = bundle("phimoe");
    let devices = ["bench", phimoe.to_str().unwrap(), "--device", "cpu,gpu,split", "-p", "16", "-n", "4", "-r", "1", "--json"];
    let files = ["--report", report.to_str().unwrap(), "--trace", trace.to_str().unwrap()];
    let done = ran(with_software(&[&devices[..], &files].concat()).output().unwrap());
    assert_eq!(done.code, Some(0), "{done:?}");
    let report = read_json(&report);
    let runs = report["runs"].as_array().unwrap();
    let names: Vec<_> = runs.iter().map(|run| (run["device"].as_str().unwrap(), run["report"]["device"].as_str().unwrap())).collect();
    assert_eq!(names, [("cpu", "cpu"), ("gpu", "gpu"), ("split", "split")], "{report:#}");
    let printed: Value = serde_json::from_str(&done.stdout).unwrap();
    for (run, printed) in runs.iter().zip(printed.as_array().unwrap()) {
        assert_eq!(&run["report"], printed);
        assert!(run["report"].get("fallbacks").is_none(), "{run:#}");
        let tests: Vec<_> = run["report"]["results"].as_array().unwrap().iter().map(|result| result["test"].as_str().unwrap()).collect();
        assert_eq!(tests, ["pp16", "tg4"], "{run:#}");
        assert!(run["report"]["results"].as_array().unwrap().iter().all(|result| result["mean"].as_f64().unwrap() > 0.0), "{run:#}");
    }
    assert!(report["devices"].as_array().unwrap().iter().any(|device| device["name"] == "gpu"), "{report:#}");
    let choice = &runs[2]["choice"];
    let tried = choice["measured"]["ways"].as_array().unwrap();
    assert!(tried.iter().all(|tried| tried["predicted"]["decode_seconds"].as_f64().unwrap() > 0.0), "{choice:#}");
    assert!(tried.iter().any(|tried| tried["way"] == choice["way"] && tried["speed"].is_object()), "{choice:#}");
    let (lanes, _) = lanes(&trace);
    assert!(lanes.contains("cpu") && lanes.contains("gpu"), "{lanes:?}");
}

/// A limit of memory: `gpu` refuses, `auto` takes the CPU and says so.
#[test]
#[ignore = "needs Vulkan: cargo xtask test gpu"]
fn a_limit_of_memory_is_kept() {
    let llama = bundle("llama");
    let arguments = ["run", llama.to_str().unwrap(), "hello there", "--max-new", "2", "--gpu-memory", "64KiB"];
    let refused = ran(qhx([&arguments[..], &["--device", "gpu"]].concat()).output().unwrap());
    failed(refused, 1, &["64.0 KiB available on gpu", "--gpu-memory"]);
    let chosen = ran(with_software(&arguments).output().unwrap());
    assert!(chosen.code == Some(0) && chosen.stderr.contains("auto: cpu (") && chosen.stderr.contains("64.0 KiB available"), "{chosen:?}");
    failed(ran(qhx([&arguments[..5], &["--gpu-memory", "much"]].concat()).output().unwrap()), 2, &["MiB or GiB"]);
}

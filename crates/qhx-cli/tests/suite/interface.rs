//! What every command has in common: help, `--json`, and what a MODEL is.

use crate::common::{self, DEVICE, bundle, failed, fixture, listing, qhx, ran, run, scratch, succeed, with_stdin};
use serde_json::Value;
use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
};

/// Those that print no JSON: their output has a form of its own.
const WITHOUT_JSON: [&str; 3] = ["completions", "help", "serve"];

/// The commands that `qhx help` lists.
fn commands() -> Vec<String> {
    let help = succeed(["help"]);
    let (_, list) = help.split_once("Commands:\n").unwrap();
    // Further lines of a description are indented more.
    let names = list.lines().take_while(|line| !line.is_empty()).filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
    names.filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

#[test]
fn every_command_prints_one_json_object() {
    let folder = scratch();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (llama, source) = (bundle("llama"), fixture("llama"));
    let (llama, source, config) = (llama.to_str().unwrap(), source.to_str().unwrap(), source.join("config.json"));
    let (trace, forged, made) = (at("trace"), at("forged"), at("made"));
    let (prompts, answers, sentence) = (at("prompts.jsonl"), at("answers.jsonl"), at("sentence.txt"));
    fs::write(&sentence, "The tide comes in twice a day.").unwrap();
    fs::write(&prompts, "{\"ids\": [5], \"max_new\": 2}\n").unwrap();
    // A command line that succeeds, and one that fails with its exit code.
    let cases: &[(&[&str], &[&str], i32)] = &[
        (&["run", llama, "hello there", "--max-new", "2"], &["run", "./missing.gguf"], 2),
        (&["chat", llama, "--max-new", "2"], &["chat", "./missing.gguf"], 1),
        (&["generate", llama, "--ids", "5", "--max-new", "2"], &["generate", llama, "--ids", "x"], 2),
        (&["batch", llama, "--in", &prompts, "--out", &answers], &["batch", llama, "--in", "./missing", "--out", &made], 1),
        (&["forge", source, "--out", &forged, "--gate", "none"], &["forge", "./missing", "--out", &made], 1),
        (&["synth", config.to_str().unwrap(), "--out", &made], &["synth", "./missing.json", "--out", &made], 1),
        (&["verify", "builtin"], &["verify", llama], 1),
        (&["trace", llama, "--ids", "5", "--out", &trace], &["trace", llama, "--ids", "5", "--out", "/"], 1),
        (&["diff", &trace, &trace], &["diff", &trace, "./missing"], 1),
        (&["bench", llama, "-p", "4", "-n", "2", "-r", "1"], &["bench", llama, "-p", "0", "-n", "0"], 2),
        (&["eval", llama, "--text", &sentence, "--against", source], &["eval", llama, "--text", "./missing"], 1),
        (&["inspect", llama], &["inspect", "./missing"], 1),
        (&["devices"], &["devices", "--what"], 2),
        (&["doctor", llama], &["doctor", "./missing"], 1),
        (&["licenses"], &["licenses", "--what"], 2),
    ];
    let tested: Vec<&str> = cases.iter().map(|(right, ..)| right[0]).chain(WITHOUT_JSON).collect();
    assert_eq!(commands().iter().filter(|command| !tested.contains(&command.as_str())).collect::<Vec<_>>(), [""; 0], "is not tested here");
    for (right, wrong, code) in cases {
        let found = with_stdin(qhx(right.iter().chain(&["--json"])), b"hello there\n");
        assert_eq!(found.code, Some(0), "{right:?}: {found:?}");
        let mut objects = serde_json::Deserializer::from_str(&found.stdout).into_iter::<Value>();
        let first = objects.next().unwrap_or_else(|| panic!("{right:?}: {found:?}")).unwrap();
        assert!(first.is_object() && objects.next().is_none() && found.stdout.lines().count() == 1, "{right:?}: {found:?}");
        failed(with_stdin(qhx(wrong.iter().chain(&["--json"])), b""), *code, &[]);
    }
}

#[test]
fn run_prints_what_generate_prints() {
    let llama = bundle("llama");
    let answer = |arguments: &[&str]| {
        let mut found: Value = serde_json::from_str(&succeed(arguments)).unwrap();
        found["timing"] = Value::Null;
        found
    };
    let place = llama.to_str().unwrap();
    let more = ["--max-new", "4", "--json", "--device", DEVICE];
    assert_eq!(
        answer(&[&["run", place, "hello there"], &more[..]].concat()),
        answer(&[&["generate", place, "--user", "hello there"], &more[..]].concat())
    );
}

#[test]
fn a_model_that_is_not_there_is_no_prompt() {
    let (folder, cache) = (scratch(), scratch());
    let run = |arguments: &[&str]| {
        let mut command = qhx([&["run", "--max-new", "2"], arguments].concat());
        ran(command.current_dir(folder.path()).env("QHX_CACHE_DIR", cache.path()).output().unwrap())
    };
    fs::create_dir(folder.path().join("notes")).unwrap();
    for (model, expected) in [
        ("smol", "looks like a model that does not exist"),
        ("./missing.gguf", "looks like a model that does not exist"),
        ("models/missing.gguf", "looks like a model that does not exist"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "`hf download HuggingFaceTB/SmolLM2-135M-Instruct`"),
        ("buitlin", "did you mean builtin?"),
        ("notes", "it is a folder with neither qhx.json nor config.json"),
    ] {
        failed(run(&[model]), 2, &[expected, "there is no prompt", &format!("qhx run -- {model:?}")]);
        // With a prompt it is the model that is missing.
        failed(run(&[model, "hello"]), 1, &["there is no model at", model]);
    }
    for prompt in [&["hello"][..], &["What is 2+2?"], &["--", "smol"], &["--prompt", "./missing.gguf"], &["builtin", "--", "smol"]] {
        let found = run(prompt);
        assert!(found.code == Some(0) && !found.stdout.is_empty(), "{prompt:?}: {found:?}");
    }
    // What is there is found under a name that is almost right.
    fs::copy(fixture("llama-gguf").join("model.gguf"), folder.path().join("tiny-llama.gguf")).unwrap();
    failed(run(&["tiny-lama"]), 2, &["did you mean tiny-llama.gguf?"]);
    failed(run(&["tiny-llama.gguf"]), 2, &["the prompt is missing: tiny-llama.gguf is a model"]);
    failed(run(&["a", "--", "b", "c"]), 2, &["more than one prompt"]);
}

#[test]
fn repositories_are_found_in_the_hugging_face_cache() {
    let folder = scratch();
    let snapshot = folder.path().join("hub/models--some-org--tiny-llama/snapshots/0123abcd");
    let run = |arguments: &[&str]| {
        let mut command = qhx(arguments);
        command.current_dir(folder.path()).env("HF_HOME", folder.path()).env("QHX_CACHE_DIR", folder.path().join("cache"));
        ran(command.output().unwrap())
    };
    let generate = ["generate", "some-org/tiny-llama", "--ids", "5", "--max-new", "2", "--json"];
    let missing = ["there is no model at some-org/tiny-llama", "models--some-org--tiny-llama", "does not download models yet"];
    failed(run(&generate), 1, &[&missing[..], &["`hf download some-org/tiny-llama`"]].concat());
    fs::create_dir_all(&snapshot).unwrap();
    fs::copy(fixture("llama-gguf").join("model.gguf"), snapshot.join("tiny.gguf")).unwrap();
    fs::create_dir_all(folder.path().join("hub/models--some-org--tiny-llama/refs")).unwrap();
    fs::write(folder.path().join("hub/models--some-org--tiny-llama/refs/main"), "0123abcd").unwrap();
    let found = run(&generate);
    assert!(found.code == Some(0) && found.stderr.contains("(once)"), "{found:?}");
    // It goes by its own name, and not by that of the file or of the commit.
    let inspected = run(&["inspect", "some-org/tiny-llama", "--json"]);
    assert!(inspected.stdout.contains("\"tiny-llama\"") && !inspected.stderr.contains("(once)"), "{inspected:?}");
}

#[test]
fn commands_agree_on_what_a_model_is() {
    let folder = scratch();
    let gguf = fixture("llama-gguf").join("model.gguf");
    let gguf = gguf.to_str().unwrap();
    let trace = folder.path().join("trace");
    let cases: &[&[&str]] = &[
        &["inspect", gguf],
        &["verify", gguf],
        &["bench", gguf, "-p", "4", "-n", "2", "-r", "1"],
        &["generate", gguf, "--ids", "5", "--max-new", "2"],
        &["trace", gguf, "--ids", "5", "--out", trace.to_str().unwrap()],
        &["run", gguf, "hello", "--max-new", "2"],
        &["chat", gguf],
    ];
    for (place, arguments) in cases.iter().enumerate() {
        let found = ran(qhx(*arguments).env("QHX_CACHE_DIR", folder.path().join("cache")).output().unwrap());
        assert_eq!(found.code, Some(0), "{arguments:?}: {found:?}");
        assert_eq!(found.stderr.contains("(once)"), place == 0, "{arguments:?}: {found:?}");
    }
}

#[test]
fn help_is_found_in_every_way() {
    for command in commands() {
        let help = succeed(["help", &command]);
        if command != "help" {
            assert_eq!(help, succeed([&command, "--help"]));
            assert!(help.contains("Example") && help.contains(&format!("qhx {command}")), "{help}");
        }
    }
    assert!(succeed(["--version"]).starts_with("qhx "));
    let none = run([] as [&str; 0]);
    assert!(none.code == Some(2) && none.stderr.contains("Usage: qhx"), "{none:?}");
    assert!(run(["help", "frobnicate"]).stderr.contains("frobnicate"));
}

#[test]
fn completions_and_man_pages() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = succeed(["completions", shell]);
        for word in ["generate", "temperature", "completions"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
    let script = succeed(["completions", "bash"]);
    if let Ok(mut bash) = Command::new("bash").arg("-n").stdin(Stdio::piped()).spawn() {
        std::io::Write::write_all(&mut bash.stdin.take().unwrap(), script.as_bytes()).unwrap();
        assert!(bash.wait().unwrap().success());
    }
    common::fail(["completions", "tcsh"], 2, &["tcsh", "bash"]);
    let folder = scratch();
    let out = folder.path().join("new/man");
    succeed(["man", "--out", out.to_str().unwrap()]);
    let pages = listing(&out);
    for command in commands().iter().filter(|command| *command != "help") {
        assert!(pages.contains(&format!("qhx-{command}.1")), "{command}: {pages:?}");
    }
    let page = fs::read_to_string(out.join("qhx-run.1")).unwrap();
    assert!(page.contains(".TH") && page.contains("max\\-new") && page.contains("Why is the sky blue?"), "{page}");
    common::fail(["man", "--out", Path::new("/dev/null/man").to_str().unwrap()], 1, &["cannot write man pages"]);
}

#[test]
fn both_binaries_are_built() {
    let help = Command::new(env!("CARGO_BIN_EXE_qhx_generate")).arg("--help").output().unwrap();
    assert!(String::from_utf8(help.stdout).unwrap().contains("qhx_generate MANIFEST"));
}

/// A command that cannot print its help fails.
#[cfg(target_os = "linux")]
#[test]
fn help_for_a_full_device_fails() {
    for (program, flag) in
        [(env!("CARGO_BIN_EXE_qhx"), "--help"), (env!("CARGO_BIN_EXE_qhx"), "--version"), (env!("CARGO_BIN_EXE_qhx_generate"), "--help")]
    {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = Command::new(program).arg(flag).stdout(full).output().unwrap();
        assert!(!output.status.success() && !output.stderr.is_empty(), "{program} {flag}: {output:?}");
    }
}

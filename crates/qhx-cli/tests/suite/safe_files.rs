//! Files from strangers and places for output that are not what they seem: nothing hangs, nothing is destroyed, no terminal is commanded.
#![cfg(unix)]

use crate::common::{
    self, DEVICE, Ran, bundle, bundle_copy, copy_folder, fail, failed, fixture, json, listing, qhx, ran, read_json, scratch, text,
    with_stdin,
};
use qhx_runtime::tensors::Tensor;
use serde_json::{Value, json};
use std::{
    ffi::OsStr,
    fs::{self, File},
    io::Read,
    os::unix::{
        ffi::OsStrExt,
        fs::{FileTypeExt, symlink},
    },
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

fn fifo(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

/// A file of that many bytes that takes no room.
fn sparse(path: &Path, bytes: u64) {
    File::create(path).unwrap().set_len(bytes).unwrap();
}

/// The command must fail with exit code 1 within seconds, though what it reads has no end or no other end.
fn refused_at_once(arguments: &[&str], expected: &[&str]) {
    let mut child = qhx(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > Duration::from_secs(60) {
            child.kill().unwrap();
            panic!("{arguments:?} hangs");
        }
        thread::sleep(Duration::from_millis(5));
    }
    failed(ran(child.wait_with_output().unwrap()), 1, expected);
}

fn change_manifest(bundle: &Path, change: impl FnOnce(&mut Value)) {
    let mut manifest = read_json(&bundle.join("qhx.json"));
    change(&mut manifest);
    fs::write(bundle.join("qhx.json"), manifest.to_string()).unwrap();
}

fn write_trace(path: &Path, name: &str) {
    qhx_runtime::tensors::write(path, &[Tensor { name: name.into(), shape: vec![1], values: vec![1.0] }]).unwrap();
}

#[test]
fn output_goes_into_fifos_and_through_links() {
    let folder = scratch();
    let llama = bundle("llama");
    let at = |name: &str| folder.path().join(name);
    let trace = |out: &Path| qhx(["trace", text(&llama), "--ids", "1,2", "--device", DEVICE, "--out", text(out)]).output().unwrap();
    // A link is followed and stays; a file keeps its permissions.
    fs::create_dir(at("deep")).unwrap();
    fs::write(at("deep/old"), "old").unwrap();
    symlink("deep/old", at("link")).unwrap();
    let made = trace(&at("link"));
    assert!(made.status.success(), "{:?}", ran(made));
    assert!(at("link").is_symlink() && !common::tensors(&at("deep/old")).is_empty());
    assert_eq!(listing(&at("deep")), ["old"], "no temporary file is left");
    // A FIFO is written into.
    fifo(&at("pipe"));
    let reader = thread::spawn({
        let pipe = at("pipe");
        move || {
            let mut bytes = Vec::new();
            File::open(pipe).unwrap().read_to_end(&mut bytes).unwrap();
            bytes
        }
    });
    let made = trace(&at("pipe"));
    assert!(made.status.success(), "{:?}", ran(made));
    assert!(fs::symlink_metadata(at("pipe")).unwrap().file_type().is_fifo(), "the FIFO was replaced");
    assert_eq!(reader.join().unwrap(), fs::read(at("deep/old")).unwrap());
    // A device fails as it does for everybody, and is still there.
    symlink("/dev/full", at("full")).unwrap();
    let full = at("full");
    let logits = ["generate", text(&llama), "--ids", "1", "--max-new", "1", "--device", DEVICE, "--json", "--logits", text(&full)];
    fail(logits, 1, &["cannot write", "full: No space left on device"]);
    assert!(fs::metadata(&full).unwrap().file_type().is_char_device() && full.is_symlink());
    assert_eq!(listing(folder.path()), ["deep", "full", "link", "pipe"]);
    // Places that cannot be written are told before the work.
    fail(["trace", text(&llama), "--ids", "1", "--out", text(folder.path())], 1, &["cannot write", "it is a folder"]);
    fail(["trace", text(&llama), "--ids", "1", "--out", text(&at("none/x"))], 1, &["cannot write", "there is no folder"]);
}

#[test]
fn staged_media_stay_in_the_bundle() {
    let folder = scratch();
    let model = bundle_copy("qwen3_vl", folder.path());
    change_manifest(&model, |manifest| manifest["fixture_dir"] = "staged".into());
    fs::create_dir(model.join("staged")).unwrap();
    let file = model.join("staged/0.safetensors");
    let ask = ["generate", text(&model), "--ids", "1,2", "--max-new", "1", "--device", DEVICE];
    fifo(&file);
    refused_at_once(&ask, &["0.safetensors is a FIFO, not a regular file"]);
    let outside = folder.path().join("outside.safetensors");
    write_trace(&outside, "soft_rows");
    for target in [Path::new("/dev/zero"), &outside] {
        fs::remove_file(&file).unwrap();
        symlink(target, &file).unwrap();
        refused_at_once(&ask, &["0.safetensors is a link to ", "outside the folder"]);
    }
}

#[test]
fn endless_and_huge_files_are_refused_at_once() {
    let folder = scratch();
    let llama = bundle("llama");
    let (big, small) = (folder.path().join("big"), folder.path().join("a.safetensors"));
    sparse(&big, 60_000_000);
    write_trace(&small, "a");
    let ask = ["generate", text(&llama), "--max-new", "1", "--device", DEVICE];
    let asked = |more: &[&'static str]| [&ask[..], more].concat();
    refused_at_once(&asked(&["--chat", "/dev/zero"]), &["/dev/zero has more bytes than are read; the limit is 16777216 bytes"]);
    refused_at_once(&asked(&["--ids", "1", "--placement", "/dev/zero"]), &["/dev/zero has more bytes", "the limit is 1048576 bytes"]);
    let (chat, ids) = (text(&big).to_owned(), format!("@{}", text(&big)));
    let limit = "big has 60000000 bytes; the limit is 16777216 bytes";
    refused_at_once(&[&ask[..], &["--chat", &chat]].concat(), &[limit]);
    refused_at_once(&[&ask[..], &["--ids", &ids]].concat(), &[limit]);
    let out = folder.path().join("out");
    refused_at_once(&["forge", text(&fixture("llama")), "--out", text(&out), "--prompts", &chat], &[limit]);
    refused_at_once(&["forge", text(&fixture("llama")), "--out", text(&out), "--prompts", "/dev/zero"], &["the limit is 16777216 bytes"]);
    refused_at_once(&["synth", "/dev/zero", "--out", text(&out)], &["/dev/zero has more bytes than are read; the limit is 33554432 bytes"]);
    refused_at_once(&asked(&["--ids", "1", "--load-session", "/dev/zero"]), &["/dev/zero is a device, not a regular file"]);
    sparse(&big, 1 << 42);
    refused_at_once(&["diff", text(&small), text(&big)], &["big has 4398046511104 bytes; the limit is 17179869184 bytes"]);
    refused_at_once(&["diff", text(folder.path()), text(&small)], &["is a folder, not a regular file"]);
    // What a person pipes in is read within the limit.
    let whole = with_stdin(qhx(asked(&["--chat", "-"])), br#"[{"role": "user", "content": "hello"}]"#);
    assert_eq!(whole.code, Some(0), "{whole:?}");
    let long = with_stdin(qhx(["run", text(&llama), "-"]), &vec![b'a'; 60_000_000]);
    failed(long, 1, &["stdin has more bytes than are read; the limit is 16777216 bytes"]);
    let long = with_stdin(qhx(["chat", text(&llama), "--device", DEVICE]), &vec![b'a'; 60_000_000]);
    failed(long, 1, &["a message may have 16777216 bytes"]);
    let piped = format!("{} diff <(cat {}) {}", env!("CARGO_BIN_EXE_qhx"), text(&small), text(&small));
    if let Ok(piped) = Command::new("bash").args(["-c", &piped]).output() {
        assert!(piped.status.success(), "{:?}", ran(piped));
    }
}

#[test]
fn oracles_and_conversations_name_regular_files() {
    let folder = scratch();
    let golden = folder.path().join("golden");
    fs::create_dir(&golden).unwrap();
    let llama = bundle("llama");
    let verify = ["verify", text(&llama), "--golden", text(&golden), "--device", DEVICE];
    fifo(&golden.join("oracle.json"));
    refused_at_once(&verify, &["oracle.json: is a FIFO, not a regular file"]);
    fs::remove_file(golden.join("oracle.json")).unwrap();
    symlink("/etc/passwd", golden.join("oracle.json")).unwrap();
    refused_at_once(&verify, &["oracle.json: is a link to /etc/passwd, outside the folder"]);
    fs::remove_file(golden.join("oracle.json")).unwrap();
    fs::copy(fixture("llama").join("oracle.json"), golden.join("oracle.json")).unwrap();
    symlink("/dev/zero", golden.join("oracle.safetensors")).unwrap();
    refused_at_once(&verify, &["oracle.safetensors is a link to /dev/zero"]);
    // A conversation names its media.
    let (chat, pipe, model) = (folder.path().join("chat.json"), folder.path().join("pipe"), bundle("qwen3_vl"));
    fifo(&pipe);
    for (path, expected) in [(text(&pipe), "is a FIFO, not a regular file"), ("/dev/zero", "is a device, not a regular file")] {
        let messages = json!([{ "role": "user", "content": [{ "type": "image", "path": path }] }]);
        fs::write(&chat, messages.to_string()).unwrap();
        refused_at_once(&["generate", text(&model), "--chat", text(&chat), "--device", DEVICE], &["content part 1", expected]);
    }
}

#[test]
fn only_bundles_of_ours_are_replaced() {
    let folder = scratch();
    let (source, out) = (fixture("llama"), folder.path().join("bundle"));
    let force = ["forge", text(&source), "--out", text(&out), "--force", "--gate", "none"];
    fs::create_dir(&out).unwrap();
    fs::write(out.join("qhx.json"), "{}").unwrap();
    fs::write(out.join("thesis.tex"), "ten years").unwrap();
    fail(force, 1, &["the folder is not a bundle, so it is not replaced", "qhx.json"]);
    assert_eq!(listing(&out), ["qhx.json", "thesis.tex"]);
    fs::remove_dir_all(&out).unwrap();
    copy_folder(&bundle("llama"), &out);
    fs::write(out.join("thesis.tex"), "ten years").unwrap();
    fail(force, 1, &["bundle is not replaced: it holds files that the bundle in it does not list: thesis.tex"]);
    let config = source.join("config.json");
    fail(["synth", text(&config), "--out", text(&out), "--force"], 1, &["thesis.tex"]);
    assert_eq!(fs::read_to_string(out.join("thesis.tex")).unwrap(), "ten years");
    fs::remove_file(out.join("thesis.tex")).unwrap();
    json(force.iter().chain(&["--json"]));
    assert_eq!(listing(folder.path()), ["bundle"]);
}

/// Nothing that a terminal would obey.
fn is_harmless(text: &str) -> bool {
    !text.contains(|c: char| c.is_control() && c != '\n' && c != '\t' || ('\u{202a}'..='\u{202e}').contains(&c))
}

#[test]
fn terminals_are_not_commanded() {
    const EVIL: &str = "\u{1b}]0;evil\u{7}\u{9b}2J\u{202e}";
    const SHOWN: &str = "\\u{1b}]0;evil\\u{7}\\u{9b}2J\\u{202e}";
    let shows = |ran: &Ran| {
        let all = format!("{}{}", ran.stdout, ran.stderr);
        assert!(all.contains(SHOWN) && is_harmless(&all), "{ran:?}");
    };
    let folder = scratch();
    let (a, b) = (folder.path().join("a"), folder.path().join("b"));
    write_trace(&a, EVIL);
    write_trace(&b, EVIL);
    shows(&common::run(["diff", text(&a), text(&b)]));
    shows(&common::run(["diff", text(&a), text(&folder.path().join(EVIL))]));
    let model = bundle_copy("llama", folder.path());
    change_manifest(&model, |manifest| manifest["model"]["architecture"] = EVIL.into());
    shows(&common::run(["inspect", text(&model), "--device", DEVICE]));
    change_manifest(&model, |manifest| manifest[EVIL] = 1.into());
    for command in ["inspect", "verify", "doctor", "run"] {
        let arguments = [&[command, text(&model)][..], if command == "run" { &["hello"] } else { &[] }].concat();
        shows(&common::run(arguments));
    }
    let usage = common::run(["bench", text(&model), "-r", EVIL]);
    assert!(usage.stderr.contains("2J\\u{202e}' for '--repeats <N>'") && is_harmless(&usage.stderr), "{usage:?}");
    shows(&common::run([OsStr::new("generate"), OsStr::from_bytes(EVIL.as_bytes()), "--ids".as_ref(), "1".as_ref()]));
    // JSON has its own escapes; what goes to a pipe is as it is.
    let found = json(["diff", text(&a), text(&b), "--json"]);
    assert_eq!(found["differences"][0]["name"], EVIL);
    // A line break in a name does not make a line of ours.
    let broken = common::run(["inspect", text(&folder.path().join("x\nerror: fine"))]);
    assert!(broken.stderr.contains("\n    error: fine"), "{broken:?}");
}

#[test]
fn counts_have_bounds() {
    let none = "/no/such/bundle";
    let huge = "18446744073709551615";
    let beyond = "18446744073709551616";
    for flag in ["-r", "-p", "-n", "--threads", "--chunk"] {
        for value in [huge, beyond, "-1", "x"] {
            fail(["bench", none, &format!("{flag}={value}")], 2, &["invalid value"]);
        }
    }
    fail(["bench", none, "-r", "1001"], 2, &["1..=1000"]);
    fail(["bench", none, "-r", "0"], 2, &["1..=1000"]);
    fail(["bench", none, "-p", &vec!["1"; 65].join(",")], 2, &["66 tests, at most 64"]);
    for flag in ["--max-new", "--threads", "--context", "--chunk", "--top-k", "--repetition-window"] {
        fail(["generate", none, "--ids", "1", flag, huge], 2, &[flag]);
    }
    fail(["generate", none, "--ids", "1", "--seed", beyond], 2, &["--seed"]);
    let sizes = (1..=17).map(|n| n.to_string()).collect::<Vec<_>>().join(",");
    fail(["forge", none, "--out", "x", "--target", "v79", "--prefill", &sizes], 2, &["--prefill: found 17 sizes, at most 16"]);
    fail(["forge", none, "--out", "x", "--target", "v79", "--audio-seconds", "1e300"], 2, &["--audio-seconds"]);
    fail(["forge", none, "--out", "x", "--gate-budget", "1e18"], 2, &["--gate-budget"]);
}

/// A batch reads its answers back to go on behind them, which no device and no pipe can do.
#[test]
fn answers_of_a_batch_go_into_regular_files() {
    let folder = scratch();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("in.jsonl"), "{\"ids\": [5], \"max_new\": 1}\n").unwrap();
    fifo(&at("fifo"));
    let (llama, input) = (bundle("llama"), at("in.jsonl"));
    for output in [Path::new("/dev/full"), Path::new("/dev/null"), &at("fifo"), folder.path()] {
        let arguments = ["batch", text(&llama), "--in", text(&input), "--out", text(output)];
        refused_at_once(&arguments, &["cannot write", text(output), "is no regular file"]);
    }
}

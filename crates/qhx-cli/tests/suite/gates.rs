//! `qhx forge` with its gate and `qhx verify`, by the real binary.
#![cfg(feature = "cpu")]

use crate::{
    common::{self, fail, fixture, json, listing, qhx, ran, run, scratch, succeed, text, wait_until},
    extended,
};
use serde_json::{Value, json};
use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
};

#[test]
fn forged_gated_verified() {
    let folder = scratch();
    let (source, out) = (fixture("qwen3"), folder.path().join("model"));
    let found = json(["forge", text(&source), "--out", text(&out), "--precision", "f32", "--json"]);
    assert_eq!((&found["gate"], &found["parity"]["passed"]), (&json!("strict"), &json!(true)), "{found}");
    assert!(found["parity"]["result"].as_str().unwrap().contains("tokens are the f32 model's choice"), "{found}");
    assert!(found["memory"]["own_bytes"].as_u64().unwrap() > 0, "{found}");
    assert!(listing(&out).contains(&"parity.html".to_string()) && listing(&out).contains(&"parity.json".to_string()));
    let shown = json(["inspect", text(&out), "--json"]);
    assert_eq!((&shown["gated"], &shown["verdict"]), (&json!(true), &found["parity"]["result"]), "{shown}");
    assert!(succeed(["inspect", text(&out)]).contains(found["parity"]["result"].as_str().unwrap()));
    let table = succeed(["verify", text(&out), "--threads", "1"]);
    assert!(table.contains("pass: ") && table.contains("worst stage"), "{table}");
    let report = json(["verify", text(&out), "--json"]);
    assert_eq!((&report["passed"], &report["differences"]), (&json!(true), &json!([])), "{report}");
    let golden = json(["verify", text(&out), "--golden", text(&source), "--json"]);
    assert_eq!((&golden["passed"], &golden["strict"]), (&json!(true), &json!(true)), "{golden}");
    fail(["verify", text(&out), "--golden", "/no/such/folder"], 1, &["oracle.json", "cannot be read"]);

    // A damaged weight is found by its sum, and where that was made to fit, by its numbers.
    let manifest: Value = common::read_json(&out.join("qhx.json"));
    let file = manifest["weights"][0].as_str().unwrap().to_owned();
    let mut weights = fs::read(out.join(&file)).unwrap();
    let place = weights.len() - 100 * 1024;
    weights[place / 4 * 4 + 3] ^= 0x80;
    fs::write(out.join(&file), &weights).unwrap();
    fail(["verify", text(&out)], 1, &["is damaged or was changed: sha256 must be"]);
    let mut manifest = manifest;
    manifest["files"][&file]["sha256"] = qhx_bundle::Digest::of(&weights).to_string().into();
    fs::write(out.join("qhx.json"), manifest.to_string()).unwrap();
    let damaged = run(["verify", text(&out), "--json"]);
    assert_eq!(damaged.code, Some(1), "{damaged:?}");
    let report: Value = serde_json::from_str(&damaged.stdout).unwrap();
    assert_eq!(report["damaged_weights"].as_array().unwrap().len(), 1, "{report}");
    let stage = report["stage"].as_str().unwrap();
    assert!(damaged.stderr.contains(&format!("verification failed: stage {stage}")), "{damaged:?}");
}

/// The types of a file decide what is computed, whatever command forges it and however much its gate measures; how much that was is told.
#[test]
fn a_file_of_integers_is_one_model() {
    let folder = scratch();
    let (file, cache, out) = (common::integer_gguf(folder.path()), folder.path().join("cache"), folder.path().join("forged"));
    let mut command = qhx(["run", text(&file), "hello", "--max-new", "4", "--ignore-eos", "--device", "cpu"]);
    let answered = ran(command.env("QHX_CACHE_DIR", &cache).output().unwrap());
    assert_eq!(answered.code, Some(0), "{answered:?}");
    let told = answered.stderr.lines().find(|line| line.contains("gate passed: native: ")).unwrap_or_else(|| panic!("{answered:?}"));
    assert!(told.contains("this is the cost of the file's own types (int8 activations)"), "{told}");
    assert!(told.contains("(incomplete: a quick gate: ") && !told.contains("limit"), "{told}");
    let named = cache.join("models").join(&listing(&cache.join("models"))[0]);
    let cached = named.join(&listing(&named)[0]);
    let forged = json(["forge", text(&file), "--out", text(&out), "--json"]);
    for part in ["programs", "weights"] {
        let names = listing(&out.join(part));
        assert!(!names.is_empty() && names == listing(&cached.join(part)), "{names:?}");
        for name in names {
            assert!(fs::read(out.join(part).join(&name)).unwrap() == fs::read(cached.join(part).join(&name)).unwrap(), "{part}/{name}");
        }
    }
    let (quick, whole) = (json(["inspect", text(&cached), "--json"]), json(["inspect", text(&out), "--json"]));
    assert!(quick["activations"]["i8_block32"].as_u64().unwrap() > 10, "{quick}");
    assert_eq!(quick["activations"], whole["activations"]);
    assert!(quick["incomplete"].as_str().unwrap().starts_with("incomplete: a quick gate: "), "{quick}");
    assert!(succeed(["inspect", text(&cached)]).contains("(incomplete: a quick gate: "));
    assert!(whole["incomplete"].is_null() && !succeed(["inspect", text(&out)]).contains("incomplete"), "{whole}");
    let page = |bundle: &Path| fs::read_to_string(bundle.join("parity.html")).unwrap();
    assert!(page(&cached).contains("incomplete: a quick gate: ") && !page(&out).contains("incomplete"));
    // What `verify --golden` holds it to: the limits of its class, or twice what was measured where that is more.
    let closeness = &forged["parity"]["closeness"];
    let number = |value: &Value| value.as_f64().unwrap();
    let flips = number(&closeness["flips"]) / number(&closeness["tokens"]);
    assert_eq!((&closeness["own_types"], &closeness["class"]), (&json!(true), &json!("int8 activations")), "{forged}");
    assert!((number(&closeness["limits"]["flips"]) - (1.0 - (1.0 - flips).powi(2)).max(0.04)).abs() < 1e-6, "{forged}");
    assert_eq!(number(&closeness["limits"]["mean_kl"]), (2.0 * number(&closeness["mean_kl"])).max(0.006), "{forged}");
    assert_eq!(closeness["limits"]["wide_flips"]["margin"], 0.5, "{forged}");
}

#[test]
fn below_its_gate() {
    let folder = scratch();
    let out = folder.path().join("model");
    let prompts = folder.path().join("prompts.json");
    fs::write(&prompts, r#"[[1, 2, 3], "a text", {"user": "a turn"}]"#).unwrap();
    let arguments =
        ["forge", text(&fixture("llama")), "--out", text(&out), "--precision", "w4", "--gate", "strict", "--prompts", text(&prompts)]
            .map(str::to_owned);
    fail(&arguments, 1, &["the bundle failed its gate", "the strict gate allows none", "hint: try --precision w8", "model.rejected"]);
    assert_eq!(listing(folder.path()), ["model.rejected", "prompts.json"]);
    let rejected = folder.path().join("model.rejected");
    assert!(listing(&rejected).contains(&"parity.html".to_string()));
    // It runs, and says so: by its verdict, whatever the folder is called.
    let answer = |place: &Path| run(["generate", text(place), "--ids", "1,2", "--max-new", "1", "--json"]);
    let warned = |place: &Path, by: &str| {
        let found = answer(place);
        let lines: Vec<&str> = found.stderr.lines().filter(|line| line.starts_with("warning: ")).collect();
        assert!(found.code == Some(0) && lines.len() == 1 && lines[0].contains(by), "{found:?}");
    };
    warned(&rejected, "failed its gate when it was made, and its answers may be wrong: ");
    let renamed = folder.path().join("renamed");
    fs::rename(&rejected, &renamed).unwrap();
    warned(&renamed, "failed its gate when it was made");
    fs::remove_dir_all(&renamed).unwrap();
    for (bad, expected) in
        [("{", "not valid JSON"), ("[]", "at least one prompt"), ("[[400000]]", "has the id 400000"), ("[{}]", "prompt 1 must be")]
    {
        fs::write(&prompts, bad).unwrap();
        fail(&arguments, 1, &[expected]);
    }
    fs::remove_file(&prompts).unwrap();
    fail(&arguments, 1, &["cannot read"]);
    fail(["verify", text(&common::bundle("llama"))], 1, &["carries no oracle", "hint: forge it again with a gate"]);
}

/// Forges a fixture with its gate, which it must pass, and verifies it on this machine's instructions; gives whether it was held to plain rounding.
fn passes(model: &str, precision: &str) -> bool {
    let folder = scratch();
    let (source, out) = (fixture(model), folder.path().join("model"));
    let flag = if precision.parse::<f64>().is_ok() { "--bits" } else { "--precision" };
    let forged = json(["forge", text(&source), "--out", text(&out), flag, precision, "--json"]);
    let gate = &forged["parity"];
    let result = gate["result"].as_str().unwrap();
    assert_eq!(gate["passed"], true, "{model} at {precision}: {result}");
    let is_raised = gate["closeness"]["plain"].is_object();
    assert_eq!(is_raised, result.contains("plain rounding changes"), "{model} at {precision}: {gate}");
    let report = json(["verify", text(&out), "--json", "--device", "cpu"]);
    assert_eq!(report["passed"], true, "{model} at {precision}: {}", report["problems"]);
    is_raised
}

/// Weights that nobody trained lose more by any rounding than the limits of a class allow: every precision passes by what plain rounding of them loses, and `verify` follows.
#[test]
fn models_with_random_weights_pass_their_gates() {
    let all = ["llama", "qwen3", "qwen3_5", "phimoe", "gemma4", "qwen3_vl"];
    if !extended() {
        let raised =
            [("qwen3", "w8"), ("qwen3_5", "w4"), ("gemma4", "w8")].into_iter().filter(|(model, precision)| passes(model, precision));
        let raised = raised.count();
        return assert!(raised >= 2, "only {raised} of 3 were measured beside plain rounding");
    }
    let cases = all.iter().flat_map(|model| ["f16", "w8", "w4"].map(|precision| (model, precision)));
    let raised = cases.filter(|(model, precision)| passes(model, precision)).count();
    assert!(raised >= 12, "only {raised} of 18 were measured beside plain rounding");
    // Other instructions than those of the gate: it carries their order of sums on from stage to stage.
    assert!(passes("qwen3_5", "6.5"));
}

/// The other precisions, each of at least two models.
#[test]
fn every_precision_passes_its_gate() {
    let models = ["llama", "qwen3", "qwen3_5", "phimoe", "gemma4", "qwen3_vl", "phimoe_longrope", "llama-gguf/model.gguf"];
    let precisions = ["native", "f32", "w8-f16head", "moe-i8", "w4-row", "6.5", "auto"];
    for (m, model) in models.into_iter().enumerate() {
        for place in [m, m + 3].into_iter().take(if extended() { 2 } else { 1 }) {
            passes(model, precisions[place % precisions.len()]);
        }
    }
}

#[test]
fn a_gate_can_be_stopped() {
    let folder = scratch();
    let place = folder.path().join("place");
    fs::create_dir(&place).unwrap();
    let out = place.join("bundle");
    // Many prompts: the gate takes seconds, the forging before it a moment.
    let prompts = folder.path().join("prompts.json");
    fs::write(&prompts, Value::from((0..400u32).map(|i| vec![i % 300; 600]).collect::<Vec<_>>()).to_string()).unwrap();
    let arguments =
        ["forge", text(&fixture("llama")), "--out", text(&out), "--precision", "f32", "--prompts", text(&prompts)].map(str::to_owned);
    let child = qhx(&arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // The manifest is the last that is written before the gate begins.
    let gating = |place: &Path| fs::read_dir(place).unwrap().any(|entry| entry.unwrap().path().join("qhx.json").exists());
    wait_until("the gate has begun", || gating(&place));
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let ended = ran(child.wait_with_output().unwrap());
    assert!(ended.code == Some(1) && ended.stderr.contains("cancelled: nothing was written"), "{ended:?}");
    assert_eq!(listing(&place), [""; 0], "nothing is left");
}

#[test]
fn limits_of_ones_own() {
    let folder = scratch();
    let (out, prompts, source) = (folder.path().join("model"), folder.path().join("prompts.json"), fixture("llama"));
    fs::write(&prompts, r#"["a text of a few words", [5, 6, 7, 8]]"#).unwrap();
    let forge = |limits: &[&'static str]| {
        let always = ["forge", text(&source), "--out", text(&out), "--precision", "w4", "--prompts", text(&prompts), "--force", "--json"];
        always.into_iter().chain(limits.iter().copied()).map(str::to_owned).collect::<Vec<_>>()
    };
    fail(forge(&["--max-kl", "1e-9"]), 1, &["failed its gate: w4: ", "the limits that were asked for are exceeded: ", "(limit 1e-9)"]);
    let found = json(forge(&["--max-kl", "20", "--max-flips", "100%"]));
    let closeness = &found["parity"]["closeness"];
    assert_eq!((&closeness["limits"]["flips"], &closeness["limits"]["mean_kl"]), (&json!(1.0), &json!(20.0)), "{found}");
    // Prompts count too: five words and four ids, and the answers to both.
    assert!(closeness["tokens"].as_u64() > found["parity"]["tokens"].as_u64(), "{found}");
    for share in ["101%", "-1", "x", "nan"] {
        fail(forge(&["--max-flips", share]), 2, &["expected a share from 0 to 1"]);
    }
    for kl in ["-1", "-0.5", "inf", "nan", "x"] {
        fail(forge(&["--max-kl", kl]), 2, &["expected a number of nats, 0 or above"]);
    }
    fail(["forge", text(&source), "--out", text(&out), "--gate", "none", "--max-kl", "1"], 2, &["--max-kl needs a gate"]);
    let auto = ["forge", text(&source), "--out", text(&out), "--precision", "auto", "--gate-budget", "9"];
    fail(auto, 2, &["--gate-budget cannot be combined with --precision auto", "how busy the machine is"]);
}

#[test]
fn precisions_side_by_side() {
    let folder = scratch();
    let (out, words, source) = (folder.path().join("made"), folder.path().join("words.txt"), fixture("llama"));
    fs::write(&words, "The tide comes in twice a day, and each time the boats turn round.").unwrap();
    let found = json(["forge", text(&source), "--compare", "f32,w4", "--text", text(&words), "--out", text(&out), "--json"]);
    let [f32, w4] = &found["precisions"].as_array().unwrap()[..] else { panic!("{found}") };
    assert_eq!((&f32["precision"], &w4["precision"]), (&json!("f32"), &json!("w4")), "{found}");
    assert!(f32["kl_mean"].as_f64().unwrap() < 1e-8 && w4["kl_mean"].as_f64().unwrap() > 1e-6, "{found}");
    assert!(w4["bytes"].as_u64() < f32["bytes"].as_u64() && w4["bits_per_weight"].as_f64() < f32["bits_per_weight"].as_f64(), "{found}");
    assert!(f32["decode_tokens_per_second"].as_f64().unwrap() > 0.0 && f32["perplexity"].as_f64().unwrap() > 1.0, "{found}");
    assert!(listing(&out).starts_with(&["compare.html".into(), "f32".into()]), "{:?}", listing(&out));
    let page = fs::read_to_string(out.join("compare.html")).unwrap();
    assert!(page.contains("<th>f32</th>") && page.contains("<th>w4</th>") && !page.contains("http"), "{page}");
    // Without a folder only the page is kept.
    let (place, temporary) = (scratch(), scratch());
    let mut command = qhx(["forge", text(&source), "--compare", "f16", "--text", text(&words)]);
    let found = ran(command.current_dir(place.path()).env("TMPDIR", temporary.path()).output().unwrap());
    assert!(found.code == Some(0) && found.stdout.contains("| f16 ") && found.stdout.contains("page: compare.html"), "{found:?}");
    assert_eq!((listing(place.path()), listing(temporary.path())), (vec!["compare.html".to_owned()], vec![]));
    let compare = |flags: &[&'static str]| {
        ["forge", text(&source), "--out", text(&out)].into_iter().chain(flags.iter().copied()).map(str::to_owned).collect::<Vec<_>>()
    };
    for flags in
        [["--precision", "w8"], ["--bits", "6"], ["--max-kl", "1"], ["--max-flips", "1%"], ["--gate-budget", "9"], ["--gate", "none"]]
    {
        fail(compare(&["--compare", "f16", flags[0], flags[1]]), 2, &["cannot be used with"]);
    }
    for (precisions, expected) in [
        ("q9", "`q9` is no precision"),
        ("f16,w8,f16", "f16 twice"),
        ("4.8,4.80", "4.8 twice"),
        ("f16,", "is no precision"),
        ("auto", "a search for a precision"),
    ] {
        fail(compare(&["--compare", precisions]), 2, &[expected]);
    }
    fail(compare(&["--compare", "f16", "--target", "v81"]), 2, &["--compare measures on this machine"]);
    fail(compare(&["--compare", "f16", "--context", "64"]), 2, &["--context is for targets"]);
    // A name that is taken is told before anything is made.
    fail(compare(&["--compare", "f16,w4"]), 1, &["w4", "exists already", "--force"]);
    assert!(!out.join("f16").exists(), "{:?}", listing(&out));
    fail(["forge", text(&source), "--compare", "f16", "--text", text(folder.path())], 1, &["folder"]);
    fail(["forge", text(&source)], 2, &["--out DIR is missing"]);
}

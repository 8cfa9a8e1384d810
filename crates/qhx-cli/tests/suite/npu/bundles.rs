//! Arch folders, from the forge to an answer in QNN's emulator: complete in themselves, held to transformers, and what is said of damaged and wrong ones.

use crate::common::{
    self, Ran, copy_folder, fail, failed, fixture, ids, json, listing, qhx, ran, read_json, run, scratch, succeed, tensors,
};
use qhx_bundle::target::{KvForm, MadeFor};
use qhx_forge::{ForgeOptions, Material, Precision, TargetOrder, forge_with_targets};
use qhx_npu::{
    Library, NpuDevice, NpuOptions,
    lower::{
        Work, parts,
        parts::{weight_bytes, work_of},
    },
};
use qhx_runtime::tensors::Tensor;
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Arc, LazyLock},
};

const NEW: usize = 6;

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Forges a fixture for both generations, for the emulator.
fn forge(name: &str, out: &Path, more: &[&str]) -> Value {
    let sizes = ["--precision", "f16", "--target", "cpu,v79,v81", "--for", "emulator", "--context", "96", "--prefill", "32", "--json"];
    json(["forge", text(&fixture(name)), "--out", text(out)].iter().chain(&sizes).chain(more))
}

/// A bundle of a model with experts, forged once, and its folder for v81 copied to a place of its own.
static EXPERTS: LazyLock<(tempfile::TempDir, PathBuf, PathBuf)> = LazyLock::new(|| {
    let folder = scratch();
    let bundle = folder.path().join("phimoe");
    forge("phimoe", &bundle, &["--gate", "none"]);
    let alone = copy_folder(&bundle.join("v81"), &folder.path().join("elsewhere/v81"));
    (folder, bundle, alone)
});

/// The folder with QNN's libraries.
fn qnn_dir() -> PathBuf {
    std::env::var_os("QHX_QNN_DIR").expect("QHX_QNN_DIR names the folder with libQnnHtp.so").into()
}

/// The run line of published cards, with these paths.
pub(crate) fn published(manifest: &Path, root: &Path, new: usize, rest: &[&str]) -> Ran {
    let libraries = qnn_dir();
    let mut command = Command::new(env!("CARGO_BIN_EXE_qhx_generate"));
    command.arg(manifest).arg(libraries.join("libQnnHtp.so")).arg(libraries.join("libQnnSystem.so")).arg(root);
    ran(command.arg(new.to_string()).args(rest).env_remove("QHX_QNN_DIR").stdin(Stdio::null()).output().unwrap())
}

pub(crate) fn on_npu(answer: &Value) {
    let stages = answer["stages"].as_array().unwrap();
    assert!(stages.len() > 3 && stages.iter().any(|stage| stage["device"] == "npu"), "{stages:?}");
    assert!(stages.iter().all(|stage| stage["device"] == "npu" || stage["device"] == "host"), "{stages:?}");
    assert_eq!(answer["fallbacks"], Value::Array(vec![]));
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn a_folder_alone_answers_as_transformers_does_and_bit_for_bit_again() {
    let (folder, bundle, alone) = &*EXPERTS;
    // Host tables only: the weights of graphs are in the context binaries.
    let size = |place: PathBuf| fs::read_dir(place).unwrap().map(|f| f.unwrap().metadata().unwrap().len()).sum::<u64>();
    assert!(size(alone.join("weights")) < size(bundle.join("weights")));
    assert!(!alone.join("qhx.json").exists() && !alone.join("tokenizer.json").is_symlink());
    let start = &fs::read_to_string(alone.join("phimoe.json")).unwrap()[..2000];
    assert!(["\"schema_version\"", "\"plan\"", "\"dsp_arch\": \"v81\"", "\"soc_model\": 87", "QAIRT 2."].iter().all(|t| start.contains(t)));
    let oracle = read_json(&fixture("phimoe").join("oracle.json"));
    let prompt = oracle["prompts"].as_array().unwrap().iter().find(|prompt| prompt["name"] == "len5").unwrap();
    let (prompt_ids, new) = (ids(&prompt["ids"]), NEW.to_string());
    let input = ["--ids", &prompt_ids, "--max-new", &new, "--ignore-eos", "--json"];
    let mut logits = Vec::new();
    for (place, name) in [(alone.clone(), "a"), (alone.join("phimoe.json"), "b"), (bundle.clone(), "c"), (bundle.join("v79"), "d")] {
        let file = folder.path().join(name);
        let found = json(["generate", text(&place), "--device", "npu", "--logits", text(&file)].iter().chain(&input));
        assert_eq!(found["ids"].as_array().unwrap()[..], prompt["greedy"].as_array().unwrap()[..NEW], "{place:?}");
        on_npu(&found);
        logits.push(tensors(&file)["step_logits"].1.clone());
    }
    assert!(logits[0] == logits[1] && logits[0] == logits[2], "two processes give the same bits");
    // Fewer rows than the manifest says go through decode, to the same tokens.
    let manifest = copy_folder(alone, &folder.path().join("short")).join("phimoe.json");
    let mut plan = read_json(&manifest);
    plan["plan"]["prefill_min_tokens"] = 6.into();
    fs::write(&manifest, plan.to_string()).unwrap();
    let found = json(["generate", text(&manifest)].iter().chain(&input));
    assert_eq!(found["prefill_path"], "decode_over_prompt");
    assert_eq!(found["ids"].as_array().unwrap()[..], prompt["greedy"].as_array().unwrap()[..NEW], "decode over the prompt");
    // The text of published run lines, ids and words.
    let line = published(&alone.join("phimoe.json"), alone, NEW, &[&prompt_ids]);
    let found = json(["generate", text(alone), "--ids", &prompt_ids, "--max-new", &new, "--json"]);
    assert_eq!((line.code, line.stdout.trim_end()), (Some(0), found["text"].as_str().unwrap().trim_end()), "{line:?}");
    assert!(line.stderr.contains("prompt 5 tokens, generated"), "{line:?}");
    let line = published(&alone.join("phimoe.json"), alone, 2, &["Who are you?"]);
    let found = json(["generate", text(alone), "--user", "Who are you?", "--max-new", "2", "--json"]);
    assert_eq!((line.code, line.stdout.trim_end()), (Some(0), found["text"].as_str().unwrap().trim_end()), "{line:?}");
    // The root is for the CPU, as ever.
    let cpu = json(["generate", text(bundle), "--device", common::DEVICE].iter().chain(&input));
    assert_eq!(cpu["ids"].as_array().unwrap()[..], prompt["greedy"].as_array().unwrap()[..NEW]);
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn one_manifest_for_each_use_and_the_text_one_knows_no_picture() {
    let folder = scratch();
    let bundle = folder.path().join("vl");
    let report = forge("qwen3_vl", &bundle, &["--gate", "none", "--image-size", "64x96"]);
    assert_eq!(report["targets"][1]["manifests"], serde_json::json!(["vl.json", "vl-vlm.json"]));
    let alone = copy_folder(&bundle.join("v81"), &folder.path().join("v81"));
    // Of the very size that the model's own rule gives this picture, so that transformers' answer holds.
    let picture = fixture("qwen3_vl").join("media/wide.png");
    let record = read_json(&fixture("qwen3_vl").join("media.json"));
    let prompt = record["prompts"].as_array().unwrap().iter().find(|prompt| prompt["name"] == "image").unwrap();
    let (prompt_ids, new) = (ids(&prompt["ids"]), NEW.to_string());
    let input = ["--image", text(&picture), "--ids", &prompt_ids, "--max-new", &new, "--ignore-eos", "--json"];
    let found = json(["generate", text(&alone), "--device", "npu"].iter().chain(&input));
    on_npu(&found);
    assert_eq!(found["ids"].as_array().unwrap()[..], prompt["greedy"].as_array().unwrap()[..NEW]);
    assert!(found["stages"].as_array().unwrap().iter().any(|stage| stage["stage"] == "vision.0" && stage["device"] == "npu"), "{found}");
    let line = published(&alone.join("vl-vlm.json"), &alone, NEW, &["What is shown in picture 1?", text(&picture)]);
    let asked = ["--image", text(&picture), "--user", "What is shown in picture 1?", "--max-new", &new, "--json"];
    let answer = json(["generate", text(&alone.join("vl-vlm.json"))].iter().chain(&asked));
    assert_eq!((line.code, line.stdout.trim_end()), (Some(0), answer["text"].as_str().unwrap().trim_end()), "{line:?}");
    assert_eq!(answer["ids"], found["ids"], "the words give the recorded prompt, which ends by itself nowhere here");
    // What transformers' eyes made of the picture takes the place of its own.
    let staged = copy_folder(&alone, &folder.path().join("staged"));
    let mut manifest = read_json(&staged.join("vl-vlm.json"));
    manifest["fixture_dir"] = "features".into();
    fs::write(staged.join("vl-vlm.json"), manifest.to_string()).unwrap();
    fs::create_dir(staged.join("features")).unwrap();
    let numbers = tensors(&fixture("qwen3_vl").join("media.safetensors"));
    let mut features = vec![Tensor { name: "grid".into(), shape: vec![2], values: vec![2.0, 3.0] }];
    for name in ["soft_rows", "deepstack.0", "deepstack.1"] {
        let (shape, values) = numbers[&format!("image.0.{name}")].clone();
        features.push(Tensor { name: name.into(), shape, values });
    }
    qhx_runtime::tensors::write(&staged.join("features/0.safetensors"), &features).unwrap();
    let found = json(["generate", text(&staged.join("vl-vlm.json")), "--device", "npu"].iter().chain(&input[2..]));
    on_npu(&found);
    assert_eq!(found["ids"].as_array().unwrap()[..], prompt["greedy"].as_array().unwrap()[..NEW]);
    assert!(found["stages"].as_array().unwrap().iter().all(|stage| !stage["stage"].as_str().unwrap().starts_with("vision")), "{found}");
    // Without its eyes.
    for file in listing(&alone).iter().filter(|file| file.starts_with("vision")) {
        fs::remove_file(alone.join(file)).unwrap();
    }
    let manifest = alone.join("vl.json");
    assert!(!fs::read_to_string(&manifest).unwrap().contains("vision"));
    on_npu(&json(["generate", text(&manifest), "--ids", "1,2,3", "--max-new", "1", "--json"]));
    fail(["generate", text(&manifest), "--image", text(&picture), "--prompt", "x"], 1, &["takes no images"]);
    fail(["generate", text(&alone.join("vl-vlm.json")), "--prompt", "x"], 1, &["vision", "is missing"]);
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn a_sound_goes_through_the_same_run_line_and_a_picture_through_its_manifest() {
    let folder = scratch();
    let bundle = folder.path().join("gemma");
    let sizes = ["--precision", "f16", "--target", "v81", "--for", "emulator", "--context", "64", "--prefill", "32"];
    // The size that the model's own rule gives the picture.
    let media = ["--audio-seconds", "1", "--image-size", "96x144"];
    succeed(["forge", text(&fixture("gemma4")), "--out", text(&bundle), "--gate", "none"].iter().chain(&sizes).chain(&media));
    let manifests: Vec<String> = listing(&bundle.join("v81")).into_iter().filter(|name| name.starts_with("gemma")).collect();
    assert_eq!(manifests, ["gemma-audio.json", "gemma-omni.json", "gemma-vlm.json", "gemma.json"]);
    let record = read_json(&fixture("gemma4").join("media.json"));
    let prompt = record["prompts"].as_array().unwrap().iter().find(|prompt| prompt["name"] == "sound").unwrap();
    let (prompt_ids, sound) = (ids(&prompt["ids"]), fixture("gemma4").join("media/phrase.wav"));
    let input = ["--audio", text(&sound), "--ids", &prompt_ids, "--max-new", "3", "--json", "--device", common::DEVICE];
    let cpu = json(["generate", text(&bundle)].iter().chain(&input));
    assert_eq!(cpu["ids"].as_array().unwrap()[..], prompt["greedy"].as_array().unwrap()[..3]);
    let line = published(&bundle.join("v81/gemma-audio.json"), &bundle.join("v81"), 3, &[&prompt_ids, text(&sound)]);
    assert_eq!((line.code, line.stdout.trim_end()), (Some(0), cpu["text"].as_str().unwrap().trim_end()), "{line:?}");
    let asked = ["--device", "npu", "--audio", text(&sound), "--ids", &prompt_ids, "--max-new", "1", "--json"];
    let found = json(["generate", text(&bundle.join("v81/gemma-audio.json"))].iter().chain(&asked));
    on_npu(&found);
    let ears = found["stages"].as_array().unwrap().iter().filter(|stage| stage["stage"].as_str().unwrap().starts_with("audio"));
    assert!(ears.filter(|stage| stage["device"] == "npu").count() > 2 && found["ids"][0] == prompt["greedy"][0], "{found}");
    let picture = fixture("gemma4").join("media/wide.png");
    let line = published(&bundle.join("v81/gemma-audio.json"), &bundle.join("v81"), 3, &[&prompt_ids, text(&picture)]);
    assert!(line.code == Some(1) && line.stderr.contains("takes no images: it takes text and sounds"), "{line:?}");
    let prompt = record["prompts"].as_array().unwrap().iter().find(|prompt| prompt["name"] == "image").unwrap();
    let prompt_ids = ids(&prompt["ids"]);
    let asked = ["--device", "npu", "--image", text(&picture), "--ids", &prompt_ids, "--max-new", "3", "--ignore-eos", "--json"];
    let found = json(["generate", text(&bundle.join("v81/gemma-vlm.json"))].iter().chain(&asked));
    on_npu(&found);
    let eyes = found["stages"].as_array().unwrap().iter().filter(|stage| stage["stage"].as_str().unwrap().starts_with("vision"));
    assert!(eyes.filter(|stage| stage["device"] == "npu").count() > 2, "{found}");
    assert_eq!(found["ids"].as_array().unwrap()[..], prompt["greedy"].as_array().unwrap()[..3]);
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn wrong_and_damaged_folders_are_refused_with_the_reason() {
    let (_, bundle, alone) = &*EXPERTS;
    let folder = scratch();
    let copy = copy_folder(alone, &folder.path().join("v81"));
    let ask = ["--ids", "1,2,3", "--max-new", "1"];
    let refused = |expected: &[&str]| fail(["generate", text(&copy), "--device", "npu"].iter().chain(&ask), 1, expected);
    let context = copy.join(listing(&copy).into_iter().find(|name| name.starts_with("text_decode") && name.ends_with(".bin")).unwrap());
    let whole = fs::read(&context).unwrap();
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    fs::write(&context, &flipped).unwrap();
    refused(&["is damaged or was changed", "sha256"]);
    fs::write(&context, &whole[..whole.len() - 64]).unwrap();
    refused(&["it is truncated"]);
    fs::remove_file(&context).unwrap();
    refused(&["is missing", "plan.programs.text.contexts"]);
    fs::write(&context, &whole).unwrap();
    fail(["generate", text(&copy), "--device", "cpu"].iter().chain(&ask), 1, &["is prepared for the NPU", "--device npu"]);
    let mut other = qhx(["generate", text(&bundle.join("v79")), "--device", "npu"].iter().chain(&ask));
    failed(ran(other.env("QHX_NPU_ARCH", "v81").output().unwrap()), 1, &["is for Hexagon v79, this machine's processor is v81", "`v81`"]);
    fail(["generate", text(&copy), "--context", "97"].iter().chain(&ask), 2, &["context is 97, expected 1 to 96"]);
    let manifest = copy.join("phimoe.json");
    for (arguments, expected) in [
        ((text(&copy.join("tokenizer.json")), text(&copy), "1"), "not a bundle manifest"),
        ((text(&manifest), text(folder.path()), "1"), "is missing"),
        ((text(&manifest), text(&copy), "one"), "expected a number of tokens"),
        ((text(&copy), text(&copy), "1"), "a manifest is expected"),
    ] {
        let (manifest, root, new) = arguments;
        let mut command = Command::new(env!("CARGO_BIN_EXE_qhx_generate"));
        let run = ran(command.args([manifest, "libQnnHtp.so", "libQnnSystem.so", root, new, "1,2"]).output().unwrap());
        assert!(matches!(run.code, Some(1 | 2)) && run.stdout.is_empty() && run.stderr.contains(expected), "{expected}: {run:?}");
    }
    let doctor = json(["doctor", text(&copy), "--json"]);
    assert!(doctor["devices"].as_array().unwrap().iter().all(|device| device["ready"] == (device["device"] == "npu")), "{doctor}");
    assert!(succeed(["inspect", text(&copy)]).contains("npu"));
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn gates_run_in_the_emulator_on_the_whole_model_or_on_stages_alone() {
    let folder = scratch();
    let oracle = read_json(&fixture("qwen3").join("oracle.json"));
    let prompts = oracle["prompts"].as_array().unwrap().iter().filter(|p| p["name"] == "len5" || p["name"] == "len17");
    let file = folder.path().join("prompts.json");
    fs::write(&file, Value::Array(prompts.map(|prompt| prompt["ids"].clone()).collect()).to_string()).unwrap();
    let source = fixture("qwen3");
    let sizes = ["--precision", "f16", "--target", "v81", "--context", "64", "--prefill", "16", "--json", "--prompts", text(&file)];
    let make = |name: &str, more: &[&str]| {
        let place = folder.path().join(name);
        let report = json(["forge", text(&source), "--out", text(&place)].iter().chain(&sizes).chain(more));
        let target = report["targets"].as_array().unwrap()[0].clone();
        assert!(target["folder"] == "v81" && target["gate"]["passed"] == true, "{report}");
        (place.join("v81"), target)
    };
    let (place, target) = make("whole", &["--for", "emulator"]);
    assert_eq!((target["level"].as_str(), target["gate"]["tokens"].as_u64()), (Some("whole"), Some(32)), "{target}");
    let verified = json(["verify", text(&place), "--json"]);
    assert!(verified["passed"] == true && verified["tokens"] == 32 && verified["device"] == "npu", "{verified}");
    let parity = read_json(&place.join("parity.json"));
    assert!(
        parity["numerics"].as_str().unwrap().contains("v81") && parity["weights"].as_array().unwrap().len() == 1,
        "the host's table alone"
    );
    // Too little time to answer.
    let (place, target) = make("stages", &["--gate-budget", "0.001"]);
    let lowest = target["gate"]["worst_cosine"].as_f64().unwrap();
    assert!(target["level"] == "stages" && lowest > 0.9999 && lowest < 1.0, "{target}");
    assert!(!read_json(&place.join("parity.json"))["cases"].as_array().unwrap().is_empty(), "the processor's answers");
}

/// Folders of calibrated bundles pass the same suite as the bundle itself: eight bits of one with random weights, extended four of a trained one.
#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn calibrated_integers_pass_their_gates_in_the_emulator() {
    let (folder, demo) = (scratch(), Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo/phimoe"));
    let prompts = folder.path().join("prompts.json");
    let sizes = ["--target", "v81", "--for", "emulator", "--context", "64", "--prefill", "16", "--json", "--prompts", text(&prompts)];
    let models = [
        (demo, "w4", r#"["The old lighthouse keeper counted the ships", {"user": "What is the capital of that country?"}]"#),
        (fixture("phimoe"), "w8", "[[5, 6, 7, 8, 9], [41, 300, 7, 12, 99, 250, 3, 18, 77, 140, 6, 201, 35, 64, 9, 111, 2]]"),
    ];
    for (source, precision, asked) in models.into_iter().skip(if crate::extended() { 0 } else { 1 }) {
        fs::write(&prompts, asked).unwrap();
        let place = folder.path().join(precision);
        let report = json(["forge", text(&source), "--out", text(&place), "--precision", precision].iter().chain(&sizes));
        assert!(report["rounding"]["calibrated"].is_object() && report["parity"]["passed"] == true, "{report}");
        let (name, target) = (format!("v81-{precision}"), &report["targets"][0]);
        assert!(target["folder"] == *name && target["level"] == "whole" && target["gate"]["passed"] == true, "{target}");
        let (gate, root) = (&target["gate"]["closeness"], &report["parity"]["closeness"]);
        assert_eq!((&gate["class"], &gate["limits"]), (&root["class"], &root["limits"]), "{target}");
        assert!(gate["tokens"].as_u64().unwrap() > 16 && gate["mean_kl"].as_f64().unwrap() > 0.0, "{target}");
        let verified = json(["verify", text(&place.join(name)), "--json"]);
        assert!(verified["passed"] == true && verified["device"] == "npu", "{verified}");
    }
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn phones_get_shared_weights_and_the_emulator_says_that_it_cannot_load_them() {
    let folder = scratch();
    let bundle = folder.path().join("llama");
    let flags = ["--precision", "w8", "--target", "v81", "--context", "64", "--prefill", "16", "--gate", "none"];
    succeed(["forge", text(&fixture("llama")), "--out", text(&bundle)].iter().chain(&flags));
    let prepared = read_json(&bundle.join("v81-w8/text.npu.json"));
    assert!(prepared["contexts"].as_array().unwrap().iter().any(|context| context["shared_weights"] == true), "{prepared}");
    fail(["generate", text(&bundle.join("v81-w8")), "--ids", "1"], 1, &["is made for phones", "--for emulator"]);
    let looked = ran(qhx(["doctor", text(&bundle.join("v81-w8"))]).output().unwrap());
    assert!(looked.code == Some(1) && looked.stdout.contains("is made for phones"), "{looked:?}");
    assert!(succeed(["inspect", text(&bundle.join("v81-w8"))]).contains("w8"));
    // A folder with a precision behind its name is never chosen unasked.
    on_npu(&json(["generate", text(&bundle), "--device", "npu", "--ids", "1", "--context", "32", "--max-new", "1", "--json"]));
}

/// What doctor says of an arch folder is what happens when it is loaded.
#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn doctor_knows_what_an_arch_folder_needs() {
    let folder = scratch();
    let bundle = folder.path().join("llama");
    let flags = ["--precision", "f16", "--target", "v81", "--for", "emulator", "--context", "32", "--prefill", "none", "--gate", "none"];
    succeed(["forge", text(&fixture("llama")), "--out", text(&bundle)].iter().chain(&flags));
    let whole = bundle.join("v81");
    assert!(succeed(["doctor", text(&whole)]).contains("npu: will load it"));
    let other = ran(qhx(["doctor", text(&whole)]).env("QHX_NPU_ARCH", "v79").output().unwrap());
    assert!(other.code == Some(1) && other.stdout.contains("is for Hexagon v81, this machine's processor is v79"), "{other:?}");
    let files = listing(&whole).into_iter().chain(["programs/text.json".into(), "weights/text-00001-of-00001.safetensors".into()]);
    for file in files.filter(|file| whole.join(file).is_file() && file != "llama.json") {
        let copy = copy_folder(&whole, &folder.path().join("copy/v81"));
        fs::remove_file(copy.join(&file)).unwrap();
        let found = ran(qhx(["doctor", text(&copy)]).output().unwrap());
        assert!(found.code == Some(1) && found.stdout.contains("npu: will not load it"), "without {file}: {found:?}");
        fail(["generate", text(&copy), "--ids", "1"], 1, &["is missing"]);
        fs::remove_dir_all(folder.path().join("copy")).unwrap();
    }
}

/// A disk that is full ends with an error, and nothing is left.
#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn a_context_binary_that_finds_no_room_leaves_nothing() {
    let folder = scratch();
    let (first, second) = (folder.path().join("first"), folder.path().join("second"));
    let make = |out: &Path| {
        let source = fixture("llama");
        let flags = ["--precision", "w8", "--target", "v81", "--context", "64", "--prefill", "16", "--gate", "none"];
        let command = qhx(["forge", text(&source), "--out", text(out)].iter().chain(&flags));
        std::iter::once(command.get_program())
            .chain(command.get_args())
            .map(|word| format!("'{}'", word.to_str().unwrap()))
            .collect::<Vec<_>>()
    };
    let run = |script: String| ran(Command::new("sh").args(["-c", &script]).output().unwrap());
    assert_eq!(run(make(&first).join(" ")).code, Some(0));
    let size = |file: PathBuf| fs::metadata(file).unwrap().len();
    let (context, weights) = (size(first.join("v81-w8/text_0.bin")), size(first.join("weights/00001-of-00001.safetensors")));
    assert!(context > weights + 4096, "{context} {weights}");
    // Files may not be larger than something between the two; a signal would say so first.
    let blocks = (context + weights) / 2 / 512;
    let found = run(format!("trap '' XFSZ; ulimit -f {blocks}; {}", make(&second).join(" ")));
    assert!(found.code == Some(1) && found.stderr.contains("text_0.bin: cannot be written"), "{found:?}");
    assert_eq!(listing(folder.path()), ["first"], "{found:?}");
}

/// A budget so small that every family takes three contexts or more, with layers that share a slot in different ones: the tokens stay transformers'.
#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn every_family_runs_from_three_contexts_or_more() {
    for name in ["qwen3_vl", "qwen3_5", "gemma4", "phimoe"] {
        let folder = scratch();
        let bundle = folder.path().join("model");
        let material = Material::open(&fixture(name)).unwrap();
        let program = material.checked_programs(Precision::F16).unwrap().0.remove(0);
        let bytes: u64 = program.ops.iter().filter(|op| work_of(&program, op) != Work::Host).map(|op| weight_bytes(&program, op)).sum();
        let options = NpuOptions { part_bytes: bytes / 4, context_bytes: bytes / 4, share_weights: false, ..Default::default() };
        let order = TargetOrder {
            device: Arc::new(NpuDevice::new(&Library::open(Some(&qnn_dir())).unwrap(), options.clone()).unwrap()),
            made_for: MadeFor::Emulator,
            context: Some(64),
            prefill: vec![],
            kv: KvForm::Full,
            image_size: None,
            audio_seconds: Some(1.0).filter(|_| name == "gemma4"),
            placement: None,
        };
        let mut forging = ForgeOptions::new(&bundle, Precision::F16);
        forge_with_targets(&material, &mut forging, &[order], &mut |_| {}).unwrap();
        let prepared = read_json(&bundle.join("v81/text.npu.json"));
        let contexts = prepared["contexts"].as_array().unwrap();
        assert!(contexts.len() >= 3, "{name}: {prepared}");
        let parts = parts(&program, options.part_bytes);
        let context_of = |op: usize| {
            let graph = format!("text_part{}_t1_", parts.iter().position(|part| part.ops.contains(&op)).unwrap());
            let has = |context: &Value| context["graphs"].as_array().unwrap().iter().any(|g| g.as_str().unwrap().starts_with(&graph));
            contexts.iter().position(has).unwrap()
        };
        let mut users: BTreeMap<&str, BTreeSet<usize>> = BTreeMap::new();
        for (op, slot) in program.ops.iter().enumerate().filter_map(|(number, op)| Some((number, op.op.slot()?))) {
            users.entry(slot).or_default().insert(context_of(op));
        }
        let apart = users.values().filter(|contexts| contexts.len() > 1).count();
        assert_eq!(apart > 0, name == "gemma4", "donors and sharers: {apart} slots");
        let oracle = read_json(&fixture(name).join("oracle.json"));
        let prompt = oracle["prompts"].as_array().unwrap().iter().find(|prompt| prompt["name"] == "len5").unwrap();
        let found =
            json(["generate", text(&bundle.join("v81")), "--ids", &ids(&prompt["ids"]), "--max-new", "4", "--ignore-eos", "--json"]);
        on_npu(&found);
        assert_eq!(found["ids"].as_array().unwrap()[..], prompt["greedy"].as_array().unwrap()[..4], "{name}");
    }
}

/// A short prompt goes through the smaller graph, a longer one through the larger: the tokens stay transformers'.
#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn prefill_graphs_of_two_sizes() {
    let folder = scratch();
    let bundle = folder.path().join("llama");
    let sizes = ["--precision", "f16", "--target", "v81", "--for", "emulator", "--context", "48", "--prefill", "8,32", "--gate", "none"];
    succeed(["forge", text(&fixture("llama")), "--out", text(&bundle)].iter().chain(&sizes));
    let place = bundle.join("v81");
    let prepared = read_json(&place.join("text.npu.json"));
    assert_eq!(prepared["rows"], serde_json::json!([1, 8, 32]), "{prepared}");
    let oracle = read_json(&fixture("llama").join("oracle.json"));
    for name in ["len5", "len17"] {
        let prompt = oracle["prompts"].as_array().unwrap().iter().find(|prompt| prompt["name"] == name).unwrap();
        let found = json(["generate", text(&place), "--ids", &ids(&prompt["ids"]), "--max-new", "4", "--ignore-eos", "--json"]);
        on_npu(&found);
        assert_eq!(found["ids"].as_array().unwrap()[..], prompt["greedy"].as_array().unwrap()[..4], "{name}");
        assert_eq!(found["prefill_path"], "batched", "{name}");
    }
}

/// 32 layers of experts are 69 graphs: on v81 those that write alone, unless somebody takes the risk.
#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn the_forge_follows_the_plan() {
    let folder = scratch();
    let mut config = read_json(&fixture("phimoe").join("config.json"));
    config["num_hidden_layers"] = 32.into();
    let file = folder.path().join("config.json");
    fs::write(&file, config.to_string()).unwrap();
    let sizes = ["--precision", "moe-i8", "--target", "v81", "--for", "emulator", "--context", "32", "--prefill", "16"];
    for (name, more) in [("careful", &[][..]), ("bold", &["--allow-risky"])] {
        let plan = json(["synth", text(&file), "--plan", "--json"].iter().chain(&sizes).chain(more));
        let bundle = folder.path().join(name);
        let made = run(["synth", text(&file), "--out", text(&bundle), "--json"].iter().chain(&sizes).chain(more));
        assert_eq!(made.code, Some(0), "{made:?}");
        let (report, plan): (Value, _) = (serde_json::from_str(&made.stdout).unwrap(), &plan["plans"][0]);
        let place = bundle.join("v81-moe-i8");
        let (manifest, prepared) = (read_json(&place.join(format!("{name}.json"))), read_json(&place.join("text.npu.json")));
        // The forge makes what the plan prints.
        let planned = plan["contexts"].as_array().unwrap().iter().map(|c| format!("{}.bin", c["name"].as_str().unwrap()));
        let files = prepared["contexts"].as_array().unwrap().iter().map(|c| c["file"].as_str().unwrap().to_owned());
        assert!(planned.eq(files), "{plan} {prepared}");
        let graphs = prepared["contexts"].as_array().unwrap().iter().map(|c| c["graphs"].as_array().unwrap().len()).sum::<usize>();
        assert_eq!(
            (plan["graphs"].as_u64(), &plan["rows"], &plan["per_token"]),
            (Some(graphs as u64), &prepared["rows"], &prepared["per_token"])
        );
        assert_eq!((&plan["notes"], &plan["notes"]), (&prepared["notes"], &manifest["plan"]["notes"]));
        assert_eq!(plan["notes"], report["targets"][0]["notes"]);
        assert!(made.stderr.contains(plan["notes"][0].as_str().unwrap()), "{made:?}");
        let bold = name == "bold";
        assert_eq!((graphs, manifest["plan"]["prefill"].as_array().unwrap().len()), if bold { (69, 1) } else { (35, 0) });
        if !bold {
            let found = json(["generate", text(&place), "--ids", "1,2,3,4,5", "--max-new", "1", "--json"]);
            on_npu(&found);
            assert_eq!(found["prefill_path"], "decode_over_prompt");
        }
    }
}

/// What `forge SRC --plan` prints of a checkpoint is what its forged folder holds, calibrated mixtures and towers included.
///
/// By default each family once, the precisions and generations in turn.
#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn the_forge_follows_the_plan_of_a_checkpoint() {
    let families = ["llama", "qwen3", "qwen3_vl", "qwen3_5", "gemma4", "phimoe"];
    let pairs = [("w8", "v81"), ("w4", "v79"), ("w4", "v81"), ("w8", "v79")];
    for (number, family) in families.into_iter().enumerate() {
        for (place, (precision, arch)) in pairs.into_iter().enumerate() {
            if crate::extended() || place == number % pairs.len() {
                check_plan(family, precision, arch);
            }
        }
    }
}

fn check_plan(family: &str, precision: &str, arch: &str) {
    let (folder, source) = (scratch(), fixture(family));
    let media: &[&str] = match family {
        "qwen3_vl" | "qwen3_5" => &["--image-size", "64x64"],
        "gemma4" => &["--image-size", "96x144", "--audio-seconds", "0.2"],
        _ => &[],
    };
    let sizes = ["--precision", precision, "--target", arch, "--for", "emulator", "--context", "64", "--prefill", "16", "--json"];
    let flags = [&sizes[..], media].concat();
    let plan = json(["forge", text(&source), "--plan"].iter().chain(&flags))["plans"][0].clone();
    let bundle = folder.path().join("model");
    json(["forge", text(&source), "--out", text(&bundle), "--gate", "none"].iter().chain(&flags));
    let place = bundle.join(format!("{arch}-{precision}"));
    let planned = plan["contexts"].as_array().unwrap();
    let programs: BTreeSet<&str> = planned.iter().map(|context| context["program"].as_str().unwrap()).collect();
    let files: BTreeSet<String> = listing(&place).into_iter().filter_map(|file| Some(file.strip_suffix(".npu.json")?.to_owned())).collect();
    assert!(files.iter().map(String::as_str).eq(programs.iter().copied()), "{family}: {files:?} {programs:?}");
    assert_eq!(programs.len(), 1 + media.len() / 2, "{family}: {programs:?}");
    let mut graphs = 0;
    for program in programs {
        let prepared = read_json(&place.join(format!("{program}.npu.json")));
        let contexts = prepared["contexts"].as_array().unwrap();
        let of_plan: Vec<&Value> = planned.iter().filter(|context| context["program"] == program).collect();
        assert_eq!(contexts.len(), of_plan.len(), "{family} at {precision}, {arch}: {program}");
        for (made, planned) in contexts.iter().zip(of_plan) {
            let count = made["graphs"].as_array().unwrap().len();
            graphs += count as u64;
            assert_eq!(made["file"].as_str().unwrap(), format!("{}.bin", planned["name"].as_str().unwrap()));
            for field in ["stages", "layers", "shared_weights"] {
                assert_eq!(made[field], planned[field], "{family} at {precision}, {arch}: {program}: {field}");
            }
            assert_eq!(planned["graphs"], count, "{family} at {precision}, {arch}: {program}");
            // A binary also has what is not weights, which is most of so small a model.
            let (bytes, weights) = (made["bytes"].as_u64().unwrap(), planned["bytes"].as_u64().unwrap());
            assert!(weights > 0 && bytes > weights, "{family} at {precision}, {arch}: {program}: {bytes} bytes, {weights} planned");
        }
        if program == "text" {
            for field in ["rows", "per_token"] {
                assert_eq!(prepared[field], plan[field], "{family} at {precision}, {arch}: {field}");
            }
            let none = Value::Array(vec![]);
            assert_eq!(prepared.get("notes").unwrap_or(&none), &plan["notes"], "{family} at {precision}, {arch}");
        }
    }
    assert_eq!(plan["graphs"], graphs, "{family} at {precision}, {arch}");
    let bytes: u64 = planned.iter().map(|context| context["bytes"].as_u64().unwrap()).sum();
    assert_eq!(plan["bytes"], bytes, "{family} at {precision}, {arch}");
}

/// Reading on the NPU but for one stage, writing and seeing on the processor: the manifest says so, the folder alone has the weights for it, and somebody else
/// may say otherwise as far as those go.
#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn what_a_manifest_places_elsewhere_runs_there() {
    let folder = scratch();
    let (bundle, rules) = (folder.path().join("vl"), folder.path().join("rules.toml"));
    fs::write(&rules, "prefill = \"npu\"\ndecode = \"cpu\"\n[stages]\nvision = \"cpu\"\n\"layers.1.ffn\" = \"cpu\"\n").unwrap();
    let sizes =
        ["--precision", "f16", "--target", "v81", "--for", "emulator", "--context", "96", "--prefill", "32", "--image-size", "64x96"];
    let more = ["--gate", "none", "--placement", text(&rules)];
    succeed(["forge", text(&fixture("qwen3_vl")), "--out", text(&bundle)].iter().chain(&sizes).chain(&more));
    let alone = copy_folder(&bundle.join("v81"), &folder.path().join("elsewhere/v81"));
    let (sees, reads) = (read_json(&alone.join("vl-vlm.json")), read_json(&alone.join("vl.json")));
    assert_eq!(sees["placement"]["stages"], serde_json::json!({"vision": "cpu", "layers.1.ffn": "cpu"}));
    assert_eq!(reads["placement"], serde_json::json!({"prefill": "npu", "decode": "cpu", "stages": {"layers.1.ffn": "cpu"}}));
    // Two pieces of the text, at the rows of prompts, in one context; nothing of the tower.
    let programs = sees["plan"]["programs"].as_object().unwrap();
    assert_eq!((programs.len(), programs["text"]["graphs"].as_array().unwrap().len()), (1, 2), "{programs:?}");
    let contexts = listing(&alone).into_iter().filter(|name| name.ends_with(".bin")).collect::<Vec<_>>();
    assert_eq!(contexts, ["text_prefill32_0.bin"]);
    let record = read_json(&fixture("qwen3_vl").join("media.json"));
    let prompt = record["prompts"].as_array().unwrap().iter().find(|prompt| prompt["name"] == "image").unwrap();
    let picture = fixture("qwen3_vl").join("media/wide.png");
    let prompt_ids = ids(&prompt["ids"]);
    let input = ["--image", text(&picture), "--ids", &prompt_ids, "--max-new", "3", "--ignore-eos", "--json"];
    let ask = |more: &[&str]| {
        let found = json(["generate", text(&alone)].iter().chain(&input).chain(more));
        assert_eq!(found["ids"].as_array().unwrap()[..], prompt["greedy"].as_array().unwrap()[..3], "{found}");
        let stages = found["stages"].as_array().unwrap().iter();
        stages.map(|s| format!("{} {}", s["stage"].as_str().unwrap(), s["device"].as_str().unwrap())).collect::<BTreeSet<String>>()
    };
    let ran = ask(&[]);
    for expected in ["layers.0.ffn npu", "layers.0.ffn cpu", "layers.1.ffn cpu", "vision.0 cpu", "lm_head npu", "lm_head cpu"] {
        assert!(ran.contains(expected), "{expected}: {ran:?}");
    }
    assert!(!ran.contains("layers.1.ffn npu") && !ran.contains("vision.0 npu"), "{ran:?}");
    let line = published(&alone.join("vl-vlm.json"), &alone, 3, &["What is shown in picture 1?", text(&picture)]);
    assert_eq!(line.code, Some(0), "{line:?}");
    fs::write(&rules, "default = \"cpu\"").unwrap();
    assert!(ask(&["--placement", text(&rules)]).iter().all(|stage| stage.ends_with(" cpu")), "all weights are there");
    fs::write(&rules, "default = \"npu\"\ndecode = \"cpu\"\n[stages]\n\"layers.0.ffn\" = \"cpu\"").unwrap();
    let asked = ["--ids", "1,2,3,4,5", "--placement", text(&rules)];
    let not_prepared = ["text-", "was not prepared for this placement", "forge the bundle"];
    fail(["generate", text(&alone.join("vl.json"))].iter().chain(&asked), 1, &not_prepared);
    // What it is, is known without QNN too.
    let mut inspect = qhx(["inspect", text(&alone)]);
    let shown = ran_without_qnn(&mut inspect, folder.path());
    assert_eq!(shown.matches(&*contexts[0]).count(), 2, "among the files, and once among the contexts: {shown}");
    assert!(shown.contains("npu (prefill)") && shown.contains("cpu (decode)"), "{shown}");
    fs::write(&rules, "default = \"cpu\"").unwrap();
    let nothing = ["--out", "x", "--target", "v81", "--placement", text(&rules)];
    fail(["forge", text(&fixture("qwen3"))].iter().chain(&nothing), 2, &["leaves nothing to the NPU"]);
}

/// What a command prints that succeeds on a machine without QNN.
fn ran_without_qnn(command: &mut Command, empty: &Path) -> String {
    let run = ran(command.env("QHX_QNN_DIR", empty).output().unwrap());
    assert_eq!(run.code, Some(0), "{run:?}");
    run.stdout
}

/// Prompts on the NPU, answers on the processor; the oracle is replayed so too.
#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn a_phase_elsewhere_is_gated_and_verified() {
    let folder = scratch();
    let (bundle, rules, prompts) = (folder.path().join("m"), folder.path().join("rules.toml"), folder.path().join("prompts.json"));
    fs::write(&rules, "decode = \"cpu\"").unwrap();
    let oracle = read_json(&fixture("qwen3").join("oracle.json"));
    let prompt = oracle["prompts"].as_array().unwrap().iter().find(|prompt| prompt["name"] == "len17").unwrap();
    fs::write(&prompts, serde_json::json!([prompt["ids"]]).to_string()).unwrap();
    let sizes = ["--precision", "f16", "--target", "v81", "--for", "emulator", "--context", "64", "--prefill", "16", "--json"];
    let more = ["--prompts", text(&prompts), "--placement", text(&rules)];
    let source = fixture("qwen3");
    let make = ["forge", text(&source), "--out", text(&bundle)];
    let make = || make.iter().chain(&sizes).chain(&more);
    fail(make().chain(&["--kv", "ring"]), 1, &["a ring of keys and values keeps the latest rows only", "--kv"]);
    let report = json(make());
    let target = &report["targets"][0];
    assert!(target["contexts"] == 1 && target["gate"]["passed"] == true && target["level"] == "whole", "{report}");
    let place = bundle.join("v81");
    assert!(place.join("text_prefill16_0.bin").exists(), "{:?}", listing(&place));
    let verified = json(["verify", text(&place), "--json"]);
    assert!(verified["passed"] == true && verified["tokens"] == 16, "{verified}");
    let prompt_ids = ids(&prompt["ids"]);
    let found = json(["generate", text(&place), "--device", "npu", "--ids", &prompt_ids, "--max-new", "2", "--ignore-eos", "--json"]);
    assert_eq!(found["ids"].as_array().unwrap()[..], prompt["greedy"].as_array().unwrap()[..2]);
    let on = |device: &str| found["stages"].as_array().unwrap().iter().any(|s| s["stage"] == "layers.0.ffn" && s["device"] == device);
    assert!(on("npu") && on("cpu"), "{found}");
}

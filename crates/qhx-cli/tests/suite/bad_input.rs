//! Wrong, truncated and hostile input: each gets its exit code, one clear block on stderr, and nothing on stdout.

use crate::common::{self, DEVICE, bundle, bundle_copy, completion_bundle, copy_folder, fail, fixture, read_json, scratch, succeed};
use serde_json::{Value, json};
use std::{
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
};

/// Forging `source` must fail with exit code 1 and leave nothing behind.
fn refuse_forge(source: &Path, expected: &[&str]) {
    let folder = scratch();
    let out = folder.path().join("out");
    fail([OsStr::new("forge"), source.as_os_str(), "--out".as_ref(), out.as_os_str()], 1, expected);
    assert_eq!(common::listing(folder.path()), [""; 0], "after {expected:?}");
}

/// Using the bundle must fail with exit code 1.
fn refuse_bundle(bundle: &Path, expected: &[&str]) {
    fail(generate(bundle, &["--ids", "1"]), 1, expected);
    fail([OsStr::new("inspect"), bundle.as_os_str(), "--json".as_ref()], 1, expected);
}

fn generate(bundle: &Path, arguments: &[&str]) -> Vec<std::ffi::OsString> {
    let all = ["generate".as_ref(), bundle.as_os_str(), "--device".as_ref(), DEVICE.as_ref(), "--max-new".as_ref(), "2".as_ref()];
    all.into_iter().chain(arguments.iter().map(|a| a.as_ref())).map(|a: &OsStr| a.to_owned()).collect()
}

/// A copy of a fixture's checkpoint.
fn checkpoint(folder: &Path) -> PathBuf {
    copy_folder(&fixture("llama"), &folder.join("checkpoint"))
}

/// Changes the header of a safetensors file; the data stays.
fn change_header(file: &Path, change: impl FnOnce(&mut Value)) {
    let bytes = fs::read(file).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    change(&mut header);
    let header = header.to_string();
    fs::write(file, [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &bytes[8 + length..]].concat()).unwrap();
}

fn change_json(file: &Path, change: impl FnOnce(&mut Value)) {
    let mut value = read_json(file);
    change(&mut value);
    fs::write(file, value.to_string()).unwrap();
}

fn truncate(file: &Path, bytes: u64) {
    fs::OpenOptions::new().write(true).open(file).unwrap().set_len(bytes).unwrap();
}

#[test]
fn truncated_safetensors() {
    let folder = scratch();
    let source = checkpoint(folder.path());
    let file = source.join("model.safetensors");
    for bytes in [fs::metadata(&file).unwrap().len() - 1, 1000, 5, 0] {
        truncate(&file, bytes);
        refuse_forge(&source, &["model.safetensors is not a valid safetensors file"]);
    }
}

/// The library that reads it panics, which is no fault of the program's to report.
#[test]
fn a_tokenizer_that_contradicts_itself() {
    let folder = scratch();
    let source = checkpoint(folder.path());
    change_json(&source.join("tokenizer.json"), |file| file["pre_tokenizer"] = json!({ "type": "FixedLength", "length": 0 }));
    refuse_forge(&source, &["its rules contradict themselves"]);
}

#[test]
fn truncated_gguf() {
    let folder = scratch();
    let file = folder.path().join("model.gguf");
    fs::copy(fixture("llama-gguf").join("model.gguf"), &file).unwrap();
    for bytes in [fs::metadata(&file).unwrap().len() - 100, 5000, 40, 5, 0] {
        truncate(&file, bytes);
        refuse_forge(&file, &["model.gguf is not a valid GGUF file"]);
    }
}

#[test]
fn a_header_that_claims_2_to_the_60_elements() {
    let folder = scratch();
    let source = checkpoint(folder.path());
    let file = source.join("model.safetensors");
    change_header(&file, |header| header["model.norm.weight"]["shape"] = json!([1u64 << 60]));
    refuse_forge(&source, &["model.safetensors is not a valid safetensors file", "`model.norm.weight`", "1152921504606846976"]);
}

#[test]
fn overlapping_tensors() {
    let folder = scratch();
    let source = checkpoint(folder.path());
    let tensor = |range: [usize; 2]| json!({ "dtype": "F32", "shape": [2], "data_offsets": range });
    let header = json!({ "a": tensor([0, 8]), "b": tensor([4, 12]) }).to_string();
    let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0; 12]].concat();
    fs::write(source.join("model.safetensors"), bytes).unwrap();
    refuse_forge(&source, &["model.safetensors is not a valid safetensors file", "overlap"]);
}

#[test]
fn missing_tensor() {
    let folder = scratch();
    let source = checkpoint(folder.path());
    change_header(&source.join("model.safetensors"), |header| {
        let tensor = header.as_object_mut().unwrap().remove("model.norm.weight").unwrap();
        header["model.norn.weight"] = tensor;
    });
    refuse_forge(&source, &["no tensor `model.norm.weight`"]);
}

#[test]
fn surplus_tensor() {
    let folder = scratch();
    let source = checkpoint(folder.path());
    let config = read_json(&source.join("config.json"));
    let layers = config["num_hidden_layers"].as_u64().unwrap();
    change_json(&source.join("config.json"), |config| config["num_hidden_layers"] = json!(layers - 1));
    refuse_forge(&source, &[&format!("`model.layers.{}.", layers - 1), "no use for it"]);
}

#[test]
fn wrong_shape() {
    let folder = scratch();
    let source = checkpoint(folder.path());
    let hidden = read_json(&source.join("config.json"))["hidden_size"].as_u64().unwrap();
    change_header(&source.join("model.safetensors"), |header| header["model.norm.weight"]["shape"] = json!([hidden / 2, 2]));
    refuse_forge(&source, &["tensor `model.norm.weight`", &format!("[{}, 2]", hidden / 2), &format!("[{hidden}]")]);
}

#[test]
fn wrong_checkpoints() {
    let folder = scratch();
    refuse_forge(folder.path(), &["config.json"]);
    refuse_forge(&folder.path().join("nowhere"), &["nowhere", "No such file"]);
    refuse_forge(&bundle("llama"), &["is a bundle already", "hint: forge from the checkpoint"]);
    let source = checkpoint(folder.path());
    fs::write(source.join("config.json"), "{\"model_type\": ").unwrap();
    refuse_forge(&source, &["config.json"]);
    fs::write(source.join("config.json"), "{\"model_type\": \"bert\"}").unwrap();
    refuse_forge(&source, &["`model_type` is `bert`; known are"]);
}

#[test]
fn a_path_out_of_the_bundle() {
    let folder = scratch();
    let bundle = bundle_copy("llama", folder.path());
    change_json(&bundle.join("qhx.json"), |manifest| manifest["tokenizer"] = json!("../../etc/passwd"));
    refuse_bundle(&bundle, &["qhx.json", "`tokenizer`", "`../../etc/passwd`"]);
}

#[cfg(unix)]
#[test]
fn a_link_out_of_the_bundle() {
    let folder = scratch();
    let bundle = bundle_copy("llama", folder.path());
    fs::rename(bundle.join("tokenizer.json"), folder.path().join("outside.json")).unwrap();
    std::os::unix::fs::symlink("../outside.json", bundle.join("tokenizer.json")).unwrap();
    refuse_bundle(&bundle, &["`tokenizer.json`", "link"]);
}

#[test]
fn wrong_sum() {
    let folder = scratch();
    let bundle = bundle_copy("llama", folder.path());
    let file = bundle.join(read_json(&bundle.join("qhx.json"))["weights"][0].as_str().unwrap());
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    refuse_bundle(&bundle, &["is damaged or was changed: sha256 must be", "found"]);
    let mut bytes = fs::read(&file).unwrap();
    bytes.pop();
    fs::write(&file, bytes).unwrap();
    refuse_bundle(&bundle, &["bytes, found", "truncated"]);
}

#[test]
fn unknown_field_and_newer_schema() {
    let folder = scratch();
    let bundle = bundle_copy("llama", folder.path());
    change_json(&bundle.join("qhx.json"), |manifest| manifest["model"]["wings"] = json!(2));
    refuse_bundle(&bundle, &["qhx.json", "`model.wings`", "unknown field"]);
    change_json(&bundle.join("qhx.json"), |manifest| manifest["schema_version"] = json!(99));
    refuse_bundle(&bundle, &["schema_version 99 is newer than", "update qhx"]);
}

#[test]
fn no_bundle() {
    let folder = scratch();
    refuse_bundle(folder.path(), &["there is no model at", "found a folder with neither qhx.json nor config.json", "hint: give the path"]);
    refuse_bundle(&folder.path().join("nowhere"), &["nowhere: found nothing", "hint: give the path of a bundle"]);
    fs::write(folder.path().join("weights.gguf"), "no weights").unwrap();
    refuse_bundle(&folder.path().join("weights.gguf"), &["found a file that is not a GGUF file"]);
    // `doctor` makes nothing.
    for checkpoint in [fixture("llama"), fixture("llama-gguf").join("model.gguf")] {
        let doctor = common::run([OsStr::new("doctor"), checkpoint.as_os_str()]);
        assert!(doctor.code == Some(0) && doctor.stdout.contains("forges a bundle into the cache"), "{doctor:?}");
        assert!(doctor.stdout.contains("npu: will not load it") && doctor.stdout.contains("qhx forge"), "{doctor:?}");
    }
}

#[test]
fn prompts_that_do_not_fit() {
    let llama = bundle("llama");
    fail(
        generate(&llama, &["--ids", "1,2,3,4,5,6,7,8,9", "--context", "8"]),
        1,
        &["prompt has 9 tokens, the context holds 8", "--context"],
    );
    let limit = read_json(&llama.join("qhx.json"))["model"]["context_length"].as_u64().unwrap();
    let over = (limit + 1).to_string();
    fail(generate(&llama, &["--ids", "1", "--context", &over]), 2, &[&format!("context is {over}, expected 1 to {limit}")]);
    let long = vec!["1"; limit as usize + 1].join(",");
    fail(generate(&llama, &["--ids", &long]), 1, &[&format!("prompt has {over} tokens, the context holds {limit}")]);
    fail(generate(&llama, &["--ids", "1,467"]), 1, &["id 467 (number 1 of the prompt) is not in the vocabulary", "0 to 466"]);
    fail(generate(&llama, &["--ids", "1,4294967295"]), 1, &["id 4294967295"]);
}

#[test]
fn empty_prompts() {
    let llama = bundle("llama");
    for (flag, expected) in
        [("--ids", "--ids: the prompt is empty"), ("--prompt", "--prompt: the prompt is empty"), ("--user", "--user: the prompt is empty")]
    {
        fail(generate(&llama, &[flag, ""]), 2, &[expected, "hint: give"]);
    }
    fail([OsStr::new("run"), llama.as_os_str(), "".as_ref()], 2, &["the prompt is empty"]);
    fail([OsStr::new("run"), llama.as_os_str(), "-".as_ref()], 2, &["the prompt is empty"]);
}

#[cfg(unix)]
#[test]
fn arguments_that_are_no_text() {
    use std::os::unix::ffi::OsStrExt;
    let bad = OsStr::from_bytes(b"caf\xe9");
    let llama = bundle("llama");
    let with_prompt = [OsStr::new("generate"), llama.as_os_str(), "--prompt".as_ref(), bad];
    fail(with_prompt, 2, &["argument 4 is not valid UTF-8: \"caf\\xE9\"", "hint: text must be UTF-8"]);
    fail([OsStr::new("run"), llama.as_os_str(), bad], 2, &["the prompt is not valid UTF-8: \"caf\\xE9\""]);
    fail([OsStr::new("run"), bad], 2, &["the prompt is not valid UTF-8"]);
    fail([bad], 2, &["caf\u{fffd}"]);
    // A path may hold any bytes.
    fail([OsStr::new("inspect"), bad], 1, &["there is no model at caf", "found nothing"]);
    let folder = scratch();
    let place = folder.path().join(bad);
    copy_folder(&llama, &place);
    succeed([OsStr::new("inspect"), place.as_os_str(), "--device".as_ref(), DEVICE.as_ref()]);
}

#[test]
fn flags_that_are_wrong() {
    let llama = bundle("llama");
    let place = llama.to_str().unwrap();
    let cases: &[(&[&str], i32, &[&str])] = &[
        (&["--ids", "1", "--prompt", "a"], 2, &["--ids", "cannot be used with"]),
        (&[], 2, &["--ids", "--prompt", "--user", "--chat"]),
        (&["--ids", "1", "--system", "a"], 2, &["--system goes with --user only"]),
        (&["--ids", "1,x"], 2, &["--ids: entry 2 is \"x\""]),
        (&["--ids", "@nowhere"], 1, &["cannot read nowhere"]),
        (&["--ids", "1", "--temperature", "-1"], 2, &["temperature must be a number from 0 up, found -1"]),
        (&["--ids", "1", "--top-p", "0"], 2, &["top_p must be above 0"]),
        (&["--ids", "1", "--temperature", "nan"], 2, &["temperature must be"]),
        (&["--ids", "1", "--stop", ""], 2, &["stop string number 1 is empty"]),
        (&["--ids", "1", "--device", "tpu"], 2, &["there is no device `tpu`"]),
        (&["--ids", "1", "--device", "gpu:7"], 1, &["device `gpu` cannot be used"]),
        (&["--ids", "1", "--device", "npu"], 1, &["device `npu` cannot be used"]),
        (&["--ids", "1", "--device", "split"], 1, &["device `split` cannot be used"]),
        (&["--ids", "1", "--threads", "0"], 2, &["--threads"]),
        (&["--ids", "1", "--chunk", "0"], 2, &["--chunk"]),
        (&["--ids", "1", "--placement", "a.toml"], 1, &["cannot read a.toml"]),
        (&["--ids", "1", "--image", "a.png"], 1, &["takes no images: it takes text only"]),
        (&["--ids", "1", "--audio", "a.wav"], 1, &["takes no sounds: it takes text only"]),
        (&["--ids", "1", "--audio", "a.wav", "--split"], 1, &["takes no sounds: it takes text only"]),
        (&["--ids", "1", "--split"], 2, &["--split goes with one --audio"]),
        (
            &["--ids", "1", "--logits", "/no/such/folder/f.safetensors"],
            1,
            &["cannot write /no/such/folder/f.safetensors: there is no folder /no/such/folder"],
        ),
    ];
    for (arguments, code, expected) in cases {
        fail(["generate", place, "--max-new", "2"].iter().chain(*arguments), *code, expected);
    }
    // A placement file that names what is not there.
    let folder = scratch();
    let file = folder.path().join("placement.toml");
    for (rules, code, expected) in [
        ("[stages]\n\"layers.99\" = \"cpu\"", 2, "no stage is called `layers.99`: under `layers` there are 0, 1"),
        ("[stages]\n\"layers.1\" = \"tpu\"", 2, "there is no device `tpu`"),
        ("[stages]\n\"layers.1\" = \"gpu:7\"", 1, "device `gpu` cannot be used"),
        ("decode = \"npu\"", 1, "device `npu` cannot be used"),
    ] {
        fs::write(&file, rules).unwrap();
        let told = fail(["generate", place, "--ids", "1", "--placement", file.to_str().unwrap()], code, &[expected]).stderr;
        assert!(told.matches("error:").count() == 1 && !told.contains("cause:"), "one line: {told}");
    }
    fail(["frobnicate"], 2, &["unrecognized subcommand 'frobnicate'"]);
    fail(["run"], 2, &["the prompt is missing", "hint: qhx run MODEL \"PROMPT\""]);
    fail(["run", place], 2, &["the prompt is missing:", "is a model"]);
    fail(["run", "/no/such/model", "hello"], 1, &["there is no model at /no/such/model: found nothing", "hint: give the path of a bundle"]);
    fail(["run", "a", "b", "c"], 2, &[]);
    fail(["bench", place, "-p", "0", "-n", "0"], 2, &["nothing to measure"]);
    fail(["bench", place, "-r", "0"], 2, &["-r"]);
    fail(["diff", "a", "b", "--tolerance", "-1"], 2, &["--tolerance must be a number from 0 up"]);
    fail(["diff", "/no/such/a", "/no/such/b"], 1, &["cannot read /no/such/a"]);
    fail(["trace", place, "--ids", "1"], 2, &["--out"]);
    fail(["trace", place, "--ids", "1", "--out", "/"], 1, &["cannot write /: it is a folder"]);
    let forge: &[(&[&str], &[&str])] = &[
        (&["--precision", "auto", "--gate", "none"], &["--precision auto needs a gate"]),
        (&["--precision", "q9"], &["`q9` is no precision; use one of native, f32"]),
        (&["--context", "64"], &["--context is for targets with static shapes", "--target v79, v81"]),
        (&["--target", "v81", "--prefill", "many"], &["`many` is not a number of rows"]),
        (&["--target", "v81", "--image-size", "512"], &["expected HEIGHTxWIDTH"]),
        (&["--target", "cpu,toaster"], &["there is no target `toaster`"]),
        (&["--gate", "loose"], &["loose", "strict"]),
        (&["--gate", "none", "--prompts", "x.json"], &["--prompts needs a gate"]),
        (&["--gate", "none", "--gate-budget", "9"], &["--gate-budget needs a gate"]),
        (&["--precision", "auto", "--gate-budget", "9"], &["--gate-budget cannot be combined with --precision auto"]),
        (&["--gate-budget", "0"], &["a number of seconds above 0"]),
        (&["--bits", "0"], &["`0` is no number of bits per weight; use one from 4 to 16"]),
        (&["--bits", "99"], &["`99` is no number of bits"]),
        (&["--bits", "nan"], &["`nan` is no number of bits"]),
        (&["--bits", "-5"], &["`-5` is no number of bits"]),
        (&["--bits", "6", "--precision", "w8"], &["cannot be used with"]),
        (&["--gate-budget", "-1"], &["a number of seconds above 0"]),
        (&["--gate-budget", "soon"], &["`soon` is no number of seconds"]),
    ];
    let source = fixture("llama");
    for (arguments, expected) in forge {
        let first = ["forge", source.to_str().unwrap(), "--out", "/no/such/place"];
        fail(first.iter().chain(*arguments), 2, expected);
    }
}

#[test]
fn a_place_that_is_taken() {
    let folder = scratch();
    let place = folder.path().join("taken");
    fs::create_dir(&place).unwrap();
    fs::write(place.join("precious"), "mine").unwrap();
    let source = fixture("llama");
    let arguments = [OsStr::new("forge"), source.as_os_str(), "--out".as_ref(), place.as_os_str()];
    fail(arguments, 1, &["exists already", "hint: --force"]);
    // What is no bundle is not replaced even then.
    fail(arguments.into_iter().chain(["--force".as_ref()]), 1, &["taken"]);
    assert_eq!(common::listing(&place), ["precious"]);
    let made = folder.path().join("made");
    common::forge(&source, &made, "f32");
    fail([OsStr::new("forge"), source.as_os_str(), "--out".as_ref(), made.as_os_str()], 1, &["exists already"]);
    succeed([
        OsStr::new("forge"),
        source.as_os_str(),
        "--out".as_ref(),
        made.as_os_str(),
        "--force".as_ref(),
        "--gate".as_ref(),
        "none".as_ref(),
    ]);
    assert_eq!(common::listing(folder.path()), ["made", "taken"]);
}

#[test]
fn conversations_that_are_wrong() {
    let folder = scratch();
    let (llama, completion) = (bundle("llama"), completion_bundle());
    let file = folder.path().join("chat.json");
    let chat = file.to_str().unwrap();
    let cases: &[(&str, i32, &str)] = &[
        ("", 1, "is not valid JSON"),
        ("[{\"role\": \"user\", \"content\": \"a\", \"role\": \"system\"}]", 1, "the key `role` occurs twice in an object"),
        ("{}", 1, "messages"),
        ("[]", 1, "the conversation is empty"),
        ("[{\"content\": \"a\"}]", 1, "message 1: `role` is missing"),
        ("[{\"role\": \"user\", \"content\": 3}]", 1, "message 1: `content` must be"),
        (
            "[{\"role\": \"user\", \"content\": [{\"type\": \"image\", \"path\": \"a.png\"}]}]",
            1,
            "chat.json: message 1: content part 1: `llama` takes no images: it takes text only",
        ),
        (
            "[{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"user\", \"content\": [{\"type\": \"video\", \"path\": \"a\"}]}]",
            1,
            "chat.json: message 2: content part 1: unknown type `video`",
        ),
    ];
    for (text, code, expected) in cases {
        fs::write(&file, text).unwrap();
        fail(generate(&llama, &["--chat", chat]), *code, &[expected]);
    }
    fail(generate(&completion, &["--user", "hello"]), 1, &["has no chat template", "--prompt"]);
    fail([OsStr::new("chat"), completion.as_os_str()], 1, &["has no chat template"]);
}

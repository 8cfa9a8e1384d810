//! What each command prints and keeps, on the fixtures.

use crate::common::{
    self, DEVICE, bundle, completion_bundle, fail, failed, fixture, ids, json, qhx, ran, read_json, run, scratch, succeed, tensors,
    with_stdin,
};
use serde_json::{Value, json};
use std::{
    ffi::OsStr,
    fs,
    io::Read,
    path::Path,
    process::{Command, Stdio},
};

fn prompt(family: &str, name: &str) -> Value {
    let oracle = read_json(&fixture(family).join("oracle.json"));
    oracle["prompts"].as_array().unwrap().iter().find(|prompt| prompt["name"] == name).unwrap().clone()
}

/// Fields of an object, sorted.
fn fields(value: &Value) -> Vec<&str> {
    let mut fields: Vec<_> = value.as_object().unwrap().keys().map(String::as_str).collect();
    fields.sort();
    fields
}

#[test]
fn generate_prints_every_field_of_the_interface() {
    let llama = bundle("llama");
    let prompt = prompt("llama", "len17");
    let found = json([
        "generate",
        llama.to_str().unwrap(),
        "--ids",
        &ids(&prompt["ids"]),
        "--max-new",
        "5",
        "--json",
        "--device",
        DEVICE,
        "--chunk",
        "4",
    ]);
    assert_eq!(fields(&found), ["fallbacks", "finish_reason", "ids", "prefill_path", "prompt_ids", "stages", "text", "timing"]);
    let timing = "accepted decode_ms decode_tokens_per_second drafted encode_ms generated_tokens lm_head_ms load_ms peak_rss_bytes \
                  prefill_ms prompt_tokens saved_ms ttft_ms";
    assert_eq!(fields(&found["timing"]).join(" "), timing);
    assert_eq!((&found["timing"]["prompt_tokens"], &found["timing"]["generated_tokens"]), (&json!(17), &json!(5)));
    assert!(
        ["load_ms", "prefill_ms", "ttft_ms", "decode_ms"].iter().all(|field| found["timing"][field].as_f64().unwrap() > 0.0),
        "{found}"
    );
    assert_eq!((&found["finish_reason"], &found["prefill_path"], &found["fallbacks"]), (&json!("length"), &json!("chunked"), &json!([])));
    let first = &found["stages"][0];
    // 17 tokens in calls of 4, then 4 more calls of one.
    assert_eq!((&first["stage"], &first["device"], &first["runs"]), (&json!("embed"), &json!(DEVICE), &json!(9)));
    assert_eq!(found["stages"].as_array().unwrap().last().unwrap()["stage"], "lm_head");
}

#[test]
fn a_text_goes_in_as_ids_do_and_comes_out_on_stdout_alone() {
    let llama = bundle("llama");
    let place = llama.to_str().unwrap();
    let base = ["generate", place, "--device", DEVICE, "--max-new", "8", "--ignore-eos"];
    let with = |more: &[&str]| json(base.iter().chain(more).chain(&["--json"]));
    let by_text = with(&["--prompt", "the river"]);
    assert_eq!(by_text["ids"], with(&["--ids", &ids(&by_text["prompt_ids"])])["ids"]);
    let plain = run(base.iter().chain(&["--prompt", "the river"]));
    assert_eq!(plain.stdout.trim_end_matches('\n'), by_text["text"].as_str().unwrap().trim_end_matches('\n'));
    assert!(plain.stderr.contains("tok/s · 8 tokens · ") && plain.stderr.contains("s load"), "{}", plain.stderr);
    // Ids may come from a file.
    let folder = scratch();
    let file = folder.path().join("ids");
    fs::write(&file, ids(&by_text["prompt_ids"]) + "\n").unwrap();
    assert_eq!(with(&["--ids", &format!("@{}", file.display())])["ids"], by_text["ids"]);
    // Sampling is repeatable, and differs from greedy.
    let sampled = with(&["--prompt", "the river", "--temperature", "1.5", "--seed", "7"]);
    assert_eq!(sampled["ids"], with(&["--prompt", "the river", "--temperature", "1.5", "--seed", "7", "--threads", "1"])["ids"]);
    assert_ne!(sampled["ids"], by_text["ids"]);
}

#[test]
fn a_conversation_is_rendered_as_the_oracle_has_it() {
    for family in ["llama", "qwen3_vl", "qwen3_5", "gemma4"] {
        let place = bundle(family);
        let recorded = prompt(family, "chat");
        let folder = scratch();
        let file = folder.path().join("chat.json");
        for content in [recorded["messages"].clone(), json!({ "messages": recorded["messages"] })] {
            fs::write(&file, content.to_string()).unwrap();
            let arguments = ["generate", place.to_str().unwrap(), "--chat", file.to_str().unwrap(), "--max-new", "24"];
            let found = json(arguments.iter().chain(&["--ignore-eos", "--json", "--device", DEVICE]));
            assert_eq!((&found["prompt_ids"], &found["ids"]), (&recorded["ids"], &recorded["greedy"]), "{family}");
        }
    }
}

#[test]
fn run_answers_as_generate_does() {
    let llama = bundle("llama");
    let place = llama.to_str().unwrap();
    let common = ["--device", DEVICE, "--max-new", "6", "--ignore-eos"];
    for system in [&[][..], &["--system", "be brief"], &["--system", ""]] {
        let expected = json(["generate", place, "--user", "hello there", "--json"].iter().chain(&common).chain(system));
        let text = expected["text"].as_str().unwrap().trim_end_matches('\n');
        let found = run(["run", place, "hello there"].iter().chain(&common).chain(system));
        assert_eq!(found.stdout.trim_end_matches('\n'), text, "{system:?}");
        assert!(found.stderr.contains("6 tokens · "), "{}", found.stderr);
        let piped = with_stdin(qhx(["run", place, "-"].iter().chain(&common).chain(system)), b"hello there\n");
        assert_eq!(piped.stdout, found.stdout, "{system:?}");
    }
}

#[test]
fn an_empty_system_message_leaves_the_turn_out() {
    // A template that adds a system turn of its own, as some published ones do.
    let template = "{% if messages[0].role != 'system' %}[system]be kind[end]{% endif %}\
                    {% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}";
    let folder = scratch();
    let source = common::copy_folder(&fixture("llama"), &folder.path().join("checkpoint"));
    fs::write(source.join("chat_template.jinja"), template).unwrap();
    let place = folder.path().join("bundle");
    common::forge(&source, &place, "f32");
    let prompt = |arguments: &[&str]| {
        let found = json(["generate", place.to_str().unwrap(), "--max-new", "1", "--json", "--device", DEVICE].iter().chain(arguments));
        ids(&found["prompt_ids"])
    };
    // A completion may begin with a token of the tokenizer's own.
    let is_text = |chat: &str, text: &str| prompt(&["--prompt", text]).ends_with(chat);
    let plain = prompt(&["--user", "hi"]);
    assert!(is_text(&plain, "[system]be kind[end][user]hi[end][assistant]"), "{plain}");
    let brief = prompt(&["--user", "hi", "--system", "be brief"]);
    assert!(is_text(&brief, "[system]be brief[end][user]hi[end][assistant]"), "{brief}");
    let none = prompt(&["--user", "hi", "--system", ""]);
    assert!(is_text(&none, "[user]hi[end][assistant]"), "{none}");
}

#[test]
fn a_completion_model_completes() {
    let completion = completion_bundle();
    let place = completion.to_str().unwrap();
    let common = ["--device", DEVICE, "--max-new", "6", "--ignore-eos"];
    let expected = json(["generate", place, "--prompt", "the river", "--json"].iter().chain(&common));
    let found = succeed(["run", place, "the river"].iter().chain(&common));
    assert_eq!(found.trim_end_matches('\n'), expected["text"].as_str().unwrap().trim_end_matches('\n'));
    common::fail(["run", place, "the river", "--system", "be brief"], 2, &["--system: this model has no chat template"]);
}

#[test]
fn checkpoints_are_forged_once_and_again_when_they_change() {
    let folder = scratch();
    let gguf = folder.path().join("tiny.gguf");
    fs::copy(fixture("llama-gguf").join("model.gguf"), &gguf).unwrap();
    let cache = folder.path().join("cache");
    let answer = |model: &Path| {
        let arguments =
            [OsStr::new("run"), model.as_os_str(), "hello".as_ref(), "--max-new".as_ref(), "4".as_ref(), "--ignore-eos".as_ref()];
        let found = ran(qhx(arguments).args(["--device", DEVICE]).env("QHX_CACHE_DIR", &cache).output().unwrap());
        assert_eq!(found.code, Some(0), "{found:?}");
        found
    };
    let first = answer(&gguf);
    assert!(first.stderr.contains("(once)") && first.stderr.contains("gate passed: "), "forged and gated: {}", first.stderr);
    assert!(first.stderr.contains("weights as they are stored, uncalibrated"), "{}", first.stderr);
    let second = answer(&gguf);
    assert!(!second.stderr.contains("(once)") && !second.stderr.contains("gate passed: "), "{}", second.stderr);
    assert_eq!(first.stdout, second.stdout);
    assert_eq!(common::listing(&cache.join("models")).len(), 1);
    // A checkpoint that was touched may have changed.
    fs::File::options().append(true).open(&gguf).unwrap().set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    assert!(answer(&gguf).stderr.contains("(once)"));
    assert!(answer(&fixture("llama")).stderr.contains("(once)"));
    // A cached bundle that was damaged is made again.
    let kept = common::listing(&cache.join("models"));
    assert_eq!(kept.len(), 3);
    for name in kept {
        let made = cache.join("models").join(&name);
        fs::write(made.join(&common::listing(&made)[0]).join("qhx.json"), "{}").unwrap();
    }
    assert!(answer(&gguf).stderr.contains("forging again"));
    assert_eq!(answer(&gguf).stdout, first.stdout);
}

#[test]
fn traces_agree_with_the_oracle_and_diff_tells() {
    let llama = bundle("llama");
    let folder = scratch();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let prompt_ids = ids(&prompt("llama", "len17")["ids"]);
    let trace = |device: &str, out: &str| {
        json(["trace", llama.to_str().unwrap(), "--ids", &prompt_ids, "--device", device, "--out", out, "--chunk", "7", "--json"])
    };
    let listed = trace(DEVICE, &at("a"));
    assert_eq!(fields(&listed), ["out", "prompt_ids", "tensors"]);
    trace("reference", &at("b"));
    let (traced, recorded) = (tensors(Path::new(&at("a"))), tensors(&fixture("llama").join("oracle.safetensors")));
    let mut compared = 0;
    for (name, (shape, expected)) in &recorded {
        let name = match name.strip_prefix("len17.tap.") {
            Some(stage) => stage,
            None if name == "len17.prompt_logits" => "logits",
            None => continue,
        };
        let (found_shape, found) = &traced[name];
        assert_eq!(found_shape, shape, "{name}");
        let worst = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < 1e-3, "{name} is off by {worst}");
        compared += 1;
    }
    assert!(compared >= 8, "{compared}");

    let same = json(["diff", &at("a"), &at("b"), "--tolerance", "1e-3", "--json"]);
    assert_eq!((&same["same"], same["differences"].as_array().unwrap().len()), (&json!(true), traced.len()));
    let table = succeed(["diff", &at("a"), &at("b")]);
    assert!(table.contains("| layers.0.attn ") && table.contains("0.99999") || table.contains("1.00000"), "{table}");
    // Other tokens are other numbers, and a tolerance says so.
    succeed([
        "trace",
        llama.to_str().unwrap(),
        "--ids",
        &prompt_ids.replace(',', ",1,"),
        "--device",
        DEVICE,
        "--out",
        &at("c"),
        "--logits",
        "last",
    ]);
    let shapes = run(["diff", &at("a"), &at("c")]);
    assert!(shapes.code == Some(1) && shapes.stdout.contains("shapes differ") && shapes.stderr.contains("tensors differ"), "{shapes:?}");
    let reversed: Vec<_> = prompt_ids.split(',').rev().collect();
    succeed(["trace", llama.to_str().unwrap(), "--ids", &reversed.join(","), "--device", DEVICE, "--out", &at("d")]);
    succeed(["diff", &at("a"), &at("d")]);
    let beyond = run(["diff", &at("a"), &at("d"), "--tolerance", "1e-3", "--json"]);
    assert_eq!(beyond.code, Some(1), "{beyond:?}");
    assert_eq!(serde_json::from_str::<Value>(&beyond.stdout).unwrap()["same"], false);
}

#[test]
fn inspect_shows_the_sampling_that_a_checkpoint_suggests() {
    let folder = scratch();
    let (source, out) = (folder.path().join("source"), folder.path().join("bundle"));
    fs::create_dir(&source).unwrap();
    for file in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(fixture("llama").join(file), source.join(file)).unwrap();
    }
    fs::write(source.join("generation_config.json"), r#"{"eos_token_id": 2, "do_sample": true, "temperature": 0.7, "top_k": 20}"#).unwrap();
    succeed(["forge", source.to_str().unwrap(), "--out", out.to_str().unwrap(), "--precision", "f32", "--gate", "none"]);
    let place = out.to_str().unwrap();
    assert_eq!(json(["inspect", place, "--json"])["suggested_sampling"], json!({"temperature": 0.7, "top_k": 20}));
    let text = succeed(["inspect", place]);
    assert!(text.contains("--temperature 0.7 --top-k 20"), "{text}");
}

#[test]
fn inspect_counts_what_is_there() {
    let llama = bundle("llama");
    let place = llama.to_str().unwrap();
    let found = json(["inspect", place, "--json", "--device", DEVICE, "--context", "100"]);
    let config = read_json(&fixture("llama").join("config.json"));
    let number = |field: &str| config[field].as_u64().unwrap();
    assert_eq!(found["model"]["hidden_size"], config["hidden_size"]);
    let head_dim = config.get("head_dim").and_then(Value::as_u64).unwrap_or(number("hidden_size") / number("num_attention_heads"));
    let row = 2 * 4 * number("num_hidden_layers") * number("num_key_value_heads") * head_dim;
    assert_eq!(found["state"], json!({ "context": 100, "bytes": 100 * row, "bytes_per_token": row }));
    let stored: u64 = found["encodings"].as_array().unwrap().iter().map(|e| e["bytes"].as_u64().unwrap()).sum();
    let weights: u64 = read_json(&llama.join("qhx.json"))["weights"]
        .as_array()
        .unwrap()
        .iter()
        .map(|f| fs::metadata(llama.join(f.as_str().unwrap())).unwrap().len())
        .sum();
    assert!(stored <= weights && weights < stored + 64 * 1024, "{stored} of {weights} bytes are weights");
    assert_eq!(found["encodings"][0]["encoding"], "f32");
    assert_eq!(
        (&found["stages"][0]["stage"], &found["stages"][0]["device"], &found["gated"]),
        (&json!("embed"), &json!(DEVICE), &json!(false))
    );
    assert!(found["activations"]["f32"].as_u64().unwrap() > 0 && found["activations"].as_object().unwrap().len() == 1, "{found}");
    let text = succeed(["inspect", place, "--device", DEVICE]);
    for expected in ["layers.N.attn", "not gated", "one token reads", "stored as", "qhx"] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    let moe = json(["inspect", bundle("phimoe").to_str().unwrap(), "--json", "--device", DEVICE]);
    assert!(moe["active_parameters"].as_u64() < moe["model"]["parameters"].as_u64(), "{moe}");
}

#[test]
fn bench_measures() {
    let llama = bundle("llama");
    let found =
        json(["bench", llama.to_str().unwrap(), "-p", "32,8", "-n", "4", "-r", "2", "--threads", "1", "--device", DEVICE, "--json"]);
    let expected =
        "bandwidth_share bundle device peak_rss_bytes precision read_bandwidth_bytes_per_s results threads weight_bytes_per_token";
    assert_eq!(fields(&found).join(" "), expected);
    let tests: Vec<_> = found["results"].as_array().unwrap().iter().map(|r| r["test"].as_str().unwrap()).collect();
    assert_eq!(tests, ["pp32", "pp8", "tg4"]);
    assert_eq!(fields(&found["results"][0]), ["mean", "runs", "sd", "test"]);
    assert_eq!((&found["precision"], &found["device"], &found["threads"]), (&json!("f32"), &json!(DEVICE), &json!(1)));
    let table = succeed(["bench", llama.to_str().unwrap(), "-p", "8", "-n", "2", "-r", "1", "--device", DEVICE]);
    assert!(
        table.contains("| model") && table.contains(" pp8 |") && table.contains(" ± ") && table.contains("memory bandwidth"),
        "{table}"
    );
    assert!(!table.contains("experts used"), "{table}");
    let moe = bundle("phimoe");
    let arguments = ["bench", moe.to_str().unwrap(), "-p", "0", "-n", "1,24", "-r", "1", "--device", "cpu"];
    let found = json(arguments.iter().copied().chain(["--json"]));
    let (experts, layers) = (&found["experts"], found["experts"]["used"].as_array().unwrap());
    let of = experts["of"].as_u64().unwrap();
    assert_eq!(experts["tokens"], 24, "{experts}");
    assert!(of > 2 && layers.iter().all(|used| (2..=of).contains(&used.as_u64().unwrap())), "{experts}");
    assert!(succeed(arguments).contains("experts used"));
}

/// Drafts in benchmarks and in what is told of a bundle.
#[test]
fn drafts_are_measured_and_shown() {
    let (hybrid, llama) = (bundle("qwen3_5"), bundle("llama"));
    let (hybrid, llama) = (hybrid.to_str().unwrap(), llama.to_str().unwrap());
    for (draft, sessions) in [("mtp", "1,2"), ("lookup", "1"), (llama, "1")] {
        let model = if draft == llama { llama } else { hybrid };
        let tests = ["-p", "4", "-n", "12", "-d", "0,5", "-r", "2", "--sessions", sessions, "--device", DEVICE];
        let found = json(["bench", model, "--draft", draft, "--json"].into_iter().chain(tests));
        let results = found["results"].as_array().unwrap();
        assert_eq!(results.len(), 4 + 2 * sessions.matches(',').count(), "{found}");
        for result in results {
            let is_answer = result["test"].as_str().unwrap().starts_with("tg");
            assert!(result["mean"].as_f64().unwrap() > 0.0 && result["accepted"].is_u64() == is_answer, "{result}");
            assert!(!is_answer || result["accepted"].as_u64() <= result["drafted"].as_u64(), "{result}");
        }
    }
    let none = json(["bench", hybrid, "--draft", "none", "-p", "0", "-n", "4", "-r", "1", "--json"]);
    assert_eq!((&none["results"][0]["drafted"], &none["results"][0]["test"]), (&json!(0), &json!("tg4")));
    for command in [&["bench", llama, "-n", "4"][..], &["generate", llama, "--ids", "1"]] {
        fail(command.iter().copied().chain(["--draft", "mtp"]), 2, &["no program for multi-token prediction"]);
    }
    let found = json(["inspect", hybrid, "--json"]);
    assert_eq!((&found["draft"]["program"], &found["draft"]["stage"]), (&json!("mtp"), &json!("layers.4.ffn")));
    // 56 wide: both matrices of the row (2), attention (192, 32, 32, 96), perceptron (3 x 76), and norms (5 of 56, 2 of 32).
    assert_eq!(found["draft"]["parameters"], 56 * (2 * 56 + 192 + 32 + 32 + 96 + 3 * 76) + 5 * 56 + 2 * 32, "{}", found["draft"]);
    assert!(succeed(["inspect", hybrid]).contains("multi-token prediction by program `mtp`"));
    assert!(json(["inspect", llama, "--json"])["draft"].is_null());
}

#[test]
fn forge_and_synth_report() {
    let folder = scratch();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let source = fixture("qwen3_vl");
    let found = json(["forge", source.to_str().unwrap(), "--out", &at("w8"), "--precision", "w8", "--gate", "none", "--json"]);
    assert_eq!((&found["precision"], &found["gate"], &found["model"]), (&json!("w8"), &json!("none"), &json!("w8")));
    assert!(found["encodings"].as_array().unwrap().iter().any(|e| e["encoding"] == "i8_row"), "{found}");
    assert!(found["ignored_tensors"].is_null(), "the vision tower is used: {found}");
    let config = source.join("config.json");
    let synth =
        |out: &str, seed: &str| json(["synth", config.to_str().unwrap(), "--out", out, "--seed", seed, "--precision", "f16", "--json"]);
    let (one, again, other) = (synth(&at("one"), "7"), synth(&at("again"), "7"), synth(&at("other"), "8"));
    let sums = |report: &Value| {
        let files = report["files"].as_object().unwrap();
        files.iter().filter(|(name, _)| name.ends_with("safetensors")).map(|(_, file)| file["sha256"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(one["synthetic"], true);
    assert!(!sums(&one).is_empty() && sums(&one) == sums(&again) && sums(&one) != sums(&other));
    // A bundle without tokenizer takes and gives ids.
    let ids = succeed(["generate", &at("one"), "--ids", "1,2,3", "--max-new", "3", "--ignore-eos", "--device", DEVICE]);
    assert_eq!(ids.trim_end().split(',').filter(|id| id.parse::<u32>().is_ok()).count(), 3, "{ids}");
    common::fail(["generate", &at("one"), "--prompt", "a"], 1, &["needs a tokenizer"]);
    let text = run(["forge", source.to_str().unwrap(), "--out", &at("native")]);
    assert!(text.stdout.contains("| stored as") && text.stdout.contains("qhx") || text.stdout.contains("programs/text.json"), "{text:?}");
    assert!(text.stdout.contains("f32 model's choice"), "{}", text.stdout);
    // No terminal, no progress bar.
    assert!(!text.stderr.contains('\r') && !text.stderr.contains('\x1b'), "{:?}", text.stderr);
}

#[test]
fn weights_are_calibrated_by_default() {
    let folder = scratch();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (source, file) = (fixture("llama").to_str().unwrap().to_owned(), at("texts.txt"));
    let forge = ["forge", &source, "--out", &at("w8"), "--precision", "w8", "--gate", "none", "--force"].map(str::to_owned);
    let with = |calibration: &[&str]| -> Vec<String> { forge.iter().cloned().chain(calibration.iter().map(|&text| text.into())).collect() };
    let rounding = |calibration: &[&str]| json(with(&[calibration, &["--json"]].concat()))["rounding"].clone();
    assert_eq!(rounding(&[])["calibrated"]["texts"], "built-in");
    assert_eq!(rounding(&["--calibration", "none"]), "plain");
    std::fs::write(&file, "The quick brown fox jumps over the lazy dog. ".repeat(60)).unwrap();
    let own = rounding(&["--calibration", &file]);
    assert!(own["calibrated"]["texts"] == "texts.txt" && own["calibrated"]["tokens"].as_u64().unwrap() > 256, "{own}");
    fs::remove_dir_all(at("w8")).unwrap();
    let wrong: [(&[u8], &str); 6] = [
        (b"", "is empty"),
        (b" \n\t", "is empty"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"\x7fELF\0\0", "is not text: it has zero bytes"),
        (b"Too short.", "at least 256 are needed"),
        (b"{\"messages\": []}\n{\"prompt\": 1}", "line 2: expected `messages`"),
    ];
    for (bytes, expected) in wrong {
        fs::write(&file, bytes).unwrap();
        common::fail(with(&["--calibration", &file]), 1, &["texts.txt", expected]);
    }
    // No room is taken on the disk.
    fs::File::create(&file).unwrap().set_len(1 << 40).unwrap();
    common::fail(with(&["--calibration", &file]), 1, &["texts.txt"]);
    common::fail(with(&["--calibration", &at("absent")]), 1, &["absent", "cannot read"]);
    common::fail(with(&["--calibration", folder.path().to_str().unwrap()]), 1, &["folder"]);
    assert_eq!(common::listing(folder.path()), ["texts.txt"], "nothing is left behind");
}

#[test]
fn devices_are_listed() {
    let found = json(["devices", "--json"]);
    assert_eq!(fields(&found), ["devices", "missing"]);
    let names: Vec<_> = found["devices"].as_array().unwrap().iter().map(|d| d["name"].as_str().unwrap()).collect();
    assert_eq!(names.contains(&"cpu"), DEVICE == "cpu", "{found}");
    let table = succeed(["devices"]);
    assert!(table.contains("\ngpu: ") && table.contains("\nnpu: ") && table.contains("\n  threads  "), "{table}");
    assert!(table.lines().all(|line| line.chars().count() <= 80), "{table}");
}

#[cfg(feature = "cpu")]
#[test]
fn the_environment_names_an_instruction_set() {
    let with = |set: &str, arguments: &[&str]| ran(qhx(arguments).env("QHX_INSTRUCTIONS", set).output().unwrap());
    let found = with("portable", &["devices"]);
    assert!(found.stdout.lines().any(|line| line.split_whitespace().eq(["instructions", "portable"])), "{found:?}");
    let llama = bundle("llama");
    let generate = ["generate", llama.to_str().unwrap(), "--ids", "5", "--max-new", "1"];
    failed(with("mmx", &generate), 2, &["QHX_INSTRUCTIONS is mmx", "avx512_vnni+amx", "neon"]);
}

#[test]
fn a_closed_pipe_ends_quietly() {
    let llama = bundle("llama");
    let commands: [&[&str]; 4] = [
        &["generate", "BUNDLE", "--prompt", "the river", "--max-new", "300", "--ignore-eos", "--device", DEVICE],
        &["inspect", "BUNDLE", "--device", DEVICE],
        &["devices", "--json"],
        &["generate", "--help"],
    ];
    for command in commands {
        let arguments = command.iter().map(|a| if *a == "BUNDLE" { llama.to_str().unwrap() } else { a });
        let mut child = qhx(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let found = ran(child.wait_with_output().unwrap());
        assert_eq!(found.code, Some(0), "{command:?}: {found:?}");
        assert!(!found.stderr.contains("panicked") && !found.stderr.contains("error"), "{command:?}: {}", found.stderr);
    }
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_an_answer() {
    let llama = bundle("llama");
    let arguments = ["generate", llama.to_str().unwrap(), "--prompt", "the river", "--max-new", "4000", "--ignore-eos"];
    // The interpreter takes seconds for all of it.
    let mut child = qhx(arguments).args(["--device", "reference"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut [0; 20]).unwrap();
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let found = ran(child.wait_with_output().unwrap());
    assert!(found.code == Some(1) && found.stderr.contains("error: cancelled: the answer is incomplete"), "{found:?}");
}

/// Full-size configurations become contexts that a phone can hold, or are refused with the numbers, without a weight or a library.
#[test]
fn forge_plans_contexts_without_compiling() {
    let configs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs");
    for entry in fs::read_dir(configs).unwrap() {
        let config = entry.unwrap().path();
        let config = config.to_str().unwrap();
        let report = json(["forge", config, "--plan", "--precision", "f16", "--json"]);
        let plans = report["plans"].as_array().unwrap();
        assert_eq!(plans.iter().map(|plan| plan["arch"].as_str().unwrap()).collect::<Vec<_>>(), ["v79", "v81"], "{config}");
        for plan in plans {
            let contexts = plan["contexts"].as_array().unwrap();
            let bytes: Vec<u64> = contexts.iter().map(|context| context["bytes"].as_u64().unwrap()).collect();
            assert!(bytes.iter().all(|&bytes| bytes > 0 && bytes <= 3_500_000_000), "{config}: {bytes:?}");
            assert_eq!(plan["bytes"].as_u64().unwrap(), bytes.iter().sum::<u64>());
            let text = contexts.iter().filter(|context| context["program"] == "text");
            assert!((1..=8).contains(&text.count()), "{config}");
            let graphs: u64 = contexts.iter().map(|context| context["graphs"].as_u64().unwrap()).sum();
            // What may exhaust the heap is left out, and said.
            let careful = plan["arch"] == "v81" && graphs < 64 && !plan["notes"].as_array().unwrap().is_empty();
            assert_eq!(plan["rows"].as_array().unwrap().len(), if careful { 1 } else { 2 }, "{config}: {plan}");
        }
    }
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/qwen3.5-0.8b.json");
    let table = succeed(["forge", config.to_str().unwrap(), "--plan", "--target", "v81", "--precision", "w8", "--prefill", "none"]);
    assert!(
        table.contains("processor") && table.contains("text_decode_0") && table.contains("lm_head") && !table.contains("v79"),
        "{table}"
    );
    assert!(table.contains("one token takes") && table.contains("one token copies"), "{table}");
    assert!(table.contains("are shared with the graphs: the emulator reads them in place, a phone copies them"), "{table}");
    assert!(!table.contains("without a copy"), "{table}");
    // What has no weights cannot be calibrated, which a checkpoint is: the plan says so.
    let noted = |precision: &str, more: &[&str]| {
        let ran = run(["forge", config.to_str().unwrap(), "--plan", "--target", "v81", "--precision", precision].iter().chain(more));
        assert_eq!(ran.code, Some(0), "{ran:?}");
        ran.stderr
    };
    for (precision, told) in [("w8", "without rotations;"), ("w4", "without rotations, and with all matrices of layers in 4 bits;")] {
        let stderr = noted(precision, &[]);
        assert!(stderr.contains("a configuration has no weights to calibrate") && stderr.contains(told), "{stderr}");
    }
    assert!(!noted("w4", &["--calibration", "none"]).contains("calibrate") && !noted("f16", &[]).contains("calibrate"));
    fail(
        ["forge", config.to_str().unwrap(), "--plan", "--placement", "x.toml"],
        2,
        &["--plan lays out the whole model", "leave out --placement"],
    );
    fail(
        ["forge", config.to_str().unwrap(), "--plan", "--context", "999999999"],
        1,
        &["a context of 999999999 is longer than the 262144 tokens", "hint: the flags of NPU targets (--context"],
    );
    let wide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/qwen3-vl-2b.json");
    let long = ["forge", wide.to_str().unwrap(), "--plan", "--target", "v79", "--precision", "f16", "--context", "200000"];
    fail(long, 1, &["keys and values of 200000 rows take", "a context holds 3500000000", "--kv"]);
    let twice = json(["forge", config.to_str().unwrap(), "--plan", "--target", "v79,v79", "--precision", "w8", "--json"]);
    assert_eq!(twice["plans"].as_array().unwrap().len(), 1, "{twice}");
    let text_only = config.with_file_name("phi-tiny-moe.json");
    let text_only = ["forge", text_only.to_str().unwrap(), "--plan"];
    fail(text_only.iter().chain(&["--image-size", "64x64"]), 1, &["the model takes no images", "--image-size"]);
    fail(text_only.iter().chain(&["--audio-seconds", "2"]), 1, &["the model takes no sound", "--audio-seconds"]);
    fail(["forge", config.to_str().unwrap()], 2, &["--out"]);
    fail(["forge", config.to_str().unwrap(), "--out", "x", "--allow-risky"], 2, &["--allow-risky is for targets", "--target v79"]);
}

//! Images and sounds through the real binary: the same ids and logits as transformers, in conversations and as ids, and clear words for media that
//! cannot be used.

use crate::common::{
    self, DEVICE, Ran, bundle, fail, failed, fixture, ids, json, qhx, read_json, run, scratch, succeed, tensors, with_stdin,
};
use serde_json::{Value, json};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Ways to cut the prompt and to share the work; none may change a token.
const WAYS: [&[&str]; 5] = [
    &[],
    &["--chunk", "1", "--threads", "2"],
    &["--chunk", "7", "--threads", "1"],
    &["--chunk", "7", "--threads", "2"],
    &["--chunk", "16", "--threads", "1"],
];
const LOGITS_TOLERANCE: f32 = 1e-3;

/// A recorded prompt with media, and how to give it to the command.
struct Recorded {
    family: &'static str,
    prompt: Value,
    /// Kind and file, in the order of the content.
    media: Vec<(&'static str, PathBuf)>,
}

impl Recorded {
    fn all(family: &'static str) -> Vec<Self> {
        let record = read_json(&fixture(family).join("media.json"));
        record["prompts"].as_array().unwrap().iter().map(|prompt| Self::new(family, &record, prompt)).collect()
    }

    fn named(family: &'static str, name: &str) -> Self {
        Self::all(family).into_iter().find(|recorded| recorded.name() == name).unwrap()
    }

    fn new(family: &'static str, record: &Value, prompt: &Value) -> Self {
        let mut waiting = ["images", "sounds"].map(|kind| prompt[kind].as_array().unwrap().iter());
        let parts = prompt["messages"].as_array().unwrap().iter().flat_map(|m| m["content"].as_array().into_iter().flatten());
        let media = parts.filter_map(|part| {
            let (which, kind, list) = match part["type"].as_str().unwrap() {
                "image" => (0, "image", "images"),
                "audio" => (1, "audio", "sounds"),
                _ => return None,
            };
            let number = waiting[which].next().unwrap().as_u64().unwrap() as usize;
            Some((kind, fixture(family).join(record[list][number]["file"].as_str().unwrap())))
        });
        Self { family, prompt: prompt.clone(), media: media.collect() }
    }

    fn name(&self) -> &str {
        self.prompt["name"].as_str().unwrap()
    }

    /// The conversation with a path in each part that is a medium.
    fn messages(&self) -> Value {
        let mut messages = self.prompt["messages"].clone();
        let mut media = self.media.iter();
        for message in messages.as_array_mut().unwrap() {
            for part in message["content"].as_array_mut().into_iter().flatten().filter(|part| part["type"] != "text") {
                part["path"] = json!(media.next().unwrap().1);
            }
        }
        messages
    }

    fn flags(&self) -> Vec<String> {
        self.media.iter().flat_map(|(kind, path)| [format!("--{kind}"), path.to_str().unwrap().to_owned()]).collect()
    }

    fn generate(&self, input: &[&str], extra: &[&str]) -> Value {
        let (bundle, max_new) = (bundle(self.family), self.prompt["greedy"].as_array().unwrap().len().to_string());
        let mut arguments = vec!["generate", bundle.to_str().unwrap(), "--max-new", &max_new, "--ignore-eos", "--json", "--device", DEVICE];
        arguments.extend(input);
        arguments.extend(extra);
        json(arguments)
    }

    /// By the chat template.
    fn chat(&self, folder: &Path, extra: &[&str]) -> Value {
        let file = folder.join("chat.json");
        fs::write(&file, self.messages().to_string()).unwrap();
        self.generate(&["--chat", file.to_str().unwrap()], extra)
    }

    /// With placeholders already expanded.
    fn as_ids(&self, extra: &[&str]) -> Value {
        let (ids, flags) = (ids(&self.prompt["ids"]), self.flags());
        let input: Vec<&str> = ["--ids", ids.as_str()].into_iter().chain(flags.iter().map(String::as_str)).collect();
        self.generate(&input, extra)
    }

    #[track_caller]
    fn check(&self, found: &Value, how: &str) {
        let Self { family, prompt, .. } = self;
        assert_eq!(found["prompt_ids"], prompt["ids"], "{family}, prompt {}, {how}", self.name());
        assert_eq!(found["ids"], prompt["greedy"], "{family}, prompt {}, {how}", self.name());
    }
}

/// Holds every recorded prompt of a family to the oracle.
fn hold(family: &'static str, least: usize) {
    let recorded = tensors(&fixture(family).join("media.safetensors"));
    let folder = scratch();
    let prompts = Recorded::all(family);
    let mut with_logits = 0;
    for prompt in &prompts {
        let ways = if DEVICE == "reference" { &WAYS[2..3] } else { &WAYS[..] };
        for way in ways {
            prompt.check(&prompt.chat(folder.path(), way), &format!("a conversation, {way:?}"));
            prompt.check(&prompt.as_ids(way), &format!("ids, {way:?}"));
        }
        let Some((shape, expected)) = recorded.get(&format!("{}.step_logits", prompt.name())) else { continue };
        let file = folder.path().join("logits.safetensors");
        for way in [&ways[0], &ways[ways.len() - 1]] {
            prompt.chat(folder.path(), &[*way, &["--logits", file.to_str().unwrap()]].concat());
            let (found_shape, found) = &tensors(&file)["step_logits"];
            assert!(found_shape[1] == shape[1] && found_shape[0] >= shape[0], "{family}, {}: {found_shape:?}", prompt.name());
            let worst = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst <= LOGITS_TOLERANCE, "{family}, prompt {}, {way:?}: logits are off by {worst}", prompt.name());
            with_logits += 1;
        }
    }
    assert!(prompts.len() >= least && with_logits >= 2, "{family}: the oracle has lost its prompts");
}

#[test]
fn qwen3_vl() {
    hold("qwen3_vl", 4);
}

#[test]
fn qwen3_5() {
    hold("qwen3_5", 4);
}

#[test]
fn gemma4() {
    hold("gemma4", 6);
}

#[test]
fn flags_stand_before_the_text_in_their_order() {
    for family in ["qwen3_vl", "gemma4"] {
        let recorded = Recorded::named(family, "image");
        let text = recorded.prompt["messages"][0]["content"][1]["text"].as_str().unwrap().to_owned();
        let flags = recorded.flags();
        let input: Vec<&str> = ["--user", text.as_str()].into_iter().chain(flags.iter().map(String::as_str)).collect();
        recorded.check(&recorded.generate(&input, &[]), "--user");
    }
    // A sound before an image is another prompt than an image before a sound.
    let (image, sound) = (fixture("gemma4").join("media/wide.png"), fixture("gemma4").join("media/word.wav"));
    let gemma = bundle("gemma4");
    let prompt = |order: &[(&str, &Path)]| {
        let mut arguments = vec!["generate", gemma.to_str().unwrap(), "--user", "hello", "--max-new", "1", "--json", "--device", DEVICE];
        order.iter().for_each(|(flag, path)| arguments.extend([*flag, path.to_str().unwrap()]));
        let config = read_json(&fixture("gemma4").join("config.json"));
        let (seen, heard) = (config["image_token_id"].clone(), config["audio_token_id"].clone());
        let found = json(arguments);
        let place = |token: &Value| found["prompt_ids"].as_array().unwrap().iter().position(|id| id == token).unwrap();
        place(&seen) < place(&heard)
    };
    assert!(prompt(&[("--image", &image), ("--audio", &sound)]));
    assert!(!prompt(&[("--audio", &sound), ("--image", &image)]));
}

#[test]
fn the_answer_says_what_encoding_took_and_where_it_ran() {
    let recorded = Recorded::named("gemma4", "image");
    let found = recorded.as_ids(&[]);
    assert!(found["timing"]["encode_ms"].as_f64().unwrap() > 0.0);
    assert!(found["timing"]["ttft_ms"].as_f64() >= found["timing"]["encode_ms"].as_f64());
    let stage =
        |name: &str| found["stages"].as_array().unwrap().iter().find(|s| s["stage"] == name).unwrap_or_else(|| panic!("no {name}")).clone();
    assert_eq!(stage("vision.0"), json!({ "stage": "vision.0", "device": DEVICE, "runs": 1 }));
    assert!(!found["stages"].to_string().contains("audio."), "no sound, no ears");
    let text = generate_text(&recorded);
    for expected in ["encode", "prefill", "first token", "towers "] {
        assert!(text.stderr.contains(expected), "{expected}: {}", text.stderr);
    }
}

fn generate_text(recorded: &Recorded) -> Ran {
    let (bundle, ids, flags) = (bundle(recorded.family), ids(&recorded.prompt["ids"]), recorded.flags());
    let mut arguments = vec!["generate", bundle.to_str().unwrap(), "--ids", &ids, "--max-new", "4", "--device", DEVICE];
    arguments.extend(flags.iter().map(String::as_str));
    let found = run(arguments);
    assert_eq!(found.code, Some(0), "{found:?}");
    found
}

#[test]
fn a_chat_keeps_its_pictures() {
    let family = "qwen3_vl";
    let bundle = bundle(family);
    let (wide, large) = (fixture(family).join("media/wide.png"), fixture(family).join("media/large.png"));
    let script = format!(
        "/image\n/image {}\nWhat is this?\nAnd why?\n/image \"{}\"\n/image {}\n/detach\n/image {}\nCompare them.\n/exit\n",
        wide.display(),
        wide.display(),
        large.display(),
        large.display()
    );
    let arguments = ["chat", bundle.to_str().unwrap(), "--device", DEVICE, "--max-new", "6", "--ignore-eos"];
    let found = with_stdin(qhx(arguments), script.as_bytes());
    assert_eq!(found.code, Some(0), "{found:?}");
    for expected in ["nothing is attached: `qwen3_vl` takes text and images", "wide.png (image, 6 tokens)", "large.png (image, 12 tokens)"]
    {
        assert!(found.stderr.contains(expected), "{expected}: {}", found.stderr);
    }
    // Each turn on a fresh session says the same.
    let folder = scratch();
    let file = folder.path().join("chat.json");
    let answer = |messages: &Value| {
        fs::write(&file, messages.to_string()).unwrap();
        let arguments = ["generate", bundle.to_str().unwrap(), "--chat", file.to_str().unwrap(), "--json", "--device", DEVICE];
        json(arguments.iter().chain(&["--max-new", "6", "--ignore-eos"]))["text"].as_str().unwrap().to_owned()
    };
    let turns = [
        json!([{ "type": "image", "path": wide }, { "type": "text", "text": "What is this?" }]),
        json!("And why?"),
        json!([{ "type": "image_url", "image_url": { "url": large } }, { "type": "text", "text": "Compare them." }]),
    ];
    let (mut messages, mut expected) = (Vec::new(), String::new());
    for content in turns {
        messages.push(json!({ "role": "user", "content": content }));
        let text = answer(&json!(messages));
        expected += &format!("{text}\n");
        messages.push(json!({ "role": "assistant", "content": text }));
    }
    let lines = |text: &str| text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(lines(&found.stdout), lines(&expected));
    // A script cannot mend a file that is not there.
    failed(with_stdin(qhx(arguments), b"/image no-such.png\n"), 1, &["no-such.png: cannot be read"]);
    let left = with_stdin(qhx(arguments), format!("/image {}\n", wide.display()).as_bytes());
    assert!(left.stderr.contains("not sent: "), "{left:?}");
}

/// A WAV file: 16 kHz, one channel, 16 bits, tones with pauses.
fn wav(path: &Path, seconds: f64) -> PathBuf {
    let samples: Vec<i16> = (0..(16_000.0 * seconds) as usize)
        .map(|n| {
            let time = n as f64 / 16_000.0;
            let pause = time % 2.0 > 1.7;
            if pause { 0 } else { (8000.0 * (time * 440.0 * (1.0 + (time / 3.0).floor()) * std::f64::consts::TAU).sin()) as i16 }
        })
        .collect();
    let bytes: Vec<u8> = samples.iter().flat_map(|s| s.to_le_bytes()).collect();
    let mut file = b"RIFF".to_vec();
    file.extend((36 + bytes.len() as u32).to_le_bytes());
    file.extend(b"WAVEfmt \x10\0\0\0\x01\0\x01\0");
    file.extend(16_000u32.to_le_bytes());
    file.extend(32_000u32.to_le_bytes());
    file.extend(b"\x02\0\x10\0data");
    file.extend((bytes.len() as u32).to_le_bytes());
    file.extend(bytes);
    fs::write(path, file).unwrap();
    path.to_owned()
}

#[test]
fn a_sound_may_be_the_whole_message_and_a_long_one_is_split() {
    let folder = scratch();
    let gemma = bundle("gemma4");
    let gemma = gemma.to_str().unwrap();
    let word = fixture("gemma4").join("media/word.wav");
    let short = run(["run", gemma, "--audio", word.to_str().unwrap(), "--max-new", "4", "--device", DEVICE]);
    assert_eq!(short.code, Some(0), "{short:?}");
    fail(["run", gemma, "--image", fixture("gemma4").join("media/wide.png").to_str().unwrap()], 2, &["the prompt is missing"]);

    let long = wav(&folder.path().join("long.wav"), 70.0);
    let long = long.to_str().unwrap();
    let arguments = ["generate", gemma, "--user", "Transcribe.", "--audio", long, "--max-new", "3", "--ignore-eos", "--device", DEVICE];
    fail(arguments, 1, &["long.wav: is 70.00 s long", "30.00 s", "--split"]);
    let whole = json(arguments.iter().chain(&["--split", "--json"]));
    assert_eq!(whole["ids"].as_array().unwrap().len(), 9, "three windows of three tokens each");
    let shown = run(arguments.iter().chain(&["--split"]));
    assert!(["window 1 of 3", "window 2 of 3", "window 3 of 3"].iter().all(|line| shown.stderr.contains(line)), "{shown:?}");
    assert_eq!(shown.stdout.trim(), whole["text"].as_str().unwrap().trim());
    assert_eq!(whole["stages"].as_array().unwrap().iter().find(|s| s["stage"] == "audio.0").unwrap()["runs"], 3);
    // A sound that needs no windows is answered as without them.
    let word =
        ["generate", gemma, "--user", "Transcribe.", "--audio", word.to_str().unwrap(), "--max-new", "3", "--device", DEVICE, "--json"];
    assert_eq!(json(word)["ids"], json(word.iter().chain(&["--split"]))["ids"]);
}

#[test]
fn bad_media_are_told_clearly() {
    let folder = scratch();
    let place = |name: &str| folder.path().join(name);
    let png = fs::read(fixture("gemma4").join("media/large.png")).unwrap();
    fs::write(place("cut.png"), &png[..png.len() / 2]).unwrap();
    let mut huge = png.clone();
    huge[16..24].copy_from_slice(&[0, 0, 0xff, 0xff, 0, 0, 0xff, 0xff]);
    // The header's own sum, so that the claim is believed.
    let sum = crc32(&huge[12..29]);
    huge[29..33].copy_from_slice(&sum.to_be_bytes());
    fs::write(place("huge.png"), &huge).unwrap();
    fs::write(place("text.jpg"), "Dear diary").unwrap();
    fs::write(place("empty.png"), "").unwrap();
    wav(&place("silent.wav"), 0.0);
    wav(&place("blip.wav"), 0.001);
    let cut = fs::read(wav(&place("whole.wav"), 1.0)).unwrap();
    fs::write(place("cut.wav"), &cut[..20]).unwrap();
    let gemma = bundle("gemma4");
    let cases: [(&str, &str, &[&str]); 9] = [
        ("--image", "cut.png", &["cut.png: "]),
        ("--image", "huge.png", &["huge.png: says that it is 65535 x 65535"]),
        ("--image", "text.jpg", &["text.jpg: is not an image", "Dear diary"]),
        ("--image", "empty.png", &["empty.png: is empty"]),
        ("--image", "none.png", &["none.png: cannot be read"]),
        ("--image", "whole.wav", &["whole.wav: is a WAV sound"]),
        ("--audio", "silent.wav", &["silent.wav: "]),
        ("--audio", "blip.wav", &["blip.wav: is too short"]),
        ("--audio", "cut.wav", &["cut.wav: "]),
    ];
    for (flag, name, expected) in cases {
        let file = place(name);
        let input = [flag, file.to_str().unwrap(), "--user", "hello", "--device", DEVICE];
        fail(["generate", gemma.to_str().unwrap()].iter().chain(&input), 1, expected);
        fail(["run", gemma.to_str().unwrap(), "hello", flag, file.to_str().unwrap()], 1, expected);
    }
    let picture = fixture("gemma4").join("media/tiny.png");
    let picture = picture.to_str().unwrap();
    for (family, flag, expected) in [
        ("llama", "--image", "`llama` takes no images: it takes text only"),
        ("qwen3_vl", "--audio", "`qwen3_vl` takes no sounds: it takes text and images"),
    ] {
        fail(["generate", bundle(family).to_str().unwrap(), "--user", "hello", flag, picture], 1, &[expected]);
    }
}

/// Of PNG chunks, bit by bit.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| if crc & 1 == 1 { (crc >> 1) ^ 0xedb8_8320 } else { crc >> 1 })
    })
}

#[test]
fn placeholders_that_do_not_fit_are_counted() {
    let recorded = Recorded::named("qwen3_vl", "image");
    let bundle = bundle("qwen3_vl");
    let all: Vec<String> = recorded.prompt["ids"].as_array().unwrap().iter().map(|id| id.to_string()).collect();
    let token = read_json(&fixture("qwen3_vl").join("config.json"))["image_token_id"].to_string();
    let first = all.iter().position(|id| *id == token).unwrap();
    let fewer = [&all[..first], &all[first + 1..]].concat().join(",");
    let flags = recorded.flags();
    let input = ["--ids", &fewer].into_iter().chain(flags.iter().map(String::as_str)).collect::<Vec<_>>();
    fail(
        ["generate", bundle.to_str().unwrap()].iter().chain(&input),
        1,
        &["placeholders for images: found 5 in the prompt, expected 6", "wide.png takes 6"],
    );
    // Without any medium the ids are ids: as in transformers.
    succeed(["generate", bundle.to_str().unwrap(), "--ids", &fewer, "--max-new", "2", "--device", DEVICE]);
    let folder = scratch();
    let chat = folder.path().join("chat.json");
    fs::write(&chat, recorded.messages().to_string()).unwrap();
    let arguments = ["generate", bundle.to_str().unwrap(), "--chat", chat.to_str().unwrap(), "--image", flags[1].as_str()];
    fail(arguments, 2, &["--image and --audio do not go with --chat"]);
}

#[test]
fn inspect_and_trace_show_the_towers() {
    let gemma = bundle("gemma4");
    let gemma = gemma.to_str().unwrap();
    let text = succeed(["inspect", gemma]);
    for expected in ["images", "program `vision`", "program `audio`", "16000 Hz, up to 30 s", "vision.N", "audio.N", "tower stage"] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    let stages = succeed(["inspect", bundle("qwen3_vl").to_str().unwrap()]);
    assert_eq!(stages.matches("| vision.N ").count(), 1, "those that differ only in number stand together: {stages}");
    let report = json(["inspect", gemma, "--json"]);
    assert_eq!(report["media"]["audio"]["sampling_rate"], 16_000);
    assert_eq!(report["towers"].as_array().unwrap().len(), 2);
    assert!(!succeed(["inspect", bundle("llama").to_str().unwrap()]).contains("tower stage"));

    let folder = scratch();
    let file = folder.path().join("trace.safetensors");
    for family in ["qwen3_vl", "gemma4"] {
        let recorded = Recorded::named(family, "image");
        let (ids, flags) = (ids(&recorded.prompt["ids"]), recorded.flags());
        let mut arguments = vec!["trace".to_owned(), bundle(family).to_str().unwrap().to_owned(), "--ids".to_owned(), ids];
        arguments.extend(flags);
        arguments.extend(["--device", DEVICE, "--out", file.to_str().unwrap()].map(str::to_owned));
        succeed(&arguments);
        let (found, expected) = (tensors(&file), tensors(&fixture(family).join("media.safetensors")));
        let number = recorded.prompt["images"][0].to_string();
        let mut compared = 0;
        for (name, (shape, values)) in &expected {
            let Some(name) = name.strip_prefix(&format!("image.{number}.")) else { continue };
            let Some((found_shape, found)) = found.get(name.trim_start_matches("tap.")) else { continue };
            let largest = values.iter().fold(0f32, |most, x| most.max(x.abs()));
            let worst = found.iter().zip(values).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(found_shape == shape && worst <= 1e-4 * largest, "{family}, {name}: off by {worst} of {largest}");
            compared += 1;
        }
        assert!(compared >= 3, "{family}: only {compared} tensors are recorded");
    }
}

#[test]
fn staged_features_take_the_place_of_towers() {
    let recorded = Recorded::named("qwen3_vl", "two_images");
    let folder = scratch();
    let bundle = common::bundle_copy("qwen3_vl", folder.path());
    let (file, numbers) = (bundle.join("qhx.json"), tensors(&fixture("qwen3_vl").join("media.safetensors")));
    let mut manifest = read_json(&file);
    manifest["fixture_dir"] = "staged".into();
    fs::write(&file, manifest.to_string()).unwrap();
    fs::create_dir(bundle.join("staged")).unwrap();
    let ask = |code: i32, expected: &[&str]| {
        let ids = ids(&recorded.prompt["ids"]);
        let arguments =
            ["generate", bundle.to_str().unwrap(), "--ids", &ids, "--max-new", "24", "--ignore-eos", "--json", "--device", DEVICE];
        match code {
            0 => json(arguments),
            _ => Value::from(fail(arguments, code, expected).stderr),
        }
    };
    ask(1, &["0.safetensors"]);
    for (number, (image, grid)) in [("image.2", [3.0, 4.0]), ("image.1", [2.0, 2.0])].into_iter().enumerate() {
        let tensor = |name: &str, key: &str| {
            let (shape, values) = numbers[&format!("{image}.{key}")].clone();
            qhx_runtime::tensors::Tensor { name: name.into(), shape, values }
        };
        let grid = qhx_runtime::tensors::Tensor { name: "grid".into(), shape: vec![2], values: grid.to_vec() };
        let all = [tensor("soft_rows", "soft_rows"), tensor("deepstack.0", "deepstack.0"), tensor("deepstack.1", "deepstack.1"), grid];
        let place = bundle.join(format!("staged/{number}.safetensors"));
        // What has no grid is a sound.
        if number == 0 {
            qhx_runtime::tensors::write(&place, &all[..1]).unwrap();
            ask(1, &["takes no sounds"]);
        }
        qhx_runtime::tensors::write(&place, &all).unwrap();
    }
    let found = ask(0, &[]);
    recorded.check(&found, "staged");
    assert!(found["stages"].as_array().unwrap().iter().all(|stage| !stage["stage"].as_str().unwrap().starts_with("vision")), "{found}");
    // What early layers of the tower made is missing.
    let first = bundle.join("staged/0.safetensors");
    let kept = qhx_runtime::tensors::read(&first).unwrap().into_iter().filter(|tensor| !tensor.name.starts_with("deepstack"));
    qhx_runtime::tensors::write(&first, &kept.collect::<Vec<_>>()).unwrap();
    ask(1, &["there are no numbers for `deepstack.0`"]);
}

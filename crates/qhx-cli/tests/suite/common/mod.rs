//! The real binary over the fixtures: what every suite here needs.

use qhx_forge::read::{SourceType, gguf, gguf_metadata, gguf_writer::GgufWriter};
use serde_json::Value;
use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs,
    io::{Read, Write},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::LazyLock,
    thread,
    time::{Duration, Instant},
};

/// The families whose fixtures were recorded.
pub(crate) const FAMILIES: [&str; 7] = ["llama", "qwen3", "qwen3_vl", "phimoe", "phimoe_longrope", "qwen3_5", "gemma4"];

/// Where models run: the processor, or in a build without it the interpreter.
pub(crate) const DEVICE: &str = if cfg!(feature = "cpu") { "cpu" } else { "reference" };

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)
}

/// Where bundles and caches of this test process go; removed by the system's own cleaning if the process dies.
static SCRATCH: LazyLock<tempfile::TempDir> = LazyLock::new(|| tempfile::Builder::new().prefix("qhx-cli-").tempdir().unwrap());

/// A fresh folder.
pub(crate) fn scratch() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("qhx-cli-").tempdir().unwrap()
}

/// A path as an argument.
pub(crate) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// The command with caches of its own.
pub(crate) fn qhx(arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_qhx"));
    command.args(arguments).env("QHX_CACHE_DIR", SCRATCH.path().join("cache")).stdin(Stdio::null());
    command.env("HF_HOME", SCRATCH.path().join("huggingface")).env_remove("HF_HUB_CACHE");
    command
}

/// What a run gave.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

pub(crate) fn ran(output: Output) -> Ran {
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Ran { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// Runs a command on this input.
pub(crate) fn with_stdin(mut command: Command, text: &[u8]) -> Ran {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // A command that refuses its input may close it before it is written.
    let _ = child.stdin.take().unwrap().write_all(text);
    ran(child.wait_with_output().unwrap())
}

pub(crate) fn run(arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Ran {
    ran(qhx(arguments).output().unwrap())
}

/// Runs a command that must succeed and gives its stdout.
pub(crate) fn succeed(arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> String {
    let ran = run(arguments);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    ran.stdout
}

/// Runs a command that must print exactly one JSON object, in one line, and nothing else on stdout.
pub(crate) fn json(arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Value {
    let stdout = succeed(arguments);
    let object = stdout.strip_suffix('\n').unwrap_or_else(|| panic!("no line: {stdout:?}"));
    assert!(!object.contains('\n') && object.starts_with('{') && object.ends_with('}'), "{stdout:?}");
    serde_json::from_str(object).unwrap_or_else(|e| panic!("{e}: {stdout:?}"))
}

/// Runs a command that must fail like this: exit code, nothing on stdout, one block on stderr with each of these texts, no panic.
pub(crate) fn fail(arguments: impl IntoIterator<Item = impl AsRef<OsStr>>, code: i32, expected: &[&str]) -> Ran {
    failed(ran(qhx(arguments).output().unwrap()), code, expected)
}

pub(crate) fn failed(ran: Ran, code: i32, expected: &[&str]) -> Ran {
    assert_eq!(ran.code, Some(code), "{ran:?}");
    assert_eq!(ran.stdout, "", "{ran:?}");
    assert!(ran.stderr.contains("error: ") && !ran.stderr.contains("panicked"), "{ran:?}");
    for text in expected {
        assert!(ran.stderr.contains(text), "expected {text:?} in:\n{}", ran.stderr);
    }
    ran
}

/// Reads what a process says on stderr, up to a line with this text; the rest is left for `wait_with_output`.
pub(crate) fn wait_for_line(process: &mut Child, text: &str) {
    let stderr = process.stderr.as_mut().unwrap();
    let (mut said, mut byte) = (Vec::new(), [0]);
    loop {
        assert_ne!(stderr.read(&mut byte).unwrap(), 0, "{text:?} is not said: {}", String::from_utf8_lossy(&said));
        said.push(byte[0]);
        if byte[0] == b'\n' && String::from_utf8_lossy(&said).contains(text) {
            return;
        }
    }
}

/// Waits until something is so that another process does.
#[track_caller]
pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < deadline, "it is never so: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// The only child of a process (Linux).
pub(crate) fn child_of(process: &Child) -> String {
    let mut child = None;
    wait_until("the process has a child", || {
        let tasks = fs::read_dir(format!("/proc/{}/task", process.id())).unwrap().map(|task| task.unwrap().path().join("children"));
        let children: String = tasks.filter_map(|file| fs::read_to_string(file).ok()).collect();
        match children.split_whitespace().collect::<Vec<_>>()[..] {
            [only] => child = Some(only.to_owned()),
            ref all => assert!(all.is_empty(), "{all:?}"),
        }
        child.is_some()
    });
    child.unwrap()
}

/// Forges `source` into `out`, without a gate: tests of gates have their own.
pub(crate) fn forge(source: &Path, out: &Path, precision: &str) {
    let flags = ["--gate", "none", "--precision", precision].map(OsStr::new);
    succeed([OsStr::new("forge"), source.as_os_str(), "--out".as_ref(), out.as_os_str()].into_iter().chain(flags));
}

/// The f32 bundle of a fixture, forged once for the whole process.
pub(crate) fn bundle(fixture_name: &str) -> PathBuf {
    static MADE: LazyLock<std::sync::Mutex<()>> = LazyLock::new(Default::default);
    let _one_at_a_time = MADE.lock().unwrap_or_else(|e| e.into_inner());
    let place = SCRATCH.path().join(fixture_name);
    if !place.exists() {
        let source = fixture(fixture_name);
        let gguf = source.join("model.gguf");
        forge(if gguf.exists() { &gguf } else { &source }, &place, "f32");
    }
    place
}

/// A GGUF file of a small Llama whose matrices are integers, Q8_0 and Q4_0: the metadata of the fixture, and random weights.
pub(crate) fn integer_gguf(folder: &Path) -> PathBuf {
    let source = fs::read(fixture("llama-gguf").join("model.gguf")).unwrap();
    let source = gguf::parse(&source).unwrap();
    let mut file = GgufWriter::default();
    let sizes = [
        ("context_length", 256),
        ("embedding_length", 64),
        ("block_count", 2),
        ("feed_forward_length", 96),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("rope.dimension_count", 16),
    ];
    for (key, value) in source.metadata.iter() {
        let size = sizes.iter().find(|(name, _)| key.strip_prefix("llama.") == Some(name));
        file.set(key, size.map_or(value.clone(), |(_, size)| gguf_metadata::Value::U32(*size)));
    }
    let mut state = 1u64;
    let mut random = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 56) as u8
    };
    for tensor in source.tensors.iter().filter(|tensor| !tensor.name.starts_with("blk.2.")) {
        // Whole blocks of 32.
        let shape: Vec<usize> = tensor.shape.iter().map(|&size| if size < 100 { size.next_multiple_of(32) } else { size }).collect();
        let blocks = shape.iter().product::<usize>() / 32;
        // A block begins with its scale, in f16: 2^-5 or 2^-9, and 2^-8 for the table.
        let (source_type, scale, bytes) = match &*tensor.name {
            _ if shape.len() == 1 => {
                file.tensor_f32(&tensor.name, &shape, &vec![1.0; shape[0]]);
                continue;
            }
            name if name.contains("ffn") => (SourceType::Q4_0, 0x2800u16, 16),
            "token_embd.weight" => (SourceType::Q8_0, 0x1c00, 32),
            _ => (SourceType::Q8_0, 0x1800, 32),
        };
        let block = |_| scale.to_le_bytes().into_iter().chain((0..bytes).map(|_| random()).collect::<Vec<_>>());
        let data = (0..blocks).flat_map(block).collect();
        file.tensor(&tensor.name, source_type, &shape, data);
    }
    let place = folder.join("integers.gguf");
    fs::write(&place, file.bytes()).unwrap();
    place
}

/// A bundle of a checkpoint that has no chat template.
pub(crate) fn completion_bundle() -> PathBuf {
    static MADE: LazyLock<PathBuf> = LazyLock::new(|| {
        let source = copy_folder(&fixture("llama"), &SCRATCH.path().join("without-template"));
        fs::remove_file(source.join("chat_template.jinja")).unwrap();
        let place = SCRATCH.path().join("completion");
        forge(&source, &place, "f32");
        place
    });
    MADE.clone()
}

/// A copy of the bundle, to be damaged.
pub(crate) fn bundle_copy(fixture_name: &str, folder: &Path) -> PathBuf {
    copy_folder(&bundle(fixture_name), &folder.join("bundle"))
}

pub(crate) fn copy_folder(from: &Path, to: &Path) -> PathBuf {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy_folder(&path, &target);
        } else {
            fs::copy(&path, &target).unwrap();
        }
    }
    to.to_owned()
}

/// `1,2,3`
pub(crate) fn ids(value: &Value) -> String {
    let ids: Vec<_> = value.as_array().unwrap().iter().map(|id| id.to_string()).collect();
    ids.join(",")
}

pub(crate) fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// The F32 tensors of a safetensors file.
pub(crate) fn tensors(path: &Path) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let bytes = fs::read(path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let data = &bytes[8 + header..];
    let header: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let list = |value: &Value| value.as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect::<Vec<_>>();
    let tensor = |(name, about): (&String, &Value)| {
        let range = list(&about["data_offsets"]);
        let values = data[range[0]..range[1]].chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        (name.clone(), (list(&about["shape"]), values))
    };
    header.as_object().unwrap().iter().filter(|(name, about)| *name != "__metadata__" && about["dtype"] == "F32").map(tensor).collect()
}

/// Everything in a folder, hidden names included.
pub(crate) fn listing(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

//! Libraries that are missing, old, or something else: each is refused in words.
#![cfg(all(target_os = "linux", target_pointer_width = "64"))]

use crate::fake::Fake;
use qhx_npu::{Arch, Build, CompileOptions, Compiled, GraphInfo, Library, Metadata, graph};
use std::{
    env, fs,
    io::Write,
    process::{Command, Stdio},
};
use tempfile::TempDir;

fn refused(folder: &TempDir, expected: &[&str]) {
    let error = Library::open(Some(folder.path())).expect_err("it is not a QNN library").to_string();
    for part in expected {
        assert!(error.contains(part), "{error} does not say: {part}");
    }
}

#[test]
fn missing_and_foreign_files() {
    let folder = TempDir::new().unwrap();
    refused(&folder, &["libQnnHtp.so", "there is no such file", "name a folder"]);
    let file = folder.path().join("libQnnHtp.so");
    fs::write(&file, "not a library").unwrap();
    refused(&folder, &["cannot load", "libQnnHtp.so"]);
    fs::remove_file(&file).unwrap();
    crate::fake::compile("int something_else(void) { return 1; }", &file);
    refused(&folder, &["is not a QNN library"]);
}

#[test]
fn old_new_and_other_interfaces() {
    let cases: [(Fake, &[&str]); 4] = [
        (Fake { core: (2, 21), ..Fake::default() }, &["version 2.21.0", "needs 2.32"]),
        (Fake { core: (3, 0), ..Fake::default() }, &["version 3.0.0", "needs 2.32"]),
        (Fake { backend: 4, ..Fake::default() }, &["`FAKE` (backend 4)", "not for the Hexagon processor"]),
        (Fake { providers: 0, ..Fake::default() }, &["provides no interface"]),
    ];
    for (fake, expected) in cases {
        let folder = TempDir::new().unwrap();
        fake.build(folder.path());
        refused(&folder, expected);
    }
}

#[test]
fn a_device_that_cannot_be_opened_is_reported_when_it_is_needed() {
    let folder = TempDir::new().unwrap();
    Fake::default().build(folder.path());
    let library = Library::open(Some(folder.path())).unwrap();
    assert_eq!(library.build().to_string(), "QAIRT 2.51.0");
    // Nothing is opened yet: every function of this library fails.
    let device = library.device(Arch::V81);
    let error = device.compile(&[identity()], &CompileOptions::default()).err().expect("nothing works").to_string();
    assert!(error.contains("QNN logCreate failed") && error.contains("error 1000"), "{error}");
    let error = library.inspect("a.bin", &[0; 16]).unwrap_err().to_string();
    assert!(error.contains("libQnnSystem.so") && error.contains("no such file"), "{error}");
}

/// A binary's metadata is enough to tell that it will not load.
#[test]
fn binaries_that_will_not_load_say_why() {
    let folder = TempDir::new().unwrap();
    Fake::default().build(folder.path());
    let library = Library::open(Some(folder.path())).unwrap();
    let compiled = |vtcm_mb: u32| Compiled { vtcm_bytes: vtcm_mb << 20, optimization: 3, dlbc: false, hvx_threads: 4, spill_fill_bytes: 0 };
    let graph = |vtcm_mb| GraphInfo { name: "part0".into(), inputs: vec![], outputs: vec![], compiled: Some(compiled(vtcm_mb)) };
    let good = Metadata {
        build: library.build().clone(),
        core_version: (2, 37, 0),
        arch: 81,
        soc_model: Arch::V81.soc_model(),
        graphs: vec![graph(8)],
        shared_weights: false,
    };
    assert_eq!(good.obstacle(&library, Arch::V81), None);
    let obstacle = |metadata: Metadata, arch| metadata.obstacle(&library, arch).unwrap();
    assert!(obstacle(good.clone(), Arch::V79).contains("was compiled for Hexagon v81, but this processor is v79"));
    let large = obstacle(Metadata { graphs: vec![graph(8), graph(16)], ..good.clone() }, Arch::V81);
    assert!(large.contains("`part0` needs 16 MiB of VTCM, but v81 has 8 MiB"), "{large}");
    let newer = obstacle(Metadata { build: Build { release: Some((2, 99, 0)), text: "v2.99.0.1".into() }, ..good }, Arch::V81);
    assert!(newer.contains("compiled with QAIRT 2.99.0, but the library is the older QAIRT 2.51.0"), "{newer}");
}

#[test]
fn wrong_settings_and_graphs_do_not_reach_the_library() {
    let folder = TempDir::new().unwrap();
    Fake::default().build(folder.path());
    let device = Library::open(Some(folder.path())).unwrap().device(Arch::V79);
    let compile = |graphs: &[graph::Graph], options: CompileOptions| device.compile(graphs, &options).err().expect("refused").to_string();
    let options = CompileOptions::default();
    assert!(compile(&[identity()], CompileOptions { vtcm_mb: 16, ..options }).contains("v79 has 8"));
    assert!(compile(&[identity()], CompileOptions { optimization: 0, ..options }).contains("optimisation 0"));
    assert!(compile(&[], options).contains("without graphs"));
    assert!(compile(&[identity(), identity()], options).contains("two graphs"));
    let mut wrong = identity();
    wrong.tensors[1].dims = vec![5];
    assert!(compile(&[wrong], options).contains("graph `identity`, Relu `node`"));
}

/// What the library prints while it is opened must not reach our output, and what we print must.
#[test]
fn prints_of_the_library_stay_off_our_output() {
    const FOLDER: &str = "QHX_TEST_FAKE_FOLDER";
    if let Some(folder) = env::var_os(FOLDER) {
        std::io::stdout().write_all(b"before\n").unwrap();
        Library::open(Some(folder.as_ref())).unwrap();
        std::io::stdout().write_all(b"after\n").unwrap();
        return;
    }
    let folder = TempDir::new().unwrap();
    Fake::default().build(folder.path());
    let mut child = Command::new(env::current_exe().unwrap());
    child
        .args(["--exact", "libraries::prints_of_the_library_stay_off_our_output", "--nocapture"])
        .env(FOLDER, folder.path())
        .stderr(Stdio::null());
    let printed = String::from_utf8(child.output().unwrap().stdout).unwrap();
    assert!(printed.contains("before\nafter\n") && !printed.contains("by the library") && !printed.contains("put by it"), "{printed}");
}

fn identity() -> graph::Graph {
    let tensor = |name: &str, role| graph::Tensor {
        name: name.into(),
        role,
        dtype: graph::DataType::F16,
        dims: vec![4],
        quantization: graph::Quantization::None,
    };
    let node = graph::Node {
        name: "node".into(),
        kind: "Relu",
        parameters: vec![],
        inputs: vec![graph::TensorId(0)],
        outputs: vec![graph::TensorId(1)],
    };
    graph::Graph {
        name: "identity".into(),
        tensors: vec![tensor("x", graph::Role::Input), tensor("y", graph::Role::Output)],
        nodes: vec![node],
    }
}

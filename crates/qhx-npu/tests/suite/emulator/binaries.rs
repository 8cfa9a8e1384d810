//! Context binaries: what they tell, and those that must not be loaded.

use crate::{emulator::support::*, fake::Fake};
use qhx_npu::{
    Arch, Context, Device, Expected, ExpectedGraph, ExpectedTensor, Library,
    graph::{DataType, Graph},
};
use sha2::{Digest, Sha256};
use std::path::Path;
use tempfile::TempDir;

pub(crate) fn graph() -> Graph {
    let mut pen = Pen::new("linear");
    let input = pen.input("x", &[2, 64]);
    let weight = pen.constant("w", &[32, 64], &noise(32 * 64, 11));
    let output = pen.output("y", &[2, 32]);
    pen.node("FullyConnected", &[], &[input, weight], &[output]);
    pen.0
}

/// All that a manifest knows of the binary.
fn expected(binary: &[u8]) -> Expected {
    let tensor = |name: &str, dims: &[u32]| ExpectedTensor { name: name.into(), dtype: DataType::F16, dims: dims.into() };
    Expected {
        name: "linear.bin".into(),
        bytes: Some(binary.len() as u64),
        sha256: Some(Sha256::digest(binary).into()),
        graphs: vec![ExpectedGraph { name: "linear".into(), inputs: vec![tensor("x", &[2, 64])], outputs: vec![tensor("y", &[2, 32])] }],
    }
}

fn refused(device: &Device, binary: &[u8], expected: &Expected, parts: &[&str]) {
    let error = device.load(binary, expected).err().expect("refused").to_string();
    for part in parts {
        assert!(error.contains(part), "{error} does not say: {part}");
    }
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn a_binary_tells_what_it_is_and_runs_the_same() {
    for arch in Arch::ALL {
        let device = device(arch);
        let context = compile(&device, &graph());
        let x = f16_bytes(&noise(2 * 64, 12));
        let before = execute(&context, &[("x", &x)]);
        let binary = context.binary().unwrap();
        let metadata = device.library().inspect("linear.bin", &binary).unwrap();
        assert_eq!((metadata.arch, metadata.soc_model), (arch.number(), arch.soc_model()));
        assert_eq!(metadata.build, *device.library().build());
        assert!(!metadata.shared_weights);
        let found = &metadata.graphs[0];
        assert_eq!((&*found.name, &*found.inputs[0].name, &*found.inputs[0].dims), ("linear", "x", &[2, 64][..]));
        assert_eq!((found.outputs.len(), found.outputs[0].dtype), (1, Some(DataType::F16)));
        let compiled = found.compiled.unwrap();
        assert_eq!((compiled.vtcm_bytes, compiled.optimization, compiled.hvx_threads), (8 << 20, 3, 4));
        let loaded = device.load(&binary, &expected(&binary)).unwrap_or_else(|e| panic!("{e}"));
        assert!(execute(&loaded, &[("x", &x)]) == before, "{arch}");
    }
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn damaged_files() {
    let device = device(Arch::V81);
    let binary = compile(&device, &graph()).binary().unwrap();
    let known = expected(&binary);
    let nothing = Expected { name: "linear.bin".into(), ..Expected::default() };
    let short = &binary[..binary.len() - 64];
    refused(&device, short, &known, &["linear.bin", "bytes", "were expected", "copy it again"]);
    refused(&device, short, &nothing, &["not a complete context binary", "copy it again"]);
    refused(&device, &[], &nothing, &["it is empty"]);
    refused(&device, &[0; 4096], &nothing, &["not a complete context binary"]);
    refused(&device, b"<html>", &nothing, &["not a complete context binary"]);
    let mut flipped = binary.clone();
    // Among the weights: the library itself would not notice.
    let place = binary.len() - 1000;
    flipped[place] ^= 0x40;
    refused(&device, &flipped, &known, &["its SHA-256 is", "was expected", "it is damaged"]);
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn files_of_something_else() {
    let (old, new) = (device(Arch::V79), device(Arch::V81));
    let binary = compile(&old, &graph()).binary().unwrap();
    let known = expected(&binary);
    // The emulator itself would take it.
    refused(&new, &binary, &known, &["compiled for Hexagon v79", "this processor is v81", "forge it for v81"]);
    let binary_v81 = compile(&new, &graph()).binary().unwrap();
    refused(&old, &binary_v81, &Expected::default(), &["compiled for Hexagon v81", "this processor is v79"]);
    let with = |change: &dyn Fn(&mut ExpectedGraph)| {
        let mut expected = known.clone();
        change(&mut expected.graphs[0]);
        expected
    };
    let more = |g: &mut ExpectedGraph| g.inputs.push(ExpectedTensor { name: "mask".into(), ..g.inputs[0].clone() });
    let cases: [(Expected, &str); 5] = [
        (with(&more), "graph `linear`: input `mask` is missing"),
        (with(&|g| g.outputs.clear()), "output `y` was not expected"),
        (with(&|g| g.inputs[0].dims = vec![1, 64]), "`x` has shape [2, 64], but [1, 64] was expected"),
        (with(&|g| g.inputs[0].dtype = DataType::F32), "`x` has type 0x216, but F32 was expected"),
        (with(&|g| g.name = "decode".into()), "has no graph `decode` (it has linear)"),
    ];
    for (expected, part) in cases {
        refused(&old, &binary, &expected, &[part, "another manifest"]);
    }
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn files_on_disk() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("linear.bin");
    let device = device(Arch::V79);
    let error = |file: &Path| device.load_file(file, &Expected::default()).err().expect("refused").to_string();
    assert!(error(&file).contains("linear.bin: cannot be read: No such file"), "{}", error(&file));
    std::fs::write(&file, "").unwrap();
    assert!(error(&file).contains("the file is empty"), "{}", error(&file));
    assert!(error(folder.path()).contains("cannot be read"), "{}", error(folder.path()));
    let context: Context = compile(&device, &graph());
    let bytes = context.save(&file).unwrap();
    let binary = std::fs::read(&file).unwrap();
    assert!(binary.len() as u64 == bytes && binary == context.binary().unwrap());
    device.load_file(&file, &expected(&binary)).unwrap_or_else(|e| panic!("{e}"));
}

/// The library would say 5000 and nothing more.
#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn a_library_older_than_the_binary() {
    let binary = compile(&device(Arch::V81), &graph()).binary().unwrap();
    let folder = TempDir::new().unwrap();
    let htp = Fake { core: (2, 36), build: "v2.47.0.260601", ..Fake::default() }.build(folder.path());
    let system = Path::new(&std::env::var_os("QHX_QNN_DIR").unwrap()).join("libQnnSystem.so");
    let library = Library::open_files(&htp, &system).unwrap();
    refused(&library.device(Arch::V81), &binary, &expected(&binary), &["QAIRT 2.51.0", "the older QAIRT 2.47.0", "use the libraries of"]);
}

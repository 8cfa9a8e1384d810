//! `qhx doctor`: machines, bundles and context binaries, whole and damaged.

use crate::common::{Ran, bundle, bundle_copy, fail, fixture, qhx, ran, scratch};
use serde_json::Value;
use std::{ffi::OsStr, fs, path::Path};

/// Runs it with QNN's libraries in a folder (an empty one has none) and gives its JSON.
fn doctor(arguments: &[&OsStr], libraries: &Path, code: i32) -> Value {
    let mut command = qhx([OsStr::new("doctor")].iter().chain(arguments));
    let ran: Ran = ran(command.args(["--json", "--qnn-dir"]).arg(libraries).output().unwrap());
    assert_eq!(ran.code, Some(code), "{ran:?}");
    serde_json::from_str(&ran.stdout).unwrap_or_else(|e| panic!("{e}: {ran:?}"))
}

fn device<'a>(report: &'a Value, name: &str) -> &'a Value {
    let devices = report["devices"].as_array().unwrap();
    devices.iter().find(|device| device["device"] == name).unwrap_or_else(|| panic!("{name} in {report}"))
}

fn finding<'a>(device: &'a Value, subject: &str) -> &'a Value {
    let findings = device["findings"].as_array().unwrap();
    findings.iter().find(|finding| finding["subject"] == subject).unwrap_or_else(|| panic!("{subject} in {device}"))
}

#[test]
fn a_machine_alone() {
    let folder = scratch();
    let report = doctor(&[], folder.path(), 0);
    assert_eq!(report["bundle"], Value::Null);
    assert_eq!(device(&report, "cpu")["ready"], cfg!(feature = "cpu"));
    let npu = device(&report, "npu");
    assert_eq!(npu["ready"], false);
    assert!(finding(npu, "libQnnHtp.so")["found"].as_str().unwrap().contains("there is no such file"), "{npu}");
    let text = ran(qhx(["doctor", "--qnn-dir"]).arg(folder.path()).output().unwrap());
    assert!(text.code == Some(0) && text.stdout.contains("npu: not available\n"), "{text:?}");
}

#[test]
#[cfg(feature = "cpu")]
fn a_bundle_for_the_processor() {
    let folder = scratch();
    let report = doctor(&[bundle("llama").as_ref()], folder.path(), 0);
    let cpu = device(&report, "cpu");
    assert_eq!(cpu["ready"], true, "{cpu}");
    assert!(finding(cpu, "files")["found"].as_str().unwrap().contains("match"), "{cpu}");
    assert_eq!(finding(cpu, "memory")["state"], "fine");
    let npu = device(&report, "npu");
    assert!(finding(npu, "context binaries")["advice"].as_str().unwrap().contains("--target v79,v81"), "{npu}");
}

#[test]
fn what_is_no_bundle_is_loaded_by_nothing() {
    let folder = scratch();
    fs::write(folder.path().join("notes.txt"), "x").unwrap();
    for path in [folder.path(), &folder.path().join("notes.txt"), Path::new("/dev/null")] {
        let report = doctor(&[path.as_ref()], folder.path(), 1);
        for device in report["devices"].as_array().unwrap() {
            assert_eq!(device["ready"], false, "{}: {device}", path.display());
        }
    }
}

/// A manifest that was published for another runtime, beside its context binary.
#[test]
fn manifests_of_another_runtime_are_told_as_that() {
    let folder = scratch();
    let manifest = folder.path().join("lfm.json");
    let content = r#"{"schema_version": 1, "model": {"name": "lfm", "family": "llm", "dsp_arch": "v79", "tokenizer_pre": "lfm"},
        "artifacts": {"contexts": {"shared": {"bin": "lfm_shared.bin"}}}, "plan": {"steps": [{"host": "lfm_generate"}]}}"#;
    fs::write(&manifest, content).unwrap();
    fs::write(folder.path().join("lfm_shared.bin"), "x").unwrap();
    let libraries = scratch();
    let report = doctor(&[manifest.as_ref()], libraries.path(), 1);
    let npu = device(&report, "npu");
    assert!(finding(npu, "bundle")["found"].as_str().unwrap().contains("another runtime"), "{npu}");
    assert!(finding(npu, "bundle")["advice"].as_str().unwrap().contains("checkpoint"), "{npu}");
    assert!(finding(npu, "lfm_shared.bin")["found"].as_str().unwrap().contains("metadata cannot be read"), "{npu}");
    let told =
        fail(["generate", manifest.to_str().unwrap(), "--prompt", "x"], 1, &["another runtime", "model.tokenizer_pre", "checkpoint"]);
    assert!(!told.stderr.contains("forge again"), "{told:?}");
}

#[test]
fn damage_is_named_and_no_device_takes_it() {
    let folder = scratch();
    let damaged = bundle_copy("llama", folder.path());
    let weights = fs::read_dir(damaged.join("weights")).unwrap().next().unwrap().unwrap().path();
    let mut bytes = fs::read(&weights).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&weights, bytes).unwrap();
    let report = doctor(&[damaged.as_ref()], folder.path(), 1);
    let cpu = device(&report, "cpu");
    let name = weights.file_name().unwrap().to_str().unwrap();
    let told = cpu["findings"].as_array().unwrap().iter().any(|f| f["state"] == "wrong" && f["found"].as_str().unwrap().contains(name));
    assert!(cfg!(not(feature = "cpu")) || told, "{cpu}");
    // A checkpoint runs, and is made a bundle of when it does.
    let report = doctor(&[fixture("llama").as_ref()], folder.path(), if cfg!(feature = "cpu") { 0 } else { 1 });
    assert_eq!(finding(device(&report, "cpu"), "checkpoint")["state"], "fine", "{report}");
    assert!(finding(device(&report, "npu"), "arch folder")["advice"].as_str().unwrap().contains("qhx forge"), "{report}");
    fail(["doctor", "no/such/bundle"], 1, &["no/such/bundle does not exist"]);
}

#[test]
#[cfg(feature = "cpu")]
fn a_gguf_file_will_load_and_a_part_of_it_will_not() {
    let folder = scratch();
    let (whole, part) = (fixture("llama-gguf").join("model.gguf"), folder.path().join("part.gguf"));
    let report = doctor(&[whole.as_ref()], folder.path(), 0);
    let cpu = device(&report, "cpu");
    assert!(cpu["ready"] == true && finding(cpu, "memory")["state"] == "fine", "{cpu}");
    let bytes = fs::read(whole).unwrap();
    fs::write(&part, &bytes[..bytes.len() / 2]).unwrap();
    let report = doctor(&[part.as_ref()], folder.path(), 1);
    for name in ["cpu", "gpu", "npu"] {
        assert_eq!(device(&report, name)["ready"], false, "{report}");
    }
    assert!(finding(device(&report, "cpu"), "checkpoint")["found"].as_str().unwrap().contains("part.gguf"), "{report}");
}

/// Context binaries that QNN's own library made.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod contexts {
    use super::*;
    use qhx_npu::{
        Arch, CompileOptions, Library,
        graph::{DataType, Graph, Node, Quantization, Role, Tensor, TensorId},
    };

    fn write(file: &Path, arch: Arch) {
        let tensor = |name: &str, role| {
            let (dtype, dims, quantization) = (DataType::F16, vec![8], Quantization::None);
            Tensor { name: name.into(), role, dtype, dims, quantization }
        };
        let (inputs, outputs) = (vec![TensorId(0)], vec![TensorId(1)]);
        let node = Node { name: "node".into(), kind: "Relu", parameters: vec![], inputs, outputs };
        let tensors = vec![tensor("x", Role::Input), tensor("y", Role::Output)];
        let graph = Graph { name: "decode".into(), tensors, nodes: vec![node] };
        let libraries = std::env::var_os("QHX_QNN_DIR").expect("QHX_QNN_DIR names the folder with libQnnHtp.so");
        let device = Library::open(Some(libraries.as_ref())).unwrap_or_else(|e| panic!("{e}")).device(arch);
        device.compile(&[graph], &CompileOptions::default()).unwrap().save(file).unwrap();
    }

    #[test]
    #[ignore = "needs QNN: cargo xtask test npu"]
    fn are_looked_into_before_they_are_loaded() {
        let libraries = std::env::var_os("QHX_QNN_DIR").expect("QHX_QNN_DIR names the folder with libQnnHtp.so");
        let libraries = Path::new(&libraries);
        let folder = scratch();
        let file = folder.path().join("v81/decode.bin");
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        write(&file, Arch::V81);
        let report = doctor(&[file.as_ref()], libraries, 0);
        let npu = device(&report, "npu");
        let found = npu["findings"].as_array().unwrap().last().unwrap()["found"].as_str().unwrap();
        assert!(npu["ready"] == true && found.contains("Hexagon v81, made with QAIRT 2.") && found.contains("1 graphs"), "{npu}");
        // The library of the emulator takes both generations; a manifest that names another file is not content.
        fs::write(folder.path().join("v81/model.json"), r#"{"plan": ["decode.bin", "prefill.bin"]}"#).unwrap();
        let report = doctor(&[folder.path().as_ref()], libraries, 1);
        assert_eq!(finding(device(&report, "npu"), "v81/decode.bin")["state"], "fine");
        assert!(finding(device(&report, "npu"), "v81/prefill.bin")["found"].as_str().unwrap().contains("is missing"));
        let binary = fs::read(&file).unwrap();
        fs::write(&file, &binary[..binary.len() / 2]).unwrap();
        let report = doctor(&[file.as_ref()], libraries, 1);
        let npu = device(&report, "npu");
        assert!(npu["findings"].to_string().contains("not a complete context binary"), "{npu}");
    }
}

//! The harness against cases that fail in every way: it notices, names and survives each. And what it shares with the fuzz targets.

use qhx_attack::probes::PROBES;
use std::{fs, path::Path, process::Command};

fn attack(arguments: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_qhx-attack")).args(arguments).output().unwrap();
    (output.status.code(), String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap())
}

#[test]
fn every_kind_of_fault_is_noticed() {
    // The first cases of this seed have every fault. A busy loop takes one second of CPU time, a blocked one six seconds.
    let (code, said) = attack(&["faults", "--seed", "1", "--cases", "46", "--limit", "1", "--json"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("\"cases\":46"), "{said}");
    for expected in ["a panic", "overflowed its stack", "memory allocation", "of CPU time", "did not end within", "ended in two ways"] {
        assert!(said.contains(expected), "{expected}: {said}");
    }
}

#[test]
fn wrong_usage_is_told() {
    for (arguments, expected) in [
        (&["nothing"][..], "there is no class \"nothing\""),
        (&["gguf", "--seconds"], "--seconds needs a number"),
        (&["--seconds", "0"], "must be 1 to 86400"),
        (&["--case", "3"], "--case needs the one class"),
    ] {
        let (code, said) = attack(arguments);
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains(expected), "{said}");
    }
    assert_eq!(attack(&["--help"]).0, Some(0));
}

/// Each fuzz target is a probe, and each probe has a target that calls it.
#[test]
fn fuzz_targets_are_the_probes() {
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz");
    let manifest = fs::read_to_string(fuzz.join("Cargo.toml")).unwrap();
    let targets: Vec<&str> = manifest.split("[[bin]]\nname = \"").skip(1).map(|rest| rest.split('"').next().unwrap_or_default()).collect();
    assert_eq!(targets, PROBES.map(|(name, _)| name));
    for name in targets {
        let code = fs::read_to_string(fuzz.join(format!("fuzz_targets/{name}.rs"))).unwrap();
        assert!(code.contains(&format!("qhx_attack::probes::{name}(bytes)")), "{name}: {code}");
    }
}

/// Fuzzers start from files that are accepted.
#[test]
fn every_probe_accepts_its_seeds() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("corpus");
    let (code, said) = attack(&["corpus", folder.to_str().unwrap()]);
    assert_eq!(code, Some(0), "{said}");
    for (name, probe) in PROBES {
        let seeds = fs::read_dir(folder.join(name)).unwrap().map(|entry| fs::read(entry.unwrap().path()).unwrap());
        let outcomes: Vec<_> = seeds.map(|seed| probe(&seed)).collect();
        let accepted = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
        // Images are no sounds, and some files test what is refused.
        assert!(accepted >= 2 && 4 * accepted >= outcomes.len(), "{name}: {outcomes:?}");
    }
}

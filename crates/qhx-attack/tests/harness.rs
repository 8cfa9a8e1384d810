//! The harness against cases that fail in every way: it notices, names and survives each.

use std::process::Command;

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
